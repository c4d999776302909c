"""Conversations on real processes: each turn reuses what the turns before have computed, and says what it would say
without. `hisparse` against the library's generate() over the whole text."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse.client.client import Client
from protocol.messages import Ended, Sampling
from protocol.settings import Config
from tests.support.cluster_rig import cluster_of_two, crash_config, standing_model
from tests.support.nodes_rig import Spot, running_nodes
from tests.support.oracle_rig import run_oracle

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

#: Ends a cluster that hangs.
LIMIT_S = 400.0

TURNS = 3
NEW_TOKENS = 40
SAID_TOKENS = 90


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)


def reusing(model: Path, runtime_dir: Path, mode: str = "own", *, deterministic: bool = False) -> Config:
    config = crash_config(model, runtime_dir)
    return msgspec.structs.replace(
        config,
        coordinator=msgspec.structs.replace(config.coordinator, prefix_reuse=mode),
        worker=msgspec.structs.replace(config.worker, deterministic=deterministic, pass_tokens=128),
    )


async def say(client: Client, name: str, prompt: list[int], salt: str = "") -> tuple[list[int], Ended]:
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    stream = await client.submit(prompt, sampling, request_id=name, cache_salt=salt)
    output = [token async for part in stream for token in part.tolist()]
    assert stream.ended is not None
    return output, stream.ended


def said_by(person: int, turn: int) -> list[int]:
    return [(7 * turn + 3 * place + 31 * person) % 250 for place in range(SAID_TOKENS)]


async def converse(client: Client, person: int) -> list[tuple[list[int], list[int], int]]:
    """Prompt, output and reused tokens of each turn."""
    turns, text = [], said_by(person, 0)
    for turn in range(TURNS):
        output, ended = await say(client, f"p{person}-{turn}", text, f"p{person}")
        turns.append((text, output, ended.prefix_tokens))
        text = [*text, *output, *said_by(person, turn + 1)]
    return turns


def check_against_the_library(model: Path, turns: list[tuple[list[int], list[int], int]]) -> None:
    prompts = [{"tokens": prompt, "max_new_tokens": NEW_TOKENS} for prompt, _, _ in turns]
    answers = run_oracle({"model": str(model), "prompts": prompts, "ignore_eos": True})
    for (_, output, _), answer in zip(turns, answers, strict=True):
        for token, theirs, gap in zip(output, answer["tokens"], answer["gaps"], strict=True):
            if token != theirs:
                assert gap < 1e-3
                break


async def test_turns_reuse_all_full_pages_and_say_what_the_library_says(model: Path, tmp_path: Path) -> None:
    config = reusing(model, tmp_path)
    with trio.fail_after(LIMIT_S):
        async with cluster_of_two(config, tmp_path) as (_, client, _):
            turns = await converse(client, 1)
            # what decoding left durable: all rows but that of the last token
            assert [reused for _, _, reused in turns] == [0] + [
                (len(prompt) + NEW_TOKENS - 1) // 64 * 64 for prompt, _, _ in turns[:-1]
            ]
            again, ended = await say(client, "again", turns[-1][0], "another")
            assert (again, ended.prefix_tokens) == (turns[-1][1], 0), "another salt reuses nothing"
            (pool,) = await client.pools()
            assert pool.cached > 0
            assert pool.free + pool.cached == pool.host_pages
    check_against_the_library(model, turns)


@pytest.mark.deep
async def test_deterministic_mode_reuses_whole_chunks_of_prompts_and_gives_the_same_tokens(
    model: Path, tmp_path: Path
) -> None:
    said: list[list[list[int]]] = []
    for mode in ("own", "off"):
        (tmp_path / mode).mkdir(mode=0o700)
        config = reusing(model, tmp_path / mode, mode, deterministic=True)
        with trio.fail_after(LIMIT_S):
            async with cluster_of_two(config, tmp_path / mode) as (_, client, _):
                turns = await converse(client, 4)
        expected = [0] + [len(prompt) // 128 * 128 for prompt, _, _ in turns[:-1]]
        assert [reused for _, _, reused in turns] == (expected if mode == "own" else [0] * TURNS)
        said.append([output for _, output, _ in turns])
    assert said[0] == said[1]


@pytest.mark.deep
async def test_reuse_survives_workers_and_is_empty_after_the_coordinator(model: Path, tmp_path: Path) -> None:
    """Both workers are killed between two turns, then the coordinator."""
    config = reusing(model, tmp_path)
    with trio.fail_after(LIMIT_S):
        async with cluster_of_two(config, tmp_path, kept=True) as (cluster, client, _):
            prompt = said_by(2, 0) + said_by(2, 1)
            first, _ = await say(client, "first", prompt)
            for child in cluster.workers.values():
                os.kill(child.pid, signal.SIGKILL)
            text = [*prompt, *first, 5, 6, 7]
            second, ended = await say(client, "second", text)
            assert ended.prefix_tokens == (len(prompt) + NEW_TOKENS - 1) // 64 * 64
            os.kill(cluster.coordinator.pid, signal.SIGKILL)
            third, ended = await say(client, "third", text)
            assert (third, ended.prefix_tokens) == (second, 0), "digests are not written down"
            fourth, ended = await say(client, "fourth", text)
            assert (fourth, ended.prefix_tokens) == (second, len(text) // 64 * 64)
            (pool,) = await client.pools()
            assert pool.free + pool.cached == pool.host_pages
    check_against_the_library(model, [(text, second, 0)])


async def test_between_nodes_each_end_reuses_what_it_has_and_no_row_travels_twice(model: Path, tmp_path: Path) -> None:
    """The prefill node has the prompts of turns before, the decode node what was said behind them, too."""
    spots = [Spot("prefill", "a", "shared"), Spot("decode", "b", "shared")]
    with trio.fail_after(LIMIT_S):
        async with running_nodes(reusing(model, tmp_path), tmp_path, spots) as (nodes, client):
            turns = await converse(client, 6)
            sent = await nodes.samples("w0", "hisparse_transfer_pages_total", "end")
            assert all(pool.free + pool.cached == pool.host_pages for pool in await client.pools())
    prompts = [len(prompt) for prompt, _, _ in turns]
    assert [reused for _, _, reused in turns] == [0] + [prompt // 64 * 64 for prompt in prompts[:-1]]
    there = [0] + [(prompt + NEW_TOKENS - 1) // 64 for prompt in prompts[:-1]]
    fresh = [-(-prompt // 64) - pages for prompt, pages in zip(prompts, there, strict=True)]
    assert sum(sent.values()) == sum(fresh)
    check_against_the_library(model, turns)


async def test_two_requests_with_one_new_prefix_compute_it_once(model: Path, tmp_path: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with cluster_of_two(reusing(model, tmp_path), tmp_path) as (_, client, _):
            text = [(3 * place + 1) % 250 for place in range(900)]
            answers: dict[str, tuple[list[int], Ended]] = {}

            async def ask(name: str) -> None:
                answers[name] = await say(client, name, text)

            async with trio.open_nursery() as nursery:
                for name in ("one", "two", "three"):
                    nursery.start_soon(ask, name)
            assert sorted(ended.prefix_tokens for _, ended in answers.values()) == [0, 896, 896]
            assert len({tuple(output) for output, _ in answers.values()}) == 1


async def test_nothing_is_reused_when_it_is_off(model: Path, tmp_path: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with cluster_of_two(reusing(model, tmp_path, "off"), tmp_path) as (_, client, _):
            turns = await converse(client, 3)
            assert [reused for _, _, reused in turns] == [0] * TURNS
            (pool,) = await client.pools()
            assert (pool.cached, pool.free) == (0, pool.host_pages)
