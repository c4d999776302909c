"""What the executor asks of a model: one small protocol, and the tensors that pass through it.

A runner owns weights and scratch memory; requests' memory is DeviceState's. It never blocks and never reads a result
back: each `launch_*` call queues operations on streams and returns, so that the next step can be launched before this
one's tokens are known. Operations read their inputs when they run, not when they are launched.

Who does what in one decode step n:

    executor   compute   apply seat changes, upload StepBatch, wait backed_up of step n - tail_slots, begin_step
    runner     compute   embed; per layer: index key and index_topk (anchors), record selected; project, write row; wait
                         swapped_in (anchors) or prefetched; attend
    runner     swap      per group: wait selected, swap_in, record swapped_in; per further layer: replay_misses, record
                         prefetched. index_topk of a small batch is on swap too (worker/runners/swapping.py)
    runner     compute   norm, lm_head, sample -> outputs.tokens and sampler.last_token (launch_sample)
    executor   compute   record row_written and sampled

Sampling needs no input of its own: the token drawn by a step whose `length` is L has position L in its context (prompt
included), and that position with the request's seed is the whole state of the generator (worker/runners/sampling.py).

Rejected: one opaque `step()` per runner. The executor could then neither overlap the swap stream with a layer's
compute nor replay the same launches under a simulated or captured stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch

from kernels.layout import Geometry
from kernels.row_bytes import SCALE_BYTES
from protocol.messages import ModelInfo
from protocol.settings import WorkerSettings
from protocol.units import BLOCK_TOKENS_MAX, PAGE_TOKENS
from worker.device.passes import PassUnit
from worker.device.step_rows import DETERMINISTIC_BLOCK_TOKENS
from worker.runners.adjust import Adjust
from worker.runners.checkpoint import kv_kinds
from worker.runners.logits import AdjustTables
from worker.weights.matmul import Matmul

if TYPE_CHECKING:
    from kernels.state import DeviceState, StepBatch
    from worker.streams import Streams

#: Called by a unit once the operations that write its rows and index keys were launched.
UnitWritten: TypeAlias = Callable[[], None]


def prefix_unit_tokens(settings: WorkerSettings) -> int:
    """A shared prefix of a prompt has a multiple of so many tokens. In deterministic mode it has whole blocks, so that
    the rest is computed in the same blocks as without."""
    return math.lcm(prompt_block_tokens(settings), PAGE_TOKENS) if settings.deterministic else PAGE_TOKENS


def prompt_block_tokens(settings: WorkerSettings) -> int:
    """Tokens of every block of a prompt in deterministic mode, but for the last."""
    return min(DETERMINISTIC_BLOCK_TOKENS, settings.pass_tokens)


def form_block_tokens(*, gathered: bool, deterministic: bool) -> int:
    """Rows of the largest unit in one of the two forms of prompt.py."""
    return BLOCK_TOKENS_MAX if gathered and not deterministic else DETERMINISTIC_BLOCK_TOKENS


def arithmetic(settings: WorkerSettings, matmul: Matmul) -> str:
    """ModelInfo.arithmetic: what two workers must have alike, beside the model, for one to reuse the other's rows.

    In deterministic mode all that their bits depend on. Otherwise how products quantize activations, if they do.
    """
    if not settings.deterministic:
        return matmul.name if matmul.quantizes_rows else ""
    on_gpu = settings.device.startswith("cuda")
    kept = kv_kinds(settings.dtype, settings.kv_dtype, settings.row_dtype, settings.index_dtype)
    kind = torch.cuda.get_device_name(settings.device) if on_gpu else settings.device
    # the words are those of the protocol version before, where rows have the same bits: both serve one node meanwhile
    queries = ", prompts by fp8 queries" if on_gpu and kept.keys in SCALE_BYTES else ""
    return f"chunks of {prompt_block_tokens(settings)} tokens, {matmul.name}, {kind}{queries}"


def no_listener() -> None:
    """A UnitWritten for those who wait for the whole pass."""


class PromptPart(NamedTuple):
    """Tokens of one prompt in a pass: positions start..stop-1 of the prompt in `seat`, which are the rows from `first`
    on. `ends`: the last of them is the last token of its prompt."""

    seat: int
    start: int
    stop: int
    first: int
    ends: bool

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The row behind the last."""
        return self.first + self.tokens


@dataclass(eq=False)
class PromptPass:
    """Prompt tokens that go through the layers together, and what a runner keeps of them between two units.

    Runners derive their own. A *row* is the place of a token in the pass. `left`: numbers of parts whose request has
    left; units that are launched later neither read nor write their memory.
    """

    parts: tuple[PromptPart, ...]
    left: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return self.parts[-1].end

    @property
    def has_earlier(self) -> bool:
        """Tell whether a part attends to rows below its own."""
        return any(part.start for part in self.parts)

    def leave(self, number: int) -> None:
        """The request of that part has left."""
        self.left.add(number)

    def pieces(self, first: int, stop: int) -> Iterator[tuple[int, PromptPart]]:
        """Numbers of the parts with rows in first..stop-1, and those rows of each as a part; without those that left.
        `ends` is true of the piece with the prompt's last token alone."""
        for number, part in enumerate(self.parts):
            low, high = max(first, part.first), min(stop, part.end)
            if low < high and number not in self.left:
                start = part.start + low - part.first
                yield number, PromptPart(part.seat, start, start + high - low, low, part.ends and high == part.end)


@dataclass
class SamplerState:
    """Per-seat sampling parameters and the token each seat drew last. Written by operations on `compute` only.

    | tensor      | dtype, shape    | meaning                                                             |
    |-------------|-----------------|---------------------------------------------------------------------|
    | last_token  | int32 [seats]   | fed by the next step where StepBatch.inputs is -1                   |
    | temperature | float32 [seats] | 0 is greedy                                                         |
    | top_p       | float32 [seats] | 1 keeps the whole vocabulary                                        |
    | seed        | int64 [seats]   | any 64-bit pattern; with the position it determines every draw      |

    `adjust` says how logits are adjusted before (worker/runners/logits.py).
    """

    last_token: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    adjust: AdjustTables

    @classmethod
    def allocate(cls, seats: int, vocab: int, device: torch.device | str = "cpu") -> SamplerState:
        return cls(
            last_token=torch.zeros(seats, dtype=torch.int32, device=device),
            temperature=torch.zeros(seats, dtype=torch.float32, device=device),
            top_p=torch.ones(seats, dtype=torch.float32, device=device),
            seed=torch.zeros(seats, dtype=torch.int64, device=device),
            adjust=AdjustTables.allocate(seats, vocab, device),
        )

    def set_seat(self, seat: int, temperature: float, top_p: float, seed: int) -> None:
        """Device-side: a new request takes `seat`, and adjusts nothing. `seed` is reduced modulo 2**64 to a signed
        64-bit pattern."""
        self.last_token[seat].fill_(0)  # assignment would copy the number from pageable memory, and wait for that
        self.temperature[seat].fill_(temperature)
        self.top_p[seat].fill_(top_p)
        self.seed[seat].fill_((seed + 2**63) % 2**64 - 2**63)
        self.adjust.adjusts[seat].fill_(False)
        self.adjust.has_grammar[seat].fill_(False)


@dataclass
class StepOutputs:
    """Results of one step, at fixed addresses. A ring of two lets a step run while the previous one is read.

    | tensor    | dtype, shape          | meaning                                                                |
    |-----------|-----------------------|------------------------------------------------------------------------|
    | tokens    | int32 [rows]          | token drawn for each batch row; -1 for padding                         |
    | logits    | float32 [rows, vocab] | raw logits, kept when allocated so (tests, tie analysis); else None    |
    | warm_start | int32 [G, k]          | prefill alone, if wanted: positions that the prompt's last token       |
    |           |                       | selected, by index group, -1 padded                                    |
    | logprobs  | int32 [rows,          | log-probabilities of the tokens (protocol/logprobs.py), where a        |
    |           | ROW_WORDS_MAX]        | request of the step asks for them; else None                           |

    A prefill writes row 0 alone.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None = None
    warm_start: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        rows: int,
        vocab_size: int,
        *,
        keep_logits: bool = False,
        topk_shape: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> StepOutputs:
        """Of a batch of `rows`: tokens int32 [rows] of -1, logits float32 [rows, vocab_size] of 0 if they are kept, the
        last top-k int32 of `topk_shape` and -1 if it is."""
        return cls(
            tokens=torch.full((rows,), -1, dtype=torch.int32, device=device),
            logits=torch.zeros(rows, vocab_size, dtype=torch.float32, device=device) if keep_logits else None,
            warm_start=None if topk_shape is None else torch.full(topk_shape, -1, dtype=torch.int32, device=device),
        )


class Runner(Protocol):
    """A model behind streams. Not thread-safe: one executor thread launches everything. A port: engines bring runners
    of their own."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def geometry(self) -> Geometry: ...

    @property
    def block_tokens_max(self) -> int:
        """Rows of the largest unit."""
        ...

    def prompt_bytes(self, pass_tokens: int) -> int:
        """Bytes of the device that open passes of `pass_tokens`, and a unit of the largest size, take at most."""
        ...

    def begin_pass(
        self, streams: Streams, state: DeviceState, parts: Sequence[PromptPart], tokens: torch.Tensor
    ) -> PromptPass:
        """Enter a pass: copy and embed its `tokens` int64[P] on `compute`; they may change once that ran.

        Tokens are ids of the vocabulary, as check_admit saw on the host: they are not read back to check. Parts lie
        behind each other, the first one from row 0 on. Several passes may be open.
        """
        ...

    def launch_unit(
        self,
        streams: Streams,
        state: DeviceState,
        prompts: PromptPass,
        layer: int,
        first: int,
        stop: int,
        written: UnitWritten = no_listener,
        rows: int = 0,
    ) -> None:
        """One layer over rows first..stop-1 of a pass on `compute`; at most `block_tokens_max`.

        Units of a pass come layer by layer, and rows of a layer in order. KV rows and index keys of positions below
        each part's must lie in the slab (state.slab_table[seat]) and the index cache; the unit writes its own there.
        What the last token of a prompt selects is kept for `launch_first_token`.

        `written` is called between launches, as early as may be: its caller's copies overlap with what is launched
        after it, which never changes rows of this layer again. What is launched before it reads no row of this layer
        below a part's start, only index keys: rows may still be loading. `rows` is the size of a group's round.
        """
        ...

    def launch_first_token(
        self,
        streams: Streams,
        sampler: SamplerState,
        prompts: PromptPass,
        number: int,
        outputs: StepOutputs,
        adjust: Adjust | None,
    ) -> None:
        """Draw, behind the last unit of a pass, the first token of part `number`, which ends its prompt.

        It goes to outputs.tokens[0] and sampler.last_token[seat], and what the last token selected to
        outputs.warm_start; `adjust` is what the request asks for.
        """
        ...

    def launch_forward(self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch) -> None:
        """One decode step of every real row of `batch`, after `begin_step` ran for it, without its draws.

        Feeds batch.inputs (or last_token where -1), writes row and index key at position length - 1, attends to the
        selected rows. Scratch memory is keyed by the batch's row count and reused: steps of one runner must run in
        launch order on `compute`, as they do on any stream.
        """
        ...

    def launch_sample(
        self, streams: Streams, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        """Behind `launch_forward` of the same batch: draw the token of position `length` of each real row.

        `adjust` is what the rows ask for together; None: no row does. With it, or with `outputs.logprobs`, nothing of
        the launch is captured. A row whose mask is late (sampler.adjust.drawn) counts and draws nothing: -1, and its
        last_token stays.
        """
        ...


@dataclass
class DraftRows:
    """What one launch of the draft layer reads and draws, for a batch of B padded rows, at fixed addresses.

    | tensor    | dtype, shape       | meaning                                                                      |
    |-----------|--------------------|------------------------------------------------------------------------------|
    | following | int32 [B]          | the token behind the one that the row fed, at position `length`; anything for |
    |           |                    | padding and for rows that will be rejected                                   |
    | tokens    | int32 [B]          | the draft for position `length` + 1; -1 for padding                          |
    | source    | int32 [B]          | the row of the launch before, of `source_rows` padded rows, whose output the |
    |           |                    | layer is applied to, -1 for padding; None: the model's states                |
    | logits    | float32 [B, vocab] | of the drafts, kept when allocated so (tests); else None                     |
    """

    following: torch.Tensor
    tokens: torch.Tensor
    source: torch.Tensor | None = None
    source_rows: int = 0
    logits: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        rows: int,
        *,
        source_rows: int = 0,
        vocab_size: int = 0,
        device: torch.device | str = "cpu",
    ) -> DraftRows:
        """Of padding alone. `source_rows`: padded rows of the draft launch that it follows, 0: it follows the model.
        `vocab_size` above 0: with logits."""
        following, tokens, source = torch.full((3, rows), -1, dtype=torch.int32, device=device)
        logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device) if vocab_size else None
        return cls(following, tokens, source if source_rows else None, source_rows, logits)


class DraftRunner(Runner, Protocol):
    """A runner with a draft layer, the last of `geometry.layers` (docs/architecture.md, Speculative decoding)."""

    def launch_prompt_drafts(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        prompts: PromptPass,
        number: int,
        outputs: StepOutputs | None = None,
        following: torch.Tensor | None = None,
    ) -> None:
        """Write, behind the last unit of a pass, the draft layer's rows and index keys of part `number`.

        A part that ends its prompt comes with the `outputs` of its first token, which was launched before: the token
        behind its last one is that token, and outputs.warm_start receives what its last token selects in this layer.
        Any other comes with `following` int64[1], the prompt's token behind the part, on the runner's device, alive
        and unchanged until the operation ran. Raises BadInput when neither is there.
        """
        ...

    def launch_draft(
        self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, draft: DraftRows
    ) -> None:
        """Behind `launch_forward` of the same batch, or behind another `launch_draft` and `begin_step` for `batch`: the
        draft layer over every real row, then the draws of its drafts.

        Writes the layer's row and index key at position length - 1, over what it wrote there before. A draft is drawn
        with the seat's parameters, its seed and position length + 1; what adjusts logits has no part in it. Can be
        captured. In a group all ranks launch it together.
        """
        ...

    def launch_draft_rows(self, streams: Streams, state: DeviceState, batch: StepBatch, draft: DraftRows) -> None:
        """As `launch_draft` behind `launch_forward`, for the rows and index keys alone, so that a later step can draft:
        no attention, no experts, no exchange, no drafts. Reads `draft.following`."""
        ...


class GroupRunner(Runner, Protocol):
    """The runner of a rank, which holds a share of the model's experts: all ranks launch the same rounds.

    `splits_passes`: launch_split is there.
    """

    splits_passes: bool

    def launch_padding(self, streams: Streams, layer: int, rows: int) -> None:
        """Take part on `compute` in a unit of `layer`, padded to `rows` on each rank, without a prompt."""
        ...

    def launch_split(
        self,
        streams: Streams,
        state: DeviceState,
        prompts: PromptPass,
        unit: PassUnit,
        owner: int,
        written: UnitWritten = no_listener,
    ) -> None:
        """Take this rank's stripe of a unit of the pass of rank `owner`, on `compute`. All ranks launch the same units
        of the same parts, one of whose rows lies in the unit; on the others `state` is a guest view, and a part's
        seat its number.

        As launch_unit for the owner: rows of the span of all ranks are its own, and states, once the last unit ran.
        `written`: no rows of the span change any more, and from then on earlier rows are read."""
        ...
