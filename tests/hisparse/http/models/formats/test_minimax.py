"""Calls between tags with a namespace, values that hold tags: outputs in any cut, and the template that shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import pytest

from hisparse.http.models.formats.conversation import Conversation
from hisparse.http.models.formats.known import MINIMAX
from hisparse.http.models.formats.minimax import DEPTH_MAX, NAMESPACE
from hisparse.http.models.formats.replies import Piece, Reasoning, ReplyPlan, Text, ToolCall
from tests.hisparse.http.models.formats.test_formats import PARIS, WEATHER, conversation, read, rendered
from tests.support.tiny_templates import TEMPLATES

TRIP: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
        "tags": {"type": "array", "items": {"type": "string"}},
        "box": {"type": "object", "properties": {"item": {"type": "string"}}},
        "code": {"type": "string"},
    },
    "$defs": {"stop": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}},
}
PLAN: Final = replace(
    MINIMAX.plan(Conversation(()), "]~b]ai\n"),
    syntax=MINIMAX.syntax,
    schemas={WEATHER.name: WEATHER.parameters, "trip": TRIP},
)


def n(text: str) -> str:
    """`text` with the namespace in place of each ~."""
    return text.replace("~", NAMESPACE)


def invoke(name: str, members: str) -> str:
    return n(f'~<invoke name="{name}">{members}~</invoke>\n')


def block(*calls: str) -> str:
    return n(f"~<tool_call>\n{''.join(calls)}~</tool_call>")


WEATHER_CALL: Final = invoke("get_weather", "~<city>Paris~</city>~<days>2~</days>")
STOPS: Final = "~<stops>~<item>~<city>12~</city>~<days>3~</days>~</item>\n~<item>~<city>B~</city>~</item>~</stops>"
CASES: Final[dict[str, tuple[str, list[Piece]]]] = {
    "text": ("Hello ]<] there.\n", [Text("Hello ]<] there.\n")]),
    "call": (block(WEATHER_CALL), [PARIS]),
    "call on lines": (block(invoke("get_weather", "\n~<city>Paris~</city>\n~<days>2~</days>\n")), [PARIS]),
    "text and calls": (f"I look.\n{block(WEATHER_CALL, WEATHER_CALL)}", [Text("I look."), PARIS, PARIS]),
    "no arguments": (block(invoke("now", "")), [ToolCall("now", "{}")]),
    "reasoning and call": (
        f"<mm:think>\nHm. <think>\n</mm:think>\n{block(WEATHER_CALL)}",
        [Reasoning("Hm. <think>"), PARIS],
    ),
    "no reasoning": ("</mm:think>Yes. </mm:think>", [Text("Yes. </mm:think>")]),
    "an end in the text": ("Yes. </mm:think>", [Text("Yes. </mm:think>")]),
    "values within values": (
        block(invoke("trip", f"{STOPS}~<tags>~<item>a~</item>~<item>2~</item>~</tags>")),
        [ToolCall("trip", '{"stops": [{"city": "12", "days": 3}, {"city": "B"}], "tags": ["a", "2"]}')],
    ),
    "objects with a member called item": (
        block(invoke("trip", "~<box>~<item>x~</item>~</box>")),
        [ToolCall("trip", '{"box": {"item": "x"}}')],
    ),
    "empty ones": (
        block(invoke("trip", "~<stops>~</stops>~<box>\n~</box>~<code>~</code>")),
        [ToolCall("trip", '{"stops": [], "box": {}, "code": ""}')],
    ),
    "JSON": (
        block(invoke("trip", '~<stops>[{"days": 1.0}]~</stops>')),
        [ToolCall("trip", '{"stops": [{"days": 1.0}]}')],
    ),
    "no schema": (
        block(invoke("x", "~<a>1~</a>~<b>~<item>t~</item>~<item>~<c>null~</c>~</item>~</b>")),
        [ToolCall("x", '{"a": 1, "b": ["t", {"c": null}]}')],
    ),
    "tags of text": (
        block(invoke("trip", "~<code></code> <item>\n  x</item>~<b>~</code>")),
        [ToolCall("trip", n('{"code": "</code> <item>\\n  x</item>~<b>"}'))],
    ),
    **{
        name: (block(invoke("x", members)), [Text(block(invoke("x", members)))])
        for name, members in {
            "key twice": "~<a>1~</a>~<a>2~</a>",
            "key twice within": "~<o>~<a>1~</a>~<a>2~</a>~</o>",
            "another end": "~<a>1~</b>",
            "text between": "~<a>1~</a>x~<b>2~</b>",
            "text before values": "~<a>x~<item>2~</item>~</a>",
            "too deep": "~<a>" * (DEPTH_MAX + 1) + "~</a>" * (DEPTH_MAX + 1),
        }.items()
    },
    "broken off": (block(WEATHER_CALL)[:-80], [Text(block(WEATHER_CALL)[:-80])]),
}


@pytest.mark.parametrize("name", CASES)
def test_output_is_read_in_any_cut(name: str) -> None:
    output, pieces = CASES[name]
    for at in range(len(output) + 1):
        assert read(PLAN, output[:at], output[at:]) == pieces
    assert read(PLAN, *output) == pieces


def test_deepest_values_are_read() -> None:
    output = block(invoke("x", "~<a>" * DEPTH_MAX + "1" + "~</a>" * DEPTH_MAX))
    assert read(PLAN, output) == [ToolCall("x", '{"a": ' * DEPTH_MAX + "1" + "}" * DEPTH_MAX)]


def test_second_call_is_text_where_one_is_asked_for() -> None:
    found = read(ReplyPlan(False, False, MINIMAX.syntax, False), block(WEATHER_CALL, WEATHER_CALL))
    assert found[0] == ToolCall("get_weather", PARIS.arguments)
    assert isinstance(found[1], Text)


@pytest.mark.parametrize("thinking", [True, False, None])
def test_the_tiny_template_is_read_again_and_says_whether_to_reason(thinking: bool | None) -> None:
    asked = replace(conversation(), thinking=thinking, variables={})
    prompt = rendered(TEMPLATES["minimax-m3"], asked)
    end = {True: "<mm:think>", False: "</mm:think>", None: "]~b]ai"}[thinking]
    assert prompt.rstrip().endswith(end)
    plan = MINIMAX.plan(asked, prompt)
    assert (plan.is_within, plan.may_reason) == (thinking is True, thinking is not False)
    assert plan.may_begin_with_end == (thinking is not False)
    said = prompt[prompt.index("I look.") : prompt.index("noon")]
    calls = [piece for piece in read(replace(plan, is_within=False), said) if isinstance(piece, ToolCall)]
    assert [call.name for call in calls] == ["time_in", "get_weather"]
    assert json.loads(calls[1].arguments) == {"city": "Tokyo", "days": 2, "note": None}


def test_a_client_may_say_the_templates_own_variable() -> None:
    """The client's name wins over its effort, and each says whether to reason."""
    assert Conversation((), variables={"thinking_mode": "disabled"}).answers_at_once
    assert not Conversation((), variables={"thinking_mode": "enabled"}).answers_at_once
    asked = Conversation((), thinking=False, variables={"enable_thinking": True})
    assert "thinking_mode" not in asked.all_variables
    assert not asked.answers_at_once
