"""Turns in any order: instructions on the user's side, a result of each call, prompts that the assistant answers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.http.models.formats.conversation import (
    NO_RESULT,
    Conversation,
    PastCall,
    Role,
    Turn,
    arranged,
    template_messages,
)
from hisparse.http.models.formats.deepseek import encode
from hisparse.http.models.templates import render
from protocol.errors import BadInput
from protocol.text import JsonTokenizer
from tests.hisparse.http.models.formats.test_formats import TIMES
from tests.support.http_rig import FrontRig, deepseek_tokenizer_json, front_rig
from tests.support.tiny_templates import TEMPLATES

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"


def rendered(template: str, made: Conversation) -> str:
    messages = template_messages(made.turns, template)
    return render(template, messages, made.all_variables, 1 << 20, lambda form: form)


def prompt(*turns: Turn, **about: Any) -> str:
    """The prompt without its beginning."""
    return encode(Conversation(turns, **about)).removeprefix(BOS)


HI: Final = Turn("user", "Hi")
CALLING: Final = Turn("assistant", calls=(PastCall("t1", "f", {}),))
CALLED: Final = prompt(HI, CALLING, Turn("tool", "x", call_id="t1")).partition("\n\n<function_results>")[0]


def results(*texts: str) -> str:
    lines = "".join(f"\n<result>{text}</result>" for text in texts)
    return f"\n\n<function_results>{lines}\n</function_results>\n\n</think>"


ORDERS: Final[dict[str, tuple[tuple[Turn, ...], str]]] = {
    "instruction last": ((HI, Turn("system", "No skills.")), f"{USER}Hi\n\nNo skills.{ASSISTANT}</think>"),
    "instructions last": (
        (HI, Turn("developer", "a"), Turn("system", "b")),
        f"{USER}Hi\n\na\n\nb{ASSISTANT}</think>",
    ),
    "instruction between": (
        (HI, Turn("system", "Be brief."), Turn("user", "Go on")),
        f"{USER}Hi\n\nBe brief.{ASSISTANT}</think>{USER}Go on{ASSISTANT}</think>",
    ),
    "instructions first": (
        (Turn("system", "a"), Turn("developer", "b"), HI),
        f"a{USER}b\n\nHi{ASSISTANT}</think>",
    ),
    "instruction alone": ((Turn("system", "a"),), f"{USER}a{ASSISTANT}</think>"),
    "instruction behind the assistant": (
        (HI, Turn("assistant", "Yes?"), Turn("system", "Be brief."), Turn("user", "Go on")),
        f"{USER}Hi{ASSISTANT}</think>Yes?{EOS}{USER}Be brief.\n\nGo on{ASSISTANT}</think>",
    ),
    "instruction between call and result": (
        (HI, CALLING, Turn("system", "Be brief."), Turn("tool", "x", call_id="t1")),
        f"{CALLED}{results('x')}{USER}Be brief.{ASSISTANT}</think>",
    ),
    "user between call and result": (
        (HI, CALLING, Turn("user", "Wait"), Turn("tool", "x", call_id="t1")),
        f"{CALLED}{results('x')}{USER}Wait{ASSISTANT}</think>",
    ),
    "call without a result": (
        (HI, CALLING, Turn("user", "never mind")),
        f"{CALLED}{results(NO_RESULT)}{USER}never mind{ASSISTANT}</think>",
    ),
    "call without a result, assistant goes on": (
        (HI, CALLING, Turn("assistant", "Oh."), Turn("user", "?")),
        f"{CALLED}{results(NO_RESULT)}Oh.{EOS}{USER}?{ASSISTANT}</think>",
    ),
    "assistant first": (
        (Turn("assistant", "Hello!"), HI),
        f"{ASSISTANT}</think>Hello!{EOS}{USER}Hi{ASSISTANT}</think>",
    ),
    "assistant twice": (
        (HI, Turn("assistant", "a"), Turn("assistant", "b"), Turn("user", "c")),
        f"{USER}Hi{ASSISTANT}</think>a{EOS}{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}</think>",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_turns_are_on_their_sides(name: str) -> None:
    turns, text = ORDERS[name]
    assert prompt(*turns) == text
    thinking = prompt(*turns, thinking=True)
    assert thinking.removesuffix("<think>") == text.removesuffix("</think>"), "there is no earlier reasoning"


def test_results_are_those_of_the_calls_that_they_name() -> None:
    calls = tuple(PastCall(name, "f", {}) for name in "abc")
    said = Turn("assistant", calls=calls)

    def told(*named: str) -> list[str]:
        came = [Turn("tool", f"of {name}", call_id=name) for name in named]
        return [turn.text.removeprefix("of ") for turn in arranged([said, *came, HI])[1:-1]]

    assert told("c", "a", "b") == ["a", "b", "c"]
    assert told("b") == [NO_RESULT, "b", NO_RESULT]
    assert told("", "b", "") == ["", "b", ""]
    for named in (("x", "a"), ("a", "a")):
        with pytest.raises(BadInput, match="is the result of no call"):
            told(*named)
    assert arranged([said]) == (said,), "what the client may be about to answer"


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ((), "turn 0 is nothing to answer"),
        ((HI, CALLING), "turn 2 is nothing to answer"),
        ((HI, Turn("assistant", "x")), "turn 2 is nothing to answer"),
        ((HI, Turn("tool", "x", call_id="t1"), HI), "turn 2 is the result of no call"),
        ((HI, CALLING, *(Turn("tool", text, call_id="t1") for text in "xy")), "turn 4 is the result of no call"),
        ((HI, CALLING, HI, Turn("assistant"), Turn("tool", "x", call_id="t1")), "turn 5 is the result of no call"),
    ],
)
@pytest.mark.refuses("BadInput messages=: turn {} {}")
def test_what_cannot_be_answered_is_refused(turns: tuple[Turn, ...], text: str) -> None:
    with pytest.raises(BadInput, match=text) as caught:
        encode(Conversation(turns))
    assert caught.value.remedy


# ---------------------------------------------------------------- conversations, drawn


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Roles in any order. Each text is another one; results name earlier calls, none, or another."""
    turns, names = list[Turn](), list[str]()
    roles: Sequence[Role] = draw(
        st.lists(st.sampled_from(("system", "developer", "user", "assistant", "tool", "tool")), max_size=9)
    )
    for at, role in enumerate(roles):
        turn = Turn(role, f"text-{at}.")
        if role == "assistant":
            calls = tuple(PastCall(f"c{at}-{n}", f"f{at}-{n}", {"a": n}) for n in range(draw(st.integers(0, 2))))
            names += [call.id for call in calls]
            turn = replace(turn, calls=calls, reasoning=draw(st.sampled_from(("", f"thought-{at}."))))
        elif role == "tool":
            turn = replace(turn, call_id=draw(st.sampled_from(("", "other", *names))))
        turns.append(turn)
    return tuple(turns)


@dataclass(frozen=True)
class Sides:
    """The reading of a prompt: what each marker begins."""

    first: str
    begins: dict[str, str]

    def of(self, prompt: str) -> tuple[dict[str, str], str]:
        """On which side each text of a conversation stands, and which side is last."""
        side, found = self.first, dict[str, str]()
        pattern = "|".join(map(re.escape, self.begins)) + r"|(?:text|thought)-\d+\.|f\d+-\d+(?=\W)"
        for it in re.findall(pattern, prompt):
            if it in self.begins:
                side = self.begins[it]
            else:
                assert it not in found, "no text stands twice"
                found[it] = side
        return found, side


DSML_SIDES: Final = Sides(
    "system",
    {
        **{USER: "user", ASSISTANT: "assistant", EOS: "between"},
        **{"<function_results>": "tool", "</function_results>": "assistant"},
    },
)
GLM_SIDES: Final = Sides(
    "between",
    {
        **{"<|system|>": "user", "<|user|>": "user", "<|assistant|>": "assistant"},
        **{"<|observation|>": "tool"},
    },
)


def results_of_no_call(turns: Sequence[Turn]) -> bool:
    """Return whether a result names no open call of the assistant's turn before it, or has no call left to be of."""
    names, unnamed = list[str](), 0
    for turn in turns:
        if turn.role == "assistant":
            names, unnamed = [call.id for call in turn.calls], 0
        elif turn.role == "tool":
            if turn.call_id and turn.call_id not in names:
                return True
            if turn.call_id:
                names.remove(turn.call_id)
            else:
                unnamed += 1
            if unnamed > len(names):
                return True
    return False


def expected(turns: Sequence[Turn]) -> dict[str, str]:
    """The side of each text."""
    sides = {"assistant": "assistant", "tool": "tool"}
    said = {turn.text: sides.get(turn.role, "user") for turn in turns}
    return said | {call.name: "assistant" for turn in turns for call in turn.calls}


def missing_results(turns: Sequence[Turn]) -> int:
    """Calls that no result follows before the assistant's next turn, but for a last turn that calls."""
    missing = left = 0
    for turn in turns:
        if turn.role == "assistant":
            missing, left = missing + left, len(turn.calls)
        elif turn.role == "tool":
            left -= 1
    return missing + (left if turns and turns[-1].role != "assistant" else 0)


@settings(max_examples=250)
@given(conversations(), st.booleans(), st.booleans())
def test_deepseek_prompt_has_every_text_on_its_side(turns: tuple[Turn, ...], thinking: bool, tools: bool) -> None:
    made = Conversation(turns, (TIMES,) if tools else (), thinking=thinking)
    if not turns or turns[-1].role == "assistant" or results_of_no_call(turns):
        with pytest.raises(BadInput):
            encode(made)
        return
    text = encode(made)
    if tools:
        assert text.count("## Tools") == 1
        text = text.replace(text[text.index("## Tools") : text.index("</functions>")], "")
    found, last = DSML_SIDES.of(text)
    sides = expected(turns)
    if turns[0].role in ("system", "developer") and len(turns) > 1:
        sides[turns[0].text] = "system"
    thoughts = [turn.reasoning for turn in turns if turn.reasoning]
    asked = max((at for at, turn in enumerate(turns) if turn.role not in ("assistant", "tool") and at), default=0)
    kept = [turn.reasoning for turn in turns[asked:] if turn.reasoning] if thinking else []
    assert {it: side for it, side in found.items() if it not in thoughts} == sides
    assert [it for it in found if it in thoughts] == kept
    order = [turn.text for turn in turns if turn.role != "tool"]
    assert [it for it in found if it in order] == order
    calls = sum(len(turn.calls) for turn in turns)
    assert (text.count(NO_RESULT), text.count("<result>")) == (missing_results(turns), calls)
    assert last == "assistant"
    assert text.endswith("<think>" if thinking else "</think>")


@settings(max_examples=150)
@given(conversations(), st.booleans())
def test_glm_prompt_has_every_text_on_its_side(turns: tuple[Turn, ...], thinking: bool) -> None:
    made = Conversation(turns, thinking=thinking)
    if results_of_no_call(turns):
        with pytest.raises(BadInput, match="is the result of no call"):
            rendered(TEMPLATES["glm-5"], made)
        return
    text = rendered(TEMPLATES["glm-5"], made)
    found, last = GLM_SIDES.of(text)
    thoughts = {turn.reasoning: "assistant" for turn in turns if turn.reasoning}
    assert found == expected(turns) | thoughts
    assert text.count(NO_RESULT) == missing_results(turns)
    assert last == "assistant"


# ---------------------------------------------------------------- the front, as the published repository is served


def specials() -> JsonTokenizer:
    return JsonTokenizer(deepseek_tokenizer_json())


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontRig]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with front_rig(tmp_path) as rig:
        scheduler, tokenizer = rig.gateway.scheduler, specials()
        assert scheduler.served is not None
        rig.gateway.tokenizers.data = tokenizer.source().encode()
        scheduler.served = msgspec.structs.replace(
            scheduler.served, vocab_size=tokenizer.ids, tokenizer_kind="json", tokenizer_hash="a" * 64
        )
        await rig.link.client.welcome()
        yield rig


SAID: Final[Any] = [{"role": "user", "content": "hi"}, {"role": "system", "content": "No skills."}]
ASKED: Final = {"role": "user", "content": "Hi"}
USES: Final = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
RESULT: Final = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
BRIEF: Final = {"role": "system", "content": "Be brief."}
#: Messages of Anthropic's API, and how their prompts end.
MESSAGES: Final[dict[str, tuple[list[Any], str]]] = {
    "last": (SAID, f"{USER}hi\n\nNo skills.{ASSISTANT}</think>"),
    "middle": ([ASKED, BRIEF, {"role": "user", "content": "Go on"}], f"{USER}Go on{ASSISTANT}</think>"),
    "no result": (
        [ASKED, USES, {"role": "user", "content": "never mind"}],
        f"{results(NO_RESULT)}{USER}never mind{ASSISTANT}</think>",
    ),
    "before the result": (
        [ASKED, USES, BRIEF, {"role": "user", "content": [RESULT]}],
        f"{results('x')}{USER}Be brief.{ASSISTANT}</think>",
    ),
}


async def asked(rig: FrontRig, path: str, body: dict[str, Any]) -> str:
    """The prompt that the coordinator gets."""
    await rig.post(path, body)
    await rig.submitted(1)
    ids = np.frombuffer(rig.gateway.scheduler.commands[0][1].prompt, np.int32).tolist()
    tokenizer = specials()
    detokenizer = tokenizer.detokenizer(tokenizer.special_ids)
    return detokenizer.push(ids) + detokenizer.finish()


@pytest.mark.parametrize("name", MESSAGES)
async def test_messages_in_any_order_are_served_and_counted(rig: FrontRig, name: str) -> None:
    messages, ending = MESSAGES[name]
    peer = await rig.post("/v1/messages/count_tokens", {"messages": messages})
    count = (await peer.answer())["input_tokens"]
    assert peer.status == 200
    assert (await asked(rig, "/v1/messages", {"messages": messages, "max_tokens": 5})).endswith(ending)
    assert len(rig.gateway.scheduler.commands[0][1].prompt) == 4 * count


async def test_chats_and_responses_are_served_alike(rig: FrontRig) -> None:
    text = await asked(rig, "/v1/chat/completions", {"messages": [*SAID[:1], BRIEF, ASKED, BRIEF]})
    assert text == f"{BOS}{USER}hi\n\nBe brief.{ASSISTANT}</think>{USER}Hi\n\nBe brief.{ASSISTANT}</think>"


async def test_responses_take_an_instruction_behind_a_call(rig: FrontRig) -> None:
    call = {"type": "function_call", "call_id": "t1", "name": "f", "arguments": "{}"}
    text = await asked(rig, "/v1/responses", {"input": [ASKED, call, BRIEF]})
    assert text.endswith(f"{results(NO_RESULT)}{USER}Be brief.{ASSISTANT}</think>")


async def test_result_of_no_call_names_its_field(rig: FrontRig) -> None:
    peer = await rig.post("/v1/messages", {"messages": [{"role": "user", "content": [RESULT]}], "max_tokens": 5})
    error = (await peer.answer())["error"]
    assert (peer.status, error["param"]) == (400, "messages[0].content[0].tool_use_id")
    assert "is the result of no call" in error["message"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_tiny_templates_put_later_instructions_on_the_users_side(family: str) -> None:
    turns = (Turn("system", "first"), HI, Turn("assistant", "Yes?"), Turn("system", "Be brief."))
    text = rendered(TEMPLATES[family], Conversation(turns))
    marker = {"deepseek-v3.2": USER, "minimax-m3": "]~b]system\n"}.get(family, "<|system|>")
    assert f"{marker}Be brief." in text
    assert text.index("first") < text.index("Hi") < text.index("Yes?") < text.index("Be brief.")
    ending = text[text.index("Be brief.") :]
    assert {"deepseek-v3.2": ASSISTANT, "minimax-m3": "]~b]ai"}.get(family, "<|assistant|>") in ending


@pytest.mark.parametrize(
    ("branch", "text"),
    [
        ("{% elif m.role == 'system' %}S:{{ m.content }}", "U:Hi\nS:a\nS:b\n"),
        ("{% elif m.role == 'developer' %}D:{{ m.content }}", "U:Hi\nD:a\n\n"),
    ],
)
def test_template_that_does_not_name_developers_gets_their_turns_as_system(branch: str, text: str) -> None:
    """Those of GLM have branches for the roles that they know, and nothing for others."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}"
        + branch
        + "{% endif %}{{ '\\n' }}{% endfor %}"
    )
    assert rendered(template, Conversation((HI, Turn("developer", "a"), Turn("system", "b")))) == text
