"""One command, one connection: what the commands that ask and tell have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from hisparse.client.client import RECONNECT_LIMIT_S, Client, open_client, run_client
from hisparse.console.output import emit_one, note, write_json
from protocol.errors import NotFound, Unavailable
from protocol.transport.keys import Insecure, PeerKey, access

if TYPE_CHECKING:
    from protocol.settings import Config

T = TypeVar("T")
#: How often `drain --wait` looks, and what it grants on top of the deadline for the last requests to quiesce.
WAIT_INTERVAL_S: Final = 0.2
WAIT_MARGIN_S: Final = 10.0
DRAINED: Final = "drained"


def endpoint_for(config: Config, role: str) -> tuple[str, str, PeerKey | Insecure | None]:
    """Role, endpoint and key for what a `role` may do; what clients may, admins may too. Raises ConfigError."""
    cluster = config.cluster
    if role == "client":
        role = cluster.speak_as
    endpoint = cluster.admin_endpoint if role == "admin" else cluster.client_endpoint
    return role, endpoint, access(cluster, role, endpoint)


def connected(
    config: Config, role: str, *, reconnect_limit_s: float = RECONNECT_LIMIT_S
) -> AbstractAsyncContextManager[Client]:
    """A connected client of `role`, "client" or "admin". Raises HiSparseError."""
    role, endpoint, key = endpoint_for(config, role)
    return open_client(endpoint, role=role, name="hisparse", reconnect_limit_s=reconnect_limit_s, key=key)


def call(config: Config, role: str, action: Callable[[Client], Awaitable[T]]) -> T:
    """Await `action(client)` on a connection of `role`, "client" or "admin". Raises HiSparseError."""
    role, endpoint, key = endpoint_for(config, role)
    return run_client(endpoint, action, role=role, name="hisparse", key=key)


def tell(config: Config, role: str, output: str, command: Callable[[Client], Awaitable[tuple[str, ...]]]) -> None:
    """Carry out a command that changes something and print its lines: one per request or worker."""
    lines = call(config, role, command)
    if output == "jsonl":
        for line in lines:
            write_json({"detail": line})
    else:
        emit_one({"detail": lines}, output, lines)


def wait_drained(config: Config, names: Collection[str], limit_s: float) -> None:
    """Return once the workers (none named: all) are drained. Raises NotFound or Unavailable naming who is not."""
    call(config, "client", lambda client: _until_drained(client, names, limit_s + WAIT_MARGIN_S))


async def _until_drained(client: Client, names: Collection[str], limit_s: float) -> None:
    give_up_at = trio.current_time() + limit_s
    while True:
        states = {row.worker: row.state for row in await client.workers() if not names or row.worker in names}
        missing = sorted(set(names) - set(states))
        if missing:
            raise NotFound("no such worker", field="worker", value=" ".join(missing), remedy="see: hisparse workers")
        waiting = sorted(worker for worker, state in states.items() if state != DRAINED)
        if not waiting:
            note("drained")
            return
        if trio.current_time() > give_up_at:
            raise Unavailable(
                f"not drained after {limit_s:g} s",
                field="worker",
                value=" ".join(waiting),
                remedy="see: hisparse requests",
            )
        await trio.sleep(WAIT_INTERVAL_S)
