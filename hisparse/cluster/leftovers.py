"""Leftovers of an earlier start: unfinished requests in the journal, of which model, and what can be done with them;
sockets of processes that were killed."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from basics.request_states import TERMINAL
from hisparse.client.client import Client
from protocol.config import default_journal
from protocol.errors import ConfigError, Unavailable
from protocol.messages import ModelInfo
from protocol.settings import NO_JOURNAL, Config, WorkerSettings

#: Most requests that a coordinator lists: more than it may have (coordinator.live_requests_max).
ROWS_MAX: Final = 20_000
#: Requests named in one message.
NAMES_MAX: Final = 5
#: Time for aborted requests to end: workers of the earlier start have to be found gone first.
ABORT_LIMIT_S: Final = 30.0
POLL_INTERVAL_S: Final = 0.05


async def check_leftovers(client: Client, config: Config, fingerprint: str, *, abort: bool) -> str:
    """Whether workers with the checkpoint of `fingerprint` may join a coordinator that has just started.

    Unfinished requests of another model, or of this one under another name, keep them out. Raises ConfigError that says
    so; with `abort` these requests are aborted, and the result is a line that says so.
    """
    model = (await client.welcome()).model
    names = await _unfinished(client)
    same_weights = model is not None and model.fingerprint == fingerprint
    if model is None or not names or (same_weights and model.name == _served_name(config)):
        return ""
    if not abort:
        raise _refusal(config, model, names, same_weights=same_weights)
    await client.abort(names)
    with trio.move_on_after(ABORT_LIMIT_S):
        while await _unfinished(client):  # noqa: ASYNC110 - the coordinator tells no end that is not subscribed to
            await trio.sleep(POLL_INTERVAL_S)
        return f"aborted {_count(names)} of model {model.name}"
    raise Unavailable(
        f"requests of model {model.name} have not ended {ABORT_LIMIT_S:g} s after they were aborted",
        field="coordinator.journal",
        value=config.coordinator.journal,
        remedy="workers of an earlier start may still run: end them, and try again",
    )


def _refusal(config: Config, model: ModelInfo, names: Sequence[str], *, same_weights: bool) -> ConfigError:
    serve = f"--served-model-name {model.name}" if same_weights else f"--model with the checkpoint of {model.name}"
    journal = config.coordinator.journal
    elsewhere = "--runtime-dir" if journal == default_journal(config.cluster.runtime_dir) else "--journal"
    are = "is" if len(names) == 1 else "are"
    return ConfigError(
        f"{_count(names)} of another model, {model.name}, {are} in the journal {journal}",
        field="worker.model",
        value=config.worker.model,
        remedy=f"to serve them: {serve}; to abort them: the same command with --abort-unfinished; "
        f"to keep them for later: the same command with another {elsewhere}",
    )


def left_text(config: Config) -> str:
    """What becomes of requests that have not ended when the cluster stops."""
    journal = config.coordinator.journal
    if journal == NO_JOURNAL:
        return "requests that have not ended are lost: there is no journal"
    return f"requests that have not ended are in the journal {journal} and resume at the next start"


def _served_name(config: Config) -> str:
    return config.worker.served_model_name or Path(config.worker.model).resolve().name


async def _unfinished(client: Client) -> list[str]:
    return [row.request_id for row in (await client.requests(ROWS_MAX)).rows if row.state not in TERMINAL]


def _count(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_MAX]) + (", …" if len(names) > NAMES_MAX else "")
    return f"{len(names)} unfinished request{'s' if len(names) != 1 else ''} ({shown})"


IPC: Final = "ipc://"
#: Names of sockets that processes make in the runtime directory.
PATTERNS: Final = (
    "client.sock",
    "admin.sock",
    "worker.sock",
    "group-*.sock",
    "http-*.sock",
    "up.sock",
    "weights-*.sock",
)


def remove_dead_sockets(config: Config, placed: Iterable[WorkerSettings] = ()) -> None:
    """Remove sockets of a cluster with workers `placed` on which no process listens. What is no socket stays."""
    for path in {*_sockets_of(config, placed)}:
        if path.is_socket() and _is_dead(path):
            with suppress(OSError):
                path.unlink()


def _sockets_of(config: Config, placed: Iterable[WorkerSettings]) -> Iterator[Path]:
    cluster, directory = config.cluster, Path(config.cluster.runtime_dir)
    for pattern in PATTERNS:
        yield from directory.glob(pattern)
    endpoints = [cluster.client_endpoint, cluster.admin_endpoint, cluster.worker_endpoint]
    for endpoint in endpoints + [it.group_endpoint for it in placed]:
        if endpoint.startswith(IPC):
            yield Path(endpoint.removeprefix(IPC))


def _is_dead(path: Path) -> bool:
    """Return whether no process listens there. One that has no place for a connection now does listen."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
