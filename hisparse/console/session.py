"""The connection of a command to the coordinator, shared by all commands that need one."""

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
#: How often `drain --wait` asks, and its time beyond the deadline for the last requests to quiesce.
WAIT_INTERVAL_S: Final = 0.2
WAIT_MARGIN_S: Final = 10.0
DRAINED: Final = "drained"


def endpoint_for(config: Config, role: str) -> tuple[str, str, PeerKey | Insecure | None]:
    """Role, endpoint and key for commands of `role`; commands of clients use `cluster.speak_as`. Raises ConfigError."""
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


def run_command(config: Config, role: str, output: str, action: Callable[[Client], Awaitable[tuple[str, ...]]]) -> None:
    """Send a command and print the lines of its answer, one per request or worker. Raises HiSparseError."""
    lines = call(config, role, action)
    if output == "jsonl":
        for line in lines:
            write_json({"detail": line})
    else:
        emit_one({"detail": lines}, output, lines)


def wait_drained(config: Config, names: Collection[str], limit_s: float) -> None:
    """Return once the workers, or all ranks of the groups, are drained; none named: all workers.

    Raises NotFound, or Unavailable naming those that are not.

    Waits for `limit_s` and WAIT_MARGIN_S more.
    """
    call(config, "client", lambda client: _until_drained(client, names, limit_s + WAIT_MARGIN_S))


async def _until_drained(client: Client, names: Collection[str], limit_s: float) -> None:
    give_up_at = trio.current_time() + limit_s
    while True:
        rows = [row for row in await client.workers() if not names or {row.worker, row.group} & set(names)]
        states = {row.worker: row.state for row in rows}
        missing = sorted(set(names) - set(states) - {row.group for row in rows})
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
