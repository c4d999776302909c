"""A host pool that is damaged while workers decode from it: its rows are gone, and every output is as without that."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.processes.test_main_job_crashes import REQUESTS, decode_all, histories, until_decoding
from tests.support.cluster_rig import (
    again_until,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    prompts_of,
    until_all_connected,
    write_model,
)
from worker.pool.file import HEADER_BYTES, Header

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

#: Of the way of both workers back, on busy cores.
LIMIT_S = 150.0


def overwrite_and_cut(path: Path) -> None:
    with path.open("r+b") as pool:
        pool.write(b"x" * HEADER_BYTES)
        pool.truncate(HEADER_BYTES)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def pool_id(path: Path) -> int:
    """0 where there is no whole header."""
    with path.open("rb") as pool:
        header = Header.read(pool.fileno())
    return header.pool_id if header is not None else 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (overwrite_and_cut, "it has no header"),
        pytest.param(cut, " bytes", marks=pytest.mark.deep),
        pytest.param(Path.unlink, "its file was removed or replaced", marks=pytest.mark.deep),
    ],
)
async def test_damaged_pool_is_replaced_and_no_output_changes(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    """I1, I5: whether a worker dies of what it reads there, or is ended. Both share the pool, so both begin anew."""
    prompts = prompts_of(13, REQUESTS)
    config = crash_config(write_model(tmp_path / "model"), tmp_path)
    async with cluster_of_two(config, tmp_path, kept=True) as (cluster, client, said):
        quiet, done = await decode_all(client, prompts, "quiet-"), trio.Event()
        first, workers = pool_id(cluster.pool), dict(cluster.workers)

        async def disturb() -> None:
            await until_decoding(client, "crashed-", "w0", 10)
            damage(cluster.pool)
            done.set()
            with trio.fail_after(LIMIT_S):
                while any(cluster.workers[name] is child for name, child in workers.items()):  # noqa: ASYNC110
                    await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            rounds = await again_until(done, partial(decode_all, client, prompts), quiet, "crashed-")
        events = await histories(client, rounds)
        await until_all_connected(client, LIMIT_S)
        await assert_nothing_leaked(client)
        assert pool_id(cluster.pool) not in (0, first)
    (line,) = [line for line in said if "is damaged" in line]
    assert line.endswith(": all workers start again with a new one")
    assert reason in line
    assert events.count("lost") >= 1
    assert not [line for line in said if "exited with 8" in line or "exited with 1;" in line], said
