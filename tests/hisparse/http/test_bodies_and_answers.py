"""The pure parts of the HTTP front: what bodies become, what outputs become, who may ask."""

from __future__ import annotations

import json
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from hisparse.console.options import EXIT_CODES
from hisparse.http.apis.asks import CHAT_TOKENS_DEFAULT, COMPLETION_TOKENS_DEFAULT, Ask, Served, ask_of
from hisparse.http.apis.body import NEUTRAL, read_body
from hisparse.http.apis.decoding import decoded
from hisparse.http.apis.openai.answers import ChatAnswer, CompletionAnswer
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.apis.prompts import prompts_of, text_ids
from hisparse.http.apis.transcript import Transcript, text_in
from hisparse.http.errors import (
    PLACE_CHARS_MAX,
    STATUSES,
    AnswerAborted,
    AnswerFailed,
    ContextExceeded,
    TooLarge,
    Unauthorized,
    ending_error,
    error_body,
    error_headers,
    param_of,
    status_of,
)
from hisparse.http.models.formats.replies import Text
from hisparse.http.models.renderers import Renderers
from hisparse.http.models.templates import render
from hisparse.http.server.api_keys import KEY_CHARS_MIN, NO_OWNER, ApiKey, ApiKeys, owner_of, parse_keys, read_keys
from hisparse.http.server.fairness.arrears import DEBT_MAX_S, PARTIES_MAX, Arrears
from hisparse.http.server.fairness.shares import Shares
from hisparse.http.server.fairness.turns import PIECE_S, PIECES_MAX, LoopTurns, Turns
from protocol.errors import (
    BY_CODE,
    BadInput,
    CapacityError,
    ConfigError,
    HiSparseError,
    NotFound,
    Unavailable,
    WrongState,
)
from protocol.messages import Ended, ModelInfo
from protocol.settings import HttpSettings
from protocol.small_files import FILE_BYTES_MAX
from protocol.text import JsonTokenizer
from protocol.tokenizer_files import read_tokenizer
from tests.hisparse.cli.test_cli import run
from tests.support.http_rig import KEY, TEMPLATE, byte_tokenizer_json
from tests.support.limits import HANG_LIMIT_S

MODEL = ModelInfo("f" * 8, "tiny", 4_096, 264, 4, 16, (257,), "json", "")


def served(template: str = "{% set bos_token = '<bos>' %}\n" + TEMPLATE) -> Served:
    model = ModelInfo("f" * 8, "tiny", 4_096, 264, 4, 16, (257,), "json", "", template)
    return Served(model, JsonTokenizer(byte_tokenizer_json()))


#: Renders in this process.
def here(template: str, messages: Any, variables: Any, bytes_max: int, tools: Any = None) -> str:
    return render(template, messages, variables, bytes_max, lambda form: form, tools)


def completion(ask_id: str = "a", **body: Any) -> Ask:
    return ask_of(read_body(json.dumps(body).encode(), CompletionBody).generation(), served(), ask_id, here)


def chat(template: str | None = None, **body: Any) -> Ask:
    known = served() if template is None else served(template)
    return ask_of(read_body(json.dumps(body).encode(), ChatBody).generation(), known, "a", here)


def refusal(kind: type[CompletionBody] | type[ChatBody], **body: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        completion(**body) if kind is CompletionBody else chat(**body)
    return caught.value


def ids(text: str) -> list[int]:
    return list(text.encode())


# ---------------------------------------------------------------- completions


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hé", [ids("hé")]),
        (["a", "bc"], [ids("a"), ids("bc")]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms_are_accepted(prompt: Any, prompts: list[list[int]]) -> None:
    ask = completion(prompt=prompt)
    assert [choice.prompt.tolist() for choice in ask.choices] == prompts
    assert ask.prompt_tokens == sum(map(len, prompts))
    assert [choice.request_id for choice in ask.choices] == (["a"] if len(prompts) == 1 else ["a-0", "a-1"])


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, "a"], ["a", 1], [True], [1.5], [{}], [-1], [264], [2**40], [[1], [264]]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refusal(CompletionBody, prompt=prompt).field.startswith("prompt")


def test_defaults_are_openais() -> None:
    sampling = completion(prompt="x").choices[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (COMPLETION_TOKENS_DEFAULT, 1.0, 1.0)
    assert (sampling.stop, sampling.ignore_eos) == ((), False)
    assert completion(prompt="x", top_k=-1).choices[0].sampling == sampling


def test_every_served_field_arrives() -> None:
    ask = completion(
        model="tiny",
        prompt="x",
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=-3,
        stop=["a", "b"],
        ignore_eos=True,
        top_k=4,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"3": -1, "4": 2.5},
        min_tokens=2,
        stop_token_ids=[7, 8],
        priority=-4,
        stream=True,
        stream_options={"include_usage": True},
        user="ignored",
    )
    choice = ask.choices[0]
    assert (choice.sampling.max_tokens, choice.sampling.temperature, choice.sampling.top_p) == (7, 0, 0.5)
    assert (choice.sampling.stop, choice.sampling.ignore_eos, choice.priority) == (("a", "b"), True, -4)
    assert choice.sampling.seed == 2**63 - 3
    sampling = choice.sampling
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (4, 0.25, 2)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.logit_bias, sampling.stop_token_ids) == (((3, -1.0), (4, 2.5)), (7, 8))
    assert (ask.stream, ask.include_usage, ask.usage_in_every_chunk) == (True, True, False)
    assert completion(prompt="x", stop="one").choices[0].sampling.stop == ("one",)


def test_samples_differ_and_repeated_requests_agree() -> None:
    """Without a seed it comes from the id, so that a body sent again under the client's id is the same request."""
    ask = completion(prompt=["x", "y"], n=2, seed=5)
    assert [(choice.prompt.tolist(), choice.sampling.seed) for choice in ask.choices] == [
        (ids("x"), 5),
        (ids("x"), 6),
        (ids("y"), 5),
        (ids("y"), 6),
    ]
    first, again, other = (completion(ask_id, prompt="x", n=2) for ask_id in ("a", "a", "b"))
    seeds = [choice.sampling.seed for ask in (first, again, other) for choice in ask.choices]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert all(mine.same_as(its) for mine, its in zip(first.choices, again.choices, strict=True))
    assert not first.choices[0].same_as(first.choices[1])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 17}, "n"),
        ({"prompt": ["x"] * 9, "n": 16}, "n"),
        pytest.param(
            {"prompt": ["x"] * 129},
            "prompt",
            marks=pytest.mark.refuses("BadInput prompt={}: {} (send several requests)"),
        ),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 2**31}, "prompt"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "seed": "s"}, "seed"),
        ({"prompt": "x", "priority": 2**40}, "priority"),
        ({"prompt": "x", "stop": [1]}, "stop[0]"),
        ({"prompt": "x", "stream_options": {}}, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "x", "messages": [1]}, "messages"),
        ({"prompt": "x", "model": "other"}, "model"),
    ],
)
def test_a_refused_body_names_its_field(body: dict[str, Any], field: str) -> None:
    assert refusal(CompletionBody, **body).field == field


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound):
        completion(prompt="x", model="other")


@pytest.mark.parametrize("field", NEUTRAL)
def test_unsupported_field_is_refused_unless_neutral(field: str) -> None:
    kind, rest = (
        (CompletionBody, {"prompt": "x"})
        if field in CompletionBody.__struct_fields__
        else (ChatBody, {"messages": [{"role": "user", "content": "x"}]})
    )
    for value in (None, *NEUTRAL[field]):
        completion(**rest, **{field: value}) if kind is CompletionBody else chat(**rest, **{field: value})
    error = refusal(kind, **rest, **{field: ["something"]})
    assert (error.field, error.message.partition(":")[0]) == (field, "is not supported")
    assert refusal(CompletionBody, prompt="x", best_of=True).field == "best_of"  # True is not 1


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:0 "prompt', max_size=60).map(str.encode))
def test_any_bytes_give_a_body_or_a_refusal(data: bytes) -> None:
    try:
        body = read_body(data, CompletionBody)
    except BadInput:
        return
    assert isinstance(body, CompletionBody)


def test_deep_nesting_is_a_refusal() -> None:
    with pytest.raises(BadInput):
        read_body(b'{"prompt":' + b"[" * 100_000, CompletionBody)


# ---------------------------------------------------------------- what is too long


class CountingTokenizer:
    """Characters as tokens, of a vocabulary whose longest token is long; counts what it was given."""

    token_bytes_max = 1 << 20

    def __init__(self) -> None:
        self.chars = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.chars += len(text)
        return [1] * len(text)

    def detokenizer(self, shown: Any = ()) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([1] * 4_096, marks=pytest.mark.refuses("ContextExceeded {}=: {} (shorten it)")),
        [[1], [1] * 5_000],
        "x" * 4_096 * 4,
        ["x", "x" * 4_096 * 4],
        [1_000_000] * 2_000_000,
    ],
)
def test_a_prompt_longer_than_the_context_is_refused(prompt: Any) -> None:
    error = refusal(CompletionBody, prompt=prompt, n=16, max_tokens=1)
    assert (error.field.partition("[")[0], "4096" in error.message) == ("prompt", True)


def test_text_is_refused_by_its_bytes_before_tokenization() -> None:
    tokenizer = CountingTokenizer()
    tokenizer.token_bytes_max = 4
    with pytest.raises(BadInput, match="no text of more than 16384 bytes fits"):
        text_ids("é" * 8_193, tokenizer, MODEL)
    assert tokenizer.chars == 0


def test_text_is_tokenized_up_to_a_few_contexts() -> None:
    """Where the longest token says nothing of the text."""
    tokenizer = CountingTokenizer()
    with pytest.raises(BadInput, match="the first 8192 exceed it"):
        text_ids("x" * (15 << 20), tokenizer, MODEL)
    assert tokenizer.chars == 8_192


def test_a_long_text_that_fits_is_taken() -> None:
    """More than the bytes that are tokenized without a look."""

    class Words(CountingTokenizer):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            return [1] * len(text.split())

    assert text_ids("a" * 99 + " b" * 10 + "c" * 99_999, Words(), MODEL).size == 11


def test_choices_of_a_prompt_share_its_array() -> None:
    first, second, other, _ = completion(prompt=["x", "y"], n=2).choices
    assert first.prompt is second.prompt
    assert first.prompt_digest != other.prompt_digest
    bare = completion(prompt=["x", "y"], n=2).without_prompts().choices[0]
    assert (bare.prompt.size, bare.same_as(first)) == (0, True)


@pytest.mark.refuses("(shorten {}, or leave it out)")
def test_only_ignored_fields_may_be_large() -> None:
    deep: Any = [[[]] * 100] * 1_000
    completion(prompt="x", metadata=deep, user=deep)
    for field in ("logit_bias", "stop", "suffix"):
        assert refusal(CompletionBody, prompt="x", **{field: deep}).field == field
    assert refusal(ChatBody, messages=said(("user", "x")), chat_template_kwargs={"a": deep}).field == (
        "chat_template_kwargs"
    )


@pytest.mark.parametrize(
    "body",
    [b"[[1],0]", b"[[1] [2]]", b"[[1],,[2]]", b"[[1],[2]", b"[[1]x[2]]", b'["a" "b"]', b'[["[1]"]]', b"[[1],[[2]]]"],
)
def test_lists_of_other_values_are_refused(body: bytes) -> None:
    with pytest.raises(BadInput):
        list(prompts_of(msgspec.Raw(body), JsonTokenizer(byte_tokenizer_json()), MODEL))


# ---------------------------------------------------------------- shares


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3).filter(bool)), max_size=60))
def test_owner_below_its_share_is_never_refused(steps: list[tuple[str, int]]) -> None:
    shares, held = Shares(9), dict.fromkeys("abc", 0)
    for owner, change in steps:
        if change < 0:
            given_back = min(held[owner], -change)
            shares.give(owner, given_back)
            held[owner] -= given_back
            continue
        owners = sum(count > 0 for count in held.values()) + (held[owner] == 0)
        taken = shares.take(owner, change)
        assert taken or held[owner] + change > 9 // owners
        held[owner] += change if taken else 0
        assert shares.total == sum(held.values()) <= 9 + 9 // 2 + 9 // 3


async def test_turns_go_round_by_owner(autojump_clock: trio.testing.MockClock) -> None:
    turns, order = Turns(2, 1), []

    async def work(owner: str) -> None:
        async with turns.turn(owner):
            order.append(owner)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for owner in "aaaab":
            nursery.start_soon(work, owner)
            await trio.testing.wait_all_tasks_blocked()
        assert order == ["a", "b"], "one of a's waits, though a turn was free before b came"
        gone = trio.CancelScope()
        with gone:
            gone.cancel()
            await work("c")
    assert order == ["a", "b", "a", "a", "a"]
    async with turns.turn("c"), turns.turn("d"):
        pass


async def test_parties_share_turns_of_the_loop() -> None:
    turns, order = LoopTurns(2), []

    async def work(party: str) -> None:
        await turns.turn(party)
        order.append(party)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        async with trio.open_nursery() as working:
            for party in "aaaaaaaabc":
                await work(party) if not order else working.start_soon(work, party)
        nursery.cancel_scope.cancel()
    assert order[0] == "a"
    assert sorted(order) == list("aaaaaaaabc")
    assert max(order.index("b"), order.index("c")) <= 5, "each of a, b and c in turn, behind two of a at once"


class LongestTurn(trio.abc.Instrument):
    """`pieces` of work in the turn of the loop that had most."""

    def __init__(self) -> None:
        self.pieces = self._now = 0

    def before_io_wait(self, timeout: float) -> None:
        self._now = 0

    def work(self) -> None:
        self._now += 1
        self.pieces = max(self.pieces, self._now)


async def test_turn_of_the_loop_does_not_grow_by_slow_pieces(mock_clock: trio.testing.MockClock) -> None:
    turns, longest = LoopTurns(2), LongestTurn()

    async def work() -> None:
        await turns.turn("a")
        mock_clock.jump(10 * PIECE_S)
        longest.work()

    trio.lowlevel.add_instrument(longest)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        async with trio.open_nursery() as working:
            for _ in range(8 * PIECES_MAX):
                working.start_soon(work)
        nursery.cancel_scope.cancel()
    trio.lowlevel.remove_instrument(longest)
    assert 2 < longest.pieces <= PIECES_MAX


async def test_cancelled_party_leaves_its_turn_of_the_loop(autojump_clock: trio.testing.MockClock) -> None:
    turns = LoopTurns(1)
    await turns.turn("a")
    with trio.move_on_after(1) as gone:
        await turns.turn("b")
    assert gone.cancelled_caught
    assert not turns._turns._waiting


def test_refusals_past_a_burst_slow_down_their_party() -> None:
    arrears = Arrears(per_s=10, burst=5)
    for _ in range(5):
        assert arrears.refused("a", now=100.0) == 100.0
    assert arrears.next_at("a", now=100.0) == 100.0
    assert [arrears.refused("a", now=100.0) for _ in range(2)] == pytest.approx([100.0, 100.1])
    times = [arrears.next_at("a", now=100.0) for _ in range(3)]
    assert times == pytest.approx([100.2, 100.3, 100.4]), "one after the other"
    assert arrears.next_at("b", now=100.0) == 100.0
    assert arrears.next_at("a", now=101.0) == 101.0, "it kept still for long enough"


def test_arrears_end_a_while_after_the_last_of_any_number_of_refusals() -> None:
    arrears = Arrears(per_s=10, burst=5)
    for _ in range(100_000):
        arrears.refused("a", now=100.0)
        arrears.next_at("a", now=100.0)
    assert arrears.refused("a", now=100.0) == pytest.approx(100.0 + DEBT_MAX_S)
    assert arrears.next_at("a", now=100.0 + DEBT_MAX_S) == 100.0 + DEBT_MAX_S


def test_arrears_of_many_parties_are_bounded() -> None:
    arrears = Arrears()
    for number in range(PARTIES_MAX + 100):
        arrears.refused(str(number), now=0.0)
    assert len(arrears) == PARTIES_MAX
    arrears.refused("another", now=60.0)
    assert len(arrears) == 1, "all others have paid"


# ---------------------------------------------------------------- chat


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_chat_template_renders_the_prompt_with_special_tokens() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    ask = chat(messages=said(("system", "be <bos>"), ("user", parts)))
    prompt = ask.choices[0].prompt.tolist()
    assert prompt == [256, *ids("system:be "), 256, 10, 256, *ids("user:hi\n"), 256, *ids("assistant:")]
    assert chat(messages=said(("user", "x")), chat_template_kwargs={"mood": "!", "messages": []}).choices[
        0
    ].prompt.tolist() == [256, *ids("user:x\n"), 256, *ids("assistant:!")]


def test_chat_max_tokens() -> None:
    messages = said(("user", "x"))
    assert chat(messages=messages, max_completion_tokens=5).choices[0].sampling.max_tokens == 5
    assert chat(messages=messages, max_tokens=6).choices[0].sampling.max_tokens == 6
    default = chat(messages=messages).choices[0]
    assert default.sampling.max_tokens == min(CHAT_TOKENS_DEFAULT, MODEL.context_max_tokens - default.prompt.size)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": []}, "empty"),
        ({"messages": said(("tool", "x"))}, "tool"),
        ({"messages": said(("developer", "x"))}, "no developers here"),
        ({"messages": said(("user", [{"type": "image_url", "text": ""}]))}, "images are not supported"),
        ({"messages": said(("user", 5))}, "not an integer"),
        pytest.param(
            {"messages": said(("user", "x")), "max_tokens": 1, "max_completion_tokens": 1},
            "old name",
            marks=pytest.mark.refuses("is the old name of max_completion_tokens"),
        ),
    ],
)
def test_unrenderable_chat_is_refused_with_the_reason(body: dict[str, Any], text: str) -> None:
    error = refusal(ChatBody, **body)
    assert text in str(error)


@pytest.mark.refuses("the served model has no chat template")
def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(BadInput, match="no chat template"):
        chat("", messages=said(("user", "x")))


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ messages[0].role.x.y }}"])
def test_failing_template_is_refused_inside_its_sandbox(template: str) -> None:
    with pytest.raises(BadInput, match="cannot render them"):
        chat(template, messages=said(("user", "x")))


def test_a_template_travels_with_its_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer_json())
    odd = '<"\\｜😀>'
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "\n{{ bos_token }}{{ eos_token }}"}]
    settings = {"bos_token": odd, "eos_token": {"content": "<eos>"}, "chat_template": several}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = read_tokenizer(tmp_path).chat_template
    prompt = chat(template, messages=said(("user", "x"))).choices[0].prompt.tolist()
    assert prompt == [10, *odd.encode(), 257]


GROWING: Final = (
    "{{ messages | tojson(indent=n) }}",
    "{{ 'x' * n }}",
    "{{ 'x'.ljust(n) }}",
    "{{ '%*d' | format(n, 1) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
)


@pytest.mark.parametrize("template", GROWING)
@pytest.mark.refuses("ContextExceeded messages=: {} (send fewer")
def test_growing_template_is_ended_and_the_next_is_rendered(template: str) -> None:
    """By what a client says: its output, its memory and its time are bounded."""
    renderers = Renderers(limit_s=1.0, memory_bytes_max=256 << 20)
    spoken = [{"role": "user", "content": "x"}]
    before = psutil.Process().memory_info().rss
    with pytest.raises(BadInput) as caught:
        renderers.render(template, spoken, {"n": 10**9}, 10_000)
    assert caught.value.field == "messages"
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert renderers.render("{{ messages[0].content }}é", spoken, {}, 10_000) == "xé"
    with pytest.raises(BadInput, match="become more than 3 characters"):
        renderers.render("{{ 'xxxx' }}", spoken, {}, 3)
    renderers.close()


@pytest.mark.refuses("ConfigError {} ({})")
def test_template_that_cannot_be_compiled_is_the_servers_fault() -> None:
    renderers = Renderers()
    spoken = [{"role": "user", "content": "x"}]
    with pytest.raises(ConfigError, match=r"cannot be compiled: line 2: .*'unknown'"):
        renderers.render("\n{% unknown %}", spoken, {}, 10_000)
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert renderers.render(text, spoken, {}, 10_000) == "x"
    renderers.close()


# ---------------------------------------------------------------- answers


def ended(tokens: int, reason: str = "length", tail: str = "", outcome: str = "FINISHED") -> Ended:
    return Ended(0, "a", outcome, reason, tokens, tail)


def events(*made: bytes) -> list[Any]:
    texts = [event.decode() for event in made]
    assert all(text.startswith("data: ") and text.endswith("\n\n") and text.count("\n") == 2 for text in texts)
    return [json.loads(text[6:]) if text != "data: [DONE]\n\n" else "[DONE]" for text in texts]


@given(st.text(), st.data())
def test_chunks_never_split_a_character(text: str, data: st.DataObject) -> None:
    """Whatever the cuts: chunks are whole characters, and together they are the text."""
    tokens, transcript = ids(text), Transcript(served().tokenizer.detokenizer())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    borders = [0, *cuts, len(tokens)]
    pieces = [text_in(transcript.push(tokens[a:b])) for a, b in pairwise(borders)]
    pieces.append(text_in(transcript.end(ended(len(tokens)))))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces if "�" not in text)


def test_end_flushes_pending_text_up_to_the_stop_string() -> None:
    transcript = Transcript(served().tokenizer.detokenizer())
    assert transcript.push(ids("é")[:1]) == []
    assert text_in(transcript.end(ended(1, "stop", "tail"))) == "\ufffdtail"
    assert (transcript.finish_reason, transcript.tokens) == ("stop", 1)
    assert [finish(reason) for reason in ("length", "eos", "stop")] == ["length", "stop", "stop"]


def finish(reason: str) -> str:
    transcript = Transcript(served().tokenizer.detokenizer())
    transcript.end(ended(0, reason))
    return transcript.finish_reason


def test_the_objects_of_a_completion() -> None:
    ask = completion(prompt="xy", n=2, stream=True, stream_options={"include_usage": True})
    answer = CompletionAnswer(ask, 9)
    transcripts = [Transcript(served().tokenizer.detokenizer()) for _ in ask.choices]
    for transcript, count in zip(transcripts, (3, 4), strict=True):
        transcript.end(ended(count))
    head = {"id": "a", "object": "text_completion", "created": 9, "model": "tiny"}
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert json.loads(answer.whole([[Text("A")], [Text("B")]], transcripts)) == head | {
        "choices": [
            {"index": 0, "text": "A", "logprobs": None, "finish_reason": "length"},
            {"index": 1, "text": "B", "logprobs": None, "finish_reason": "length"},
        ],
        "usage": usage,
    }
    assert answer.opening() == []
    made = [*answer.delta(1, [Text("t")], transcripts), *answer.last(0, [], transcripts), *answer.closing(transcripts)]
    delta, last, total, done = events(*made)
    choice = {"index": 1, "text": "t", "logprobs": None, "finish_reason": None}
    assert delta == head | {"choices": [choice], "usage": None}
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
    assert (total, done) == (head | {"choices": [], "usage": usage}, "[DONE]")


def test_drafts_are_told_once_their_choices_have_ended() -> None:
    ask = completion(prompt="xy", n=2, stream=True, stream_options={"include_usage": True})
    answer, transcripts = CompletionAnswer(ask, 9), [Transcript(served().tokenizer.detokenizer()) for _ in "ab"]
    assert "completion_tokens_details" not in answer._usage(transcripts)
    for transcript, drafted, accepted in zip(transcripts, (5, 2), (3, 0), strict=True):
        transcript.end(msgspec.structs.replace(ended(4), drafted_tokens=drafted, accepted_tokens=accepted))
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
    assert json.loads(answer.whole([[], []], transcripts))["usage"]["completion_tokens_details"] == details
    total, _ = events(*answer.closing(transcripts))
    assert total["usage"]["completion_tokens_details"] == details


def test_the_objects_of_a_chat() -> None:
    ask = chat(messages=said(("user", "x")), stream=True)
    answer, transcripts = ChatAnswer(ask, 9), [Transcript(served().tokenizer.detokenizer())]
    transcripts[0].end(ended(3, "eos"))
    whole = json.loads(answer.whole([[Text("A")]], transcripts))
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "A"}
    first, delta, last, done = events(
        *answer.opening(),
        *answer.delta(0, [Text("t")], transcripts),
        *answer.last(0, [], transcripts),
        *answer.closing(transcripts),
    )
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (delta["choices"][0]["delta"], last["choices"][0]["delta"]) == ({"content": "t"}, {})
    assert (last["choices"][0]["finish_reason"], "usage" in delta, done) == ("stop", False, "[DONE]")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadInput("m", field="f", value="v"), 400, "invalid_request_error"),
        (Unauthorized("m"), 401, "authentication_error"),
        (ConfigError("m"), 500, "server_error"),
        (NotFound("m"), 404, "not_found_error"),
        (WrongState("m"), 409, "invalid_request_error"),
        (TooLarge("m"), 413, "invalid_request_error"),
        (CapacityError("m", field="queue_max"), 429, "rate_limit_error"),
        (ContextExceeded("m", field="prompt"), 400, "invalid_request_error"),
        (Unavailable("m"), 503, "server_error"),
        (AnswerAborted("m"), 409, "invalid_request_error"),
        (AnswerFailed("m"), 500, "server_error"),
        (HiSparseError("m"), 500, "server_error"),
    ],
)
def test_an_error_is_a_status_and_openais_object(error: HiSparseError, status: int, kind: str) -> None:
    assert status_of(error) == status
    content = json.loads(error_body(error))["error"]
    assert content.keys() == {"message", "type", "param", "code"}
    assert (content["type"], content["code"], content["param"]) == (kind, error.code, param_of(error) or None)
    assert content["message"].endswith((".", "?"))


def test_every_error_of_the_coordinator_has_a_status() -> None:
    assert BY_CODE.keys() <= STATUSES.keys()


def test_permanent_errors_forbid_retry() -> None:
    assert error_headers(AnswerFailed("m")) == error_headers(WrongState("m")) == {"x-should-retry": "false"}
    assert error_headers(Unavailable("m")).keys() == error_headers(CapacityError("m")).keys() == {"retry-after"}
    assert error_headers(BadInput("m")) == {}


def test_an_output_that_did_not_finish_is_an_error() -> None:
    aborted, failed = ending_error(ended(1, "by admin", "", "ABORTED")), ending_error(ended(1, "why", "", "FAILED"))
    assert (type(aborted), type(failed)) == (AnswerAborted, AnswerFailed)
    assert "by admin" in str(aborted)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (str(BadInput("Too many items\nmore", field="grammar", remedy="simplify it")), "Too many items"),
        (str(BadInput("token (line 3) x", field="grammar", remedy="simplify it")), "token (line 3) x"),
        (
            str(BadInput("takes more than 60 s", field="grammar", value="120 characters", remedy="simplify it")),
            "takes more than 60 s",
        ),
    ],
    ids=["lines", "brackets", "value"],
)
@pytest.mark.refuses("its form of output cannot be held to: {}")
def test_output_whose_grammar_became_too_much_is_the_clients_error(reason: str, words: str) -> None:
    """In the words of a worker's refusal, whose advice and numbers of lines are left out."""
    error = ending_error(ended(1, reason, "", "FAILED"))
    assert (type(error), error.field) == (BadInput, "body")
    assert error.message == f"its form of output cannot be held to: {words}"
    assert type(ending_error(ended(1, reason, "", "ABORTED"))) is not BadInput


def test_place_of_a_bad_number_is_made_for_it_alone_and_cut() -> None:
    """Names and lists are as long as a client makes them."""
    data = msgspec.json.encode({"k" * 20_000 + "\N{GRINNING FACE}": [0] * 10_000}).replace(b"0]", b"9" * 30 + b"]")
    tracemalloc.start()
    with pytest.raises(BadInput) as caught:
        decoded(data, dict[str, Any], "schema")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.field == "schema." + "k" * (PLACE_CHARS_MAX - 7) + "..."
    assert peak_bytes < 10 * 2**20


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("header", "let_in"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer  {KEY} ", True),
        ("Bearer second-key-that-is-known", True),
        (f"Basic {KEY}", False),
        (KEY, False),
        ("Bearer", False),
        ("Bearer x", False),
        (f"Bearer {KEY}x", False),
        ("", False),
    ],
)
def test_valid_key_is_accepted(header: str, let_in: bool) -> None:
    keys = ApiKeys([ApiKey(KEY), ApiKey("second-key-that-is-known")])
    if let_in:
        keys.check(header)
    else:
        with pytest.raises(Unauthorized) as caught:
            keys.check(header)
        assert KEY not in str(caught.value)


def test_without_keys_every_client_is_accepted() -> None:
    ApiKeys(()).check("")
    read_keys("").check("")


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n  {KEY}\n")
    file.chmod(0o640)
    read_keys(str(file)).check(f"Bearer {KEY}")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        read_keys(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))
    file.write_bytes(b"\xff" * 20)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="not text"):
        read_keys(str(file))
    file.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="more than"):
        read_keys(str(file))


def test_key_has_the_priority_limit_of_its_line() -> None:
    granted, lowered = "granted-key-that-is-known", "lowered-key-that-is-known"
    keys = ApiKeys(parse_keys(f"{KEY}\n{granted}  priority=10\n{lowered} priority=-5\n", "f"))
    assert [keys.check(f"Bearer {key}").priority_max for key in (KEY, granted, lowered)] == [0, 10, -5]
    assert ApiKeys(()).check("") == ("", 1_000)


def test_name_of_an_owner_survives_its_keys() -> None:
    old, new, other = "old-key-of-the-shop", "new-key-of-the-shop", "key-of-another-owner"
    keys = ApiKeys(
        parse_keys(f"{old} name=shop\n{new} name=shop priority=3\n{other} priority=1 name=other\n{KEY}\n", "f")
    )
    owners = [keys.check(f"Bearer {key}") for key in (old, new, other, KEY)]
    assert [(it.name, it.priority_max) for it in owners] == [("shop", 0), ("shop", 3), ("other", 1), (owner_of(KEY), 0)]
    assert [it.scope for it in owners] == [owner_of("shop"), owner_of("shop"), owner_of("other"), owner_of(KEY)]
    assert keys.describe() == "4 keys of 3 owners"
    assert (keys.is_open, ApiKeys(()).is_open, NO_OWNER.scope) == (False, True, "")


@pytest.mark.parametrize("word", ["name", "name=", "name=a/b", f"name={'x' * 65}", "name=0123456789ab", "names=x"])
def test_wrong_name_of_an_owner_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(f"{KEY} {word}\n", "/etc/api.keys")
    assert "/etc/api.keys" in str(caught.value)
    assert word[:64] in str(caught.value)
    assert KEY not in str(caught.value)


def test_owner_named_twice_for_one_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="said twice") as caught:
        parse_keys(f"{KEY} name=a name=b\n", "f")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("right", ["priority", "priority=", "priority=x", "priority=1001", "priority=1 front"])
def test_wrong_right_behind_a_key_is_named_and_the_key_is_not(right: str) -> None:
    with pytest.raises(ConfigError, match="priority=N") as caught:
        parse_keys(f"{KEY} {right}\n", "/etc/api.keys")
    assert ("/etc/api.keys" in str(caught.value), KEY in str(caught.value)) == (True, False)
    with pytest.raises(ConfigError, match="blanks"):
        parse_keys(f"{KEY} prio=1\n", "/etc/api.keys")


@pytest.mark.parametrize("file", ["pipe", "/dev/zero", "/"])
@pytest.mark.timeout(HANG_LIMIT_S)
def test_irregular_key_file_is_refused_at_once(tmp_path: Path, file: str) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match=r"is no regular file|Is a directory"):
        read_keys(str(tmp_path / file))


@pytest.mark.parametrize(
    "text", ["", "# only a comment", "secret", "x" * (KEY_CHARS_MIN - 1), "with a blank in the key"]
)
def test_file_without_good_keys_is_refused_and_no_key_shown(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "file")
    assert not text or text not in str(caught.value)


# ---------------------------------------------------------------- hisparse up --http


@pytest.mark.parametrize("address", ["8000", ":8000", "host:", "host:x", "host:-1"])
def test_up_requires_an_address_for_the_front(address: str) -> None:
    result = run("up", "--http", address)
    assert result.exit_code == 2
    assert f"{address!r} is not HOST:PORT" in result.stderr


def test_up_without_keys_opens_no_public_front() -> None:
    result = run("up", "--http", "0.0.0.0:8000")
    assert result.exit_code == EXIT_CODES["config"]
    assert "http.host=0.0.0.0: without API keys any client" in result.stderr


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    assert HttpSettings(host="::1", port=1).url == "http://[::1]:1"
