"""CURVE at a peer's end: endpoints that need keys, the key options of a socket, and the errors of a refusal."""

from __future__ import annotations

import zmq

from protocol.errors import ConfigError, NotAllowed, Unavailable
from protocol.transport.keys import PeerKey


def check_guarded(endpoint: str, guard: object | None) -> None:
    """Raise ConfigError unless `endpoint` is valid and, for tcp, `guard` is a key or Insecure."""
    if not endpoint.startswith(("ipc://", "tcp://", "inproc://")):
        raise ConfigError(
            "not an endpoint", field="endpoint", value=endpoint, remedy="use ipc:///PATH or tcp://HOST:PORT"
        )
    if guard is None and not endpoint.startswith(("ipc://", "inproc://")):
        raise ConfigError(
            "tcp is neither encrypted nor authenticated without keys",
            field="endpoint",
            value=endpoint,
            remedy="set cluster.keys_dir (`hisparse keys init` makes keys), use ipc://, or pass --insecure",
        )


def show_key(socket: zmq.Socket[bytes], key: PeerKey) -> None:
    """Set the CURVE options of `socket`, before it connects."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())


def not_allowed(endpoint: str, key: PeerKey | None) -> NotAllowed:
    whose = f"the key of {key.role} {key.name} ({key.path})" if key else "a peer without a key"
    return NotAllowed(
        f"{whose} may not use this endpoint",
        field="endpoint",
        value=endpoint,
        remedy="allow it with `hisparse keys add` and `hisparse reload coordinator`, or use the endpoint of its role",
    )


def hung_up(endpoint: str, key: PeerKey | None) -> Unavailable:
    """The connection ended in the handshake: the coordinator could not read it, or exited. libzmq gives no reason."""
    if key is None:
        message = "the coordinator ended the handshake: it may require a key"
        remedy = "set cluster.keys_dir, or start the coordinator"
    else:
        message = (
            f"the coordinator ended the handshake: the server key in {key.path} may not be this coordinator's, "
            "or it uses no keys"
        )
        remedy = "get a fresh key file from its operator, or start the coordinator"
    return Unavailable(message, field="endpoint", value=endpoint, remedy=remedy)
