"""Large bodies: checked beside the front, with the same refusals, and not decoded by it before that."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.http import answering
from hisparse.http.apis import large_bodies
from hisparse.http.apis.body import ApiBody, read_body
from hisparse.http.apis.large_bodies import LARGE_BYTES_MIN, Bounds, LargeBodies
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.apis.responses.bodies import ResponsesBody
from protocol.errors import BadInput
from tests.support.fakes.scheduler import MODEL
from tests.support.http_rig import front_rig

MANY = LARGE_BYTES_MIN // 2
TOKENIZER = Bounds(4)


@pytest.fixture(scope="module")
def bodies() -> Iterator[LargeBodies]:
    made = LargeBodies()
    yield made
    made.close()


def refusal(bodies: LargeBodies, data: bytes, kind: type[ApiBody] = CompletionBody) -> BadInput:
    with pytest.raises(BadInput) as caught:
        bodies.check(data, kind, MODEL, TOKENIZER)
    return caught.value


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({"prompt": [1] * MANY}, "prompt", "holds 4096 tokens"),
        ({"prompt": [[1] * 5_000] * 100}, "prompt[0]", "holds 4096 tokens"),
        ({"prompt": "x" * 2 * MANY}, "prompt", "holds 4096 tokens"),
        ({"prompt": ["x" * 20_000] * 20}, "prompt[0]", "no text of more than 16384 bytes fits"),
        ({"prompt": [300] * 100, "metadata": "x" * 2 * MANY}, "prompt", "token ids of fake are 0 to 255"),
        ({"prompt": "x", "metadatum": "x" * 2 * MANY}, "metadatum", "is no known parameter"),
    ],
)
def test_large_body_is_refused_by_field(bodies: LargeBodies, body: dict[str, Any], field: str, text: str) -> None:
    error = refusal(bodies, json.dumps(body).encode())
    assert (error.field, text in error.message) == (field, True), error


def test_items_of_a_large_body_are_checked(bodies: LargeBodies) -> None:
    items = [{"role": "user", "content": "x" * 2 * MANY}, {"type": "function_call", "name": "f"}]
    error = refusal(bodies, json.dumps({"input": items}).encode(), ResponsesBody)
    assert (error.field, error.message) == ("input[1].call_id", "is missing")


def test_refusal_of_a_body_that_is_no_json_is_that_of_the_decoder(bodies: LargeBodies) -> None:
    data = b"[" * LARGE_BYTES_MIN
    with pytest.raises(BadInput) as caught:
        read_body(data, ChatBody)
    assert str(refusal(bodies, data, ChatBody)) == str(caught.value)


def test_large_bodies_that_may_fit_are_let_through(bodies: LargeBodies) -> None:
    """Fields, and prompts: 100 of 4,000 tokens each."""
    blank = b" " * LARGE_BYTES_MIN
    bodies.check(json.dumps({"prompt": [[1] * 4_000] * 100}).encode(), CompletionBody, MODEL, TOKENIZER)
    bodies.check(b'{"prompt": "x"' + blank + b"}", CompletionBody, MODEL, TOKENIZER)
    bodies.check(b'{"messages": [{"role": "user", "content": "x"}]' + blank + b"}", ChatBody, MODEL, TOKENIZER)


def test_process_that_ended_costs_no_request(bodies: LargeBodies) -> None:
    fits = b'{"prompt": "x"' + b" " * LARGE_BYTES_MIN + b"}"
    bodies.check(fits, CompletionBody, MODEL, TOKENIZER)
    (process,) = bodies._children._idle
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    bodies.check(fits, CompletionBody, MODEL, TOKENIZER)
    (other,) = bodies._children._idle
    assert other.pid != process.pid


@pytest.mark.refuses("BadInput body={} bytes: {} (send a smaller one)")
def test_body_that_takes_too_long_is_refused() -> None:
    hurried = LargeBodies(limit_s=0.001)
    error = refusal(hurried, b"[" * (64 * LARGE_BYTES_MIN))
    assert "takes more than 0.001 s" in error.message
    hurried.close()


async def test_front_does_not_decode_a_large_body_that_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder would keep the interpreter, and all clients would wait."""
    read: list[int] = []

    def note(data: bytearray, kind: Any) -> Any:
        read.append(len(data))
        return read_body(data, kind)

    monkeypatch.setattr(answering, "read_body", note)
    async with front_rig(tmp_path) as rig:
        for body in ({"prompt": [1] * 2_000_000, "n": 16}, {"prompt": "x" * 15_000_000}):
            peer = await rig.complete(body)
            assert (await peer.answer())["error"]["code"] == "context_length_exceeded"
        assert (read, rig.gateway.scheduler.commands) == ([], [])
        await rig.complete({"prompt": "abc"})
        await rig.submitted(1)
    assert len(read) == 1
    assert read[0] < large_bodies.LARGE_BYTES_MIN
