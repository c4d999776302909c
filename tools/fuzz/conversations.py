"""`python -m tools.fuzz.conversations --count 10000 --seed S`: drawn conversations of the official packages.

    front      the real one, on a socket, before a model whose turns are prescribed
    clients    THREADS threads with the packages `openai` and `anthropic`: tests.support.drawn_conversations

Half of the conversations are served with the template of GLM-5, half with the format of DeepSeek-V3.2. Prints one line
of JSON for each: turns of each API, forms in which answers were sent back, refusals by rule, and findings. Exits
with 1 when there is a finding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from tests.support.agents_rig import agents_rig
from tests.support.drawn_conversations import FAMILIES, DrawnConversation, DrawnModel, Findings, Site

#: Conversations at the same time: the rig's token log has room for the ended ones of so many.
THREADS: Final = 6
#: Findings that are printed.
SHOWN: Final = 20


async def converse(directory: Path, family: str, numbers: Sequence[int], seed: int) -> Findings:
    """Hold the conversations `numbers` with a model of `family`."""
    found, model = Findings(), DrawnModel(family)
    async with agents_rig(directory, model, family=family) as rig:
        site = Site(family, model, rig.openai(), rig.anthropic())
        limiter = trio.CapacityLimiter(THREADS)
        async with trio.open_nursery() as nursery:
            for number in numbers:
                one = DrawnConversation(number, seed, site, found)
                nursery.start_soon(lambda run: trio.to_thread.run_sync(run, limiter=limiter), one.run)
    found.wrong += model.missing
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000, help="conversations")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    options = parser.parse_args()
    wrong = 0
    for place, family in enumerate(FAMILIES):
        numbers = range(place, options.count, len(FAMILIES))
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="conversations-") as name:
            found = trio.run(converse, Path(name), family, numbers, options.seed)
        told = {"family": family, "seed": options.seed, "conversations": len(numbers), "found": len(found.wrong)}
        told |= {"seconds": round(time.monotonic() - began), "tried": dict(sorted(found.tried.items()))}
        print(json.dumps(told, ensure_ascii=False), flush=True)
        for finding in found.wrong[:SHOWN]:
            print(finding, file=sys.stderr)
        wrong += len(found.wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
