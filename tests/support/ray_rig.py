"""A real Ray cluster on one machine: each node a network namespace with process ids, /tmp and /dev/shm of its own.

A node is the process `unshare`, whose end is the end of all of its processes. `ray stop` kills by name, in all of them,
and is not used. Needs root, iproute2 and the extra `ray`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.support import netns_rig
from tests.support.netns_rig import Namespace, namespaces

PORT: Final = 6_379
START_LIMIT_S: Final = 120.0
OBJECT_STORE_BYTES: Final = 80_000_000
MEMORY_BYTES: Final = 1 << 30
#: What the first process of a node does: the command that starts Ray is its arguments.
INSIDE: Final = (
    "mount -t tmpfs -o size=1g,mode=1777 tmpfs /tmp && mount -t tmpfs -o size=512m,mode=1777 tmpfs /dev/shm && "
    '"$@" && exec sleep infinity'
)


def why_not() -> str:
    """Empty where the cluster can run."""
    return netns_rig.why_not() if find_spec("ray") else "the extra `ray` is not installed"


@dataclass
class RayNode:
    """`process`: of the node's `unshare`."""

    place: Namespace
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return self.place.address

    @property
    def init(self) -> int:
        """Process 1 of the node, as it is called here."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs on the node."""
        return ["nsenter", f"--target={self.init}", "--net", "--mount", "--pid", "--", *words]

    def pid_of(self, part: str) -> int:
        """A process on this node whose command line has `part`, as it is called here; 0: none."""
        space = os.readlink(f"/proc/{self.init}/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                is_here = entry.name.isdecimal() and os.readlink(entry / "ns" / "pid") == space
                if is_here and part in (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    return int(entry.name)
            except OSError:  # it has ended
                continue
        return 0

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def start_node(place: Namespace, head: str, kept: Path) -> RayNode:
    """Start Ray there, as the head where `head` is its address. Its output goes to a file in `kept`."""
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (kept / f"ray-{place.address}.log").open("ab") as log:
        command = [*place.prefix, *unshare, "sh", "-c", INSIDE, "sh", *start_command(place.address, head)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
    return RayNode(place, process)


def start_command(address: str, head: str) -> list[str]:
    """`ray start` on the node of `address`."""
    role = (
        ["--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=1"]  # no room for a group
        if head == address
        else [f"--address={head}:{PORT}", "--num-cpus=8"]
    )
    return [
        *(str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats"),
        f"--node-ip-address={address}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--memory={MEMORY_BYTES}",
        *role,
    ]


@contextmanager
def ray_cluster(count: int, kept: Path) -> Iterator[list[RayNode]]:
    """`count` nodes that know each other, the head first. Nothing of them is left at the end."""
    nodes: list[RayNode] = []
    with namespaces(count) as places:
        try:
            for place in places:
                nodes.append(start_node(place, places[0].address, kept))
                wait_for(f"{place.address} starts", lambda: "Ray runtime started" in log_of(kept, place.address))  # noqa: B023
            yield nodes
        finally:
            for node in nodes:
                node.end()


def log_of(kept: Path, address: str) -> str:
    return (kept / f"ray-{address}.log").read_text()


def wait_for(what: str, holds: Callable[[], bool], limit_s: float = START_LIMIT_S) -> float:
    """Wait until `holds()`; returns the seconds it took. Raises AssertionError after `limit_s`."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < limit_s, f"not after {limit_s:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def run_on(node: RayNode, words: Sequence[str], limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a command there to its end."""
    return subprocess.run(node.command(*words), capture_output=True, text=True, timeout=limit_s, check=False, cwd="/")
