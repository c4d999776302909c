"""coordinator.service as a process: light, alone in its directory, and gone when it is told to go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from coordinator.incarnation import next_incarnation
from coordinator.service import Coordinator, open_sockets, open_zap
from hisparse.client.client import Client, open_client, run_client
from metrics.state import CoordinatorCounters
from protocol.errors import ConfigError, Unavailable
from protocol.messages import Sampling
from protocol.settings import CoordinatorSettings
from tests import ROOT
from tests.support.fakes.worker import FakeWorker, hello
from tests.support.guarded_rig import Guarded, guarded_config, new_keys
from tests.support.limits import HANG_LIMIT_S

#: Aim: 0.5 s to start, which is no test on a shared machine, and 64 MiB.
RESIDENT_BYTES_MAX = 64 * 1024 * 1024
#: Below the default of the setting that is tested.
STOP_LIMIT_S = 25.0


def test_coordinator_imports_no_torch_transformers_or_cuda() -> None:
    script = (
        "import sys, coordinator.service, hisparse.client.client, hisparse.cluster.up\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'cuda') or m == 'worker.loop'])"
    )
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_incarnations_grow_even_if_the_clock_goes_back(tmp_path: Path) -> None:
    numbers = [next_incarnation(tmp_path, now_ms) for now_ms in (1_000, 2_000, 500, 2_000, 2_002, 9_000)]
    assert numbers == [1_000, 2_000, 2_001, 2_002, 2_003, 9_000]
    assert next_incarnation(tmp_path) > 1_700_000_000_000


@pytest.mark.timeout(HANG_LIMIT_S)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("text", "holds no number"),
        ("bytes", "holds no number"),
        ("pipe", "is no regular file"),
        ("directory", "cannot be read: Is a directory"),
        ("link", "is a symlink"),
        ("dangling", "is a symlink"),
        ("long", "more than 64 bytes"),
    ],
)
def test_an_unreadable_incarnation_is_refused_at_once(tmp_path: Path, kind: str, reason: str) -> None:
    """A pipe would hold the start until something writes to it."""
    file = tmp_path / "incarnation"
    (tmp_path / "elsewhere").write_text("7")
    match kind:
        case "pipe":
            os.mkfifo(file, 0o600)
        case "directory":
            file.mkdir()
        case "link" | "dangling":
            file.symlink_to("elsewhere" if kind == "link" else "nowhere")
        case _:
            file.write_bytes({"text": b"garbage", "bytes": b"\xff", "long": b"1" * 65}[kind])
    with pytest.raises(ConfigError, match=reason) as caught:
        next_incarnation(tmp_path)
    assert (caught.value.field, caught.value.value) == ("cluster.runtime_dir", str(file))
    assert "remove the file" in caught.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "incarnation"]


@pytest.mark.parametrize("text", [str(10**30), str(1 << 53), "-1", "9" * 5_000])
def test_invalid_incarnation_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "incarnation").write_text(text)
    with pytest.raises(ConfigError, match=r"cluster.runtime_dir=.*incarnation: .*remove the file"):
        next_incarnation(tmp_path)
    assert (tmp_path / "incarnation").read_text() == text


@contextmanager
def coordinator(directory: Path, **settings: float) -> Iterator[subprocess.Popen[str]]:
    """A coordinator process that answers, with `settings` of its table; killed at the end if it is still there."""
    process = start(directory, **settings)
    give_up_at = time.monotonic() + HANG_LIMIT_S
    try:
        with ThreadPoolExecutor(1) as thread:  # an async test has a trio loop in the main thread
            while not thread.submit(answers, directory).result():
                assert process.poll() is None, "it ended during start"
                assert time.monotonic() < give_up_at, "it does not answer"
        yield process
    finally:
        process.kill()
        process.communicate()


def answers(directory: Path) -> bool:
    try:
        run_client(f"ipc://{directory}/run/admin.sock", Client.welcome, role="admin")
    except Unavailable:
        return False
    return True


def start(directory: Path, **settings: float) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HISPARSE_")}
    environ |= {f"HISPARSE_COORDINATOR_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "hisparse.cli", "coordinator"],
        cwd=ROOT,
        env=environ | {"HISPARSE_CLUSTER_RUNTIME_DIR": f"{directory}/run"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
def test_idle_coordinator_is_small_and_logs_its_endpoints(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        resident_pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        assert resident_pages * os.sysconf("SC_PAGE_SIZE") < RESIDENT_BYTES_MAX
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=HANG_LIMIT_S)
        assert process.returncode == 0, log
        for role in ("client", "admin", "worker"):
            assert f"ipc://{tmp_path}/run/{role}.sock" in log
        assert "live_requests_max=16384" in log
        assert not list((tmp_path / "run").glob("*.sock")), "sockets are gone with their process"


async def test_running_requests_may_go_on_as_long_as_the_setting_says(tmp_path: Path) -> None:
    """With the default this would end by the limit of the test."""
    assert CoordinatorSettings().stop_deadline_s > STOP_LIMIT_S
    config, counters = guarded_config(tmp_path, new_keys(tmp_path), stop_deadline_s=0.0), CoordinatorCounters()
    with open_zap(config, counters) as zap, open_sockets(config) as sockets:
        coordinator = Coordinator(config, *sockets, zap=zap, counters=counters)
        it = Guarded(coordinator, dict(zip(("client", "admin", "worker"), sockets, strict=True)), tmp_path / "keys")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serve)
            await coordinator.started.wait()
            worker = await it.worker()
            async with it.client() as client:
                await client.submit_detached([1, 2, 3], Sampling(max_tokens=1_000))
                os.kill(os.getpid(), signal.SIGTERM)
                nursery.cancel_scope.deadline = trio.current_time() + STOP_LIMIT_S
        assert not nursery.cancel_scope.cancelled_caught
        worker.close()


@pytest.mark.process
def test_metrics_health_and_readiness_are_served(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "/metrics" in line)
        url = line.partition("url=")[2].split()[0].removesuffix("/metrics")
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert b"hisparse_info" in answer.read()
        with urllib.request.urlopen(f"{url}/healthz") as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/readyz")


@pytest.mark.process
def test_stop_command_ends_the_process(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        run_client(f"ipc://{tmp_path}/run/admin.sock", lambda admin: admin.stop(5.0), role="admin")
        assert process.wait(timeout=HANG_LIMIT_S) == 0


@pytest.mark.process
def test_second_coordinator_is_refused(tmp_path: Path) -> None:
    with coordinator(tmp_path) as first:
        second = start(tmp_path)
        _, log = second.communicate(timeout=HANG_LIMIT_S)
        assert second.returncode == 6, log
        assert f"process {first.pid} serves it already" in log
        assert run_client(f"ipc://{tmp_path}/run/client.sock", Client.welcome).model is None


@pytest.mark.process
def test_successor_of_a_killed_process_has_a_higher_incarnation(tmp_path: Path) -> None:
    numbers = []
    for _ in range(2):
        with coordinator(tmp_path):
            numbers.append(run_client(f"ipc://{tmp_path}/run/client.sock", Client.welcome).incarnation)
    assert numbers[0] < numbers[1]


async def keep_busy(endpoints: str) -> tuple[FakeWorker, str]:
    """A worker that never finishes anything, and the id of a request that it runs."""
    worker = await FakeWorker.connect(f"{endpoints}/worker.sock")
    await worker.say(hello())
    await worker.hear()
    async with open_client(f"{endpoints}/client.sock") as client:
        request_id = await client.submit_detached([1, 2, 3], Sampling(max_tokens=100))
    await worker.hear()
    return worker, request_id


async def submit_forever(client: Client) -> None:
    while True:
        await client.submit_detached([1], Sampling(max_tokens=1))


@pytest.mark.process
async def test_first_signal_finishes_work_and_second_exits(tmp_path: Path) -> None:
    with coordinator(tmp_path, heartbeat_limit_s=600.0, stop_deadline_s=600.0) as process:
        worker, request_id = await keep_busy(f"ipc://{tmp_path}/run")
        process.send_signal(signal.SIGINT)
        async with open_client(f"ipc://{tmp_path}/run/client.sock") as client:
            with trio.fail_after(HANG_LIMIT_S), pytest.raises(Unavailable, match="stopping"):
                await submit_forever(client)
            assert (await client.request(request_id)).row.state != "FAILED"
        assert process.poll() is None, "the request may finish"
        process.send_signal(signal.SIGINT)
        with trio.fail_after(HANG_LIMIT_S):
            while process.poll() is None:  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert process.returncode == 130
        worker.close()


@pytest.mark.process
def test_the_benchmark_counts_and_checks(tmp_path: Path) -> None:
    """A small run; its figures are of no interest, its verdict is: no gap, no repeat, no mix-up."""
    command = [sys.executable, "-m", "benchmarks.coordinator", "--json"]
    command += ["--requests", "200", "--rate", "5000", "--seconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * HANG_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = {"token_events_per_s", "command_rtt_p50_ms", "command_rtt_p99_ms", "admissions_per_s"}
    assert all(result[name] > 0 for name in names)
