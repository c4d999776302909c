"""A short run of `python -m tools.fuzz.zmq`: a real coordinator before hostile peers; SEED replays it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from hisparse.client.client import open_client
from tests.support.limits import HANG_LIMIT_S
from tools.fuzz import zmq as fuzz_zmq
from tools.fuzz.rig import Tally

pytestmark = [pytest.mark.process, pytest.mark.fuzz, pytest.mark.timeout(900)]

MESSAGES = 3_000


async def asks(place: Path) -> None:
    """Another client is served."""
    with trio.fail_after(HANG_LIMIT_S):
        async with open_client(f"ipc://{place}/run/client.sock", name="another") as client:
            await fuzz_zmq.request(client)


def test_coordinator_survives_a_storm_of_hostile_messages(tmp_path: Path) -> None:
    seed = int(os.environ.get("SEED", "0")) or int.from_bytes(os.urandom(4), "little")
    print(f"SEED={seed}")
    tally = Tally()
    with fuzz_zmq.site(tmp_path) as at:
        trio.run(fuzz_zmq.assail, tmp_path, tally, seed, MESSAGES)
        assert tally.sent >= MESSAGES
        trio.run(asks, tmp_path)
        assert at.coordinator.process.poll() is None
        assert "Traceback" not in at.coordinator.log.read_text()
