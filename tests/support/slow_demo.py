"""`python -m tests.support.slow_demo demo flags...`: `hisparse demo` whose workers take longer for each step until its
moves are made. So its requests have not ended before, however little of a core it gets. The request that it retracts is
resumed once the file that HELD_WHILE names, if it names one, is gone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import pytest
import trio

from hisparse.cli import main as hisparse
from hisparse.client.client import Client
from hisparse.demo import scenario
from tests.support.cluster_rig import plant

HELD_WHILE: Final = "HELD_WHILE"
POLL_S: Final = 0.05


def main() -> None:
    resume, held = Client.resume, os.environ.get(HELD_WHILE)
    direct: Callable[..., Awaitable[None]] = scenario._direct
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        slow = Path(place) / "slow"
        slow.touch()

        async def directed(*arguments: object) -> None:
            try:
                await direct(*arguments)
            finally:
                slow.unlink()

        async def resumed(client: Client, request_ids: Sequence[str]) -> None:
            while held and Path(held).exists():  # noqa: ASYNC110, ASYNC240 - another process removes it
                await trio.sleep(POLL_S)
            await resume(client, request_ids)

        plant(patched, "slow-steps", slow)
        patched.setattr(scenario, "_direct", directed)
        patched.setattr(Client, "resume", resumed)
        hisparse(prog_name="hisparse")


if __name__ == "__main__":
    main()
