"""Refusals and failures as HTTP: a status, and OpenAI's error object. Pure.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`code` is that of protocol.errors, or OpenAI's for a prompt that is too long. `param` is what the client sent, as a JSON
path; it is null where the client is not the cause. What no repetition can help says so in `x-should-retry`, which
the openai package heeds; it would repeat any 409, 429 or 5xx otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from protocol.errors import BadInput, HiSparseError
from protocol.messages import Ended

#: Seconds after which a client may come again.
RETRY_AFTER_S: Final = 1
#: Of a refused value, in its refusal.
VALUE_CHARS_MAX: Final = 80
#: Of a place within a value, whose names are the client's.
PLACE_CHARS_MAX: Final = 200

#: By code.
STATUSES: Final = {
    "bad_input": 400,
    "context_length_exceeded": 400,
    "malformed": 400,
    "upgrade": 400,
    "unauthorized": 401,
    "not_allowed": 403,
    "not_found": 404,
    "method": 405,
    "too_slow": 408,
    "wrong_state": 409,
    "aborted": 409,
    "too_large": 413,
    "capacity": 429,
    "headers_too_large": 431,
    "failed": 500,
    "config": 500,
    "internal": 500,
    "protocol": 502,
    "unavailable": 503,
    "version": 505,
}
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ContextExceeded(BadInput):
    """Prompt and output fit no context, or no worker of this cluster even when it is empty."""

    code = "context_length_exceeded"


class Unauthorized(BadInput):
    """No API key, or none of ours."""

    code = "unauthorized"


class MethodRefused(BadInput):
    """The path exists, for the methods `allowed`."""

    code = "method"

    def __init__(self, message: str, *, value: str, remedy: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message, field="method", value=value, remedy=remedy)
        self.allowed = tuple(allowed)


class TooLarge(BadInput):
    """The body exceeds its limit."""

    code = "too_large"


class TooSlow(BadInput):
    """The body did not arrive in time."""

    code = "too_slow"


class Malformed(BadInput):
    """What came is no HTTP/1.1, or could be read in two ways."""

    code = "malformed"


class HeadersTooLarge(BadInput):
    """The header section exceeds its limit."""

    code = "headers_too_large"


class UpgradeRefused(BadInput):
    """The client wants another protocol on this connection."""

    code = "upgrade"


class VersionRefused(BadInput):
    """The client speaks another version of HTTP."""

    code = "version"


class AnswerAborted(HiSparseError):
    """The request was aborted, by an operator or because its last follower left."""

    code = "aborted"


class AnswerFailed(HiSparseError):
    """The request came to an end that is not its own fault nor its client's."""

    code = "failed"


#: Of a worker that refuses a grammar: BadInput of `field="grammar"`, as text.
_OF_GRAMMAR: Final = re.compile(r"grammar=[^:\n]*: ")


def ending_error(ended: Ended) -> HiSparseError:
    """Make the error of an output that is not FINISHED. A worker may refuse a grammar that was built here: its
    reason begins with that field. One that grows beyond limits later, behind tokens, is no fault of the body."""
    if ended.outcome == "FAILED" and (found := _OF_GRAMMAR.match(ended.reason)):
        line = ended.reason[found.end() :].partition("\n")[0]
        words = line.rpartition(" (")[0] if line.endswith(")") and " (" in line else line
        return BadInput(f"its form of output cannot be held to: {words}", field="body", remedy="simplify the form")
    kind = AnswerAborted if ended.outcome == "ABORTED" else AnswerFailed
    return kind(f"{ended.outcome.lower()}: {ended.reason}", field="request_id", value=ended.request_id)


#: What clients call the fields of the coordinator.
_PARAMS: Final = {"request_id": "idempotency-key"}
#: What is said of an error that is neither the client's nor a matter of load: its own text is for the log.
_OURS: Final = {
    "config": "the server is set up wrongly, and its log says how",
    "internal": "the server has a defect, and its log says more",
    "protocol": "the server and its coordinator do not understand each other, and its log says more",
}
#: Errors of load, which no change of the request mends.
_LOAD: Final = ("capacity", "unavailable")
#: In place of the coordinator's remedies, which name calls of its own protocol and work of the operator.
_REMEDIES: Final = dict.fromkeys(_LOAD, "retry later") | {"wrong_state": "choose another"}


def is_ours(error: HiSparseError) -> bool:
    """Return whether the client is told nothing but that the log says more."""
    return error.code in _OURS


def param_of(error: HiSparseError) -> str:
    """What the client sent and can change; "" for causes that lie with the server."""
    if is_ours(error) or error.code in _LOAD or error.code == "failed":
        return ""
    return _PARAMS.get(error.field, error.field)


def message_of(error: HiSparseError) -> str:
    """In sentences, for a client of HTTP: no names of settings and no commands of the operator."""
    if is_ours(error):
        return f"{_OURS[error.code].capitalize()}."
    param = param_of(error)
    where = f"{param}: " if param else ""
    got = f" (got {error.value})" if param and error.value and isinstance(error, BadInput) else ""
    remedy = _REMEDIES.get(error.code, error.remedy)
    advice = f" {remedy[0].upper()}{remedy[1:]}{'' if remedy.endswith('?') else '.'}" if remedy else ""
    return f"{where}{error.message}{got}.{advice}"


def status_of(error: HiSparseError) -> int:
    return STATUSES.get(error.code, STATUSES["internal"])


def error_body(error: HiSparseError) -> bytes:
    """OpenAI's error object, as JSON."""
    fallback = "server_error" if status_of(error) >= 500 else "invalid_request_error"
    content = {
        "message": message_of(error),
        "type": _TYPES.get(status_of(error), fallback),
        "param": param_of(error) or None,
        "code": error.code,
    }
    return msgspec.json.encode({"error": content})


#: Anthropic's names of errors, by status; of others it is that of their class, 4xx or 5xx.
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: HiSparseError) -> dict[str, Any]:
    """Anthropic's error object, in the same words. `code` and `param` are OpenAI's."""
    fallback = "api_error" if status_of(error) >= 500 else "invalid_request_error"
    content = {
        "type": _ANTHROPIC_TYPES.get(status_of(error), fallback),
        "message": message_of(error),
        "param": param_of(error) or None,
        "code": error.code,
    }
    return {"type": "error", "error": content}


def anthropic_error_body(error: HiSparseError) -> bytes:
    """As JSON."""
    return msgspec.json.encode(anthropic_error(error))


def error_headers(error: HiSparseError) -> dict[str, str]:
    status = status_of(error)
    if isinstance(error, MethodRefused):
        return {"allow": ", ".join(error.allowed)}
    if status in (429, 503):
        return {"retry-after": str(RETRY_AFTER_S)}
    if status == 401:
        return {"www-authenticate": "Bearer"}
    return {"x-should-retry": "false"} if status in (409, 500) else {}
