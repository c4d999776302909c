"""A client of the HTTP front: one completion of token ids, streamed, with the time of each arrival."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import h11
import trio

from benchmarks.serve.measures import Answer
from benchmarks.serve.model import tokens_of

READ_BYTES: Final = 65_536
OK: Final = 200


class Refused(Exception):
    """The front answered something else than a completion."""


@dataclass(frozen=True)
class Front:
    host: str
    port: int
    model: str

    async def complete(self, prompt: Sequence[int], output: int, answer: Answer) -> list[int]:
        """The generated tokens; `answer` is filled as they come. Raises Refused. Cancelled: the request is aborted,
        since its connection closes."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "ignore_eos": True}
        usage = {"include_usage": True, "continuous_usage_stats": True}
        encoded = json.dumps(body | {"stream": True, "stream_options": usage}).encode()
        texts = []
        answer.submitted = time.monotonic()
        try:
            async with aclosing(self._events(encoded)) as events:
                async for event in events:
                    texts += _noted(event, answer)
        except (OSError, trio.BrokenResourceError, h11.ProtocolError) as error:
            raise Refused(f"the connection broke: {error!r}") from error
        answer.ended = time.monotonic()
        return tokens_of("".join(texts))

    async def _events(self, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        buffer = b""
        async with aclosing(self._body(body)) as pieces:
            async for data in pieces:
                *whole, buffer = (buffer + data).split(b"\n\n")
                for event in whole:
                    if event.startswith(b"data: {"):
                        yield json.loads(event[len(b"data: ") :])

    async def _body(self, body: bytes) -> AsyncGenerator[bytes, None]:
        headers = [("Host", self.host), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        request = h11.Request(method="POST", target="/v1/completions", headers=headers)
        connection = h11.Connection(h11.CLIENT)
        async with await trio.open_tcp_stream(self.host, self.port) as stream:
            for event in (request, h11.Data(data=body), h11.EndOfMessage()):
                await stream.send_all(connection.send(event) or b"")
            status = 0
            while True:
                found = connection.next_event()
                if found is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some(READ_BYTES))
                elif isinstance(found, h11.Response):
                    status = found.status_code
                elif isinstance(found, h11.Data):
                    if status != OK:
                        raise Refused(f"status {status}: {bytes(found.data)[:300].decode(errors='replace')}")
                    yield bytes(found.data)
                elif isinstance(found, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return


def _noted(event: dict[str, Any], answer: Answer) -> list[str]:
    """The texts of `event`, whose tokens are noted. Raises Refused."""
    if "error" in event:
        raise Refused(str(event["error"]))
    told = event["usage"]
    if told["completion_tokens"] > (answer.arrivals[-1][1] if answer.arrivals else 0):
        answer.arrivals.append((time.monotonic(), told["completion_tokens"]))
    answer.cached_tokens = told["prompt_tokens_details"]["cached_tokens"]
    return [choice["text"] for choice in event["choices"]]
