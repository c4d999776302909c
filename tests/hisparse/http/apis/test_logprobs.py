"""Log-probabilities in answers: each token once, as text and bytes, in chats and completions, whole and in chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hisparse.http.apis.asks import Ask
from hisparse.http.apis.body import read_body
from hisparse.http.apis.logprobs import ToldTokens, spelling_of
from hisparse.http.apis.openai.answers import ChatAnswer, CompletionAnswer, OpenAiAnswer
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.apis.transcript import Transcript, text_in
from protocol.arrays import Int32Array
from protocol.errors import BadInput
from protocol.logprobs import row_words
from protocol.messages import LOGPROBS_OF_ANSWER_MAX, NO_LOGPROBS, Ended
from protocol.text import ByteTokenizer
from tests.hisparse.http.test_bodies_and_answers import chat, completion, events

TOKENIZER = ByteTokenizer()
TOP = 2
TEXT = "né😀!"
TOKENS = [*TEXT.encode(), 300]  # and a token that stands for no text
PIECES = ("n", "\\xc3", "\\xa9", "\\xf0", "\\x9f", "\\x98", "\\x80", "!", "token_id:300")


def rows_of(tokens: Sequence[int], top: int = TOP) -> Int32Array:
    """The token's own value is -token; the likeliest are 120 and the token."""
    rows = np.zeros((len(tokens), row_words(top)), np.int32)
    values = rows.view(np.float32)
    values[:, 0] = [-token for token in tokens]
    if top:
        rows[:, 1], values[:, 2] = 120, -0.5
        rows[:, 3], values[:, 4] = tokens, [-token for token in tokens]
    return rows


def transcript() -> Transcript:
    return Transcript(TOKENIZER.detokenizer(), told=ToldTokens(TOKENIZER))


def ended(tokens: int) -> Ended:
    return Ended(0, "a", "FINISHED", "eos", tokens)


def whole(answer: OpenAiAnswer, tokens: Sequence[int] = TOKENS, top: int = TOP) -> dict[str, Any]:
    said = transcript()
    pieces = [*said.push(tokens, rows_of(tokens, top)), *said.end(ended(len(tokens)))]
    body: dict[str, Any] = json.loads(answer.whole([pieces], [said]))
    return body


def streamed(answer: OpenAiAnswer, cuts: Sequence[int]) -> list[dict[str, Any]]:
    said, made = transcript(), []
    for start, stop in pairwise((0, *cuts, len(TOKENS))):
        made += answer.delta(0, said.push(TOKENS[start:stop], rows_of(TOKENS[start:stop])), [said])
    return events(*made, *answer.last(0, said.end(ended(len(TOKENS))), [said]))


def chat_ask(**said: Any) -> Ask:
    return chat(messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=TOP, **said)


def test_chat_tells_each_token_as_text_and_bytes() -> None:
    body = whole(ChatAnswer(chat_ask(), 9))
    told = ChatCompletion.model_validate(body, strict=True).choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [it.token for it in told.content] == list(PIECES)
    assert [it.bytes for it in told.content] == [*([byte] for byte in TEXT.encode()), None]
    assert [it.logprob for it in told.content] == [-float(token) for token in TOKENS]
    assert [(it.token, it.logprob, it.bytes) for it in told.content[1].top_logprobs] == [
        ("x", -0.5, [120]),
        ("\\xc3", -195.0, [195]),
    ]


def test_completion_has_the_older_form() -> None:
    body = whole(CompletionAnswer(completion(prompt="x", logprobs=TOP), 9))
    told = Completion.model_validate(body, strict=True).choices[0].logprobs
    assert told is not None
    assert told.tokens == ["n", *(f"bytes:{it}" for it in PIECES[1:7]), "!", "token_id:300"]
    assert told.token_logprobs == [-float(token) for token in TOKENS]
    assert told.text_offset == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert told.top_logprobs is not None
    assert told.top_logprobs[1] == {"x": -0.5, "bytes:\\xc3": -195.0}


def test_no_alternatives_leave_the_token_itself() -> None:
    said = chat(messages=[{"role": "user", "content": "x"}], logprobs=True)
    assert whole(ChatAnswer(said, 9), [110], 0)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    body = whole(CompletionAnswer(completion(prompt="x", logprobs=0), 9), [110], 0)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"n": -110.0}]


def test_output_without_tokens_has_empty_lists() -> None:
    assert whole(ChatAnswer(chat_ask(), 9), [])["choices"][0]["logprobs"] == {"content": [], "refusal": None}


@given(st.lists(st.integers(0, len(TOKENS)), max_size=4).map(sorted))
def test_chunks_tell_together_what_the_whole_tells(cuts: list[int]) -> None:
    entire = whole(ChatAnswer(chat_ask(), 9))["choices"][0]
    chunks = [ChatCompletionChunk.model_validate(it, strict=True) for it in streamed(ChatAnswer(chat_ask(), 9), cuts)]
    told = [it.choices[0].logprobs for it in chunks]
    content = [token for it in told if it is not None for token in it.content or ()]
    assert [it.model_dump(exclude_none=False) for it in content] == entire["logprobs"]["content"]
    assert "".join(it.choices[0].delta.content or "" for it in chunks) == entire["message"]["content"]
    ask = completion(prompt="x", logprobs=TOP)
    older, parts = whole(CompletionAnswer(ask, 9))["choices"][0]["logprobs"], streamed(CompletionAnswer(ask, 9), cuts)
    lists = [it["choices"][0]["logprobs"] for it in parts if it["choices"][0]["logprobs"]]
    assert {name: [entry for it in lists for entry in it[name]] for name in older} == older


def test_they_come_with_the_first_chunk_behind_their_tokens() -> None:
    """The second character has two tokens: the first of them waits for the other, as its text does."""
    counts = [
        len((it["choices"][0]["logprobs"] or {"content": ()})["content"])
        for it in streamed(ChatAnswer(chat_ask(), 9), (1, 2, 3, 7))
    ]
    assert counts == [1, 2, 4, 2, 0]


@given(st.text(min_size=1))
def test_texts_of_whole_tokens_and_bytes_of_all_are_the_output(text: str) -> None:
    spellings = [spelling_of(token, TOKENIZER) for token in text.encode()]
    assert b"".join(bytes(it.data or ()) for it in spellings).decode() == text
    assert all(it.text.isascii() and len(it.text) == 1 for it in spellings if it.is_whole)


def test_requests_without_them_have_none() -> None:
    said = Transcript(TOKENIZER.detokenizer())
    assert text_in(said.push([110])) == "n"
    said.end(ended(1))
    ask = chat(messages=[{"role": "user", "content": "x"}])
    assert not ask.has_logprobs
    assert json.loads(ChatAnswer(ask, 9).whole([[]], [said]))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("said", "logprobs"),
    [({}, NO_LOGPROBS), ({"logprobs": False}, NO_LOGPROBS), ({"logprobs": 0}, 0), ({"logprobs": 20}, 20)],
)
def test_what_a_completion_asks_for(said: dict[str, Any], logprobs: int) -> None:
    ask = completion(prompt=["x", "y"], n=2, **said)
    assert {it.sampling.logprobs for it in ask.choices} == {logprobs}


@pytest.mark.parametrize(
    ("said", "logprobs"),
    [({"top_logprobs": 0}, NO_LOGPROBS), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_what_a_chat_asks_for(said: dict[str, Any], logprobs: int) -> None:
    assert chat(messages=[{"role": "user", "content": "x"}], **said).choices[0].sampling.logprobs == logprobs


def test_answer_of_too_many_is_refused_with_a_limit_that_fits() -> None:
    with pytest.raises(BadInput) as caught:
        completion(prompt="x", n=16, max_tokens=1_000, logprobs=20)
    most = LOGPROBS_OF_ANSWER_MAX // (16 * 21)
    assert (caught.value.field, caught.value.remedy) == ("logprobs", f"set max_tokens to {most} or less")
    completion(prompt="x", n=16, max_tokens=most, logprobs=20)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_those_of_prompts_are_refused_with_the_reason(kind: type[CompletionBody | ChatBody]) -> None:
    rest: dict[str, Any] = (
        {"prompt": "x"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "x"}]}
    )
    with pytest.raises(BadInput, match="only the logits of its last token are computed") as caught:
        read_body(msgspec.json.encode(rest | {"prompt_logprobs": 0}), kind)
    assert caught.value.field == "prompt_logprobs"
