"""Load for a cluster that is upgraded meanwhile: clients that ask for the same completions over and over.

    python upgrade_load.py ENDPOINT

Run it with PYTHONPATH at the tree whose client is to ask; it imports that version's public API alone. It prints a line
for each completion, and ends with a traceback when one is lost, refused, cut or has other tokens than the first.
"""

from __future__ import annotations

import sys
from typing import Final

import trio

from hisparse import Client, Sampling, open_client

PROMPTS: Final = ([*range(7, 207)], [*range(250, 40, -2)])
SAMPLING: Final = Sampling(max_tokens=60, ignore_eos=True)
RECONNECT_LIMIT_S: Final = 120.0


async def keep_on(client: Client, number: int, prompt: list[int]) -> None:
    expected: list[int] | None = None
    at = 0
    while True:
        at += 1
        stream = await client.submit(prompt, SAMPLING, request_id=f"client-{number}-{at}")
        tokens = (await stream.collect()).tolist()
        assert stream.ended is not None
        assert stream.ended.outcome == "FINISHED", stream.ended
        assert len(tokens) == SAMPLING.max_tokens, (number, at, tokens)
        expected = expected or tokens
        assert tokens == expected, (number, at, tokens, expected)
        print(number, at, flush=True)


async def main(endpoint: str) -> None:
    async with open_client(endpoint, reconnect_limit_s=RECONNECT_LIMIT_S) as client, trio.open_nursery() as nursery:
        for number, prompt in enumerate(PROMPTS):
            nursery.start_soon(keep_on, client, number, prompt)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
