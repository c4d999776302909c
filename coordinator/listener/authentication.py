"""What guards a guard, and what a peer shows there: options of CURVE, what libzmq attests of a peer, the peer's errors.

What is attested of a connection comes with each of its messages, as properties. A peer may send properties of its own
with its handshake; libzmq puts its own first and keeps them, so nobody can claim another process or user. Without a ZAP
handler there is no user, and what a peer calls User-Id is then his invention: read it at guarded endpoints only.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq

from protocol.transport.keys import ServerKey


class CurveGuard(NamedTuple):
    """What a tcp endpoint is guarded by: the coordinator's key, and the role whose keys are allowed (zap.py)."""

    key: ServerKey
    role: str


def apply_guard(socket: zmq.Socket[bytes], guard: CurveGuard) -> None:
    """Before it is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, guard.key.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, guard.role.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


# ---------------------------------------------------------------- what is attested


def attested_user(frame: zmq.Frame) -> str:
    """Whose key the connection of `frame` bears; only for guarded endpoints."""
    return _property(frame, "User-Id")


def attested_pid(frame: zmq.Frame) -> int:
    """The process at the other end of an ipc connection, from when it was made: "address:uid:gid:pid". 0: unknown."""
    pid = _property(frame, "Peer-Address").rpartition(":")[2]
    return int(pid) if pid.isdecimal() else 0


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
