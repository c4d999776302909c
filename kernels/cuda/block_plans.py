"""Which kernel forms a block-FP8 product on Hopper, and how src/block_linear.cuh deals its work. Pure.

A *unit* is one block of K of one tile: `LinearPlan.rows` rows of weights by `LinearPlan.tokens` tokens. All units lie
in a line, the blocks of a tile together, tiles of tokens fastest. Block of threads b of a launch takes range ranges -
1 - b of that line. A range that begins inside of a tile first of all gives the sums of that part away; the range that
holds the tile's first unit owns the tile and adds them in ascending order. Givers of a tile have higher numbers than
its owner: they were launched before it, and wait for nothing before they give. (Stream-K: Osama, Merrill, Cecka,
Garland, Owens, 2023.) By experts ranges are whole tiles, whose number the device alone knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

BLOCK: Final = 128
TEAM_ROWS: Final = 64
#: Behind the stages in shared memory: two barriers of 8 bytes for each; before them: room to align.
BARRIER_BYTES: Final = 256
ALIGN_BYTES: Final = 1024
#: Copies of the tensor engine: bytes of a row of codes come in whole parts, and so does the address of a tensor.
COPY_BYTES: Final = 16
#: Shared memory that a block of threads gets at most, less what the kernel declares with a fixed size.
SHARED_BYTES_MAX: Final = (227 << 10) - 16
#: Of the number of a tile's expert, which a launch by experts lists in shared memory.
TILE_EXPERT_BYTES: Final = 4


#: Forms of the kernel: a weight's product; products of experts, by tiles of tokens; silu(gate) * up of experts.
DENSE, GROUPED, GATED = 0, 1, 2


class LinearPlan(NamedTuple):
    """A block of threads multiplies teams x 64 rows of weights by `tokens` tokens. `stages`: of 128 values of K in
    shared memory; `chunk`: matrix instructions whose weights are decoded together; `least`: units of a range.

    `cluster` 2: two blocks of threads take neighbouring tiles of rows and share what they copy of the activations, so
    that a range is of both. `resident`: blocks of threads that a multiprocessor holds at once."""

    tokens: int
    teams: int
    stages: int
    chunk: int = 4
    least: int = 2
    cluster: int = 1
    resident: int = 1

    @property
    def rows(self) -> int:
        return self.teams * TEAM_ROWS

    def defines(self, form: int) -> tuple[tuple[str, int], ...]:
        named = {"TOKENS": self.tokens, "TEAMS": self.teams, "STAGES": self.stages, "CHUNK": self.chunk}
        named |= {"CLUSTER": self.cluster, "RESIDENT": self.resident, "FORM": form}
        return ("WGMMA", 1), *named.items()

    @property
    def shared_bytes(self) -> int:
        return ALIGN_BYTES + self.stages * BLOCK * (self.rows + 2 * self.tokens) + BARRIER_BYTES


class ExpertPlans(NamedTuple):
    """Of gate and up, and of down. Both have the same tile of tokens."""

    gated: LinearPlan
    grouped: LinearPlan

    def assignments_max(self, held: int) -> int:
        """Return the assignments to `held` experts whose tiles one launch can list in shared memory."""
        tiles = min((SHARED_BYTES_MAX - plan.shared_bytes) // TILE_EXPERT_BYTES for plan in self)
        return tiles if tiles <= held else held + (tiles - held) * self.gated.tokens


def expert_tiles(assignments: int, held: int, tokens: int) -> int:
    """Return the tiles of `tokens` tokens that `assignments` to `held` experts take at most."""
    busy = min(assignments, held)
    return busy + (assignments - busy) // tokens


class LinearChoice(NamedTuple):
    """Of weights of `values` or more: plans by the largest count of tokens (None: Triton's kernel), and the count from
    which a weight decoded to scratch and torch's product take less time."""

    values: int
    plans: Mapping[int, LinearPlan | None]
    crossover: int


UNBOUNDED: Final = 1 << 30
_LONG: Final = LinearPlan(256, 2, 2, 2)
_FEW: Final = {64: LinearPlan(64, 4, 4), 128: LinearPlan(128, 3, 4), UNBOUNDED: _LONG._replace(cluster=2)}
_SMALL: Final = {
    32: LinearPlan(32, 2, 4, least=8, resident=2),
    64: LinearPlan(64, 2, 6, least=8),
    128: LinearPlan(128, 2, 4, least=8),
    UNBOUNDED: _LONG._replace(least=8),
}
#: Largest weights first. Measured on an H200 (benchmarks/NOTES.md). Up to APART_TOKENS a tile has all tokens, so that
#: sums of a row do not depend on its place among the others: tiles are split at different blocks of K.
APART_TOKENS: Final = 256
CHOICES: Final = (
    LinearChoice(64_000_000, {16: LinearPlan(16, 2, 5, resident=2), 32: LinearPlan(32, 4, 5), **_FEW}, 1280),
    LinearChoice(30_000_000, {32: None, **_FEW}, 1280),
    LinearChoice(10_000_000, {16: None, **_SMALL}, 576),
)
#: Of experts, by the largest expected count of tokens of one; None: Triton's kernels.
EXPERT_PLANS: Final[Mapping[int, ExpertPlans | None]] = {1: None} | {
    most: ExpertPlans(plan, plan)
    for most, plan in {
        8: LinearPlan(16, 4, 6),
        24: LinearPlan(32, 4, 5),
        48: LinearPlan(64, 4, 4),
        UNBOUNDED: LinearPlan(128, 3, 4),
    }.items()
}
#: Values of one matrix of an expert from which they are measured.
EXPERT_VALUES: Final = 4_000_000
#: Of weights below those, and on other cards.
CROSSOVER_TOKENS: Final = 320


def fits(n: int, k: int) -> bool:
    """Whether the kernel takes a weight [n, k]: it stores two rows of weights at once, and copies whole parts of K."""
    return n % 2 == 0 and k % COPY_BYTES == 0


def plan_of(n: int, k: int, tokens: int) -> LinearPlan | None:
    """The plan of a product of `tokens` tokens with a weight [n, k]; None: Triton's kernel takes less time."""
    choice = _choice(n * k)
    if choice is None or not fits(n, k):
        return None
    return next(plan for most, plan in choice.plans.items() if tokens <= most)


def crossover_of(n: int, k: int) -> int:
    """Tokens from which a weight decoded to scratch takes less time than the kernel that plan_of names."""
    choice = _choice(n * k)
    return CROSSOVER_TOKENS if choice is None or not fits(n, k) else choice.crossover


def expert_plans_of(middle: int, width: int, expected: int) -> ExpertPlans | None:
    """Plans for experts of `expected` tokens each, gate and up [middle, width]; None: Triton's kernels."""
    if middle * width < EXPERT_VALUES or not (fits(middle, width) and fits(width, middle)):
        return None
    return next(plans for most, plans in EXPERT_PLANS.items() if expected <= most)


def plans() -> list[LinearPlan]:
    """All that plan_of may name."""
    return [plan for choice in CHOICES for plan in choice.plans.values() if plan]


def forms() -> list[tuple[LinearPlan, int]]:
    """All forms of the kernel that plan_of and expert_plans_of may lead to, sorted."""
    dense = {(plan._replace(least=0), DENSE) for plan in plans()}
    by_experts = {one for pair in EXPERT_PLANS.values() if pair for one in zip(pair, (GATED, GROUPED), strict=True)}
    return sorted(dense | by_experts)


def _choice(values: int) -> LinearChoice | None:
    return next((choice for choice in CHOICES if values >= choice.values), None)


class Work(NamedTuple):
    """The line of units, cut into `ranges`."""

    blocks: int  # of K
    token_tiles: int
    units: int
    ranges: int

    def begin(self, number: int) -> int:
        """First unit of a range; of number `ranges`, the end of the line."""
        return self.units * number // self.ranges

    @property
    def splits_tiles(self) -> bool:
        """False where no range begins inside of a tile."""
        return self.units % self.ranges != 0 or self.units // self.ranges % self.blocks != 0


@lru_cache(maxsize=4096)
def work_of(n: int, k: int, tokens: int, plan: LinearPlan, multiprocessors: int) -> Work:
    """At most one range for each block or cluster that is held at once, of plan.least units or more where there are as
    many. A unit of a cluster is one of each of its blocks."""
    blocks, token_tiles = -(-k // BLOCK), -(-tokens // plan.tokens)
    units = -(-n // (plan.rows * plan.cluster)) * token_tiles * blocks
    held = max(1, multiprocessors * plan.resident // plan.cluster)
    return Work(blocks, token_tiles, units, min(held, -(-units // plan.least)))
