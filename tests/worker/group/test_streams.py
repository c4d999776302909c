"""Ranks on simulated streams: whatever order the fences allow, tokens are those of ranks that do all at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.checkpoints import LATENT, tiny_checkpoint
from tests.support.history import first_parent_commits, in_turn, seeds_of
from tests.support.thread_ranks import run_ranks
from tests.worker.group.test_ranks import SETTINGS, asks_of, spread
from worker.streams import Streams, make_streams

pytestmark = pytest.mark.group

#: Another with each commit, of both families in turn. 160 orders for deepseek-v3.2 took eight minutes; none gave other
#: tokens.
ORDERS = seeds_of(first_parent_commits(), 1)
REQUESTS = 16


@pytest.fixture(scope="module")
def checkpoint_of(run_dir: Path) -> Callable[[str], Path]:
    return lambda family: tiny_checkpoint(run_dir, family, index_topk=32, context_max_tokens=1_024)


def streams_of(order: int, rank: int) -> Streams:
    return make_streams("simulated", seed=2 * order + rank)


@pytest.mark.parametrize("family", [in_turn(LATENT)])
def test_no_order_that_fences_allow_changes_a_token_of_a_group(
    family: str, checkpoint_of: Callable[[str], Path]
) -> None:
    """Mixed requests on two ranks: resizes, retractions with pages kept and dropped, and padding of an idle rank."""

    def tokens(streams_of: Callable[[int], Streams]) -> dict[int, list[int]]:
        asks = spread(asks_of(REQUESTS, seed=7), 2)
        return run_ranks(checkpoint_of(family), asks, SETTINGS, streams_of=streams_of).tokens

    at_once = tokens(lambda rank: make_streams("inline"))
    for order in ORDERS:
        assert tokens(partial(streams_of, order)) == at_once, f"order {order}"
