"""Large bodies, checked in processes (protocol.children) before a thread of the front reads them.

The decoder keeps the interpreter while it looks through a body: 17 ms for 2,000,000 token ids, 24 ms for 15 MiB of text
(median of 15). The loop, which serves all clients, waits for it. So a body of LARGE_BYTES_MIN or more is checked beside
the front, at low priority, and only one that could be a prompt of the model is read here. The loop then waits 2 ms.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from hisparse.http.apis.body import ApiBody, read_body
from hisparse.http.apis.known import APIS
from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.apis.prompts import prompts_of
from hisparse.http.apis.responses.bodies import ResponsesBody
from hisparse.http.apis.tokens import TOKEN_APIS
from hisparse.http.apis.tools import Skipped
from hisparse.http.errors import ContextExceeded
from hisparse.http.server.threads import share_fairly
from protocol.children import Buffer, Children, serve
from protocol.errors import BadInput
from protocol.messages import ModelInfo
from protocol.text import ByteTokenizer, Tokenizer

#: A body from this size on is checked in a process; below, the decoder takes 2 ms.
LARGE_BYTES_MIN: Final = 256 * 1024
#: For one body: to check it, and address space for it.
CHECK_LIMIT_S: Final = 10.0
MEMORY_BYTES_MAX: Final = 1024 * 1024 * 1024
#: A process is used again after each request: it gives memory back.
KEPT_BYTES_MAX: Final = 1 << 31
#: Bodies by the name of their type.
KINDS: Final[Mapping[str, type[ApiBody]]] = {it.body.__name__: it.body for it in (*APIS, *TOKEN_APIS)}
#: Of scheduling by the kernel: the front's loop comes first.
NICENESS: Final = 5


class CheckRequest(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    model: ModelInfo
    token_bytes_max: int


class CheckReply(msgspec.Struct, frozen=True, array_like=True):
    """A BadInput; an empty `message` means that there is none."""

    message: str = ""
    field: str = ""
    value: str = ""
    remedy: str = ""
    is_too_long: bool = False


_decode_reply: Final = msgspec.msgpack.Decoder(CheckReply).decode  # before threads use it: bodies.prepare


class LargeBodies:
    """Any number of threads may check at once; each has a process for itself meanwhile."""

    def __init__(self, limit_s: float = CHECK_LIMIT_S) -> None:
        self._children = Children(__name__, limit_s, MEMORY_BYTES_MAX, KEPT_BYTES_MAX)

    def check(self, data: Buffer, kind: type[ApiBody], model: ModelInfo, tokenizer: Tokenizer) -> None:
        """Raises BadInput for a body that `read_body` refuses, or whose prompts exceed the context in any
        tokenization of their texts. A small one is let through: reading it shows as much."""
        if len(data) < LARGE_BYTES_MIN:
            return
        reply = self._children.ask(
            msgspec.msgpack.encode(CheckRequest(kind.__name__, model, tokenizer.token_bytes_max)), data
        )
        if reply is None:
            text = f"takes more than {self._children.limits} to read"
            raise BadInput(text, field="body", value=f"{len(data)} bytes", remedy="send a smaller one")
        refusal = _decode_reply(reply)
        if refusal.message:
            kind_of_error = ContextExceeded if refusal.is_too_long else BadInput
            raise kind_of_error(refusal.message, field=refusal.field, value=refusal.value, remedy=refusal.remedy)

    def close(self) -> None:
        """While nothing is checked."""
        self._children.close()


# ---------------------------------------------------------------- the process


class Bounds(ByteTokenizer):
    """Tokenizes nothing: a text within the bound in bytes is one token."""

    def __init__(self, token_bytes_max: int) -> None:
        self.token_bytes_max = token_bytes_max

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [0]


def _checked(request: bytes, data: bytes) -> bytes:
    asked = msgspec.msgpack.decode(request, type=CheckRequest)
    try:
        body = read_body(data, KINDS[asked.kind])
        if isinstance(body, CompletionBody):
            deque(prompts_of(body.prompt, Bounds(asked.token_bytes_max), asked.model), 0)
        elif isinstance(body, ResponsesBody):
            deque(body.turns(Skipped()), 0)
    except BadInput as error:
        is_too_long = isinstance(error, ContextExceeded)
        return msgspec.msgpack.encode(CheckReply(error.message, error.field, error.value, error.remedy, is_too_long))
    return msgspec.msgpack.encode(CheckReply())


if __name__ == "__main__":
    os.nice(NICENESS)
    share_fairly()
    serve(_checked, frames=2)
