"""Planted protocol bugs: without faults no check sees them; under faults a named invariant does."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

from protocol.errors import InternalError
from tests.sim import group_mutants, mutant_hints, standby_mutants
from tests.sim.mutant_hints import OF_DRAFTS, ORDERS, SEEDS_MAX, TIME_LIMIT, read_hints, search, seeds_of, verdict
from tests.sim.mutants import MUTANTS
from tests.sim.run import Result, simulate
from tests.sim.trace import Trace, Violation
from tests.support.history import in_turn

#: Mutants that need no fault to show.
SHOWN_CALM = group_mutants.SHOWN_CALM | standby_mutants.SHOWN_CALM
#: Undisturbed seeds that a mutant must pass: the first in every third run, the others in deep tests.
CALM_SEEDS = 3
#: Mutants that must pass them, in three parts. Each run has one part pass the first seed.
CALM_NAMES = [[name for name in MUTANTS if name not in SHOWN_CALM | OF_DRAFTS][part::3] for part in range(3)]
#: Seeds with which each order is played without its bug.
ORDER_SEEDS = 3
#: Mutants that the ledger itself refuses to carry out.
REFUSED_BY_THE_LEDGER = {"share_pages_that_are_given_out_in_the_same_turn"}

#: One that has no hint may be found after a hundred seeds: a minute on an idle machine, four among other tests.
pytestmark = [pytest.mark.sim, pytest.mark.mutation, pytest.mark.timeout(1_500)]


class StaleHint(UserWarning):
    """Seeds that do not catch their mutant any more. `make mutants` finds others."""


def caught(name: str) -> BaseException | None:
    """Return what catches the mutant: at the first of its hints that does, or else at the first seed."""
    hints = read_hints().get(name, [])
    at_hint = next(filter(None, (verdict(name, seed) for seed in hints)), None)
    if at_hint is not None:
        return at_hint
    found = next(search(name), None)
    if found is not None:
        before = f"no longer by any of {hints}" if hints else "it has no hint"
        warnings.warn(StaleHint(f"{name} is caught by seed {found[0]}, {before}: run `make mutants`"), stacklevel=2)
    return found[1] if found else None


def passes_undisturbed(name: str, place: int) -> bool:
    """Return whether no invariant breaks in the seed at `place` of the mutant's seeds, without faults."""
    seed = next(islice(seeds_of(name, roomy=True), place, None))
    return simulate(seed, faults=False, mutant=MUTANTS[name]()).violation is None


def test_mutants_are_numerous() -> None:
    assert len(MUTANTS) >= 12


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_breaks_an_invariant(name: str) -> None:
    """SGLang #36591, #24578: pages of who is retracted or aborted, given away before their worker says Released."""
    if name in in_turn(CALM_NAMES):
        assert passes_undisturbed(name, 0)
    violation = caught(name)
    wanted = InternalError if name in REFUSED_BY_THE_LEDGER else Violation
    assert isinstance(violation, wanted), f"caught by {violation!r}"


@pytest.mark.parametrize("name", ORDERS)
def test_order_breaks_nothing_without_its_bug(name: str) -> None:
    for seed in islice(seeds_of(name), ORDER_SEEDS):
        assert simulate(seed, order=ORDERS[name]).violation is None, f"seed {seed}"


@pytest.mark.deep
@pytest.mark.parametrize("place", range(1, CALM_SEEDS))
def test_no_planted_bug_shows_in_a_further_undisturbed_seed(place: int) -> None:
    assert [name for names in CALM_NAMES for name in names if not passes_undisturbed(name, place)] == []


class TestHints:
    """Of one mutant, with verdicts in place of runs."""

    NAME = "deliver_before_commit"

    @pytest.fixture(autouse=True)
    def _verdicts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[int] = []
        late = Violation("I8", f"r1 {TIME_LIMIT} 150 s")
        self.breaks = {5: late, **{seed: Violation("I5", "planted") for seed in (7, 9, 12, 13)}}
        self.hints = tmp_path / "hints.json"
        monkeypatch.setattr(mutant_hints, "HINTS", self.hints)
        monkeypatch.setattr(mutant_hints, "simulate", self.run)

    def run(self, seed: int, mutant: object, favoured: object, order: object) -> Result:
        self.runs.append(seed)
        return Result(seed, 0, self.breaks.get(seed), Trace(float), 0.0, 0.0)

    @pytest.mark.parametrize(("hints", "runs"), [([7, 9], [7]), ([8, 5, 7, 9], [8, 5, 7])])
    def test_no_seed_runs_behind_a_hint_that_holds(self, hints: list[int], runs: list[int]) -> None:
        self.hints.write_text(json.dumps({self.NAME: hints}))
        assert caught(self.NAME) is self.breaks[7]
        assert self.runs == runs

    @pytest.mark.parametrize(
        ("hints", "said"),
        [
            ('{"deliver_before_commit": [5, 6]}', r"no longer by any of \[5, 6\]: run `make mutants`"),
            ("{}", "it has no hint"),
        ],
    )
    def test_stale_or_missing_hint_warns_and_the_search_decides(self, hints: str, said: str) -> None:
        self.hints.write_text(hints)
        with pytest.warns(StaleHint, match=f"{self.NAME} is caught by seed 7, {said}"):
            assert caught(self.NAME) is self.breaks[7]
        assert self.runs[-8:] == [*range(8)]

    def test_bug_that_no_seed_of_the_search_catches_is_not_caught(self) -> None:
        self.hints.write_text("{}")
        self.breaks = {SEEDS_MAX: self.breaks[7]}
        assert caught(self.NAME) is None
        assert self.runs == [*range(SEEDS_MAX)]

    def test_search_writes_hints_of_what_is_there(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.hints.write_text('{"removed": [1]}')
        monkeypatch.setattr(mutant_hints, "MUTANTS", {self.NAME: MUTANTS[self.NAME]})
        assert mutant_hints.main((), ThreadPoolExecutor) == 0
        assert read_hints() == {self.NAME: [7, 9, 12]}
        self.breaks.clear()
        assert mutant_hints.main((), ThreadPoolExecutor) == 1
        assert read_hints() == {}
        found = "; ".join(f"seed {seed}: I5: planted" for seed in (7, 9, 12))
        assert capsys.readouterr().out == f"{self.NAME}: {found}\n{self.NAME}: not caught\n"

    def test_search_of_some_keeps_the_hints_of_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = "grant_before_commit"
        self.hints.write_text(json.dumps({self.NAME: [1], other: [2]}))
        monkeypatch.setattr(mutant_hints, "MUTANTS", {name: MUTANTS[name] for name in (self.NAME, other)})
        assert mutant_hints.main([self.NAME], ThreadPoolExecutor) == 0
        assert read_hints() == {self.NAME: [7, 9, 12], other: [2]}
