"""Planted protocol bugs: nobody notices them while nothing goes wrong; under faults a named invariant does."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate
from tests.sim.trace import Violation

#: Undisturbed seeds that a mutant must pass.
CALM_SEEDS = 3
#: Seeds under faults by which it must be caught.
SEEDS_MAX = 200

pytestmark = [pytest.mark.sim, pytest.mark.mutation]


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 12


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught_by_an_invariant(name: str) -> None:
    """SGLang #36591, #24578: pages of who is retracted or aborted, given away before their worker says Released."""
    plant = MUTANTS[name]
    for seed in range(CALM_SEEDS):
        assert simulate(seed, faults=False, mutant=plant()).violation is None
    broken = (simulate(seed, mutant=plant()).violation for seed in range(SEEDS_MAX))
    violation = next((it for it in broken if it is not None), None)
    assert isinstance(violation, Violation), f"caught by {violation!r}"
    assert "did not end within" not in str(violation), "that is a timeout"
