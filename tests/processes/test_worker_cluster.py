"""A real worker under a real coordinator over ipc: leaving and returning amid a request, probes, metrics."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from hisparse.client.client import Client, open_client
from metrics.names import COORDINATOR, WORKER, exported_names
from protocol.errors import Unavailable
from protocol.messages import Sampling
from tests.support.checkpoints import tiny_checkpoint
from tests.support.hostile_schemas import CHAIN
from tests.support.planted import PLANTED_WHILE
from tests.support.process_rig import Place, Process
from worker.process import EXIT_CLEAN

PROMPT = list((b"What a worker has published, no coordinator asks for twice. " * 8)[:400])
TOKENS = 150
TOO_LARGE = "grammar=: takes more than 10 s or 1024 MiB to build (simplify it)"

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, layers=2)


def planted(defect: str) -> tuple[str, ...]:
    """What a worker with a defect of tests.support.planted runs."""
    return "-m", "tests.support.planted", defect


async def until_served(client: Client) -> None:
    while not any(row.state == "connected" for row in await client.workers()):  # noqa: ASYNC110
        await trio.sleep(0.1)


async def numbers(process: Process) -> dict[str, float]:
    """Families by the table's names, each summed over its samples (buckets left out)."""
    status, body = await process.get("/metrics")
    assert status == 200, body
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(body):
        name = family.name + ("_total" if family.type == "counter" else "")
        sums[name] = sum(sample.value for sample in family.samples if not sample.name.endswith("_bucket"))
    return sums


async def connected(place: Place) -> None:
    while True:
        try:
            async with open_client(place.endpoint("client"), reconnect_limit_s=0):
                return
        except Unavailable:
            await trio.sleep(0.05)


async def test_successor_finishes_requests_of_a_leaving_worker(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2, I5: SIGTERM in the middle of a request stops the worker cleanly; the request waits, and another process of
    the same pool continues it without repeating, losing or changing a token."""
    place, order = Place(tmp_path, model, worker_program=planted("signal-at")), tmp_path / "signal"
    monkeypatch.setenv(PLANTED_WHILE, str(order))
    monkeypatch.setenv("HISPARSE_WORKER_NAME", "w0")
    sampling = Sampling(TOKENS, ignore_eos=True)
    async with place.coordinator() as coordinator:
        await connected(place)
        assert (await coordinator.get("/healthz"))[0] == 200
        assert (await coordinator.get("/readyz"))[0] == 503  # it has no worker
        async with open_client(place.endpoint("admin"), role="admin") as client:
            async with place.worker() as worker:
                await until_served(client)
                assert (await worker.get("/readyz")) == (200, "link: welcomed\n")
                assert (await coordinator.get("/readyz"))[0] == 200
                undisturbed = (await (await client.submit(PROMPT, sampling)).collect()).tolist()
                assert len(undisturbed) == TOKENS

                order.write_text(f"w0 decode {signal.SIGTERM:d}")  # by itself: it cannot come to the end before
                stream = await client.submit(PROMPT, sampling, request_id="moved")
                received = (await anext(stream)).tolist()
                code, log = await worker.exit()
                assert code == EXIT_CLEAN, log
            assert place.pool.exists()
            row = (await client.request("moved")).row
            assert row.state in ("QUEUED", "RETRACTED"), row
            assert row.durable_tokens >= len(PROMPT)
            assert (await coordinator.get("/readyz"))[0] == 503

            async with place.worker("--stream-backend", "simulated") as worker:
                async for tokens in stream:
                    received += tokens.tolist()
                assert received == undisturbed
                await check_numbers(coordinator, worker, len(received) + len(undisturbed))
                (pool,) = await client.pools()
                assert (pool.free, pool.owned, pool.quarantined) == (pool.host_pages, 0, 0)
                worker.signal(signal.SIGINT)
                assert (await worker.exit())[0] == EXIT_CLEAN
        coordinator.signal(signal.SIGTERM)
        assert (await coordinator.exit())[0] == EXIT_CLEAN


def children_of(pid: int) -> list[psutil.Process]:
    """Processes in which a worker tries grammars."""
    return [it for it in psutil.Process(pid).children() if "protocol.grammar_trials" in it.cmdline()]


async def test_grammar_without_end_neither_stalls_nor_ends_a_worker(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of the coordinator sends it: no front has checked it. Its build reaches no limit before the others have
    ended: it is stopped at its start."""
    place, halted = Place(tmp_path, model, worker_program=planted("halted-trial")), tmp_path / "halted"
    monkeypatch.setenv(PLANTED_WHILE, str(halted))
    bomb, regex = Sampling(TOKENS, grammar=CHAIN), Sampling(20, grammar="start: /[a-c]{20}/")
    async with place.coordinator(), place.worker() as worker:
        await connected(place)
        async with open_client(place.endpoint("admin"), role="admin") as client:
            await until_served(client)
            halted.touch()
            stream = await client.submit(PROMPT, bomb)
            while halted.exists():  # noqa: ASYNC110 - another process starts it
                await trio.sleep(0.01)
            trials = children_of(worker.popen.pid)
            for sampling in (regex, Sampling(20, ignore_eos=True)):
                assert len(await (await client.submit(PROMPT, sampling)).collect()) >= 20
            trials[0].kill()  # as its alarm does
            assert len(await stream.collect()) == 0
            row = (await client.request(stream.request_id)).row
            assert (row.state, row.reason) == ("FAILED", TOO_LARGE)
            assert len(await (await client.submit(PROMPT, regex)).collect()) >= 20
            worker.signal(signal.SIGTERM)
            assert (await worker.exit())[0] == EXIT_CLEAN


async def check_numbers(coordinator: Process, worker: Process, tokens: int) -> None:
    """What both processes export is the table, and adds up."""
    ours, theirs = await numbers(coordinator), await numbers(worker)
    assert ours.keys() == exported_names(COORDINATOR)
    assert theirs.keys() == exported_names(WORKER)
    assert ours["hisparse_tokens_total"] == tokens
    assert ours["hisparse_submitted_total"] == ours["hisparse_ended_total"] == 2
    assert ours["hisparse_admissions_total"] == 3
    assert ours["hisparse_prompt_tokens_total"] == 2 * len(PROMPT)
    assert ours["hisparse_commands_total"] > 0
    assert ours["hisparse_command_ack_seconds"] > 0
    assert 0 < theirs["hisparse_worker_tokens_total"] < TOKENS
    assert theirs["hisparse_worker_hits_total"] == 0  # it is resident: nothing is looked up
    assert theirs["hisparse_worker_steps_total"] > 0
    assert theirs["hisparse_worker_prompt_tokens_total"] == 0  # resumed, not prefilled
    assert theirs["hisparse_worker_copied_bytes_total"] > 0
    assert theirs["hisparse_worker_admitted_total"] == theirs["hisparse_worker_released_total"] == 1
