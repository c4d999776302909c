"""Decisions of policy, as data: carried out by the Scheduler in the order given. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from coordinator.memory.ledger import NO_PAGES
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry
from protocol.arrays import Int32Array
from protocol.messages import NO_TOKEN, FirstToken
from protocol.sizing import HotSize, Memory
from protocol.units import PAGE_TOKENS


class Transfer(msgspec.Struct, frozen=True):
    """A transfer to another node: `transfer_id` is a placement there, with a seat and `pages` host pages, of which the
    first are `share`: cached there."""

    transfer_id: int
    worker: WorkerEntry
    pages: int
    share: Int32Array = NO_PAGES


class AdmitDecision(msgspec.Struct, frozen=True):
    """`memory.host_pages` are fresh; those kept under the ended placement `take_over` come first, and `first_token`
    with them: they hold `durable_tokens` rows. `decoder` names the worker for which a prompt is prefilled on another;
    on another node its rows go there by `transfer_id`. With `share`, cached pages, the list begins."""

    entry: RequestState
    worker: WorkerEntry
    placement: int
    take_over: int | None
    durable_tokens: int
    memory: Memory
    hot_size: HotSize
    first_token: FirstToken = NO_TOKEN
    decoder: str = ""
    transfer: Transfer | None = None
    share: Int32Array = NO_PAGES

    @property
    def prefix_tokens(self) -> int:
        """Rows of its prompt, not all, that are there: in cached pages, or in those that it kept."""
        return int(self.share.size) * PAGE_TOKENS or self.entry.facts.part_of_prompt(self.durable_tokens)

    @property
    def resumed_tokens(self) -> int:
        """Rows that it goes on from, those of its prompt among them; 0: its prompt is to be computed."""
        return self.durable_tokens - self.entry.facts.part_of_prompt(self.durable_tokens)


class GrantDecision(msgspec.Struct, frozen=True):
    entry: RequestState
    more: Memory


class ResizeDecision(msgspec.Struct, frozen=True):
    """`more` chunks are to be reserved first when it grows."""

    entry: RequestState
    hot_size: HotSize
    more: int


class Cause(StrEnum):
    """Why policy retracts, in words that can be counted."""

    GPU_MEMORY = "gpu_memory"
    HOST_PAGES = "host_pages"
    HANDOVER = "handover"
    DRAIN = "drain"
    THROUGHPUT = "throughput"
    OUTPUT_ROOM = "output_room"


#: A request retracted to make room for another comes back only where that will not happen again.
DISPLACING: Final = frozenset({Cause.GPU_MEMORY, Cause.HOST_PAGES})


class RetractDecision(msgspec.Struct, frozen=True):
    entry: RequestState
    keep: bool
    cause: Cause
    reason: str


class DemoteDecision(msgspec.Struct, frozen=True):
    """`placement` is the ended one under which `node` keeps its pages."""

    entry: RequestState
    node: str
    placement: int
    reason: str


#: Decisions whose announcement to the Request needs nothing but themselves.
Announced: TypeAlias = GrantDecision | ResizeDecision | RetractDecision | DemoteDecision
Decision: TypeAlias = AdmitDecision | Announced
