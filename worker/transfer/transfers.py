"""Host pages on their way between nodes, as the executor sees them: the two ends of worker/transfer and their work.

Called by the executor's thread alone; nothing here waits. Which page may go, and whether all have come, is decided in
worker/transfer/handover.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from metrics.state import TransferCounters
from protocol.arrays import unpack_int32
from protocol.config import pool_path
from protocol.errors import BadInput
from protocol.inventory import InventoryRow
from protocol.logs import fields, logger
from protocol.messages import DECODE, PREFILL, Receive
from protocol.settings import Config, WorkerSettings
from protocol.units import PAGE_TOKENS
from worker.pool.file import HEADER_BYTES
from worker.pool.host_pool import MappedPool
from worker.runners.base import Runner
from worker.transfer.handover import Incoming, Outgoing
from worker.transfer.interface import Arrived, Delivered, Failed, Layout, PoolMemory, Revoked
from worker.transfer.layer_groups import LayerGroups

if TYPE_CHECKING:
    from worker.transfer import EngineOptions
    from worker.transfer.receiver import PageReceiver
    from worker.transfer.sender import PageSender

log = logger("worker.transfer.transfers")


def check_transfer(settings: WorkerSettings) -> None:
    """Raise ConfigError when the engine that `settings` name cannot be loaded, whichever end needs it."""
    if settings.transfer:
        from worker.transfer import check_engine

        check_engine(settings.transfer, _options(settings))


def _options(settings: WorkerSettings) -> EngineOptions:
    from worker.transfer import EngineOptions

    return EngineOptions(settings.transfer_transports, settings.transfer_devices)


def open_transfers(
    transfers: Transfers, config: Config, runner: Runner, pool: MappedPool, *, wake: Callable[[], None]
) -> None:
    """Give `transfers` the ends that the worker's role asks for, started. Raises ConfigError when they cannot be."""
    settings = config.worker
    if not settings.transfer:
        return
    from worker.transfer import open_receiver, open_sender

    path = str(pool_path(settings.pool_dir, settings.node))
    memory = PoolMemory(pool.pages.numpy(), path, HEADER_BYTES, pool.pool_id)
    layout = Layout.of(runner.geometry, runner.info.fingerprint)
    options = _options(settings)
    name = sender_name(settings.name, os.getpid())
    address = settings.transfer_address or f"ipc://{config.cluster.runtime_dir}/{settings.name}.transfer"
    if settings.role != PREFILL:
        engine = settings.transfer
        transfers.receiver = open_receiver(
            engine, memory, layout, name=name, address=address, options=options, wake=wake
        )
    if settings.role != DECODE:
        host = address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else "127.0.0.1"
        transfers.sender = open_sender(
            memory, layout, name=name, engines=(settings.transfer,), options=options, wake=wake, host=host
        )


def sender_name(worker: str, pid: int) -> str:
    """The name of the sender of one incarnation of a worker."""
    return f"{worker}/{pid}"


class Transfers:
    """Either end may be missing: a worker that only prefills takes nothing in, one that only decodes sends nothing."""

    def __init__(self, sender: PageSender | None = None, receiver: PageReceiver | None = None) -> None:
        self.sender = sender
        self.receiver = receiver
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}

    @property
    def is_idle(self) -> bool:
        return not self._outgoing and not self._incoming

    @property
    def count(self) -> int:
        """Transfers under way, either way."""
        return len(self._outgoing) + len(self._incoming)

    def counters(self) -> dict[str, TransferCounters]:
        """By end, as far as there are any; from any thread."""
        ends = {"sender": self.sender, "receiver": self.receiver}
        return {name: end.counters for name, end in ends.items() if end is not None}

    def inventory(self) -> list[tuple[InventoryRow, list[int]]]:
        """For an audit: a row for each transfer, and the ids of its host pages. The ledger counts a seat for each."""
        return [
            (InventoryRow(transfer_id, len(it.host_pages)), it.host_pages) for transfer_id, it in self._incoming.items()
        ]

    def close(self) -> None:
        """End both ends, within seconds: nothing reads or writes pages through them any more."""
        for end in (self.sender, self.receiver):
            if end is not None:
                end.close()
        self.sender = self.receiver = None

    # ---------------------------------------------------------------- out

    def begin(
        self, transfer_id: int, destination: bytes, prompt_tokens: int, groups: LayerGroups, unsent_pages: int = 0
    ) -> Outgoing:
        """Its pages, but for the first `unsent_pages`, will go in parts, one for each of `groups`. Raises ConfigError,
        naming both values, when pages of another layout are wanted there."""
        if self.sender is None:
            raise BadInput(
                "this worker sends no pages", field="transfer_id", value=transfer_id, remedy="set worker.transfer"
            )
        out = Outgoing(transfer_id, prompt_tokens, groups.count, unsent_pages)
        self.sender.open(transfer_id, destination, out.pages, groups.byte_ends)
        self._outgoing[transfer_id] = out
        return out

    def send(self, out: Outgoing, group: int, staged_rows: int, host_pages: list[int]) -> None:
        """A layer group of rows below `staged_rows` was seen in `host_pages`: let go what may."""
        assert self.sender is not None
        for index in out.take_ready(staged_rows, group):
            self.sender.send(out.transfer_id, index, host_pages[index + out.unsent_pages], group)

    def cancel(self, out: Outgoing, reason: str) -> None:
        """It is over once nothing reads its pages: then `failure` is set."""
        if self.sender is not None and not out.is_over:
            self.sender.cancel(out.transfer_id, reason)

    # ---------------------------------------------------------------- in

    def receive(self, command: Receive) -> None:
        """Raises what the receiver's `open` says, then having taken nothing."""
        if self.receiver is None:
            raise BadInput("this worker takes no pages in", field="receive", value=command.placement)
        pages, shared = unpack_int32(command.host_pages, "host_pages").tolist(), command.prefix_tokens // PAGE_TOKENS
        if command.prefix_tokens % PAGE_TOKENS or not 0 <= command.prefix_tokens < command.prompt_tokens:
            raise BadInput(
                f"must be a multiple of {PAGE_TOKENS} below the prompt's {command.prompt_tokens} tokens",
                field="prefix_tokens",
                value=command.prefix_tokens,
            )
        incoming = Incoming(command.prompt_tokens, pages, shared)
        self.receiver.open(command.placement, incoming.pages)
        self._incoming[command.placement] = incoming

    def takes(self, transfer_id: int) -> bool:
        return transfer_id in self._incoming

    def revoke(self, transfer_id: int) -> None:
        if self.receiver is not None:
            self.receiver.revoke(transfer_id, "no request needs these rows any more")

    def exited(self, worker: str, pid: int) -> None:
        if self.receiver is not None:
            self.receiver.sender_exited(sender_name(worker, pid))

    # ---------------------------------------------------------------- what happened

    def poll(self) -> Iterator[tuple[int, int]]:
        """Apply the ends' events. Yields each transfer to whose pages nothing is written any more, with the rows that
        have arrived: all or none."""
        if self.sender is not None:
            for event in self.sender.poll():
                self._sent(event)
        if self.receiver is not None:
            for said in self.receiver.poll():
                if (incoming := self._incoming.get(said.transfer_id)) is not None:
                    _note(incoming, said)
        for transfer_id in [transfer_id for transfer_id, it in self._incoming.items() if it.is_over]:
            incoming = self._incoming.pop(transfer_id)
            yield transfer_id, incoming.durable_tokens

    def _sent(self, event: Delivered | Failed) -> None:
        out = self._outgoing.get(event.transfer_id)
        if out is None:
            return
        match event:
            case Delivered(index=index):
                out.delivered.add(index)
            case Failed(reason=reason):
                out.failure = reason
                log.warning("transfer failed", extra=fields(transfer_id=event.transfer_id, reason=reason))
        if out.is_over:
            del self._outgoing[event.transfer_id]


def _note(incoming: Incoming, said: Arrived | Revoked) -> None:
    match said:
        case Arrived(index=index):
            incoming.arrived.add(index)
        case Revoked(reason=reason):
            log.info("transfer revoked", extra=fields(transfer_id=said.transfer_id, reason=reason))
            incoming.is_revoked = True
