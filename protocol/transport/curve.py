"""CURVE as a peer sees it: which endpoints take keys, the key that a peer shows, and what a refusal means."""

from __future__ import annotations

import zmq

from protocol.errors import ConfigError, NotAllowed, Unavailable
from protocol.transport.keys import PeerKey


def check_guarded(endpoint: str, guard: object | None) -> None:
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


def show_key(socket: zmq.Socket[bytes], key: PeerKey) -> None:
    """Before it is connected."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())


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
