"""What a rank exchanged in each round, and which rows on the device were not those in host memory.

Everything is copied by operations on `compute`, behind those of the round, and looked at when all requests have ended:
neither the ranks nor their graphs wait for it. Exchange buffers hold the last mixture of a round, so that one layer of
each round is seen. Resident requests and steps without drafts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from protocol.units import PAGE_TOKENS
from worker.group.agreement import Round, RoundKind, Wish
from worker.loop.batch import RunningRequest, Status

if TYPE_CHECKING:
    from tests.support.worker_rig import Rig
    from worker.group.exchange import Exchange

#: Digests of a round: rows sent, and by rank rows received, partial sums sent, partial sums received.
Exchanged = dict[str, list[str]]


class _Kept(NamedTuple):
    """One page of a request in all layers, or its index keys in all groups, on the device and in host memory."""

    what: str
    device: Tensor
    host: Tensor


class RoundLog:
    """Of the executor of `rig`, from now on."""

    def __init__(self, rig: Rig, exchange: Exchange | None = None) -> None:
        self._executor, self._exchange = rig.executor, exchange
        self._rounds: list[tuple[str, list[Tensor]]] = []
        self._kept: list[_Kept] = []
        rounds = rig.executor._rounds
        if rounds is None or exchange is None:
            return
        end = rounds.end

        def log_and_end(this: Round, wish: Wish) -> None:
            if this.kind is not RoundKind.WISHES:
                name = f"{this.kind.value} round {this.number}"
                self._launch(partial(self._copy_exchange, exchange, name, this.size))
                self.keep_rows(name)
            end(this, wish)

        rounds.end = log_and_end  # type: ignore[method-assign]

    def keep_rows(self, name: str) -> None:
        """Copy the durable rows of resident requests, as they are behind everything launched so far."""
        for request in self._executor.held():
            if request.status is Status.RUNNING and not request.memory.hot.hot_slots:
                self._keep_rows(name, request)

    def exchanged(self) -> Exchanged:
        return {name: [_digest(tensor) for tensor in tensors] for name, tensors in self._rounds}

    def stale(self) -> list[str]:
        """Rows that differed on the device from those in host memory."""
        found = []
        for what, device, host in self._kept:
            unlike = (device.cpu() != host).any(-1)
            found += [f"{what}, layer {layer}, row {row}" for layer, row in unlike.nonzero().tolist()]
        return found

    def _keep_rows(self, name: str, request: RunningRequest) -> None:
        state, memory = self._executor.state, request.memory
        what = f"{name}, request {request.request_index}, seat {request.seat}"
        for page, host_page in enumerate(memory.host_pages[: -(-request.durable_rows // PAGE_TOKENS)]):
            rows = min(PAGE_TOKENS, request.durable_rows - page * PAGE_TOKENS)
            row, key = memory.hot.chunks[page] * PAGE_TOKENS, memory.index_pages[page] * PAGE_TOKENS
            for device, host in zip(state.row_words, state.host_row_words, strict=True):
                self._keep(f"{what}, page {page}", device[:, row : row + rows], host[host_page, :, :rows])
            keys = state.key_words[:, key : key + rows]
            self._keep(f"{what}, index page {page}", keys, state.host_key_words[host_page, :, :rows])

    def _keep(self, what: str, device: Tensor, host: Tensor) -> None:
        expected = host.clone()
        self._launch(lambda: self._kept.append(_Kept(what, device.clone(), expected)))

    def _copy_exchange(self, exchange: Exchange, name: str, rows: int) -> None:
        size = exchange.collectives.size
        copies = [exchange._own[:rows].clone()]
        for buffer in (exchange._all, exchange._partials, exchange._returned):
            copies += buffer[: size * rows].clone().view(size, rows, -1).unbind()
        self._rounds.append((name, copies))

    def _launch(self, copy: object) -> None:
        assert callable(copy)
        self._executor._streams.compute.launch("keep for the test", copy)


def miscarried(ranks: Sequence[Exchanged]) -> list[str]:
    """What ranks received that is not what the others sent in the same round. Only of rounds that all have logged: a
    rank ends its log when its own requests have ended."""
    size, found = len(ranks), []
    for name in ranks[0]:
        if not all(name in rank for rank in ranks):
            continue
        for reader, own in enumerate(ranks):
            for writer, its in enumerate(ranks):
                if own[name][1 + writer] != its[name][0]:
                    found.append(f"{name}: rank {reader} received other rows than rank {writer} sent")
                if own[name][1 + 2 * size + writer] != its[name][1 + size + reader]:
                    found.append(f"{name}: rank {reader} received other partial sums than rank {writer} sent")
    return found


def _digest(tensor: Tensor) -> str:
    return blake2b(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
