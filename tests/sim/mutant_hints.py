"""Seeds that catch each planted bug: a search, and hints of its last results. `make mutants` writes them anew,
`make mutants MUTANTS=NAME` those of one.

Hints are tried first and spare the search. They decide nothing: where all of them are stale the search decides, as
without one. A bug has several: a change of the product turns most seeds into other runs, and one of them may do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Final

from protocol.messages import BOTH, DECODE, PREFILL, ROLES
from protocol.settings import NO_JOURNAL
from tests.sim.group_mutants import GROUP_MUTANTS
from tests.sim.mutants import MUTANTS
from tests.sim.orders import (
    Order,
    lose_a_pool_that_a_standby_has_attached_to,
    restart_before_a_turn,
    stop_a_worker_whose_standby_is_ready,
    stop_a_worker_with_a_prompt_to_hand_over,
    stop_a_worker_with_a_staged_prompt,
)
from tests.sim.run import simulate
from tests.sim.shape import Shape
from tests.sim.standby_mutants import STANDBY_MUTANTS

HINTS: Final = Path(__file__).with_suffix(".json")
#: Seeds under faults by one of which each bug must be caught.
SEEDS_MAX: Final = 200
#: Hints of a bug; fewer where fewer of SEEDS_MAX seeds catch it.
HINTS_EACH: Final = 3
#: A seed on which a bug shows as nothing but requests that wait for ever does not count as having caught it.
TIME_LIMIT: Final = "did not end within"

#: Of drafts; checks see them without faults, too.
OF_DRAFTS: Final = frozenset({"count_rejected_rows_as_durable", "write_more_rows_than_granted"})
#: Kinds of faults (tests/sim/faults.py) without which a bug does not show, where few seeds have them at the right
#: moment: they are drawn more often.
FAVOURED: Final[dict[str, tuple[str, ...]]] = {
    "skip_the_checksum": ("harm_pages",),
    "lose_the_outbox_on_reconnect": ("cut",),
    "hear_an_epoch_that_is_over": ("stop_worker",),
    "reuse_quarantined_pages": ("stop_worker",),
    "free_an_aborted_request_before_released": ("abort",),
}
#: Orders that are played in place of drawn faults, for bugs that hardly any seed shows otherwise.
ORDERS: Final[dict[str, Order]] = {
    "forget_turns_with_the_coordinator": restart_before_a_turn,
    "prefill_again_what_a_lost_worker_had_staged": stop_a_worker_with_a_staged_prompt,
    "take_over_before_the_exit_is_proved": stop_a_worker_whose_standby_is_ready,
    "take_over_with_a_pool_that_is_gone": lose_a_pool_that_a_standby_has_attached_to,
    "take_the_prompt_of_a_worker_that_may_live": stop_a_worker_with_a_prompt_to_hand_over,
}


def has_groups(shape: Shape) -> bool:
    return bool(shape.groups)


def has_drafts(shape: Shape) -> bool:
    return bool(shape.draft_tokens)


def reuses(shape: Shape) -> bool:
    return shape.settings.prefix_reuse != "off"


def is_apart(shape: Shape) -> bool:
    """Return whether prompts come to be decoded on another node alone."""
    by_role = {
        role: {shape.workers[it] for it in shape.workers if shape.capacity_of(it).role == role} for role in ROLES
    }
    return not by_role[BOTH] and not by_role[PREFILL] & by_role[DECODE]


def has_neighbours(shape: Shape) -> bool:
    """Return whether one worker of the cluster prefills for another one of its node, and for no other."""
    prefilling = [name for name in shape.workers if shape.capacity_of(name).role == PREFILL]
    decoding = [name for name in shape.workers if shape.capacity_of(name).decodes]
    return any(shape.workers[one] == shape.workers[other] for one in prefilling for other in decoding)


def has_standbys(shape: Shape) -> bool:
    return shape.has_standbys and len(shape.workers) > sum(map(len, shape.groups.values()))


def has_turns(shape: Shape) -> bool:
    """Return whether each client is an owner of its own, and the journal holds turns."""
    return shape.settings.journal != NO_JOURNAL and not shape.pairs


#: What the cluster of a seed must have for a bug to show at all.
NEEDS: Final[dict[str, Callable[[Shape], bool]]] = {
    "cache_a_prompt_before_it_is_durable": reuses,
    "evict_a_page_that_is_held": reuses,
    "evict_without_a_word_to_the_journal": reuses,
    "forget_turns_with_the_coordinator": has_turns,
    "let_a_transfer_write_to_shared_pages": lambda shape: reuses(shape) and is_apart(shape),
    "prefill_again_what_a_lost_worker_had_staged": lambda shape: not reuses(shape),
    "share_pages_that_are_given_out_in_the_same_turn": reuses,
    "skip_the_checksum": is_apart,
    "take_the_prompt_of_a_worker_that_may_live": has_neighbours,
}


def read_hints() -> dict[str, list[int]]:
    """Return the seeds by which each bug was caught, by its name."""
    hints: dict[str, list[int]] = json.loads(HINTS.read_text())
    return hints


def verdict(name: str, seed: int) -> BaseException | None:
    """Return the invariant that `seed` breaks with the bug planted; None where requests only wait for ever."""
    favoured, order = FAVOURED.get(name, ()), ORDERS.get(name)
    violation = simulate(seed, mutant=MUTANTS[name](), favoured=favoured, order=order).violation
    return None if TIME_LIMIT in str(violation) else violation


def search(name: str) -> Iterator[tuple[int, BaseException]]:
    """Yield each seed of SEEDS_MAX that catches the bug, with its verdict."""
    for seed in islice(seeds_of(name), SEEDS_MAX):
        found = verdict(name, seed)
        if found is not None:
            yield seed, found


def seeds_of(name: str, *, roomy: bool = False) -> Iterator[int]:
    """Yield the seeds in whose clusters the bug can show at all; undisturbed ones if `roomy`."""
    needs = None if roomy else NEEDS.get(name)
    if name in GROUP_MUTANTS:
        needs = has_groups
    elif name in STANDBY_MUTANTS:
        needs = has_standbys
    elif name in OF_DRAFTS:
        needs = has_drafts
    return (seed for seed in count() if needs is None or needs(shape_of(seed, roomy=roomy)))


def shape_of(seed: int, *, roomy: bool = False) -> Shape:
    return Shape.of_seed(seed, roomy=roomy)


def search_hints(name: str) -> list[tuple[int, str]]:
    """Return the first HINTS_EACH seeds that catch the bug, with their verdicts as texts."""
    return [(seed, str(found)) for seed, found in islice(search(name), HINTS_EACH)]


def main(names: Collection[str], processes: Callable[[], Executor] = ProcessPoolExecutor) -> int:
    """Search for the bugs in `names`, or for all of them, and write what was found beside the hints of the others.
    Returns 1 if one was caught by no seed."""
    searched = [name for name in sorted(MUTANTS) if not names or name in names]
    hints = {name: seeds for name, seeds in read_hints().items() if name in MUTANTS and name not in searched}
    missed = 0
    with processes() as pool:
        for name, found in zip(searched, pool.map(search_hints, searched), strict=True):
            texts = [f"seed {seed}: {text}" for seed, text in found]
            print(f"{name}: {'; '.join(texts) or 'not caught'}", flush=True)
            if found:
                hints[name] = [seed for seed, _ in found]
            missed += not found
    lines = [f"  {json.dumps(name)}: {json.dumps(seeds)}" for name, seeds in sorted(hints.items())]
    HINTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
