"""What bodies ask of the form of an output, as grammars: outputs drawn from them validate, and others are refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import jsonschema
import pytest
from msgspec.structs import replace

from hisparse.http.apis.anthropic.bodies import MessagesBody
from hisparse.http.apis.asks import Ask, ask_of
from hisparse.http.apis.body import read_body
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.apis.responses.bodies import ResponsesBody
from hisparse.http.models.formats.replies import Reasoning, ReplyParser, Text, ToolCall, merged
from hisparse.http.models.grammar_checks import GrammarChecks
from protocol.errors import BadInput
from protocol.grammar_trials import MEMORY_BYTES_MAX
from protocol.text import JsonTokenizer
from tests.hisparse.http.models.asker import Asker, asker
from tests.hisparse.http.test_bodies_and_answers import here, served
from tests.support.hostile_schemas import CHAIN
from tests.support.http_rig import byte_tokenizer_json
from tests.support.tiny_templates import TEMPLATES
from tests.support.walks import walk

SEEDS: Final = range(12)
USER: Final = {"role": "user", "content": "x"}
CITY: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "unit": {"enum": ["C", "F", 3]},
        "days": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        "short": {"type": "string", "maxLength": 3},
        "place": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["city", "unit", "place", "code"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "tag": {"enum": ["a", "b"]},
    },
}
NOTHING: Final = {"type": "object", "properties": {}}
TOOLS: Final = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": NOTHING}},
]
SCHEMAS: Final = {"weather": CITY, "time": NOTHING}


@pytest.fixture(scope="module")
def ask() -> Iterator[Asker]:
    with asker() as made:
        yield made


def texts(made: Ask, ends_after: int = 30) -> list[str]:
    grammar = made.choices[0].sampling.grammar
    assert grammar
    found = [walk(grammar, seed, ends_after=ends_after, most=4_000) for seed in SEEDS]
    ended = [text for text in found if text]
    assert len(ended) >= 0.95 * len(found)
    return ended


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("said", "matches"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"structured_outputs": {"json": CITY}}, CITY),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, CITY),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}}, CITY),
    ],
    ids=["object", "schema", "text of a schema", "vLLM's object", "named schema"],
)
def test_json_is_valid_under_the_schema(ask: Asker, said: dict[str, Any], matches: dict[str, Any]) -> None:
    for kind, body in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [USER], "reasoning_effort": "none"})):
        for text in texts(ask(kind, **body, **said)):
            jsonschema.validate(json.loads(text), matches)


@pytest.mark.parametrize(
    ("said", "pattern"),
    [
        ({"regex": r"\d{3}/[a-c\n]+é?"}, r"\d{3}/[a-c\n]+é?"),
        ({"choice": ["yes", 'n"o', "a\nb", "é😀"]}, 'yes|n"o|a\nb|é😀'),
        ({"grammar": 'start: "a" b+\nb: "x" | "y"\n'}, "a[xy]+"),
        ({"grammar": 'root ::= "a" b+\nb ::= "x" | "y"\n'}, "a[xy]+"),
    ],
    ids=str,
)
def test_texts_are_those_of_the_grammar(ask: Asker, said: dict[str, Any], pattern: str) -> None:
    for body in ({"prompt": "x"},):
        found = texts(ask(CompletionBody, **body, structured_outputs=said), 6)
        assert all(re.fullmatch(pattern, text) for text in found), found
    found = texts(ask(ChatBody, messages=[USER], structured_outputs=said, reasoning_effort="none"), 6)
    assert all(re.fullmatch(pattern, text) for text in found), found


def test_reply_may_reason_before(ask: Asker) -> None:
    """Within reasoning that the prompt has opened it must end it; else it may begin some, unless that is unwanted."""
    said = {"messages": [USER], "structured_outputs": {"choice": ["yes"]}}
    within = ask(ChatBody, **said, reasoning_effort="high")
    for text in texts(within):
        assert re.fullmatch(r"(.|\n)*</think>[ \n]{0,4}yes", text)
        assert [type(it) for it in parsed(within, text)][-1:] == [Text]
    assert set(texts(ask(ChatBody, **said, reasoning_effort="none"))) == {"yes"}
    assert {text[0] for text in texts(ask(ChatBody, **said))} == {"y", "<"}
    assert set(texts(ask(ChatBody, "deepseek-v3.2", **said))) == {"yes"}


def parsed(made: Ask, text: str) -> list[Any]:
    parser = ReplyParser(made.plan)
    return merged([*parser.push(text), *parser.finish(ended_itself=True)])


#: One of each kind of keyword that the library claims, after JSON Schema's own suite.
KEYWORDS: Final[dict[str, dict[str, Any]]] = {
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 12}]},
    "anyOf": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "boolean"}, {"type": "null"}]},
    "const": {"const": {"a": [1, "é", None]}},
    "enum": {"enum": ["x", 2, None, {"b": True}]},
    "exclusive ranges": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "prefixItems": {"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": False, "minItems": 2},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-c]+$"}]},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^x?[0-9]{3}$"},
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "object", "properties": {"l": {"$ref": "#/$defs/tree"}}}},
    },
    "additionalProperties": {"type": "object", "additionalProperties": {"enum": [1, 2]}, "required": ["k"]},
    "types": {"type": ["integer", "array", "null"], "items": {"type": "boolean"}},
}


@pytest.mark.parametrize("word", KEYWORDS)
def test_outputs_are_valid_under_each_keyword(ask: Asker, word: str) -> None:
    schema = KEYWORDS[word]
    made = ask(CompletionBody, prompt="x", structured_outputs={"json": schema})
    for text in texts(made, 12):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_call_has_arguments_by_the_schema(ask: Asker, family: str, parallel: bool) -> None:
    said = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel, "reasoning_effort": "none"}
    made = ask(ChatBody, family, messages=[USER], **said)
    names: set[str] = set()
    for text in texts(made):
        pieces = parsed(made, text)
        assert pieces
        assert all(isinstance(it, ToolCall) for it in pieces), (text, pieces)
        assert parallel or len(pieces) == 1
        for call in pieces:
            names.add(call.name)
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert names == set(SCHEMAS)


@pytest.mark.parametrize("family", TEMPLATES)
def test_named_tool_is_called_once(ask: Asker, family: str) -> None:
    choice = {"type": "function", "function": {"name": "time"}}
    for kind, body in (
        (ChatBody, {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "reasoning_effort": "none"}),
        (
            MessagesBody,
            {
                "messages": [USER],
                "max_tokens": 9,
                "thinking": {"type": "disabled"},
                "tools": [{"name": "time", "input_schema": NOTHING}],
                "tool_choice": {"type": "tool", "name": "time"},
            },
        ),
        (
            ResponsesBody,
            {
                "input": "x",
                "reasoning": {"effort": "none"},
                "tools": [{"type": "function", "name": "time", "parameters": NOTHING}],
                "tool_choice": {"type": "function", "name": "time"},
            },
        ),
    ):
        made = ask(kind, family, **body)
        for text in texts(made):
            assert parsed(made, text) == [ToolCall("time", "{}")]


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_by_a_schema_or_calls(ask: Asker, family: str) -> None:
    """Tools that may be called, and a form of the text: either."""
    said = {"tools": TOOLS[1:], "response_format": {"type": "json_object"}, "reasoning_effort": "high"}
    made = ask(ChatBody, family, messages=[USER], **({"chat_template_kwargs": {"thinking": True}} | said))
    kinds = set()
    for text in texts(made):
        pieces = [it for it in parsed(made, text) if not isinstance(it, Reasoning)]
        kinds |= {type(it) for it in pieces}
        assert all(it == ToolCall("time", "{}") or json.loads(it.text) is not None for it in pieces)
    assert kinds == {Text, ToolCall}


def test_anthropic_and_responses_take_schemas(ask: Asker) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    off = {"type": "disabled"}
    messages = ask(MessagesBody, messages=[USER], max_tokens=9, output_config=form, thinking=off)
    responses = ask(
        ResponsesBody,
        input="x",
        text={"format": {"type": "json_schema", "name": "n", "schema": CITY, "strict": True}},
        reasoning={"effort": "none"},
    )
    for made in (messages, responses):
        for text in texts(made):
            jsonschema.validate(json.loads(text), CITY)


# ---------------------------------------------------------------- refusals


def test_descriptions_and_titles_are_no_part_of_a_grammar(ask: Asker) -> None:
    """But members of that name are."""
    schema = {"title": "t" * 50_000, "properties": {"title": {"description": "d" * 50_000, "type": "string"}}}
    grammar = ask(CompletionBody, prompt="x", structured_outputs={"json": schema}).choices[0].sampling.grammar
    assert '{"properties": {"title": {"type": "string"}}' in grammar


BAD: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "two": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    "none": ({"structured_outputs": {}}, "structured_outputs", "holds nothing"),
    "beside": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "comes beside response_format",
    ),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    "choice": ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "empty text"),
    "Lark": ({"structured_outputs": {"grammar": 'start: "a'}}, "structured_outputs.grammar", "lexer error"),
    "no grammar": ({"structured_outputs": {"grammar": "???"}}, "structured_outputs.grammar", "neither Lark"),
    "token": ({"structured_outputs": {"grammar": "start: <[9999]>"}}, "structured_outputs.grammar", "too large"),
    "schema": (
        {"structured_outputs": {"json": {"properties": {"a": {"items": {"if": {}}}}}}},
        "structured_outputs.json.properties.a.items",
        'Unimplemented keys: ["if"]',
    ),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "is missing",
    ),
    "guided": ({"guided_json": {"type": "object"}}, "guided_json", "is not supported"),
    "ends": ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "says where an output ends"),
    "early": ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens", "says where an output ends"),
}


@pytest.mark.parametrize("case", BAD)
def test_refusal_names_the_place(ask: Asker, case: str) -> None:
    said, field, words = BAD[case]
    error = ask.refused(CompletionBody, prompt="x", **said)
    assert (error.field, words in error.message) == (field, True), error
    assert error.remedy


@pytest.mark.parametrize(
    ("parameters", "field", "words"),
    [
        ({"anyOf": []}, "tools[0].function.parameters.anyOf", "as a whole"),
        ({"properties": {"a": {"not": {}}}}, "tools[0].function.parameters.properties.a", "no type"),
        ({"properties": {"a": {"type": "array", "items": {"type": "x"}}}}, "", "Invalid type"),
        ({"properties": 5}, "tools[0].function.parameters", "is no JSON schema"),
    ],
    ids=str,
)
def test_tool_that_cannot_be_held_to_is_refused(ask: Asker, parameters: Any, field: str, words: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = ask.refused(ChatBody, messages=[USER], tools=[tool], tool_choice="required")
    assert words in error.message, error
    assert error.field == (field or "tools[0].function.parameters.properties.a.items")
    assert not ask(ChatBody, messages=[USER], tools=[tool]).choices[0].sampling.grammar


def test_choice_of_a_tool_needs_that_tool(ask: Asker) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert ask.refused(ChatBody, messages=[USER], tools=TOOLS, tool_choice=named).field == "tool_choice"
    assert ask.refused(ChatBody, messages=[USER], tool_choice="required").field == "tool_choice"
    error = ask.refused(MessagesBody, messages=[USER], max_tokens=5, tool_choice={"type": "any"})
    assert error.field == "tool_choice.type"
    error = ask.refused(MessagesBody, messages=[USER], max_tokens=5, tool_choice={"type": "tool"})
    assert error.field == "tool_choice.name"


@pytest.mark.parametrize("nothing", [{"enum": []}, {"type": []}, {"anyOf": []}])
def test_argument_without_any_value_is_refused(ask: Asker, nothing: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": nothing}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    error = ask.refused(ChatBody, messages=[USER], tools=tools, tool_choice="required")
    assert error.field == "tools[0].function.parameters.properties.a"
    assert "allows no value" in error.message


def test_grammar_beyond_limits_is_refused_and_the_next_is_built() -> None:
    checks = GrammarChecks(limit_s=60)
    checks._children._command[-1] = str(MEMORY_BYTES_MAX // 4)  # which it reaches soon on any machine
    ask = Asker(checks)
    error = ask.refused(CompletionBody, prompt="x", structured_outputs={"grammar": CHAIN})
    assert "takes more than 60 s or 1024 MiB to build" in error.message
    assert ask(CompletionBody, prompt="x", structured_outputs={"choice": ["a"]})
    checks.close()


def test_deepest_chain_of_rules_is_built(ask: Asker) -> None:
    """The library recurses for each of them."""
    names = [f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for number in range(5_000)]
    rules = "".join(f"{name}: {following}\n" for name, following in pairwise(names))
    grammar = f"start: {names[0]}\n{rules}{names[-1]}: /a/\n"
    assert ask(CompletionBody, prompt="x", structured_outputs={"grammar": grammar})


def test_tokenizer_may_have_tokens_that_the_model_lacks(ask: Asker) -> None:
    """As published models have them whose tokenizer got a padding token in training."""
    tokenizer, known = JsonTokenizer(byte_tokenizer_json()), served("")
    model = replace(known.model, vocab_size=257, eos_token_ids=(256,))
    known = dataclasses.replace(known, model=model, tokenizer=tokenizer)

    def built(grammar: str) -> str:
        body = json.dumps({"prompt": "x", "structured_outputs": {"grammar": grammar}}).encode()
        form = ask_of(read_body(body, CompletionBody).generation(), known, "a", here).form
        assert form is not None
        return ask.checks.check(form, model, tokenizer)

    assert built("start: <bos> /[a-z]/")
    with pytest.raises(BadInput, match="<eos>"):
        built("start: <eos> /[a-z]/")


def test_grammar_that_is_known_is_not_built_again(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"prompt": "x", "structured_outputs": {"regex": "[a-d]{3}"}}
    before = ask(CompletionBody, **said).choices[0].sampling
    monkeypatch.setattr(ask.checks._children, "ask", lambda *_: pytest.fail("built again"))
    assert ask(CompletionBody, **said).choices[0].sampling == before
