"""The ZAP handler: authentication of every CURVE handshake (ZMQ's RFC 27).

libzmq asks on an inproc address, one per context, and accepts no connection before the answer; the handlers of pyzmq
run on asyncio or in a thread. A question holds the role of the listener (as its ZAP domain) and the peer's public key.
The answer holds the peer's user, which libzmq attaches to each message of the connection. A key is allowed at the
listener of its role only: a client's key does not open a connection to the admin or worker listener.

Without a handler libzmq refuses all handshakes (router.py sets ZAP_ENFORCE_DOMAIN): a failure here admits no
peer.

A key with more than HANDSHAKES_PER_S is put off. A handshake takes each side most of a millisecond of arithmetic, one
at a time (1.5 ms for both sides, opening and closing the socket included).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

import trio
import zmq
from zmq.utils import z85

from basics.token_bucket import TokenBuckets
from coordinator.listener.dropped import Dropped
from coordinator.listener.rate_limiter import SENDERS_MAX
from coordinator.listener.router import ZAP_ENDPOINT
from protocol.transport.keys import AllowedKey
from protocol.transport.watched import Watched, context_of

VERSION: Final = b"1.0"
KEY_BYTES: Final = 32
#: Handshakes per key. The burst admits many clients of one key that reconnect at the same time.
HANDSHAKES_PER_S: Final = 50.0
HANDSHAKES_BURST: Final = 500


class ZapAnswer(Enum):
    """Status codes of ZAP. libzmq reports REFUSED to the peer; after PUT_OFF the peer sees no answer."""

    WELCOME = b"200"
    PUT_OFF = b"300"
    REFUSED = b"400"


class AllowList:
    """The keys allowed at each listener. Pure."""

    def __init__(self, allowed: Iterable[AllowedKey]) -> None:
        allowed = tuple(allowed)
        self._users = {(key.role, key.public): key.user for key in allowed}
        self._newest = {key.user: key for key in allowed}
        self._handshakes: TokenBuckets[tuple[str, str]] = TokenBuckets(HANDSHAKES_PER_S, HANDSHAKES_BURST, SENDERS_MAX)

    def judge(self, role: str, public: str, now: float) -> tuple[ZapAnswer, str]:
        """The answer to a peer with key `public` at the listener of `role`, and its user ("" unless WELCOME)."""
        user = self._users.get((role, public), "")
        if not user:
            return ZapAnswer.REFUSED, ""
        within_rate = self._handshakes.take((role, public), 1.0, now)
        return (ZapAnswer.WELCOME, user) if within_rate else (ZapAnswer.PUT_OFF, "")

    def replace(self, allowed: Iterable[AllowedKey]) -> frozenset[str]:
        """Use another list from now on; returns the users who have lost a key."""
        allowed = tuple(allowed)
        self._newest = {key.user: key for key in allowed}
        users = {(key.role, key.public): key.user for key in allowed}
        lost = frozenset(user for key, user in self._users.items() if key not in users)
        self._users = users
        return lost

    def newest(self, user: str) -> AllowedKey | None:
        """The newest key of `user`, whose rights are those of all its keys; None: it has none any more."""
        return self._newest.get(user)


class ZapHandler:
    """Answers for every CURVE listener of this process. The constructor binds it, before any listener opens."""

    def __init__(self, allowed: AllowList, counter: Counter[tuple[str, str]]) -> None:
        self.allowed = allowed
        self._counter = counter
        self._dropped: dict[str, Dropped] = {}
        self._socket = context_of("router").socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)
        self._watched = Watched(self._socket)

    async def run(self) -> None:
        """Answer questions, until cancelled."""
        while True:
            await trio.lowlevel.checkpoint()
            await self._watched.wait_for(zmq.POLLIN)
            question = self._socket.recv_multipart(zmq.NOBLOCK)
            self._socket.send_multipart(self.answer(question, trio.current_time()), zmq.NOBLOCK)

    def answer(self, question: Sequence[bytes], now: float) -> list[bytes]:
        """The frames of the answer to `question`.

        The frames of a question are version, number, domain, address, routing id, mechanism and credentials; for CURVE
        the credentials are a public key of 32 bytes. Any other question is refused.
        """
        match question:
            case [b"1.0", number, domain, address, _, b"CURVE", bytes(public)] if len(public) == KEY_BYTES:
                answer, user = self.allowed.judge(_text(domain), z85.encode(public).decode(), now)
            case [_, number, domain, address, *_]:
                answer, user = ZapAnswer.REFUSED, ""
            case _:
                return [VERSION, b"", ZapAnswer.REFUSED.value, b"", b"", b""]
        if answer is not ZapAnswer.WELCOME:
            self._note(_text(domain), answer, address, now)
        return [VERSION, number, answer.value, answer.name.encode(), user.encode(), b""]

    def _note(self, role: str, answer: ZapAnswer, address: bytes, now: float) -> None:
        dropped = self._dropped.setdefault(role, Dropped(role, self._counter))
        reason = "denied" if answer is ZapAnswer.REFUSED else "rate"
        dropped.note(reason, _text(address), f"a handshake was {answer.name.lower().replace('_', ' ')}", now)

    def close(self) -> None:
        """Unbind, then close: closing alone frees the inproc address only later, and the next bind would fail."""
        self._socket.unbind(ZAP_ENDPOINT)
        self._watched.close()


def _text(domain: bytes) -> str:
    return domain.decode(errors="replace")
