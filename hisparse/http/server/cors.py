"""Answers that programs in browsers may read: cross-origin resource sharing (CORS) by `http.cors_origins`. Pure.

A browser hides an answer from a page of another origin unless the answer names that origin. Before a request with a
JSON body or an API key it asks by OPTIONS, without the key: a preflight. Off by default: no header, and OPTIONS is a
method like any other that no path takes.

Credentials of the browser (cookies, client certificates) are never allowed: the front knows API keys alone, which a
program sends itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hisparse.http.server.wire import RequestHead
from protocol.settings import ANY_ORIGIN

#: For how long a browser may remember the answer to a preflight.
PREFLIGHT_MAX_AGE_S: Final = 600
#: `*` stands for all headers but Authorization; the openai package sends several of its own. Names for old browsers.
ALLOWED_HEADERS: Final = "authorization, content-type, idempotency-key, x-request-id, *"
#: Of an answer, beside those that any page may read.
EXPOSED_HEADERS: Final = "x-request-id, request-id, hisparse-request-id, hisparse-ignored, retry-after, x-should-retry"
METHODS: Final = "GET, HEAD, POST"


class Cors:
    """`origins` as HttpSettings.origins has them."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins: Final = frozenset(origins)

    def headers(self, origin: str) -> Mapping[str, str]:
        """Of every answer to a request from `origin`, "" for one that names none. Caches are told that answers differ
        by origin, also by one without the other headers."""
        if ANY_ORIGIN in self._origins:
            return {"access-control-allow-origin": ANY_ORIGIN, "access-control-expose-headers": EXPOSED_HEADERS}
        if not self._origins:
            return {}
        vary = {"vary": "origin"}
        if origin not in self._origins:
            return vary
        return vary | {"access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED_HEADERS}

    def preflight(self, head: RequestHead) -> Mapping[str, str] | None:
        """Headers of the answer beside `headers`; None: `head` is no preflight of an allowed origin."""
        origin = head.header("origin")
        allowed = ANY_ORIGIN in self._origins or origin in self._origins
        if head.method != "OPTIONS" or not (allowed and origin and head.header("access-control-request-method")):
            return None
        return {
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": ALLOWED_HEADERS,
            "access-control-max-age": str(PREFLIGHT_MAX_AGE_S),
        }
