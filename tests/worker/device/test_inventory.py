"""What an executor says it holds is what it was given, at every step boundary of lives that are moved about."""

from __future__ import annotations

import random

import numpy as np
import pytest

from protocol.inventory import digest_of, unpack_rows
from protocol.messages import Audit, Inventory
from tests.support.fakes.coordinator import Life
from tests.support.worker_rig import Rig
from worker.streams import make_streams

TURNS = 1_500


def given(lives: list[Life]) -> dict[int, tuple[int, int, int, int | None]]:
    """Return by admission pages, their digest, index pages and chunks (None while they change)."""
    return {
        life.placement: (
            len(life.host_pages),
            digest_of(np.array(life.host_pages, dtype=np.int32)),
            life.index_pages,
            None if life.resizing else life.hot_chunks,
        )
        for life in lives
        if life.placement
    }


def said(inventory: Inventory, before: dict[int, tuple[int, int, int, int | None]]) -> object:
    rows = {}
    for row in unpack_rows(inventory.rows):
        given_pages, given_digest, _, given_chunks = before.get(row.placement, (0, 0, 0, 0))
        is_untold = row.is_leaving and row.host_pages == given_pages  # ids are not told of one that leaves
        told = given_digest if is_untold else row.digest
        chunks = None if given_chunks is None else row.hot_chunks
        rows[row.placement] = (row.host_pages, told, row.index_pages, chunks)
    return rows


@pytest.mark.parametrize("backend", ["inline", "simulated"])
@pytest.mark.parametrize("seed", range(2))
def test_inventory_lists_grants_and_the_rest_is_free(seed: int, backend: str) -> None:
    """I1, I2."""
    rng, rig = random.Random(seed), Rig(make_streams(backend, seed))
    coordinator, capacity = rig.coordinator, rig.sizing.capacity
    for number in range(9):
        coordinator.create(number, rng.randint(5, 200), rng.randint(5, 60), seed=number)
    heard = 0
    for turn in range(TURNS):
        for life in coordinator.lives:
            if not life.outcome and not life.placement and rng.random() < 0.1:
                coordinator.admit(life, rng.choice((0, 64, 128, 192)))
            elif life.here and life.tokens and rng.random() < 0.01:
                coordinator.withdraw(life, rng.choice(("keep", "drop")))
        before = given(coordinator.lives)
        rig.executor.submit(Audit(turn))
        rig.turn()
        (inventory,) = [it for it in coordinator.events if isinstance(it, Inventory) and it.number == turn]
        assert said(inventory, before) == before
        assert inventory.seats_free + len(before) == capacity.seats
        chunks = sum(row.chunks for row in unpack_rows(inventory.rows))
        assert chunks + inventory.chunks_free == capacity.hot_chunks
        heard += bool(before)
        if all(life.outcome for life in coordinator.lives):
            break
    assert heard > 50
    assert not rig.wrong()
