"""`hisparse up --ray` on a real Ray cluster of three nodes: a coordinator, and two groups of two ranks.

Under load a rank, the coordinator, a supervisor, a raylet and the driver get SIGKILL: no token changes, none comes
twice, and no page stays in quarantine. `make cluster-test`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.cluster_rig import write_model
from tests.support.ray_client import REQUESTS, TOKENS
from tests.support.ray_rig import PORT, RayNode, ray_cluster, run_on, start_command, wait_for, why_not

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(900)]
HISPARSE = str(Path(sys.executable).with_name("hisparse"))
SETTINGS = (
    *("worker.deterministic=true", "worker.tail_slots=2", "worker.prefill_chunk_tokens=256"),
    *("coordinator.heartbeat_limit_s=2", "coordinator.audit_interval_s=0.5", "worker.stream_backend=simulated"),
)


@dataclass
class Site:
    """`kept`: a directory that all nodes see. `driver`: of the last `up`, on the head."""

    nodes: list[RayNode]
    kept: Path
    driver: subprocess.Popen[bytes] | None = None

    @property
    def head(self) -> RayNode:
        return self.nodes[0]

    @property
    def ready(self) -> dict[str, str]:
        return dict(json.loads((self.kept / "ready.json").read_text()))

    def up(self) -> float:
        """Start the driver; the seconds until it says that all is up."""
        (self.kept / "ready.json").unlink(missing_ok=True)
        command = [HISPARSE, "up", "--ray", f"{self.head.address}:{PORT}", "--groups", "2", "--group-size", "2"]
        command += ["--model", str(self.kept / "model"), "--journal", str(self.kept / "journal.sqlite")]
        command += ["--keys-dir", str(self.kept / "keys"), "--runtime-dir", "/tmp/hs", "--host-mem", "24MiB"]
        command += ["--dtype", "float32", "--device-mem", "64MiB", "--context-max-tokens", "1024", "--threads", "1"]
        command += ["--hot-size-classes", "64,128,256", "--seats", "8", "--ready-file", str(self.kept / "ready.json")]
        command += [word for it in SETTINGS for word in ("--set", it)]
        with (self.kept / "up.log").open("ab") as log:
            self.driver = subprocess.Popen(self.head.command(*command), stdout=log, stderr=log, cwd="/")
        driver = self.driver
        took = wait_for("up", lambda: (self.kept / "ready.json").exists() or driver.poll() is not None, 240)
        assert driver.poll() is None, (self.kept / "up.log").read_text()[-3000:]
        return took

    def operator(self, *words: str) -> str:
        """What a command of an operator prints."""
        access = ["--as", "admin", "--keys-dir", str(self.kept / "keys"), "-o", "json"]
        endpoint = f"cluster.admin_endpoint={self.ready['admin_endpoint']}"
        done = run_on(self.head, [HISPARSE, *words, *access, "--set", endpoint])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def are_connected(self) -> bool:
        """All ranks are, and no page is in quarantine."""
        try:
            rows = json.loads(self.operator("workers"))
            pools = json.loads(self.operator("pool"))
        except AssertionError:
            return False
        connected = [it for it in rows if it["state"] == "connected" and not it["ranks_missing"]]
        return len(connected) == 4 and not any(it["quarantined"] for it in pools)

    def outputs(self, prefix: str, disturb: Callable[[], None] | None = None) -> list[list[int]]:
        """Of all requests of a client; `disturb` is called while each of them decodes."""
        path = self.kept / prefix
        words = [self.ready["client_endpoint"], str(self.kept / "keys"), prefix, str(path)]
        command = self.head.command(
            *("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.support.ray_client", *words)
        )
        client = subprocess.Popen(command, cwd="/")
        try:
            wait_for(
                "requests begin", lambda: path.with_name(f"{prefix}.begun").exists() or client.poll() is not None, 240
            )
            if disturb is not None:
                assert client.poll() is None, "the requests ended before they were disturbed"
                disturb()
            assert client.wait(300) == 0
        finally:
            client.kill()
        return list(json.loads(path.read_text()))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if reason := why_not():
        pytest.skip(reason)
    kept = Path("/var/tmp") / f"hisparse-ray-{os.getpid()}"  # outside of /tmp, which each node has of its own
    kept.mkdir(mode=0o700)
    try:
        write_model(kept / "model")
        with ray_cluster(3, kept) as nodes:
            yield Site(nodes, kept)
    finally:
        shutil.rmtree(kept)


def kill(node: RayNode, part: str) -> None:
    pid = node.pid_of(part)
    assert pid, f"{part} does not run on {node.address}"
    os.kill(pid, signal.SIGKILL)


def start_ray_again(node: RayNode, head: RayNode) -> None:
    """As an operator does. Its supervisor may have outlived Ray there, and is then followed by another one."""
    before = node.pid_of("hisparse.ray.supervisor")
    done = run_on(node, start_command(node.address, head.address))
    assert done.returncode == 0, done.stderr
    wait_for("another supervisor", lambda: node.pid_of("hisparse.ray.supervisor") not in (0, before), 240)


def test_what_dies_comes_back_and_no_token_changes(site: Site) -> None:
    print(f"\nup after {site.up():.1f} s")
    second, third = site.nodes[1:]
    undisturbed = site.outputs("none")
    assert [len(it) for it in undisturbed] == [TOKENS] * REQUESTS
    victims: dict[str, Callable[[], None]] = {
        "rank": lambda: kill(second, "hisparse.cli worker"),
        "coordinator": lambda: kill(site.head, "hisparse.cli coordinator"),
        "supervisor": lambda: kill(third, "hisparse.ray.supervisor"),
        "raylet": lambda: kill(third, "raylet/raylet"),
        "driver": lambda: kill(site.head, "hisparse up"),
    }
    for name, disturb in victims.items():
        print(f"{name}: killed", flush=True)
        assert site.outputs(name, disturb) == undisturbed, name
        if name == "raylet":
            start_ray_again(third, site.head)
        if name == "driver":
            print(f"a driver joins after {site.up():.1f} s")
        print(f"{name}: all connected {wait_for(name, site.are_connected, 240):.1f} s after the last token")
    down = run_on(site.head, [HISPARSE, "down", "--ray", f"{site.head.address}:{PORT}", "--deadline", "1"])
    assert down.returncode == 0, down.stderr
    for node in site.nodes:
        assert not node.pid_of("hisparse.cli")
        assert not node.pid_of("hisparse.ray.supervisor")
