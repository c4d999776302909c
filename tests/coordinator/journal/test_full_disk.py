"""A real coordinator whose journal's disk is full: new work is refused with the reason, running work goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from coordinator.journal.store import RESERVE_BYTES
from hisparse.client.client import Client, open_client
from hisparse.client.token_stream import TokenStream
from protocol.errors import Unavailable
from protocol.messages import Sampling
from tests.processes.test_coordinator_crash import LIMIT_S, Crew, crew_of
from tests.support.cluster_rig import LAYERS, cluster_config, prompts_of
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

DISK_BYTES = RESERVE_BYTES + (6 << 20)
#: More than the journal gives back of itself while new work is refused.
MORE_BYTES = 5 << 20
CONTEXT_TOKENS = 16_384
#: More than are decoded while this process stands still.
ENDLESS_TOKENS = 16_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def decode(client: Client, name: str, tokens: int) -> int:
    prompt = prompts_of(5, 1)[0][:100]
    stream = await client.submit(prompt, Sampling(max_tokens=tokens, ignore_eos=True), request_id=name)
    return len(await stream.collect())


def fill(place: Path) -> Path:
    """Take the last free byte."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4_096))
        except OSError:
            return filler


async def fill_for_good(client: Client, place: Path) -> tuple[Path, Path]:
    """Until new work is refused and stays refused: with so much of the reserve's room that it cannot be made again."""
    more = place / "more"
    while True:
        filler = fill(place)
        while not await refusal(client):  # noqa: ASYNC110
            await trio.sleep(0.05)
        with suppress(OSError):  # the room is the reserve's again
            more.write_bytes(bytes(MORE_BYTES))
            if await refusal(client):
                return filler, more


async def test_full_disk_refuses_new_work_and_running_work_continues(small_disk: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", "glm-5", index_topk=16, context_max_tokens=CONTEXT_TOKENS, layers=LAYERS)
    config = cluster_config(tmp_path / "model", tmp_path / "run")
    settings = msgspec.structs.replace(config.coordinator, journal=str(small_disk / "journal.sqlite"))
    worker = msgspec.structs.replace(config.worker, context_max_tokens=CONTEXT_TOKENS)
    config = msgspec.structs.replace(config, coordinator=settings, worker=worker)
    async with (
        crew_of(config, tmp_path, "w0") as crew,
        open_client(config.cluster.client_endpoint, reconnect_limit_s=60) as client,
    ):
        with trio.fail_after(LIMIT_S):
            await fill_and_free(crew, client, small_disk)


async def fill_and_free(crew: Crew, client: Client, small_disk: Path) -> None:
    stream = await client.submit(prompts_of(6, 1)[0][:60], Sampling(max_tokens=ENDLESS_TOKENS, ignore_eos=True))
    await read_on(stream, 1)
    fillers = await fill_for_good(client, small_disk)
    assert "running requests use the reserve" in await refusal(client)
    assert "running requests use the reserve" in (await client.welcome()).refusal
    await read_on(stream, 100)
    crew.kill("coordinator")  # what was delivered from the reserve is as safe as any other
    crew.start("coordinator")
    await crew.client_when(1)
    assert "no room for its reserve" in await refusal(client)
    for filler in fillers:
        filler.unlink()
    while await refusal(client):  # noqa: ASYNC110
        await trio.sleep(0.05)
    assert (await client.welcome()).refusal == ""
    assert await decode(client, "after", 5) == 5
    await read_on(stream, 100)
    await client.abort([stream.request_id])
    await stream.collect()
    assert stream.ended is not None
    assert (stream.ended.outcome, stream.ended.generated_tokens) == ("ABORTED", stream.offset)


async def read_on(stream: TokenStream, tokens: int) -> None:
    """So many more, of a request that has not ended."""
    before = stream.offset
    while stream.offset < before + tokens:
        await anext(stream)


async def refusal(client: Client) -> str:
    """Why a new request is refused now; empty: it was taken."""
    try:
        await decode(client, "", 1)
    except Unavailable as error:
        return str(error)
    return ""
