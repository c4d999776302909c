"""What a rank exchanged in each round, which rows on the device were not those in host memory, and what each layer of
a decode step began with and selected.

Everything is copied by operations on `compute`, behind those of the round, and looked at when all requests have ended:
neither the ranks nor their graphs wait for it. Exchange buffers hold the last mixture of a round, so that one layer of
each round is seen. Resident requests and steps without drafts alone. A worker without a group has no exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from protocol.units import PAGE_TOKENS
from worker.group.agreement import Round, RoundKind, Wish
from worker.loop.batch import RunningRequest, Status

if TYPE_CHECKING:
    from kernels.state import StepBatch
    from tests.support.worker_rig import Rig
    from worker.group.exchange import Exchange
    from worker.runners.transformers_dsa import TransformersRunner

#: Digests of a round: rows sent, and by rank rows received, partial sums sent, partial sums received.
Exchanged = dict[str, list[str]]


#: By request and position of a decode step: hidden states [G, hidden] before each anchor layer, and what that layer
#: selected, int32[G, k].
States = dict[tuple[int, int], tuple[Tensor, Tensor]]


class LayerStates:
    """Of the step launched last, by rows of its batch: the hidden states before each anchor layer, [G, B, hidden], and
    its selections, int32[G, B, k]. Made before the executor: its graphs copy them."""

    def __init__(self, runner: TransformersRunner) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self._runner = runner
        runner.after_index_topk = self._copy

    def _copy(self, group: int, batch: StepBatch, topk: Tensor) -> None:
        rows, groups = len(batch.seats), self._runner.geometry.groups
        hidden = self._runner._scratch[rows].hidden.squeeze(1)
        if rows not in self.held:  # a bucket runs once before it is captured
            self.held[rows] = hidden.new_zeros(groups, *hidden.shape), topk.new_zeros(groups, *topk.shape)
        for held, now in zip(self.held[rows], (hidden, topk), strict=True):
            held[group].copy_(now)


class _Kept(NamedTuple):
    """One page of a request in all layers, or its index keys in all groups, on the device and in host memory."""

    what: str
    device: Tensor
    host: Tensor


class RoundLog:
    """Of the executor of `rig`, from now on."""

    def __init__(self, rig: Rig, exchange: Exchange | None = None, states: LayerStates | None = None) -> None:
        self._executor = rig.executor
        self._states: list[tuple[list[tuple[int, int]], Tensor, Tensor]] = []
        self._rounds: list[tuple[str, list[Tensor]]] = []
        self._kept: list[_Kept] = []
        launch_step = rig.executor._launch_step

        def launch_and_log(*args: Any, **kwargs: Any) -> None:
            launch_step(*args, **kwargs)
            if states is not None:
                self._keep_states(states)
            self.keep_rows(f"step {len(self._states)}")

        rig.executor._launch_step = launch_and_log  # type: ignore[method-assign]
        rounds = rig.executor._rounds
        if rounds is None or exchange is None:
            return
        end = rounds.end

        def log_and_end(this: Round, wish: Wish) -> None:
            if this.kind is not RoundKind.WISHES:
                name = f"{this.kind.value} round {this.number}"
                self._launch(partial(self._copy_exchange, exchange, name, this.size))
            end(this, wish)

        rounds.end = log_and_end  # type: ignore[method-assign]

    def keep_rows(self, name: str) -> None:
        """Copy the durable rows of resident requests, as they are behind everything launched so far."""
        for request in self._executor.held():
            if request.status is Status.RUNNING and not request.memory.hot.hot_slots:
                self._keep_rows(name, request)

    def exchanged(self) -> Exchanged:
        return {name: [_digest(tensor) for tensor in tensors] for name, tensors in self._rounds}

    def states(self) -> States:
        return {
            place: (hidden[:, row].cpu(), topk[:, row].cpu())
            for places, hidden, topk in self._states
            for row, place in enumerate(places)
        }

    def stale(self) -> list[str]:
        """Rows that differed on the device from those in host memory."""
        found = []
        for what, device, host in self._kept:
            unlike = (device.cpu() != host).any(-1)
            found += [f"{what}, layer {layer}, row {row}" for layer, row in unlike.nonzero().tolist()]
        return found

    def _keep_states(self, states: LayerStates) -> None:
        step = self._executor._decoder._launched[-1]
        places = [(it.request_index, it.position - 1) for it in step.requests]
        hidden, topk = states.held[step.seats]
        self._launch(lambda: self._states.append((places, hidden.clone(), topk.clone())))

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


def parted(states: States, reference: States, bound: float = 1e-2) -> list[str]:
    """Where the states of a request part from those of the reference for the first time (what follows has other tokens
    before it), and what layers ahead of it selected otherwise in that step: their keys were lost, or the choice went
    wrong. Where they selected alike, a row was lost, or attention or what follows it went wrong."""
    found: dict[int, str] = {}
    for place in sorted(states.keys() & reference.keys()):
        request, position = place
        (hidden, topk), (expected, selected) = states[place], reference[place]
        apart = (hidden - expected).abs().amax(-1) > bound
        if request in found or not apart.any():
            continue
        group = int(apart.nonzero()[0])
        ahead = (_differences(topk[it], selected[it], f"group {it} selected") for it in range(group))
        found[request] = f"request {request}, position {position}: before index group {group}{''.join(ahead)}"
    return list(found.values())


def _differences(found: Tensor, expected: Tensor, what: str) -> str:
    ours, theirs = set(found.tolist()), set(expected.tolist())
    return f"; {what} {sorted(ours - theirs)} for {sorted(theirs - ours)}" if ours != theirs else ""


def _digest(tensor: Tensor) -> str:
    return blake2b(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
