"""A group over two nodes: network namespaces with an address each, and process numbers of their own, so that only
connections tell of a death."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from protocol.errors import EXIT_PEER_LOST, ConfigError, NotAllowed
from protocol.settings import ClusterSettings, Config, CoordinatorSettings, WorkerSettings
from tests.support.checkpoints import tiny_checkpoint
from tests.support.group_rig import Ask, GroupRig, settings_of
from tests.support.netns_rig import Namespace, cut, namespaces, why_not
from tests.support.ports import free_ports
from tests.worker.group.test_ranks import SETTINGS, asks_of, spread, wrong
from worker.group import sockets
from worker.group.control import Control
from worker.group.messages import Join, encode

pytestmark = [pytest.mark.group, pytest.mark.process, pytest.mark.timeout(1_200)]
PORT = 29_500
#: Heartbeat limit of ranks whose silence is awaited: longer than a busy machine keeps any of them from beating.
SILENCE_LIMIT_S = 6.0
#: Of ranks whose end is not seen by silence; a longer wait is a hang.
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def checkpoint(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, "glm-5", index_topk=32, context_max_tokens=1_024, layers=2)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return write_secret(tmp_path / "secret")


def write_secret(path: Path) -> Path:
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


@pytest.fixture
def nodes() -> Iterator[list[Namespace]]:
    if why_not():
        pytest.skip(why_not())
    with namespaces(2) as found:
        yield found


def rig_of(
    checkpoint: Path,
    directory: Path,
    nodes: list[Namespace],
    secret: Path,
    requests: int,
    heartbeat_limit_s: float = LIMIT_S,
) -> tuple[GroupRig, list[list[Ask]]]:
    settings = msgspec.structs.replace(SETTINGS, group_secret_file=str(secret))
    asks = spread(asks_of(requests, seed=31), 4)
    endpoint = f"tcp://{nodes[0].address}:{PORT}"
    on_node = [msgspec.structs.replace(settings, node=f"n{rank // 2}") for rank in range(4)]
    limits = CoordinatorSettings(heartbeat_limit_s=heartbeat_limit_s)
    configs = [
        msgspec.structs.replace(settings_of(checkpoint, directory, 4, rank, own, endpoint), coordinator=limits)
        for rank, own in enumerate(on_node)
    ]
    netns = [nodes[rank // 2].name for rank in range(4)]
    return GroupRig(checkpoint, directory, asks, settings, configs=configs, netns=netns), asks


def test_two_nodes_of_two_ranks_decode_as_generate(
    checkpoint: Path, nodes: list[Namespace], secret: Path, tmp_path: Path
) -> None:
    rig, asks = rig_of(checkpoint, tmp_path, nodes, secret, 12)
    try:
        assert not wrong(checkpoint, asks, rig.drawn())
    finally:
        rig.close()


def python_of(child: subprocess.Popen[str]) -> int:
    """The process number of a rank, which is a child of the one that pytest has started."""
    return int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())


@pytest.mark.parametrize(
    ("fault", "heartbeat_limit_s"),
    [
        ("killed", LIMIT_S),
        pytest.param("stopped", SILENCE_LIMIT_S, marks=pytest.mark.deep),
        ("cut", SILENCE_LIMIT_S),
    ],
)
def test_ranks_on_both_nodes_end_soon_after_one_is_lost(
    fault: str, heartbeat_limit_s: float, checkpoint: Path, nodes: list[Namespace], secret: Path, tmp_path: Path
) -> None:
    """No handle of a process tells of a rank on another node. A stopped rank, or a network that was cut, closes no
    connection: silence for two heartbeat limits counts then."""
    rig, _ = rig_of(checkpoint, tmp_path, nodes, secret, 4, heartbeat_limit_s)
    try:
        for rank in range(4):
            rig.line(rank)  # all have drawn their tokens, and sleep
        began = time.monotonic()
        if fault == "killed":
            rig.ranks[3].send_signal(signal.SIGKILL)
        elif fault == "stopped":
            os.kill(python_of(rig.ranks[3]), signal.SIGSTOP)
        else:
            cut(nodes[1])
        others = rig.ranks if fault == "cut" else rig.ranks[:3]
        assert [child.wait(LIMIT_S) for child in others] == [EXIT_PEER_LOST] * len(others)
        took_s = time.monotonic() - began
        print(f"{fault}: ended after {took_s:.2f} s")
        # Of the silence a busy machine may have let a part pass before. LIMIT_S is shorter than that of a killed rank.
        assert fault == "killed" or took_s > SILENCE_LIMIT_S
    finally:
        rig.close()


# ---------------------------------------------------------------- strangers


def config_of(secret: str, port: int, *, insecure: bool = False) -> Config:
    worker = WorkerSettings(
        name="w0", group="g0", group_size=2, group_endpoint=f"tcp://127.0.0.1:{port}", group_secret_file=secret
    )
    return Config(cluster=ClusterSettings(insecure=insecure), worker=worker)


def rank_one(config: Config) -> subprocess.Popen[str]:
    program = (
        "import sys, msgspec; from protocol.settings import Config; from worker.group.control import Control;"
        "control = Control(msgspec.json.decode(sys.argv[1], type=Config), {}); control.join(); control.leave()"
    )
    worker = msgspec.structs.replace(config.worker, name="w1", group_rank=1)
    text = msgspec.json.encode(msgspec.structs.replace(config, worker=worker)).decode()
    return subprocess.Popen([sys.executable, "-c", program, text], stdout=subprocess.PIPE, text=True)


def test_only_ranks_that_know_the_secret_join(secret: Path, tmp_path: Path) -> None:
    port = free_ports(1)
    control = Control(config_of(str(secret), port), {})
    control.is_done = lambda: True  # it outlives rank 1
    control._thread.start()
    stranger = rank_one(config_of(str(write_secret(tmp_path / "other")), port))
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(f"tcp://127.0.0.1:{port}")
        plain.send(encode(Join("1", "g0", 1, 2, "w1", 1, "", {})))
        assert not plain.poll(3_000)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(3)
        assert control.members == ()
        assert rank_one(config_of(str(secret), port)).wait(LIMIT_S) == 0
        assert [member.worker for member in control.members] == ["w0", "w1"]
    finally:
        stranger.kill()
        control.leave()


def test_connections_that_say_nothing_are_few_end_in_time_and_hold_no_rank_up(
    secret: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks meet beside more of them than rank 0 keeps, and their end is none of a rank's."""
    monkeypatch.setattr(sockets, "NEWCOMERS_MAX", 20)
    monkeypatch.setattr(sockets, "SPEAK_LIMIT_S", 1e3)
    port = free_ports(1)
    control = Control(config_of(str(secret), port), {})
    control.is_done = lambda: True  # it outlives rank 1
    control._thread.start()
    until(lambda: answers(port))
    until(lambda: list(control._missing) == [1])  # rank 0 has spoken to itself: it is silent no more
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        until(lambda: len(open_of(silent)) == 20)
        assert control._broke_at == float("inf")
        assert rank_one(config_of(str(secret), port)).wait(LIMIT_S) == 0
        assert [member.worker for member in control.members] == ["w0", "w1"]
        monkeypatch.setattr(sockets, "SPEAK_LIMIT_S", 0.5)
        until(lambda: not open_of(silent))
    assert "connections that said nothing were ended" in caplog.text
    control.leave()


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False


def open_of(connections: Sequence[socket.socket]) -> list[socket.socket]:
    """Those that the peer has not closed. libzmq's greeting is read, and no more comes."""
    return [it for it in connections if not is_closed(it)]


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4_096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize(
    ("text", "mode", "error", "said"),
    [
        ("x" * 64, 0o644, NotAllowed, "mode 0644"),
        ("short", 0o600, ConfigError, "has 5 characters"),
        (None, 0, ConfigError, "worker.group_secret_file"),
    ],
)
def test_an_unfit_secret_is_refused(
    text: str | None, mode: int, error: type[Exception], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(error, match=said):
        Control(config_of(str(path), 1), {})


def test_tcp_without_a_secret_is_refused_unless_insecure() -> None:
    with pytest.raises(ConfigError, match="a group over tcp needs a secret"):
        Control(config_of("", 1), {})
    Control(config_of("", 1, insecure=True), {})


def test_a_port_in_use_is_refused_by_name() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=rf"group_endpoint=tcp://127.0.0.1:{port}: another process"):
            Control(config_of("", port, insecure=True), {}).join()
