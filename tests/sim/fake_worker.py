"""A worker process without a device: the real link and outbox, and an executor that is a model of the real one.

`FakeExecutor` obeys the protocol as worker/loop/executor.py does, turn by turn: commands at step boundaries, units of
prompt passes (tests/sim/passes.py), one step launched ahead of the one that is read, ends seen late, durable lengths
only as far as completions were observed, `Released` only when nothing of the placement is under way. Tokens, ends and
held-back output are the real worker.loop.output; how far a request is, what it has room for and which rows are durable,
the real worker.loop.acceptance. What is modelled is the device:

    prefill   rows of the prompt are known at once; their pages are written one by one, in any order, pass by pass,
              and reported as far as they are there. A short rest behind a shared prefix goes through steps instead
    step      reads *every* row of the context from host memory, but those whose write is not observed, and draws a
              token (tests.sim.oracle); its row is written a little later. With drafts it takes 1 + n rows: a draft is
              right, and admitted, as the dice say. Rows that do not hold are written too, and always land first
    round     of a rank of a group (tests.sim.groups): what it launches is done once all ranks have launched it
    write     lands at a moment of its own, whether or not the process that started it still runs: a stopped process
              goes on writing, a killed one has landed what it had begun or has not

`FakePool` is the node's host memory. It outlives every process, and does not guard it: a page that is handed out too
early is overwritten.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast

import numpy as np
import trio

from metrics.state import SwapTotals, WorkerCounters
from protocol.arrays import Int32Array, unpack_int32
from protocol.inventory import InventoryRow
from protocol.logprobs import row_words
from protocol.messages import (
    NO_HOT_BUFFER,
    NO_TOKEN,
    Admit,
    Audit,
    Command,
    Exited,
    Finished,
    FirstToken,
    Grant,
    Parked,
    Receive,
    Released,
    Resize,
    Resized,
    Staged,
    Started,
    Stop,
    Withdraw,
    WorkerCapacity,
)
from protocol.text import ByteTokenizer
from protocol.units import PAGE_TOKENS, pages_for
from tests.sim.alarms import Alarm, sleep, sleep_until
from tests.sim.groups import UNITS_MAX, RankRounds
from tests.sim.links import Latch
from tests.sim.oracle import MODEL, Rows, decode_row, digest_of, extend_digest, logprobs_of, next_token, prompt_rows
from tests.sim.passes import SimPrompts
from tests.sim.trace import Violation
from tests.sim.transfer import FakeReceiver, Sending, Wire
from worker.device.inventory import FreeDeviceMemory, take_inventory
from worker.device.step_rows import StepRows
from worker.group.agreement import Round, RoundKind, Wish
from worker.link.outbox import Outbox
from worker.loop.acceptance import RowProgress, StepProgress, known_tokens
from worker.loop.output import Output
from worker.transfer.handover import Incoming, Outgoing

#: Seconds of one decode step, of one unit of a prompt pass, of loading a resumed context, and until a write lands.
STEP_S: Final = (0.02, 0.08)
UNIT_S: Final = (0.001, 0.01)
LOAD_S: Final = (0.0, 0.05)
WRITE_S: Final = (0.0, 0.15)
#: Seconds of a round that gathers wishes alone.
WISHES_S: Final = 0.005
#: A process numbers its epochs from a multiple of this on, and begins fewer than these.
EPOCHS_PER_PROCESS: Final = 1_000
#: How long an idle executor sleeps.
IDLE_S: Final = 0.2
#: Rows that a request looks up in a step, their bytes, and steps in a row in which misses are dear, or cheap.
LOOKED_UP: Final = 16
ROW_BYTES: Final = 64
DEAR_STEPS: Final = 12
#: Steps launched before the oldest is read.
LOOKAHEAD: Final = 1

#: Right drafts of a process, in a hundred; rows behind the first whose selection is not admitted; no token of a text.
SHARES_RIGHT: Final = (0.0, 0.5, 0.9, 1.0)
UNFIT: Final = 0.1
WRONG_DRAFT: Final = 7
PLAIN: Final = StepRows()

_DETOKENIZER: Final = ByteTokenizer().detokenizer


# ---------------------------------------------------------------- host memory


@dataclass(eq=False)
class Write:
    """Rows that one process is about to write into one page. `landed` once they are there."""

    process: int
    page: int
    offset: int
    rows: Rows
    lands_at: float
    landed: bool = False


class FakePool:
    """Host pages of a node: uint64[pages, PAGE_TOKENS]. `version` grows with every row that changes."""

    def __init__(self, pool_id: int, pages: int, rng: random.Random) -> None:
        self.id = pool_id
        self.rows = np.full((pages, PAGE_TOKENS), rng.getrandbits(63), dtype=np.uint64)
        self.version = 0
        self._rng = rng
        self._under_way: list[tuple[float, int, Write]] = []
        self._sequence = 0

    def write(self, process: int, page: int, offset: int, rows: Rows, after: float = 0.0) -> Write:
        """Begin a write; it lands within WRITE_S, and not before `after`."""
        lands_at = max(after, trio.current_time() + self._rng.uniform(*WRITE_S))
        write = Write(process, page, offset, rows, lands_at)
        self._sequence += 1
        heapq.heappush(self._under_way, (write.lands_at, self._sequence, write))
        return write

    def settle(self) -> None:
        """Let land what is due."""
        now = trio.current_time()
        while self._under_way and self._under_way[0][0] <= now:
            self._land(heapq.heappop(self._under_way)[2])

    def end_process(self, process: int) -> None:
        """Of what a killed process had begun, some has landed and the rest never will."""
        self.settle()
        for _, _, write in sorted(self._under_way):
            if write.process == process and self._rng.random() < 0.5:
                self._land(write)
        self._under_way = [entry for entry in self._under_way if entry[2].process != process]
        heapq.heapify(self._under_way)

    def read(self, pages: list[int], rows: int) -> Rows:
        """Rows 0..rows-1 of a context in `pages`, as they are at this moment."""
        self.settle()
        if len(pages) < pages_for(rows):
            raise Violation("I3", f"{rows} rows are said to be in pages {pages}")
        context: Rows = self.rows[pages[: pages_for(rows)]].reshape(-1)[:rows]
        return context

    def overwrite(self, page: int, rows: Rows) -> None:
        """What another node has written."""
        self.rows[page, : len(rows)] = rows
        self.version += 1

    def _land(self, write: Write) -> None:
        self.rows[write.page, write.offset : write.offset + len(write.rows)] = write.rows
        write.landed = True
        self.version += 1


# ---------------------------------------------------------------- one placement


@dataclass(eq=False)
class Written:
    """Rows from `first` on that are being written, and the step that wrote them; None: a pass of the prompt did.
    `count` of them hold."""

    first: int
    count: int
    writes: list[Write]
    step: StepProgress | None = None

    @property
    def has_landed(self) -> bool:
        return all(write.landed for write in self.writes)


@dataclass(eq=False)
class Run:
    """One placement on this worker, as loop.batch.RunningRequest. `tail` has the rows whose write is unobserved. The
    device's next step begins at `row`; rejected rows of the last one have landed by `rewrites_at`."""

    admit: Admit
    prompt: Int32Array
    output: Output
    pages: list[int]
    index_pages: int
    hot_slots: int
    hot_chunks: int
    status: str  # prefilling, staging, loading, running, parked, leaving
    progress: RowProgress
    row: int
    prefilled: int
    since: float
    ready_at: float = 0.0
    started: bool = False
    resize: Resize | None = None
    has_rows: bool = False  # of its prompt
    prompt_rows: int = 0  # seen in host memory
    has_first_token: bool = False
    last_token: int = -1
    in_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rewrites_at: float = 0.0
    tail: dict[int, int] = field(default_factory=dict)
    sending: Sending | None = None
    writes: deque[Written] = field(default_factory=deque)

    @property
    def placement(self) -> int:
        return self.admit.placement

    @property
    def owner(self) -> str:
        return self.admit.owner

    @property
    def rows_wanted(self) -> int:
        return len(self.prompt) + self.output.max_tokens - 1

    def note_memory(self) -> None:
        """After a change of pages or chunks."""
        pages = len(self.pages) if self.hot_slots else min(len(self.pages), self.hot_chunks)
        self.progress.rows_max = min(self.rows_wanted, pages * PAGE_TOKENS)

    @property
    def is_starved(self) -> bool:
        return self.progress.starved(self.rows_wanted)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that was launched for it is under way."""
        is_sent = self.sending is None or self.sending.is_quiet
        return is_sent and not self.in_steps and all(written.has_landed for written in self.writes)

    @property
    def wakes_at(self) -> float:
        """When the next thing that was launched for it completes; 0 when that waits for nothing but to be observed."""
        if self.status == "loading":
            return self.ready_at
        if not self.writes:
            return float("inf")
        writes = (write for written in self.writes for write in written.writes)
        return min((write.lands_at for write in writes if not write.landed), default=0.0)

    def known_tokens(self, start: int, count: int) -> list[int]:
        """As loop.batch.RunningRequest."""
        return known_tokens(self.prompt, self.output.tokens, self.output.forced, start, count)

    def durable(self, rows: int) -> int:
        """What of `rows` a successor may build on: rows of published tokens alone."""
        published, prompt = self.output.published, len(self.prompt)
        return min(rows, prompt + published - 1) if published and rows >= prompt else 0

    def left_behind(self, rows: int) -> tuple[int, FirstToken]:
        """As `durable`, when it leaves; and the first token, if only that is known of what follows the prompt."""
        tokens = self.output.tokens
        if self.sending is not None and not self.sending.out.is_delivered:
            return 0, NO_TOKEN
        if self.output.published or not tokens or rows < len(self.prompt):
            return self.durable(rows), NO_TOKEN
        first = self.output.first_held
        return len(self.prompt), first if first.logprobs else first.token


@dataclass(eq=False)
class Transfer:
    """What another node's rows are let into, as the checker sees a Run."""

    admit: Receive
    incoming: Incoming

    @property
    def placement(self) -> int:
        return self.admit.placement

    @property
    def pages(self) -> list[int]:
        return self.incoming.host_pages


@dataclass(frozen=True)
class Place:
    """A request in a step. The device may write no row from `end` on; `known` are the tokens from `base` on."""

    run: Run
    end: int
    base: int
    known: list[int]
    progress: StepProgress

    def known_at(self, position: int) -> int | None:
        at = position - self.base
        return self.known[at] if 0 <= at < len(self.known) else None


@dataclass(frozen=True)
class Step:
    """Launched."""

    places: list[Place]
    round: int = -1  # of the group


# ---------------------------------------------------------------- the loop


#: A placement, and the tokens start..stop-1 of its prompt that a pass takes.
Extent: TypeAlias = tuple[Run, int, int]


class FakeExecutor:
    """`submit` is called by the link; `run` is the process's other task. `hang` keeps it from turning."""

    def __init__(
        self,
        process: int,
        capacity: WorkerCapacity,
        pool: FakePool,
        reports: Outbox,
        latch: Latch,
        rng: random.Random,
        on_decode: Callable[[str], None],
        wire: Wire,
        receiver: FakeReceiver,
        rounds: RankRounds | None = None,
        on_peer_lost: Callable[[], None] = lambda: None,
        rows: StepRows = PLAIN,
    ) -> None:
        self.transfers: dict[int, Transfer] = {}
        self._wire = wire
        self._receiver = receiver
        self.counters = WorkerCounters(swap=SwapTotals((0,), row_bytes=ROW_BYTES))
        self._swaps: dict[int, tuple[int, int]] = {}  # hits and misses by placement
        self.runs: dict[int, Run] = {}
        self.admitted: set[int] = set()
        self._process = process
        self._capacity = capacity
        self._pool = pool
        self._reports = reports
        self._latch = latch
        self._rng = rng
        self._on_decode = on_decode
        self._commands: deque[Command] = deque()
        self._alarm = Alarm()
        self._prompts: SimPrompts[Run] = SimPrompts(
            rng, trio.current_time, PAGE_TOKENS, capacity.prompt_max_tokens // PAGE_TOKENS
        )
        self._steps: deque[Step] = deque()
        self._hung_until = 0.0
        self._rounds = rounds
        self._on_peer_lost = on_peer_lost
        self._rows = rows
        self._right = rng.choice(SHARES_RIGHT) if rows.draft_tokens else 0.0
        self._units: deque[tuple[int, list[Extent], bool]] = deque()  # of rounds that have not run; the last of a pass
        self._steps_ahead = 0  # that may be launched and not read before the next round
        if rounds is not None:
            rounds.group.on_news.append(lambda: self._alarm.set(trio.current_time()))

    def submit(self, command: Command) -> None:
        self._commands.append(command)
        self._alarm.set(trio.current_time())

    def hang(self, until: float) -> None:
        self._hung_until = until

    async def run(self) -> None:
        """Until cancelled: the process is killed."""
        while True:
            await self._pause(self._turn())

    async def _pause(self, busy_s: float) -> None:
        """The turn took `busy_s`; with nothing to do, wait for a command, for a write to land, or a while."""
        if not busy_s:
            is_waiting = self._rounds is not None and self._rounds.awaited is not None  # and looks at no request
            due = [run.wakes_at for run in self.runs.values() if not is_waiting]
            await self._alarm.sleep_until(min([trio.current_time() + IDLE_S, *due]))
        else:
            await sleep(busy_s)
        if self._hung_until > trio.current_time():
            await sleep_until(self._hung_until)
        await self._latch.passed()

    def _turn(self) -> float:
        """One turn of the loop; the seconds that the device takes for what it launched."""
        self.counters.beats += 1
        if self._rounds is not None and self._waits_for_peers(self._rounds):
            return 0.0
        while self._commands:
            self._apply(self._commands.popleft())
        self._pool.settle()
        self._turn_transfers()
        for run in list(self.runs.values()):
            self._observe(run)
        if self._rounds is not None:
            return self._take_round(self._rounds)
        busy_s = self._launch_units() + self._launch_step()
        while len(self._steps) > (LOOKAHEAD if busy_s else 0):
            self._read(self._steps.popleft())
        return busy_s

    # ---------------------------------------------------------------- rounds of a group

    def _waits_for_peers(self, rounds: RankRounds) -> bool:
        """Read what has run. Whether more must have run before the loop goes on: it stands still until then."""
        while self._units and rounds.has_run(self._units[0][0]):
            number, parts, is_over = self._units.popleft()
            rounds.group.check_ran(number)
            for run, start, stop in parts:
                run.in_steps -= 1
                if is_over:
                    self._end_part(run, start, stop)
        waits = rounds.awaited is not None and rounds.waits_for(rounds.awaited)
        while not waits and len(self._steps) > self._steps_ahead:
            waits = rounds.waits_for(self._steps[0].round)
            if not waits:
                rounds.group.check_ran(self._steps[0].round)
                self._read(self._steps.popleft())
        self.counters.awaits = rounds.awaits
        if rounds.has_lost_a_peer:
            self._on_peer_lost()
        return waits

    def _take_round(self, rounds: RankRounds) -> float:
        """Take part in the next round of the group, if there is one, with what is here for it."""
        this = rounds.next(has_work=self._prompts.has_work or bool(self._rows_wished()))
        if this is None:
            self._park_starved()
            self._steps_ahead = 0
            return 0.0
        busy_s = WISHES_S
        if this.kind is RoundKind.PROMPT:
            busy_s = self._launch_round_unit(this)
        elif this.kind is RoundKind.DECODE:
            busy_s = self._launch_step(this.number, this.size)
        tokens, urgent, pages = self._prompts.wished()
        rounds.launch(this, Wish(self._rows_wished(), tokens, urgent, self._prompts.block(), UNITS_MAX, pages))
        self._steps_ahead = LOOKAHEAD if this.kind is RoundKind.DECODE else 0
        return busy_s or self._rng.uniform(*STEP_S)

    def _rows_wished(self) -> int:
        return sum(run.status == "running" and run.progress.has_room for run in self.runs.values())

    # ---------------------------------------------------------------- commands

    def _apply(self, command: Command) -> None:
        if isinstance(command, Admit):
            self._admit(command)
        elif isinstance(command, Receive):
            self._receive(command)
        elif isinstance(command, Withdraw) and command.placement in self.transfers:
            self._receiver.revoke(command.placement)
        elif isinstance(command, Exited):
            return
        elif isinstance(command, Audit):
            self._reports.add_event(take_inventory(command.number, self._held(), self._free()))
        elif not isinstance(command, Stop):
            run = self.runs.get(command.placement)
            if run is None or run.status == "leaving":
                return
            match command:
                case Grant():
                    self._grant(run, command)
                case Resize():
                    self._resize(run, command)
                case Withdraw():
                    self._leave(run)
        self._check_memory()

    def _admit(self, admit: Admit) -> None:
        self._admit_once(admit.placement)
        prompt, generated = unpack_int32(admit.prompt, "prompt"), unpack_int32(admit.generated, "generated").tolist()
        output = Output(generated, admit.sampling, MODEL.eos_token_ids, _DETOKENIZER, admit.first_token)
        if output.finished:
            self._reports.add_event(Finished(admit.placement, output.reason, output.generated_tokens, output.tail_text))
            self._reports.add_event(Released(admit.placement, admit.durable_tokens))
            return
        durable, by_steps = admit.durable_tokens, admit.by_steps
        if durable and not len(prompt) <= durable < len(prompt) + output.forced:
            raise Violation(
                "I3",
                f"placement {admit.placement} resumes at {durable} rows: "
                f"{len(prompt)} of its prompt, {len(generated)} tokens delivered",
            )
        if admit.warm_start not in (b"", admit.request_id.encode() if durable else b""):
            raise Violation("I3", f"placement {admit.placement} begins with the top-k of {admit.warm_start!r}")
        self._check_prefix(admit, prompt)
        begins = durable or (admit.prefix_tokens if by_steps else len(prompt))
        step_rows = 1 if row_words(admit.sampling.logprobs) else min(1 + admit.draft_tokens, self._rows.rows)
        run = Run(
            admit=admit,
            prompt=prompt,
            output=output,
            pages=unpack_int32(admit.host_pages, "host_pages").tolist(),
            index_pages=admit.index_pages,
            hot_slots=admit.hot_slots,
            hot_chunks=admit.hot_chunks,
            status="loading" if durable or by_steps else "prefilling",
            progress=RowProgress(begins, begins, durable or admit.prefix_tokens, step_rows),
            row=begins,
            prefilled=len(prompt) if durable or by_steps else admit.prefix_tokens,
            since=trio.current_time(),
            has_rows=bool(durable or by_steps),
            prompt_rows=admit.prefix_tokens,
            ready_at=trio.current_time() + self._rng.uniform(*LOAD_S),
        )
        run.note_memory()
        self.runs[admit.placement] = run
        if admit.transfer_id:
            out = Outgoing(admit.transfer_id, len(prompt), unsent_pages=admit.unsent_tokens // PAGE_TOKENS)
            run.sending = self._wire.begin(out, admit.destination)
        if run.status == "prefilling":
            self._prompts.add(run)

    def _check_prefix(self, admit: Admit, prompt: Int32Array) -> None:
        """What it is told not to compute is there already, and is what it would compute."""
        prefix = admit.prefix_tokens
        if prefix % PAGE_TOKENS or not 0 <= prefix < len(prompt) or (prefix and admit.durable_tokens):
            raise Violation("I3", f"placement {admit.placement} of {len(prompt)} tokens shares {prefix}")
        pages = unpack_int32(admit.host_pages, "host_pages").tolist()
        if not np.array_equal(self._pool.read(pages, prefix), prompt_rows(prompt)[:prefix]):
            raise Violation("I3", f"placement {admit.placement} shares {prefix} rows that are not those of its prompt")

    def _receive(self, command: Receive) -> None:
        self._admit_once(command.placement)
        if self._wire.refuse:
            self._wire.refuse -= 1
            self._reports.add_event(Released(command.placement, 0))
            return
        pages = unpack_int32(command.host_pages, "host_pages").tolist()
        incoming = Incoming(command.prompt_tokens, pages, command.prefix_tokens // PAGE_TOKENS)
        self.transfers[command.placement] = Transfer(command, incoming)
        self._receiver.open(command.placement, incoming)

    def _admit_once(self, placement: int) -> None:
        if placement in self.admitted:
            raise Violation("I4", f"placement {placement} came twice to one worker")
        self.admitted.add(placement)

    def _turn_transfers(self) -> None:
        for transfer_id in self._receiver.poll():
            durable = self.transfers.pop(transfer_id).incoming.durable_tokens
            self._reports.add_event(Released(transfer_id, durable))
        for run in self.runs.values():
            if run.sending is not None:
                self._send(run, run.sending)
                run.sending.turn()

    def _send(self, run: Run, sending: Sending) -> None:
        if run.status == "leaving" or not run.has_rows:
            return
        staged = len(run.prompt)
        for written in run.writes:
            if not written.has_landed:
                staged = min(staged, written.first)
        for index in sending.out.take_ready(staged):
            place = index + sending.out.unsent_pages
            first = place * PAGE_TOKENS
            rows = self._pool.rows[run.pages[place], : min(PAGE_TOKENS, len(run.prompt) - first)]
            sending.send(index, rows.copy())

    def _grant(self, run: Run, grant: Grant) -> None:
        run.pages += unpack_int32(grant.host_pages, "host_pages").tolist()
        run.index_pages += grant.index_pages
        if run.resize is not None:  # granted for the buffer that is to come
            more = run.resize.hot_chunks + grant.hot_chunks
            run.resize = Resize(grant.placement, run.resize.hot_slots, more)
        else:
            run.hot_chunks += grant.hot_chunks
        run.note_memory()
        self._unpark(run)

    def _resize(self, run: Run, resize: Resize) -> None:
        if run.status == "loading":
            run.resize = resize
            return
        reloads = bool(run.hot_slots) and not resize.hot_slots and run.status in ("running", "parked")
        run.hot_slots, run.hot_chunks = resize.hot_slots, resize.hot_chunks
        run.note_memory()
        if reloads:
            run.status, run.ready_at = "loading", trio.current_time() + self._rng.uniform(*LOAD_S)
        else:
            self._unpark(run)
        self._reports.add_event(Resized(run.placement, run.hot_slots, run.hot_chunks))

    def _unpark(self, run: Run) -> None:
        if run.status == "parked" and not run.is_starved:
            run.status = "running"

    def _leave(self, run: Run) -> None:
        run.status = "leaving"
        if run.sending is not None:
            run.sending.cancel("its request leaves")
        self._prompts.leave(run)

    # ---------------------------------------------------------------- what is observed

    def _observe(self, run: Run) -> None:
        if run.status != "staging":
            self._note_durable(run)
        match run.status:
            case "leaving" if run.is_quiet:
                self._release(run)
            case "staging" if run.has_first_token:
                self._take_first_token(run)
            case "staging" if all(written.has_landed for written in run.writes):
                self._take_over(run)
            case "sending" if run.sending is not None and run.sending.out.is_over:
                self._leave(run)
            case "loading" if run.ready_at <= trio.current_time():
                resize, run.resize = run.resize, None
                self._join(run)
                if resize is not None:
                    self._resize(run, resize)

    def _note_durable(self, run: Run) -> None:
        before = run.prompt_rows
        while run.writes and run.writes[0].has_landed:
            written = run.writes.popleft()
            if written.step is None:
                run.prompt_rows = written.first + written.count
                continue
            for position in range(written.first, written.first + written.count):
                del run.tail[position]
            written.step.note_durable()
            if run.status == "parked":
                self._report_durable(run)
        if run.status == "prefilling" and run.prompt_rows // PAGE_TOKENS > before // PAGE_TOKENS:
            self._report_prompt(run, run.prompt_rows)

    def _take_first_token(self, run: Run) -> None:
        run.has_first_token = False
        if not run.output.forced:
            run.last_token = next_token(digest_of(prompt_rows(run.prompt)))
            self._take_tokens(run, 0, [run.last_token])

    def _take_over(self, run: Run) -> None:
        run.writes.clear()
        run.progress.durable = len(run.prompt)
        self._report_durable(run)
        self._reports.add_event(Staged(run.placement, 1.0, 1.0))
        if run.sending is not None:
            run.status = "sending"
        elif run.hot_slots == NO_HOT_BUFFER:
            self._leave(run)
        else:
            self._join(run)

    def _join(self, run: Run) -> None:
        run.status = "running"
        if not run.started:
            run.started = True
            self._reports.add_event(Started(run.placement))

    def _release(self, run: Run) -> None:
        rows = run.progress.certain if run.has_rows else 0
        if (prompt_rows := min(run.prefilled, run.progress.certain)) > run.progress.durable:
            self._report_prompt(run, prompt_rows)
        del self.runs[run.placement]
        durable, first_token = run.left_behind(rows)
        warm_start = run.admit.request_id.encode() if durable else b""
        self._reports.add_event(Released(run.placement, durable, first_token, warm_start))

    def _report_prompt(self, run: Run, rows: int) -> None:
        whole = rows // PAGE_TOKENS * PAGE_TOKENS
        self._reports.set_durable(run.admit.request_index, run.placement, whole)

    def _report_durable(self, run: Run) -> None:
        self._reports.set_durable(run.admit.request_index, run.placement, run.durable(run.progress.durable))

    # ---------------------------------------------------------------- launches

    def _launch_units(self) -> float:
        """Run a few units of prompt passes before the next step."""
        busy_s = 0.0
        for _ in range(self._rng.randint(1, UNITS_MAX)):
            unit = self._prompts.next()
            if unit is None:
                break
            parts, is_over = self._prompts.launched(unit)
            for part in parts if is_over else ():
                self._end_part(*part)
            busy_s += self._rng.uniform(*UNIT_S)
        return busy_s

    def _launch_round_unit(self, this: Round) -> float:
        """Launch this rank's part of a unit of the group, which may be none."""
        if this.opens:
            rounds = cast(RankRounds, self._rounds)
            self._prompts.begin(this, rounds.rank, rounds.group.size)
        parts, is_over = self._prompts.launched(this.unit)
        for run, _, _ in parts:
            run.in_steps += 1
        self._units.append((this.number, list(parts), is_over))
        return self._rng.uniform(*UNIT_S)

    def _end_part(self, run: Run, start: int, prefilled: int) -> None:
        """A pass with start..prefilled-1, which begin with a page, is over: their rows are being written."""
        rows = prompt_rows(run.prompt)[:prefilled]
        for first in range(start, prefilled, PAGE_TOKENS):
            page = run.pages[first // PAGE_TOKENS]
            write = self._pool.write(self._process, page, 0, rows[first : first + PAGE_TOKENS])
            run.writes.append(Written(first, len(write.rows), [write]))
        if prefilled < len(run.prompt):
            return
        run.has_rows = True
        if run.status != "leaving":
            run.status, run.has_first_token = "staging", True

    def _launch_step(self, number: int = -1, size: int | None = None) -> float:
        """Launch a step of at most `size` requests, as part of round `number` of the group."""
        places: list[Place] = []
        self._park_starved()
        for run in self.runs.values():
            progress = run.progress
            if run.status == "running" and progress.has_room and len(places) != size:
                known = run.known_tokens(progress.certain, self._rows.window_tokens(LOOKAHEAD))
                end, base = progress.rows_end, progress.certain
                places.append(Place(run, end, base, known, StepProgress([progress])))
                run.in_steps += 1
        if not places:
            return 0.0
        self._steps.append(Step(places, number))
        seconds = self._rng.uniform(*STEP_S)
        self.counters.stepped(seconds, len(places))
        self._count_swaps([place.run for place in places], seconds)
        return seconds

    def _count_swaps(self, runs: list[Run], seconds: float) -> None:
        """Hot buffers are modelled by what they miss, which turns with time: hot floors move with it."""
        swap, is_dear = self.counters.swap, self.counters.steps // DEAR_STEPS % 2 == 1
        for run in runs:
            missed = self._rng.randint(0, LOOKED_UP // (2 if is_dear else 8)) if run.hot_slots else 0
            hits, misses = self._swaps.get(run.placement, (0, 0))
            self._swaps[run.placement] = hits + LOOKED_UP - missed, misses + missed
            swap.hits += LOOKED_UP - missed if run.hot_slots else 0
            swap.misses += missed
        swap.spent(1, 0, seconds * (0.8 if is_dear and any(run.hot_slots for run in runs) else 0.0))
        drafts = {run.placement: (run.drafted, run.accepted) for run in runs if run.drafted}
        self._reports.count_swaps({run.placement: self._swaps[run.placement] for run in runs}, swap.totals, drafts)

    def _park_starved(self) -> None:
        for run in self.runs.values():
            if run.status == "running" and run.is_starved:
                run.status = "parked"
                self._report_durable(run)
                self._reports.add_event(Parked(run.placement))

    # ---------------------------------------------------------------- results

    def _read(self, step: Step) -> None:
        for place in step.places:
            run, first = place.run, place.run.row
            run.in_steps -= 1
            drawn = self._decode(place)
            if place.progress.read([len(drawn)]) != [first]:
                raise Violation("I3", f"placement {run.placement}: the host does not know that a step began at {first}")
            begins, last = first + 1 - len(run.prompt), first + len(drawn) - len(run.prompt)
            if run.status != "leaving" and last >= run.output.forced:
                self._take_tokens(run, begins, drawn)

    def _decode(self, place: Place) -> list[int]:
        """The device's part: read the context, write the new rows, draw. Returns what was drawn by rows that hold."""
        run, first = place.run, place.run.row
        self._on_decode(run.admit.request_id)
        settled = first - len(run.tail)
        digest = digest_of(self._pool.read(run.pages, settled))
        for position in range(settled, first):
            digest = extend_digest(digest, run.tail[position], position)
        writes, drawn, held = list[Write](), [run.last_token], 0
        for position in range(first, min(first + run.progress.step_rows, place.end)):
            token, holds = self._fed(place, position, drawn[-1])
            is_prompt = position < len(run.prompt)  # whose row is that of prefill
            row = int(prompt_rows(run.prompt)[position]) if is_prompt else decode_row(token, position, digest)
            digest = extend_digest(digest, row, position)
            drawn.append(next_token(digest))
            if holds and held == position - first:
                held += 1
                run.tail[position] = row
                run.accepted += position > first and place.known_at(position) is None
            writes.append(self._write(run, position, row))
        run.writes.append(Written(first, held, writes, place.progress))
        run.rewrites_at = max([run.rewrites_at, *(it.lands_at for it in writes[held:])])
        run.row, run.last_token = first + held, drawn[held]
        return drawn[1 : 1 + held]

    def _fed(self, place: Place, position: int, drawn: int) -> tuple[int, bool]:
        """The token of a row behind one that drew `drawn`, and whether it holds if that one does: the first row always,
        others when their selection was admitted, and their token is known or what was drawn."""
        run, known = place.run, place.known_at(position)
        if position == run.row:
            return drawn if known is None else known, True
        fits = self._rng.random() >= UNFIT
        if known is not None:
            return known, fits
        is_right = self._rng.random() < self._right
        run.drafted += 1
        return drawn if is_right else WRONG_DRAFT, fits and is_right

    def _write(self, run: Run, position: int, row: int) -> Write:
        place, offset = divmod(position, PAGE_TOKENS)
        if place >= len(run.pages):
            raise Violation("I2", f"placement {run.placement} writes row {position} and has {len(run.pages)} pages")
        rows = np.array([row], dtype=np.uint64)
        return self._pool.write(self._process, run.pages[place], offset, rows, run.rewrites_at)

    def _take_tokens(self, run: Run, place: int, tokens: list[int]) -> None:
        """What a step drew for the places of the output from `place` on."""
        words, output = row_words(run.admit.sampling.logprobs), run.output
        rows = [logprobs_of(token, place + at, words) for at, token in enumerate(tokens)] if words else []
        output.extend(place, tokens, rows)
        start, ids = output.take_publishable()
        if ids:
            durable, told = run.durable(run.progress.durable), output.take_rows(len(ids))
            self._reports.add_tokens(run.admit.request_index, run.placement, start, ids, durable, told)
        if output.finished:
            self._reports.add_event(Finished(run.placement, output.reason, output.generated_tokens, output.tail_text))
            self._leave(run)

    # ---------------------------------------------------------------- what it was given

    def _held(self) -> list[tuple[InventoryRow, list[int]]]:
        runs = [
            InventoryRow(
                run.placement,
                len(run.pages),
                run.hot_chunks,
                index_pages=run.index_pages,
                chunks=run.hot_chunks,
                is_leaving=run.status == "leaving",
            )
            for run in self.runs.values()
        ]
        transfers = [InventoryRow(it.placement, len(it.pages)) for it in self.transfers.values()]
        pages = [it.pages for it in (*self.runs.values(), *self.transfers.values())]
        return list(zip((*runs, *transfers), pages, strict=True))

    def _free(self) -> FreeDeviceMemory:
        rows, capacity = [row for row, _ in self._held()], self._capacity
        return FreeDeviceMemory(
            seats=capacity.seats - len(rows),
            chunks=capacity.hot_chunks - sum(row.chunks for row in rows),
            index_pages=capacity.index_pages - sum(row.index_pages for row in rows),
        )

    def _check_memory(self) -> None:
        """What is given to this worker is never more than it has (I2), nor given twice (I1)."""
        runs, capacity = self.runs.values(), self._capacity
        rows = (
            ("seats", len(runs) + len(self.transfers), capacity.seats),
            ("hot chunks", sum(_chunks(run) for run in runs), capacity.hot_chunks),
            ("index pages", sum(run.index_pages for run in runs), capacity.index_pages),
        )
        for what, given, total in rows:
            if given > total:
                raise Violation("I2", f"{given} {what} were handed out, there are {total}")
        for run in runs:
            if not (capacity.decodes or run.hot_slots == NO_HOT_BUFFER):
                raise Violation("I2", f"placement {run.placement} is to be decoded by a worker that only prefills")
            if not capacity.prefills and run.admit.computes_prompt:
                raise Violation("I2", f"placement {run.placement} is to be prefilled by a worker that only decodes")
            if run.index_pages != len(run.pages) or len(set(run.pages)) != len(run.pages):
                raise Violation("I1", f"placement {run.placement} has pages {run.pages}, {run.index_pages} index pages")


def _chunks(run: Run) -> int:
    return max(run.hot_chunks, run.resize.hot_chunks if run.resize else 0)
