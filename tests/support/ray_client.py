"""The mixed requests of one client, on a node of a Ray cluster.

    python -m tests.support.ray_client READY_FILE KEYS_DIR PREFIX FILE

READY_FILE is that of `hisparse up --ray`: a coordinator that has moved is found by it. FILE gets outputs as JSON,
[requests][tokens], at the end; FILE.begun is there once BEGUN requests have said something.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from hisparse import Client, open_client
from protocol.errors import HiSparseError, Unavailable
from protocol.messages import Sampling
from protocol.settings import ClusterSettings
from protocol.transport.keys import access
from tests.support.nodes_rig import mixed_prompts

REQUESTS: Final = 64
#: As many as two ranks decode at a time: others are prefilled, on their way, or wait.
BEGUN: Final = 12
#: For how long one address is tried before the ready file is read again, and how often that is done.
RECONNECT_S: Final = 2.0
ROUNDS: Final = 240


def sampling_of(i: int) -> Sampling:
    """Greedy and drawn, of several lengths."""
    return Sampling(max_tokens=(30, 50, 70, 90)[i % 4], ignore_eos=True, temperature=(0.0, 0.8)[i // 2 % 2], seed=i)


async def decode_all(client: Client, prefix: str, outputs: list[list[int]], begun: Path | None = None) -> None:
    """Submit as many of the mixed prompts as there are `outputs`, or go on behind these. Raises a group of
    HiSparseError."""

    async def collect(i: int) -> None:
        request_id = f"{prefix}{i}"
        if outputs[i]:
            stream = await client.attach(request_id, len(outputs[i]))
        else:
            stream = await client.submit(prompts[i], sampling_of(i), request_id=request_id)
        async for said in stream:
            outputs[i] += said.tolist()
            if begun is not None and sum(map(bool, outputs)) >= BEGUN:
                begun.touch()  # noqa: ASYNC240
        assert stream.ended is not None
        assert stream.ended.outcome == "FINISHED", stream.ended

    prompts = mixed_prompts(REQUESTS)
    async with trio.open_nursery() as nursery:
        for i in range(len(outputs)):
            nursery.start_soon(collect, i)


async def decode_anywhere(
    endpoint: Callable[[], str], keys_dir: str, prefix: str, outputs: list[list[int]], begun: Path | None = None
) -> None:
    """`decode_all` at a coordinator that may move. Raises AssertionError when its record is not what was delivered."""
    for attempt in range(1, ROUNDS + 1):
        where = endpoint()
        key = access(ClusterSettings(keys_dir=keys_dir), "client", where)
        try:
            async with open_client(where, role="client", name="test", reconnect_limit_s=RECONNECT_S, key=key) as client:
                await decode_all(client, prefix, outputs, begun)
                for i, output in enumerate(outputs):
                    assert (await (await client.attach(f"{prefix}{i}")).collect()).tolist() == output
                return
        except* HiSparseError as group:
            if attempt == ROUNDS or group.split(Unavailable)[1] is not None:
                raise
        await trio.sleep(1.0)


def main(ready: Path, keys_dir: str, prefix: str, path: Path) -> None:
    outputs: list[list[int]] = [[] for _ in range(REQUESTS)]

    known = ""

    def endpoint() -> str:
        nonlocal known
        with suppress(FileNotFoundError):  # another driver has started, and the cluster is not up yet
            known = str(json.loads(ready.read_text())["client_endpoint"])
        return known

    trio.run(decode_anywhere, endpoint, keys_dir, prefix, outputs, path.with_name(path.name + ".begun"))
    path.write_text(json.dumps(outputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
