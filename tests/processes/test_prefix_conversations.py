"""200 requests of 20 conversations and 3 owners, while workers and the coordinator are killed, drained, and requests
taken off their workers: each says what it says without reuse, and reuses what a naive model of the cache computes.

Deterministic, so that outputs are equal bit for bit; and with a pool that evicts nothing. All conversations of a round
are under way at once. The first pages of all prompts are the same, of all owners.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse.client.client import Client
from hisparse.cluster.up import Cluster
from protocol.errors import HiSparseError
from protocol.messages import Sampling
from protocol.settings import Config
from protocol.units import PAGE_TOKENS
from tests.support.cluster_rig import assert_nothing_leaked, cluster_of_two, crash_config, write_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

CONVERSATIONS = 20
TURNS = 10
OWNERS = ("ann", "bob", "cy")
SYSTEM = [(5 * place) % 250 for place in range(2 * PAGE_TOKENS)]
SAID_TOKENS = 45
NEW_TOKENS = 16
#: Rounds in which the coordinator is killed: nothing is reused after.
KILLED = 6

Churn = Callable[[Cluster, Client, list[str]], Awaitable[None]]


def config_of(model: Path, runtime_dir: Path, mode: str) -> Config:
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    config = crash_config(model, runtime_dir, host_mem="64MiB")
    return msgspec.structs.replace(
        config,
        coordinator=msgspec.structs.replace(config.coordinator, prefix_reuse=mode),
        worker=msgspec.structs.replace(config.worker, prefill_chunk_tokens=PAGE_TOKENS),
    )


def owner_of(conversation: int) -> str:
    return OWNERS[conversation % len(OWNERS)]


def said(conversation: int, turn: int) -> list[int]:
    return [(7 * turn + 3 * place + 31 * conversation + 1) % 250 for place in range(SAID_TOKENS)]


async def ask(client: Client, name: str, owner: str, prompt: list[int], seed: int) -> tuple[list[int], int]:
    """What is said, and how many tokens of the prompt were reused."""
    sampling = Sampling(NEW_TOKENS, temperature=0.8, seed=seed, ignore_eos=True)
    stream = await client.submit(prompt, sampling, request_id=name, tenant=owner)
    output = [token async for part in stream for token in part.tolist()]
    assert stream.ended is not None
    return output, stream.ended.prefix_tokens


class NaiveModel:
    """What is cached, by owner: every page of every prompt that was computed since the coordinator started."""

    def __init__(self) -> None:
        self.pages: dict[str, set[tuple[int, ...]]] = defaultdict(set)

    def expected(self, owner: str, prompt: list[int]) -> int:
        pages = 0
        while (pages + 1) * PAGE_TOKENS < len(prompt) and tuple(prompt[: (pages + 1) * PAGE_TOKENS]) in self.pages[
            owner
        ]:
            pages += 1
        return pages * PAGE_TOKENS

    def add(self, owner: str, prompt: list[int]) -> None:
        for stop in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
            self.pages[owner].add(tuple(prompt[:stop]))


async def hold_round(
    cluster: Cluster, client: Client, texts: list[list[int]], turn: int, churn: Churn | None
) -> list[tuple[list[int], int]]:
    """One turn of every conversation at once, and what disturbs it."""
    answers: list[tuple[list[int], int]] = [([], 0)] * CONVERSATIONS
    names = [f"c{conversation}-{turn}" for conversation in range(CONVERSATIONS)]

    async def hold(conversation: int) -> None:
        name, text = names[conversation], texts[conversation]
        answers[conversation] = await ask(client, name, owner_of(conversation), text, conversation)

    async with trio.open_nursery() as nursery:
        for conversation in range(CONVERSATIONS):
            nursery.start_soon(hold, conversation)
        if churn is not None:
            await churn(cluster, client, names)
    return answers


async def until_known(client: Client, names: list[str]) -> None:
    """All requests of the round were accepted."""
    while len([row for row in (await client.requests()).rows if row.request_id in names]) < len(names):  # noqa: ASYNC110
        await trio.sleep(0.02)


async def retract_some(_: Cluster, client: Client, names: list[str], *, keep: bool = True) -> None:
    await until_known(client, names)
    for name in names[::2]:
        with suppress(HiSparseError):  # it has ended
            await client.retract([name], keep=keep, hold=False)


async def drop_some(cluster: Cluster, client: Client, names: list[str]) -> None:
    await retract_some(cluster, client, names, keep=False)


async def drain_one(cluster: Cluster, client: Client, names: list[str]) -> None:
    await until_known(client, names)
    worker = next(iter(cluster.workers))
    await client.drain([worker], handover=True, deadline_s=0.2)
    await trio.sleep(0.5)
    await client.undrain([worker])


async def kill_workers(cluster: Cluster, client: Client, names: list[str]) -> None:
    await until_known(client, names)
    for child in list(cluster.workers.values()):
        os.kill(child.pid, signal.SIGKILL)
        await trio.sleep(0.3)


async def kill_coordinator(cluster: Cluster, client: Client, names: list[str]) -> None:
    await until_known(client, names)
    os.kill(cluster.coordinator.pid, signal.SIGKILL)


CHURN: dict[int, Churn] = {
    1: retract_some,
    2: drop_some,
    3: drain_one,
    4: kill_workers,
    KILLED: kill_coordinator,
    8: retract_some,
}


def next_texts(texts: list[list[int]], answers: list[tuple[list[int], int]], turn: int) -> list[list[int]]:
    return [
        [*text, *output, *said(conversation, turn + 1)]
        for conversation, (text, (output, _)) in enumerate(zip(texts, answers, strict=True))
    ]


def check_reuse(model: NaiveModel, texts: list[list[int]], answers: list[tuple[list[int], int]], turn: int) -> None:
    for conversation, (text, (_, reused)) in enumerate(zip(texts, answers, strict=True)):
        expected, where = model.expected(owner_of(conversation), text), (conversation, turn)
        if turn == KILLED:  # its end may be one that the journal knew, which says nothing of reuse
            assert reused in (0, expected), where
        elif expected < len(SYSTEM):  # those of an owner that come together: one computes what they share
            assert reused in (0, len(SYSTEM)), where
        else:
            assert reused == expected, where
    for owner in OWNERS if not model.pages else ():
        mine = [reused for conversation, (_, reused) in enumerate(answers) if owner_of(conversation) == owner]
        assert 0 in mine, "pages of other owners are not reused"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def test_conversations_say_the_same_with_reuse_and_reuse_what_a_naive_model_says(
    model: Path, tmp_path: Path
) -> None:
    outputs: dict[str, list[list[list[int]]]] = {}
    for mode in ("off", "own"):
        config, naive, outputs[mode] = config_of(model, tmp_path / mode, mode), NaiveModel(), []
        async with cluster_of_two(config, tmp_path / mode, kept=True) as (cluster, client, _):
            texts = [[*SYSTEM, *said(conversation, 0)] for conversation in range(CONVERSATIONS)]
            for turn in range(TURNS):
                answers = await hold_round(cluster, client, texts, turn, CHURN.get(turn) if mode == "own" else None)
                outputs[mode].append([output for output, _ in answers])
                if mode == "own":
                    check_reuse(naive, texts, answers, turn)
                    if turn == KILLED:
                        naive = NaiveModel()
                    else:
                        for conversation, text in enumerate(texts):
                            naive.add(owner_of(conversation), text)
                texts = next_texts(texts, answers, turn)
            if mode == "own":
                await check_owners_apart(client)
            await assert_nothing_leaked(client)
    assert outputs["own"] == outputs["off"]


async def check_owners_apart(client: Client) -> None:
    """The same prompt under two owners."""
    prompt = [(11 * place + 3) % 249 for place in range(4 * PAGE_TOKENS + 9)]
    first, reused = await ask(client, "apart-0", "ann", prompt, 1)
    assert reused == 0
    assert await ask(client, "apart-1", "bob", prompt, 1) == (first, 0)
    assert await ask(client, "apart-2", "ann", prompt, 1) == (first, 4 * PAGE_TOKENS)
