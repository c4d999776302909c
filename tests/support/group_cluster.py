"""What tests of groups of real processes share: their settings, their requests, and waiting for them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import trio

from hisparse.client.client import Client
from hisparse.cluster.up import Cluster
from protocol.messages import RequestRow, Sampling
from protocol.settings import Config
from protocol.units import PAGE_TOKENS
from tests.support.cluster_rig import KV_DTYPE, crash_config, kept_as, prompts_of

REQUESTS = 6
NEW_TOKENS = 32
#: Time for a group to be restarted, and to answer, on busy cores.
BACK_LIMIT_S = 240.0


def group_config(model: Path, runtime_dir: Path, kv_dtype: str = KV_DTYPE) -> Config:
    config = kept_as(crash_config(model, runtime_dir), kv_dtype)
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, stream_backend="inline"))


async def decode_all(client: Client, prefix: str) -> dict[int, list[int]]:
    prompts, outputs = prompts_of(21, REQUESTS), {}

    async def collect(number: int) -> None:
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.8, seed=number)
        stream = await client.submit(prompts[number], sampling, request_id=f"{prefix}-{number}")
        outputs[number] = [token async for tokens in stream for token in tokens.tolist()]

    async with trio.open_nursery() as nursery:
        for number in range(REQUESTS):
            nursery.start_soon(collect, number)
    return outputs


async def until_decoding(client: Client, prefix: str, tokens: int) -> None:
    while not any(  # noqa: ASYNC110
        row.request_id.startswith(prefix) and row.generated_tokens >= tokens for row in (await client.requests()).rows
    ):
        await trio.sleep(0.02)


async def until_drained(client: Client, names: Collection[str]) -> None:
    with trio.fail_after(BACK_LIMIT_S):
        while {row.state for row in await client.workers() if row.worker in names} != {"drained"}:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def until_restarted(cluster: Cluster, names: tuple[str, ...], before: dict[str, int]) -> float:
    """Seconds until all of `names` are other processes."""
    began = trio.current_time()
    with trio.fail_after(BACK_LIMIT_S):
        while any(cluster.workers[name].pid == before[name] for name in names):  # noqa: ASYNC110
            await trio.sleep(0.05)
    return trio.current_time() - began


def pids(cluster: Cluster) -> dict[str, int]:
    return {name: child.pid for name, child in cluster.workers.items()}


async def rows_of(client: Client, prefix: str) -> list[RequestRow]:
    return [row for row in (await client.requests()).rows if row.request_id.startswith(f"{prefix}-")]


async def states_of(client: Client, request_id: str) -> list[str]:
    """The states that a request has been in, in order."""
    return [line.state for line in (await client.request(request_id)).history]


async def assert_nothing_prefilled_again(client: Client, prefix: str) -> None:
    """What has run once never waits for a prefill again."""
    rows = await rows_of(client, prefix)
    assert len(rows) == REQUESTS
    for row in rows:
        states = await states_of(client, row.request_id)
        ran = states.index("RUNNING") if "RUNNING" in states else 0  # a coordinator may find it at its end
        assert not {"QUEUED", "PREFILLING"} & set(states[ran:]), states


async def count_prefilled_from_full_pages(client: Client, prefix: str) -> int:
    """How many requests that had run were prefilled again: from the page on in which their prompt ends, or it fails."""
    count, rows = 0, await rows_of(client, prefix)
    assert len(rows) == REQUESTS
    for row in rows:
        history = (await client.request(row.request_id)).history
        states = [line.state for line in history]
        after = [line for line in history[states.index("RUNNING") :] if line.state in ("QUEUED", "PREFILLING")]
        full = (row.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
        if full and after:
            count += 1
            begun = [line.reason for line in after if line.event == "admitted"]
            assert begun, states
            assert all(f"; {full} tokens of the prompt reused" in reason for reason in begun), begun
            assert "QUEUED" not in {line.state for line in after}, states
    return count
