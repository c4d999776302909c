"""What a seed's cluster looks like: workers, nodes, groups, roles, memory, settings."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from protocol import messages
from protocol.messages import WorkerCapacity
from protocol.settings import NO_JOURNAL, CoordinatorSettings
from worker.device.step_rows import StepRows

#: Tokens of a page here. Policies see pages, not tokens: with small ones a short output crosses as many borders.
PAGE_TOKENS: Final = 8
#: Tokens of a prompt, behind cached pages, that go through decode steps.
SHORT_RESTS: Final = (1, 2, 5, 9)
#: Tokens that the workers of a cluster without groups draft for a step.
DRAFTS: Final = (0, 0, 0, 1, 2, 4)
#: How many clusters have groups.
GROUP_ODDS: Final = 0.25
#: How many clusters have standbys.
STANDBY_ODDS: Final = 0.25
#: Nodes of the ranks of each group, and of a worker that holds the whole model.
GROUPS: Final = (("n0 n0",), ("n0 n1",), ("n0 n0 n1",), ("n0 n0", "n0"), ("n0 n0", "n1"), ("n0 n0", "n0 n1"))

SETTINGS: Final = CoordinatorSettings(
    live_requests_max=64,
    queue_max=32,
    ended_keep_max=64,
    connections_max=16,
    flush_interval_ms=5.0,
    heartbeat_interval_s=0.25,
    heartbeat_limit_s=1.5,
    command_ack_limit_s=0.5,
    grant_ahead_tokens=PAGE_TOKENS,
    audit_interval_s=0.5,
    metrics_port=-1,
    journal="/sim/journal",
    prefix_reuse="all",
)


@dataclass(frozen=True)
class Shape:
    """What a seed's cluster looks like: workers by name with their nodes, the memory of each, and the roles of those
    that do not do everything."""

    workers: dict[str, str]
    capacity: WorkerCapacity
    settings: CoordinatorSettings
    roles: dict[str, str] = field(default_factory=dict)
    is_roomy: bool = False
    draft_tokens: int = 0  # of all workers: the pages of one node have one form
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)  # their workers by rank
    has_standbys: bool = False  # for workers that are no ranks

    def capacity_of(self, worker: str) -> WorkerCapacity:
        return msgspec.structs.replace(self.capacity, role=self.roles.get(worker, messages.BOTH))

    @property
    def pairs(self) -> bool:
        """Whether one worker can prefill for another."""
        return any(
            self.capacity_of(one).prefills and self.capacity_of(other).decodes and one != other
            for one in self.workers
            for other in self.workers
        )

    @classmethod
    def of_seed(cls, seed: int, *, roomy: bool) -> Shape:
        """Standbys are drawn apart: a seed without them has what it had before there were any."""
        shape = cls.draw(random.Random(f"{seed} shape"), roomy=roomy)
        return replace(shape, has_standbys=random.Random(f"{seed} standbys").random() < STANDBY_ODDS)

    @classmethod
    def draw(cls, rng: random.Random, *, roomy: bool) -> Shape:
        """`roomy`: with memory for all requests at once, so that none waits for another."""
        shape = cls._draw_shape(rng, roomy=roomy)
        mode = rng.choice(("all", "all", "own", "off"))
        shape = replace(shape, settings=msgspec.structs.replace(shape.settings, prefix_reuse=mode))
        drafts = 0 if shape.groups else rng.choice(DRAFTS)
        overshoot = StepRows(drafts).overshoot_tokens(shape.capacity.overshoot_tokens)  # of plain steps: the lookahead
        capacity = msgspec.structs.replace(shape.capacity, overshoot_tokens=overshoot)
        return replace(shape, capacity=capacity, draft_tokens=drafts)

    @classmethod
    def _draw_shape(cls, rng: random.Random, *, roomy: bool) -> Shape:
        shape = cls._draw_workers(rng, roomy=roomy)
        if rng.random() >= GROUP_ODDS:
            return shape
        if roomy:
            return replace(shape, groups={"g0": tuple(shape.workers)})
        nodes, groups = list[str](), dict[str, tuple[str, ...]]()
        for place, drawn in enumerate(rng.choice(GROUPS)):
            ranks = drawn.split()
            if len(ranks) > 1:
                groups[f"g{place}"] = tuple(f"w{len(nodes) + rank}" for rank in range(len(ranks)))
            nodes += ranks
        workers = {f"w{i}": node for i, node in enumerate(nodes)}
        return replace(shape, workers=workers, roles=_draw_roles(rng, nodes), groups=groups)

    @classmethod
    def _draw_workers(cls, rng: random.Random, *, roomy: bool) -> Shape:
        """Without groups."""
        if roomy:
            roles = rng.choice(({}, {"w0": messages.PREFILL, "w1": messages.DECODE}))
            nodes = {"w0": "n0", "w1": rng.choice(("n0", "n1"))}
            return cls(nodes, _capacity(12, 100, 100, 60, 200), SETTINGS, roles, is_roomy=True)
        nodes = rng.choice((["n0"], ["n0", "n0"], ["n0", "n0"], ["n0", "n1"], ["n0", "n0", "n1"]))
        capacity = _capacity(
            rng.randint(2, 4), rng.randint(6, 14), rng.randint(9, 16), rng.randint(4, 8), rng.randint(9, 24)
        )
        settings = msgspec.structs.replace(
            SETTINGS,
            grant_ahead_tokens=rng.choice((3, PAGE_TOKENS, 2 * PAGE_TOKENS)),
            journal=rng.choices((SETTINGS.journal, NO_JOURNAL), (4, 1))[0],
        )
        names = {f"w{i}": node for i, node in enumerate(nodes)}
        return cls(names, capacity, settings, _draw_roles(rng, nodes))


def _draw_roles(rng: random.Random, nodes: list[str]) -> dict[str, str]:
    """In half of the clusters with several workers, what each of the two outermost is for: of one node, or of two."""
    if len(nodes) < 2 or rng.random() < 0.5:
        return {}
    first = rng.choice((messages.PREFILL, messages.PREFILL, messages.BOTH))
    last = f"w{len(nodes) - 1}"
    return {"w0": first, last: rng.choice((messages.DECODE, messages.DECODE, messages.BOTH))}


def _capacity(seats: int, hot_chunks: int, index_pages: int, prompt_pages: int, host_pages: int) -> WorkerCapacity:
    return WorkerCapacity(
        seats=seats,
        hot_chunks=hot_chunks,
        index_pages=index_pages,
        prompt_max_tokens=prompt_pages * PAGE_TOKENS,
        host_pages=host_pages,
        page_bytes=1024,
        hot_size_classes=(PAGE_TOKENS, 2 * PAGE_TOKENS),
        tail_slots=8,
        overshoot_tokens=1,
        pool_path="/sim",
    )
