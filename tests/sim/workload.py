"""What clients ask for, drawn from a seed: sizes that fill the small pools of tests.sim.cluster several times over."""

from __future__ import annotations

import random
from typing import Final

import numpy as np

from protocol.messages import AUTO, BOTH, DIRECT, STAGED, Sampling
from protocol.sizing import Length, misfit
from tests.sim.clients import Operator, Pending, SimClient, Workload
from tests.sim.cluster import Cluster
from tests.sim.oracle import Truth

REQUESTS: Final = (7, 12)
CLIENTS: Final = (2, 3)
#: Requests come within this many seconds.
SPREAD_S: Final = 4.0
TRIES_MAX: Final = 50
#: Tokens of beginnings that several prompts of a seed have, and how many prompts have one of them.
PREFIXES_TOKENS: Final = (8, 16, 24)
PREFIX_ODDS: Final = 0.7


def draw(cluster: Cluster) -> Workload:
    """Clients and their requests; every request fits the cluster alone."""
    rng = random.Random(f"{cluster.seed} workload")
    prefixes = [_draw_tokens(rng, tokens) for tokens in PREFIXES_TOKENS]
    truths = [_draw_request(cluster, rng, f"r{i}", prefixes) for i in range(rng.randint(*REQUESTS))]
    cluster.truths = {truth.request_id: truth for truth in truths}
    clients = [
        SimClient(cluster, f"c{i}", [], random.Random(f"{cluster.seed} client {i}"))
        for i in range(rng.randint(*CLIENTS))
    ]
    for truth in truths:
        rng.choice(clients).pending.append(Pending(truth, rng.uniform(0.0, SPREAD_S)))
    return Workload(clients, Operator(cluster))


def _draw_way(cluster: Cluster, rng: random.Random) -> str:
    """One that its workers make possible while all are there."""
    shape = cluster.shape
    ways = [AUTO]
    ways += [DIRECT, DIRECT] if shape.pairs else []
    ways += [STAGED] if any(shape.capacity_of(name).role == BOTH for name in shape.workers) else []
    return rng.choice(ways)


def _draw_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(32, 126) for _ in range(count)]


def _draw_request(cluster: Cluster, rng: random.Random, request_id: str, prefixes: list[list[int]]) -> Truth:
    """With a prompt of its own, or one that begins as others do."""
    for _ in range(TRIES_MAX):
        tokens = _draw_tokens(rng, rng.choice((1, 5, 8, 9, 14, 25)))
        if rng.random() < PREFIX_ODDS:
            tokens = rng.choice(prefixes) + tokens[: rng.choice((0, 1, 9))]
        prompt = np.array(tokens, np.int32)
        sampling = Sampling(
            rng.choice((1, 7, 8, 16, 24, 33)),
            stop=tuple("".join(chr(rng.randint(32, 126)) for _ in range(2)) for _ in range(rng.choice((0, 0, 3)))),
            ignore_eos=rng.random() < 0.5,
            logprobs=-1 if cluster.shape.draft_tokens and len(tokens) % 2 else len(tokens) % 4 - 1,
        )
        if not misfit(Length(len(prompt), 0, sampling.max_tokens), cluster.shape.capacity, ""):
            return Truth(request_id, prompt, sampling, rng.choice((0, 0, 0, 1)), _draw_way(cluster, rng))
    raise AssertionError("no request fits this cluster")
