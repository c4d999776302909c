"""Seeds that catch each planted bug: a search, and hints of its last results. `make mutants` writes them anew.

Hints are tried first and spare the search. They decide nothing: where all of them are stale the search decides, as
without one. A bug has several: a change of the product turns most seeds into other runs, and one of them may do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Final

from protocol.messages import BOTH, DECODE, PREFILL, ROLES
from tests.sim.group_mutants import GROUP_MUTANTS
from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate
from tests.sim.shape import Shape

HINTS: Final = Path(__file__).with_suffix(".json")
#: Seeds under faults by one of which each bug must be caught.
SEEDS_MAX: Final = 200
#: Hints of a bug; fewer where fewer of SEEDS_MAX seeds catch it.
HINTS_EACH: Final = 3
#: A seed on which a bug shows as nothing but requests that wait for ever does not count as having caught it.
TIME_LIMIT: Final = "did not end within"

#: Of a prompt that is handed over within a node, which few clusters do.
OF_NEIGHBOURS: Final = frozenset({"take_the_prompt_of_a_worker_that_may_live"})
#: Of cached pages, and of those among them that go to another node.
OF_REUSE: Final = frozenset(
    {
        "cache_a_prompt_before_it_is_durable",
        "evict_a_page_that_is_held",
        "evict_without_a_word_to_the_journal",
        "share_pages_that_are_given_out_in_the_same_turn",
    }
)
OF_REUSE_APART: Final = frozenset({"let_a_transfer_write_to_shared_pages"})
#: Of drafts; checks see them without faults, too.
OF_DRAFTS: Final = frozenset({"count_rejected_rows_as_durable", "write_more_rows_than_granted"})
#: Of pages that go from one node to another.
OF_TRANSFERS: Final = frozenset({"skip_the_checksum"})
#: Kinds of faults (tests/sim/faults.py) without which a bug does not show, where few seeds have them at the right
#: moment: they are drawn more often.
FAVOURED: Final[dict[str, tuple[str, ...]]] = {
    "skip_the_checksum": ("harm_pages",),
    "take_the_prompt_of_a_worker_that_may_live": ("lag", "stop_worker"),
    "lose_the_outbox_on_reconnect": ("cut",),
    "hear_an_epoch_that_is_over": ("stop_worker",),
    "reuse_quarantined_pages": ("stop_worker",),
    "free_an_aborted_request_before_released": ("abort",),
}


def read_hints() -> dict[str, list[int]]:
    """Return the seeds by which each bug was caught, by its name."""
    hints: dict[str, list[int]] = json.loads(HINTS.read_text())
    return hints


def verdict(name: str, seed: int) -> BaseException | None:
    """Return the invariant that `seed` breaks with the bug planted; None where requests only wait for ever."""
    violation = simulate(seed, mutant=MUTANTS[name](), favoured=FAVOURED.get(name, ())).violation
    return None if TIME_LIMIT in str(violation) else violation


def search(name: str) -> Iterator[tuple[int, BaseException]]:
    """Yield each seed of SEEDS_MAX that catches the bug, with its verdict."""
    for seed in islice(seeds_of(name), SEEDS_MAX):
        found = verdict(name, seed)
        if found is not None:
            yield seed, found


def seeds_of(name: str, *, roomy: bool = False) -> Iterator[int]:
    """Yield the seeds in whose clusters the bug can show at all."""
    if name in GROUP_MUTANTS:
        return filter(lambda seed: shape_of(seed, roomy=roomy).groups, count())
    if name in OF_DRAFTS:
        return filter(lambda seed: shape_of(seed, roomy=roomy).draft_tokens, count())
    if name in OF_REUSE | OF_REUSE_APART and not roomy:
        return filter(lambda seed: reuses(shape_of(seed), apart=name in OF_REUSE_APART), count())
    if name in OF_TRANSFERS and not roomy:
        return filter(lambda seed: is_apart(shape_of(seed)), count())
    return filter(has_neighbours, count()) if name in OF_NEIGHBOURS and not roomy else count()


def reuses(shape: Shape, *, apart: bool) -> bool:
    return shape.settings.prefix_reuse != "off" and (is_apart(shape) or not apart)


def is_apart(shape: Shape) -> bool:
    """Return whether prompts come to be decoded on another node alone."""
    by_role = {
        role: {shape.workers[it] for it in shape.workers if shape.capacity_of(it).role == role} for role in ROLES
    }
    return not by_role[BOTH] and not by_role[PREFILL] & by_role[DECODE]


def shape_of(seed: int, *, roomy: bool = False) -> Shape:
    return Shape.draw(random.Random(f"{seed} shape"), roomy=roomy)


def has_neighbours(seed: int) -> bool:
    """Return whether one worker of that seed's cluster prefills for another one of its node, and for no other."""
    shape = shape_of(seed)
    prefilling = [name for name in shape.workers if shape.capacity_of(name).role == PREFILL]
    decoding = [name for name in shape.workers if shape.capacity_of(name).decodes]
    return any(shape.workers[one] == shape.workers[other] for one in prefilling for other in decoding)


def search_hints(name: str) -> list[tuple[int, str]]:
    """Return the first HINTS_EACH seeds that catch the bug, with their verdicts as texts."""
    return [(seed, str(found)) for seed, found in islice(search(name), HINTS_EACH)]


def main(processes: Callable[[], Executor] = ProcessPoolExecutor) -> int:
    """Search for all of them, and write what was found. Returns 1 if one was caught by no seed."""
    names = sorted(MUTANTS)
    hints = {}
    with processes() as pool:
        for name, found in zip(names, pool.map(search_hints, names), strict=True):
            texts = [f"seed {seed}: {text}" for seed, text in found]
            print(f"{name}: {'; '.join(texts) or 'not caught'}", flush=True)
            if found:
                hints[name] = [seed for seed, _ in found]
    lines = [f"  {json.dumps(name)}: {json.dumps(seeds)}" for name, seeds in hints.items()]
    HINTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(len(hints) < len(MUTANTS))


if __name__ == "__main__":
    raise SystemExit(main())
