"""Authentication of a connection: the CURVE options of a listener, and the process and user that libzmq attests.

The attested properties of a connection come with each of its messages. A peer may add properties in its handshake, but
cannot replace those of libzmq, so it cannot claim another process or user. Without a ZAP handler libzmq sets no
User-Id, and the peer may set it: read it at guarded endpoints only.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq

from protocol.transport.keys import ServerKey


class CurveGuard(NamedTuple):
    """Guard of a tcp endpoint: the coordinator's key, and the role whose keys are allowed (zap.py)."""

    key: ServerKey
    role: str


def apply_guard(socket: zmq.Socket[bytes], guard: CurveGuard) -> None:
    """Set the CURVE options of `socket`, before it is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, guard.key.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, guard.role.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


# ---------------------------------------------------------------- attested properties


def attested_user(frame: zmq.Frame) -> str:
    """User of the key of `frame`'s connection; only for guarded endpoints."""
    return _property(frame, "User-Id")


def attested_pid(frame: zmq.Frame) -> int:
    """Process that made the ipc connection of `frame`, from "address:uid:gid:pid". 0: unknown."""
    pid = _property(frame, "Peer-Address").rpartition(":")[2]
    return int(pid) if pid.isdecimal() else 0


def descriptor_of(frame: zmq.Frame) -> int:
    """Descriptor of `frame`'s connection. -1: the peer speaks ZMTP 1.0 or 2.0, to which libzmq gives no properties."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
