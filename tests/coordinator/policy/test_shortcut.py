"""A plain request goes where it would go if all workers were asked; only its cost does not grow with them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from coordinator.memory.prefix_index import Chain
from coordinator.policy.candidates import Candidates, Standing, WorkerOrder
from coordinator.policy.free_memory import PlacementAsk
from coordinator.policy.prefix_reuse import OWN, PrefixReuse
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerDrain, WorkerEntry
from protocol.messages import AUTO, BOTH, DIRECT, PREFILL, STAGED, GroupMember
from protocol.units import PAGE_TOKENS
from tests.support.fakes.fake_cluster import MODEL, FakeCluster, FakePort, capacity
from tests.support.fakes.fake_worker import FakeWorker

SEEDS = 24
NODES = ("n0", "n1")
WORKERS = 64


def drawn_cluster(rng: random.Random) -> FakeCluster:
    """Six workers of two sizes on two nodes, in groups or not, perhaps with one that does nothing but prefill."""
    reuse = PrefixReuse(OWN, b"key")
    for node in NODES:
        reuse.open(node)
    fake = FakeCluster(1, NODES, host_pages=160, prefix_reuse=reuse)
    has_groups, sizes = rng.random() < 0.5, [rng.choice((24, 40, 80)) for _ in range(2)]
    for number in range(6):
        node = f"n{number % 2}"
        member = GroupMember(f"g{node}", number // 2, 3, 1) if has_groups else None
        chunks = sizes[rng.random() < 0.5]
        fake.add_worker(
            f"w{number}", node, member=member, seats=6, hot_chunks=chunks, index_pages=80, prompt_max_tokens=1_536
        )
    if not has_groups and rng.random() < 0.3:
        fake.add_worker("p0", "n0", PREFILL, seats=2, hot_chunks=0, index_pages=40, prompt_max_tokens=2_560)
    return fake


def history(seed: int) -> list[str]:
    """What is decided while requests come, run, end and make room for each other. Prompts begin alike, so that some are
    cached and some under way; hot floors change, and workers drain."""
    rng, told = random.Random(seed), list[str]()
    fake = drawn_cluster(rng)
    has_floors = rng.random() < 0.4
    for request_index in range(40):
        prompt, priority = rng.choice((64, 300, 900)), rng.choice((0, 0, 0, 3))
        mode = rng.choice((AUTO, AUTO, AUTO, STAGED, DIRECT))
        fake.submit(request_index, prompt, rng.choice((30, 400)), priority, prefill_mode=mode)
        if rng.random() < 0.6:
            give_chain(fake, request_index, rng)
        if has_floors:
            rng.choice(workers_of(fake)).hot_floor = rng.choice((None, 0, 256))
        if rng.random() < 0.15:
            drain = WorkerDrain(fake.now + rng.choice((0.0, 5.0)), handover=rng.random() < 0.5)
            fake.drain_worker(rng.choice(workers_of(fake)).name, drain if rng.random() < 0.4 else None)
        if rng.random() < 0.6:
            told += map(repr_of, fake.settle())
        if rng.random() < 0.3:
            fake.round()
    return told


def workers_of(fake: FakeCluster) -> list[WorkerEntry]:
    return [*fake.dispatch.placement_table.workers.values()]


def give_chain(fake: FakeCluster, request_index: int, rng: random.Random) -> None:
    """Its prompt begins as that of some others, for a drawn number of pages, and goes on like that of no other."""
    reuse, entry = fake.dispatch.prefix_reuse, fake.entry(request_index)
    pages = entry.facts.prompt_tokens // PAGE_TOKENS
    shared = rng.randrange(pages + 1)
    words = [rng.randrange(3)] * shared + [1_000 + request_index] * (pages - shared)
    scope = reuse.scope("", "", "")
    root = reuse.root(MODEL, scope)
    entry.chain = Chain(root, reuse.digests(root, np.repeat(np.array(words, np.int32), PAGE_TOKENS).tobytes()), scope)


def repr_of(decision: object) -> str:
    worker, entry = getattr(decision, "worker", None), getattr(decision, "entry", None)
    return f"{type(decision).__name__} {entry and entry.request_index} {worker and worker.name}"


def test_plain_requests_go_where_all_workers_asked_would_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, taken = Candidates.plain, list[str]()

    def counted(candidates: Candidates, entry: RequestState) -> PlacementAsk | None:
        ask = plain(candidates, entry)
        if ask is not None:
            taken.append(ask.worker.name)
        return ask

    for check in ("_check_row", "check_memory"):  # fake workers take a page for one request's, and here some are shared
        monkeypatch.setattr(FakeWorker, check, lambda *_: None)
    monkeypatch.setattr(Candidates, "plain", counted)
    quick = [history(seed) for seed in range(SEEDS)]
    monkeypatch.setattr(Candidates, "plain", lambda *_: None)
    slow = [history(seed) for seed in range(SEEDS)]
    assert quick == slow
    assert len(taken) > 10 * SEEDS
    assert len(set(taken)) == 6


def entries(*names: str) -> list[WorkerEntry]:
    return [WorkerEntry(name, "n0", 1, capacity(BOTH), MODEL, FakePort()) for name in names]


def test_first_is_the_best_that_fits_and_rather_one_that_is_better() -> None:
    free = {"a": 5, "b": 9, "c": 7}
    order = WorkerOrder(entries(*free), lambda it: (free[it.name], ord(it.name)))

    def first(fits: str, better: str) -> str | None:
        found = order.first(lambda it: it.name in fits, lambda it: it.name in better)
        return found and found.name

    assert first("abc", "abc") == "b"
    assert first("abc", "ac") == "c"
    assert first("abc", "") == "b"
    assert first("a", "bc") == "a"
    assert first("", "abc") is None
    free["b"] = 6  # some of it was taken: it stands behind c from now on
    assert first("abc", "abc") == "c"
    assert first("ab", "") == "b"


def test_an_admission_looks_at_few_of_many_workers() -> None:
    free = {f"w{number:02}": 1_000 for number in range(WORKERS)}
    looks = 0

    def standing_of(worker: WorkerEntry) -> Standing:
        nonlocal looks
        looks += 1
        return free[worker.name], int(worker.name[1:])

    order = WorkerOrder(entries(*free), standing_of)
    always: Callable[[WorkerEntry], bool] = lambda _: True  # noqa: E731
    looks = 0
    for _ in range(10 * WORKERS):
        worker = order.first(always, always)
        assert worker is not None
        free[worker.name] -= 1
    assert looks < 10 * WORKERS * 4
    assert set(free.values()) == {990}


def test_workers_that_differ_in_their_pools_alone_are_of_equal_sizes() -> None:
    """What a request asks is worked out once for all of equal sizes, whatever their nodes."""
    table = PlacementTable()
    for number in range(4):
        size = replace(capacity(BOTH), pool_path=f"/n{number}.pool", pool_id=number + 1, seats=8 + number // 2)
        table.add_worker(WorkerEntry(f"w{number}", f"n{number}", 1, size, MODEL, FakePort()))
    first, second, third, last = table.workers.values()
    assert first.sizes is second.sizes
    assert third.sizes is last.sizes is not first.sizes
    assert first.capacity is not second.capacity
