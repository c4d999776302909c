"""Records of the journal: the facts that must outlive a coordinator, in the order of their commits. Pure.

    of a request   Accepted, Ordered, Placed, HandedOver, PlacementEnded,     submission, placements, end
                   Struck, Ended, Forgotten
    of a node      PoolOpened, Joined, LedgerChanged, Drained, Undrained      its pool, its workers, its ledger
    of all         Tokens                                                     one row of arrays per group commit
    of a summary   SummaryBegun, NodePart, Output, SummaryEnded               the earlier records, in fewer ones

Replaying any prefix of the committed records gives a state that was true once (coordinator.journal.state): records are
appended in the order in which they became true, and a group has all tokens that arrived before the records that may
depend on them. Records hold no rates and no estimates. The progress of a placement comes from its worker (its
inventory), and the policy decides again what it wants.

Rejected: a table per kind of fact, updated in place (a commit would touch as many pages as requests, and a torn
update would need an undo log); journalling workers' reports instead of what follows from them (a replay would run the
whole policy again, and any change of policy would change the past).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from coordinator.memory.changes import Change
from coordinator.memory.ledger import EpochKey
from coordinator.memory.prefix_index import Scope
from coordinator.tokens.logprob_rows import unpack_logprobs
from coordinator.tokens.token_log import News, OutputPart
from protocol.arrays import pack_int32, unpack_int32
from protocol.grammars import kind_of
from protocol.messages import (
    AUTO,
    DRAFT_TOKENS_MAX,
    NO_TOKEN,
    FirstToken,
    GroupMember,
    Logprobs,
    ModelInfo,
    Rank,
    Sampling,
    TraceContext,
    WorkerCapacity,
)

#: Most drained worker names that are kept, those of workers that have left included.
DRAINS_MAX: Final = 1_024


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """Base: one array, whose first element is the record's tag. A tag is part of the form: classes may be renamed."""


# ---------------------------------------------------------------- of a request


class RequestFacts(msgspec.Struct, frozen=True, array_like=True):
    """The immutable facts of a request: made once, at submission or from the journal, and shared by reference.

    `owner` is the name of the submitter, for the record. `user` is the user of the key that submitted it, "" without
    keys; `tenant` is on whose behalf that user submitted it, "" for its own. `prompt_digest` identifies the prompt,
    after the prompt itself is only in the journal. `at_s`: time of submission, in seconds since 1970. `prefill_mode`
    is that of the Submit. `scope` says whose cached prefixes it may begin with; None: no one's. `trace` is the span
    that it is part of; None: it has a trace of its own. `draft_tokens` is that of the Submit.

    `sampling` is as it was submitted in RequestAccepted alone. Elsewhere its grammar has a name in its place
    (`with_named_grammar`), and is kept beside the prompt, until the request ends.
    """

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
    tenant: str = ""
    scope: Scope | None = None
    trace: TraceContext | None = None
    draft_tokens: int = DRAFT_TOKENS_MAX

    @property
    def turn_owner(self) -> tuple[str, str]:
        """Owner whose turn it takes among requests of its priority: user and tenant."""
        return self.user, self.tenant

    @property
    def owner_name(self) -> str:
        """Name of that owner, which no other one has: USER or USER/TENANT. A user is the name of a key's
        file, without a slash."""
        return f"{self.user}/{self.tenant}" if self.tenant else self.user

    @property
    def priority(self) -> int:
        return -self.rank[0]

    @property
    def arrival(self) -> int:
        """Orders requests of one owner and priority."""
        return self.rank[2]

    @property
    def submission(self) -> str:
        """Reason of the first line of its history: its owner, and the kind and name of what its output is held to."""
        words = self.sampling.grammar.rpartition(" ")[0]
        return f"by {self.owner}" + (f", output held to {words}" if words else "")

    def part_of_prompt(self, rows: int) -> int:
        """`rows`, where decoding cannot go on from them: where they are fewer than those of its prompt. Else 0."""
        return rows if rows < self.prompt_tokens else 0


class RequestAccepted(JournalEntry, frozen=True, tag="accepted"):
    """A request, as it was submitted. `prompt` is int32 token ids."""

    facts: RequestFacts
    prompt: bytes

    @property
    def request_index(self) -> int:
        return self.facts.request_index


class RequestOrdered(JournalEntry, frozen=True, tag="ordered"):
    """The current orders of operators and clients for a request. `outcome` ABORTED or FAILED: its end is decided."""

    request_index: int
    held: bool
    forced_slots: int
    outcome: str = ""
    reason: str = ""


class RequestPlaced(JournalEntry, frozen=True, tag="placed"):
    """A placement, which a Reserve in the same commit began; its pages hold `durable_tokens` rows from the start.

    `prefills_only`: another worker will decode the request; the rows go to its node by inbound transfer `transfer_id`
    (0: it is on the same node).
    """

    request_index: int
    placement: int
    node: str
    worker: str
    epoch: int
    durable_tokens: int
    prefills_only: bool = False
    transfer_id: int = 0


class RequestHandedOver(JournalEntry, frozen=True, tag="handed_over"):
    """The placement has ended. Its rows are, or will be, in pages of another node, where `worker` receives them.

    `transfer_id` is the number of the inbound transfer.
    """

    request_index: int
    transfer_id: int
    node: str
    worker: str
    epoch: int
    kept_tokens: int
    first_token: FirstToken = NO_TOKEN


class RequestPlacementEnded(JournalEntry, frozen=True, tag="departed"):
    """The placement has ended, or its request was demoted. `kept_tokens` rows stay in its pages; 0: none.

    `first_token` was drawn after these rows and not reported yet, if it is not NO_TOKEN.
    """

    request_index: int
    kept_tokens: int
    first_token: FirstToken = NO_TOKEN


class RequestsStruck(JournalEntry, frozen=True, tag="struck"):
    """`worker` died while it ran these requests (coordinator.state.poison).

    Parallel int32 arrays: request indices, strikes of each so far, and its generated tokens at this strike (marks).
    """

    worker: str
    request_indices: bytes
    strikes: bytes
    marks: bytes


class RequestEnded(JournalEntry, frozen=True, tag="ended"):
    """The end of a request. All of its tokens come before this record."""

    request_index: int
    outcome: str
    reason: str
    generated_tokens: int
    tail_text: str
    at_s: float


class RequestsForgotten(JournalEntry, frozen=True, tag="forgotten"):
    """Ended requests that were forgotten; their request indices (int32) may be reused.

    `arrivals` is the highest `arrival` of any request so far.
    """

    request_indices: bytes
    arrivals: int


# ---------------------------------------------------------------- of a node


class PoolOpened(JournalEntry, frozen=True, tag="pool_opened"):
    """A node's pool, as the node's first worker described it. Begins an empty ledger of `capacity.host_pages`."""

    node: str
    capacity: WorkerCapacity
    model: ModelInfo


#: Process of an epoch of which nothing is known.
NOT_ATTESTED: Final = 0, 0, ""


class WorkerJoined(JournalEntry, frozen=True, tag="joined"):
    """An epoch of a worker, and its process: `started` in clock ticks after boot `boot`; 0: not attested.

    `first_epoch`: that of the process; 0: unknown.
    """

    node: str
    worker: str
    epoch: int
    capacity: WorkerCapacity
    model: ModelInfo
    process: int = 0
    started: int = 0
    boot: str = ""
    member: GroupMember | None = None
    first_epoch: int = 0


class WorkerDrained(JournalEntry, frozen=True, tag="drained"):
    """No request is placed on `worker`; after `until_s`, in seconds since 1970, its requests are retracted.

    Holds for one process: for `epoch`, and for its later epochs.
    """

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
    """New tokens and durable rows of any number of requests, as int32 arrays.

    `counts[i]` tokens of `request_indices[i]` from generated position `starts[i]` on, concatenated in `tokens`;
    `durables[i]` is the number of its durable rows. `logprobs`: where a request asks for them.
    """

    request_indices: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    durables: bytes
    logprobs: Logprobs | None = None


# ---------------------------------------------------------------- of a summary


class SummaryBegun(JournalEntry, frozen=True, tag="summary_begun"):
    """Begin of a summary (coordinator.journal.summary): the highest numbers given so far, pools, workers and drains.

    The records of the summary follow, some in each commit.
    """

    arrivals: int
    placements: int
    pools: tuple[PoolOpened, ...]
    workers: tuple[WorkerJoined, ...]
    drains: tuple[WorkerDrained, ...] = ()


class SummaryEnded(JournalEntry, frozen=True, tag="summary_ended"):
    """The summary is complete: of the rows before SummaryBegun only Accepted, Output and Ended are still needed."""


class NodePart(JournalEntry, frozen=True, tag="node_part"):
    """Part of a ledger as of the last SummaryBegun. All parts of a node, concatenated in order, are the ledger.

    `free` is the stack of free pages; holdings are by placement, budgets and quarantines by epoch. Pages are
    int32, those of `cached` too.
    """

    node: str
    pages_total: int
    free: bytes
    budgets: tuple[BudgetImage, ...]
    holdings: tuple[HoldingImage, ...]
    quarantines: tuple[tuple[EpochKey, bytes], ...]
    cached: bytes = b""


class BudgetImage(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    epoch: int
    capacity: WorkerCapacity
    lost: bool
    exited: bool


class HoldingImage(msgspec.Struct, frozen=True, array_like=True):
    """The memory of one placement. `budget` None: only kept pages."""

    placement: int
    budget: EpochKey | None
    hot_chunks: int
    index_pages: int
    pages: bytes


class RequestOutput(JournalEntry, frozen=True, tag="output"):
    """Tokens (int32) of one request from generated position `start` on, which earlier summaries do not have, and their
    rows (int32) where it asks for log-probabilities."""

    request_index: int
    start: int
    tokens: bytes
    durable_tokens: int
    logprobs: bytes = b""


def digest_of(prompt: bytes) -> bytes:
    """Hash that identifies a prompt."""
    return blake2b(prompt, digest_size=16).digest()


def with_named_grammar(sampling: Sampling) -> Sampling:
    """`sampling` with its kind, its length and a digest in place of a grammar: equal where the grammars are."""
    grammar = sampling.grammar
    if not grammar:
        return sampling
    digest = blake2b(grammar.encode(), digest_size=16).hexdigest()
    return msgspec.structs.replace(sampling, grammar=f"{kind_of(grammar)} ({len(grammar)} characters) {digest}")


def kept_facts(submitted: RequestFacts) -> RequestFacts:
    """Return the facts of a request that are kept in memory: a name stands for its grammar."""
    sampling = submitted.sampling
    return msgspec.structs.replace(submitted, sampling=with_named_grammar(sampling)) if sampling.grammar else submitted


def tokens_of(news: News) -> TokensAppended:
    """New tokens of the token log as a record."""
    return TokensAppended(
        news.request_indices.tobytes(),
        news.starts.tobytes(),
        news.counts.tobytes(),
        news.tokens.tobytes(),
        news.durables.tobytes(),
        None if news.logprobs is None else news.logprobs.packed(),
    )


def news_of(tokens: TokensAppended) -> News:
    """The arrays of a record. Raises ProtocolError when sizes of arrays are no multiples of 4 bytes, or disagree."""
    parts = (tokens.request_indices, tokens.starts, tokens.counts, tokens.tokens, tokens.durables)
    indices, starts, counts, ids, durables = (unpack_int32(part, "tokens") for part in parts)
    return News(indices, starts, counts, ids, durables, unpack_logprobs(tokens.logprobs, counts))


def output_of(part: OutputPart) -> RequestOutput:
    """A part of one request's output as a record."""
    return RequestOutput(
        part.request_index, part.start, part.tokens.tobytes(), part.durable_tokens, part.rows.tobytes()
    )


def struck_of(worker: str, strikes: Iterable[tuple[int, int, int]]) -> RequestsStruck:
    """A RequestsStruck of (request index, strikes, mark) for each request."""
    return RequestsStruck(worker, *(pack_int32(column) for column in zip(*strikes, strict=True)))


Record: TypeAlias = (
    RequestAccepted
    | RequestOrdered
    | RequestPlaced
    | RequestHandedOver
    | RequestPlacementEnded
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

#: Records that summaries do not replace; they stay until their request is forgotten.
LASTING = (RequestAccepted, RequestOutput, RequestEnded)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode
decode_all = msgspec.msgpack.Decoder(list[Record]).decode
