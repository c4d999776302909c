"""Workers that draft, as real processes that are killed, drained and parted: tokens are those of plain decoding, greedy
and sampled, and drafts are verified and accepted all the while.

The tokens of plain decoding come from an executor of this process without drafts. The checkpoints are predictable, so
that most drafts are right. Deterministic, but for prefixes with rows of decode steps, which that mode does not reuse.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse.client.client import Client
from protocol.messages import DIRECT, Sampling
from protocol.settings import Config
from protocol.units import PAGE_TOKENS, pages_for
from tests.processes.test_prefix_reuse import NEW_TOKENS as TURN_TOKENS
from tests.processes.test_prefix_reuse import check_against_the_library, converse
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster_rig import (
    KV_DTYPE,
    TOPK,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    kept_as,
    prompts_of,
    until_all_connected,
)
from tests.support.group_cluster import (
    BACK_LIMIT_S,
    pids,
    states_of,
    until_decoding,
    until_drained,
    until_restarted,
)
from tests.support.nodes_rig import Spot, running_nodes
from tests.support.worker_rig import Rig
from worker.runners.transformers_dsa import TransformersRunner

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

DRAFTS = 2
REQUESTS = 6
NEW_TOKENS = 32
HOT_SLOTS = 64
PROMPTS = prompts_of(24, REQUESTS)
SAMPLINGS = [
    Sampling(NEW_TOKENS, temperature=0.8 * (number % 2), seed=number, ignore_eos=True) for number in range(REQUESTS)
]


@pytest.fixture(scope="module")
def models(run_dir: Path) -> dict[str, Path]:
    """A checkpoint of each family that a test here takes."""
    about = {"index_topk": TOPK, "context_max_tokens": 2_048, "layers": 2, "predictable": True}
    return {family: tiny_checkpoint(run_dir, family, **about) for family in ("deepseek-v3.2", "glm-5")}


def drafting(config: Config, **worker: object) -> Config:
    """Workers of `config` draft, with the shortest tail that serves it."""
    changes = {"draft_tokens": DRAFTS, "tail_slots": 2 * (1 + DRAFTS), **worker}
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, **changes))


def plain_outputs(
    config: Config, prompts: Sequence[Sequence[int]] = PROMPTS, samplings: Sequence[Sampling] = SAMPLINGS
) -> list[list[int]]:
    """What an executor without drafts says of the prompts."""
    settings = msgspec.structs.replace(config.worker, draft_tokens=0)
    seats = settings.seats if settings.deterministic else 0
    rig = Rig(
        settings=settings,
        runner=TransformersRunner.load(settings.model, kv_dtype=settings.kv_dtype, deterministic_seats=seats),
    )
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        life = rig.coordinator.create(number, 1, NEW_TOKENS)
        life.prompt, life.sampling = tuple(prompt), sampling
        rig.run_until(partial(rig.coordinator.admit, life, HOT_SLOTS))
    rig.run()
    return [life.tokens for life in rig.coordinator.lives]


async def decode_all(client: Client, phase: str, prefill_mode: str = "auto") -> list[list[int]]:
    """Outputs in order. Drafts were verified, and some are in the outputs."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    drafts: list[tuple[int, int]] = []

    async def collect(number: int) -> None:
        stream = await client.submit(
            PROMPTS[number], SAMPLINGS[number], request_id=f"{phase}-{number}", prefill_mode=prefill_mode
        )
        outputs[number] = [token async for tokens in stream for token in tokens.tolist()]
        assert stream.ended is not None
        assert stream.ended.outcome == "FINISHED", stream.ended
        drafts.append((stream.ended.drafted_tokens, stream.ended.accepted_tokens))

    async with trio.open_nursery() as nursery:
        for number in range(REQUESTS):
            nursery.start_soon(collect, number)
    drafted, accepted = map(sum, zip(*drafts, strict=True))
    print(f"{phase}: {accepted} of {drafted} drafts accepted")
    assert 0 < accepted < drafted
    return outputs


async def events_of(client: Client, phase: str) -> list[str]:
    """What has happened to the requests of a phase."""
    histories = [(await client.request(f"{phase}-{number}")).history for number in range(REQUESTS)]
    return [line.event for history in histories for line in history]


async def test_lost_processes_and_a_drain_change_no_token(models: dict[str, Path], tmp_path: Path) -> None:
    """I2, I5: a worker and the coordinator get SIGKILL, and a worker is drained with handover, amid decode steps."""
    config = drafting(kept_as(crash_config(models["glm-5"], tmp_path), KV_DTYPE))
    plain = plain_outputs(config)
    async with cluster_of_two(config, tmp_path, kept=True) as (cluster, client, said):

        async def disturbed(
            phase: str, disturb: Callable[[], Awaitable[None]], is_seen: Callable[[str], Awaitable[bool]]
        ) -> None:
            """Again until the requests have felt it: where this process has no core, they end before."""
            for turn in count(1):
                name = f"{phase}{turn}"

                async def wait_and_disturb(name: str) -> None:
                    await until_decoding(client, name, 10)
                    await disturb()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait_and_disturb, name)
                    assert await decode_all(client, name) == plain, name
                await until_all_connected(client, BACK_LIMIT_S)
                await assert_nothing_leaked(client)
                if await is_seen(name):
                    return

        async def is_lost(name: str) -> bool:
            return "lost" in await events_of(client, name)

        async def is_adopted(_: str) -> bool:
            return "worker back" in (tmp_path / "coordinator.log").read_text()

        async def has_moved(name: str) -> bool:
            states = [await states_of(client, f"{name}-{number}") for number in range(REQUESTS)]
            return max(it.count("RUNNING") for it in states) > 1

        async def kill_worker() -> None:
            cluster.workers["w0"].signal(signal.SIGKILL)

        async def kill_coordinator() -> None:
            cluster.coordinator.signal(signal.SIGKILL)

        async def drain() -> None:
            await client.drain(("w1",), handover=True, deadline_s=60.0)
            await until_drained(client, ("w1",))
            await client.undrain(("w1",))

        await disturbed("killed", kill_worker, is_lost)
        await disturbed("adopted", kill_coordinator, is_adopted)
        await disturbed("drained", drain, has_moved)
        assert all("killed by SIGKILL" in line for line in said), said


@pytest.mark.group
@pytest.mark.deep
async def test_lost_rank_changes_no_token(models: dict[str, Path], tmp_path: Path) -> None:
    config = drafting(crash_config(models["deepseek-v3.2"], tmp_path), stream_backend="inline")
    plain = plain_outputs(config)
    async with cluster_of_two(config, tmp_path, kept=True, group_size=2) as (cluster, client, said):

        async def kill_rank(name: str) -> None:
            await until_decoding(client, name, 10)
            before = pids(cluster)
            cluster.workers["w1"].signal(signal.SIGKILL)
            await until_restarted(cluster, ("w0", "w1"), before)

        for turn in count(1):  # where this process has no core, requests end before the kill
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_rank, f"lost{turn}")
                assert await decode_all(client, f"lost{turn}") == plain
            if "lost" in await events_of(client, f"lost{turn}"):
                break
        assert any("w1 killed by SIGKILL" in line for line in said), said
        await until_all_connected(client, BACK_LIMIT_S)
        await assert_nothing_leaked(client)


def reusing(model: Path, runtime_dir: Path) -> Config:
    config = drafting(crash_config(model, runtime_dir), deterministic=False, pass_tokens=128)
    return msgspec.structs.replace(config, coordinator=msgspec.structs.replace(config.coordinator, prefix_reuse="own"))


async def drafts_of(client: Client) -> tuple[int, int]:
    """Drafts that were verified of all requests, and those of them in outputs."""
    rows = (await client.requests()).rows
    return sum(row.drafted_tokens for row in rows), sum(row.accepted_tokens for row in rows)


def rows_left(prompt: Sequence[int]) -> int:
    """Rows of full pages that a turn has left behind."""
    return (len(prompt) + TURN_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.deep
async def test_turn_reuses_pages_that_were_written_with_drafts(models: dict[str, Path], tmp_path: Path) -> None:
    with trio.fail_after(BACK_LIMIT_S):
        async with cluster_of_two(reusing(models["glm-5"], tmp_path), tmp_path) as (_, client, _):
            turns = await converse(client, 1)
            drafted, accepted = await drafts_of(client)
            assert 0 < accepted < drafted
    assert [reused for _, _, reused in turns] == [0] + [rows_left(prompt) for prompt, _, _ in turns[:-1]]
    check_against_the_library(models["glm-5"], turns)


@pytest.mark.pd
@pytest.mark.deep
async def test_prefill_and_decode_nodes_draft_and_reuse(models: dict[str, Path], tmp_path: Path) -> None:
    """The draft layer's rows travel with the model's; each node reuses what it has."""
    config = reusing(models["deepseek-v3.2"], tmp_path)
    spots = [Spot("prefill", "a", "shared"), Spot("decode", "b", "shared")]
    async with running_nodes(config, tmp_path, spots) as (nodes, client):
        assert await decode_all(client, "apart", DIRECT) == plain_outputs(config)
        before = sum((await nodes.samples("w0", "hisparse_transfer_pages_total", "end")).values())
        turns = await converse(client, 6)
        sent = sum((await nodes.samples("w0", "hisparse_transfer_pages_total", "end")).values()) - before
        await assert_nothing_leaked(client)
    assert [reused for _, _, reused in turns] == [0] + [
        len(prompt) // PAGE_TOKENS * PAGE_TOKENS for prompt, _, _ in turns[:-1]
    ]
    there = [0] + [rows_left(prompt) // PAGE_TOKENS for prompt, _, _ in turns[:-1]]
    assert sent == sum(pages_for(len(prompt)) - pages for (prompt, _, _), pages in zip(turns, there, strict=True))
    greedy = [Sampling(TURN_TOKENS, ignore_eos=True)] * len(turns)
    assert [output for _, output, _ in turns] == plain_outputs(config, [prompt for prompt, _, _ in turns], greedy)
