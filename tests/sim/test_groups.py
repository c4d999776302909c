"""What lives of groups are simulated: ranks that wait, are lost, are replaced, or are refused as stale."""

from __future__ import annotations

import random
from itertools import count, islice

import pytest

from protocol.messages import GroupMember
from tests.sim.groups import LAG, UNITS_MAX, SimGroup
from tests.sim.run import simulate
from tests.sim.shape import GROUP_ODDS, Shape
from tests.sim.trace import Violation
from worker.group.agreement import Round, RoundKind, Wish

pytestmark = pytest.mark.sim

#: Seeds with groups that are looked at, at most.
SEEDS = 12


def group_of(*names: str) -> SimGroup:
    return SimGroup("g0", 1, names, random.Random(0))


def run_round(group: SimGroup, kind: RoundKind, number: int, wish: Wish) -> None:
    for rank in range(len(group.names)):
        group.launch(rank, Round(number, kind, 0), wish)


def shape_of(seed: int) -> Shape:
    return Shape.draw(random.Random(f"{seed} shape"), roomy=False)


def test_share_of_the_clusters_has_groups() -> None:
    shapes = [shape_of(seed) for seed in range(400)]
    share = sum(bool(shape.groups) for shape in shapes) / len(shapes)
    assert abs(share - GROUP_ODDS) < 0.1
    grouped = [shape for shape in shapes if shape.groups]
    assert {len(shape.groups) for shape in grouped} == {1, 2}
    assert any(len(names) == 3 for shape in grouped for names in shape.groups.values())
    for shape in grouped:
        ranks = [name for names in shape.groups.values() for name in names]
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(shape.workers)


def test_ranks_wait_end_and_are_replaced() -> None:
    """Each of these happens in a few seeds; a simulation without them would show nothing of groups."""
    said = dict.fromkeys(("awaits=w", "has lost a peer", "incarnation=2)", "has replaced it"), 0)
    for seed in islice(filter(lambda seed: shape_of(seed).groups, count()), SEEDS):
        result = simulate(seed)
        assert result.violation is None
        for line in result.trace.lines():
            for text in said:
                said[text] += text in line
        if all(said.values()):
            break
    assert all(said.values()), said


def test_round_has_run_when_all_ranks_have_launched_it() -> None:
    group = group_of("w0", "w1")
    this = Round(0, RoundKind.WISHES, 0)
    group.launch(0, this, Wish(rows=1))
    assert group.missing(0) == ["w1"]
    with pytest.raises(Violation, match=r"rounds: round 0 of g0 is read, and \['w1'\] have not launched it"):
        group.wishes(0)
    group.launch(1, this, Wish())
    assert group.wishes(0) == [Wish(rows=1), Wish()]
    assert group.missing(1) == ["w0", "w1"]


def test_ranks_that_launch_different_rounds_are_a_violation() -> None:
    group = group_of("w0", "w1")
    group.launch(0, Round(0, RoundKind.DECODE, 1), Wish())
    with pytest.raises(Violation, match="rounds: w1 launches"):
        group.launch(1, Round(0, RoundKind.DECODE, 2), Wish())


def test_prompt_rounds_beyond_the_bound_are_a_violation() -> None:
    """Only while a rank wishes to decode in all wishes that can have decided the round."""
    group = group_of("w0", "w1")
    for number in range(UNITS_MAX + LAG):
        run_round(group, RoundKind.PROMPT, number, Wish(rows=int(number >= UNITS_MAX)))
    with pytest.raises(Violation, match=f"{UNITS_MAX + LAG + 1} prompt rounds of g0 while ranks decode"):
        run_round(group, RoundKind.PROMPT, UNITS_MAX + LAG, Wish(rows=1))


def test_ranks_are_members_of_one_incarnation() -> None:
    assert group_of("w0", "w1").member(1) == GroupMember("g0", 1, 2, 1)
