"""Draws that requests adjust or hold to grammars, as real processes that are disturbed: every token is that of a plain
reference over the model library's logits, and so are the log-probabilities of requests that ask for them."""

from __future__ import annotations

import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import trio

from hisparse.client.client import Client
from hisparse.client.token_stream import TokenStream
from protocol.logprobs import TokenLogprobs
from protocol.messages import NO_LOGPROBS, Sampling
from tests.processes.test_main_job import disturb, release_held
from tests.support.cluster_rig import (
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    prompts_of,
    standing_model,
    until_all_connected,
)
from tests.support.group_cluster import (
    BACK_LIMIT_S,
    group_config,
    pids,
    states_of,
    until_decoding,
    until_restarted,
)
from tests.support.nodes_rig import COORDINATOR, Spot, running_nodes
from tests.support.reference_draws import Judge, wrong_from

Disturbance: TypeAlias = Callable[[], Awaitable[None]]

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 16
NEW_TOKENS = 24
#: Between a log-probability and the reference's: of nine in ten tokens, and of those where a near-tie at the edge of
#: the indexer's top-k falls the other way.
LOGPROB_BOUND = 1e-4
LOGPROB_BOUND_OF_TIES = 1e-2
#: Of the request during which the coordinator dies.
LATE = Sampling(60, ignore_eos=True, logprobs=20)


#: One that goes on to the end, one that may end early, and one of each kind that bodies ask for.
GRAMMARS = (
    "start: /([a-m][n-z]){40}/",
    "start: /[0-9]{2,9}(-[a-z]{1,4}){1,2}/",
    'start: "yes" | "no" | "maybe, after a while"',
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
)


#: Each is one byte of about one in sixteen that are drawn.
STOPS = tuple("abcdefghijklmnop")
CHARACTER_BYTES_MAX = 4


def samplings(seed: int) -> list[Sampling]:
    """Draw adjustments of every kind, alone and together; every fourth adjusts nothing, every fourth has stop texts,
    every second has a grammar. Two of three ask for log-probabilities."""
    dice, found = random.Random(seed), []
    for number in range(REQUESTS):
        drawn = {
            "frequency_penalty": dice.choice((0.0, 0.8, -0.5)),
            "presence_penalty": dice.choice((0.0, 0.6)),
            "repetition_penalty": dice.choice((1.0, 1.4)),
            "logit_bias": tuple((dice.randrange(256), dice.choice((-50.0, 3.0))) for _ in range(1))
            if dice.random() < 0.5
            else (),
            "min_tokens": dice.choice((0, 8)),
            "stop_token_ids": tuple(dice.sample(range(256), 3)),
            "top_k": dice.choice((0, 5, 40)),
            "min_p": dice.choice((0.0, 0.1)),
        }
        chosen = {} if number % 4 == 0 else drawn
        if number % 2:
            chosen |= {"grammar": GRAMMARS[number // 2 % len(GRAMMARS)], "min_tokens": 0}
        if number % 4 == 2:
            chosen |= {"min_tokens": 8, "stop": STOPS}
        temperature = dice.choice((0.0, 0.9))
        chosen["logprobs"] = (NO_LOGPROBS, 0, 5)[number % 3]
        found.append(Sampling(NEW_TOKENS, temperature=temperature, top_p=0.9, seed=number, **chosen))  # type: ignore[arg-type]
    return found


@dataclass
class Received:
    """By a client that follows a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    async def follow(self, stream: TokenStream) -> None:
        async for tokens in stream:
            self.tokens += tokens.tolist()
            self.logprobs += stream.logprobs


async def collect(client: Client, name: str, prompt: Sequence[int], sampling: Sampling, received: Received) -> None:
    await received.follow(await client.submit(prompt, sampling, request_id=name))


async def replayed(client: Client, name: str) -> Received:
    received = Received()
    await received.follow(await client.attach(name))
    return received


def logprob_errors(logits: torch.Tensor, received: Received, sampling: Sampling) -> list[float]:
    """Of each token, where they are asked for: the largest difference of a value from the reference's, whose `logits`
    are float32[tokens, vocab]. The ids are those of the reference up to ties."""
    if sampling.logprobs == NO_LOGPROBS:
        assert received.logprobs == []
        return []
    errors = []
    for right, token, told in zip(logits.log_softmax(-1), received.tokens, received.logprobs, strict=True):
        best = right.topk(sampling.logprobs).values.tolist() if told.top else []
        assert len({it for it, _ in told.top}) == len(told.top) == sampling.logprobs
        pairs = [(told.logprob, float(right[token]))]
        pairs += [(value, float(right[other])) for other, value in told.top]
        pairs += [(value, likeliest) for (_, value), likeliest in zip(told.top, best, strict=True)]
        errors.append(max(abs(ours - its) for ours, its in pairs))
    return errors


async def test_adjusted_draws_and_log_probabilities_survive_moves_and_deaths(model: Path, tmp_path: Path) -> None:
    prompts, asked, moves = prompts_of(7, REQUESTS), samplings(8), {}
    outputs = [Received() for _ in prompts]
    async with cluster_of_two(crash_config(model, tmp_path), tmp_path, kept=True) as (cluster, client, _):
        async with trio.open_nursery() as disturbance:
            disturbance.start_soon(disturb, client, 2, moves, REQUESTS)
            disturbance.start_soon(release_held, client, moves)
            async with trio.open_nursery() as nursery:
                for number, (prompt, sampling) in enumerate(zip(prompts, asked, strict=True)):
                    nursery.start_soon(collect, client, f"churned-{number}", prompt, sampling, outputs[number])
                while sum(len(it.tokens) for it in outputs) < REQUESTS * NEW_TOKENS // 4:  # noqa: ASYNC110
                    await trio.sleep(0.02)
                cluster.workers["w0"].signal(signal.SIGKILL)
            disturbance.cancel_scope.cancel()
        await client.undrain()
        late = Received()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, client, "late", prompts[0], LATE, late)
            while not late.tokens:  # noqa: ASYNC110
                await trio.sleep(0.01)
            cluster.coordinator.signal(signal.SIGKILL)
        await assert_nothing_leaked(client)
        assert client.reconnects > 0
        again = [await replayed(client, f"churned-{number}") for number in range(REQUESTS)]
        assert (again, await replayed(client, "late")) == (outputs, late), "the journal has what was delivered"
    assert moves.keys() & {"keep", "drop"}
    judge = Judge(model)
    errors: list[float] = []
    cases = zip([*prompts, prompts[0]], [*asked, LATE], [*outputs, late], strict=True)
    for number, (prompt, sampling, received) in enumerate(cases):
        output = received.tokens
        logits = judge.logits(prompt, output)
        errors += logprob_errors(logits, received, sampling)
        at = wrong_from(logits, prompt, output, sampling, judge.eos)
        assert at < 0, f"request {number} differs at {at}: {sampling}, {bytes(it for it in output if it < 256)}"
        ends = {*sampling.stop_token_ids} if sampling.ignore_eos else {judge.eos, *sampling.stop_token_ids}
        has_stopped = bool(sampling.stop) and len(output) >= sampling.min_tokens
        assert output[-1] in ends or len(output) == sampling.max_tokens or has_stopped
        looked_at = output[sampling.min_tokens + CHARACTER_BYTES_MAX :]
        assert not {*map(ord, sampling.stop)} & {*looked_at}
        assert not ends & set(output[: max(sampling.min_tokens, len(output) - 1)])
    assert max(errors) < LOGPROB_BOUND_OF_TIES
    assert sum(error < LOGPROB_BOUND for error in errors) > 0.9 * len(errors)


#: Of requests during which processes die; the length that its grammar has is never reached.
LONG = Sampling(150, grammar="start: /([a-m][n-z]){100}/")


def held_samplings() -> list[Sampling]:
    """Of each grammar, greedy and drawn; the last one may hold tokens back for its stop string."""
    return [
        Sampling(
            NEW_TOKENS,
            temperature=0.9 * (number // len(GRAMMARS) % 2),
            top_p=0.9,
            seed=number,
            grammar=GRAMMARS[number % len(GRAMMARS)],
            stop=("az", "bz", "nm") if number == len(GRAMMARS) else (),
        )
        for number in range(2 * len(GRAMMARS))
    ]


async def decode_held(client: Client, prompts: list[list[int]], name: str, disturb: Disturbance) -> list[Received]:
    """Outputs of `held_samplings`, and of LONG, while which `disturb` goes on."""
    outputs = [Received() for _ in prompts]
    async with trio.open_nursery() as nursery:
        for number, (prompt, sampling) in enumerate(zip(prompts, [*held_samplings(), LONG], strict=True)):
            nursery.start_soon(collect, client, f"{name}-{number}", prompt, sampling, outputs[number])
        await until_decoding(client, name, 10)
        await disturb()
    return outputs


def assert_held(model: Path, prompts: list[list[int]], outputs: list[Received]) -> None:
    judge = Judge(model)
    for prompt, sampling, received in zip(prompts, [*held_samplings(), LONG], outputs, strict=True):
        text = bytes(it for it in received.tokens if it < 256)
        assert judge.wrong_from(prompt, received.tokens, sampling) < 0, (sampling, text)
        is_cut = any(stop.encode() in text for stop in sampling.stop)
        is_whole = received.tokens[-1:] == [judge.eos] or len(received.tokens) == sampling.max_tokens
        assert is_whole or sampling.stop
        assert not is_cut


@pytest.mark.deep
async def test_grammars_survive_deaths_of_a_rank_and_of_the_coordinator(model: Path, tmp_path: Path) -> None:
    """Of a group of two ranks."""
    prompts = prompts_of(9, 2 * len(GRAMMARS) + 1)
    async with cluster_of_two(group_config(model, tmp_path, "auto"), tmp_path, kept=True, group_size=2) as (
        cluster,
        client,
        _,
    ):

        async def disturb() -> None:
            before = pids(cluster)
            cluster.workers["w1"].signal(signal.SIGKILL)
            await until_restarted(cluster, ("w0", "w1"), before)
            cluster.coordinator.signal(signal.SIGKILL)

        outputs = await decode_held(client, prompts, "held", disturb)
        await until_all_connected(client, BACK_LIMIT_S)
        await assert_nothing_leaked(client)
        again = [await replayed(client, f"held-{number}") for number in range(len(prompts))]
    assert again == outputs
    assert_held(model, prompts, outputs)


@pytest.mark.deep
async def test_grammars_go_with_requests_from_node_to_node(model: Path, tmp_path: Path) -> None:
    """Prompts are computed on one node, with their first tokens, and decoded on another; one of them twice, since its
    request is retracted with its pages dropped. Then the coordinator dies."""
    prompts = prompts_of(10, 2 * len(GRAMMARS) + 1)
    spots = [Spot("prefill", "a", "shared"), Spot("decode", "b", "shared")]
    config = crash_config(model, tmp_path)
    async with running_nodes(config, tmp_path, spots) as (nodes, client):
        last = f"far-{len(prompts) - 1}"

        async def disturb() -> None:
            await until_decoding(client, last, 10)
            await client.retract([last], keep=False, hold=False)
            with trio.fail_after(BACK_LIMIT_S):
                while (await states_of(client, last)).count("TRANSFERRING") < 2:  # noqa: ASYNC110
                    await trio.sleep(0.02)
            nodes.children[COORDINATOR].signal(signal.SIGKILL)
            await nodes.children[COORDINATOR].wait()
            nodes.start(COORDINATOR)
            await nodes.until_answering()

        outputs = await decode_held(client, prompts, "far", disturb)
        await assert_nothing_leaked(client)
    assert_held(model, prompts, outputs)


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)
