"""The ports on which gloo listens take no connection once the ranks of a group are connected."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tests.support.group_rig import GroupRig
from tests.worker.group.test_ranks import SETTINGS, asks_of, spread
from worker.group.group import close_to_strangers, listening
from worker.runners.tiny import write_tiny_checkpoint

LISTENS = "0A"
TIMEOUT_S = 1.0


def is_open(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=TIMEOUT_S):
            return True
    except TimeoutError:
        return False


def test_a_closed_listener_drops_strangers_and_keeps_its_connections() -> None:
    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            assert listening() - before == {server.fileno()}
            close_to_strangers(listening() - before)
            assert not is_open(server.getsockname())
            client.sendall(b"to the server")
            assert accepted.recv(99) == b"to the server"
            accepted.sendall(b"and back")
            assert client.recv(99) == b"and back"


def test_looking_for_listeners_closes_and_keeps_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)):
        before = set(os.listdir("/proc/self/fd"))
        assert listening() == listening()
        assert len(set(os.listdir("/proc/self/fd")) ^ before) <= 2  # the descriptor of the listing itself


@pytest.mark.timeout(900)
@pytest.mark.group
@pytest.mark.process
def test_a_group_takes_no_connections_of_strangers(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", "glm-5", index_topk=32, context_max_tokens=1_024)
    tmp_path.chmod(0o700)
    rig = GroupRig(tmp_path / "model", tmp_path, spread(asks_of(4, seed=3), 2), SETTINGS)
    try:
        for rank in range(2):
            rig.line(rank)  # both have drawn their tokens, and run on
        for child in rig.ranks:
            ports = ports_of(child.pid)
            assert ports
            assert not [port for port in ports if is_open(("127.0.0.1", port))]
        rig.leave()
    finally:
        rig.close()


def ports_of(pid: int) -> set[int]:
    """TCP ports on which a process listens, over IPv4."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists() or path.is_symlink()]
    sockets = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENS and row[9] in sockets}
