"""Looks at the cost of workers' steps, and the hot floors that follow. Pure.

Each worker has a `HotFloor` (throughput.py); its looks are differences of what the link heard, LOOK_S apart at least.
The floor stands in the WorkerEntry, where policy reads it. Ranks of a group have one together, since their steps end
together: a look is the mean over its ranks, but that steps wait for the rank whose swap-ins take longest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from coordinator.policy.throughput import LOOK_STEPS, FloorRoom, HotFloor, Look
from coordinator.state.events import LinkStats
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import GroupLife, WorkerEntry, life_of
from protocol.messages import HotFloorRow
from protocol.sizing import hot_sizes_for
from protocol.units import PAGE_TOKENS

#: Seconds between two looks at least.
LOOK_S: Final = 1.0
#: Steps with which swap-in was timed on enough of them: one in 64 is. Between two looks there may be fewer.
TIMED_STEPS: Final = 128
#: Steps between two looks that no prompt ran beside, at least.
ALONE_STEPS_MIN: Final = 16

#: Looks that say more than this are dropped: an hour for a step; of other numbers, what no worker comes near.
STEP_US_MAX: Final = 3.6e9
NUMBER_MAX: Final = 1e15

#: Hits and misses of the present placement of a request, by request index.
SwapsOf = Callable[[int], tuple[int, int]]


#: What steps together, names and epochs: a worker by itself, or all ranks of a group.
Lockstep = tuple[tuple[str, int], ...]


class _Counts(NamedTuple):
    """Counts of LinkStats, by the names there: means over the ranks of a group. Heartbeats of ranks come at different
    moments, so that one may have told of a few steps more."""

    steps: float
    misses: float
    swapped_bytes: float
    alone_steps: float
    alone_s: float
    alone_requests: float
    step_requests: float
    loads_s: tuple[float, ...]  # `load_s` of each rank


class _Seen(NamedTuple):
    """State at the last look: what links had heard, and the hot size and the swaps of each running placement."""

    at: float
    counts: _Counts
    swaps: Mapping[int, tuple[int, int, int]]
    timed: _Counts  # as of the look up to which swap-ins were learnt from


class HotSizing:
    """The floors of all workers."""

    def __init__(self, placement_table: PlacementTable, swaps_of: SwapsOf) -> None:
        self._placement_table = placement_table
        self._swaps_of = swaps_of
        self._floors: dict[Lockstep, HotFloor] = {}
        self._seen: dict[Lockstep, _Seen] = {}

    def look(self, now: float) -> None:
        """Look at each worker that is due."""
        governed = self._governed()
        for kept in (self._floors, self._seen):
            for key in kept.keys() - governed.keys():
                del kept[key]
        for key, ranks in governed.items():
            self._look(key, ranks, now)

    def _governed(self) -> dict[Lockstep, Sequence[WorkerEntry]]:
        """Workers that decode and take requests; of groups those that are complete, a draining rank included."""
        apart, lives = list[list[WorkerEntry]](), defaultdict[GroupLife, list[WorkerEntry]](list)
        for worker in self._placement_table.workers.values():
            life = life_of(worker)
            if life is None:
                apart.append([worker])
            elif not (worker.awaited or worker.ranks_missing):
                lives[life].append(worker)
        return {
            tuple((it.name, it.epoch) for it in ranks): ranks
            for ranks in (*apart, *lives.values())
            if any(it.takes and it.decodes for it in ranks)
        }

    def _look(self, key: Lockstep, ranks: Sequence[WorkerEntry], now: float) -> None:
        seen = self._seen.get(key)
        if seen is not None and now - seen.at < LOOK_S:
            return
        counts = _counts_of([it.port.stats() for it in ranks])
        if seen is not None and counts.steps - seen.counts.steps < LOOK_STEPS:
            return
        held = (it for worker in ranks for it in self._placement_table.on(worker.name))
        running = [it for it in held if it.runs]
        is_timed = seen is None or counts.steps - seen.timed.steps >= TIMED_STEPS
        swaps = {it.placement: self._swaps(it) for it in running}
        timed = counts if seen is None or is_timed else seen.timed
        this = _Seen(now, counts, swaps, timed)
        self._seen[key] = this
        if seen is None or not running:
            return
        look = _difference(seen, this, ranks[0].capacity.page_bytes / PAGE_TOKENS)
        if look is None or not _is_sound(look):
            return
        floor = self._floors.setdefault(key, HotFloor())
        floor.look(look, self._room(ranks, running))
        for worker in ranks:
            _note(worker, floor, look)

    def _swaps(self, entry: RequestState) -> tuple[int, int, int]:
        return (entry.hot.hot_slots if entry.resizing is None else -1, *self._swaps_of(entry.request_index))

    def _room(self, ranks: Sequence[WorkerEntry], running: Sequence[RequestState]) -> FloorRoom:
        """Return the room of the rank with the least, for the mean length there. Requests that wait are shared evenly
        among the workers that could take them."""
        capacities, pages = [it.capacity for it in ranks], max(1, round(sum(it.pages for it in running) / len(running)))
        takers = sum(it.takes and it.decodes for it in self._placement_table.workers.values())
        held = -(-sum(len(it.ranks) for it in ranks) // len(ranks))
        demand = held + -(-len(self._placement_table.waiting) // takers)
        others = [limit for it in capacities for limit in (it.seats, it.index_pages // pages, it.host_pages // pages)]
        chunks = min(it.hot_chunks for it in capacities)
        return FloorRoom(chunks, tuple(hot_sizes_for(pages, capacities[0])), max(1, min(demand, *others)))


def _counts_of(stats: Sequence[LinkStats]) -> _Counts:
    means = [sum(getattr(it, name) for it in stats) / len(stats) for name in _Counts._fields[:-1]]
    return _Counts._make((*means, tuple(it.load_s for it in stats)))


def _difference(before: _Seen, after: _Seen, miss_bytes: float) -> Look | None:
    """`miss_bytes`: of a miss in all layers of a group; where nothing was missed yet at most, as if there were one.

    None: no request ran at both looks, or prompts beside nearly all steps. What a request selects is told by those
    that ran, resident ones among them: the totals of a worker count what was looked for in hot buffers."""
    steps = after.counts.steps - before.counts.steps
    step_s, running, of_all = _step(before.counts, after.counts, steps)
    if not step_s:
        return None
    misses = after.counts.misses - before.counts.misses
    loaded = after.counts.swapped_bytes - before.counts.swapped_bytes
    of_miss_s = 0.0 if after.timed is before.timed else _miss_s(before.timed, after.timed)
    stayed = after.swaps.keys() & before.swaps.keys()
    if not stayed:
        return None
    selected, looked_up, missed = 0, Counter[int](), Counter[int]()
    for placement in stayed:
        slots, *now = after.swaps[placement]
        was_slots, *was = before.swaps[placement]
        selected += sum(now) - sum(was)
        if slots == was_slots > 0:
            looked_up[slots] += sum(now) - sum(was)
            missed[slots] += now[1] - was[1]
    misses_a_step = misses / steps * running / of_all
    return Look(
        steps=round(steps),
        step_us=1e6 * step_s,
        load_us=1e6 * of_miss_s * misses_a_step,
        running=running,
        selected=selected / steps / len(stayed),
        shares={slots: missed[slots] / count for slots, count in looked_up.items() if count > 0},
        misses=misses_a_step,
        miss_bytes=loaded / misses if misses > 0 else miss_bytes,
    )


def _step(was: _Counts, now: _Counts, steps: float) -> tuple[float, float, float]:
    """Means over steps that no prompt ran beside, since prompts take what they take with any hot size: seconds and
    requests; and requests of all steps. 0 seconds: there were too few of them. What runs at the moment of a look may be
    more or fewer: the steps of a first look come late in it."""
    alone, requests = now.alone_steps - was.alone_steps, now.step_requests - was.step_requests
    if alone < ALONE_STEPS_MIN or requests <= 0:
        return 0.0, 0.0, 0.0
    seconds, of_alone = now.alone_s - was.alone_s, now.alone_requests - was.alone_requests
    return seconds / alone, of_alone / alone, requests / steps


def _miss_s(before: _Counts, after: _Counts) -> float:
    """Seconds that steps waited for a missed row of the mean rank."""
    misses = after.misses - before.misses
    waited_s = max(now - was for was, now in zip(before.loads_s, after.loads_s, strict=True))
    return waited_s / misses if misses > 0 else 0.0


def _is_sound(look: Look) -> bool:
    """Workers say what they like: no number of theirs may be none, negative or without end."""
    numbers = look.load_us, look.selected, look.misses, look.miss_bytes, *look.shares.values()
    return (
        0 < look.step_us < STEP_US_MAX and 0 < look.running < NUMBER_MAX and all(0 <= it < NUMBER_MAX for it in numbers)
    )


def _note(worker: WorkerEntry, floor: HotFloor, look: Look) -> None:
    """Put it where policy and listings read it."""
    classes = worker.capacity.hot_size_classes
    lowest = None if floor.floor in (None, classes[0]) else floor.floor
    worker.hot_floor, worker.probe_slots = lowest, floor.probe_slots
    now, best = floor.now, floor.best
    worker.hot_sizing = HotFloorRow(
        hot_slots=classes[0] if lowest is None else lowest,
        requests=now.requests if now else 0,
        observed_step_us=look.step_us,
        predicted_step_us=now.step_us if now else 0.0,
        predicted_tokens_per_s=now.tokens_per_s if now else 0.0,
        best_slots=best.hot_slots if best else classes[0],
        best_tokens_per_s=best.tokens_per_s if best else 0.0,
        changes=floor.changes,
        reason=floor.reason,
    )
