"""Models whose heads select blocks, as a service: prompts from another node, reused pages, a worker that is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse import Client
from protocol.messages import Sampling
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster_rig import assert_nothing_leaked, crash_config
from tests.support.nodes_rig import Nodes, Spot, running_nodes
from tests.support.oracle_rig import run_oracle
from tests.support.prompts import TEXT

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

NEW_TOKENS = 70
LENGTHS = (60, 128, 300, 500, 640, 700)
#: Of the first output, what begins the second prompt.
KEPT = 24
#: Where generate()'s two best logits are closer, either token is right (fp32, logits of order 5).
TIE_BOUND = 1e-3


async def decode(client: Client, prompts: list[list[int]], prefix: str) -> list[list[int]]:
    """Outputs in order."""
    outputs: list[list[int]] = [[] for _ in prompts]

    async def collect(number: int) -> None:
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        stream = await client.submit(prompts[number], sampling, request_id=f"{prefix}{number}")
        async for tokens in stream:
            outputs[number] += tokens.tolist()

    async with trio.open_nursery() as nursery:
        for number in range(len(prompts)):
            nursery.start_soon(collect, number)
    return outputs


async def kill_once(nodes: Nodes, client: Client, name: str) -> None:
    """Kill a worker amid its requests, and start it again."""
    while not any(row.worker == name and row.state == "RUNNING" for row in (await client.requests()).rows):  # noqa: ASYNC110
        await trio.sleep(0.005)
    child = nodes.children[name]
    child.signal(signal.SIGKILL)
    await child.wait()
    nodes.start(name)


async def test_tokens_are_those_of_the_library_on_two_nodes(run_dir: Path, tmp_path: Path) -> None:
    """Prompts that repeat earlier ones begin with pages computed before; their worker is killed meanwhile."""
    model = tiny_checkpoint(run_dir, "minimax-m3", index_topk=256, context_max_tokens=2_048)
    config = crash_config(model, tmp_path, "24MiB")
    worker = msgspec.structs.replace(
        config.worker, hot_size_classes=(256, 384), context_max_tokens=1_024, device_mem="24MiB"
    )
    config = msgspec.structs.replace(config, worker=worker)
    prompts = [list(TEXT[length : 2 * length]) for length in LENGTHS]
    spots = [Spot("prefill", "a", "shared"), Spot("decode", "b", "shared")]
    async with running_nodes(config, tmp_path, spots) as (nodes, client):
        first = await decode(client, prompts, "first-")
        longer = [prompt + said[:KEPT] for prompt, said in zip(prompts, first, strict=True)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_once, nodes, client, "w1")
            second = await decode(client, longer, "second-")
        reused = sum(row.prefix_tokens for row in (await client.requests()).rows)
        lost = [
            line.event for number in range(len(longer)) for line in (await client.request(f"second-{number}")).history
        ]
        with trio.fail_after(120):
            await nodes.until_connected(client)
        await assert_nothing_leaked(client)
    assert reused > 0
    assert "lost" in lost
    asked = [{"tokens": prompt, "max_new_tokens": NEW_TOKENS} for prompt in (*prompts, *longer)]
    answers = run_oracle({"model": str(model), "prompts": asked, "ignore_eos": True, "dtype": "float32"})
    for said, answer in zip([*first, *second], answers, strict=True):
        differ = next(
            (at for at, pair in enumerate(zip(said, answer["tokens"], strict=True)) if pair[0] != pair[1]), None
        )
        assert differ is None or answer["gaps"][differ] < TIE_BOUND
