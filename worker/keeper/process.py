"""The keeper of one worker's weights: a process without torch that holds memory and the table of what lies in it.

    empty ──AskWeights──► filling, by one worker ──SealWeights──► held ──AskWeights of others, replaces──► filling
                              │ the worker has gone, or was wrong
                              └──► empty

It reads no weights and loads none: the first worker loads them into its memory as it would into its own, and later ones
map them. So weights take their memory once, and only one program knows what a checkpoint is.

It listens where its parent has bound, in a directory that its user alone may enter, and serves processes of that user
alone. A worker lives on with what it has mapped when the keeper dies: `hisparse up` starts another one with the next
worker, which then loads the weights once more. Ending the worker at once would cost its streams more than that.

What connects is bounded: CONNECTIONS_MAX at a time, MESSAGE_BYTES_MAX a message, IDLE_S between two unless it fills.

Rejected: CUDA's IPC handles, which any process may open that learns of them, and whose memory ends with the process
that made it; a keeper that loads weights itself, which needs torch and a context of 0.5 GB on the device.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from protocol.errors import HiSparseError, ProtocolError
from protocol.logs import fields, logger
from worker.keeper.credentials import require_own_user
from worker.keeper.messages import (
    MESSAGE_BYTES_MAX,
    TENSORS_MAX,
    WEIGHTS_BYTES_MAX,
    AskWeights,
    FillWeights,
    FromKeeper,
    FromWorker,
    GrowWeights,
    KeeperRefuses,
    KeptTensor,
    KeptTensors,
    SealWeights,
    SegmentGiven,
    WeightsDiffer,
    WeightsHeld,
    WeightsIdentity,
    WeightsSealed,
    decode_worker,
    encode,
    in_messages,
    segment_bytes,
)
from worker.keeper.segments import Segment, make_segment

#: Processes that are served at a time; a worker and its successor are two.
CONNECTIONS_MAX: Final = 8
#: For how long a process that fills nothing may say nothing, or not read what it is sent.
IDLE_S: Final = 10.0
#: For how long a worker waits for the end of an earlier one that filled.
TURN_S: Final = 5.0
#: Of a reason in KeeperRefuses.
REASON_CHARS_MAX: Final = 500
#: Remedies.
ONLY_WORKERS: Final = "let workers of the same release alone connect"
WITHOUT: Final = "turn worker.keeper off"

log = logger("worker.keeper")


@dataclass
class KeptWeights:
    """Weights in memory. `is_sealed`: they are whole, and `digest` is that of their bytes."""

    identity: WeightsIdentity
    tensors: list[KeptTensor] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    digest: str = ""
    is_sealed: bool = False

    @property
    def bytes(self) -> int:
        """Memory that is taken at most."""
        return len(self.segments) * segment_bytes(self.identity.device)

    def close(self) -> None:
        while self.segments:
            self.segments.pop().close()


class WeightKeeper:
    """Serves processes of user `uid`."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._kept: KeptWeights | None = None
        self._turn = trio.Lock()  # held by the connection that fills
        self._connections = 0

    async def serve(self, listener: trio.socket.SocketType) -> None:
        """Accept until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                with suppress(ConnectionError):
                    connection, _ = await listener.accept()
                    nursery.start_soon(self._serve_one, connection)

    async def _serve_one(self, connection: trio.socket.SocketType) -> None:
        self._connections += 1
        try:
            with connection, suppress(OSError):
                await self._answer(connection)
        finally:
            self._connections -= 1
            if self._turn.statistics().owner is trio.lowlevel.current_task():
                if self._kept is not None and not self._kept.is_sealed:
                    log.warning("the worker has gone before its weights were whole: they are let go")
                    self._let_go()
                self._turn.release()

    async def _answer(self, connection: trio.socket.SocketType) -> None:
        try:
            require_own_user(connection, self._uid)
            if self._connections > CONNECTIONS_MAX:
                raise ProtocolError(
                    "too many processes at a time",
                    field="connections",
                    value=self._connections,
                    remedy=f"let {CONNECTIONS_MAX} at most connect",
                )
            while (message := await self._receive(connection)) is not None:
                await self._take(connection, message)
        except HiSparseError as error:
            log.warning("a process was refused", extra=fields(error=error))
            await _send(connection, KeeperRefuses(str(error)[:REASON_CHARS_MAX]))
        except trio.TooSlowError:
            log.warning("a process said nothing", extra=fields(seconds=IDLE_S))

    async def _receive(self, connection: trio.socket.SocketType) -> FromWorker | None:
        """The next message; None at the end. Raises ProtocolError, TooSlowError."""
        with trio.fail_after(math.inf if self._fills else IDLE_S):
            data, _, flags, _ = await connection.recvmsg(MESSAGE_BYTES_MAX)
        if flags & socket.MSG_TRUNC:
            size = f"over {MESSAGE_BYTES_MAX} bytes"
            raise ProtocolError("longer than any message", field="message", value=size, remedy=ONLY_WORKERS)
        if flags & socket.MSG_CTRUNC:
            size = f"{len(data)} bytes"
            raise ProtocolError("brings a descriptor", field="message", value=size, remedy=ONLY_WORKERS)
        if not data:
            return None
        try:
            message: FromWorker = decode_worker(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            size = f"{len(data)} bytes"
            raise ProtocolError(f"not readable: {error}", field="message", value=size, remedy=ONLY_WORKERS) from error
        return message

    @property
    def _fills(self) -> bool:
        """True in the task that fills."""
        return self._turn.statistics().owner is trio.lowlevel.current_task()

    async def _take(self, connection: trio.socket.SocketType, message: FromWorker) -> None:
        if isinstance(message, AskWeights):
            await self._ask(connection, message)
            return
        kept = self._kept
        if not self._fills or kept is None or kept.is_sealed:
            raise ProtocolError("out of order", field="message", value=type(message).__name__, remedy=ONLY_WORKERS)
        if isinstance(message, GrowWeights):
            if kept.bytes >= WEIGHTS_BYTES_MAX:
                held = len(kept.segments)
                raise ProtocolError("more memory than any model has", field="segments", value=held, remedy=WITHOUT)
            kept.segments.append(await trio.to_thread.run_sync(make_segment, kept.identity.device))
            await _give(connection, kept.segments[-1], writable=True)
        elif isinstance(message, KeptTensors):
            if len(kept.tensors) + len(message.rows) > TENSORS_MAX:
                held = len(kept.tensors)
                raise ProtocolError("more tensors than any model has", field="tensors", value=held, remedy=WITHOUT)
            kept.tensors += message.rows
        elif isinstance(message, SealWeights):
            for segment in kept.segments:
                segment.seal()
            kept.digest, kept.is_sealed = message.digest, True
            log.info("weights kept", extra=fields(tensors=len(kept.tensors), segments=len(kept.segments)))
            await _send(connection, WeightsSealed())

    async def _ask(self, connection: trio.socket.SocketType, ask: AskWeights) -> None:
        if not self._fills:
            with trio.move_on_after(TURN_S) as scope:
                await self._turn.acquire()
            if scope.cancelled_caught:
                raise ProtocolError(
                    "another process fills these weights",
                    field="weights",
                    value="not whole",
                    remedy="give each worker a name of its own",
                )
        kept = self._kept
        differences = kept.identity.differences(ask.identity) if kept is not None else []
        if kept is not None and not kept.is_sealed:
            raise ProtocolError("out of order", field="message", value="ask", remedy=ONLY_WORKERS)
        if kept is not None and not differences and not ask.replaces:
            self._turn.release()  # any number of processes may map what is sealed
            await self._give_all(connection, kept)
        elif kept is not None and not ask.replaces:
            self._turn.release()
            log.warning("other weights were asked for", extra=fields(differ=", ".join(differences)))
            await _send(connection, WeightsDiffer(tuple(differences)))
        else:
            self._let_go()
            self._kept = KeptWeights(ask.identity)
            await _send(connection, FillWeights())

    async def _give_all(self, connection: trio.socket.SocketType, kept: KeptWeights) -> None:
        rows, segments = [*kept.tensors], [*kept.segments]
        await _send(connection, WeightsHeld(len(rows), len(segments), kept.digest))
        for message in in_messages(rows):
            await _send(connection, message)
        for segment in segments:
            if self._kept is not kept:
                raise ProtocolError(
                    "was replaced meanwhile",
                    field="weights",
                    value=kept.identity.checkpoint,
                    remedy="give each worker a name of its own",
                )
            await _give(connection, segment, writable=False)

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept = None


async def _send(connection: trio.socket.SocketType, message: FromKeeper) -> None:
    """Raises TooSlowError, OSError."""
    with trio.fail_after(IDLE_S):
        await connection.send(encode(message))


async def _give(connection: trio.socket.SocketType, segment: Segment, *, writable: bool) -> None:
    descriptor = segment.export(writable=writable)
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        with trio.fail_after(IDLE_S):
            await connection.sendmsg([encode(SegmentGiven())], rights)
    finally:
        os.close(descriptor)


def keep_weights(descriptor: int) -> None:
    """Serve at the bound socket `descriptor` until the process ends."""
    listener = trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor))
    listener.listen(CONNECTIONS_MAX)
    trio.run(WeightKeeper(os.geteuid()).serve, listener)
