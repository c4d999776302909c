"""Replacing the workers of a running `hisparse up` by processes of other code, one after the other.

    command   hisparse up --replace-workers ─► RUNTIME_DIR/up.sock: which code, how long requests may run on
    1 beside  a standby of that code (worker.standby) comes beside the old worker: it imports, registers the host pool
              and maps the weights that the keeper holds. One that ends or comes no further is the end of the command;
              no request has noticed
    2 drain   requests move to other workers of the node, one after the other, through the host pool. Those that fit
              none run on until the deadline, and are then retracted, with their rows kept. Where there is no other
              worker, all are retracted at once
    3 order   SIGTERM to the old worker, which holds no request. Once its exit is proved (I2) the standby is ordered,
              as after any death (hisparse.cluster.supervision), and says hello as an epoch of the same name
    4 serves  once it is connected, later starts of this worker take the new code. Until then they take the code
              before: a new worker that ends in its start costs a restart, and is the end of the command

    old worker killed amid   its standby takes over then: step 4
    command killed           this process finishes
    up ends                  the standby is one of its children

Rejected: both workers connected at once. A worker allocates its arena whole at its start, so that drained requests give
no memory back to the device: the new one would find as much as the old one leaves free, a fraction of its seats.
"""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import trio

from hisparse.client.client import Client
from hisparse.cluster.children import Child, Code
from hisparse.cluster.standbys import LOOK_INTERVAL_S
from hisparse.cluster.supervision import CONNECTED, START_LIMIT_S, ProcessSupervisor
from hisparse.console.options import EXIT_CODES, EXIT_FAILED
from protocol.errors import HiSparseError, Unavailable, WrongState
from protocol.start_and_end import STANDBY
from protocol.transport.private_dir import check_private_dir, make_private_dir
from worker.keeper.credentials import require_own_user

SOCKET: Final = "up.sock"
LINE_BYTES_MAX: Final = 64 * 1024
#: For a question to arrive.
QUESTION_LIMIT_S: Final = 10.0
#: Beyond the deadline of a drain, for the last requests to leave the worker.
DRAIN_MARGIN_S: Final = 10.0
DRAINED: Final = "drained"


class ReplaceOrder(msgspec.Struct, frozen=True):
    """The code that workers are to run, and the seconds for which requests that fit no other worker may run on."""

    code: Code
    deadline_s: float


class ReplaceSaid(msgspec.Struct, frozen=True):
    """A line for the user; the last one has the exit code of the command."""

    line: str
    status: int | None = None


class Replaceable(Protocol):
    """The part of hisparse.cluster.up.Cluster that is needed here."""

    codes: dict[str, Code]

    @property
    def workers(self) -> Mapping[str, Child]: ...
    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]: ...
    def client(self, name: str) -> AbstractAsyncContextManager[Client]: ...
    def start_standby(self, name: str, code: Code | None = None) -> Child: ...


class ReplaceFailedError(HiSparseError):
    """A worker was not replaced; those before it were."""


@dataclass
class WorkerReplacement:
    """One replacement of all workers of a node. `report` is called with lines for the user."""

    cluster: Replaceable
    supervisor: ProcessSupervisor
    order: ReplaceOrder
    report: Callable[[str], None]
    limit_s: float = START_LIMIT_S

    async def run(self) -> None:
        """Replace all workers. Raises WrongState when they cannot be, before the first; ReplaceFailedError when a new
        process does not come up: its worker and those behind it go on with the code before."""
        if groups := self.cluster.groups:
            remedy = "drain the group, and start its ranks again together"
            raise WrongState("ranks of a group are not replaced", field="group", value=" ".join(groups), remedy=remedy)
        names = list(self.cluster.workers)
        if silent := [name for name in names if not self.supervisor.serves(name)]:
            remedy = "wait until it is connected; see: hisparse workers"
            raise WrongState("does not serve", field="worker", value=" ".join(silent), remedy=remedy)
        for name in names:
            await self._replace(name)

    async def _replace(self, name: str) -> None:
        standbys, old = self.supervisor.standbys, self.cluster.workers[name]
        child = self.cluster.start_standby(name, self.order.code)
        await standbys.put(name, child)
        try:
            await self._until(name, child, lambda: child.step == STANDBY)
            self.report(f"{name}: its new process {child.pid} is ready")
            await self._empty(name, old, child)
            if self.cluster.workers[name] is old:
                self.supervisor.leaving.add(name)
                old.signal(signal.SIGTERM)
            await self._until(name, child, self._placed(name, old, child))
            await self._until(name, child, lambda: self.supervisor.serves(name))
        finally:
            self.supervisor.leaving.discard(name)
            await standbys.dismiss(name, child)
        self.cluster.codes[name] = self.order.code
        self.report(f"{name}: replaced")

    def _placed(self, name: str, old: Child, child: Child) -> Callable[[], bool]:
        def placed() -> bool:
            now = self.cluster.workers[name]
            if now not in (old, child):
                raise ReplaceFailedError("the worker ended, and was restarted", field="worker", value=name)
            return now is child

        return placed

    async def _empty(self, name: str, old: Child, child: Child) -> None:
        """Drain the worker, unless it ends. Raises ReplaceFailedError; then it takes requests again."""
        try:
            async with self.cluster.client("hisparse up") as client:
                try:
                    await self._drain(client, name, old, child)
                except ReplaceFailedError:
                    await client.undrain([name])
                    raise
        except ReplaceFailedError:
            raise
        except HiSparseError as error:
            if self.cluster.workers[name] is old and old.running:
                remedy = "see: hisparse workers; hisparse undrain"
                raise ReplaceFailedError(f"not drained: {error}", field="worker", value=name, remedy=remedy) from error

    async def _drain(self, client: Client, name: str, old: Child, child: Child) -> None:
        rows = await client.workers()
        node = next((row.node for row in rows if row.worker == name), "")
        others = [row for row in rows if row.worker != name and row.node == node and row.state == "connected"]
        deadline_s = self.order.deadline_s if others else 0.0
        for line in await client.drain([name], handover=True, deadline_s=deadline_s):
            self.report(line)
        give_up_at = trio.current_time() + deadline_s + DRAIN_MARGIN_S
        while self.cluster.workers[name] is old and old.running:
            state = next((row.state for row in await client.workers() if row.worker == name), "")
            if not child.running:
                raise _ended(name, child, await child.wait())
            if state == DRAINED or state not in CONNECTED:
                return
            if trio.current_time() > give_up_at:
                raise ReplaceFailedError("not drained in time", field="worker", value=name)
            await trio.sleep(LOOK_INTERVAL_S)

    async def _until(self, name: str, child: Child, done: Callable[[], bool]) -> None:
        """Wait until `done`. Raises ReplaceFailedError when `child` ends before, or comes no further."""
        seen, since = "", trio.current_time()
        while not done():
            if child.step != seen:
                seen, since = child.step, trio.current_time()
            elif trio.current_time() - since > self.limit_s:
                text = f"its new process has come no further than {seen!r} for {self.limit_s:g} s"
                raise ReplaceFailedError(text, field="worker", value=name)
            with trio.move_on_after(LOOK_INTERVAL_S):
                raise _ended(name, child, await child.wait())


async def replace_workers(
    cluster: Replaceable, supervisor: ProcessSupervisor, order: ReplaceOrder, report: Callable[[str], None]
) -> None:
    """Carry out `order` on all workers of `cluster`. Raises as WorkerReplacement.run does."""
    await WorkerReplacement(cluster, supervisor, order, report).run()


def _ended(name: str, child: Child, status: int) -> ReplaceFailedError:
    remedy = "it goes on with the code before; see the log of its new process"
    return ReplaceFailedError(f"its new process {child.end_text(status)}", field="worker", value=name, remedy=remedy)


# ---------------------------------------------------------------- the side of `up`


@contextmanager
def control_socket(runtime_dir: str) -> Iterator[socket.socket]:
    """A listening socket in `runtime_dir`, removed at the end. Raises ConfigError and OSError."""
    path = Path(runtime_dir) / SOCKET
    make_private_dir(runtime_dir)
    with socket.socket(socket.AF_UNIX) as listener:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


@dataclass
class ReplaceServer:
    """Carries out one order at a time. `replace` does so, with a function for its lines; it raises HiSparseError."""

    replace: Callable[[ReplaceOrder, Callable[[str], None]], Awaitable[None]]
    report: Callable[[str], None]
    is_busy: bool = False

    async def serve(self, listener: socket.socket) -> None:
        """Take orders until cancelled. One is carried out to its end, whatever becomes of the command that gave it."""
        accepting = trio.socket.from_stdlib_socket(listener)
        async with trio.open_nursery() as nursery:
            while True:
                connection, _ = await accepting.accept()
                nursery.start_soon(self._answer, trio.SocketStream(connection))

    async def _answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                require_own_user(stream.socket)
                with trio.fail_after(QUESTION_LIMIT_S):
                    order = msgspec.json.decode(await _line(stream), type=ReplaceOrder)
            except (HiSparseError, msgspec.DecodeError, OSError, trio.BrokenResourceError, trio.TooSlowError):
                return
            sender, receiver = trio.open_memory_channel[ReplaceSaid](math.inf)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_tell, stream, receiver)
                with sender:
                    sender.send_nowait(await self._carry_out(order, sender))

    async def _carry_out(self, order: ReplaceOrder, sender: trio.MemorySendChannel[ReplaceSaid]) -> ReplaceSaid:
        def say(line: str) -> None:
            self.report(line)
            sender.send_nowait(ReplaceSaid(line))

        if self.is_busy:
            return ReplaceSaid("workers are being replaced already", EXIT_CODES[WrongState.code])
        self.is_busy = True
        try:
            await self.replace(order, say)
        except ReplaceFailedError as error:
            self.report(f"not replaced: {error}")
            return ReplaceSaid(f"not replaced: {error}", EXIT_FAILED)
        except HiSparseError as error:
            return ReplaceSaid(f"not replaced: {error}", EXIT_CODES[error.code])
        finally:
            self.is_busy = False
        return ReplaceSaid("all workers are replaced", 0)


async def _tell(stream: trio.SocketStream, receiver: trio.MemoryReceiveChannel[ReplaceSaid]) -> None:
    async with receiver:
        async for said in receiver:
            with suppress(trio.BrokenResourceError):  # the command has ended: the order is carried out all the same
                await stream.send_all(msgspec.json.encode(said) + b"\n")


async def _line(stream: trio.SocketStream) -> bytes:
    read = b""
    while not read.endswith(b"\n") and (part := await stream.receive_some(LINE_BYTES_MAX - len(read))):
        read += part
    return read


# ---------------------------------------------------------------- the side of the command


def ask_replacement(runtime_dir: str, order: ReplaceOrder, note: Callable[[str], None]) -> int:
    """Have the `hisparse up` of `runtime_dir` replace its workers; `note` is given its lines. Returns the exit code.

    Raises Unavailable when none runs there or it ends amid, ConfigError when other users could have made the directory.
    """
    check_private_dir(runtime_dir, missing_ok=True)
    about = {"field": "cluster.runtime_dir", "value": runtime_dir}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(Path(runtime_dir) / SOCKET))
            require_own_user(connection)
            connection.sendall(msgspec.json.encode(order) + b"\n")
            with connection.makefile("rb") as lines:
                for line in lines:
                    said = msgspec.json.decode(line, type=ReplaceSaid)
                    note(said.line)
                    if said.status is not None:
                        return said.status
        except (FileNotFoundError, ConnectionRefusedError) as error:
            remedy = "run this on its machine, with the same --runtime-dir; `up --ray` has none"
            raise Unavailable("no `hisparse up` listens there", **about, remedy=remedy) from error
        except OSError as error:
            raise Unavailable(f"hisparse up does not answer: {error}", **about) from error
    raise Unavailable("hisparse up ended before its workers were replaced", **about)
