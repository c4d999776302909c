"""Network namespaces joined by a bridge: nodes with an address each, on one machine. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

SUBNET: Final = "10.123.0"
NAMESPACES_MAX: Final = 16
#: clone(2), mount(2) and prctl(2).
CLONE_NEWNS: Final = 0x20000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class Namespace:
    """`prefix` goes before the command of a process that is to live there. `port`: its end of the cable at `switch`."""

    name: str
    address: str
    switch: str
    port: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]


def why_not() -> str:
    """Empty where namespaces can be made."""
    if os.geteuid() or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    with ExitStack() as stack:
        probe = f"hsprobe{os.getpid()}"
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
        stack.callback(subprocess.run, ["ip", "netns", "del", probe], capture_output=True, check=False)
        return made.stderr.strip()


def cut(node: Namespace) -> None:
    """Let nothing pass between this node and the others from now on. No connection is closed by that."""
    _ip("-n", node.name, "link", "set", "eth0", "down")


def unplug(node: Namespace) -> None:
    """Drop what passes between this node and the others, without a word to either side, until `plug`."""
    _ip("-n", node.switch, "link", "set", node.port, "down")


def plug(node: Namespace) -> None:
    _ip("-n", node.switch, "link", "set", node.port, "up")


def enter(name: str) -> None:
    """Go on in a child of this process, in the network namespace of that name and with process numbers of its own: what
    `ip netns exec NAME unshare --pid --fork --kill-child --mount-proc` does for a command, and a forked process lacks.
    This process ends as the child does, and takes the child along when it is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        _check(libc.setns(file.fileno(), CLONE_NEWNET))
    _check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS))
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))


def _check(returned: int) -> None:
    if returned < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """`count` of them, at most NAMESPACES_MAX, each of which reaches each other; gone at the end."""
    assert count <= NAMESPACES_MAX
    switch = f"hs{os.getpid()}s"
    nodes = [
        Namespace(f"hs{os.getpid()}n{number}", f"{SUBNET}.{number}", switch, f"port{number}")
        for number in range(1, count + 1)
    ]
    with ExitStack() as stack:
        for name in (switch, *(node.name for node in nodes)):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for node in nodes:
            _ip("link", "add", node.port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", node.name)
            _ip("-n", switch, "link", "set", node.port, "master", "bridge", "up")
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", node.name, "link", "set", "eth0", "up")
            _ip("-n", node.name, "link", "set", "lo", "up")
        yield nodes


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=100)
