"""HTTP/1.1 of one connection: bytes to requests, answers to bytes. Pure.

h11 reads and writes the grammar. What it leaves open is refused here, before a handler sees the request:

    another version         505: HTTP/2 with prior knowledge begins with `PRI * HTTP/2.0`
    CONNECT                 405
    Upgrade                 400: WebSocket and h2c; this server has one protocol, which no request may switch
    two lengths             400: Transfer-Encoding beside Content-Length, or in HTTP/1.0 (RFC 9112, 6.1)
    header section          431: more than HEADER_BYTES_MAX, counted from the request line to the empty line

A refused request ends its connection: where it ends cannot be known. The end of a connection is the caller's to see;
no empty bytes are fed.

Rejected: hypercorn. It chooses a protocol for each connection (HTTP/1.1, HTTP/2, WebSocket, by preface, Upgrade or
ALPN) without an option to leave one out, and lets what a protocol raises end the server's nursery: a single peer could
stop the front. Containing that from outside would mean to replace its connection task; its limits on headers, idle time
and unread answers had to be kept by other means already. With h11 alone there is one protocol, and all of it runs below
one handler of exceptions for each connection (hisparse.http.server.listener).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final
from urllib.parse import unquote

import h11

from hisparse.http.errors import (
    STATUSES,
    VALUE_CHARS_MAX,
    HeadersTooLarge,
    Malformed,
    MethodRefused,
    UpgradeRefused,
    VersionRefused,
)

#: A request line and its headers.
HEADER_BYTES_MAX: Final = 32 * 1024
VERSIONS: Final = (b"1.0", b"1.1")


@dataclass(frozen=True)
class RequestHead:
    """A request without its body. Header names are in lower case, in the order in which they came; `path` is without
    query, its percent signs decoded."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]

    def header(self, name: str) -> str:
        """The first of that name (lower case), "" when there is none."""
        return next((value for known, value in self.headers if known == name), "")

    @property
    def has_body(self) -> bool:
        return self.header("content-length") not in ("", "0") or bool(self.header("transfer-encoding"))

    @property
    def body_bytes(self) -> int:
        """As announced; 0 when it is not."""
        return int(self.header("content-length") or 0)


class Wire:
    """`next_head`, the pieces of its body, an answer, and so on while `reuse` says so."""

    def __init__(self, told_idle_s: int = 0) -> None:
        """Answers tell clients for how long they may keep the connection idle, unless it is 0."""
        self._told_idle_s = told_idle_s
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)
        self._body_is_whole = False
        self._method = b""
        self._head_bytes = 0  # received since the last request, while the next one's header is incomplete

    # ------------------------------------------------------------ what comes

    def feed(self, data: bytes) -> None:
        self._h11.receive_data(data)
        self._head_bytes += len(data)

    @property
    def has_begun(self) -> bool:
        """Whether a part of the next request is here."""
        return self._head_bytes > 0

    @property
    def waiting_bytes(self) -> int:
        """Received and not read yet."""
        return len(self._h11.trailing_data[0])

    def next_head(self) -> RequestHead | None:
        """The next request; None: more bytes are needed. Raises Malformed, HeadersTooLarge, MethodRefused,
        UpgradeRefused or VersionRefused; the connection can be answered once more then, and ends."""
        self._body_is_whole = False
        event = self._next_event()
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method
        if self._head_bytes - self.waiting_bytes > HEADER_BYTES_MAX:
            raise _too_large()
        _check(event)
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers)
        head = RequestHead(event.method.decode("ascii"), _path(event.target), headers)
        if not head.has_body:
            self.next_piece()
        return head

    def next_piece(self) -> bytes | None:
        """The next piece of the body, b"" once it is whole; None: more bytes are needed. Raises Malformed."""
        if self.body_is_whole:
            return b""
        event = self._next_event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        self._body_is_whole = isinstance(event, h11.EndOfMessage)
        return b"" if self._body_is_whole else None

    @property
    def body_is_whole(self) -> bool:
        """Of the latest request."""
        return self._body_is_whole

    def _next_event(self) -> object:
        try:
            return self._h11.next_event()
        except (h11.RemoteProtocolError, ValueError) as error:  # ValueError: a length of 5,000 digits
            error.__traceback__ = None  # one of its frames is h11's with the error itself: a cycle with the connection
            if getattr(error, "error_status_hint", 0) == STATUSES[HeadersTooLarge.code]:
                raise _too_large() from error
            raise Malformed(
                "is not valid HTTP/1.1",
                field="request",
                remedy="check the request line, the Host header and the length of the body",
            ) from error

    # ------------------------------------------------------------ what goes

    @property
    def waits_to_be_asked(self) -> bool:
        """Whether the client holds its body back until `go_on` was sent to it (Expect: 100-continue)."""
        return self._h11.they_are_waiting_for_100_continue

    def go_on(self) -> bytes:
        return self._sent(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def start(self, status: int, headers: Mapping[str, str], now_s: float, *, last: bool) -> bytes:
        """The beginning of an answer. Without a content-length it is chunked. `last`: the connection ends after it, as
        it does when the body of the request was not read."""
        told = [*headers.items(), ("date", formatdate(now_s, usegmt=True))]
        if last or not self.body_is_whole:
            told.append(("connection", "close"))
        elif self._told_idle_s and self._h11.their_state is h11.DONE:  # neither HTTP/1.0 nor Connection: close
            told += [("connection", "keep-alive"), ("keep-alive", f"timeout={self._told_idle_s}")]
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told]
        return self._sent(h11.Response(status_code=status, headers=encoded))

    def data(self, data: bytes) -> bytes:
        """Nothing, in an answer to HEAD."""
        return b"" if self._method == b"HEAD" else self._sent(h11.Data(data=data))

    def end(self) -> bytes:
        return self._sent(h11.EndOfMessage())

    @property
    def answer_is_whole(self) -> bool:
        return self._h11.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)

    def reuse(self) -> bool:
        """Be ready for the next request; False: the connection ends."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self._method = b""
        self._head_bytes = self.waiting_bytes
        return True

    def _sent(self, event: h11.Event) -> bytes:
        return self._h11.send(event) or b""


def _check(request: h11.Request) -> None:
    names = {name for name, _ in request.headers}
    if request.http_version not in VERSIONS:
        raise VersionRefused(
            "only HTTP/1.1 is spoken here", field="version", value=request.http_version.decode(), remedy="use HTTP/1.1"
        )
    if request.method == b"CONNECT":
        raise MethodRefused("this is no proxy", value="CONNECT", remedy="ask for a path of this server")
    if b"upgrade" in names:
        value = next(value for name, value in request.headers if name == b"upgrade").decode("latin-1")
        told = value[:VALUE_CHARS_MAX]
        raise UpgradeRefused("connections stay HTTP/1.1", field="upgrade", value=told, remedy="leave Upgrade out")
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        text = "beside Content-Length" if b"content-length" in names else "in HTTP/1.0"
        raise Malformed(f"not {text}", field="transfer-encoding", remedy="say the length in one way")


def _path(target: bytes) -> str:
    """Of the origin form and of the absolute form; other forms have none, and are left as they are."""
    text = target.decode("ascii")
    if not text.startswith("/") and "://" in text:
        text = "/" + text.split("://", 1)[1].partition("/")[2]
    return unquote(text.partition("?")[0])


def _too_large() -> HeadersTooLarge:
    text = f"more than {HEADER_BYTES_MAX} bytes"
    return HeadersTooLarge(text, field="headers", remedy="send smaller ones")
