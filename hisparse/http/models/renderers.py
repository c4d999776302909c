"""Chat templates, rendered in processes with limits (protocol.children).

One operation of a template on a client's value can take gigabytes.

Rejected: refusing the operations that grow (`*`, `indent`, `center`, `format`, ...): Jinja and str have too many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from hisparse.http.errors import ContextExceeded
from hisparse.http.models.templates import refused, render
from protocol.chat_templates import REMEDY
from protocol.children import Children, serve
from protocol.errors import BadInput, ConfigError

#: For one conversation: to render it, and address space for it.
RENDER_LIMIT_S: Final = 10.0
MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
#: Of a request and its reply, after which a process is used again.
KEPT_BYTES_MAX: Final = 1024 * 1024


class RenderRequest(msgspec.Struct, frozen=True, array_like=True):
    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    bytes_max: int
    tools: list[dict[str, Any]] | None = None


class RenderReply(msgspec.Struct, frozen=True, array_like=True):
    """`refusal` is empty when `text` is the prompt; `code` is that of its class."""

    text: str
    refusal: str = ""
    code: str = BadInput.code


_decode_reply: Final = msgspec.msgpack.Decoder(RenderReply).decode  # before threads use it: bodies.prepare


class Renderers:
    """Any number of threads may render at once; each has a process for itself meanwhile."""

    def __init__(self, limit_s: float = RENDER_LIMIT_S, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._children = Children(__name__, limit_s, memory_bytes_max, KEPT_BYTES_MAX)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        bytes_max: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render as templates.render does, within limits. Raises BadInput or ConfigError."""
        shown = None if tools is None else [dict(tool) for tool in tools]
        request = RenderRequest(template, [dict(message) for message in messages], dict(variables), bytes_max, shown)
        reply = self._children.ask(msgspec.json.encode(request))  # integers may have more than 64 bits
        if reply is None:
            text = f"the model's chat template takes more than {self._children.limits} for them"
            raise refused(text, len(messages))
        answer = _decode_reply(reply)
        if answer.code == ConfigError.code:
            raise ConfigError(answer.refusal, remedy=REMEDY)
        if answer.code == ContextExceeded.code:
            raise ContextExceeded(answer.refusal, field="messages", remedy="send fewer or shorter ones")
        if answer.refusal:
            raise refused(answer.refusal, len(messages))
        return answer.text

    def close(self) -> None:
        """While nothing renders."""
        self._children.close()


# ---------------------------------------------------------------- the process


def _rendered(data: bytes) -> bytes:
    request = msgspec.json.decode(data, type=RenderRequest)
    try:
        text = render(
            request.template, request.messages, request.variables, request.bytes_max, _strftime_now, request.tools
        )
        text.encode()
    except BadInput as error:
        return msgspec.msgpack.encode(RenderReply("", error.message, error.code))
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(RenderReply("", "hold half of a surrogate pair"))
    return msgspec.msgpack.encode(RenderReply(text))


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


if __name__ == "__main__":
    serve(_rendered, frames=1)
