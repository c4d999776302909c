"""Messages of actors to each other, and the ports through which they reach the transport. Pure.

Who tells whom (asks go down the first column only, everything else but the call is a tell):

    Gateway ──ask──► Scheduler ──call─► HostPool            Call (scheduler/api.py)        Transact
    WorkerLink ────► Scheduler                              Call, asked or told
    WorkerLink ────► Request                                messages.Event, routed by placement
    Scheduler ─────► Request                                RequestOrder: Admitted, GrantOrder, RetractOrder, ...
    Request ───────► WorkerPort.send                        messages.Command

A step of a Request returns Words, which the Scheduler's next turn hears first.

Everything about one placement reaches its worker through its Request actor, so commands keep their order.
Tokens are not here: they go from the worker link into the token log, and from there to client connections.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec

from protocol import messages
from protocol.units import PAGE_TOKENS

if TYPE_CHECKING:
    from coordinator.journal.records import Record
    from coordinator.memory.changes import Change
    from coordinator.memory.prefix_index import Chain, Match


class Handle(NamedTuple):
    """Names of a submitted or found request: for its clients, and in the token log."""

    request_id: str
    request_index: int


class LinkStats(NamedTuple):
    """Facts that a worker link knows from heartbeats and acknowledgements; the rest of a WorkerRow is the ledger's."""

    steps: int
    step_us: float
    hits: int
    misses: int
    link_age_s: float
    command_ack_ms: float
    swapped_bytes: int = 0
    awaits: str = ""  # worker that its decode loop waits for
    load_s: float = 0.0
    alone_steps: int = 0  # of `steps`, those that no prompt ran beside; their seconds and requests
    alone_s: float = 0.0
    alone_requests: int = 0
    step_requests: int = 0
    prompt_tokens: int = 0
    prompts_waiting: int = 0  # prompts that wait or are under way, and for how long the oldest
    prompt_wait_s: float = 0.0


class WorkerPort(Protocol):
    """The worker link as the actors see it: one epoch of one worker. A Protocol, because links are of a room above."""

    def send(self, command: messages.Command) -> None:
        """Number the command, log it for replay and wake the sender. Never blocks, never fails: a link past its
        bound declares its worker down instead."""

    def stats(self) -> LinkStats: ...

    def step_s(self) -> float:
        """Seconds of a decode step; 0: none was measured."""


class Ending(msgspec.Struct, frozen=True):
    """The last word on a request. `outcome` is FINISHED, ABORTED or FAILED. `prefix_tokens` of its prompt were
    reused. Steps verified `drafted_tokens`, of which `accepted_tokens` are in its output."""

    request_index: int
    request_id: str
    outcome: str
    reason: str
    generated_tokens: int
    tail_text: str = ""
    prefix_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Listener(Protocol):
    """The gateway's side of the end of a request. The calls are synchronous and must not fail. A Protocol, because the
    gateway is a room above."""

    def ended(self, ending: Ending) -> None:
        """The request is terminal and its tokens are all in the token log. Called exactly once per request (I5)."""

    def recovered(self, ending: Ending) -> None:
        """Do as `ended`, for a request that ended in an earlier incarnation of the coordinator."""

    def forgotten(self, request_index: int) -> None:
        """The request index is about to be closed and reused: drop subscriptions to it."""


class RequestCommand(Enum):
    """Command of a client or an operator to requests."""

    ABORT = "abort"
    RETRACT = "retract"
    RESUME = "resume"
    RESIZE = "resize"


# ---------------------------------------------------------------- to the Scheduler


class SubmitAsk(msgspec.Struct, frozen=True):
    """`owner` is for the record; `user` is whose key was shown, and whom the request belongs to. `chain`: digests of
    the prompt's pages. `matches`, by node: cached pages with which a long prompt begins, as far as they were looked
    up."""

    submit: messages.Submit
    owner: str
    user: str = ""
    chain: Chain | None = None
    matches: dict[str, Match] = msgspec.field(default_factory=dict)


class CommandAsk(msgspec.Struct, frozen=True):
    """One command on several requests, carried out for all or for none. `keep`, `hold` are for RETRACT, `hot_slots` for
    RESIZE. Requests that are not `user`'s are not found; None: an operator, to whom all belong."""

    command: RequestCommand
    request_ids: tuple[str, ...]
    owner: str
    keep: bool = True
    hold: bool = True
    hot_slots: int = messages.NO_HOT_BUFFER
    user: str | None = None


class Stage(Enum):
    """Progress of a placement, as far as the ledger cares."""

    STAGED = "staged"  # a placement that only computes the prompt is about to end
    STARTED = "started"  # in the decode batch: its hot buffer can be resized
    PARKED = "parked"  # out of granted pages
    RESIZED = "resized"  # the Resize under way took effect
    LEAVING = "leaving"  # its memory will be released without a request for it


class PlacementProgressed(msgspec.Struct, frozen=True):
    request_index: int
    placement: int
    stage: Stage
    took_s: float = 0.0  # of STAGED: since its admission


class PlacementEnded(msgspec.Struct, frozen=True):
    """The placement is over. Rows below `durable_tokens` may stay in host pages (0: nothing is kept).
    `first_token` goes with the rows when nothing of the output was said yet; `warm_start`, if any, is what they will be
    asked for first. Rows below `cacheable_tokens` are durable and right, kept or not; `is_suspect`: what it wrote may
    be wrong, since it faulted or its worker died of it."""

    request_index: int
    placement: int
    durable_tokens: int
    first_token: messages.FirstToken = messages.NO_TOKEN
    warm_start: bytes = b""
    cacheable_tokens: int = 0
    is_suspect: bool = False


#: Facts that a step of a Request returns. Ending: its memory is given back, its end is written, its listener told.
Word: TypeAlias = PlacementProgressed | PlacementEnded | Ending


class LedgerStep(NamedTuple):
    """A ledger change of `node`, and what is true with it."""

    node: str
    change: Change
    note: Record | None = None


class WorkerSend(NamedTuple):
    """A command that concerns no placement of a request, to the worker that is called so now."""

    worker: str
    command: messages.Withdraw | messages.Exited


class AddressedOrder(NamedTuple):
    request_index: int
    event: RequestOrder


# ---------------------------------------------------------------- to a Request


class Admitted(msgspec.Struct, frozen=True):
    """Memory was reserved and committed (I4): send `command` through `port`."""

    command: messages.Admit
    worker: str
    port: WorkerPort
    reason: str


class GrantOrder(msgspec.Struct, frozen=True):
    """More memory, or another hot size, was reserved and committed: send `command`."""

    command: messages.Grant | messages.Resize


class RetractOrder(msgspec.Struct, frozen=True):
    """Leave the worker, or stay away from it. `keep` host rows."""

    keep: bool
    reason: str


class ResumeOrder(msgspec.Struct, frozen=True):
    """An operator holds it no more."""

    reason: str


class DemoteOrder(msgspec.Struct, frozen=True):
    """The rows kept in host memory are gone."""

    reason: str


class StillWaits(msgspec.Struct, frozen=True):
    """Its wait is for something of a kind that its history does not name yet."""

    reason: str


class EndOrder(msgspec.Struct, frozen=True):
    """`outcome` ABORTED or FAILED, whatever the request is doing; `cause`, in one word, of a failure."""

    outcome: str
    reason: str
    cause: str = ""


class WorkerLost(msgspec.Struct, frozen=True):
    """The worker is gone. Rows it reported durable can be kept: all with `proved_exit`, else those of full pages.

    Where those end within a prompt that was staged, its rows are kept in multiples of `unit_tokens`; 0: none."""

    placement: int
    proved_exit: bool
    reason: str
    unit_tokens: int = PAGE_TOKENS


class PlacementAdopted(msgspec.Struct, frozen=True):
    """The worker of a recovered placement is there and has come this far; `resize` is under way. `grant` is what it
    was given and never heard of."""

    placement: int
    is_staged: bool
    is_started: bool
    is_parked: bool
    resize: messages.Resize | None
    grant: messages.Grant | None


RequestOrder: TypeAlias = (
    Admitted
    | GrantOrder
    | RetractOrder
    | ResumeOrder
    | DemoteOrder
    | StillWaits
    | EndOrder
    | WorkerLost
    | PlacementAdopted
)
