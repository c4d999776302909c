"""Requests of one client, on a node of a Ray cluster.

    python -m tests.support.ray_client ENDPOINT KEYS_DIR PREFIX FILE

The file gets outputs as JSON, [requests][tokens], at the end; FILE.begun is there once each request has said something.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import trio

from hisparse import TokenStream, open_client
from protocol.messages import Sampling
from protocol.settings import ClusterSettings
from protocol.transport.keys import access
from tests.support.cluster_rig import prompts_of

REQUESTS: Final = 16
TOKENS: Final = 300


async def decode(endpoint: str, keys_dir: str, prefix: str, begun: Path) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in range(REQUESTS)]

    async def collect(i: int, stream: TokenStream) -> None:
        async for said in stream:
            outputs[i] += said.tolist()
            if all(outputs):
                begun.touch()  # noqa: ASYNC240

    key = access(ClusterSettings(keys_dir=keys_dir), "client", endpoint)
    async with (
        open_client(endpoint, role="client", name="test", reconnect_limit_s=300, key=key) as client,
        trio.open_nursery() as nursery,
    ):
        for i, prompt in enumerate(prompts_of(5, REQUESTS)):
            sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=(0.0, 0.8)[i % 2], seed=i)
            nursery.start_soon(collect, i, await client.submit(prompt, sampling, request_id=f"{prefix}{i}"))
    return outputs


def main(endpoint: str, keys_dir: str, prefix: str, path: Path) -> None:
    found = trio.run(decode, endpoint, keys_dir, prefix, path.with_name(path.name + ".begun"))
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
