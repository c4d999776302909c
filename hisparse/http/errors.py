"""Refusals and failures as HTTP: a status, and OpenAI's error object. Pure.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`code` is that of protocol.errors, `param` the field. What no repetition can help says so in `x-should-retry`, which
the openai package heeds; it would repeat any 409, 429 or 5xx otherwise.
"""

from __future__ import annotations

from typing import Final

import msgspec

from protocol.errors import BadInput, HiSparseError
from protocol.messages import Ended

#: Seconds after which a client may come again.
RETRY_AFTER_S: Final = 1

#: By code of protocol.errors. A capacity error about the prompt itself is permanent, see `status_of`.
STATUSES: Final = {
    "bad_input": 400,
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


class Unauthorized(BadInput):
    """No API key, or none of ours."""

    code = "unauthorized"


class MethodRefused(BadInput):
    """The path exists, for other methods."""

    code = "method"


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


def ending_error(ended: Ended) -> HiSparseError:
    """What an output that is not FINISHED means to its client."""
    kind = AnswerAborted if ended.outcome == "ABORTED" else AnswerFailed
    return kind(f"{ended.outcome.lower()}: {ended.reason}", field="request_id", value=ended.request_id)


def status_of(error: HiSparseError) -> int:
    if error.code == "capacity" and error.field == "prompt":  # it would not fit an empty cluster either
        return STATUSES["bad_input"]
    return STATUSES.get(error.code, STATUSES["internal"])


def error_body(error: HiSparseError) -> bytes:
    """OpenAI's error object, as JSON."""
    fallback = "server_error" if status_of(error) >= 500 else "invalid_request_error"
    where = f"{error.field}: " if error.field and not error.value else ""
    content = {
        "message": where + str(error).removeprefix(f"{error.field}=: "),
        "type": _TYPES.get(status_of(error), fallback),
        "param": error.field or None,
        "code": error.code,
    }
    return msgspec.json.encode({"error": content})


def error_headers(error: HiSparseError) -> dict[str, str]:
    status = status_of(error)
    if status in (429, 503):
        return {"retry-after": str(RETRY_AFTER_S)}
    if status == 401:
        return {"www-authenticate": "Bearer"}
    return {"x-should-retry": "false"} if status in (409, 500) else {}
