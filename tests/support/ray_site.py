"""HiSparse on a real Ray cluster of four nodes: the head, a group of two ranks that prefills, one that decodes on
another node, and the coordinator on the fourth. Pages cross nodes by NIXL over TCP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests import ROOT
from tests.support.cluster_rig import write_model
from tests.support.ray_rig import PORT, RayNode, ray_cluster, run_on, start_command, wait_for

HISPARSE: Final = str(Path(sys.executable).with_name("hisparse"))
RANKS: Final = 4
#: How long anything may take that has to come back.
LIMIT_S: Final = 240.0
SETTINGS: Final = {
    "worker.deterministic": "true",
    "worker.stream_backend": "simulated",
    "worker.dtype": "float32",
    "worker.host_mem": "24MiB",
    "worker.device_mem": "64MiB",
    "worker.context_max_tokens": "1024",
    "worker.hot_size_classes": "64,128,256",
    "worker.seats": "8",
    "worker.tail_slots": "2",
    "worker.pass_tokens": "256",
    "worker.threads": "1",
    "coordinator.audit_interval_s": "0.5",
    "coordinator.heartbeat_limit_s": "2",
}
DEAD: Final = (
    "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR'); "
    "print(*(it['NodeManagerAddress'] for it in ray.nodes() if not it['Alive']))"
)
CROSSING: Final = {"worker.transfer": "nixl"}


@dataclass
class Site:
    """`kept`: a directory that all nodes see. `driver`: of the last `up`, on the head. `home`: where the coordinator
    is."""

    nodes: list[RayNode]
    kept: Path
    home: RayNode
    driver: subprocess.Popen[bytes] | None = None
    runs: int = 0

    @property
    def head(self) -> RayNode:
        return self.nodes[0]

    @property
    def prefilling(self) -> RayNode:
        return self.nodes[1]

    @property
    def decoding(self) -> RayNode:
        return self.nodes[2]

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:{PORT}"

    @property
    def ready(self) -> dict[str, str]:
        return dict(json.loads((self.kept / "ready.json").read_text()))

    def up(self, *more: str) -> float:
        """Start another driver; the seconds until it says that all is up."""
        if self.driver is not None and self.driver.poll() is None:
            kill(self.head, "hisparse up")
        (self.kept / "ready.json").unlink(missing_ok=True)
        with (self.kept / "up.log").open("ab") as log:
            self.driver = subprocess.Popen(self.head.command(*self.command(*more)), stdout=log, stderr=log, cwd="/")
        driver = self.driver
        took = wait_for("up", lambda: (self.kept / "ready.json").exists() or driver.poll() is not None, LIMIT_S)
        assert driver.poll() is None, (self.kept / "up.log").read_text()[-3000:]
        return took

    def command(self, *more: str) -> list[str]:
        """That of a driver."""
        command = [HISPARSE, "up", "--ray", self.ray_address, "--groups", "2", "--group-size", "2"]
        command += ["--roles", "prefill,decode", "--apart", "--coordinator-node", self.home.address]
        command += ["--model", str(self.kept / "model"), "--journal", str(self.kept / "journal.sqlite")]
        command += ["--keys-dir", str(self.kept / "keys"), "--runtime-dir", "/tmp/hs", *more]
        command += ["--ready-file", str(self.kept / "ready.json")]
        words = [word for name, value in (SETTINGS | CROSSING).items() for word in ("--set", f"{name}={value}")]
        return [*command, *words]

    def down(self, *more: str) -> None:
        done = run_on(self.head, [HISPARSE, "down", "--ray", self.ray_address, "--deadline", "1", *more])
        assert done.returncode == 0, done.stderr

    def operator(self, *words: str) -> str:
        """What a command of an operator prints."""
        access = ["--as", "admin", "--keys-dir", str(self.kept / "keys"), "-o", "json"]
        endpoint = f"cluster.admin_endpoint={self.ready['admin_endpoint']}"
        done = run_on(self.head, [HISPARSE, *words, *access, "--set", endpoint])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def quarantined(self) -> int:
        """Host pages of all nodes that a lost process may still write."""
        return sum(it["quarantined"] for it in json.loads(self.operator("pool")))

    def is_whole(self) -> bool:
        """All ranks are connected, and no page is in quarantine."""
        try:
            rows = json.loads(self.operator("workers"))
            connected = [it for it in rows if it["state"] == "connected" and not it["ranks_missing"]]
            return len(connected) == RANKS and self.quarantined() == 0
        except AssertionError:
            return False

    def until_whole(self) -> float:
        return wait_for("all ranks connected, no page in quarantine", self.is_whole, LIMIT_S)

    def outputs(self, disturb: Callable[[], None] | None = None) -> list[list[int]]:
        """Of the mixed requests; `disturb` is called while some decode and others wait."""
        self.runs += 1
        prefix = f"run{self.runs}-"
        path = self.kept / prefix
        begun = path.with_name(f"{prefix}.begun")
        words = [str(self.kept / "ready.json"), str(self.kept / "keys"), prefix, str(path)]
        command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.support.ray_client", *words]
        client = subprocess.Popen(self.head.command(*command), cwd="/")
        began = time.monotonic()
        try:
            wait_for("requests begin", lambda: begun.exists() or client.poll() is not None, LIMIT_S)
            if disturb is not None:
                assert client.poll() is None, "the requests ended before they were disturbed"
                disturb()
            assert client.wait(2 * LIMIT_S) == 0
        finally:
            client.kill()
        print(f"  all tokens after {time.monotonic() - began:.1f} s", flush=True)
        return list(json.loads(path.read_text()))

    def pids(self) -> dict[str, int]:
        """Of the coordinator, of a rank of each group, and of their supervisors, by node."""
        return {
            f"{node.address} {part}": node.pid_of(part)
            for node, process in ((self.prefilling, "worker"), (self.decoding, "worker"), (self.home, "coordinator"))
            for part in (f"hisparse.cli {process}", "hisparse.ray.supervisor")
        }

    def dead(self) -> list[str]:
        """Addresses of the nodes that Ray calls dead."""
        done = run_on(self.head, [sys.executable, "-c", DEAD, self.ray_address])
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def differences(self) -> str:
        """What audits have found, in the logs of the coordinator's node; empty: nothing."""
        logs = Path(f"/proc/{self.home.init}/root/tmp/ray").glob("session_*/logs/*.err")
        return "".join(line for it in logs for line in it.read_text().splitlines(keepends=True) if "audit:" in line)

    def start_ray_again(self, node: RayNode) -> None:
        """As an operator does. A supervisor may have outlived Ray there, and is then followed by another one."""
        before = node.pid_of("hisparse.ray.supervisor")
        start_ray(node, self.head)
        wait_for("another supervisor", lambda: node.pid_of("hisparse.ray.supervisor") not in (0, before), LIMIT_S)


def start_ray(node: RayNode, head: RayNode) -> None:
    done = run_on(node, start_command(node.address, head.address))
    assert done.returncode == 0, done.stderr


def kill(node: RayNode, part: str) -> None:
    """SIGKILL to a process of `node` whose command line has `part`."""
    pid = node.pid_of(part)
    assert pid, f"{part} does not run on {node.address}"
    os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_site() -> Iterator[Site]:
    """Up, with a model that all nodes see. Nothing of it is left at the end."""
    kept = Path("/var/tmp") / f"hisparse-ray-{os.getpid()}"  # outside of /tmp, which each node has of its own
    kept.mkdir(mode=0o700)
    try:
        write_model(kept / "model")
        with ray_cluster(4, kept) as nodes:
            site = Site(nodes, kept, nodes[3])
            print(f"\nup after {site.up():.1f} s", flush=True)
            yield site
    finally:
        shutil.rmtree(kept)
