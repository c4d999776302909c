"""The whole wire protocol: every struct that crosses a ZMQ socket, the unions, the version and the codecs. Pure.

This file imports only msgspec. All structs are frozen and `array_like` (no field names on the wire). The first element
of a message is its tag, which each struct spells out: renaming a struct changes nothing on the wire. Arrays of numbers
travel as little-endian `bytes`, of int32 unless noted: decoding a list of 256 ints takes 5.5 us, the same bytes 0.9 us.
`protocol.arrays` packs and unpacks them.

Each direction has a union of its messages, so that a peer can only send what its role allows:

    client  -> gateway      ClientMessage      submit, attach, abort, ask
    admin   -> gateway      AdminMessage       the client's commands and the operator's
    gateway -> client/admin GatewayMessage     replies (matched by `tag`), deliveries, ends
    worker  -> coordinator  WorkerMessage      hello, reports (numbered), heartbeats
    coordinator -> worker   CoordinatorMessage welcome, commands (numbered), acknowledgements

Identities that appear in several messages:

    request_id  str     chosen by the client or made by the gateway; unique among the requests the coordinator knows
    request_index int32   index of a live request in the coordinator's token log; reused after the request is forgotten
    placement   int64   one stay of one request on one worker; never reused. Reports and commands of a placement that
                        has ended are acknowledged and do nothing
    epoch       int64   one worker process, from start to exit; command and report numbers start at 1 in each
    incarnation int64   one coordinator process, from start to exit; a worker refuses a lower one than it has seen (I4)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias

import msgspec

#: Since 2, each struct spells out its tag; in 1, class names were the tags. 3: ReloadKeys, and the tenant in a Submit.
#: 4: ranks of groups. 5: reuse of prefixes. 6: hot floors, grammars. 7: trace contexts, drafts, ranks of
#: requests for workers. 8: owners of requests for workers, waiting prompts of workers. 9: no slab pages. A coordinator
#: serves peers of the version before, too, from 9 on (protocol/skew.py).
PROTOCOL_VERSION: Final = 10

#: Largest message accepted from a client: a 1,048,576-token prompt is 4 MiB.
CLIENT_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
#: Largest message between coordinator and worker: an Admit carries prompt and delivered tokens.
WORKER_MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
#: Largest `warm_start` of a request; a larger one is not sent, and the request starts cold.
WARM_START_BYTES_MAX: Final = 1024 * 1024
#: A tokenizer is sent in chunks of this size, so that it delays commands only briefly.
TOKENIZER_CHUNK_BYTES: Final = 1024 * 1024
#: Highest priority of a request; the lowest is its negative.
PRIORITY_MAX: Final = 1_000
#: Highest priority that a key without a limit of its own may ask for: it may yield to others, and not pass them.
KEY_PRIORITY_DEFAULT: Final = 0
#: Longest request id, worker name, node name or tenant.
NAME_CHARS_MAX: Final = 128
#: Most stop strings per request, and most characters of each.
STOP_STRINGS_MAX: Final = 16
STOP_CHARS_MAX: Final = 256
#: Most entries of `Sampling.logit_bias` and of `Sampling.stop_token_ids`.
LOGIT_BIAS_MAX: Final = 300
STOP_TOKEN_IDS_MAX: Final = 64
#: Most alternatives to each token that `Sampling.logprobs` may ask for, and its value where it asks for nothing.
LOGPROBS_MAX: Final = 20
NO_LOGPROBS: Final = -1
#: Most log-probabilities of a request, `max_tokens` x (1 + `logprobs`), and of an answer of the HTTP front, where they
#: are some 20 MB of JSON.
LOGPROBS_OF_ANSWER_MAX: Final = 262_144
#: Longest `Sampling.grammar`, in characters: coordinators keep it until the request ends.
GRAMMAR_CHARS_MAX: Final = 64 * 1024
#: Most tokens that are drafted for a step of a request (`Submit.draft_tokens`): as many as its worker drafts.
DRAFT_TOKENS_MAX: Final = 4
#: Most end-of-sequence tokens of a model.
EOS_IDS_MAX: Final = 64
#: Bytes of a trace's and of a span's id, and most characters of `TraceContext.state`, as W3C Trace Context has them.
TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
TRACE_STATE_CHARS_MAX: Final = 512
#: Most ids or names in one command. Decoding 8 million empty ones would take 0.3 s.
NAMES_MAX: Final = 65_536

#: Role of a worker (`WorkerCapacity.role`): it computes prompts, decodes, or does both.
PREFILL: Final = "prefill"
DECODE: Final = "decode"
BOTH: Final = "both"
ROLES: Final = (PREFILL, DECODE, BOTH)
#: Where a prompt is prefilled (`Submit.prefill_mode`). STAGED: on the worker that decodes it, which stages it to host
#: pages. DIRECT: on another worker, which writes into the host pages. AUTO: the scheduler chooses.
STAGED: Final = "staged"
DIRECT: Final = "direct"
AUTO: Final = "auto"
PREFILL_MODES: Final = (AUTO, STAGED, DIRECT)
#: `Admit.hot_slots` of a placement that only computes the prompt.
NO_HOT_BUFFER: Final = -1
#: No first token is held back: none was drawn, or it was reported.
NO_TOKEN: Final = -1
#: `WorkerRow.link_age_s` of a worker that this coordinator has not heard.
NOT_SEEN: Final = -1.0

#: Ids of requests or names of workers in a command.
Names: TypeAlias = Annotated[tuple[str, ...], msgspec.Meta(max_length=NAMES_MAX)]

assert TOKENIZER_CHUNK_BYTES < WORKER_MESSAGE_BYTES_MAX  # a chunk must fit a message
assert CLIENT_MESSAGE_BYTES_MAX < WORKER_MESSAGE_BYTES_MAX  # an Admit carries any prompt that a client may send


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: on the wire, one array whose first element is the struct's tag."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of structs that only appear inside messages."""


# ---------------------------------------------------------------- shared parts


class Sampling(Part, frozen=True):
    """How tokens are chosen and when a request ends.

    `temperature` 0 is greedy. A counter-based generator takes `seed` and the position, so a resumed or replayed request
    draws the same numbers. `stop` strings end the output before their first occurrence that is completed behind
    `min_tokens` generated tokens, and take none of these away. `max_tokens` counts generated tokens.

    Logits are adjusted in this order (that of vLLM): ends are barred below `min_tokens` generated tokens; `logit_bias`
    (token, bias) is added; `repetition_penalty` divides positive and multiplies negative logits of tokens of prompt and
    output; `frequency_penalty` for each occurrence in the output and `presence_penalty` for the first are subtracted.
    Of what temperature then leaves, `min_p` drops tokens less likely than that share of the likeliest, and `top_k` (0:
    none) all but the k likeliest, ties kept, before `top_p`. A token of `stop_token_ids` ends the output and is part of
    it, as an end-of-sequence token.

    `logprobs`: each token comes with its log-probability and those of so many likeliest tokens (protocol/logprobs.py),
    LOGPROBS_MAX at most, and LOGPROBS_OF_ANSWER_MAX a request; NO_LOGPROBS: without. They are those of the logits
    before all of the above.

    `grammar`, where it is not empty, is a grammar that the output is held to, in the Lark syntax of llguidance or its
    JSON: before all else, tokens that no output of the grammar continues with are barred. An end-of-sequence token is
    drawn where the grammar may end, and no other where it must.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: Names = ()
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=NAMES_MAX)] = ()
    min_tokens: int = 0
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=NAMES_MAX)] = ()
    logprobs: int = NO_LOGPROBS
    grammar: str = ""


class TraceContext(Part, frozen=True):
    """The span of a caller that a request is part of, as W3C Trace Context has it (protocol/trace_context.py).

    `is_sampled`: spans of this trace are exported. `state` is handed on as it came.
    """

    trace_id: Annotated[bytes, msgspec.Meta(min_length=TRACE_ID_BYTES, max_length=TRACE_ID_BYTES)]
    span_id: Annotated[bytes, msgspec.Meta(min_length=SPAN_ID_BYTES, max_length=SPAN_ID_BYTES)]
    is_sampled: bool
    state: Annotated[str, msgspec.Meta(max_length=TRACE_STATE_CHARS_MAX)] = ""


class Logprobs(Part, frozen=True):
    """Log-probabilities of the tokens of a Progress or a Delivery, in which some requests ask for them.

    int32 `words`: for each entry, the words of a row, 0: its request asks for none. int32 `rows`: one for each token of
    the other entries, concatenated (protocol/logprobs.py).
    """

    words: bytes
    rows: bytes


class HeldToken(Part, frozen=True):
    """A first token that is held back, of a request that asks for log-probabilities: with its row."""

    token: int
    logprobs: bytes


#: A first token that is held back, or NO_TOKEN.
FirstToken: TypeAlias = int | HeldToken

#: Of a request, (-priority, turn, arrival): a total order that never changes; the lower rank goes first. Turns:
#: coordinator.state.owner_turns.
Rank: TypeAlias = tuple[int, int, int]


class ModelInfo(Part, frozen=True):
    """Facts of the model that a worker serves, for clients and the coordinator.

    `fingerprint` is a hash of config and weights index; it must be equal for all workers. `tokenizer_kind` is "bytes"
    (ids 0..255 are bytes) or "json" (a `tokenizer.json` of `tokenizer_hash`, fetched through the coordinator).
    Prefixes are reused in multiples of `prefix_unit_tokens`; `reuses_generated`: those with decoded rows, too.
    `arithmetic` names what rows depend on beside the model. In deterministic mode that is all that their bits depend
    on: the size of prompt blocks, how FP8 products are formed, the kind of device, and whether the indexer's queries
    are quantized. In other modes it names the library that multiplies quantized activations; empty where there is none.
    Only rows of equal arithmetic are reused.
    """

    fingerprint: str
    name: str
    context_max_tokens: int
    vocab_size: int
    layers: int
    topk: int
    eos_token_ids: tuple[int, ...]
    tokenizer_kind: str
    tokenizer_hash: str
    chat_template: str = ""
    prefix_unit_tokens: int = 64
    reuses_generated: bool = True
    arithmetic: str = ""


class WorkerCapacity(Part, frozen=True):
    """Memory of one worker and its node, in units of the ledger, and the worker's role.

    A host page holds 64 tokens of all layers. An index page holds the index keys and slot map of 64 tokens on the GPU.
    A hot chunk holds 64 device rows in every layer. `prompt_max_tokens`: the longest prompt that its passes have memory
    for. `hot_size_classes` are the managed hot-buffer sizes in slots, ascending; `tail_slots` are added to each, in one
    more chunk. `pool_id` is drawn when the pool at `pool_path` is created: when it changes, the earlier rows are gone.
    `sends` and `receives`: whether the worker can send host pages to other nodes, and receive them. `row_format` names
    what lies in a page (layers, bytes of rows and of index keys): cached pages of another format are not reused.
    """

    seats: int
    hot_chunks: int
    index_pages: int
    prompt_max_tokens: int
    host_pages: int
    page_bytes: int
    hot_size_classes: tuple[int, ...]
    tail_slots: int
    overshoot_tokens: int
    pool_path: str
    pool_id: int = 0
    role: str = BOTH
    sends: bool = False
    receives: bool = False
    row_format: str = ""

    @property
    def prefills(self) -> bool:
        return self.role != DECODE

    @property
    def decodes(self) -> bool:
        return self.role != PREFILL


# ---------------------------------------------------------------- client and admin -> gateway


class Hello(Message, frozen=True, tag="hello"):
    """First message on a client or admin connection. `role` is "client" or "admin" and must match the socket."""

    protocol: int
    role: str
    name: str = ""


class Submit(Message, frozen=True, tag="submit"):
    """Ask for a completion. `prompt` is int32 token ids. Answered by Accepted or Failure.

    With `subscribe` the connection receives Delivery and Ended of the request, under the handle given in Accepted.
    `prefill_mode` is one of PREFILL_MODES. `tenant` is on whose behalf the connection's user asks, "" for its own:
    requests of one priority take turns by user and tenant. It counts from users who may name tenants (HTTP fronts).
    Only requests of one `cache_salt` reuse each other's prefixes. `trace`: the span of the caller; None: it has none.
    A worker drafts `draft_tokens` for a step of the request at most, and no more than its `worker.draft_tokens`.
    """

    tag: int
    prompt: bytes
    sampling: Sampling
    request_id: str = ""
    priority: int = 0
    subscribe: bool = True
    prefill_mode: str = AUTO
    tenant: str = ""
    cache_salt: str = ""
    trace: TraceContext | None = None
    draft_tokens: int = DRAFT_TOKENS_MAX


class Attach(Message, frozen=True, tag="attach"):
    """Subscribe to a request from generated position `offset` on."""

    tag: int
    request_id: str
    offset: int = 0


class Detach(Message, frozen=True, tag="detach"):
    tag: int
    request_id: str


class AbortRequests(Message, frozen=True, tag="abort_requests"):
    tag: int
    request_ids: Names


class AcknowledgeOutputs(Message, frozen=True, tag="acknowledge_outputs"):
    """The client has stored the outputs of these ended requests; the coordinator may drop them."""

    tag: int
    request_ids: Names


class ListRequests(Message, frozen=True, tag="list_requests"):
    """Ask for rows of live and recently ended requests, at most `limit`."""

    tag: int
    limit: int = 10_000


class DescribeRequest(Message, frozen=True, tag="describe_request"):
    """Ask for one request with its history: every transition with time and reason."""

    tag: int
    request_id: str


class ListWorkers(Message, frozen=True, tag="list_workers"):
    tag: int


class ListPools(Message, frozen=True, tag="list_pools"):
    tag: int


class FetchTokenizer(Message, frozen=True, tag="fetch_tokenizer"):
    tag: int


class RetractRequests(Message, frozen=True, tag="retract_requests"):
    """Take requests off their workers. `keep`: their host pages stay. `hold`: they wait for ResumeRequests."""

    tag: int
    request_ids: Names
    keep: bool = True
    hold: bool = True


class ResumeRequests(Message, frozen=True, tag="resume_requests"):
    tag: int
    request_ids: Names


class ResizeRequests(Message, frozen=True, tag="resize_requests"):
    """Force the hot size: `hot_slots` 0 is resident, else one of the worker's size classes; -1 returns to policy."""

    tag: int
    request_ids: Names
    hot_slots: int


class DrainWorkers(Message, frozen=True, tag="drain_workers"):
    """Stop placing requests on these workers (empty tuple: all).

    With `handover`, running requests move to other workers of the node; a request that fits none finishes in place. At
    the deadline the remaining requests are retracted, keep their host pages and wait for capacity.
    """

    tag: int
    workers: Names
    handover: bool = False
    deadline_s: float = 300.0


class UndrainWorkers(Message, frozen=True, tag="undrain_workers"):
    tag: int
    workers: Names


class AuditWorkers(Message, frozen=True, tag="audit_workers"):
    """Compare the memory of all connected workers with the ledgers, now, in two rounds; answered by AuditRows."""

    tag: int


class ReleaseQuarantine(Message, frozen=True, tag="release_quarantine"):
    """Free the quarantined pages of these workers' lost epochs.

    The operator vouches that the processes of these epochs are gone, when the coordinator has no proof. A process that
    still runs would overwrite pages of other requests. `died`: a supervisor has seen each process end while it ran
    requests, which counts against them (coordinator.state.poison).
    """

    tag: int
    workers: Names
    died: bool = False


class ForgetWorkers(Message, frozen=True, tag="forget_workers"):
    """List these disconnected workers no longer. Refused for a worker that is connected or awaited, and while a
    quarantine holds host pages that its lost process may still write."""

    tag: int
    workers: Names


class TellStandbys(Message, frozen=True, tag="tell_standbys"):
    """A supervisor tells which of these `workers`, all of which are to have a standby, have one that is `ready`.

    A standby itself says nothing before it takes over.
    """

    tag: int
    workers: Names
    ready: Names = ()


class ListPrefixes(Message, frozen=True, tag="list_prefixes"):
    """Ask for the largest cached prefixes, at most `limit`."""

    tag: int
    limit: int = 20


class DropPrefixes(Message, frozen=True, tag="drop_prefixes"):
    """Forget cached prefixes: those of these ids, and all of these owners. Neither ids nor owners: all there are.

    An owner is written as in PrefixRow. Requests that hold such pages keep them.
    """

    tag: int
    prefix_ids: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()


class ReloadKeys(Message, frozen=True, tag="reload_keys"):
    """Read the list of allowed keys again. Done says what was read; Failure, that the old list holds, and why."""

    tag: int


class StopCoordinator(Message, frozen=True, tag="stop_coordinator"):
    """Drain the coordinator: refuse new requests, let running ones finish until the deadline, then exit."""

    tag: int
    deadline_s: float = 30.0


ClientMessage: TypeAlias = (
    Hello
    | Submit
    | Attach
    | Detach
    | AbortRequests
    | AcknowledgeOutputs
    | ListRequests
    | DescribeRequest
    | ListWorkers
    | ListPools
    | FetchTokenizer
)
AdminMessage: TypeAlias = (
    ClientMessage
    | RetractRequests
    | ResumeRequests
    | ResizeRequests
    | DrainWorkers
    | UndrainWorkers
    | AuditWorkers
    | ReleaseQuarantine
    | ForgetWorkers
    | TellStandbys
    | ListPrefixes
    | DropPrefixes
    | ReloadKeys
    | StopCoordinator
)


# ---------------------------------------------------------------- gateway -> client and admin


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to Hello. `model` is None until the first worker has registered.

    `refusal`: why every new request would be refused now; empty: it would not be. `unserved`: why no worker would take
    a new request now, although memory is free; empty: a worker would.
    """

    protocol: int
    incarnation: int
    version: str
    model: ModelInfo | None = None
    refusal: str = ""
    unserved: str = ""

    @property
    def unready(self) -> str:
        """Why a new request would not be served now; empty: it would be."""
        return self.refusal or self.unserved


class Failure(Message, frozen=True, tag="failure"):
    """Any refusal. `tag` is that of the refused message, or -1 when the message could not be read.

    `code` is stable (see protocol.errors). `field` and `value`: what was wrong; `remedy`: what to do.
    """

    tag: int
    code: str
    message: str
    field: str = ""
    value: str = ""
    remedy: str = ""


class Accepted(Message, frozen=True, tag="accepted"):
    """Answer to Submit and Attach. `handle` names the request in this connection's deliveries; -1: not subscribed."""

    tag: int
    request_id: str
    handle: int


class Done(Message, frozen=True, tag="done"):
    """A command was carried out; `detail` has one line per request or worker concerned."""

    tag: int
    detail: tuple[str, ...] = ()


class Delivery(Message, frozen=True, tag="delivery"):
    """New tokens of any number of subscribed requests, as four int32 arrays.

    Entry i: `counts[i]` tokens of handle `handles[i]` from generated position `starts[i]`. `tokens` concatenates the
    tokens of all entries. A connection receives each position once and in order (I5). `logprobs`: where an entry's
    request asks for them.
    """

    handles: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    logprobs: Logprobs | None = None


class Ended(Message, frozen=True, tag="ended"):
    """The end of a subscribed request, after its last token. `outcome` is FINISHED, ABORTED or FAILED.

    `tail_text` is the text between the last token and a stop string that starts inside a token; the client appends it
    to the decoded text. `prefix_tokens` of the prompt were reused, not computed. Steps verified `drafted_tokens`, of
    which `accepted_tokens` are in the output; the journal has neither, so that a coordinator which was started again
    counts from the placement on that it found.
    """

    handle: int
    request_id: str
    outcome: str
    reason: str
    generated_tokens: int
    tail_text: str = ""
    prefix_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class RequestRow(Part, frozen=True):
    """State of one request. `worker` is empty while it has none.

    `reason` is why it is in `state`. `waits_for` is the kind of what it waits for (basics/request_states.py),
    and `reason` says then what that is; empty: it waits for nothing.
    """

    request_id: str
    state: str
    priority: int
    worker: str
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    durable_tokens: int
    host_pages: int
    hot_slots: int  # 0: resident; -1: no hot buffer
    hot_chunks: int
    hits: int
    misses: int
    retractions: int
    age_s: float
    held: bool
    reason: str
    waits_for: str = ""
    prefix_tokens: int = 0  # of the prompt: reused, not computed, when it was first admitted
    drafted_tokens: int = 0  # drafts that steps verified
    accepted_tokens: int = 0  # of them, those that are in its output


class HistoryLine(Part, frozen=True):
    """One transition of a request."""

    at_s: float  # seconds since the epoch
    event: str
    state: str
    reason: str


class HotFloorRow(Part, frozen=True):
    """The hot floor of a worker: the smallest hot size that policy gives there, in slots (0: resident), and why.

    `predicted_*` and `requests` are of that floor, with as many requests as memory and demand allow; `best_*` of the
    floor that promises most. `changes` counts those of its epoch. `observed_step_us` 0: nothing was observed yet.
    """

    hot_slots: int
    requests: int
    observed_step_us: float
    predicted_step_us: float
    predicted_tokens_per_s: float
    best_slots: int
    best_tokens_per_s: float
    changes: int
    reason: str


class WorkerRow(Part, frozen=True):
    """A worker with its capacity and what of it is free. Counters are of its `epoch`.

    `link_age_s`: seconds since the coordinator heard it last, or NOT_SEEN. `exit_proved`: it is disconnected, and its
    process is proved gone.
    """

    worker: str
    node: str
    state: str  # connected, draining, drained, disconnected
    epoch: int
    running: int
    capacity: WorkerCapacity
    hot_chunks_free: int
    index_pages_free: int
    seats_free: int
    steps: int
    step_us: float
    hits: int
    misses: int
    link_age_s: float
    command_ack_ms: float
    swapped_bytes: int = 0  # rows that swap-in loaded from host memory
    group: str = ""  # of which it is a rank; empty: it holds the whole model
    rank: int = 0
    ranks_missing: tuple[int, ...] = ()  # of its group: without them no request is placed on any of its ranks
    awaits: str = ""  # worker that its decode loop waits for
    exit_proved: bool = False
    step_s: float = 0.0  # seconds of all decode steps
    load_s: float = 0.0  # of these, seconds of swap-ins that steps wait for
    hot_sizing: HotFloorRow | None = None
    prompt_tokens: int = 0  # computed
    prompts_waiting: int = 0  # prompts that wait or are under way
    prompt_wait_s: float = 0.0  # seconds since the oldest of these was admitted
    standby: str = ""  # ready or missing, as its supervisor told; empty: it is to have none


class PoolRow(Part, frozen=True):
    """The host pool of a node, in pages; `reservations` counts the requests that hold pages. `cached` pages are
    held by no request, and are free once they are evicted. Of prompts that were admitted to be prefilled since the
    coordinator's start, `prefix_asked_tokens` were looked up and `prefix_reused_tokens` found."""

    node: str
    host_pages: int
    free: int
    owned: int
    shared: int
    quarantined: int
    page_bytes: int
    reservations: int
    workers: tuple[str, ...]
    cached: int = 0
    prefix_asked_tokens: int = 0
    prefix_reused_tokens: int = 0
    prefix_pages_evicted: int = 0


class PrefixRow(Part, frozen=True):
    """A cached prefix that no other continues, on one node.

    `pages` lead to it, the last `own_pages` of them to no other. `owner` is USER/TENANT, as far as there are any:
    who may reuse it. `salted`: only with its cache_salt. `in_use`: requests hold its last page.
    """

    node: str
    prefix_id: str
    owner: str
    salted: bool
    pages: int
    own_pages: int
    tokens: int
    in_use: bool


class AuditedRow(Part, frozen=True):
    """One worker or node (`epoch` 0) that was audited. `answered` false: no inventory arrived in time."""

    name: str
    epoch: int
    answered: bool
    requests: int
    host_pages: int
    differences: int


class DifferenceRow(Part, frozen=True):
    """One difference between a worker and the ledger of its node; `placement` 0: of the worker or node as a whole."""

    name: str
    kind: str
    placement: int
    request_id: str
    ledger: str
    worker: str
    repaired: bool


class RequestRows(Message, frozen=True, tag="request_rows"):
    """Live and recently ended requests. `truncated`: there are more than `limit`."""

    tag: int
    rows: tuple[RequestRow, ...]
    truncated: bool = False


class RequestDetail(Message, frozen=True, tag="request_detail"):
    """A request with its transitions, the first one first."""

    tag: int
    row: RequestRow
    history: tuple[HistoryLine, ...]


class WorkerRows(Message, frozen=True, tag="worker_rows"):
    tag: int
    rows: tuple[WorkerRow, ...]


class PoolRows(Message, frozen=True, tag="pool_rows"):
    tag: int
    rows: tuple[PoolRow, ...]


class PrefixRows(Message, frozen=True, tag="prefix_rows"):
    """The largest cached prefixes, and how many there are."""

    tag: int
    rows: tuple[PrefixRow, ...]
    prefixes: int


class AuditRows(Message, frozen=True, tag="audit_rows"):
    """The audited workers and nodes, and the differences between ledgers and workers."""

    tag: int
    audited: tuple[AuditedRow, ...]
    differences: tuple[DifferenceRow, ...]


class TokenizerData(Message, frozen=True, tag="tokenizer_data"):
    """The tokenizer of the served model. `data` is empty for `kind` "bytes", a tokenizer.json for "json"."""

    tag: int
    kind: str
    hash: str
    data: bytes


GatewayMessage: TypeAlias = (
    Welcome
    | Failure
    | Accepted
    | Done
    | Delivery
    | Ended
    | RequestRows
    | RequestDetail
    | WorkerRows
    | PoolRows
    | PrefixRows
    | AuditRows
    | TokenizerData
)


# ---------------------------------------------------------------- coordinator -> worker


class Admit(Part, frozen=True, tag="admit"):
    """Start a placement. Its memory was committed in the ledger before this was sent (I4).

    `prompt` and `generated` are int32 ids. `generated` tokens were delivered before (resume or replay); they are
    forced, never resampled. `durable_tokens` 0: compute the prompt in passes and stage it. Otherwise the host
    pages already hold that many rows (at least the prompt's): reload index keys, and rows as far as that pays.
    `host_pages` are int32 ids in order of position. Counts are totals of this placement, not increments.

    `hot_slots` NO_HOT_BUFFER: compute and stage the prompt, draw the first token, and leave, with Staged and then
    Released. `first_token` was drawn in an earlier placement and held back; it is forced like those of `generated`.

    `transfer_id` not 0: the rows go to another node in this inbound transfer. Send each page, once it is staged, to the
    receiver that `destination` describes (worker/transfer). Leave when all pages were delivered or the transfer failed.
    The receiver has the first `unsent_tokens` rows already, whole pages: those are not sent.

    `warm_start`, if any, comes from the Released of the placement that wrote the rows: positions to begin a managed hot
    buffer with. It is a hint: an unreadable one is counted, and the request starts cold.

    `prefix_tokens`, whole pages and less than the prompt, only with `durable_tokens` 0: the first host pages hold those
    rows and index keys already. They are shared with other requests or with a lost process, and never written. The
    first pass begins behind them. `by_steps`, only with such a prefix: the rest is short, and goes through decode
    steps, on a hot buffer that begins like that of a resume.

    `rank` is the request's: work of which a worker does little at once is done in its order. `draft_tokens` is
    that of the Submit. `owner` is whose share of the worker's prompt work computes the prompt: the user, and the tenant
    if there is one (RequestFacts.owner_name).
    """

    placement: int
    request_index: int
    request_id: str
    prompt: bytes
    generated: bytes
    durable_tokens: int
    sampling: Sampling
    host_pages: bytes
    index_pages: int
    hot_slots: int  # 0: resident
    hot_chunks: int
    first_token: FirstToken = NO_TOKEN
    transfer_id: int = 0
    destination: bytes = b""
    warm_start: bytes = b""
    prefix_tokens: int = 0
    unsent_tokens: int = 0
    rank: Rank = (0, 0, 0)
    draft_tokens: int = DRAFT_TOKENS_MAX
    owner: str = ""
    by_steps: bool = False

    @property
    def computes_prompt(self) -> bool:
        """Tell whether the prompt goes through passes."""
        return not (self.durable_tokens or self.by_steps)


class Receive(Part, frozen=True, tag="receive"):
    """Start an inbound transfer: another worker writes the first `prompt_tokens` rows into `host_pages` (int32 ids).

    The rows of the first `prefix_tokens`, whole pages, are there already, in pages that are shared with other requests:
    those are not opened for writing.

    `placement` is the number of the transfer. Answered by Released, with all rows; or with none, when the
    transfer failed or was withdrawn. After Released nothing writes into the pages (I2). Pages behind the prompt are for
    decoding.
    """

    placement: int
    request_index: int
    request_id: str
    prompt_tokens: int
    host_pages: bytes
    prefix_tokens: int = 0


class Exited(Part, frozen=True, tag="exited"):
    """Process `pid` of `worker` is proved gone: it sends no more host pages."""

    worker: str
    pid: int


class Grant(Part, frozen=True, tag="grant"):
    """More memory for a running request. `host_pages` (int32 ids) are appended; the counts are increments."""

    placement: int
    host_pages: bytes
    index_pages: int
    hot_chunks: int


class Resize(Part, frozen=True, tag="resize"):
    """Change the hot size at the next step boundary; answered by Resized. Counts are totals."""

    placement: int
    hot_slots: int
    hot_chunks: int


class Withdraw(Part, frozen=True, tag="withdraw"):
    """End a placement at the next step boundary and release its memory; answered by Released.

    Retraction (keep or drop), abort and handover are the same to a worker: the coordinator decides about host pages.
    """

    placement: int


class Stop(Part, frozen=True, tag="stop"):
    """Exit once the running requests have ended, after `deadline_s` at the latest."""

    deadline_s: float


class Audit(Part, frozen=True, tag="audit"):
    """Report the memory of every placement at this step boundary; answered by Inventory `number`."""

    number: int


Command: TypeAlias = Admit | Receive | Exited | Grant | Resize | Withdraw | Stop | Audit


class WorkerWelcome(Message, frozen=True, tag="worker_welcome"):
    """Answer to WorkerHello. `report_ack` is the last report of this epoch that was applied: send the later ones.

    `adopted`: a coordinator of a higher incarnation knows this epoch from its journal and continues it.
    """

    protocol: int
    incarnation: int
    report_ack: int
    want_tokenizer: bool
    adopted: bool = False


class Refused(Message, frozen=True, tag="refused"):
    """The worker may not join: wrong protocol, another model than the other workers, a pool of another shape, ..."""

    code: str
    message: str
    remedy: str = ""


class Commands(Message, frozen=True, tag="commands"):
    """Commands `first`, `first`+1, ... A worker applies each once and in order; a gap is answered by Replay."""

    incarnation: int
    first: int
    commands: tuple[Command, ...]


class ReportAck(Message, frozen=True, tag="report_ack"):
    """All reports up to `number` were received and written to the journal."""

    incarnation: int
    number: int


class ReplayReports(Message, frozen=True, tag="replay_reports"):
    """A report is missing: send reports from `first` on again."""

    incarnation: int
    first: int


CoordinatorMessage: TypeAlias = WorkerWelcome | Refused | Commands | ReportAck | ReplayReports


# ---------------------------------------------------------------- worker -> coordinator


#: Ranks of a group.
GROUP_SIZE_MAX: Final = 1_024


class GroupMember(Part, frozen=True):
    """A worker's place in a group, whose `size` ranks hold one copy of the model and step together.

    `incarnation` is drawn by rank 0 when it starts, in milliseconds of its clock: one number for one life of the group,
    above those of earlier lives. A rank says hello when its graphs are warm.
    """

    group: str
    rank: int
    size: int
    incarnation: int


class WorkerHello(Message, frozen=True, tag="worker_hello"):
    """First message on a worker connection; each connect uses a new DEALER.

    `command_ack`: the last command applied. Reports `report_first` to `report_next` - 1 were not acknowledged.
    `inventory`: rows of the placements that it still has, or whose Released was not acknowledged
    (protocol/inventory.py). `receiver` describes how other nodes send it host pages (worker/transfer); empty: it
    receives none. `first_epoch`: that of this process, which begins another one only without requests; 0: unknown.
    """

    protocol: int
    worker: str
    node: str
    epoch: int
    pid: int
    incarnation_seen: int
    command_ack: int
    report_next: int
    model: ModelInfo
    capacity: WorkerCapacity
    inventory: bytes = b""
    report_first: int = 1
    receiver: bytes = b""
    member: GroupMember | None = None
    first_epoch: int = 0


class Progress(Part, frozen=True):
    """Tokens of any number of requests since the last report, as parallel arrays.

    int32 `request_indices`, int64 `placements`, int32 `starts` (generated position of the first token), int32 `counts`,
    int32 `tokens` (concatenated), int32 `durables` (rows known durable in host memory, prompt included). `logprobs`:
    where a request asks for them.
    """

    request_indices: bytes
    placements: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    durables: bytes
    logprobs: Logprobs | None = None


class Staged(Part, frozen=True, tag="staged"):
    """The prompt's rows are in host memory. Times are for metrics and history."""

    placement: int
    prefill_ms: float
    stage_ms: float


class Started(Part, frozen=True, tag="started"):
    """The request joined the decode batch."""

    placement: int


class Parked(Part, frozen=True, tag="parked"):
    """The request has used its granted pages and waits for a Grant, while its batch goes on."""

    placement: int


class Resized(Part, frozen=True, tag="resized"):
    """A Resize took effect; chunks beyond `hot_chunks` are free."""

    placement: int
    hot_slots: int
    hot_chunks: int


class Finished(Part, frozen=True, tag="finished"):
    """The output is complete: `reason` is eos, stop or length. Released follows."""

    placement: int
    reason: str
    generated_tokens: int
    tail_text: str = ""


class Faulted(Part, frozen=True, tag="faulted"):
    """The request cannot go on, by a fault of the request or of the worker. Released follows."""

    placement: int
    message: str


class Released(Part, frozen=True, tag="released"):
    """A placement has ended: every stream that could touch its memory has passed a fence (I2).

    Rows below `durable_tokens` are in host memory. `first_token` was drawn but not reported, because a stop string may
    begin in it: the next placement continues from it. `warm_start` holds the positions that the last step, or the
    prompt's last token, selected: a hint (worker/loop/warm_start.py).
    """

    placement: int
    durable_tokens: int
    first_token: FirstToken = NO_TOKEN
    warm_start: bytes = b""


#: By placement, of requests that draft nothing.
NO_DRAFTS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType({})


class Counters(Part, frozen=True, tag="counters"):
    """Swap-in so far: totals of the worker, and int64 `placements`, `hits`, `misses` of requests. `drafted` and
    `accepted` are drafts of the same requests that steps verified, and those that were right; empty: there were none.

    Hits of a request that has all of its rows on the device are in its own count alone.
    A report has the requests that were counted since the last one with counters. They are counted about once a second,
    and when they leave, before Released.
    """

    total_hits: int
    total_misses: int
    total_bytes: int
    placements: bytes
    hits: bytes
    misses: bytes
    drafted: bytes = b""
    accepted: bytes = b""


class Inventory(Part, frozen=True, tag="inventory"):
    """Memory held by a worker, after all commands before Audit `number` and all events before this one.

    `rows` of all placements that hold memory (protocol/inventory.py), and the free memory.
    """

    number: int
    rows: bytes
    seats_free: int
    chunks_free: int
    index_pages_free: int


Event: TypeAlias = Staged | Started | Parked | Resized | Finished | Faulted | Released | Counters | Inventory


class Report(Message, frozen=True, tag="report"):
    """Numbered from 1 in each epoch; `command_ack` is cumulative. Tokens apply before events."""

    number: int
    epoch: int
    command_ack: int
    progress: Progress | None
    events: tuple[Event, ...]


class ReplayCommands(Message, frozen=True, tag="replay_commands"):
    """A command is missing: send commands from `first` on again."""

    epoch: int
    first: int


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Sent by the link thread, about the executor.

    `executor_beats` grows while the executor's loop turns, busy or idle; it shows a hung executor behind a live link.
    `leaving`: the process withdraws all requests and exits; place none there. `awaits` names the rank of its group
    that the executor waits for: it beats on meanwhile.
    """

    epoch: int
    command_ack: int
    executor_beats: int
    steps: int
    step_us: float  # moving average of recent decode steps
    leaving: bool = False
    awaits: str = ""
    step_s: float = 0.0  # of all decode steps of the epoch's process
    load_s: float = 0.0  # of swap-ins that these steps wait for: of the first layer of each index group
    alone_steps: int = 0  # of `steps`, those that no prompt ran beside
    alone_s: float = 0.0  # of all of these
    alone_requests: int = 0  # in all of these together
    step_requests: int = 0  # in all steps together
    prompt_tokens: int = 0  # computed
    prompts_waiting: int = 0  # prompts that wait or are under way
    prompt_wait_s: float = 0.0  # since the oldest of these was admitted


class TokenizerChunk(Message, frozen=True, tag="tokenizer_chunk"):
    """Chunk `index` of `total` of the worker's tokenizer."""

    epoch: int
    hash: str
    index: int
    total: int
    data: bytes


WorkerMessage: TypeAlias = WorkerHello | Report | ReplayCommands | Heartbeat | TokenizerChunk


# ---------------------------------------------------------------- codecs, built once: building costs more than a call

encode = msgspec.msgpack.Encoder().encode
decode_client = msgspec.msgpack.Decoder(ClientMessage).decode
decode_admin = msgspec.msgpack.Decoder(AdminMessage).decode
decode_gateway = msgspec.msgpack.Decoder(GatewayMessage).decode
decode_worker = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_coordinator = msgspec.msgpack.Decoder(CoordinatorMessage).decode
