"""Requests with a grammar on a worker: tokens are the oracle's under the masks, late ones too; others go on."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from protocol import grammars as library
from protocol.grammars import Mask
from protocol.messages import Faulted
from tests.support.fakes.hash_runner import ALTERNATING, EOS, SHARED, FakeRunner
from tests.support.worker_rig import Rig
from tests.worker.loop.test_fences import a_day, come_back, simulated
from worker.loop import executor, grammars

#: Bytes that no fake prompt needs: any of them, and then the end.
LETTER = "start: /[a-z]/"


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask is late once, so that every step that draws is launched twice."""
    wait, calls = grammars.Grammar.wait, Counter[grammars.Grammar]()

    def late_once(grammar: grammars.Grammar, until_s: float) -> Mask | None:
        if not until_s:  # before a prompt's last chunk, which is launched once
            return wait(grammar, until_s)
        calls[grammar] += 1
        return None if calls[grammar] % 2 else wait(grammar, until_s + 60)

    monkeypatch.setattr(grammars.Grammar, "wait", late_once)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("hot_slots", [0, 64])
def test_tokens_follow_the_masks_of_a_retracted_request(
    is_late: bool, hot_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_late:
        make_late(monkeypatch)
    for seed in range(3):
        rig = Rig(simulated(seed)())
        coordinator = rig.coordinator
        held = [coordinator.create(number, 90, 30, seed=number, grammar=ALTERNATING) for number in (1, 2)]
        free = coordinator.create(3, 40, 20, seed=3)
        assert coordinator.admit(held[0], hot_slots)
        assert coordinator.admit(held[1], 64)
        assert coordinator.admit(free, 64)
        rig.run_until(lambda it=held: min(len(life.tokens) for life in it) >= 5)  # type: ignore[misc]
        coordinator.withdraw(held[0], "keep")
        come_back(rig, held[0], 64)
        coordinator.withdraw(held[1], "drop")
        come_back(rig, held[1], hot_slots)
        rig.run()
        assert not rig.wrong()
        assert [len(life.tokens) for life in coordinator.lives] == [30, 30, 20]
        rig.check_end()
        assert not is_late or rig.executor.counters.surplus_tokens >= 50


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
    assert rig.executor.counters.surplus_tokens == 11


def test_request_without_grammar_keeps_its_steps_while_a_mask_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one request waits for its mask outside of the batch, the other one decodes to its end meanwhile."""
    monkeypatch.setattr(executor, "MASK_WAIT_S", 0.0)
    goes_on, push = threading.Event(), library.Matcher.push

    def slow(matcher: library.Matcher, tokens: tuple[int, ...]) -> None:
        if tokens:
            goes_on.wait(60)
        push(matcher, tokens)

    monkeypatch.setattr(library.Matcher, "push", slow)
    rig = Rig()
    held = rig.coordinator.create(1, 40, 8, grammar=ALTERNATING)
    free = rig.coordinator.create(2, 40, 20)
    assert rig.coordinator.admit(held, 64)
    assert rig.coordinator.admit(free, 64)
    rig.run_until(lambda: free.outcome == "length")
    assert len(held.tokens) == 1
    goes_on.set()
    rig.run()
    assert not rig.wrong()
    rig.check_end()


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


def test_matcher_that_takes_too_long_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(library.Matcher, "push", lambda matcher, tokens: goes_on.wait(60))
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
