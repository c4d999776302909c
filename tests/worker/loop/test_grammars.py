"""Requests with a grammar on a worker: tokens are the oracle's under the masks, late ones too; others go on."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import inf
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from hisparse.http.errors import AnswerFailed, ending_error, param_of, status_of
from protocol import grammars as library
from protocol.children import Children
from protocol.errors import BadInput, CapacityError, ConfigError, HiSparseError, InternalError
from protocol.grammar_trials import Trials
from protocol.grammars import Vocabulary
from protocol.messages import Ended, Faulted, ModelInfo
from protocol.text import ByteTokenizer
from tests import ROOT
from tests.support.fakes.hash_runner import ALTERNATING, EOS, SHARED, VOCAB, FakeRunner
from tests.support.hostile_schemas import CHAIN
from tests.support.late_masks import late_once
from tests.support.limits import HANG_LIMIT_S
from tests.support.pairwise import pairwise
from tests.support.worker_rig import Rig
from tests.worker.loop.test_fences import a_day, come_back, simulated
from worker.loop import executor, grammars
from worker.loop.batch import RunningRequest
from worker.loop.decode import Decoder
from worker.runners.logits import AdjustTables
from worker.streams import SimulatedStreams, make_streams

#: Bytes that no fake prompt needs: any of them, and then the end.
LETTER = "start: /[a-z]/"


#: Builds chains of rules in a worker's threads, the longest that fit a grammar, and drops them in the main thread.
CHAINS = """
import time
from types import SimpleNamespace
from protocol.grammar_trials import Trials
from protocol.messages import GRAMMAR_CHARS_MAX
from protocol.text import ByteTokenizer
from worker.loop.grammars import Grammars
from worker.runners.logits import AdjustTables
from worker.streams import make_streams

info = SimpleNamespace(vocab_size=259, eos_token_ids=(257,))
tables = AdjustTables.allocate(1, 259)
found = Grammars(make_streams("inline"), tables, ByteTokenizer(), info, lambda: None)
found._trials = Trials(ByteTokenizer(), 259, info.eos_token_ids, limit_s=60.0)  # on a busy machine
letters = [chr(number) for number in range(ord("a"), ord("z") + 1)]
names = [a + b + c for a in letters for b in letters for c in letters]
for rule, last, case in (("{}", "/a/", str), ('("a" {})?', '"b"', str), ("{}", "/a/", str.upper)):
    lines, size = ["start: " + case(names[0])], 0
    for name, following in zip(names, names[1:]):
        lines.append(case(name) + ":" + rule.format(case(following)))
        size += len(lines[-1]) + 1
        if size > GRAMMAR_CHARS_MAX - 100:
            break
    source = "\\n".join([*lines, case(following) + ":" + last])
    assert GRAMMAR_CHARS_MAX - 200 < len(source) <= GRAMMAR_CHARS_MAX
    assert found.open(0, source, (), (0, 0, 0)).wait(time.monotonic() + 60) is not None
print("built")
"""


class FakeMatcher(library.Matcher):
    """Counts the sources that are built. Those that `holds` names wait for `goes_on`."""

    built: list[str]
    holds: str
    goes_on: threading.Event

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        self.built.append(source)
        if source.endswith(self.holds):
            self.goes_on.wait(HANG_LIMIT_S)
        super().__init__(vocabulary, source)


def tools_of(make: Callable[[], Vocabulary] = lambda: Vocabulary(ByteTokenizer(), VOCAB, (EOS,))) -> grammars._Tools:
    return grammars._Tools(make)


def idle_queues() -> grammars._Queues:
    """No thread works on them."""
    return grammars._Queues(grammars._RankedJobs(), grammars._MaskJobs(), grammars._MaskJobs(), lambda _: None)


def grammar_of(build: grammars._Build, tokens: Sequence[int] = (), owner: str = "") -> grammars.Grammar:
    """No thread works on it."""
    return grammars.Grammar(build, (0, 0, 0), owner, tokens, idle_queues())


class FakePanic(BaseException):
    """As panics of a library in Rust, which are no Exception."""


@pytest.fixture(autouse=True)
def _ended_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread of a test works on after it, when the matchers of the next one would count what it builds."""
    started, start = list[grammars.Grammars](), grammars.Grammars._start

    def record(found: grammars.Grammars) -> None:
        started.append(found)
        start(found)

    monkeypatch.setattr(grammars.Grammars, "_start", record)
    yield
    for found in started:
        found.close()
    threads = [thread for found in started for thread in found._threads]
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def matchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeMatcher]]:
    monkeypatch.setattr(FakeMatcher, "built", [], raising=False)
    monkeypatch.setattr(FakeMatcher, "holds", "held", raising=False)
    monkeypatch.setattr(FakeMatcher, "goes_on", threading.Event(), raising=False)
    monkeypatch.setattr(grammars, "Matcher", FakeMatcher)
    yield FakeMatcher
    FakeMatcher.goes_on.set()


@pytest.fixture
def trials() -> Iterator[Trials]:
    made = Trials(ByteTokenizer(), VOCAB, (EOS,))
    yield made
    made.close()


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars.Grammar, "wait", late_once())


@pytest.mark.parametrize(("seed", "masks", "hot_slots"), pairwise(range(3), ("in time", "late", "slow"), (0, 64)))
def test_tokens_follow_the_masks_of_a_retracted_request(
    seed: int, masks: str, hot_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if masks == "late":
        make_late(monkeypatch)
    if masks == "slow":
        monkeypatch.setattr(grammars, "QUICK_S", -1.0)
    rig = Rig(simulated(seed)())
    coordinator = rig.coordinator
    held = [coordinator.create(number, 90, 30, seed=number, grammar=ALTERNATING) for number in (1, 2)]
    free = coordinator.create(3, 40, 20, seed=3)
    assert coordinator.admit(held[0], hot_slots)
    assert coordinator.admit(held[1], 64)
    assert coordinator.admit(free, 64)
    rig.run_until(lambda: min(len(life.tokens) for life in held) >= 5)
    coordinator.withdraw(held[0], "keep")
    come_back(rig, held[0], 64)
    coordinator.withdraw(held[1], "drop")
    come_back(rig, held[1], hot_slots)
    rig.run()
    assert not rig.wrong()
    assert [len(life.tokens) for life in coordinator.lives] == [30, 30, 20]
    rig.check_end()
    late = rig.executor.counters.late_masks
    assert late >= 50 if masks == "late" else masks == "in time" or late == 0


def test_step_that_is_launched_again_leaves_the_tables_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token has one slot at most: the buffer begins cold."""
    make_late(monkeypatch)
    rig = Rig()
    life = rig.coordinator.create(1, 90, 12, grammar=ALTERNATING)
    assert rig.coordinator.admit(life, 64)
    while not rig.executor.idle:
        rig.turn()
        rig.check()
    assert not rig.wrong()
    counters = rig.executor.counters
    assert (counters.late_masks, counters.surplus_tokens) == (11, 0)


def test_request_without_grammar_keeps_its_steps_while_a_mask_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one request waits for its mask outside of the batch, the other one decodes to its end meanwhile."""
    monkeypatch.setattr(executor, "mask_wait_s", lambda _: 0.0)
    goes_on, push = threading.Event(), library.Matcher.push

    def slow(matcher: library.Matcher, tokens: tuple[int, ...]) -> None:
        if tokens:
            goes_on.wait(HANG_LIMIT_S)
        push(matcher, tokens)

    monkeypatch.setattr(library.Matcher, "push", slow)
    rig = Rig()
    held = rig.coordinator.create(1, 40, 8, grammar=ALTERNATING)
    free = rig.coordinator.create(2, 40, 20)
    assert rig.coordinator.admit(held, 64)
    rig.run_until(lambda: len(held.tokens) == 1)
    assert rig.coordinator.admit(free, 64)
    rig.run_until(lambda: free.outcome == "length")
    assert len(held.tokens) == 1
    goes_on.set()
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_no_step_waits_for_the_mask_of_a_slow_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a step would wait for it: its request sits out until the mask is there."""
    monkeypatch.setattr(executor, "mask_wait_s", lambda _: 60.0)
    monkeypatch.setattr(grammars, "QUICK_S", -1.0)
    goes_on, push = threading.Event(), library.Matcher.push_slow

    def slow(matcher: library.Matcher, token: int, pushes: library.SlowPushes) -> None:
        goes_on.wait(HANG_LIMIT_S)
        push(matcher, token, pushes)

    monkeypatch.setattr(library.Matcher, "push_slow", slow)
    rig = Rig()
    held = rig.coordinator.create(1, 40, 8, grammar=ALTERNATING)
    free = rig.coordinator.create(2, 40, 20)
    assert rig.coordinator.admit(held, 64)
    rig.run_until(lambda: len(held.tokens) == 1)
    assert rig.coordinator.admit(free, 64)
    began_s = time.monotonic()
    rig.run_until(lambda: free.outcome == "length")
    assert time.monotonic() - began_s < 60.0, "a step has waited"
    assert len(held.tokens) == 1
    goes_on.set()
    rig.run()
    assert not rig.wrong()
    assert rig.executor.counters.late_masks == 0
    rig.check_end()


def test_masks_of_slow_grammars_delay_no_other_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are threads for quick ones, which have no help."""
    monkeypatch.setattr(grammars.Grammars, "_work_along", lambda _: None)
    monkeypatch.setattr(grammars, "QUICK_S", -1.0)
    goes_on = threading.Event()
    monkeypatch.setattr(library.Matcher, "push_slow", lambda *_: goes_on.wait(HANG_LIMIT_S))
    rig = Rig()
    sources = [f"{LETTER}\n// {number}" for number in range(grammars.MASK_THREADS)]
    slow = [rig.coordinator.create(number, 40, 8, grammar=source) for number, source in enumerate(sources)]
    for life in slow:
        assert rig.coordinator.admit(life, 64)
        rig.run_until(lambda life=life: len(life.tokens) == 1)  # type: ignore[misc]
    monkeypatch.setattr(grammars, "QUICK_S", HANG_LIMIT_S)
    quick = rig.coordinator.create(9, 40, 8, grammar=ALTERNATING)
    assert rig.coordinator.admit(quick, 64)
    rig.run_until(lambda: quick.outcome == "length")
    assert [len(life.tokens) for life in slow] == [1] * len(slow)
    for life in slow:
        rig.coordinator.withdraw(life, "drop")
    goes_on.set()
    rig.run()
    rig.check_end()


def test_output_waits_for_a_slow_one_of_its_grammar_in_no_thread_of_others(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library lets one output of a grammar at a time in. So one that has just begun goes to the slow ones."""
    monkeypatch.setattr(grammars, "QUICK_S", 0.01)
    build, queues = grammars._Build(LETTER, trials), idle_queues()
    waits = grammars.Grammar(build, (0, 0, 0), "", (), queues)
    is_held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        with build.turn:
            is_held.set()
            goes_on.wait(HANG_LIMIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(HANG_LIMIT_S)
    waits.work_or_hand_on(tools_of())
    assert not waits.has_mask
    assert queues.slow.get(block=False) is waits
    goes_on.set()
    holder.join()
    waits.work_or_hand_on(tools_of())
    assert waits.has_mask


def test_push_waits_for_a_mask_of_its_grammar_without_the_interpreter(trials: Trials) -> None:
    """In the library it would wait with it, and no other thread would run."""
    build, tools = grammars._Build("start: /[a-z]*/", trials), tools_of()
    held = grammar_of(build, owner="held")
    held.work(tools)
    held.advance(ord("a"))
    pushed = threading.Thread(target=held.work, args=(tools,))
    with build.turn:
        pushed.start()
        pushed.join(0.2)
        assert pushed.is_alive()
    pushed.join(HANG_LIMIT_S)
    assert held.has_mask


def test_owners_share_no_copies_of_a_grammar() -> None:
    found = Rig().executor._grammars
    one, same, other = (found.open(seat, LETTER, (), (0, 0, seat), owner) for seat, owner in enumerate("aab"))
    assert one._build is same._build is not other._build


def test_masks_of_owners_are_computed_in_turn() -> None:
    jobs = grammars._MaskJobs()
    build = cast(grammars._Build, None)
    first, second, third, other = (grammar_of(build, owner=owner) for owner in ("one", "one", "one", "other"))
    for job in (first, second, third, other, None):
        jobs.put(job)
    assert [jobs.get(), jobs.get(), jobs.get(), jobs.get()] == [first, other, second, third]
    assert not jobs.empty()
    assert jobs.get() is None
    assert jobs.empty()
    with pytest.raises(Empty):
        jobs.get(block=False)


class FakeCpuClock:
    """A thread has worked `step_s` more each time that it is asked."""

    def __init__(self, step_s: float) -> None:
        self._calls, self._step_s = count(), step_s

    def __call__(self) -> float:
        return self._step_s * next(self._calls)


def test_masks_that_take_long_together_end_their_output_as_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """0.15 s each, of 2 s and 0.005 s for each token."""
    monkeypatch.setattr(time, "thread_time", FakeCpuClock(0.15))
    rig = Rig()
    grows = rig.coordinator.create(1, 40, 90, grammar=ALTERNATING)
    good = rig.coordinator.create(2, 40, 90)
    for life in (grows, good):
        assert rig.coordinator.admit(life, 64)
    rig.run()
    (fault,) = [event.message for event in rig.coordinator.events if isinstance(event, Faulted)]
    words = (
        "output=13 tokens: cannot be held to its grammar any further: one mask took 0.15 s of 0.25, and all took 2.1 s"
    )
    assert fault.startswith(f"{words} of 2.0")
    assert len(grows.tokens) == 13
    error = ending_error(Ended(1, "r", "FAILED", fault, 0, ""))
    assert (type(error), status_of(error), param_of(error)) == (AnswerFailed, 500, "")
    (record,) = [record for record in caplog.records if record.message == "request faulted"]
    assert record.exc_info is None
    assert good.outcome == "length"
    rig.check_end()


def test_mask_that_takes_long_ends_its_output_as_failed(monkeypatch: pytest.MonkeyPatch, trials: Trials) -> None:
    clock = FakeCpuClock(0.0)
    monkeypatch.setattr(time, "thread_time", clock)
    grammar = grammar_of(grammars._Build(ALTERNATING, trials))
    grammar.work(tools_of())
    assert grammar.has_mask
    clock._step_s = 0.3
    grammar.advance(ord("a"))
    grammar.work(tools_of())
    with pytest.raises(CapacityError, match=r"output=1 tokens: cannot be .*: one mask took 0.3 s of 0.25"):
        grammar.check()


def test_tokens_of_a_request_that_leaves_are_not_pushed(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that comes back may have a hundred thousand, each of them slow."""
    pushed, push = list[Sequence[int]](), library.Matcher.push
    grammar = grammar_of(grammars._Build("start: /[a-z]*/", trials), (97, 98, 99))

    def leave(matcher: library.Matcher, tokens: Sequence[int]) -> None:
        pushed.append(tokens)
        push(matcher, tokens)
        grammar.cancel()

    monkeypatch.setattr(library.Matcher, "push", leave)
    grammar.work(tools_of())
    assert pushed == [(97,)]


def test_draws_wait_for_masks_as_long_as_a_step_takes() -> None:
    assert [grammars.mask_wait_s(step_s) for step_s in (0.0, 0.0001, 0.005, 0.1)] == [0.01, 0.002, 0.005, 0.01]


def test_output_ends_where_the_grammar_must() -> None:
    rig = Rig(runner=FakeRunner(eos=(EOS, EOS - 1)))
    life = rig.coordinator.create(1, 40, 8, grammar=LETTER, ignore_eos=False)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert life.outcome == "eos"
    assert len(life.tokens) == 2
    assert chr(life.tokens[0]).islower()
    assert life.tokens[1] in (EOS, EOS - 1)
    rig.check_end()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [("start: /(a/", "invalid regex"), ("start: x", "unknown name"), ("start: /(a{1,900}){1,900}b/", "")],
)
def test_grammar_that_cannot_be_built_ends_its_request_alone(grammar: str, words: str) -> None:
    rig = Rig()
    bad = rig.coordinator.create(1, 40, 8, grammar=grammar, ignore_eos=False)
    good = rig.coordinator.create(2, 40, 8)
    for life in (bad, good):
        assert rig.coordinator.admit(life, 64)
    rig.run()
    assert good.outcome == "length"
    if words:
        assert [words in event.message for event in rig.coordinator.events if isinstance(event, Faulted)] == [True]
    rig.check_end()


@pytest.mark.refuses("cannot be held to its grammar any further: {}")
def test_grammar_that_grows_while_its_output_is_drawn_is_no_fault_of_the_body(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its trial passes: the rule repeats itself at its right end, and has a state more with each token."""
    monkeypatch.setattr(library, "LIMITS", {**library.LIMITS, "max_items_in_row": 12})
    rig = Rig()
    grammar = 'start: line "\\n"\nline: /[ -~]/ line | /[ -~]/'
    grows = rig.coordinator.create(1, 40, 60, grammar=grammar, ignore_eos=False)
    good = rig.coordinator.create(2, 40, 80)
    for life in (grows, good):
        assert rig.coordinator.admit(life, 64)
    rig.run()
    (fault,) = [event.message for event in rig.coordinator.events if isinstance(event, Faulted)]
    count = re.match(
        r"output=(\d+) tokens: cannot be held to its grammar any further: .*Current row has 13 items", fault
    )
    assert count is not None
    assert "\n" not in fault
    assert int(count[1]) == len(grows.tokens) > 5
    error = ending_error(Ended(1, "r", "FAILED", fault, 0, ""))
    assert (type(error), status_of(error), param_of(error)) == (AnswerFailed, 500, "")
    (record,) = [record for record in caplog.records if record.message == "request faulted"]
    assert record.exc_info is None
    assert good.outcome == "length"
    rig.check_end()


def test_refusal_of_a_grammar_that_another_worker_built_is_no_fault_of_the_body() -> None:
    """A request comes back with tokens, to a worker that is busier."""
    made = Rig().executor._grammars
    resumed = made.open(0, "start: x", (ord("a"), ord("b")), (0, 0, 0))
    fresh = made.open(1, "start: x", (), (0, 0, 0))
    with pytest.raises(
        CapacityError, match=r"output=2 tokens: cannot be held to its grammar any further: .*unknown name"
    ):
        resumed.wait(time.monotonic() + HANG_LIMIT_S)
    with pytest.raises(BadInput, match=r"grammar=: .*unknown name"):
        fresh.wait(time.monotonic() + HANG_LIMIT_S)


def test_build_without_end_is_refused_and_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a grammar, and with another new one, decode to their ends while a process tries to build it."""
    started, start = list[subprocess.Popen[bytes]](), Children._start

    def record(children: Children) -> subprocess.Popen[bytes]:
        started.append(start(children))
        return started[-1]

    monkeypatch.setattr(Children, "_start", record)
    rig = Rig()
    bomb, free = rig.coordinator.create(1, 40, 8, grammar=CHAIN), rig.coordinator.create(2, 40, 8)
    assert rig.coordinator.admit(bomb, 64)
    rig.run_until(lambda: bool(started))
    started[0].send_signal(signal.SIGSTOP)  # it reaches no limit before the others have ended
    held = rig.coordinator.create(3, 40, 8, grammar=ALTERNATING)
    for life in (free, held):
        assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: bool(free.outcome and held.outcome))
    assert (bomb.outcome, free.outcome, held.outcome) == ("", "length", "length")
    started[0].kill()  # as its alarm does
    rig.run()
    assert bomb.outcome == "grammar=: takes more than 10 s or 1024 MiB to build (simplify it)"
    rig.check_end()
    rig.executor._grammars.close()


def test_matcher_that_takes_too_long_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(library.Matcher, "push", lambda matcher, tokens: goes_on.wait(HANG_LIMIT_S))
    monkeypatch.setattr(grammars, "GRAMMAR_LIMIT_S", 0.05)
    rig = Rig()
    life = rig.coordinator.create(1, 40, 8, grammar=ALTERNATING)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    goes_on.set()
    assert "takes more than 0.05 s" in life.outcome
    rig.check_end()


def test_fences_of_a_day_are_those_without_grammars() -> None:
    """No request with a grammar: no thread is started, and nothing waits for masks."""
    rig = a_day(simulated(1), SHARED)
    assert not rig.executor._grammars._threads


def test_longest_chain_of_rules_does_not_end_the_process() -> None:
    """The library recurses once or more for each of 8,000 rules."""
    command = [sys.executable, "-c", CHAINS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "built\n"), done.stderr


def test_build_that_several_requests_wait_for_has_one_time(matchers: type[FakeMatcher], trials: Trials) -> None:
    """A request that comes to a build of long ago fails with it; once it is built, the time is that of the copy."""
    build = grammars._Build(f"{ALTERNATING}\n// held", trials)
    first, second = (grammar_of(build) for _ in range(2))
    builder = threading.Thread(target=first.work, args=(tools_of(),))
    builder.start()
    while not matchers.built:
        time.sleep(0.001)
    assert build._since_s is not None
    build._since_s -= 2 * grammars.GRAMMAR_LIMIT_S
    second.work(tools_of())
    with pytest.raises(BadInput, match="takes more than 60 s"):
        second.check()
    matchers.goes_on.set()
    builder.join()
    second.check()
    second.work(tools_of())
    assert second.has_mask


def test_time_in_a_queue_does_not_count(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "GRAMMAR_LIMIT_S", 0.0)
    grammar = grammar_of(grammars._Build(LETTER, trials))
    time.sleep(0.01)
    grammar.check()


def test_what_is_wrong_with_the_tokenizer_is_not_told_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that no id of the model has; its vocabulary is built before the trial."""

    class Larger(ByteTokenizer):
        @property
        def grammar_tokens(self) -> dict[str, int]:
            return {"<|call|>": VOCAB}

    def refuse() -> NoReturn:
        raise ConfigError("vocab size too small", field="tokenizer.json")

    failed = failure_of(grammars._Build(LETTER, Trials(Larger(), VOCAB, (EOS,))), tools_of(refuse))
    assert isinstance(failed, ConfigError)


def test_trial_without_a_process_is_no_fault_of_the_grammar(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(trials._children, "_start", no_memory)
    failed = failure_of(grammars._Build(LETTER, trials))
    assert isinstance(failed, InternalError)
    assert "a grammar was not tried: [Errno 12] Cannot allocate memory" in str(failed)


def failure_of(build: grammars._Build, tools: grammars._Tools | None = None) -> HiSparseError:
    grammar = grammar_of(build)
    grammar.work(tools or tools_of())
    with pytest.raises(HiSparseError) as caught:
        grammar.check()
    return caught.value


def test_grammar_of_a_request_that_left_is_not_built(matchers: type[FakeMatcher]) -> None:
    rig = Rig()
    sources = [f"{ALTERNATING}\n// {number} held" for number in range(grammars.BUILD_THREADS)] + [LETTER]
    lives = [rig.coordinator.create(number, 40, 8, grammar=source) for number, source in enumerate(sources)]
    for life in lives:
        assert rig.coordinator.admit(life, 64)
        rig.turn()
    rig.coordinator.withdraw(lives[-1], "drop")
    rig.run_until(lambda: not lives[-1].placement)
    matchers.goes_on.set()
    rig.run()
    assert sorted(matchers.built) == sources[:-1]
    rig.check_end()


def test_builds_do_not_delay_the_masks_of_a_batch(matchers: type[FakeMatcher], monkeypatch: pytest.MonkeyPatch) -> None:
    """More builds than there are threads."""
    monkeypatch.setattr(grammars, "BUILD_THREADS", 1)
    monkeypatch.setattr(grammars, "MASK_THREADS", 1)
    rig = Rig()
    decodes = rig.coordinator.create(9, 40, 8, grammar=ALTERNATING)
    assert rig.coordinator.admit(decodes, 64)
    rig.run_until(lambda: len(decodes.tokens) >= 1)
    built = [rig.coordinator.create(number, 40, 8, grammar=f"{ALTERNATING}\n// {number} held") for number in range(3)]
    for life in built:
        assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: decodes.outcome == "length")
    assert not any(life.tokens for life in built)
    matchers.goes_on.set()
    rig.run()
    assert {life.outcome for life in built} == {"length"}
    rig.check_end()


def test_builds_begin_in_the_order_of_rank(matchers: type[FakeMatcher], monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner with many slow grammars; then one of another owner comes, whose turn is before the second of those."""
    monkeypatch.setattr(grammars, "BUILD_THREADS", 1)
    rig = Rig()
    ranks = [(0, 0, 1), (0, 1, 2), (0, 0, 3), (-1, 5, 4)]
    lives = [rig.coordinator.create(it[2], 40, 8, grammar=f"{ALTERNATING}\n// {it[2]} held") for it in ranks]
    for life, rank in zip(lives, ranks, strict=True):
        life.rank = rank
        assert rig.coordinator.admit(life, 64)
        rig.run_until(lambda: bool(matchers.built))
    rig.turn()
    matchers.goes_on.set()
    rig.run()
    assert [source.split()[-2] for source in matchers.built] == ["1", "4", "3", "2"]
    assert {life.outcome for life in lives} == {"length"}
    rig.check_end()


def test_slow_builds_of_one_owner_delay_no_owner_who_comes_later(matchers: type[FakeMatcher]) -> None:
    """An owner with a slow grammar for each thread; then one of another owner comes, as in the test before."""
    rig = Rig()
    ranks = [(0, turn, turn) for turn in range(grammars.BUILD_THREADS)]
    slow = [rig.coordinator.create(it[2], 40, 8, grammar=f"{ALTERNATING}\n// {it[2]} held") for it in ranks]
    for life, rank in zip(slow, ranks, strict=True):
        life.rank = rank
        assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(matchers.built) == grammars.BUILD_THREADS - 1)
    other = rig.coordinator.create(9, 40, 8, grammar=ALTERNATING)
    other.rank = 0, 0, 9
    assert rig.coordinator.admit(other, 64)
    rig.run_until(lambda: other.outcome == "length")
    assert not any(life.tokens for life in slow)
    matchers.goes_on.set()
    rig.run()
    assert {life.outcome for life in slow} == {"length"}
    rig.check_end()


def test_threads_of_builds_end_once_all_is_built(matchers: type[FakeMatcher]) -> None:
    rig = Rig()
    lives = [rig.coordinator.create(number, 40, 8, grammar=f"{ALTERNATING}\n// {number} held") for number in range(4)]
    for life in lives:
        assert rig.coordinator.admit(life, 64)
        rig.turn()
    rig.executor._grammars.close()
    matchers.goes_on.set()
    for thread in rig.executor._grammars._threads[: grammars.BUILD_THREADS]:
        thread.join(HANG_LIMIT_S)
    assert len(matchers.built) == len(lives)


def test_long_mask_of_one_request_does_not_delay_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has them is at work on it; another one helps."""
    goes_on, push, late = threading.Event(), library.Matcher.push, list[library.Matcher]()

    def slow(matcher: library.Matcher, tokens: tuple[int, ...]) -> None:
        if tokens and matcher in (late or [matcher]):
            late.append(matcher)
            goes_on.wait(HANG_LIMIT_S)
        push(matcher, tokens)

    monkeypatch.setattr(library.Matcher, "push", slow)
    rig = Rig()
    sources = "start: /[a-z]{60}/", ALTERNATING
    held, others = (rig.coordinator.create(number, 40, 8, grammar=source) for number, source in enumerate(sources))
    assert rig.coordinator.admit(held, 64)
    rig.run_until(lambda: bool(late))
    assert rig.coordinator.admit(others, 64)
    rig.run_until(lambda: others.outcome == "length")
    assert len(held.tokens) == 1
    goes_on.set()
    rig.run()
    assert held.outcome == "length"
    rig.check_end()


def test_draw_asks_for_help_only_where_one_mask_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long all masks before its own take together."""
    at_work, goes_on, push = threading.Event(), threading.Event(), library.Matcher.push

    def slow(matcher: library.Matcher, tokens: tuple[int, ...]) -> None:
        if tokens:
            at_work.set()
            goes_on.wait(HANG_LIMIT_S)
        push(matcher, tokens)

    monkeypatch.setattr(library.Matcher, "push", slow)
    monkeypatch.setattr(grammars.Grammars, "_work_along", lambda _: None)  # no thread takes what is asked
    info = cast(ModelInfo, SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(EOS,)))
    found = grammars.Grammars(
        make_streams("inline"), AdjustTables.allocate(2, VOCAB), ByteTokenizer(), info, threading.Event().set
    )
    first, second = (found.open(seat, "start: /[a-z]+/", (), (0, 0, seat)) for seat in (0, 1))
    try:
        assert first.wait(time.monotonic() + HANG_LIMIT_S) is not None
        assert second.wait(time.monotonic() + HANG_LIMIT_S) is not None
        found._help = SimpleQueue()
        first.advance(ord("a"))
        assert at_work.wait(HANG_LIMIT_S)
        second.advance(ord("b"))
        found._ask_help(60.0)
        assert found._help.empty(), "the mask at work is younger"
        found._mask_since_s -= 60.0
        found._ask_help(60.0)
        assert found._help.get_nowait()
        found._mask_since_s += 60.0
        monkeypatch.setattr(grammars, "HELP_AFTER_S", 0.001)
        monkeypatch.setattr(second, "check", lambda: None)
        while found._help.empty():  # the mask at work has taken longer than that
            assert second.wait(time.monotonic() + 0.2) is None
        goes_on.set()
        assert first.wait(time.monotonic() + HANG_LIMIT_S) is not None
        assert second.wait(time.monotonic() + HANG_LIMIT_S) is not None
        deadline_s = time.monotonic() + HANG_LIMIT_S
        while found._mask_since_s != inf and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert found._mask_since_s == inf, "no mask is at work"
    finally:
        goes_on.set()


def test_equal_grammars_are_built_once(matchers: type[FakeMatcher]) -> None:
    """Also where a thread asks for one that another thread builds."""
    rig = Rig()
    lives = [rig.coordinator.create(number, 40, 8 + number, seed=number, grammar=ALTERNATING) for number in range(4)]
    matchers.holds = ALTERNATING
    for life in lives:
        assert rig.coordinator.admit(life, 64)
        rig.turn()
    (build,) = rig.executor._grammars._building.values()
    rig.run_until(lambda: len(build._waiting) == len(lives) - 1)
    matchers.goes_on.set()
    rig.run()
    assert matchers.built == [ALTERNATING]
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("method", ["push", "copy"])
@pytest.mark.parametrize("error", [RuntimeError("a defect"), FakePanic("a defect")])
def test_failure_of_the_library_ends_its_request_alone(
    method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as there are threads, so that a request after them finds one only if none has ended."""
    original: Callable[..., object] = getattr(library.Matcher, method)

    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(library.Matcher, method, fail)
    rig = Rig()
    free = rig.coordinator.create(99, 40, 8)
    assert rig.coordinator.admit(free, 64)
    for number in range(grammars.BUILD_THREADS):
        assert rig.coordinator.admit(rig.coordinator.create(number, 40, 8, grammar=ALTERNATING), 64)
        rig.run()
    faults = [event.message for event in rig.coordinator.events if isinstance(event, Faulted)]
    words = "grammar=: the matcher failed: a defect (simplify it)"
    if method == "push":
        words = "output=1 tokens: cannot be held to its grammar any further: the matcher failed: a defect"
    assert faults == [words] * grammars.BUILD_THREADS
    monkeypatch.setattr(library.Matcher, method, original)
    good = rig.coordinator.create(100, 40, 8, grammar=ALTERNATING)
    assert rig.coordinator.admit(good, 64)
    rig.run()
    assert (free.outcome, good.outcome) == ("length", "length")
    rig.check_end()


def test_row_of_a_step_that_is_launched_again_is_not_durable_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    make_late(monkeypatch)
    note_durable, seen = Decoder.note_durable, list[int]()

    def checked(decoder: Decoder) -> Iterator[RunningRequest]:
        for request in note_durable(decoder):
            seen.append(request.position - request.durable_rows)
            yield request

    monkeypatch.setattr(Decoder, "note_durable", checked)
    rig = Rig()
    assert rig.coordinator.admit(rig.coordinator.create(1, 90, 12, grammar=ALTERNATING), 64)
    assert rig.coordinator.admit(rig.coordinator.create(2, 90, 12), 64)
    rig.run()
    assert seen
    assert min(seen) >= 0
    rig.check_end()


def test_rank_wishes_no_row_for_a_request_whose_mask_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "mask_wait_s", lambda _: 60.0)
    rig = Rig()
    held, free = (rig.coordinator.create(number, 40, 30, grammar=it) for number, it in enumerate((ALTERNATING, "")))
    for life in (held, free):
        assert rig.coordinator.admit(life, 64)
        rig.run_until(lambda life=life: len(life.tokens) >= 1)  # type: ignore[misc]
    rig.run_until(lambda: min(len(held.tokens), len(free.tokens)) >= 2)
    for request in rig.executor._running:
        if request.grammar is not None:
            request.grammar.wait(time.monotonic() + HANG_LIMIT_S)
    assert rig.executor._wish().rows == 2
    monkeypatch.setattr(grammars.Grammar, "has_mask", False)
    assert rig.executor._wish().rows == 1


def test_masks_do_not_wait_for_rows_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(simulated(1)())
    life = rig.coordinator.create(1, 40, 8, grammar=ALTERNATING)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 1)
    load = cast(SimulatedStreams, rig.streams).load
    load.launch("a context that returns", lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(load, "runnable", lambda: False)
        rig.run_until(lambda: life.outcome == "length")
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_cancelled_build_that_has_not_begun_is_dropped() -> None:
    """Else requests that come and leave behind better ranks would pile up."""
    queues, ranks = idle_queues(), [(0, 0, 2), (0, 0, 1), (0, 0, 3)]
    build, jobs = cast(grammars._Build, None), queues.builds
    first, second, third = (grammars.Grammar(build, it, "", (), queues) for it in ranks)
    second.cancel()
    with jobs.next() as one, jobs.next() as other:
        assert (one, other) == (first, third)
