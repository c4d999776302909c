"""Calls that end the reasoning without its marker: by examples, in any cut, and on the real front in every API."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.http import answering
from hisparse.http.apis.transcript import Transcript
from hisparse.http.models.formats import scanning
from hisparse.http.models.formats.replies import (
    HELD_CHARS_MAX,
    LOOKS_MAX,
    Piece,
    Reasoning,
    ReplyParser,
    ReplyPlan,
    Text,
    ToolCall,
    merged,
)
from hisparse.http.models.formats.scanning import MARKER_BLANKS_MAX
from protocol.messages import Ended
from protocol.text import ByteTokenizer
from tests.hisparse.http.apis.test_agents import (
    ANTHROPIC_TOOLS,
    ASKED,
    MODEL,
    OPENAI_TOOLS,
    RESPONSES_TOOLS,
    in_thread,
)
from tests.hisparse.http.models.formats.test_formats import (
    DSML_CALL,
    DSML_PLAN,
    GLM_CALL,
    GLM_PLAN,
    PARIS,
    PARTS,
    cuts_of,
    dsml,
    invoke,
)
from tests.support.agents_rig import AgentsRig, agents_rig
from tests.support.fakes.fake_model import Said
from tests.support.http_rig import FrontRig, front_rig
from tests.support.tiny_templates import TEMPLATES
from worker.runners.tiny import EOS

DSML_CALLS: Final = dsml(DSML_CALL)
PLANS: Final = {"glm-5": GLM_PLAN, "deepseek-v3.2": DSML_PLAN}
CALLS: Final = {"glm-5": GLM_CALL, "deepseek-v3.2": DSML_CALLS}
families = pytest.mark.parametrize("family", PLANS)


def within(plan: ReplyPlan, **changes: Any) -> ReplyPlan:
    """`plan` for an output that begins in the middle of reasoning."""
    return replace(plan, **({"is_within": True} | changes))


def read(plan: ReplyPlan, *parts: str, ended_itself: bool = True) -> list[Piece]:
    parser = ReplyParser(plan)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merged([*pieces, *parser.finish(ended_itself=ended_itself)])


#: Outputs behind <think>, and what they say: None is one piece of reasoning, all of it.
CASES: Final[dict[str, tuple[str, list[Piece] | None]]] = {
    "call": ("I look it up.{call}", [Reasoning("I look it up."), PARIS]),
    "call alone": ("{call}", [PARIS]),
    "blanks": ("\n I look it up.\n\n{call}\n", [Reasoning("I look it up."), PARIS]),
    "calls": ("So.{call}\n {call}", [Reasoning("So."), PARIS, PARIS]),
    "marker named before": ("The {start} tag, <x>.\n{call}", [Reasoning("The {start} tag, <x>."), PARIS]),
    "ended reasoning": ("Should I {call}? No.</think>Done.", [Reasoning("Should I {call}? No."), Text("Done.")]),
    "ended behind the call": ("So. {call}</think>", [Reasoning("So. {call}")]),
    "ended behind the call, calling": ("So. {call}\n</think>\n{call}", [Reasoning("So. {call}"), PARIS]),
    "text behind": ("Should I {call}? Yes.", None),
    "text between": ("{call}, or rather {call}", None),
    "broken off": ("So. {broken}", None),
    "broken off behind a call": ("So. {call}\n{broken}", None),
    "marker begins behind the call": ("So. {call}</thi", None),
    "marker alone": ("So. {start}", None),
}


def written(text: str, family: str) -> str:
    call = CALLS[family]
    return text.format(call=call, broken=call[:-7], start=call[: call.index(">") + 1])


@families
@pytest.mark.parametrize("name", CASES)
def test_call_ends_reasoning_where_nothing_else_follows(name: str, family: str) -> None:
    output, pieces = CASES[name]
    plan, text = within(PLANS[family]), written(output, family)
    expected = [_written(piece, family) for piece in pieces or [Reasoning(output)]]
    assert read(plan, text) == expected
    assert read(plan, *text) == expected, "one character at a time"
    assert read(replace(plan, is_within=False), "\n<think>", text) == expected
    if "</think>" not in text:
        whole = [Reasoning(text.lstrip())]
        assert read(plan, text, ended_itself=False) == whole
        assert read(replace(plan, syntax=None), text) == whole, "no tools"


def _written(piece: Piece, family: str) -> Piece:
    return Reasoning(written(piece.text, family)) if isinstance(piece, Reasoning) else piece


@families
def test_second_call_is_text_where_one_is_asked_for(family: str) -> None:
    pieces = read(within(PLANS[family], many=False), "So." + CALLS[family] * 2)
    assert pieces == [Reasoning("So."), PARIS, Text(CALLS[family])]


def test_marker_in_a_value_ends_reasoning_as_before() -> None:
    call = "<tool_call>w<arg_key>t</arg_key><arg_value>"
    assert read(within(GLM_PLAN), f"So.{call}a</think>b</arg_value></tool_call>") == [
        Reasoning(f"So.{call}a"),
        Text("b</arg_value></tool_call>"),
    ]
    value = "The </thinking> tag"
    assert read(within(GLM_PLAN), f"So.{call}{value}</arg_value></tool_call>") == [
        Reasoning("So."),
        ToolCall("w", json.dumps({"t": value})),
    ]


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("size", [1, 997, HELD_CHARS_MAX, 2 * HELD_CHARS_MAX])
def test_what_is_held_has_a_bound(over: int, size: int) -> None:
    """To the character, in any cut; what is past it is told at once."""
    frame = len("<tool_call>w<arg_key>t</arg_key><arg_value></arg_value></tool_call>")
    value = "x" * (HELD_CHARS_MAX - frame + over)
    call = f"<tool_call>w<arg_key>t</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert len(call) == HELD_CHARS_MAX + over
    text = "So. " + call
    if size == 1:  # so many pieces at the border alone
        parts = [text[: HELD_CHARS_MAX - 20], *text[HELD_CHARS_MAX - 20 :]]
    else:
        parts = [text[at : at + size] for at in range(0, len(text), size)]
    expected = [Reasoning(text)] if over else [Reasoning("So."), ToolCall("w", json.dumps({"t": value}))]
    assert read(within(GLM_PLAN), *parts) == expected


@pytest.mark.parametrize("size", [997, 4 * HELD_CHARS_MAX])
def test_no_call_counts_behind_what_passed_the_bound(size: int) -> None:
    """The text that passes it would have turned out to be no call, but too late for a stream."""
    text = f"<tool_call>w<arg_key>t</arg_key><arg_value>{'x' * HELD_CHARS_MAX}</arg_value>? {GLM_CALL}"
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(within(GLM_PLAN), *parts) == [Reasoning(text)]


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("size", [1, 997, 2 * MARKER_BLANKS_MAX])
def test_blanks_that_wait_for_a_marker_have_a_bound(over: int, is_within: bool, size: int) -> None:
    """To the character, in any cut; what is past it is told at once."""
    plan, kind = replace(GLM_PLAN, reasons=is_within, is_within=is_within), Reasoning if is_within else Text
    text = "So." + "\n" * (MARKER_BLANKS_MAX + over) + GLM_CALL
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(plan, *parts) == [kind("So." + "\n" * over), PARIS]
    parser = ReplyParser(plan)
    told = merged([piece for _ in range(3) for piece in parser.push("\n" * MARKER_BLANKS_MAX)])
    assert told == ([] if is_within else [Text("\n" * 2 * MARKER_BLANKS_MAX)]), (
        "those that begin reasoning are no part of it"
    )


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("size", [1, 2 * MARKER_BLANKS_MAX])
def test_reasoning_begins_behind_few_blanks_only(over: int, size: int) -> None:
    blanks = " " * (MARKER_BLANKS_MAX + over)
    text = f"{blanks}<think>So.</think>Done."
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    expected = [Text(text)] if over else [Reasoning("So."), Text("Done.")]
    assert read(replace(GLM_PLAN, reasons=True, is_within=False), *parts) == expected


def test_blanks_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind a call, too, which may be all that an output holds back."""
    looked, pattern = list[int](), scanning._BLANKS

    class Counted:
        def match(self, text: str, start: int) -> re.Match[str] | None:
            found = pattern.match(text, start)
            looked.append(len(found[0]) if found else 0)
            return found

    monkeypatch.setattr(scanning, "_BLANKS", Counted())
    assert read(within(GLM_PLAN), "So.", GLM_CALL, *" " * 2_000)[-1] == PARIS
    assert sum(looked) < 3 * 2_000


@families
def test_text_is_told_until_a_call_begins_and_once_it_is_none(family: str) -> None:
    parser = ReplyParser(within(PLANS[family]))
    assert parser.push("I look") == [Reasoning("I look")]
    call = CALLS[family]
    assert [parser.push(text) for text in (" \n", call[:-9], call[-9:], " ")] == [[]] * 4
    assert merged(parser.push("? No")) == [Reasoning(f" \n{call} ? No")]
    assert parser.push(call) == [Reasoning(call)], "no call counts any more"
    parser = ReplyParser(within(PLANS[family]))
    start = call[: call.index(">") + 1]
    assert merged(parser.push(f"The {start}, say")) == [Reasoning(f"The {start}, say")], "a marker in prose"


@settings(max_examples=200)
@given(st.lists(PARTS, max_size=14).map("".join), st.data(), st.sampled_from([GLM_PLAN, DSML_PLAN]), st.booleans())
def test_any_cut_says_the_same(output: str, data: st.DataObject, plan: ReplyPlan, ended_itself: bool) -> None:
    plan = within(plan, is_within=data.draw(st.booleans()), many=data.draw(st.booleans()))
    parts = data.draw(cuts_of(output))
    assert read(plan, *parts, ended_itself=ended_itself) == read(plan, output, ended_itself=ended_itself)


# ---------------------------------------------------------------- tokens


@dataclass
class Told:
    """Pieces that byte tokens said, as they were told, and how many tokens were reasoning after each cut."""

    transcript: Transcript
    pieces: list[Piece]
    counts: list[int]


def told(plan: ReplyPlan, tokens: list[int], cuts: list[int], ended: Ended) -> Told:
    transcript = Transcript(ByteTokenizer().detokenizer(), plan, end_ids=(EOS,))
    found = Told(transcript, [], [])
    for start, stop in pairwise([0, *sorted(cuts), len(tokens)]):
        found.pieces += transcript.push(tokens[start:stop])
        found.counts.append(transcript.reasoning_tokens)
    found.pieces += transcript.end(ended)
    found.counts.append(transcript.reasoning_tokens)
    return found


def ended(tokens: int, reason: str = "eos") -> Ended:
    return Ended(0, "a", "FINISHED", reason, tokens)


@settings(max_examples=150)
@given(st.lists(PARTS, max_size=12).map("".join), st.data(), st.sampled_from([GLM_PLAN, DSML_PLAN]), st.booleans())
def test_pieces_and_counts_of_tokens_depend_on_no_cut(
    output: str, data: st.DataObject, plan: ReplyPlan, ends: bool
) -> None:
    plan = within(plan, is_within=data.draw(st.booleans()))
    tokens = [*output.encode(), *([EOS] if ends else [])]
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=8))
    whole, cut = (told(plan, tokens, places, ended(len(tokens))) for places in ([], cuts))
    assert (cut.pieces, cut.counts[-1]) == (whole.pieces, whole.counts[-1])
    assert cut.counts == sorted(cut.counts), "it only grows"
    assert cut.counts[-1] <= len(tokens)


@pytest.mark.parametrize(
    ("output", "tokens"),
    [
        ("So.</think>Yes.", len("So.</think>")),
        (f"So.\n{GLM_CALL}", len("So.\n")),
        (GLM_CALL, 0),
        (f"So. {GLM_CALL}? No", len(f"So. {GLM_CALL}? No") + 1),
        ("So ", len("So ") + 1),
        ("", 1),
    ],
)
def test_tokens_of_calls_are_no_reasoning(output: str, tokens: int) -> None:
    """A token that ends reasoning that nothing else ended is part of it."""
    said = [*output.encode(), EOS]
    assert told(within(GLM_PLAN), said, [], ended(len(said))).counts[-1] == tokens


@pytest.mark.parametrize(
    ("last", "reason", "calls"),
    [(EOS, "eos", 1), (ord("\n"), "eos", 0), (ord("\n"), "length", 0), (ord("\n"), "stop", 0), (EOS, "length", 0)],
)
def test_only_a_token_of_the_model_ends_reasoning_with_a_call(last: int, reason: str, calls: int) -> None:
    """`eos` may also be a token that the request named."""
    said = [*GLM_CALL.encode(), last]
    assert told(within(GLM_PLAN), said, [], ended(len(said), reason)).transcript.calls == calls


# ---------------------------------------------------------------- the front


def spoken(family: str) -> str:
    return "I look it up.\n\n" + CALLS[family]


def prompt_reasons(family: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking" if family == "glm-5" else "thinking": True}}


@asynccontextmanager
async def serving(directory: Path, said: Said | str, family: str) -> AsyncIterator[AgentsRig]:
    async with agents_rig(directory, lambda _: said, family=family) as rig:
        yield rig
    assert rig.model.prompts
    assert all(prompt.rstrip().endswith("<think>") for prompt in rig.model.prompts)


@families
async def test_chat_has_the_call(tmp_path: Path, family: str) -> None:
    async with serving(tmp_path, spoken(family), family) as rig:
        ask: Callable[..., Any] = rig.openai().chat.completions.create
        about: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": OPENAI_TOOLS}
        about |= {"extra_body": prompt_reasons(family)}
        whole = await in_thread(lambda: ask(**about))
        usage = {"include_usage": True}
        chunks = await in_thread(lambda: list(ask(**about, stream=True, stream_options=usage)))
    choice, message = whole.choices[0], whole.choices[0].message
    assert (choice.finish_reason, message.content, message.reasoning_content) == ("tool_calls", None, "I look it up.")
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris", "days": 2})
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("I look it up.\n\n")
    deltas = [it.choices[0].delta for it in chunks if it.choices]
    assert "".join(getattr(it, "reasoning_content", None) or "" for it in deltas) == "I look it up."
    assert "".join(it.content or "" for it in deltas) == ""
    assert [it.function.arguments for delta in deltas for it in delta.tool_calls or ()] == [call.function.arguments]
    assert [it.choices[0].finish_reason for it in chunks if it.choices][-1] == "tool_calls"
    assert chunks[-1].usage == whole.usage


@families
async def test_message_has_the_call(tmp_path: Path, family: str) -> None:
    async with serving(tmp_path, spoken(family), family) as rig:
        client = rig.anthropic()
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 2_000, "messages": ASKED, "tools": ANTHROPIC_TOOLS}
        ask |= {"thinking": {"type": "enabled", "budget_tokens": 1_024}}
        whole = await in_thread(lambda: client.messages.create(**ask))

        def streamed() -> Any:
            with client.messages.stream(**ask) as stream:
                return stream.get_final_message()

        final = await in_thread(streamed)
    for message in (whole, final):
        thinking, call = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "I look it up.")
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris", "days": 2})
        assert message.stop_reason == "tool_use"


@families
async def test_response_has_the_call(tmp_path: Path, family: str) -> None:
    async with serving(tmp_path, spoken(family), family) as rig:
        create: Callable[..., Any] = rig.openai().responses.create
        ask: dict[str, Any] = {"model": MODEL, "input": "Weather?", "tools": RESPONSES_TOOLS}
        ask |= {"extra_body": prompt_reasons(family)}
        whole = await in_thread(lambda: create(**ask))
        events = await in_thread(lambda: list(create(stream=True, **ask)))
    for response in (whole, events[-1].response):
        reasoning, call = response.output
        assert (response.status, reasoning.type, call.type) == ("completed", "reasoning", "function_call")
        assert reasoning.content[0].text == "I look it up."
        assert json.loads(call.arguments) == {"city": "Paris", "days": 2}
    assert whole.usage.output_tokens_details.reasoning_tokens == len("I look it up.\n\n")


@families
@pytest.mark.parametrize(
    ("reason", "last", "finish_reason"), [("length", EOS, "length"), ("stop", EOS, "stop"), ("eos", ord("\n"), "stop")]
)
async def test_output_that_the_model_did_not_end_has_none(
    tmp_path: Path, family: str, reason: str, last: int, finish_reason: str
) -> None:
    async with serving(tmp_path, Said(spoken(family), reason, end_token=last), family) as rig:
        chat = await in_thread(
            lambda: rig.openai().chat.completions.create(
                model=MODEL, messages=ASKED, tools=OPENAI_TOOLS, extra_body=prompt_reasons(family)
            )
        )
    choice = chat.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == (finish_reason, None, "")
    assert choice.message.reasoning_content.rstrip() == spoken(family)


async def held(rig: FrontRig) -> Any:
    """A stream that holds a call back."""
    scheduler = rig.gateway.scheduler
    assert scheduler.served is not None
    scheduler.served = msgspec.structs.replace(scheduler.served, chat_template=TEMPLATES["glm-5"])
    await rig.link.client.welcome()
    body = {"messages": ASKED, "tools": OPENAI_TOOLS, "stream": True, "reasoning_effort": "high"}
    peer = await rig.post("/v1/chat/completions", body)
    (name,) = await rig.submitted(1)
    rig.speak(name, f"So. {GLM_CALL}")
    await peer.until('"reasoning_content":"."')  # of each token by itself
    return name, peer


async def test_stream_that_holds_text_back_sends_keepalives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "KEEPALIVE_S", 0.02)
    async with front_rig(tmp_path) as rig:
        name, peer = await held(rig)
        await peer.until(": waiting\n\n: waiting\n\n")
        assert "get_weather" not in peer.body.decode()
        rig.speak(name, "? No.")
        await peer.until("get_weather")
        rig.gateway.scheduler.finish(name, reason="eos")
        deltas = [it["choices"][0]["delta"] for it in (await peer.events())[:-1]]
    assert "".join(it.get("reasoning_content", "") for it in deltas) == f"So. {GLM_CALL}? No."


@pytest.mark.parametrize("outcome", ["FAILED", "ABORTED"])
async def test_stream_that_fails_tells_what_was_held_as_reasoning(tmp_path: Path, outcome: str) -> None:
    async with front_rig(tmp_path) as rig:
        name, peer = await held(rig)
        rig.gateway.scheduler.finish(name, outcome, reason="eos")
        *deltas, error = await peer.events()
    assert "error" in error
    said = [it["choices"][0]["delta"] for it in deltas]
    assert "".join(it.get("reasoning_content", "") for it in said) == f"So. {GLM_CALL}"
    assert not any("tool_calls" in it for it in said)


async def test_second_block_of_calls_counts(tmp_path: Path) -> None:
    """With blanks between the blocks, as the model writes them at times."""
    block = dsml(invoke("get_weather", ("city", True, "Paris"), ("days", False, "2")))
    async with serving(tmp_path, f"So.\n\n{block}\n\n{block}", "deepseek-v3.2") as rig:
        chat = await in_thread(
            lambda: rig.openai().chat.completions.create(
                model=MODEL, messages=ASKED, tools=OPENAI_TOOLS, extra_body=prompt_reasons("deepseek-v3.2")
            )
        )
    assert len(chat.choices[0].message.tool_calls or ()) == 2


def test_looks_behind_markers_in_reasoning_are_few() -> None:
    """Each look may go through all that is held. Behind the last one all is reasoning, a call at the end too."""
    for looks, calls in ((LOOKS_MAX - 1, True), (LOOKS_MAX, False)):
        begun = "<tool_call>? " * looks
        for parts in ((begun + GLM_CALL,), begun + GLM_CALL):
            pieces = read(within(PLANS["glm-5"]), *parts)
            assert any(isinstance(piece, ToolCall) for piece in pieces) is calls
            assert calls or pieces == [Reasoning(begun + GLM_CALL)]
