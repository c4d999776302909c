"""What the journal holds: the facts that a coordinator may not forget, as records in the order of their commits. Pure.

    of a request   Accepted, Ordered, Admission, HandedOver, Departed, Struck,  who it is, where it stays, how it ended
                   Ended, Forgotten
    of a node      PoolOpened, Joined, Changed, Drained, Undrained              its pool, its workers, its page tables
    of all         Tokens                                                       one row of arrays per group commit
    of a summary   SummaryBegun, NodePart, Output, SummaryEnded                 what came before, in fewer words

Replaying any prefix of what was committed gives a state that was true once (coordinator.journal.state): records are
appended in the order in which they became true, and a group takes every token that has arrived before the records that
may depend on it. Nothing in here is a rate, a guess or a wish that may be lost: how far an admission has come on its
worker is the worker's to say (its inventory), and what policy wants it decides anew.

Rejected: a table per kind of fact, updated in place (a commit would touch as many pages as requests, and a torn
update needs an undo log of our own); journalling what workers report instead of what follows from it (a replay would
run the whole policy again, and any change of policy would change the past).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from coordinator.memory.changes import Change
from coordinator.memory.ledger import EpochKey
from coordinator.tokens.token_log import News
from protocol.arrays import pack_int32, unpack_int32
from protocol.messages import AUTO, NO_TOKEN, ModelInfo, Sampling, WorkerCapacity

#: Names of workers that are drained, or were when they went.
DRAINS_MAX: Final = 1_024

#: (-priority, arrival): total, never changes; the lower one is better.
Rank: TypeAlias = tuple[int, int]


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """Base: one array, whose first element is the record's tag. A tag is part of the form: classes may be renamed."""


# ---------------------------------------------------------------- of a request


class RequestFacts(msgspec.Struct, frozen=True, array_like=True):
    """What never changes about a request, made once: at submission, or read from the journal. All who need one of
    these facts refer to this record. `owner` is who asked, for the record; `user` whose key it was, "" without keys.
    `prompt_digest` tells its prompt from another's once it is only in the journal. `at_s`: submitted, in seconds since
    the epoch."""

    request_index: int
    request_id: str
    rank: Rank
    owner: str
    user: str
    prompt_tokens: int
    prompt_digest: bytes
    sampling: Sampling
    at_s: float
    prefill_mode: str = AUTO

    @property
    def priority(self) -> int:
        return -self.rank[0]

    @property
    def arrival(self) -> int:
        """Orders requests of one priority."""
        return self.rank[1]


class RequestAccepted(JournalEntry, frozen=True, tag="accepted"):
    """A request, with everything that it was submitted with. `prompt` is int32 token ids."""

    facts: RequestFacts
    prompt: bytes

    @property
    def request_index(self) -> int:
        return self.facts.request_index


class RequestOrdered(JournalEntry, frozen=True, tag="ordered"):
    """What operators and clients want of a request by now, in full. `outcome` ABORTED or FAILED: its end is decided."""

    request_index: int
    held: bool
    forced_slots: int
    outcome: str = ""
    reason: str = ""


class RequestPlaced(JournalEntry, frozen=True, tag="placed"):
    """The stay that a Reserve in the same commit began; `durable_tokens` rows are in the pages it starts with.
    `prefills_only`: another worker is to decode it, into whose pages its rows go under `ticket` (0: same node)."""

    request_index: int
    placement: int
    node: str
    worker: str
    epoch: int
    durable_tokens: int
    prefills_only: bool = False
    ticket: int = 0


class RequestHandedOver(JournalEntry, frozen=True, tag="handed_over"):
    """The admission is over, and its rows are, or will be, in the pages that `worker` of another node took them into
    under `ticket`."""

    request_index: int
    ticket: int
    node: str
    worker: str
    epoch: int
    kept_tokens: int
    first_token: int = NO_TOKEN


class RequestDeparted(JournalEntry, frozen=True, tag="departed"):
    """The admission is over, or what it kept was given up. `kept_tokens` rows stay in its pages; 0: nothing stays.
    `first_token` belongs to them when nothing of the output was said yet."""

    request_index: int
    kept_tokens: int
    first_token: int = NO_TOKEN


class RequestsStruck(JournalEntry, frozen=True, tag="struck"):
    """`worker` died with these on it (coordinator.scheduling.poison): how many strikes each has by now, and at how
    many generated tokens. Parallel int32 arrays."""

    worker: str
    request_indices: bytes
    strikes: bytes
    marks: bytes


class RequestEnded(JournalEntry, frozen=True, tag="ended"):
    """The last word on a request; all of its tokens come before."""

    request_index: int
    outcome: str
    reason: str
    generated_tokens: int
    tail_text: str
    at_s: float


class RequestsForgotten(JournalEntry, frozen=True, tag="forgotten"):
    """Ended requests that nobody may ask for any more; their slots may be taken again. `request_indices` is int32;
    `arrivals` is the highest number that any request had so far."""

    request_indices: bytes
    arrivals: int


# ---------------------------------------------------------------- of a node


class PoolOpened(JournalEntry, frozen=True, tag="pool_opened"):
    """A node's pool, as the first of its workers described it: a fresh ledger of `capacity.host_pages`."""

    node: str
    capacity: WorkerCapacity
    model: ModelInfo


class WorkerJoined(JournalEntry, frozen=True, tag="joined"):
    """An epoch of a worker, and its process: `started` in clock ticks after the boot of `boot`; 0: not attested."""

    node: str
    worker: str
    epoch: int
    capacity: WorkerCapacity
    model: ModelInfo
    process: int = 0
    started: int = 0
    boot: str = ""


class WorkerDrained(JournalEntry, frozen=True, tag="drained"):
    """Nobody is admitted to `worker`; past `until_s`, in seconds since 1970, it keeps nobody. Of one process: `epoch`,
    and the next one if its number follows."""

    worker: str
    epoch: int
    until_s: float
    handover: bool


class WorkerUndrained(JournalEntry, frozen=True, tag="undrained"):
    worker: str


class LedgerChanged(JournalEntry, frozen=True, tag="changed"):
    """Changes of a node's ledger, in order."""

    node: str
    changes: tuple[Change, ...]


# ---------------------------------------------------------------- of all


class TokensAppended(JournalEntry, frozen=True, tag="tokens"):
    """News of any number of requests, as parallel int32 arrays: tokens from generated position `starts[i]` on, and how
    many rows are durable by now."""

    request_indices: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    durables: bytes


# ---------------------------------------------------------------- of a summary


class SummaryBegun(JournalEntry, frozen=True, tag="summary_begun"):
    """From here on everything is said again, a little in each commit (coordinator.journal.summary): the highest numbers
    given out so far and the nodes' pools and workers at once, the rest in the records behind this one."""

    arrivals: int
    placements: int
    pools: tuple[PoolOpened, ...]
    workers: tuple[WorkerJoined, ...]
    drains: tuple[WorkerDrained, ...] = ()


class SummaryEnded(JournalEntry, frozen=True, tag="summary_ended"):
    """All has been said again: nothing before the SummaryBegun is needed but Accepted, Output and Ended."""


class NodePart(JournalEntry, frozen=True, tag="node_part"):
    """Part of a ledger as it was at the SummaryBegun before: stack and lists of all parts, in order, are the whole.
    `free` is the stack of free pages; the rest by admission and epoch. Pages are int32."""

    node: str
    pages_total: int
    free: bytes
    budgets: tuple[BudgetImage, ...]
    holdings: tuple[HoldingImage, ...]
    quarantines: tuple[tuple[EpochKey, bytes], ...]


class BudgetImage(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    epoch: int
    capacity: WorkerCapacity
    lost: bool
    exited: bool


class HoldingImage(msgspec.Struct, frozen=True, array_like=True):
    """`budget` None: only kept pages."""

    placement: int
    budget: EpochKey | None
    hot_chunks: int
    index_pages: int
    slab_pages: int
    pages: bytes


class RequestOutput(JournalEntry, frozen=True, tag="output"):
    """Tokens of one request from generated position `start` on: what earlier summaries do not have. int32."""

    request_index: int
    start: int
    tokens: bytes
    durable_tokens: int


class Summary(JournalEntry, frozen=True):
    """What form 1 of the journal had for a summary, whole in one commit, NodeImages behind it. Read, never written."""

    arrivals: int
    placements: int
    ordered: tuple[RequestOrdered, ...] = ()
    stays: tuple[RequestPlaced, ...] = ()
    departed: tuple[RequestDeparted, ...] = ()


def digest_of(prompt: bytes) -> bytes:
    """Tells one prompt from another."""
    return blake2b(prompt, digest_size=16).digest()


def tokens_of(news: News) -> TokensAppended:
    """What the token log has to write down, as a record."""
    return TokensAppended(*(part.tobytes() for part in news))


def news_of(tokens: TokensAppended) -> News:
    """A record, as the token log takes it in. Raises ProtocolError when an array's bytes do not divide by 4."""
    parts = (tokens.request_indices, tokens.starts, tokens.counts, tokens.tokens, tokens.durables)
    return News(*(unpack_int32(part, "tokens") for part in parts))


def struck_of(worker: str, strikes: Iterable[tuple[int, int, int]]) -> RequestsStruck:
    """Of (slot, strikes, mark) for each."""
    return RequestsStruck(worker, *(pack_int32(column) for column in zip(*strikes, strict=True)))


Record: TypeAlias = (
    RequestAccepted
    | RequestOrdered
    | RequestPlaced
    | RequestHandedOver
    | RequestDeparted
    | RequestsStruck
    | RequestEnded
    | RequestsForgotten
    | PoolOpened
    | WorkerJoined
    | WorkerDrained
    | WorkerUndrained
    | LedgerChanged
    | TokensAppended
    | SummaryBegun
    | SummaryEnded
    | NodePart
    | RequestOutput
)

#: Records that outlive a summary, until their request is forgotten.
LASTING = (RequestAccepted, RequestOutput, RequestEnded)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode
decode_all = msgspec.msgpack.Decoder(list[Record]).decode
