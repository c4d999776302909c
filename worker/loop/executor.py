"""The decode loop: one thread that owns the device, turns commands into launches and results into reports.

One turn:

    commands     admit, grant, resize, withdraw: change the running set at a step boundary
    polls        first tokens, staged, loaded, quiesced, durable: only completions that were observed
    prompts      units of prompt passes, as many as the gap between two steps has room for (pace.py)
    step         launch one step of every request that has memory for its next row
    read         tokens of steps beyond the lookahead: publish, notice ends, let go

Launching before reading keeps the device busy while tokens are looked at; the price is that an end is seen one step
late: that step's token is discarded (counted as surplus) and its row never published. Lengths are known beforehand and
cost nothing. A request whose next page was not granted parks and takes no part in steps until a Grant.

Memory leaves a request after its `quiesced` fences were observed (I2); chunks that a resize frees are used again behind
`chunk_reclaimed`.

What one request causes (bad input, a first token, a stop string) is Faulted for that request, and what fails in a unit
for the requests of its pass. An error of a step, of a fence or of an invariant is the worker's own and ends the loop:
the process must die with it, loudly.

Rejected: asyncio or trio in here (launching is synchronous, and a loop that blocks on the device must not share a
thread with the link); a thread per stream (order would come from locks that no fence table names).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Concatenate, Final, ParamSpec, cast

import torch
from torch import Tensor

from basics.rooms import RoomUse
from metrics.state import MemoryUse, SwapTotals, WorkerCounters
from protocol.arrays import unpack_int32
from protocol.byte_sizes import parse_size
from protocol.errors import HiSparseError, InternalError
from protocol.grammar_trials import KNOWN_MAX
from protocol.inventory import InventoryRow
from protocol.logs import fields, logger
from protocol.messages import Admit, Audit, Command, Exited, Grant, Receive, Resize, Stop, Withdraw
from protocol.settings import WorkerSettings
from protocol.text import Tokenizer
from protocol.units import PAGE_TOKENS
from worker.device.gpu_memory import free_device_bytes
from worker.device.inventory import take_inventory
from worker.device.passes import NOT_SPLIT, split_tokens
from worker.device.sizing import Sizing
from worker.device.step_rows import StepRows
from worker.group.agreement import Agreement, Round, RoundKind, Wish
from worker.group.group import Group
from worker.loop.acceptance import drafts_kept
from worker.loop.batch import RunningRequest, Status
from worker.loop.decode import TIMED_EVERY, Decoder, StepTokens, batch_sizes, step_seen
from worker.loop.draft_length import DraftLengths
from worker.loop.drafting import DraftSeats
from worker.loop.grammars import Grammars, mask_wait_s
from worker.loop.guests import Guests
from worker.loop.output import Output
from worker.loop.pace import Pace, Pacing
from worker.loop.prefill import LaunchedPass, Prefill
from worker.loop.prompt_order import PromptOrder
from worker.loop.prompts import PassSizes, Prompts
from worker.loop.recording import SelectionRecorder
from worker.loop.reporting import Reporter, Reports
from worker.loop.rounds import Rounds
from worker.loop.seats import Seats, allocate_state, check_admit
from worker.loop.swap import Swap
from worker.loop.warm_start import TopkBuffers
from worker.runners.base import (
    DraftRunner,
    GroupRunner,
    Runner,
    SamplerState,
    StepOutputs,
    prefix_unit_tokens,
    prompt_block_tokens,
)
from worker.streams import Streams
from worker.transfer.handover import Outgoing
from worker.transfer.interface import TRANSFERS_MAX
from worker.transfer.layer_groups import LayerGroups
from worker.transfer.transfers import Transfers

#: Commands submitted and not yet applied: more than the coordinator's log of unacknowledged ones can hold.
COMMANDS_MAX: Final = 1_048_576
#: How long an idle loop sleeps before it turns again, so that its beats go on.
IDLE_S: Final = 0.05
#: How long it sleeps when only fences are outstanding.
POLL_S: Final = 0.0005
#: How long a rank that is to stop takes part in rounds of other ranks.
ROUNDS_LIMIT_S: Final = 3.0
#: Between two counts of hits and misses.
COUNTERS_INTERVAL_S: Final = 1.0
#: Steps from the start of a worker that takes over within which requests may repeat rows that were not durable.
REPEATED_STEPS_MAX: Final = PAGE_TOKENS
#: Time without captures behind one, by its length: captures between steps take a quarter of the time.
CAPTURE_PAUSE: Final = 3.0

P = ParamSpec("P")

log = logger("worker.loop.executor")


class Executor:
    """`submit` and `stop` from any thread; `run`, or `turn` by turn in tests, from one."""

    def __init__(
        self,
        runner: Runner,
        settings: WorkerSettings,
        sizing: Sizing,
        streams: Streams,
        host: Tensor,
        tokenizer: Tokenizer,
        reports: Reports,
        counters: WorkerCounters | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        keep_logits: bool = False,
        timed_every: int = TIMED_EVERY,
        transfers: Transfers | None = None,
        group: Group | None = None,
        recorder: SelectionRecorder | None = None,
        pace: Pacing | None = None,
        graphs_later: bool = False,
        is_warm: bool = False,
    ) -> None:
        """Allocates everything on the device once, and on a GPU compiles, warms up and captures what steps launch.
        `host` is the pool, uint8[host_pages, page_bytes]; `timed_every` as for the Decoder; `transfers` and
        `group` are closed by the caller, and so is `recorder`; `pace` is by default the one that settings ask
        for. `graphs_later`: capture graphs between steps. `is_warm`: an executor of these settings has warmed `runner`
        up in this process. A `group` wants a GroupRunner; all ranks build their executors at the same time."""
        streams.adopt_thread()
        streams.waits_for_peers = group is not None
        self.counters = counters or WorkerCounters()
        self.counters.fence_waits = streams.waits
        self.transfers = transfers or Transfers()
        g = runner.geometry
        self.counters.swap = SwapTotals(g.group_of_layer, g.head_bytes * g.slot_tokens, g.heads)
        self.state = allocate_state(runner, settings, sizing, host)
        self._runner = runner
        self._sizing = sizing
        self._streams = streams
        self._tokenizer = tokenizer
        self._clock = clock
        self._lookahead = settings.lookahead_steps
        sampler = SamplerState.allocate(settings.seats, runner.info.vocab_size, settings.device)
        block = prompt_block_tokens(settings) if settings.deterministic else 0
        self._pace = pace or Pace(
            settings.gap_target_ms, min(runner.block_tokens_max, settings.pass_tokens), fixed_block=block
        )
        self._swap = Swap(streams, self.state, self.counters, self._pace.copied)
        rows = StepRows.of(settings)
        self._lengths = DraftLengths(rows.draft_tokens) if rows.varies else None
        self._draft_tokens = self.counters.draft_tokens = 0 if rows.varies else rows.draft_tokens
        parts = (runner, streams, self.state, sampler, self._swap)
        vocab = runner.info.vocab_size
        drafting = (
            DraftSeats(cast(DraftRunner, runner), streams, self.state, sampler, rows) if rows.draft_tokens else None
        )
        self._decoder = Decoder(
            *parts,
            buckets=batch_sizes(settings.seats, deterministic=settings.deterministic),
            rows=rows,
            drafting=drafting,
            lookahead=self._lookahead,
            keep_logits=keep_logits,
            timed_every=timed_every,
            stepped=self._pace.stepped,
            recorder=recorder,
        )
        warm_start = TopkBuffers(g, self.state.rows.device)
        self._groups = LayerGroups.of(g, parse_size(settings.layer_group, "worker.layer_group"))
        self._prefix_unit = prefix_unit_tokens(settings)
        self._grammars = Grammars(streams, sampler.adjust, tokenizer, runner.info, self.wake)
        self._seats = Seats(
            streams,
            self.state,
            sampler,
            self._swap,
            self._decoder,
            sizing,
            warm_start,
            rows,
            drafting,
            runner.info.eos_token_ids,
        )
        self._prefill = Prefill(
            *parts,
            self._seats,
            pass_tokens=settings.pass_tokens,
            groups=self._groups,
            staging=self._note_staging,
            drafts=rows.draft_tokens > 0,
            outputs=StepOutputs.allocate(
                1, vocab, keep_logits=keep_logits, topk_shape=(g.selections, g.topk), device=settings.device
            ),
            warm_start=warm_start,
        )
        self._report = Reporter(reports, self.counters, self._seats.swap_counts)
        self._requests: dict[int, RunningRequest] = {}
        tokens = settings.pass_tokens // block * block if block else settings.pass_tokens
        least, guests = self._split_tokens(group, settings), None
        if group is not None and least:
            shared = self.state, self._seats, self._swap, group.collectives, settings.pass_tokens
            guests = Guests(cast(GroupRunner, runner), streams, *shared)
        self._prompts = Prompts(
            self._prefill,
            PromptOrder(packs=not settings.deterministic, unit_tokens=block or PAGE_TOKENS),
            self._pace,
            self._swap,
            self._seats,
            streams,
            PassSizes(runner.info.layers, tokens),
            may_launch=self._may_launch,
            clock=clock,
            ran=self._ran,
            ended=self._ended_pass,
            failed=self._end_faulty,
            guests=guests,
        )
        self._running: list[RunningRequest] = []
        self._closing: list[RunningRequest] = []  # behind the draws of the step launched last
        self._waiting: dict[int, RunningRequest] = {}  # whose fences are polled
        self._commands: deque[Command] = deque()
        self._news = threading.Condition()
        self._stopped, self._end_at = False, 0.0
        self._rounds = self._agree(group, settings) if group is not None else None
        self._is_behind_prompt = False  # the last round was of prompts, of any rank
        self.scratch_bytes = _taken_by(
            partial(self._decoder.warm_up, graphs=settings.graphs, later=graphs_later, is_warm=is_warm),
            self.state.rows.device,
        )
        self._read_at = self._counted_at = self._capture_at = clock()

    def _split_tokens(self, group: Group | None, settings: WorkerSettings) -> int:
        """Return the tokens that a pass has at least for ranks to split it; 0: none is split."""
        splits = group is not None and cast(GroupRunner, self._runner).splits_passes
        return split_tokens(settings) if splits else 0

    def _agree(self, group: Group, settings: WorkerSettings) -> Rounds:
        block = prompt_block_tokens(settings) if settings.deterministic else 0
        agreement = Agreement(
            lag=settings.lookahead_steps + 1,
            batch_sizes=self._decoder.batch_sizes,
            layers=self._runner.info.layers,
            fixed_block=block,
            split_tokens=self._split_tokens(group, settings),
        )
        group.control.on_wake = self.wake
        group.control.counters = self.counters
        return Rounds(group, agreement, self._streams.compute, self.state.rows.device)

    # ---------------------------------------------------------------- any thread

    def submit(self, command: Command) -> None:
        """Take a command for the next step boundary. Never waits. InternalError past COMMANDS_MAX."""
        if len(self._commands) >= COMMANDS_MAX:
            raise InternalError("commands that no turn has applied", field="COMMANDS_MAX", value=COMMANDS_MAX)
        with self._news:
            self._commands.append(command)
            self._news.notify()

    def wake(self) -> None:
        """There is news for the next turn."""
        with self._news:
            self._news.notify()

    def stop(self) -> None:
        """Let `run` return after its present turn. Requests still held lose nothing but this process."""
        with self._news:
            if not self._stopped:
                self._end_at = self._clock() + ROUNDS_LIMIT_S
            self._stopped = True
            self._news.notify()

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        """Turn until `stop`. What it raises is fatal to the process."""
        self._streams.adopt_thread()
        while not self._may_end():
            if not self.turn():
                self._sleep()
        self._streams.close()
        self._grammars.close()

    def _may_end(self) -> bool:
        """A rank of a group goes on until the group sleeps: until then the others need it for their rounds."""
        if not self._stopped:
            return False
        return self._rounds is None or self._rounds.settled or self._clock() >= self._end_at

    def turn(self) -> bool:
        """One turn of the loop; whether it did anything besides polling in vain."""
        self.counters.beat()
        busy = self._apply_commands()
        busy |= self._poll()
        return busy | (self._take_turn() if self._rounds is None else self._take_round(self._rounds))

    def _take_turn(self) -> bool:
        """Launch units and a step, and read the steps beyond the lookahead; whether there was any."""
        ready = self._ready()
        beside_steps = bool(ready) or self._decoder.in_flight > 0  # the tokens of a last step wait for units, too
        prompt = busy = self._launch_prompts(beside_steps=beside_steps)
        if ready:
            self._launch_step(ready, is_alone=not prompt)
        busy |= self._read(self._lookahead if ready else 0, beside_prompt=prompt)
        return self._capture_next(is_idle=not ready and not busy) or busy or bool(ready)

    def _capture_next(self, *, is_idle: bool) -> bool:
        """Capture a graph that is left from the start; whether there was one.

        One that steps lack at once. The others while there is nothing to do, or once requests of a lost worker have
        repeated what was not durable, and then in a share of the time.
        """
        if not self._decoder.may_capture:
            return False
        began = self._clock()
        may_pause = self._decoder.steps > REPEATED_STEPS_MAX and began >= self._capture_at
        if not (self._decoder.lacks_graph or is_idle or may_pause):
            return False
        self._decoder.capture_next()
        now = self._clock()
        self._capture_at = now + CAPTURE_PAUSE * (now - began)
        if not self._decoder.uncaptured:
            log.info("graphs captured")
        return True

    def _take_round(self, rounds: Rounds) -> bool:
        """Take part in the next round of the group, with what this rank has for it; whether there was one."""
        drawn, ready = self._draw_late(), self._ready()
        this = rounds.next(has_work=bool(ready) or self._prompts.has_work)
        if this is None:
            return self._read(0) or drawn
        rounds.begin(this)
        is_prompt = this.kind is RoundKind.PROMPT
        if is_prompt:
            self._launch_prompt_round(this)
        elif this.kind is RoundKind.DECODE:
            self._launch_step(ready[: this.size], this.size, is_alone=not self._is_behind_prompt)
        self._is_behind_prompt = is_prompt
        rounds.end(this, self._wish())
        self._read(self._lookahead if this.kind is RoundKind.DECODE else 0, beside_prompt=is_prompt)
        return True

    def _launch_prompt_round(self, this: Round) -> None:
        """This rank's part in a unit of all ranks, or padding. A failure is the group's."""
        if this.opens:
            self._prompts.open(this.pass_rows, this.owner, this.pages)
        for part in self._prompts.launch_round(cast(GroupRunner, self._runner), this.unit):
            self._draw_first(*part)
        self.counters.prompt_units += 1
        self.counters.split_units += this.owner != NOT_SPLIT

    def _wish(self) -> Wish:
        rows = sum(request.progress.has_room and not request.awaits_mask for request in self._running)
        tokens, urgent, pages = self._prompts.wished()
        decodes = bool(self._running)
        block = self._pace.block(beside_steps=decodes)
        return Wish(rows, tokens, urgent, block, self._pace.units(block, beside_steps=decodes), pages)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, read or observe."""
        return (
            self.transfers.is_idle
            and not self._commands
            and not self._waiting
            and not self._running
            and self._decoder.settled
            and (self._rounds is None or self._rounds.settled)
        )

    def held(self) -> tuple[RunningRequest, ...]:
        """Placements that hold memory here. For tests and scrapes: the thread changes them."""
        return tuple(self._requests.values())

    def count_by_status(self) -> dict[str, int]:
        """Placements by status, absent ones as 0; from any thread, true for a moment."""
        present = Counter(request.status for request in list(self._requests.values()))
        return {status.value: present[status] for status in Status}

    def count_by_hot_size(self) -> dict[str, int]:
        """Hot buffers by size class, absent ones as 0; from any thread, true for a moment."""
        buffers = [request.memory.hot for request in list(self._requests.values())]
        present = Counter(buffer.hot_slots for buffer in buffers if buffer.chunks)
        classes = self._sizing.capacity.hot_size_classes
        return {"resident": present[0]} | {str(hot_slots): present[hot_slots] for hot_slots in classes}

    def memory(self) -> dict[str, MemoryUse]:
        """Device memory in units of 64 tokens; from any thread, true for a moment."""
        geometry = self._runner.geometry
        chunks, pages, slab = self._seats.chunks, self._seats.index_pages, self._seats.slab
        return {
            "chunks": MemoryUse(chunks.count - chunks.free, chunks.count, geometry.chunk_bytes),
            "index_pages": MemoryUse(pages.count - pages.free, pages.count, geometry.index_page_bytes),
            "slab_pages": MemoryUse(slab.count - slab.free, slab.count, self._sizing.slab_page_bytes),
        }

    def room_use(self) -> dict[str, RoomUse]:
        """Measure the rooms that clients fill here (basics.rooms); from any thread, true for a moment."""
        return {
            "worker_requests": RoomUse(len(self._requests), self._sizing.capacity.seats),
            "worker_transfers": RoomUse(self.transfers.count, 2 * TRANSFERS_MAX),
            "worker_grammars": RoomUse(self._grammars.known, KNOWN_MAX),
        }

    def check_invariants(self) -> None:
        """InternalError unless memory and lists agree: for tests, and for production when idle."""
        self._seats.check_invariants(self._requests.values())
        listed = {r.placement for r in self._running} | self._waiting.keys()
        parked = {r.placement for r in self._requests.values() if r.status is Status.PARKED}
        if listed | parked != self._requests.keys() or listed & parked:
            raise InternalError("a request is nowhere or in two places", field="requests", value=sorted(self._requests))

    def _sleep(self) -> None:
        with self._news:
            if not self._commands and not self._stopped:
                waits = self._waiting or self._running or not self.transfers.is_idle or not self._decoder.settled
                self._news.wait(POLL_S if waits else IDLE_S)

    def _contain(
        self,
        action: Callable[Concatenate[RunningRequest, P], None],
        request: RunningRequest,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Do `action`; what it raises ends `request` alone, except for errors that are ours."""
        try:
            action(request, *args, **kwargs)
        except Exception as error:
            self._end_faulty(request, error)

    def _end_faulty(self, request: RunningRequest, error: Exception) -> None:
        """`error` ends `request` alone, unless it is ours: then it is raised again."""
        if isinstance(error, InternalError):
            raise error
        self._report.faulted(request.placement, error)
        request.is_faulty = True
        self._leave(request)

    # ---------------------------------------------------------------- commands

    def _apply_commands(self) -> bool:
        applied = 0
        while self._commands:
            self._apply(self._commands.popleft())
            applied += 1
        return applied > 0

    def _apply(self, command: Command) -> None:
        """A command for a departed placement does nothing."""
        match command:
            case Admit():
                self._admit(command)
            case Receive():
                self._receive(command)
            case Exited(worker, pid):
                self.transfers.exited(worker, pid)
            case Audit(number):
                self._take_inventory(number)
            case Withdraw(transfer_id) if self.transfers.takes(transfer_id):
                self.transfers.revoke(transfer_id)
            case Grant() | Resize() | Withdraw():
                self._apply_to_request(command)
            case Stop():  # the link withdraws what is here and then ends the process
                pass

    def _apply_to_request(self, command: Grant | Resize | Withdraw) -> None:
        request = self._requests.get(command.placement)
        if request is None or request.status is Status.LEAVING:
            return
        match command:
            case Grant():
                self._contain(self._grant, request, command)
            case Resize():
                self._contain(self._resize, request, command)
            case Withdraw():
                self._seats.keep_topk(request)
                self._leave(request)

    def _take_inventory(self, number: int) -> None:
        inbound, free = self.transfers.inventory(), self._seats.free()
        held = [(_row_of(request), request.memory.host_pages) for request in self._requests.values()]
        self._report.inventory(
            take_inventory(number, [*held, *inbound], free._replace(seats=free.seats - len(inbound)))
        )

    def _admit(self, admit: Admit) -> None:
        if admit.placement in self._requests:
            raise InternalError("admitted twice", field="placement", value=admit.placement)
        try:
            check_admit(admit, self._sizing, self._runner.info, self._prefix_unit)
            output = self._output(admit)
            if output.finished:  # by a token that was delivered in an earlier placement
                self._report.already_complete(admit, output)
                return
            request = self._seats.open(admit, output)
        except InternalError:
            raise
        except Exception as error:  # it holds nothing, so it is released at once
            self._report.faulted(admit.placement, error)
            self._report.released(admit.placement, 0)
            return
        request.since_s = self._clock()
        if admit.sampling.grammar:
            request.grammar = self._grammars.open(
                request.seat, admit.sampling.grammar, output.tokens, admit.rank, admit.owner
            )
        self._requests[request.placement] = self._waiting[request.placement] = request
        if request.status is Status.PREFILLING:
            self._prompts.add(request)
            self._note_prompts()
        self.counters.admitted += 1
        if admit.transfer_id:
            self._contain(self._begin_sending, request, admit)

    def _receive(self, command: Receive) -> None:
        try:
            self.transfers.receive(command)
        except HiSparseError as error:
            log.warning("transfer refused", extra=fields(transfer_id=command.placement, error=error))
            self._report.released(command.placement, 0)

    def _begin_sending(self, request: RunningRequest, admit: Admit) -> None:
        tokens = request.prompt_tokens
        unsent = admit.unsent_tokens // PAGE_TOKENS
        request.outgoing = self.transfers.begin(admit.transfer_id, admit.destination, tokens, self._groups, unsent)

    def _note_staging(self, request: RunningRequest, group: int, stop: int) -> None:
        """A layer group of rows below `stop` is being staged, while later layers are launched. A poll sends them: what
        it raises is the request's, and not that of its pass."""
        if request.outgoing is not None:
            request.staged_marks.append((self._swap.staged(), group, stop))

    def _send_staged(self, request: RunningRequest, out: Outgoing) -> None:
        """Rows that were seen staged since the last look may go."""
        while request.staged_marks and request.staged_marks[0][0].done():
            _, group, rows = request.staged_marks.popleft()
            self.transfers.send(out, group, rows, request.memory.host_pages)

    def _output(self, admit: Admit) -> Output:
        generated = unpack_int32(admit.generated, "generated").tolist()
        eos, detokenizer = self._runner.info.eos_token_ids, self._tokenizer.detokenizer
        return Output(generated, admit.sampling, eos, detokenizer, admit.first_token)

    def _grant(self, request: RunningRequest, grant: Grant) -> None:
        if request.resize is not None:  # granted for the buffer that is to come
            hot_chunks = request.resize.hot_chunks + grant.hot_chunks
            request.resize = Resize(grant.placement, request.resize.hot_slots, hot_chunks)
            grant = Grant(grant.placement, grant.host_pages, grant.index_pages, 0)
        self._seats.grant(request, grant)
        if request.status is Status.PARKED and not request.starved:
            self._join(request)

    def _resize(self, request: RunningRequest, resize: Resize) -> None:
        if not request.may_resize:
            request.resize = resize
            return
        if self._seats.resize(request, resize.hot_slots, resize.hot_chunks):
            self._set_aside(request, Status.LOADING)
            request.since_s = self._clock()
        elif request.status is Status.PARKED and not request.starved:
            self._join(request)
        self._report.resized(request)

    # ---------------------------------------------------------------- polls

    def _poll(self) -> bool:
        for transfer_id, rows in self.transfers.poll():
            self._report.released(transfer_id, rows)
        moved = [request for request in list(self._waiting.values()) if self._poll_one(request)]
        for request in self._decoder.note_durable():
            if request.status is Status.PARKED:
                self._report.durable(request)
        return bool(moved)

    def _poll_one(self, request: RunningRequest) -> bool:
        """Whether what `request` waits for was seen to be complete."""
        if request.status is Status.LEAVING:
            return self._poll_leaving(request)
        self._contain(_check_grammar, request)
        if request.outgoing is not None:
            self._poll_outgoing(request, request.outgoing)
        if request.is_leaving:
            return True
        if request.chunk_marks and (rows := request.note_staged()) is not None:
            self._report.prompt_rows(request, rows)
        if request.prefix_load is not None and request.prefix_load.done():
            request.prefix_load = None
        if request.first_token is not None and request.first_token.done():
            self._contain(self._take_first_token, request)
            return True
        if request.status is Status.STAGING and request.first_token is None and request.fences[0].done():
            self._take_over(request)
            return True
        if request.status is Status.LOADING and (not self._running or all(fence.done() for fence in request.fences)):
            self._take_loaded(request)
            return True
        return False

    def _poll_leaving(self, request: RunningRequest) -> bool:
        is_read = request.outgoing is not None and not request.outgoing.is_over
        if is_read or not all(fence.done() for fence in request.fences):
            return False
        self._release(request)
        return True

    def _poll_outgoing(self, request: RunningRequest, out: Outgoing) -> None:
        """It leaves when its pages were delivered, or cannot be."""
        if request.staged_marks:
            self._contain(self._send_staged, request, out)
        if request.status is Status.SENDING and out.is_over:
            self._leave(request)

    def _take_first_token(self, request: RunningRequest) -> None:
        request.first_token = None
        now = self._clock()
        request.prefill_s, request.since_s = now - request.since_s, now
        self._report.prefilled(request)
        if not request.output.forced:
            first, row = self._prefill.first_token(request.seat), self._prefill.first_logprobs(request)
            self._take_tokens(request, 0, (first,), (row,))

    def _take_over(self, request: RunningRequest) -> None:
        """A prompt seen in host memory: its rows are durable, and its hot buffer is set up. Or it has been here for its
        prompt alone, and leaves."""
        request.progress.durable = request.prompt_tokens
        if not request.prefills_only:
            self._seats.take_over(request)
        self._report.staged(request, self._clock() - request.since_s)
        if request.outgoing is not None:
            self._set_aside(request, Status.SENDING)
        elif request.prefills_only:
            self._leave(request)
        else:
            self._join(request)
            self._resize_late(request)

    def _take_loaded(self, request: RunningRequest) -> None:
        for fence in request.fences:
            self._streams.compute.wait(fence)
        self._report.loaded(self._clock() - request.since_s)
        self._join(request)
        self._resize_late(request)

    def _resize_late(self, request: RunningRequest) -> None:
        """Carry out a resize that came while rows were on their way to the hot buffer."""
        resize, request.resize = request.resize, None
        if resize is not None:
            self._contain(self._resize, request, resize)

    # ---------------------------------------------------------------- launches

    def _launch_prompts(self, *, beside_steps: bool) -> bool:
        """Launch first tokens that waited for a mask, and units before the next step; whether there was any. Without
        steps it is one unit: where launches return once they have run, what it completed is polled before the next."""
        busy, gap = self._draw_late(), self._pace.gap(beside_steps=beside_steps)
        while beside_steps or not self._prompts.held():
            found = self._prompts.next(beside_steps=beside_steps, left_s=gap.left_s)
            if found is None or not gap.take(found.seconds):
                break
            for part in self._prompts.launch(found.unit):
                self._draw_first(*part)
            self.counters.prompt_units += 1
            busy = True
            if self._commands or not beside_steps:
                break
        return busy

    def _may_launch(self, request: RunningRequest) -> bool:
        """Tell whether neither a batch, nor other ranks, would wait for the index keys of a prompt's prefix."""
        return request.prefix_load is None or not (self._running or self._rounds is not None)

    def _draw_late(self) -> bool:
        """Launch first tokens whose masks came behind their passes; whether there was any."""
        late = self._prompts.late()
        for this, number in late:
            self._prompts.drew(this, number)
            self._draw_first(this, number)
        return bool(late)

    def _draw_first(self, this: LaunchedPass, number: int) -> None:
        self._contain(self._launch_first_token, this.requests[number], this, number)

    def _launch_first_token(self, request: RunningRequest, this: LaunchedPass, number: int) -> None:
        if request.grammar is not None:
            self._set_mask(request, 0.0, [])
            self._streams.compute.wait(self._grammars.upload())
        self._prefill.draw(this, number)
        request.prefilled = request.prompt_tokens
        request.status = Status.STAGING
        request.fences = (self._swap.staged(),)
        self._note_prompts()

    def _ran(self, rows: int, seconds: float) -> None:
        """A unit of `rows` took `seconds` on the device."""
        self._pace.ran(rows, seconds)
        self.counters.prompt_s += seconds

    def _ended_pass(self, tokens: int) -> None:
        self.counters.prompt_pass_tokens += tokens

    def _note_prompts(self) -> None:
        self.counters.prompts_since = self._prompts.waiting_since()

    def _note_pace(self) -> None:
        """Count what is known of gaps; log once that no gap can hold the target."""
        counters, pace = self.counters, self._pace
        counters.plain_step_s, counters.gap_target_s = pace.plain_step_s, pace.target_s
        if pace.is_target_too_small and not counters.gap_target_too_small:
            target_ms, step_ms = 1e3 * pace.target_s, 1e3 * pace.plain_step_s
            log.warning(
                "worker.gap_target_ms is below a plain step: prompts go one unit at a time",
                extra=fields(gap_target_ms=round(target_ms, 1), plain_step_ms=round(step_ms, 1)),
            )
        counters.gap_target_too_small = pace.is_target_too_small

    def _ready(self) -> list[RunningRequest]:
        """Running requests that have memory for their next row and do not wait for a mask; those without memory
        park."""
        ready: list[RunningRequest] = []
        starved: list[RunningRequest] = []
        for request in tuple(self._running):
            if request.grammar is not None and request.awaits_mask:
                self._contain(_check_grammar, request)
            elif request.progress.has_room:
                ready.append(request)
            elif request.starved:
                starved.append(request)
        for request in starved:
            self._park(request)
        return ready

    def _launch_step(self, ready: list[RunningRequest], rows: int = 0, *, is_alone: bool = True) -> None:
        """One step of `ready`, padded to `rows` at least."""
        self._seats.flush()
        if self._lengths is not None:
            self._draft_tokens = self._lengths.choose(self._decoder.padded(len(ready)))
            self.counters.draft_tokens = self._draft_tokens
            self.counters.draft_switches = self._lengths.switches
        now = self._clock()
        count = now - self._counted_at >= COUNTERS_INTERVAL_S
        if count:
            self._counted_at = now
        drafts = self._draft_tokens
        self._decoder.launch(ready, now, count=count, rows=rows, draft_tokens=drafts, is_alone=is_alone)
        held = [request for request in ready if request.grammar is not None]
        if held:
            self._read(0)
            self._draw(held)

    def _draw(self, held: Sequence[RunningRequest]) -> None:
        """The draws of the step launched last; `held` are its requests with a grammar. The last one's mask is waited
        for first: a thread computes masks in order, and so it wakes this one once and not for each."""
        until_s, undrawn = time.monotonic() + mask_wait_s(self._pace.plain_step_s), list[RunningRequest]()
        for request in reversed(held):
            if not request.is_leaving and request.is_drawn(request.position - 1):
                self._contain(self._set_mask, request, until_s, undrawn)
        for request in undrawn:
            self._seats.step_back(request)
        self._decoder.draw(self._grammars.upload())
        for request in self._closing:
            self._seats.close(request)
        self._closing.clear()

    def _set_mask(self, request: RunningRequest, until_s: float, undrawn: list[RunningRequest]) -> None:
        """What the next draw of `request` is held to; where that is not known by `until_s` it draws nothing."""
        assert request.grammar is not None
        mask = request.grammar.wait(until_s)
        self._grammars.set(request.seat, mask)
        if mask is None:
            undrawn.append(request)

    def _read(self, keep: int, *, beside_prompt: bool = False) -> bool:
        """Read the oldest steps in flight, all but `keep`; whether there were any.

        `beside_prompt`: a unit was launched since the last read, whose launches kept the host from reading.
        """
        busy = self._decoder.in_flight > keep
        while self._decoder.in_flight > keep:
            step = self._decoder.read()
            now = self._clock()
            seconds = now - max(step.launched_s, self._read_at)
            step.is_alone &= not beside_prompt
            self.counters.stepped(seconds, len(step.requests), is_alone=step.is_alone)
            if not step.is_alone:
                self.counters.gap_s.observe(seconds)
                self._pace.waited(seconds)
            self._note_pace()
            if self._lengths is not None:
                self._lengths.observe(step_seen(step, seconds))
            self._read_at = now
            self._take_step(step)
            self._report.swaps(step)
        return busy

    # ---------------------------------------------------------------- tokens and ends

    def _take_step(self, step: StepTokens) -> None:
        """What each request of a step drew that was not known before. Short on purpose, as `_take_tokens` is: it runs
        for each token."""
        leaving, undrawn, drafted = Status.LEAVING, step.undrawn, step.drafts
        rows: Sequence[bytes] = ()
        drafts: tuple[int, int] | None = None
        tokens = zip(step.requests, step.positions, step.tokens, strict=True)
        for number, (request, position, drawn) in enumerate(tokens):
            place = position + 1 - request.prompt_tokens
            if request.status is leaving:
                self.counters.surplus_tokens += len(drawn)
            elif undrawn and request in undrawn:
                self.counters.late_masks += 1
            elif place + len(drawn) > request.output.forced:
                if step.logprobs is not None:
                    rows = step.rows(number)
                if drafted:
                    drafts = drafted[number]
                try:
                    self._take_tokens(request, place, drawn, rows, drafts)
                except Exception as error:
                    self._end_faulty(request, error)

    def _take_tokens(
        self,
        request: RunningRequest,
        place: int,
        drawn: Sequence[int],
        rows: Sequence[bytes],
        drafts: tuple[int, int] | None = None,
    ) -> None:
        """What a step, or prefill, drew for the places of the output from `place` on; of its `drafts`, how many were
        verified and how many hold."""
        output = request.output
        taken = output.extend(place, drawn, rows)
        if drafts is not None:
            past = place + len(drawn) - output.generated_tokens if output.finished else 0
            request.drafted += drafts[0]
            request.accepted += drafts_kept(drafts[1], past)  # a stop string is no part of the output
        self._report.publish(request, taken)
        if output.reason:
            self.counters.surplus_tokens += max(0, place + len(drawn) - len(output.tokens))
            self._report.finished(request)
            self._leave(request)
        elif request.grammar is not None:
            request.grammar.advance(drawn[-1])

    def _leave(self, request: RunningRequest) -> None:
        """Out of the batch for good: what was launched for it goes on, nothing more is."""
        self._set_aside(request, Status.LEAVING)
        request.staged_marks.clear()
        if request.grammar is not None:
            request.grammar.cancel()
        if request.outgoing is not None:
            self.transfers.cancel(request.outgoing, "its request leaves")
        self._prompts.leave(request)
        self._note_prompts()
        if self._decoder.awaits_drafts(request):
            self._closing.append(request)
        else:
            self._seats.close(request)

    def _release(self, request: RunningRequest) -> None:
        """Everything launched for `request` has run: its memory goes back, and every row it wrote is in host memory."""
        rows = request.progress.certain if request.prefilled == request.prompt_tokens else 0
        whole = request.prompt_rows // PAGE_TOKENS * PAGE_TOKENS
        if whole > request.durable_rows and not request.is_faulty:
            self._report.prompt_rows(request, whole)
        self._report.last_swaps(request, self._seats.release(request))
        del self._requests[request.placement], self._waiting[request.placement]
        durable, first_token = request.left_behind(rows)
        warm_start = self._seats.warm_start(request)
        self._report.released(request.placement, durable, first_token, warm_start if durable else b"")

    # ---------------------------------------------------------------- where a request is

    def _join(self, request: RunningRequest) -> None:
        self._waiting.pop(request.placement, None)
        request.status = Status.RUNNING
        self._running.append(request)
        if not request.started:
            request.started = True
            self._report.started(request)

    def _park(self, request: RunningRequest) -> None:
        self._running.remove(request)
        request.status = Status.PARKED
        self._report.parked(request)

    def _set_aside(self, request: RunningRequest, status: Status) -> None:
        """Out of the batch, to wait for fences."""
        if request.status is Status.RUNNING:
            self._running.remove(request)
        request.status = status
        self._waiting[request.placement] = request


def _taken_by(warm_up: Callable[[], None], device: torch.device) -> int:
    """Run `warm_up` on a GPU; returns the bytes that it has taken: scratch memory, graphs, compiled kernels."""
    if device.type == "cpu":
        return 0
    before = free_device_bytes(device)
    warm_up()
    return before - free_device_bytes(device)


def _check_grammar(request: RunningRequest) -> None:
    """Raises what has ended the grammar of `request`."""
    if request.grammar is not None:
        request.grammar.check()


def _row_of(request: RunningRequest) -> InventoryRow:
    memory = request.memory
    return InventoryRow(
        request.placement,
        len(memory.host_pages),
        memory.hot_chunks,
        index_pages=len(memory.index_pages),
        chunks=len(memory.hot.chunks),
        is_leaving=request.status is Status.LEAVING,
    )
