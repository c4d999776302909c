"""Grammars of requests, and the masks of their next tokens on the way to the device.

    decode loop     open ─► advance(token) ─► … wait ─► mask into its seat's row ─► upload on `masks`, mask_ready
    build threads   try the grammar in a process, build the matcher, or copy one of the same source · push known tokens,
                    mask
    mask threads    push the token, mask; a second one helps where that takes long, a third has what took long before

A matcher is built and moved by threads, since a grammar may take a second to build and a mask milliseconds; the library
lets go of the interpreter meanwhile. Builds and tokens have threads and a queue each, so that no build is in the way of
a batch that decodes. Each request has at most one job at a time, and none once it has left. A state is a function of
the grammar and the tokens so far, so another worker, or the same one after a retraction, builds it from these.

Builds begin in the order of rank, in which owners take turns. The last thread that is free is kept for a build that
ranks before one that has begun, as the first one of an owner who comes later does, before all but the oldest of another
owner. So slow builds of one owner, however many, do not delay it; those of several owners may.

A grammar of a client may take gigabytes or minutes, which nothing bounds here: it passes a trial in a process that has
limits before it is built (protocol/grammar_trials.py). A thread waits for the process meanwhile, the decode loop for
neither.

The library recurses as deep as rules refer to each other: its threads have STACK_BYTES.

A mask depends on the token before, so that a step is launched without its draws, and these follow once the masks are
there (worker/loop/decode.py). The loop waits for them as long as a step takes (mask_wait_s); what is late by then is
not drawn.

A grammar may grow with its output, until each mask takes a fifth of a second. Others do not wait for it:

    one that took QUICK_S         is slow: the next step takes its request once its mask is there, and no step waits for
                                  it; one thread has the masks of all slow grammars, and lets other threads run
                                  (protocol.grammars.SlowPushes)
    masks that wait               owners take turns, in the thread of slow masks and in the others
    another of the same grammar   waits for the slow one in the thread of slow masks: outputs of one matcher's copies
                                  share a lock of the library. Copies are of one owner's requests
    one of MASK_LIMIT_S, or all   ends its request as failed: its output has outgrown what a worker computes for it
    beyond masks_limit_s

Rejected: smaller limits of the library. What a mask costs grows faster than what they count, and a rule that repeats
itself at its right end is cheap where a row has as many items.

Masks of all seats travel in one copy. Rows of other seats are as they were copied before: a row changes only once the
draw that read it was seen, and the upload that changes it comes before the next draw of that seat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from basics.round_robin import RoundRobin
from protocol.errors import BadInput, HiSparseError, InternalError
from protocol.grammar_trials import Trials
from protocol.grammars import Mask, Matcher, SlowPushes, Vocabulary, outgrown
from protocol.messages import ModelInfo, Rank
from protocol.text import Tokenizer
from worker.device.pinned import host_tensor
from worker.runners.logits import AdjustTables
from worker.streams import Fence, Streams

#: Threads that build matchers, one of them idle most of the time (_RankedJobs), and threads that compute masks behind a
#: new token, apart from the slow ones. Of these the first has all masks, and the others help where a step begins
#: without a mask, or where a draw waits while that thread has been at work on one mask for HELP_AFTER_S: threads that
#: take turns at short masks spend more on the interpreter's lock than on the masks, however many there are.
BUILD_THREADS: Final = 3
MASK_THREADS: Final = 2
HELP_AFTER_S: Final = 0.001
#: Stack of each, of which pages are taken as they are touched: several times what a grammar of GRAMMAR_CHARS_MAX
#: characters needs whose rules, 8,500 at most, form one chain.
STACK_BYTES: Final = 256 * 1024 * 1024
#: How long draws wait for masks at least and at most, behind a forward pass that may take as long (mask_wait_s).
MASK_WAIT_LEAST_S: Final = 0.002
MASK_WAIT_S: Final = 0.01
#: A grammar whose last mask, or token, took longer than this is slow: no step waits for it.
QUICK_S: Final = 0.002
#: CPU seconds that one mask may take, and those that all masks of an output may: so many, and more for each token.
#: The library bounds an ordinary one to 15 ms, and most take less than 0.1 ms.
MASK_LIMIT_S: Final = 0.25
MASKS_FREE_S: Final = 2.0
MASK_TOKEN_S: Final = 0.005
#: How long a matcher may take to be tried and built, or a mask to be waited for, before its request fails. Time in a
#: queue does not count; a build that several requests wait for has one such time, that of its own start.
GRAMMAR_LIMIT_S: Final = 60.0


def mask_wait_s(plain_step_s: float) -> float:
    """Seconds that draws wait for masks: as long as a step takes without them, 0 where that was not measured."""
    return min(MASK_WAIT_S, max(MASK_WAIT_LEAST_S, plain_step_s or MASK_WAIT_S))


def masks_limit_s(tokens: int) -> float:
    """CPU seconds that the masks of an output of `tokens` may take together."""
    return MASKS_FREE_S + MASK_TOKEN_S * tokens


@dataclass(frozen=True)
class _Queues:
    """Where a grammar's jobs go: the first one to `builds`, others to `masks`, or to `slow` behind a slow mask. With
    `ask_help(age_s)` more threads work on `masks`, if one mask has taken that long."""

    builds: _RankedJobs
    masks: _MaskJobs
    slow: _MaskJobs
    ask_help: Callable[[float], None]


class Grammar:
    """The grammar of one request. Used by the decode loop; `work` runs in a thread.

    `is_slow`: its last mask, or the token before it, took longer than QUICK_S.
    """

    def __init__(self, build: _Build, rank: Rank, owner: str, tokens: Sequence[int], queues: _Queues) -> None:
        """`tokens` are known already. `owner` is whose request it is."""
        self.rank: Final = rank
        self.owner: Final = owner
        self.is_slow = False
        self._build = build
        self._queues = queues
        self._spent_s = 0.0  # CPU seconds of its masks
        self._matcher: Matcher | None = None
        self._mask: Mask | None = None
        self._failure: HiSparseError | None = None
        self._behind = 0  # tokens of the output
        self._has_left = False
        self._since_s: float | None = None  # when a thread began with the job, or with the build that it waits for
        self._done = threading.Event()
        self._begin(tokens, queues.builds)

    @property
    def has_mask(self) -> bool:
        """Whether it is known what may come next; False too where the grammar has failed."""
        return self._done.is_set() and self._failure is None

    def advance(self, token: int) -> None:
        """The output goes on with `token`."""
        if not self.has_mask:
            raise InternalError("a token came before its mask", field="token", value=token)
        self._begin((token,), self._queues.slow if self.is_slow else self._queues.masks)

    def cancel(self) -> None:
        """Its request has left: what was begun is dropped, unless a thread works on it."""
        self._has_left = True
        self._queues.builds.drop(self)

    def check(self) -> None:
        """Raises what made it fail, and BadInput, or `outgrown`, when it takes too long."""
        since_s = self._since_s
        if self._done.is_set():
            if self._failure is not None:
                raise self._failure
            return
        self._queues.ask_help(0.0)
        if since_s is not None and time.monotonic() - since_s > GRAMMAR_LIMIT_S:
            text, size = f"takes more than {GRAMMAR_LIMIT_S:g} s", f"{len(self._build.source)} characters"
            raise outgrown(BadInput(text, field="grammar", value=size, remedy="simplify it"), self._behind)

    def wait(self, until_s: float) -> Mask | None:
        """The mask of the next token; None: it is not there by `until_s` of time.monotonic(). Raises as `check`."""
        while not self._done.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if not self._done.wait(min(left_s, HELP_AFTER_S)):
                self._queues.ask_help(HELP_AFTER_S)
        self.check()
        return self._mask if self.has_mask else None

    def work(self, tools: _Tools) -> None:
        """In a thread: what was begun. Raises nothing."""
        if self._has_left:
            return
        self._since_s = time.monotonic()
        try:
            if self._matcher is None:
                if (matcher := self._build.matcher(self, tools.vocabulary)) is None:
                    return  # the thread that builds it calls `build_again`, or has done so
                self._matcher = matcher
            if not self._push_all(self._matcher, tools):
                return
            self._compute_mask(self._matcher)
        except BaseException as error:
            self._failure = outgrown(_failure(error), self._behind)
        self._done.set()

    def work_or_hand_on(self, tools: _Tools) -> None:
        """In a thread for quick masks: as `work`; or leave it to the thread of slow ones, where another output of this
        grammar is at work for longer than QUICK_S."""
        turn = self._build.turn
        if not turn.acquire(timeout=QUICK_S):
            self._queues.slow.put(self)
            return
        try:
            self.work(tools)
        finally:
            turn.release()

    def _push_all(self, matcher: Matcher, tools: _Tools) -> bool:
        """One token at a time, since other threads wait for the interpreter; False once its request has left."""
        for token in self._tokens:
            if self._has_left:
                return False
            with self._build.turn:
                self._push(matcher, token, tools)
        return True

    def _push(self, matcher: Matcher, token: int, tools: _Tools) -> None:
        began_s = time.perf_counter()
        if self.is_slow:
            tools.push_slow(matcher, token)
        else:
            matcher.push((token,))
        self.is_slow = time.perf_counter() - began_s > QUICK_S

    def _compute_mask(self, matcher: Matcher) -> None:
        with self._build.turn:
            began_s = time.thread_time()
            self._mask = matcher.mask()
            took_s = time.thread_time() - began_s
        self.is_slow |= took_s > QUICK_S
        self._spent_s += took_s
        limit_s = masks_limit_s(self._behind)
        if took_s <= MASK_LIMIT_S and self._spent_s <= limit_s:
            return
        text = f"one mask took {took_s:.2g} s of {MASK_LIMIT_S:g}, and all took {self._spent_s:.3g} s of {limit_s:.3g}"
        size = f"{len(self._build.source)} characters"
        raise BadInput(text, field="grammar", value=size, remedy="simplify it")

    def awaits_build_since(self, since_s: float) -> None:
        """In a thread: another one has been building its matcher since then, and calls `build_again`."""
        self._since_s = since_s

    def build_again(self) -> None:
        """In a thread: the first job is to be done from its start."""
        self._since_s = None
        self._queues.builds.put(self)

    def _begin(self, tokens: Sequence[int], jobs: _Jobs) -> None:
        self._tokens = tuple(tokens)
        self._behind += len(self._tokens)
        self._since_s = None
        self._done.clear()
        jobs.put(self)


class _Build:
    """The matcher of one source, built once for all requests of an owner that ask for it as long as one of them is
    here.

    `turn`: of the thread that is at work on one of its copies. The library lets no other one in meanwhile, and keeps
    the interpreter from all threads while one waits for that.
    """

    def __init__(self, source: str, trials: Trials) -> None:
        self.source = source
        self.turn: Final = threading.RLock()
        self._trials = trials
        self._lock = threading.Lock()
        self._since_s: float | None = None  # when a thread began to build
        self._waiting: list[Grammar] = []
        self._built: Matcher | None = None
        self._failure: HiSparseError | None = None

    def matcher(self, grammar: Grammar, vocabulary: Callable[[], Vocabulary]) -> Matcher | None:
        """In a thread: a matcher for `grammar` alone. None: another thread builds it, and has `grammar` ask again
        then. Raises what building raised."""
        with self._lock:
            if self._since_s is not None:
                grammar.awaits_build_since(self._since_s)
                self._waiting.append(grammar)
                return None
            builds = self._built is None and self._failure is None
            self._since_s = time.monotonic() if builds else None
        if builds:
            self._do_build(vocabulary)
        if self._failure is not None:
            raise self._failure
        assert self._built is not None
        return self._built.copy()

    def _do_build(self, vocabulary: Callable[[], Vocabulary]) -> None:
        try:
            ready = vocabulary()  # first: what is wrong with the tokenizer is not told of the grammar
            self._trials.check(self.source)
            self._built = Matcher(ready, self.source)
        except BaseException as error:
            self._failure = _failure(error)
        with self._lock:
            self._since_s = None
            waiting, self._waiting = self._waiting, []
        for grammar in waiting:
            grammar.build_again()


class _RankedJobs:
    """The job of the first in rank comes next, of equal ranks the earlier one; None, which ends a thread, comes last.
    The last free thread of BUILD_THREADS takes only a job that comes before one that has begun. Thread-safe."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Rank | tuple[float], int, Grammar | None]] = []
        self._begun: list[tuple[Rank | tuple[float], int]] = []
        self._numbers = count()
        self._changed = threading.Condition()

    def put(self, job: Grammar | None) -> None:
        with self._changed:
            heappush(self._jobs, ((inf,) if job is None else job.rank, next(self._numbers), job))
            self._changed.notify()

    @contextmanager
    def next(self) -> Iterator[Grammar | None]:
        """Blocks until there is one; it is done at the end of the block."""
        with self._changed:
            self._changed.wait_for(self._may_begin)
            rank, number, job = heappop(self._jobs)
            self._begun.append((rank, number))
        try:
            yield job
        finally:
            with self._changed:
                self._begun.remove((rank, number))
                self._changed.notify()

    def _may_begin(self) -> bool:
        if not self._jobs:
            return False
        is_last = 0 < len(self._begun) == BUILD_THREADS - 1
        return not is_last or self._jobs[0][:2] < max(self._begun)

    def drop(self, job: Grammar) -> None:
        """If it has not come yet, it does not."""
        with self._changed:
            self._jobs = [it for it in self._jobs if it[-1] is not job]
            heapify(self._jobs)


class _MaskJobs:
    """Owners take turns, jobs of one come in their order; None, which ends a thread, comes last. Thread-safe."""

    def __init__(self) -> None:
        self._turns: RoundRobin[Grammar] = RoundRobin()
        self._lock = threading.Lock()
        self._arrived: SimpleQueue[bool] = SimpleQueue()  # true for each job, false for each end

    def put(self, job: Grammar | None) -> None:
        if job is not None:
            with self._lock:
                self._turns.add(job.owner, job)
        self._arrived.put(job is not None)

    def get(self, *, block: bool = True) -> Grammar | None:
        """The next job. Raises Empty where there is none and it is not to block."""
        if not self._arrived.get(block):
            return None
        with self._lock:
            taken = self._turns.take()
        assert taken is not None
        return taken[1]

    def empty(self) -> bool:
        return self._arrived.empty()


_Jobs: TypeAlias = _RankedJobs | _MaskJobs


def _failure(error: BaseException) -> HiSparseError:
    """What the library's error means for a request. Its panics are no Exception."""
    if isinstance(error, HiSparseError):
        return error
    if isinstance(error, OSError):  # no process for its trial
        return InternalError(f"a grammar was not tried: {error}", field="grammar")
    return BadInput(f"the matcher failed: {error}", field="grammar", remedy="simplify it")


class _Tools:
    """The vocabulary and the pushes of all threads, made when they are first needed. Thread-safe."""

    def __init__(self, make: Callable[[], Vocabulary]) -> None:
        self._make = make
        self._lock, self._pushing = threading.Lock(), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._slow_pushes: SlowPushes | None = None

    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make()
            return self._vocabulary

    def push_slow(self, matcher: Matcher, token: int) -> None:
        """Push `token`, after slow ones of other outputs."""
        vocabulary = self.vocabulary()
        with self._pushing:
            if self._slow_pushes is None:
                self._slow_pushes = SlowPushes(vocabulary)
            matcher.push_slow(token, self._slow_pushes)


class Grammars:
    """The threads, started with the first grammar, and the masks of all seats."""

    def __init__(
        self, streams: Streams, tables: AdjustTables, tokenizer: Tokenizer, info: ModelInfo, wake: Callable[[], None]
    ) -> None:
        """`wake` is told, from a thread, of each mask."""
        self._stream = streams.masks
        self._tables = tables
        self._rows = host_tensor(*tables.masks.shape, dtype=tables.masks.dtype, device=tables.masks.device)
        self._host_rows: npt.NDArray[np.uint8] = self._rows.numpy()  # the same memory: numpy takes 0.3 us, torch 6 us
        self._tools = _Tools(partial(Vocabulary, tokenizer, info.vocab_size, info.eos_token_ids))
        self._trials = Trials(tokenizer, info.vocab_size, info.eos_token_ids)
        self._wake = wake
        self._building: WeakValueDictionary[tuple[str, str], _Build] = WeakValueDictionary()
        self._queues = _Queues(_RankedJobs(), _MaskJobs(), _MaskJobs(), self._ask_help)
        self._help: SimpleQueue[bool] = SimpleQueue()  # true: asked for; false ends a thread that helps
        self._mask_since_s = inf  # when the thread that has all masks began with the one that it works on
        self._threads: list[threading.Thread] = []

    @property
    def known(self) -> int:
        """Return how many grammars are known again."""
        return self._trials.known

    def open(self, seat: int, source: str, tokens: Sequence[int], rank: Rank, owner: str = "") -> Grammar:
        """Of the request of `rank` and `owner` that takes `seat`: its draws are free until a mask is set, and give
        known tokens."""
        self._host_rows[seat] = 255
        if not self._threads:
            self._start()
        build = self._building.get((owner, source))
        if build is None:
            build = self._building[owner, source] = _Build(source, self._trials)
        return Grammar(build, rank, owner, tokens, self._queues)

    def set(self, seat: int, mask: Mask | None) -> None:
        """What the next draw of `seat` is held to; None: it does not draw."""
        row = self._host_rows[seat]
        if mask is None:
            row[-1] = 0
            return
        row[:-1] = mask
        row[-1] = 1

    def upload(self) -> Fence:
        """Launch the way of all masks to the device, and return the fence that draws wait for."""
        self._stream.launch("upload masks", self._copy)
        return self._stream.record("mask_ready")

    def close(self) -> None:
        """End the threads, and the processes of trials, once they have done what was begun."""
        if self._threads:
            for _ in range(BUILD_THREADS):
                self._queues.builds.put(None)
            self._queues.masks.put(None)
            self._queues.slow.put(None)
            for _ in range(MASK_THREADS - 1):
                self._help.put(False)

    def _copy(self) -> None:
        self._tables.masks.copy_(self._rows, non_blocking=True)

    def _ask_help(self, age_s: float) -> None:
        is_old = age_s <= 0 or time.monotonic() - self._mask_since_s >= age_s
        if is_old and not self._queues.masks.empty() and self._help.empty():
            self._help.put(True)

    def _start(self) -> None:
        targets = [*[self._work_on_builds] * BUILD_THREADS, self._work_on_masks, self._work_on_slow_masks]
        targets += [self._work_along] * (MASK_THREADS - 1)
        with _deep_stacks():
            for target in targets:
                thread = threading.Thread(target=target, name="grammars", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work_on_builds(self) -> None:
        while self._build_next():
            self._wake()
        self._trials.close()

    def _build_next(self) -> bool:
        """False: this thread is to end. A thread that waits keeps no matcher."""
        with self._queues.builds.next() as job:
            if job is not None:
                job.work(self._tools)
        return job is not None

    def _work_on_masks(self) -> None:
        while (job := self._queues.masks.get()) is not None:
            self._mask_since_s = time.monotonic()
            job.work_or_hand_on(self._tools)
            self._mask_since_s = inf
            del job
            self._wake()

    def _work_on_slow_masks(self) -> None:
        while (job := self._queues.slow.get()) is not None:
            job.work(self._tools)
            del job
            self._wake()

    def _work_along(self) -> None:
        """Take masks from the thread that has them, each time that help is asked for."""
        while self._help.get():
            while (job := self._next_mask()) is not None:
                job.work_or_hand_on(self._tools)
                del job
                self._wake()

    def _next_mask(self) -> Grammar | None:
        try:
            job = self._queues.masks.get(block=False)
        except Empty:
            return None
        if job is None:
            self._queues.masks.put(None)  # meant for the other thread
        return job


@contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads that start within have STACK_BYTES."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
