"""How GLM and DeepSeek-V3.2 write conversations: outputs, in any cut, and prompts, by examples of their formats."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hisparse.http.apis.asks import Served, ask_of
from hisparse.http.apis.body import read_body
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.models.formats.arguments import json_or_quoted, typed, types_of
from hisparse.http.models.formats.conversation import (
    Conversation,
    PastCall,
    Tool,
    Turn,
    arranged,
    template_messages,
    template_tools,
)
from hisparse.http.models.formats.deepseek import encode
from hisparse.http.models.formats.known import DSML, FORMATS, GLM, HERMES, PLAIN, REASONING, format_of
from hisparse.http.models.formats.replies import Piece, Reasoning, ReplyParser, ReplyPlan, Text, ToolCall, merged
from hisparse.http.models.templates import render
from protocol.text import ByteTokenizer, JsonTokenizer
from tests.hisparse.http.test_bodies_and_answers import MODEL, here
from tests.support.http_rig import byte_tokenizer_json
from tests.support.tiny_templates import TEMPLATES
from worker.families.table import FAMILIES as MODEL_FAMILIES

WEATHER: Final = Tool(
    "get_weather",
    "Weather at a place",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {}}},
)
GLM_PLAN: Final = ReplyPlan(reasons=True, syntax=GLM.syntax, schemas={WEATHER.name: WEATHER.parameters})
HERMES_PLAN: Final = ReplyPlan(reasons=True, syntax=HERMES.syntax)
DSML_PLAN: Final = ReplyPlan(reasons=True, syntax=DSML.syntax)


def read(plan: ReplyPlan, *parts: str) -> list[Piece]:
    """What an output that comes in `parts` says."""
    parser = ReplyParser(plan)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merged([*pieces, *parser.finish()])


def cuts_of(text: str) -> st.SearchStrategy[list[str]]:
    def cut(places: list[int]) -> list[str]:
        borders = [0, *sorted(places), len(text)]
        return [text[a:b] for a, b in pairwise(borders)]

    return st.lists(st.integers(0, len(text)), max_size=12).map(cut)


def dsml(*calls: str) -> str:
    return "<｜DSML｜function_calls>\n" + "\n".join(calls) + "\n</｜DSML｜function_calls>"


def invoke(name: str, *parameters: tuple[str, bool, str]) -> str:
    lines = [
        f'<｜DSML｜parameter name="{key}" string="{str(is_string).lower()}">{value}</｜DSML｜parameter>'
        for key, is_string, value in parameters
    ]
    return "\n".join([f'<｜DSML｜invoke name="{name}">', *lines, "</｜DSML｜invoke>"])


# ---------------------------------------------------------------- outputs of GLM

GLM_CALL: Final = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
#: As GLM-4.5 writes it, on lines.
GLM_LINES: Final = (
    "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
PARIS: Final = ToolCall("get_weather", '{"city": "Paris", "days": 2}')

GLM_CASES: Final[dict[str, tuple[str, list[Piece]]]] = {
    "text": ("Hello.\n", [Text("Hello.\n")]),
    "blanks": ("  \n hi ", [Text("  \n hi ")]),
    "empty": ("", []),
    "call": (GLM_CALL, [PARIS]),
    "call on lines": (GLM_LINES, [PARIS]),
    "calls": (GLM_CALL + "\n" + GLM_LINES, [PARIS, PARIS]),
    "text and calls": ("I look.\n" + GLM_CALL + GLM_CALL, [Text("I look."), PARIS, PARIS]),
    "text after": (GLM_CALL + "\nDone.", [PARIS, Text("Done.")]),
    "reasoning": ("\n<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
    "empty reasoning": ("<think></think>Yes.", [Text("Yes.")]),
    "reasoning and call": ("<think>Hm.</think>" + GLM_CALL, [Reasoning("Hm."), PARIS]),
    "reasoning cut": ("<think>Hm. And ", [Reasoning("Hm. And ")]),
    "call in reasoning": (f"<think>{GLM_CALL}</think>x", [Reasoning(GLM_CALL), Text("x")]),
    "no arguments": ("<tool_call>now</tool_call>", [ToolCall("now", "{}")]),
    "value that holds an end": (
        "<tool_call>w<arg_key>t</arg_key><arg_value></tool_call>\n</arg_value></tool_call>",
        [ToolCall("w", '{"t": "</tool_call>\\n"}')],
    ),
    "named in prose": ("The <tool_call> tag, and <think>.", [Text("The <tool_call> tag, and <think>.")]),
    "prose, then a call": ("A <tool_call> is: " + GLM_CALL, [Text("A <tool_call> is:"), PARIS]),
    "broken off": ("So \n" + GLM_CALL[:-20], [Text("So \n" + GLM_CALL[:-20])]),
    "broken off, quoting a call": (
        "<tool_call>w<arg_key>t</arg_key><arg_value><tool_call>now</tool_call>",
        [Text("<tool_call>w<arg_key>t</arg_key><arg_value><tool_call>now</tool_call>")],
    ),
    "no name": ("<tool_call></tool_call>", [Text("<tool_call></tool_call>")]),
    "JSON, as other models write": (
        '<tool_call>{"name": "x"}</tool_call>',
        [Text('<tool_call>{"name": "x"}</tool_call>')],
    ),
    "key twice": (
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        [
            Text(
                "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"
                "<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"
            )
        ],
    ),
    "unfinished marker": ("a <tool_ca", [Text("a <tool_ca")]),
}


@pytest.mark.parametrize("name", GLM_CASES)
def test_glm_output_is_read(name: str) -> None:
    output, pieces = GLM_CASES[name]
    assert read(GLM_PLAN, output) == pieces
    assert read(GLM_PLAN, *output) == pieces, "one character at a time"


DSML_CALL: Final = invoke("get_weather", ("city", True, "Paris"), ("days", False, "2"))
DSML_CASES: Final[dict[str, tuple[str, list[Piece]]]] = {
    "call": ("\n\n" + dsml(DSML_CALL), [PARIS]),
    "text and calls": ("I look.\n\n" + dsml(DSML_CALL, DSML_CALL), [Text("I look."), PARIS, PARIS]),
    "no arguments": (dsml(invoke("now")), [ToolCall("now", "{}")]),
    "values": (
        dsml(invoke("f", ("s", True, ' "x"\n<y> '), ("l", False, "[1.50, null]"), ("odd", False, "[1,"))),
        [ToolCall("f", '{"s": " \\"x\\"\\n<y> ", "l": [1.50, null], "odd": "[1,"}')],
    ),
    "reasoning": ("<think>Hm.</think>Yes.", [Reasoning("Hm."), Text("Yes.")]),
    "empty block": (dsml(), [Text(dsml())]),
    "broken off": ("x\n\n" + dsml(DSML_CALL)[:-60], [Text("x\n\n" + dsml(DSML_CALL)[:-60])]),
    "broken off after a call": (
        dsml(DSML_CALL, DSML_CALL).removesuffix("invoke>\n</｜DSML｜function_calls>"),
        [PARIS, Text("\n" + DSML_CALL.removesuffix("invoke>"))],
    ),
    "no type": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a">1',
        [Text('<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a">1')],
    ),
}


@pytest.mark.parametrize("name", DSML_CASES)
def test_dsml_output_is_read(name: str) -> None:
    output, pieces = DSML_CASES[name]
    assert read(DSML_PLAN, output) == pieces
    assert read(DSML_PLAN, *output) == pieces, "one character at a time"


PARTS: Final = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
        *('<｜DSML｜parameter name="', '" string="', 'true">', 'false">', "</｜DSML｜parameter>"),
        *("f", "a_b", " ", "\n", "{}", "1", '"', "é", "<", "</", GLM_CALL, DSML_CALL),
    ]
)


@settings(max_examples=400)
@given(st.lists(PARTS, max_size=14).map("".join), st.data(), st.sampled_from([GLM_PLAN, DSML_PLAN]), st.booleans())
def test_any_cut_says_the_same(output: str, data: st.DataObject, plan: ReplyPlan, within: bool) -> None:
    whole_plan = ReplyPlan(plan.reasons, within, plan.syntax, data.draw(st.booleans()), plan.schemas)
    assert read(whole_plan, *data.draw(cuts_of(output))) == read(whole_plan, output)


@settings(max_examples=400)
@given(st.lists(PARTS, max_size=14).map("".join), st.sampled_from([GLM_PLAN, DSML_PLAN]))
def test_nothing_is_lost(output: str, plan: ReplyPlan) -> None:
    """What is no blank is in the text, the reasoning or a call, in order: where no call is read, nothing but the
    markers of reasoning is missing."""
    pieces = read(plan, output)
    told = "".join("" if isinstance(piece, ToolCall) else piece.text for piece in pieces)
    if not any(isinstance(piece, ToolCall) for piece in pieces):
        left = output
        if any(isinstance(piece, Reasoning) for piece in pieces) or left.lstrip().startswith("<think>"):
            left = left.replace("<think>", "", 1).replace("</think>", "", 1)
        assert "".join(told.split()) == "".join(left.split())
    at = 0
    for character in "".join(told.split()):
        at = output.index(character, at) + 1


@given(st.text(max_size=60), st.data())
def test_plain_output_is_its_text(output: str, data: st.DataObject) -> None:
    assert read(ReplyPlan(), *data.draw(cuts_of(output))) == ([Text(output)] if output else [])


@given(
    st.dictionaries(
        st.text("abc_", min_size=1), st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=4
    )
)
def test_dsml_arguments_return_as_they_were_encoded(arguments: dict[str, str]) -> None:
    """What the encoder writes, the reader reads."""
    prompt = encode(
        Conversation((Turn("user", "x"), Turn("assistant", calls=(PastCall("1", "f", arguments),)), Turn("tool", "y")))
    )
    block = prompt[prompt.index("<｜DSML｜function_calls>") : prompt.index("<｜end▁of▁sentence｜>")]
    (call,) = read(DSML_PLAN, block)
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == arguments


def test_second_call_is_text_where_one_is_asked_for() -> None:
    for plan, call, second in (
        (GLM_PLAN, GLM_CALL + GLM_CALL, GLM_CALL),
        (DSML_PLAN, dsml(DSML_CALL, DSML_CALL), DSML_CALL),
    ):
        single = ReplyPlan(plan.reasons, False, plan.syntax, False, plan.schemas)
        first, rest = read(single, call)
        assert first == PARIS
        assert isinstance(rest, Text)
        assert second in rest.text
    assert read(ReplyPlan(True, False, DSML.syntax, False), dsml(DSML_CALL)) == [PARIS]


def test_without_tools_calls_are_text() -> None:
    assert read(ReplyPlan(reasons=True), GLM_CALL) == [Text(GLM_CALL)]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", ("string",), "5"),
        ("5", ("integer",), 5),
        ("5", (), 5),
        (" 5 ", ("number", "string"), 5),
        ("null", ("string", "null"), None),
        ("nul", ("string", "null"), "nul"),
        ('{"a": 1}', ("object",), {"a": 1}),
        ('{"a": 1}', ("string",), '{"a": 1}'),
        ("[1,", ("array",), "[1,"),
        ("true", ("boolean",), True),
        ("True", ("boolean",), "True"),
        ("NaN", ("number",), "NaN"),
        ("[" * 3_000, ("array",), "[" * 3_000),
        ('"x"', (), "x"),
    ],
)
def test_value_has_the_type_of_its_schema(text: str, types: tuple[str, ...], value: Any) -> None:
    assert json.loads(typed(text, frozenset(types))) == value


def test_numbers_keep_their_digits() -> None:
    assert json_or_quoted("1.50") == "1.50"
    assert json_or_quoted("123456789012345678901234567890")[:5] in ("12345", '"1234')


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, set()),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({}, set()),
        (5, set()),
    ],
)
def test_types_are_those_of_the_schema(schema: Any, types: set[str]) -> None:
    assert types_of({"properties": {"a": schema}}, "a") == types


def test_types_of_odd_schemas_are_unknown() -> None:
    assert types_of(None, "a") == types_of({"properties": [1]}, "a") == types_of({}, "a") == set()


# ---------------------------------------------------------------- prompts of DeepSeek-V3.2

#: A conversation in the form that DeepSeek-V3.2 reads: tools, two calls and their results, then a new question.
DSML_PROMPT: Final = Path(__file__).with_name("deepseek_v32_prompt.txt")
TIMES: Final = Tool(
    "time_in",
    "Time at a place",
    {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
)


TWO_CALLS: Final = (PastCall("1", "f", {}), PastCall("2", "f", {}))


def conversation() -> Conversation:
    calls = (
        PastCall("b", "time_in", {"zone": "Asia/Tokyo"}),
        PastCall("a", "get_weather", {"city": "Tokyo", "days": 2, "note": None}),
    )
    turns = (
        Turn("system", "Be brief."),
        Turn("user", "Weather in Tokyo?"),
        Turn("assistant", "I look.", "They want Tokyo.", calls),
        Turn("tool", "sunny", call_id="a"),
        Turn("tool", "noon", call_id="b"),
        Turn("assistant", "Sunny, at noon.", "Both are here."),
        Turn("user", "And tomorrow?"),
        Turn("assistant", "", "I ask again.", (PastCall("c", "get_weather", {"city": "東京"}),)),
        Turn("tool", "rain", call_id="c"),
    )
    return Conversation(turns, (TIMES, WEATHER), thinking=True)


def test_deepseek_prompt_is_that_of_its_format() -> None:
    assert encode(conversation()) + "\n" == DSML_PROMPT.read_text()


def test_deepseek_prompt_without_thinking_closes_it() -> None:
    prompt = encode(Conversation((Turn("user", "a"), Turn("assistant", "b", "c"), Turn("user", "d"))))
    assert prompt == (
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜><｜User｜>d<｜Assistant｜></think>"
    )


def test_deepseek_tools_without_a_system_turn_come_first() -> None:
    prompt = encode(Conversation((Turn("user", "a"),), (TIMES,)))
    assert prompt.startswith("<｜begin▁of▁sentence｜>\n\n## Tools\n\nYou have access")
    assert prompt.endswith("</functions>\n<｜User｜>a<｜Assistant｜></think>")


# ---------------------------------------------------------------- chat templates


def rendered(template: str, conversation: Conversation) -> str:
    turns, tools = template_messages(conversation.turns, template), template_tools(conversation.tools)
    return render(template, turns, conversation.all_variables, 1 << 20, lambda form: form, tools)


@pytest.mark.parametrize(
    ("family", "plan"), [("glm-5", GLM_PLAN), ("deepseek-v3.2", DSML_PLAN), ("a.x-k2", HERMES_PLAN)]
)
def test_tiny_templates_render_tools_and_calls_that_are_read_again(family: str, plan: ReplyPlan) -> None:
    prompt = rendered(TEMPLATES[family], conversation())
    assert prompt.rstrip().endswith("<think>")
    for text in ("Be brief.", '"time_in"', "Weather at a place", "They want Tokyo.", "sunny", "rain", "東京"):
        assert text in prompt
    said = prompt[prompt.index("I look.") : prompt.index("noon")]
    calls = [piece for piece in read(plan, said) if isinstance(piece, ToolCall)]
    assert [call.name for call in calls] == ["time_in", "get_weather"]
    assert json.loads(calls[1].arguments) == {"city": "Tokyo", "days": 2, "note": None}
    assert prompt.index("noon") < prompt.index("sunny"), "results are in the order of the calls"


def test_results_that_name_no_call_stay_in_their_order() -> None:
    turns = (
        Turn("assistant", calls=TWO_CALLS),
        Turn("tool", "a"),
        Turn("tool", "b"),
    )
    assert arranged(turns) == turns


def test_tojson_takes_the_arguments_of_published_templates() -> None:
    template = "{{ x | tojson(ensure_ascii=False) }} {{ x | tojson(separators=(',', ':'), sort_keys=True) }}"
    text = render(template, [], {"x": {"b": "é", "a": 1}}, 100, lambda form: form)
    assert text == '{"b": "é", "a": 1} {"a":1,"b":"é"}'


def tokenizer_with(*tokens: str, special: bool = True) -> JsonTokenizer:
    from tokenizers import AddedToken, Tokenizer

    library = Tokenizer.from_str(byte_tokenizer_json().decode())
    library.add_tokens([AddedToken(token, special=special) for token in tokens])
    if special:
        library.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return JsonTokenizer(library.to_str().encode())


def test_format_is_known_by_template_or_tokens() -> None:
    plain = ByteTokenizer()
    assert format_of(TEMPLATES["glm-5"], plain) is GLM
    assert format_of(TEMPLATES["deepseek-v3.2"], plain) == replace(DSML, encode=None)
    assert format_of("{{ messages }}</think>", plain) is REASONING
    assert format_of("{{ messages }}", plain) is PLAIN
    assert format_of("", plain) is None
    assert format_of("", tokenizer_with("<｜User｜>", "<｜Assistant｜>", "｜DSML｜")) is DSML


def test_each_family_has_the_format_that_its_template_names() -> None:
    for family in MODEL_FAMILIES.values():
        known = format_of(family.template, ByteTokenizer())
        assert known == replace(FORMATS[family.chat], encode=None), family.name


def test_markers_have_text_though_they_are_special_tokens() -> None:
    tokenizer = tokenizer_with("<tool_call>", "</tool_call>", "<｜x｜>")
    ids = tokenizer.encode("é<tool_call>now</tool_call><｜x｜>", special=False)
    assert len(ids) == 2 + 1 + 3 + 1 + 1
    assert shown(tokenizer, ids, ()) == "énow"
    assert shown(tokenizer, ids, GLM.markers) == "é<tool_call>now</tool_call>"
    assert shown(tokenizer, ids, tokenizer.special_ids) == "é<tool_call>now</tool_call><｜x｜>"


@pytest.mark.parametrize("special", [True, False])
def test_calls_begin_with_the_token_of_their_marker(special: bool) -> None:
    """Also where the tokenizer has it for an ordinary one: a grammar's text cannot be made of it."""
    tokenizer = tokenizer_with("<tool_call>", "</tool_call>", special=special)
    known = Served(structs.replace(MODEL, chat_template=TEMPLATES["glm-5"], vocab_size=300), tokenizer)
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "time"}}],
        "tool_choice": "required",
    }
    form = ask_of(read_body(json.dumps(body).encode(), ChatBody).generation(), known, "a", here).form
    assert form is not None
    (token,) = tokenizer.encode("<tool_call>", special=False)
    assert f"<[{token}]>" in form.lark


def shown(tokenizer: JsonTokenizer, ids: list[int], texts: tuple[str, ...]) -> str:
    detokenizer = tokenizer.detokenizer(texts)
    return "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
