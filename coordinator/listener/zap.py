"""Who may come in: the answer to every CURVE handshake, by ZAP (ZMQ's RFC 27).

libzmq asks on an inproc address, one per context, and lets nobody in until it is answered; pyzmq's own handlers run on
asyncio or in a thread. A question names the listener that was knocked at (its ZAP domain is the role) and the peer's
public key; the answer is the user that the peer is from then on, which libzmq attaches to each of its messages. A key
that is allowed at one listener is unknown at the others, so a client's key opens neither the admins' nor the workers'
listener.

A listener without a handler stays shut (sockets.py sets ZAP_ENFORCE_DOMAIN): what fails here, fails closed.

A key that begins more than HANDSHAKES_PER_S handshakes a second waits: each costs each side most of a millisecond of
arithmetic, one at a time (1.5 ms for both, making and closing the socket included).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

import trio
import zmq
from zmq.utils import z85

from coordinator.listener.dropped import Dropped
from coordinator.listener.rate_limiter import RateLimiter, RateVerdict
from coordinator.listener.router import ZAP_ENDPOINT
from protocol.transport.keys import AllowedKey
from protocol.transport.watched import Watched, context_of

VERSION: Final = b"1.0"
KEY_BYTES: Final = 32
#: Handshakes per key, and how many at once: a fleet of clients under one key that comes back together is no attack.
HANDSHAKES_PER_S: Final = 50.0
HANDSHAKES_BURST: Final = 500


class ZapAnswer(Enum):
    """As ZAP has it. libzmq tells a peer that it is refused, but not that it is put off: that looks like no answer."""

    WELCOME = b"200"
    PUT_OFF = b"300"
    REFUSED = b"400"


class AllowList:
    """Who may come in at which listener. Pure."""

    def __init__(self, allowed: Iterable[AllowedKey]) -> None:
        self._users = {(key.role, key.public): key.user for key in allowed}
        self._handshakes = RateLimiter(HANDSHAKES_PER_S, HANDSHAKES_BURST)

    def judge(self, role: str, public: str, now: float) -> tuple[ZapAnswer, str]:
        """The answer to the bearer of `public` at the listener of `role`, and who that is."""
        user = self._users.get((role, public), "")
        if not user:
            return ZapAnswer.REFUSED, ""
        bearer = f"{role} {public}".encode()
        is_calm = self._handshakes.judge(bearer, bearer, 1.0, now) is RateVerdict.TAKE
        return (ZapAnswer.WELCOME, user) if is_calm else (ZapAnswer.PUT_OFF, "")

    def replace(self, allowed: Iterable[AllowedKey]) -> frozenset[str]:
        """Another list from now on; returns the users who have lost a key."""
        users = {(key.role, key.public): key.user for key in allowed}
        lost = frozenset(user for key, user in self._users.items() if key not in users)
        self._users = users
        return lost


class ZapHandler:
    """Answers for every CURVE listener of this process. Bound at once, so that no listener opens before it; `run` until
    cancelled."""

    def __init__(self, allowed: AllowList, counter: Counter[tuple[str, str]]) -> None:
        self.allowed = allowed
        self._counter = counter
        self._dropped: dict[str, Dropped] = {}
        self._socket = context_of("router").socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)
        self._watched = Watched(self._socket)

    async def run(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            await self._watched.wait_for(zmq.POLLIN)
            question = self._socket.recv_multipart(zmq.NOBLOCK)
            self._socket.send_multipart(self.answer(question, trio.current_time()), zmq.NOBLOCK)

    def answer(self, question: Sequence[bytes], now: float) -> list[bytes]:
        """Version, number, domain, address, routing id, mechanism, and its credentials: for CURVE the 32 bytes of a
        public key. Anything else is refused."""
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
        dropped.note(reason, address, f"a handshake was {answer.name.lower().replace('_', ' ')}", now)

    def close(self) -> None:
        """Unbound first: a closed socket gives its inproc address up some time later, to the next life's surprise."""
        self._socket.unbind(ZAP_ENDPOINT)
        self._watched.close()


def _text(domain: bytes) -> str:
    return domain.decode(errors="replace")
