"""Hostile bytes for the sockets of ZMQ: whole connections, from the greeting on, drawn by a grammar and mutated.

`attack` draws what one connection sends: broken handshakes, messages of tests.support.hostile with something wrong in
them, messages of other roles, deep nesting, huge ids, multipart messages of many shapes, finished and not, commands of
ZMTP, frames that claim more than they hold, and noise.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

from protocol import messages
from tests.support.fakes.worker import hello
from tests.support.hostile import ADMIN_SEEDS, CLIENT_SEEDS, NASTY, WORKER_SEEDS, is_lawful_harm, leaves, replaced
from tests.support.zmtp_peer import COMMAND, GREETING, LONG, MORE, READY, frame

SEEDS: Final[dict[str, tuple[messages.Message, ...]]] = {
    "client": CLIENT_SEEDS,
    "admin": ADMIN_SEEDS,
    "worker": WORKER_SEEDS,
}
ROLES: Final = tuple(SEEDS)
#: Most messages of one connection.
MESSAGES_MAX: Final = 40
#: One message in so many has 1 to 20 MiB.
LARGE_ONE_IN: Final = 4_000
#: Of parts that are sent again and again in one message, all together: far more than a listener keeps.
REPEATED_BYTES_MAX: Final = 64 << 20
HUGE: Final[tuple[object, ...]] = ("x" * 100_000, "\U0001f600" * 5_000, bytes(100_000), ["x"] * 20_000)
COMMANDS: Final = (
    *(b"\x04PING\x00\x0a", b"\x04PING\x00\x0aa context", b"\x04PONG", b"\x05ERROR\x06reason", READY),
    *(b"\x09SUBSCRIBEtopic", b"\x06CANCELtopic", b"\x07MESSAGE" + bytes(40), b"", b"\xff", b"\x04PI"),
)


def attack(dice: random.Random, role: str) -> tuple[bytes, bytes, int]:
    """What one connection to the listener of `role` sends: the handshake, what comes behind it, messages in both."""
    if dice.random() < 0.1:
        return _handshake(dice), b"", 1
    data = bytearray()
    if dice.random() < 0.6:
        data += frame(messages.encode(_hello(role)))
    count = dice.randint(1, MESSAGES_MAX)
    for _ in range(count):
        data += _message(dice, role)
    if dice.random() < 0.1:
        data = _flipped(dice, data)
    return GREETING + frame(READY, COMMAND), bytes(data), count


def _hello(role: str) -> messages.Message:
    return hello("fuzz", epoch=1, node="other") if role == "worker" else SEEDS[role][0]


def _handshake(dice: random.Random) -> bytes:
    whole = bytearray(GREETING + frame(READY, COMMAND) + frame(b"first"))
    match dice.randrange(6):
        case 0:
            return dice.randbytes(dice.randrange(300))
        case 1:
            return bytes(whole[: dice.randrange(len(whole))])
        case 2:
            return bytes(whole).replace(
                b"NULL" + bytes(16), dice.choice((b"CURVE", b"PLAIN", b"\xff")).ljust(20, b"\0")
            )
        case 3:
            name = dice.choice((b"ROUTER", b"SUB", b"REQ", b"STREAM", b"", b"x" * 200))
            ready = b"\x05READY\x0bSocket-Type" + len(name).to_bytes(4, "big") + name
            return bytes(GREETING + frame(ready, COMMAND) + frame(b"first"))
        case 4:
            size = dice.choice((2**32 - 1, 2**31, 100_000))
            ready = b"\x05READY\x08Identity" + size.to_bytes(4, "big") + bytes(100)
            return bytes(GREETING + frame(ready, COMMAND))
        case _:
            return bytes(_flipped(dice, whole))


def _flipped(dice: random.Random, data: bytearray) -> bytearray:
    for _ in range(dice.randint(1, 4)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return data


def _message(dice: random.Random, role: str) -> bytes:
    """One message in its frames; mostly one frame."""
    body = _body(dice, role)
    match dice.randrange(20):
        case 0:  # a multipart message, whole
            count = _repeats(body, dice.choice((1, 2, 50, 1_000)))
            parts = [dice.choice((b"", body, dice.randbytes(40))) for _ in range(count)]
            return b"".join(frame(part, MORE) for part in parts) + frame(body)
        case 1:  # what follows is part of it
            part = dice.choice((b"", body))
            return frame(part, MORE) * _repeats(part, dice.choice((1, 2, 500)))
        case 2:
            return frame(dice.choice(COMMANDS), COMMAND)
        case 3:
            return frame(body, dice.randrange(256) & ~LONG)
        case 4 if dice.random() < 0.2:  # claims more than it holds
            size = dice.choice((2**63, 2**63 - 1, 2**40, 1 << 25, 1 << 23, 5_000))
            return bytes([LONG]) + size.to_bytes(8, "big") + body
    return frame(body)


def _repeats(part: bytes, count: int) -> int:
    """`count`, or fewer: so that an attacker does not build gigabytes, during which it sends nothing."""
    return min(count, max(2, REPEATED_BYTES_MAX // max(len(part), 1)))


def _body(dice: random.Random, role: str) -> bytes:
    body = _draw(dice, role)
    return b"" if is_lawful_harm(body) else body


def _draw(dice: random.Random, role: str) -> bytes:
    seeds = SEEDS[role if dice.random() < 0.8 else dice.choice(ROLES)]
    whole = messages.encode(dice.choice(seeds))
    if dice.randrange(LARGE_ONE_IN) == 0:
        return bytes(dice.randint(1 << 20, 20 << 20))
    match dice.randrange(10):
        case 0:
            whole = dice.randbytes(dice.randrange(300))
        case 1:
            whole = whole[: dice.randrange(len(whole))]
        case 2:
            whole = bytes(_flipped(dice, bytearray(whole)))
        case 3:
            whole = _nested(dice, whole)
        case 4:
            tag = dice.choice(("Nothing", "", "x" * 10_000, 7, None))
            whole = msgspec.msgpack.encode([tag, *msgspec.msgpack.decode(whole)[1:]])
        case 5:
            whole = _with(dice, whole, dice.choice(HUGE))
        case 6 | 7 | 8:
            for _ in range(dice.randint(1, 3)):
                whole = _with(dice, whole, dice.choice(NASTY))
    return whole


def _with(dice: random.Random, whole: bytes, value: object) -> bytes:
    """`value` in a place of the message."""
    tree = msgspec.msgpack.decode(whole)
    return msgspec.msgpack.encode(replaced(tree, dice.choice(leaves(tree)), value))


def _nested(dice: random.Random, whole: bytes) -> bytes:
    """Arrays or maps in each other, alone or behind the tag of a message."""
    deep = dice.choice((b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01")) * dice.choice((10, 500, 20_000)) + b"\xc0"
    return deep if dice.random() < 0.5 else whole[: 1 + dice.randrange(len(whole))] + deep
