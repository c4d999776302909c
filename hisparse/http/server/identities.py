"""The ids of a request, by the headers that carry them. Pure.

idempotency-key      the client's name for one request: the same body under the same key is the same request
x-request-id         the id of a trace: gateways set one for many calls, so that it is sent back and logged, and
                     names no request. Without one the answer has the front's own id there
hisparse-request-id  the id at the coordinator, in answers
request-id           the same, in Anthropic's answers: the name that the anthropic package reads
"""

from __future__ import annotations

from typing import Final

IDEMPOTENCY_KEY: Final = "idempotency-key"
TRACE_ID: Final = "x-request-id"
REQUEST_ID: Final = "hisparse-request-id"
ANTHROPIC_REQUEST_ID: Final = "request-id"
#: Of an id that is sent back.
TRACE_ID_CHARS_MAX: Final = 256


def trace_id_of(sent: str) -> str:
    """Return `sent` if it is printable ASCII and not too long, else ""."""
    fits = len(sent) <= TRACE_ID_CHARS_MAX and sent.isascii() and sent.isprintable()
    return sent if fits else ""


def scoped_id(chosen: str, scope: str) -> str:
    """The id at the coordinator of the request that its owner calls `chosen`. `scope` is "" where there are no keys."""
    return f"{chosen}.{scope}" if scope else chosen
