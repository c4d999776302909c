"""Clusters of `hisparse up` that the tests of a run share, also across its processes. Nothing in them is killed.

    process of the run ── shared lock ──► RUN_DIR/PLAN/users ◄── exclusive lock, awaited ── `hisparse up`

The first process that needs a cluster starts it, and the last one that has needed it ends it and checks its journal. A
run that is interrupted leaves none: the kernel drops the locks of processes that have ended, and `hisparse up`, which
then gets its own, ends as by SIGTERM. Each test has a `Guest`: an API key of its own, and a check that its requests
have ended and hold no memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from coordinator.journal.salvage import check
from hisparse.client.client import Client, run_client
from hisparse.http.server.api_keys import owner_of
from protocol.messages import RequestRow
from tests import ROOT
from tests.support import zygote
from tests.support.cluster_rig import assert_nothing_leaked

T = TypeVar("T")

USERS: Final = "users"
READY: Final = "ready.json"
LOG: Final = "up.log"
KEYS: Final = "keys"
#: Each test of a run gets another two.
KEYS_MAX: Final = 600
ENDED: Final = frozenset({"FINISHED", "ABORTED", "FAILED"})
#: Ends what hangs: a start, an end, and the end of a test's requests.
LIMIT_S: Final = 240.0

#: `hisparse up` that this process has started, so that it is reaped.
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Plan:
    """A kind of cluster: its model, and the options of `hisparse up` beside those that `_start` adds."""

    name: str
    write_model: Callable[[Path], object]
    options: Sequence[str]


def _write_chat_model(path: Path) -> None:
    from tests.support.http_rig import write_chat_model

    write_chat_model(path)


def _write_agents_model(path: Path) -> None:
    from worker.runners.tiny import write_tiny_checkpoint

    write_tiny_checkpoint(path, "glm-5", index_topk=16, context_max_tokens=4_096, layers=2)


def _write_published_model(path: Path) -> None:
    from tests.support.http_rig import deepseek_tokenizer_json
    from worker.runners.tiny import write_tiny_checkpoint

    write_tiny_checkpoint(path, "deepseek-v3.2", index_topk=16, context_max_tokens=4_096, layers=2)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "tokenizer.json").write_bytes(deepseek_tokenizer_json())


#: The id of the chat model, which is not the name of its directory.
CHAT_MODEL: Final = "acme/tiny-1"
SEATS: Final = 8
SIZES: Final = ("--host-mem", "64MiB", "--device-mem", "32MiB", "--hot-size-classes", "64,128", "--threads", "1")
FRONT: Final = ("--http", "127.0.0.1:0", "--log-level", "warning", *SIZES)
#: Answers are known: the model is deterministic, with a tokenizer of bytes and a chat template of its own.
CHAT: Final = Plan(
    "chat",
    _write_chat_model,
    (*FRONT, "--served-model-name", CHAT_MODEL, "--deterministic", "--seats", str(SEATS)),
)
#: With the checkpoint's own chat template, and room for an agent's turns.
AGENTS: Final = Plan("agents", _write_agents_model, FRONT)
#: DeepSeek-V3.2 as published: special tokens of its own, and no chat template.
PUBLISHED: Final = Plan("published", _write_published_model, FRONT)


@dataclass
class Standing:
    """A cluster that stands, as its ready file describes it."""

    place: Path
    ready: dict[str, Any]

    @property
    def runtime_dir(self) -> Path:
        return self.place

    @property
    def log(self) -> str:
        """Return the log of `hisparse up` and its children."""
        return (self.place / LOG).read_text()

    def ask(self, action: Callable[[Client], Awaitable[T]]) -> T:
        return run_client(self.ready["client_endpoint"], action)


@contextmanager
def standing(run_dir: Path, plan: Plan) -> Iterator[Standing]:
    """The run's cluster of `plan`. Raises AssertionError at its end when memory is held, audits differ, or a request is
    unfinished."""
    place = run_dir / plan.name
    place.mkdir(mode=0o700, exist_ok=True)
    with (place / USERS).open("w") as users:
        with _alone(place):
            fcntl.flock(users, fcntl.LOCK_SH)  # waits for one that is ending
            if not _runs(place):
                _start(place, plan)
            _count(place, 1)
        cluster = Standing(place, json.loads((place / READY).read_text()))
        try:
            yield cluster
        finally:
            with _alone(place):
                is_last = not _count(place, -1)
                try:
                    if is_last:
                        run_client(cluster.ready["admin_endpoint"], _assert_settled, role="admin")
                finally:
                    fcntl.flock(users, fcntl.LOCK_UN)
                if is_last:
                    _end(place)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """No other process starts or ends the cluster meanwhile."""
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _count(place: Path, change: int) -> int:
    """How many processes use the cluster, after `change`."""
    path = place / "count"
    value = (int(path.read_text()) if path.exists() else 0) + change
    path.write_text(str(value))
    return value


def _runs(place: Path) -> bool:
    for process in _started:
        process.poll()
    try:
        pid = json.loads((place / READY).read_text())["pid"]
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _start(place: Path, plan: Plan) -> None:
    model = place / "model"
    if not model.exists():
        model.mkdir()
        plan.write_model(model)
        write_keys(place)
    (place / READY).unlink(missing_ok=True)
    command = [sys.executable, "-m", __name__, "up", "--model", str(model), "--runtime-dir", str(place)]
    command += ["--ready-file", str(place / READY), "--deadline", "0", "--api-keys", str(place / KEYS), *plan.options]
    with (place / LOG).open("wb") as log:
        process = zygote.start(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)
    _started.append(process)
    _until(lambda: (place / READY).exists() or process.poll() is not None)
    assert process.poll() is None, (place / LOG).read_text()


def _end(place: Path) -> None:
    _until(lambda: not _runs(place))
    found = check(place / "journal.sqlite")
    assert (found.damages, found.salvaged.live) == ((), 0)


def _until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


async def _assert_settled(client: Client) -> None:
    await assert_nothing_leaked(client)
    assert (await client.audit()).differences == ()


# ---------------------------------------------------------------- one test


def key_of(number: int) -> str:
    return f"a-key-of-thirty-two-characters-{number}"


def name_of(number: int) -> str:
    """The owner of a key."""
    return f"test-{number}"


def write_keys(place: Path) -> Path:
    """The file of API keys of tests at a cluster whose runtime directory is `place`."""
    path = place / KEYS
    path.touch(0o600)
    path.write_text("".join(f"{key_of(number)} name={name_of(number)}\n" for number in range(KEYS_MAX)))
    return path


@dataclass
class Guest:
    """One test at a cluster, with two API keys. `ids`: those of its requests, as they were answered; at the
    coordinator, the owner's digits or the number of a sample may follow."""

    cluster: Standing
    number: int
    ids: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return key_of(self.number)

    @property
    def other_key(self) -> str:
        return key_of(self.number + 1)

    @property
    def url(self) -> str:
        return str(self.cluster.ready["http"]["url"])

    @property
    def hooks(self) -> dict[str, list[Callable[[Any], None]]]:
        """Return hooks of an HTTP client that note the ids of requests."""
        return {"response": [self._note]}

    def _note(self, response: Any) -> None:
        names = "x-request-id", "hisparse-request-id"
        self.ids += [found for name in names if (found := response.headers.get(name))]

    def is_own(self, request_id: str) -> bool:
        chosen = [owner_of(name_of(number)) for number in (self.number, self.number + 1)]
        return any(
            request_id == it or request_id.startswith((f"{it}-", *(f"{it}.{owner}" for owner in chosen)))
            for it in self.ids
        )


@contextmanager
def guest(cluster: Standing, *, alone: bool = False) -> Iterator[Guest]:
    """`alone`: no other test is there meanwhile, which would take seats, or make batches whose sums are others.

    Raises AssertionError when a request of the test has not ended behind it, holds memory, or has another end in its
    history than in its row.
    """
    with _alone(cluster.place):
        taken = cluster.place / "taken"
        number = int(taken.read_text()) if taken.exists() else 0
        taken.write_text(str(number + 2))
    assert number < KEYS_MAX, "more tests than API keys (raise KEYS_MAX)"
    with (cluster.place / "guests").open("w") as guests:
        fcntl.flock(guests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        found = Guest(cluster, number)
        yield found
        run_client(cluster.ready["admin_endpoint"], lambda client: _check(client, found), role="admin")


async def _check(client: Client, guest: Guest) -> None:
    own: list[RequestRow] = []
    with trio.move_on_after(LIMIT_S):
        for looks in count():
            own = [row for row in (await client.requests()).rows if guest.is_own(row.request_id)]
            if all(row.state in ENDED and not row.host_pages and not row.hot_chunks for row in own):
                break
            await trio.sleep(min(0.02 * looks, 0.5))
    left = [row for row in own if row.state not in ENDED]
    if left:
        await client.abort([row.request_id for row in left])
    assert left == [], "left behind by the test"
    assert [row for row in own if row.host_pages or row.hot_chunks] == [], "memory that the test has left behind"
    for row in own:
        history = (await client.request(row.request_id)).history
        assert history[-1].state == row.state, history


# ---------------------------------------------------------------- the cluster's process


def main() -> None:
    """Run `hisparse` with the arguments of this process until no process of the run uses the cluster any more."""
    from hisparse.cli import main as hisparse

    users = Path(sys.argv[sys.argv.index("--runtime-dir") + 1], USERS).open("r")  # noqa: SIM115 - until the process ends

    def wait() -> None:
        fcntl.flock(users, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    hisparse()


if __name__ == "__main__":
    main()
