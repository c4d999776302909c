"""What guards a door, and what a peer shows there: options of CURVE, what libzmq attests of a peer, the peer's errors.

What is attested of a connection comes with each of its messages, as properties. A peer may send properties of its own
with its handshake; libzmq puts its own first and keeps them, so nobody can claim another process or user. Without a ZAP
handler there is no user, and what a peer calls User-Id is then his invention: read it at guarded doors only.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq

from coordinator.errors import ConfigError, NotAllowed, Unavailable
from coordinator.transport.keys import Insecure, PeerKey, ServerKey


class Door(NamedTuple):
    """What a tcp endpoint is guarded by: the coordinator's key, and the role whose keys are allowed (zap.py)."""

    key: ServerKey
    role: str


def check_guarded(endpoint: str, guard: Door | PeerKey | Insecure | None) -> None:
    """Raise ConfigError for what is no endpoint, and for tcp without keys, unless the operator wants none."""
    if not endpoint.startswith(("ipc://", "tcp://", "inproc://")):
        raise ConfigError(
            "not an endpoint", field="endpoint", value=endpoint, remedy="use ipc:///PATH or tcp://HOST:PORT"
        )
    if guard is None and not endpoint.startswith(("ipc://", "inproc://")):
        raise ConfigError(
            "tcp takes keys, or the word that none are wanted",
            field="endpoint",
            value=endpoint,
            remedy="set cluster.keys_dir (`hisparse keys init` makes keys), use ipc://, or say --insecure",
        )


def guard_door(socket: zmq.Socket[bytes], door: Door) -> None:
    """Before it is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, door.key.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, door.role.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def show_key(socket: zmq.Socket[bytes], key: PeerKey) -> None:
    """Before it is connected."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())


# ---------------------------------------------------------------- what is attested


def attested_user(frame: zmq.Frame) -> str:
    """Whose key the connection of `frame` bears; only for guarded doors."""
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


# ---------------------------------------------------------------- what a peer is told by its own end


def not_allowed(endpoint: str, key: PeerKey | None) -> NotAllowed:
    whose = f"the key of {key.role} {key.name} ({key.path})" if key else "a peer without a key"
    return NotAllowed(
        f"{whose} is not let in here",
        field="endpoint",
        value=endpoint,
        remedy="allow it with `hisparse keys add` and send the coordinator SIGHUP, or use the endpoint of its role",
    )


def hung_up(endpoint: str, key: PeerKey | None) -> Unavailable:
    """During the handshake. A coordinator that cannot read one says nothing; nor does one that dies just then."""
    if key is None:
        message, remedy = "it hung up: does it want a key?", "set cluster.keys_dir, or start it"
    else:
        message = f"it hung up: the server key in {key.path} may not be this coordinator's, or it takes no keys"
        remedy = "get a fresh key file from its operator, or start it"
    return Unavailable(message, field="endpoint", value=endpoint, remedy=remedy)
