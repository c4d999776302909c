"""The main job as real processes: many requests over two workers, moved about while they decode.

Operators do everything at once here: retract (keep and drop), resume, resize, abort, drain with handover. What was
delivered must equal an undisturbed run token for token (deterministic mode), the model library's generate() must agree
with that run, and every page, chunk and seat must be back at the end (I1, I2, I5).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from hisparse.client.client import Client
from protocol.errors import CapacityError, NotFound, WrongState
from protocol.messages import Sampling
from tests.support.cluster_rig import (
    SIZE_CLASSES,
    assert_nothing_leaked,
    cluster_config,
    cluster_of_two,
    prompts_of,
    standing_model,
)
from tests.support.oracle_rig import run_oracle

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 30
NEW_TOKENS = 24
#: An oracle's token may differ where its two best logits are closer than this: fp32 sums in another order.
TIE_BOUND = 1e-4


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)


async def collect(client: Client, name: str, prompt: Sequence[int], outputs: dict[str, list[int]]) -> None:
    stream = await client.submit(prompt, Sampling(max_tokens=NEW_TOKENS, ignore_eos=True), request_id=name)
    outputs[name] = []
    async for tokens in stream:
        outputs[name] += tokens.tolist()


async def decode_all(client: Client, prompts: Sequence[Sequence[int]], prefix: str) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    async with trio.open_nursery() as nursery:
        for i, prompt in enumerate(prompts):
            nursery.start_soon(collect, client, f"{prefix}{i}", prompt, outputs)
    return {name.removeprefix(prefix): tokens for name, tokens in outputs.items()}


async def disturb(client: Client, seed: int, moves: dict[str, int], requests: int = REQUESTS) -> None:
    """Give operators' commands on requests drawn of the first `requests`, until cancelled.

    The first ones are one of each kind, later rounds are in an order that is drawn. Late ones are refused, and say so;
    the next one is of the same kind.
    """
    dice, deck = random.Random(seed), ["drain", "resize", "drop", "keep"]
    while True:
        await trio.sleep(dice.uniform(0.0, 0.03))
        name = f"churned-{dice.randrange(requests)}"
        deck = deck or dice.sample(("keep", "drop", "resize", "resize", "drain"), 5)
        command = deck[-1]
        try:
            match command:
                case "keep" | "drop":
                    held = not moves.get(command, 0) % 2
                    await client.retract([name], keep=command == "keep", hold=held)
                case "resize":
                    await client.resize([name], dice.choice((*SIZE_CLASSES, 0, -1)))
                case "drain":
                    worker = f"w{dice.randrange(2)}"
                    await client.drain([worker], handover=True, deadline_s=2)
                    await trio.sleep(dice.uniform(0.0, 0.1))
                    await client.undrain()
            moves[deck.pop()] = moves.get(command, 0) + 1
        except (NotFound, WrongState, CapacityError):
            continue


async def release_held(client: Client, moves: dict[str, int]) -> None:
    """Resume the requests that an operator held, so that all can finish."""
    while True:
        await trio.sleep(0.2)
        for row in (await client.requests()).rows:
            if row.held:
                with suppress(WrongState):
                    await client.resume([row.request_id])
                    moves["resume"] = moves.get("resume", 0) + 1


async def test_moved_requests_decode_as_if_undisturbed(model: Path, tmp_path: Path) -> None:
    prompts, moves, churned = prompts_of(1, REQUESTS), {}, {}
    async with cluster_of_two(cluster_config(model, tmp_path), tmp_path) as (_, client, _):
        quiet = await decode_all(client, prompts, "quiet-")
        await assert_nothing_leaked(client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb, client, 2, moves)
            nursery.start_soon(release_held, client, moves)
            churned = await decode_all(client, prompts, "churned-")
            nursery.cancel_scope.cancel()
        await client.undrain()
        await assert_nothing_leaked(client)
    assert {name: len(tokens) for name, tokens in quiet.items()} == {str(i): NEW_TOKENS for i in range(REQUESTS)}
    assert churned == quiet
    assert set(moves) == {"keep", "drop", "resize", "resume", "drain"}, moves
    assert_oracle_agrees(model, prompts[:4], quiet)


def assert_oracle_agrees(model: Path, prompts: Sequence[Sequence[int]], outputs: dict[str, list[int]]) -> None:
    job = {
        "model": str(model),
        "prompts": [{"tokens": prompt, "max_new_tokens": NEW_TOKENS} for prompt in prompts],
        "ignore_eos": True,
    }
    for i, run in enumerate(run_oracle(job)):
        differ = [at for at, (ours, its) in enumerate(zip(outputs[str(i)], run["tokens"], strict=True)) if ours != its]
        assert not differ or run["gaps"][differ[0]] < TIE_BOUND, f"prompt {i} differs from position {differ[0]}"


async def test_abort_in_every_state_frees_everything(model: Path, tmp_path: Path) -> None:
    prompts, dice, outputs = prompts_of(3, REQUESTS), random.Random(4), {}
    async with cluster_of_two(cluster_config(model, tmp_path), tmp_path) as (_, client, _):
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                nursery.start_soon(collect, client, str(i), prompt, outputs)
            aborted = set()
            for name in dice.sample([str(i) for i in range(REQUESTS)], 18):
                await trio.sleep(dice.uniform(0.0, 0.15))
                try:
                    await client.abort([name])
                    aborted.add(name)
                except (NotFound, WrongState):
                    continue
        rows = {row.request_id: row.state for row in (await client.requests()).rows}
        await assert_nothing_leaked(client)
    assert aborted
    assert {name for name, state in rows.items() if state == "ABORTED"} == aborted
    assert all(len(outputs[name]) == NEW_TOKENS for name, state in rows.items() if state == "FINISHED")


async def test_single_request_has_no_misses_and_many_shrink(model: Path, tmp_path: Path) -> None:
    async with cluster_of_two(cluster_config(model, tmp_path, streams="inline", hot_chunks=40), tmp_path) as (
        _,
        client,
        _,
    ):
        outputs: dict[str, list[int]] = {}
        await collect(client, "alone", prompts_of(5, 1)[0], outputs)
        alone = (await client.request("alone")).row
        assert (alone.misses, alone.state) == (0, "FINISHED")
        assert alone.hits > 0
        many = await decode_all(client, prompts_of(6, REQUESTS), "many-")
        rows = [row for row in (await client.requests()).rows if row.request_id.startswith("many-")]
        await assert_nothing_leaked(client)
    assert all(len(tokens) == NEW_TOKENS for tokens in many.values())
    assert {row.state for row in rows} == {"FINISHED"}
    assert sum(row.misses for row in rows) > 0, "no buffer shrank"
