"""Plans of dense block-FP8 products on Hopper, and how their work is dealt: on paper, as the kernel computes it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cuda.block_plans import (
    APART_TOKENS,
    CHOICES,
    CROSSOVER_TOKENS,
    EXPERT_PLANS,
    SHARED_BYTES_MAX,
    TILE_EXPERT_BYTES,
    UNBOUNDED,
    ExpertPlans,
    LinearPlan,
    Work,
    crossover_of,
    expert_plans_of,
    expert_tiles,
    fits,
    forms,
    plan_of,
    plans,
    work_of,
)

#: Shared memory that a Hopper gives a block of threads, and static bytes of the kernel.
SHARED_MOST, STATIC = 232_448, 16
PLANS = st.sampled_from(plans())


@st.composite
def works(draw: st.DrawFn) -> Work:
    n, k = draw(st.integers(2, 4000)), draw(st.integers(16, 20_000))
    return work_of(n, k, draw(st.integers(1, 3000)), draw(PLANS), draw(st.sampled_from([1, 2, 7, 114, 132])))


def parts(work: Work, number: int) -> list[tuple[int, int, int]]:
    """Tile, first and last + 1 block of each part of a range: the kernel's loop."""
    found, unit, end = [], work.begin(number), work.begin(number + 1)
    while unit < end:
        tile, first = divmod(unit, work.blocks)
        last = min(work.blocks, first + end - unit)
        found.append((tile, first, last))
        unit += last - first
    return found


def givers(work: Work, number: int, tile: int) -> list[int]:
    """Ranges that the owner of `tile` waits for, in the kernel's order."""
    found, giver = [], number + 1
    while giver < work.ranges and work.begin(giver) < (tile + 1) * work.blocks:
        found.append(giver)
        giver += 1
    return found


@settings(max_examples=200)
@given(work=works())
def test_every_unit_lies_in_one_range(work: Work) -> None:
    assert work.begin(0) == 0
    assert work.begin(work.ranges) == work.units
    sizes = [work.begin(number + 1) - work.begin(number) for number in range(work.ranges)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    covered = [unit for number in range(work.ranges) for unit in _units(work, number)]
    assert covered == list(range(work.units))


def _units(work: Work, number: int) -> list[int]:
    return [tile * work.blocks + block for tile, first, last in parts(work, number) for block in range(first, last)]


@settings(max_examples=200)
@given(work=works())
def test_owners_add_each_tile_once_in_ascending_order(work: Work) -> None:
    """From the parts alone: who begins inside a tile gives, who holds its first unit and not its last awaits."""
    given: dict[int, list[tuple[int, int, int]]] = {}  # by tile: givers with their blocks
    owners: dict[int, int] = {}
    for number in range(work.ranges):
        for place, (tile, first, last) in enumerate(parts(work, number)):
            if first:
                assert place == 0, "given before this range waits for anything"
                given.setdefault(tile, []).append((number, first, last))
            else:
                assert tile not in owners
                owners[tile] = number
    assert sorted(owners) == list(range(work.units // work.blocks))
    for tile, owner in owners.items():
        held = next(last for at, first, last in parts(work, owner) if at == tile and not first)
        awaited = givers(work, owner, tile) if held < work.blocks else []
        assert awaited == sorted(awaited) == [number for number, *_ in given.get(tile, [])]
        assert [first for _, first, _ in given.get(tile, [])] == [held, *(last for *_, last in given.get(tile, []))][
            :-1
        ]
        # Block of threads ranges - 1 - number takes range `number`: an owner waits for blocks of lower numbers alone.
        blocks = [work.ranges - 1 - number for number in awaited]
        assert all(block < work.ranges - 1 - owner for block in blocks)


@settings(max_examples=200)
@given(work=works())
def test_memory_for_sums_is_there_wherever_a_tile_is_split(work: Work) -> None:
    split = any(first for number in range(work.ranges) for _, first, _ in parts(work, number))
    assert work.splits_tiles or not split


@settings(max_examples=100)
@given(n=st.integers(1, 30_000), k=st.integers(1, 20_000), tokens=st.integers(1, 5000), held=st.integers(1, 200))
def test_ranges_have_their_least_units_and_no_more_than_the_card_holds(n: int, k: int, tokens: int, held: int) -> None:
    for plan in plans():
        work = work_of(n, k, tokens, plan, held)
        assert 1 <= work.ranges <= max(1, held * plan.resident // plan.cluster)
        assert work.ranges == 1 or work.units >= (work.ranges - 1) * plan.least


@pytest.mark.parametrize("plan", sorted({plan for plan, _ in forms()}), ids=str)
def test_a_plan_is_one_that_the_kernel_can_be_compiled_for(plan: LinearPlan) -> None:
    assert plan.tokens in (16, 32, 64, 128, 256)
    assert plan.teams in (2, 3, 4)
    assert plan.chunk in (1, 2, 4)
    assert plan.shared_bytes + STATIC <= SHARED_MOST // plan.resident
    assert plan.stages * 16 <= 256, "two barriers for each stage"


def tiles_of(shape: tuple[int, int], *counts: int) -> list[int]:
    """Tokens of a plan's tile, by count of tokens; 0: Triton."""
    return [getattr(plan_of(*shape, tokens), "tokens", 0) for tokens in counts]


def test_each_shape_and_count_of_tokens_has_its_plan() -> None:
    large, medium, small, least = (7168, 16384), (24576, 1536), (2048, 7168), (576, 7168)
    assert tiles_of(large, 1, 16, 17, 33, 65, 129, 5000) == [16, 16, 32, 64, 128, 256, 256]
    assert tiles_of(medium, 1, 32, 33, 128, 129) == [0, 0, 64, 128, 256]
    assert tiles_of(small, 1, 16, 17, 33, 65, 129, 600) == [0, 0, 32, 64, 128, 256, 256]
    assert tiles_of(least, 1, 64, 512) == [0, 0, 0]
    assert [crossover_of(*shape) for shape in (large, medium, small, least)] == [1280, 1280, 576, CROSSOVER_TOKENS]


def test_rows_of_a_decode_batch_share_one_tile() -> None:
    for choice in CHOICES:
        found = [plan_of(2 * -(-choice.values // 256), 128, tokens) for tokens in range(1, APART_TOKENS + 1)]
        assert any(found)
        assert all(plan is None or plan.tokens >= tokens for tokens, plan in enumerate(found, 1))


def test_a_weight_that_copies_cannot_reach_goes_to_triton() -> None:
    for shape in ((7169, 16384), (7168, 16392)):
        assert not fits(*shape)
        assert plan_of(*shape, 64) is None
        assert crossover_of(*shape) == CROSSOVER_TOKENS


def test_tables_lead_from_large_weights_and_few_tokens_to_small_and_many() -> None:
    assert [choice.values for choice in CHOICES] == sorted((choice.values for choice in CHOICES), reverse=True)
    for choice in CHOICES:
        assert [*choice.plans] == sorted(choice.plans)
        assert [*choice.plans][-1] == UNBOUNDED
        for most, plan in choice.plans.items():
            assert plan is None or most == UNBOUNDED or plan.tokens <= most


def test_pairs_of_plans_for_experts_share_their_tiles_of_tokens() -> None:
    assert [*EXPERT_PLANS] == sorted(EXPERT_PLANS)
    for gated, grouped in filter(None, EXPERT_PLANS.values()):
        assert gated.tokens == grouped.tokens
        jobs = 4 * (256 + 2048 * 8 // gated.tokens)  # bytes: 256 experts held, a whole piece of a prompt
        assert max(gated.shared_bytes, grouped.shared_bytes) + jobs + STATIC <= SHARED_MOST


def test_small_experts_and_those_that_copies_cannot_reach_go_to_triton() -> None:
    assert expert_plans_of(2048, 7168, 16)
    assert expert_plans_of(256, 512, 16) is None
    assert expert_plans_of(2047, 7168, 16) is None
    assert expert_plans_of(2048, 7176, 16) is None
    assert expert_plans_of(2048, 7168, 1) is None


@settings(max_examples=200)
@given(counts=st.lists(st.integers(0, 4), max_size=6), row_tiles=st.integers(1, 9))
def test_every_tile_of_an_expert_is_computed_once_beside_those_of_its_rows(counts: list[int], row_tiles: int) -> None:
    """place_of of src/block_linear.cuh: `counts` are tiles of tokens by expert."""
    jobs = [expert for expert, count in enumerate(counts) for _ in range(count)]
    found = []
    for tile in range(len(jobs) * row_tiles):
        expert = jobs[tile // row_tiles]
        first, end = jobs.index(expert), len(jobs) - jobs[::-1].index(expert)
        number = tile - first * row_tiles
        found.append((expert, number // (end - first), first + number % (end - first)))
    assert sorted(found) == sorted((expert, row, job) for job, expert in enumerate(jobs) for row in range(row_tiles))
    assert found == sorted(found), "tiles that read the same weights follow each other"


@pytest.mark.parametrize("held", [1, 8, 32, 128, 256, 448, 512])
@pytest.mark.parametrize("plans", [plans for plans in EXPERT_PLANS.values() if plans])
def test_tiles_of_a_piece_are_listed_in_shared_memory(plans: ExpertPlans, held: int) -> None:
    most = plans.assignments_max(held)
    for assignments in {1, held, most // 2, most} - {0}:
        tiles = expert_tiles(min(assignments, most), held, plans.gated.tokens)
        for plan in plans:
            assert plan.shared_bytes + TILE_EXPERT_BYTES * tiles <= SHARED_BYTES_MAX
    assert most >= min(held, 64)  # a step's tokens with their choices go in pieces of eight tokens or more


def test_experts_of_a_whole_model_take_a_block_of_prompts_in_two_pieces() -> None:
    """All 256 experts on one card and 4,096 tokens of eight choices: 510 tiles, of which 444 can be listed."""
    plans = EXPERT_PLANS[UNBOUNDED]
    assert plans is not None
    assert expert_tiles(4096 * 8, 256, plans.gated.tokens) == 510
    assert 2048 < plans.assignments_max(256) // 8 < 4096
    assert plans.assignments_max(32) // 8 >= 4096
