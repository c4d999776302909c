"""Planted protocol bugs: without faults no check sees them; under faults a named invariant does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice

import pytest

from protocol.errors import InternalError
from protocol.messages import BOTH, DECODE, PREFILL, ROLES
from tests.sim.group_mutants import GROUP_MUTANTS, SHOWN_CALM
from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate
from tests.sim.shape import Shape
from tests.sim.trace import Violation

#: Undisturbed seeds that a mutant must pass.
CALM_SEEDS = 3
#: Seeds under faults by which it must be caught.
SEEDS_MAX = 200
#: A seed on which a bug shows as nothing but requests that wait for ever does not count as having caught it.
TIME_LIMIT = "did not end within"
#: Of a prompt that is handed over within a node, which few clusters do.
OF_NEIGHBOURS = {"take_the_prompt_of_a_worker_that_may_live"}

#: Of cached pages, and of those among them that go to another node.
OF_REUSE = {
    "cache_a_prompt_before_it_is_durable",
    "evict_a_page_that_is_held",
    "evict_without_a_word_to_the_journal",
    "share_pages_that_are_given_out_in_the_same_turn",
}
OF_REUSE_APART = {"let_a_transfer_write_to_shared_pages"}

#: Of drafts; checks see them without faults, too.
OF_DRAFTS = {"count_rejected_rows_as_durable", "write_more_rows_than_granted"}

#: Some are found after a hundred seeds: a minute on an idle machine, four among other tests.
pytestmark = [pytest.mark.sim, pytest.mark.mutation, pytest.mark.timeout(1_500)]


def test_mutants_are_numerous() -> None:
    assert len(MUTANTS) >= 12


def seeds_of(name: str, *, roomy: bool = False) -> Iterator[int]:
    """Where what the bug is about can happen at all."""
    if name in GROUP_MUTANTS:
        return filter(lambda seed: shape_of(seed, roomy=roomy).groups, count())
    if name in OF_DRAFTS:
        return filter(lambda seed: shape_of(seed, roomy=roomy).draft_tokens, count())
    if name in OF_REUSE | OF_REUSE_APART and not roomy:
        return filter(lambda seed: reuses(shape_of(seed), apart=name in OF_REUSE_APART), count())
    return filter(has_neighbours, count()) if name in OF_NEIGHBOURS and not roomy else count()


def reuses(shape: Shape, *, apart: bool) -> bool:
    """`apart`: prompts come to be decoded on another node alone."""
    by_role = {
        role: {shape.workers[it] for it in shape.workers if shape.capacity_of(it).role == role} for role in ROLES
    }
    is_apart = not by_role[BOTH] and not by_role[PREFILL] & by_role[DECODE]
    return shape.settings.prefix_reuse != "off" and (is_apart or not apart)


def shape_of(seed: int, *, roomy: bool = False) -> Shape:
    return Shape.draw(random.Random(f"{seed} shape"), roomy=roomy)


def has_neighbours(seed: int) -> bool:
    """Whether one worker of that seed's cluster prefills for another one of its node, and for no other."""
    shape = shape_of(seed)
    prefilling = [name for name in shape.workers if shape.capacity_of(name).role == PREFILL]
    decoding = [name for name in shape.workers if shape.capacity_of(name).decodes]
    return any(shape.workers[one] == shape.workers[other] for one in prefilling for other in decoding)


#: Mutants that the ledger itself refuses to carry out.
REFUSED_BY_THE_LEDGER = {"share_pages_that_are_given_out_in_the_same_turn"}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_breaks_an_invariant(name: str) -> None:
    """SGLang #36591, #24578: pages of who is retracted or aborted, given away before their worker says Released."""
    plant = MUTANTS[name]
    for seed in islice(seeds_of(name, roomy=True), 0 if name in SHOWN_CALM | OF_DRAFTS else CALM_SEEDS):
        assert simulate(seed, faults=False, mutant=plant()).violation is None
    broken = (simulate(seed, mutant=plant()).violation for seed in islice(seeds_of(name), SEEDS_MAX))
    violation = next((it for it in broken if it is not None and TIME_LIMIT not in str(it)), None)
    wanted = InternalError if name in REFUSED_BY_THE_LEDGER else Violation
    assert isinstance(violation, wanted), f"caught by {violation!r}"
