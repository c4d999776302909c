"""Attacks on a keeper: other users, hostile bytes, orders out of place, crowds. It serves its worker all the same."""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from tests.support.keeper_rig import IDENTITY, LIMIT_S, connected, keeping
from worker.keeper import process
from worker.keeper.messages import (
    MESSAGE_BYTES_MAX,
    AskWeights,
    FillWeights,
    FromKeeper,
    FromWorker,
    GrowWeights,
    KeeperRefuses,
    KeptTensor,
    KeptTensors,
    SealWeights,
    SegmentGiven,
    WeightsHeld,
    WeightsSealed,
    decode_keeper,
    encode,
    in_messages,
)
from worker.keeper.process import CONNECTIONS_MAX

ROW = KeptTensor("x", "float32", (4,), 0)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Path]:
    with keeping(tmp_path / "weights.sock") as path:
        yield path


def ask(connection: socket.socket, message: FromWorker | bytes) -> FromKeeper | None:
    """The answer; None where the connection was closed."""
    try:
        connection.send(message if isinstance(message, bytes) else encode(message))
        data = connection.recv(MESSAGE_BYTES_MAX)
    except (BrokenPipeError, ConnectionResetError):
        return None
    return decode_keeper(data) if data else None


def refusal(connection: socket.socket, message: FromWorker | bytes) -> str:
    answer = ask(connection, message)
    assert isinstance(answer, KeeperRefuses), answer
    assert connection.recv(1) == b""
    return answer.reason


def fill(path: Path) -> None:
    """Load weights of one segment."""
    with connected(path) as worker:
        assert ask(worker, AskWeights(IDENTITY)) == FillWeights()
        worker.send(encode(GrowWeights()))
        data, descriptors, _, _ = socket.recv_fds(worker, MESSAGE_BYTES_MAX, 1)
        assert decode_keeper(data) == SegmentGiven()
        os.pwrite(descriptors[0], b"weights", 0)
        os.close(descriptors[0])
        worker.send(encode(KeptTensors((ROW,))))
        assert ask(worker, SealWeights("")) == WeightsSealed()


def attached(path: Path) -> int:
    """The descriptor of the weights that `fill` loaded."""
    with connected(path) as worker:
        assert ask(worker, AskWeights(IDENTITY)) == WeightsHeld(1, 1, "")
        assert decode_keeper(worker.recv(MESSAGE_BYTES_MAX)) == KeptTensors((ROW,))
        data, descriptors, _, _ = socket.recv_fds(worker, MESSAGE_BYTES_MAX, 1)
        assert decode_keeper(data) == SegmentGiven()
        assert os.pread(descriptors[0], 7, 0) == b"weights"
        return descriptors[0]


def serves(path: Path) -> bool:
    """Have a worker load and another one map, whatever came before."""
    fill(path)
    os.close(attached(path))
    return True


def test_another_user_is_refused(tmp_path: Path) -> None:
    with keeping(tmp_path / "weights.sock", uid=os.geteuid() + 1) as path, connected(path) as worker:
        answer = decode_keeper(worker.recv(MESSAGE_BYTES_MAX))
        assert isinstance(answer, KeeperRefuses)
        assert "uid" in answer.reason
        assert ask(worker, AskWeights(IDENTITY)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_users_process_is_refused() -> None:
    """In a directory and at a socket that it may reach, which those of `hisparse up` are not."""
    path = Path("/tmp") / f"keeper-{os.getpid()}.sock"
    with keeping(path):
        path.chmod(0o777)
        try:
            fill(path)
            code = (
                "import os, socket, sys; it = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); it.settimeout(60);"
                "os.setgroups([]); os.setgid(65534); os.setuid(65534);"
                "it.connect(sys.argv[1]); print(it.recv(9999)); print(it.recv(9))"
            )
            command = [sys.executable, "-I", "-c", code, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "uid=65534" in done.stdout, done.stderr
            assert done.stdout.endswith("\nb''\n")  # and no descriptor
            os.close(attached(path))
        finally:
            path.unlink()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00", "not readable"),
        (os.urandom(300), "not readable"),
        (encode(AskWeights(IDENTITY))[:-3], "not readable"),
        (encode(AskWeights(IDENTITY)) + b"\x00", "not readable"),
        (b"a" * (MESSAGE_BYTES_MAX + 1), "longer than any message"),
        (b"\x91" * MESSAGE_BYTES_MAX, "not readable"),
        (msgspec.msgpack.encode({"type": "ask", "identity": 7}), "not readable"),
        (msgspec.msgpack.encode({"type": "ask", "identity": {"checkpoint": "a" * 201}}), "not readable"),
        (msgspec.msgpack.encode({"type": "held", "tensors": 1, "segments": 1, "digest": ""}), "not readable"),
        (msgspec.msgpack.encode({"type": "grow", "bytes": 1 << 60}), "not readable"),
        (msgspec.msgpack.encode({"type": "tensors", "rows": [["x", "float32", [-1], 0]]}), "not readable"),
        (msgspec.msgpack.encode({"type": "tensors", "rows": [["x", "float32", [1], 1 << 62]]}), "not readable"),
        (msgspec.msgpack.encode({"type": "tensors", "rows": [["x", "float32", [1], 0]] * 101}), "not readable"),
    ],
)
def test_hostile_bytes_end_their_connection_alone(keeper: Path, data: bytes, reason: str) -> None:
    with connected(keeper) as hostile, connected(keeper) as filling:
        assert reason in refusal(hostile, data)
        assert ask(filling, AskWeights(IDENTITY)) == FillWeights()
        assert reason in refusal(filling, data)
    assert serves(keeper)


@pytest.mark.parametrize("message", [GrowWeights(), KeptTensors((ROW,)), SealWeights("")])
def test_orders_out_of_place_are_refused(keeper: Path, message: FromWorker) -> None:
    """A process that does not fill changes nothing of what is kept."""
    with connected(keeper) as hostile:
        assert "out of order" in refusal(hostile, message)
    fill(keeper)
    with connected(keeper) as hostile:
        hostile.send(encode(AskWeights(IDENTITY)))
        for _ in range(3):
            hostile.recv(MESSAGE_BYTES_MAX)
        assert "out of order" in refusal(hostile, message)
    os.close(attached(keeper))


def test_a_descriptor_that_is_sent_is_refused(keeper: Path) -> None:
    with connected(keeper) as hostile, open(os.devnull, "rb") as file:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 200))]
        hostile.sendmsg([encode(AskWeights(IDENTITY))], rights)
        answer = decode_keeper(hostile.recv(MESSAGE_BYTES_MAX))
        assert isinstance(answer, KeeperRefuses)
        assert "descriptor" in answer.reason
    assert serves(keeper)


def test_what_is_kept_can_be_written_by_none(keeper: Path) -> None:
    fill(keeper)
    descriptor = attached(keeper)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # as this user may: the seals hold
    with pytest.raises(PermissionError):
        os.pwrite(again, b"other", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(again, 0)
    os.close(again)
    os.close(descriptor)


def test_weights_that_are_mapped_for_writing_are_not_sealed(keeper: Path) -> None:
    with connected(keeper) as worker:
        assert ask(worker, AskWeights(IDENTITY)) == FillWeights()
        worker.send(encode(GrowWeights()))
        _, descriptors, _, _ = socket.recv_fds(worker, MESSAGE_BYTES_MAX, 1)
        with mmap.mmap(descriptors[0], 4096):
            assert "mapped for writing" in refusal(worker, SealWeights(""))
        os.close(descriptors[0])
    assert serves(keeper)


def test_a_worker_that_dies_while_it_fills_leaves_nothing(keeper: Path) -> None:
    before = memfds()
    with connected(keeper) as worker:
        assert ask(worker, AskWeights(IDENTITY)) == FillWeights()
        assert ask(worker, GrowWeights()) == SegmentGiven()
        assert memfds() > before
    assert serves(keeper)
    give_up_at = time.monotonic() + LIMIT_S
    while memfds() != before + 1:  # its own, of what is kept
        assert time.monotonic() < give_up_at


def memfds() -> int:
    """Memory that this process, which is the keeper's, has open."""
    found = 0
    for it in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(it).startswith("/memfd:weights")
    return found


def test_a_second_worker_waits_for_the_first_and_not_for_ever(keeper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TURN_S", 0.1)
    with connected(keeper) as first, connected(keeper) as second:
        assert ask(first, AskWeights(IDENTITY)) == FillWeights()
        assert "another process fills" in refusal(second, AskWeights(IDENTITY))
    monkeypatch.setattr(process, "TURN_S", LIMIT_S)
    with connected(keeper) as first, connected(keeper) as second:
        assert ask(first, AskWeights(IDENTITY)) == FillWeights()
        second.send(encode(AskWeights(IDENTITY)))
        assert ask(first, SealWeights("")) == WeightsSealed()
        first.close()
        assert decode_keeper(second.recv(MESSAGE_BYTES_MAX)) == WeightsHeld(0, 0, "")


def test_silent_connections_are_ended_and_crowds_refused(keeper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_S", LIMIT_S)
    with ExitStack() as crowd:
        come = [crowd.enter_context(connected(keeper)) for _ in range(CONNECTIONS_MAX + 20)]
        for refused in come[CONNECTIONS_MAX:]:
            assert "too many" in str(refused.recv(MESSAGE_BYTES_MAX))
    give_up_at = time.monotonic() + LIMIT_S
    while not has_room(keeper):
        assert time.monotonic() < give_up_at
    monkeypatch.setattr(process, "IDLE_S", 0.5)
    with connected(keeper) as silent:
        assert silent.recv(MESSAGE_BYTES_MAX) == b""
    monkeypatch.setattr(process, "IDLE_S", LIMIT_S)
    assert serves(keeper)


def has_room(path: Path) -> bool:
    """Return whether one more process is heard: it learns that its bytes are no message."""
    with connected(path) as hostile:
        answer = ask(hostile, b"no message")
    return answer is not None and "too many" not in str(answer)


def is_ended(connection: socket.socket, within_s: float) -> bool:
    """Return whether the other end is closed within that time; what it has sent may still be unread."""
    ends = select.poll()
    ends.register(connection, select.POLLHUP)
    return bool(ends.poll(1_000 * within_s))


def test_one_that_does_not_read_holds_up_none(keeper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent more than its socket holds."""
    monkeypatch.setattr(process, "IDLE_S", LIMIT_S)
    rows = [KeptTensor("x" * 190 + str(number), "float32", (4,), 0) for number in range(5_000)]
    with connected(keeper) as worker:
        assert ask(worker, AskWeights(IDENTITY)) == FillWeights()
        for message in in_messages(rows):
            worker.send(encode(message))
        assert ask(worker, SealWeights("")) == WeightsSealed()
    with connected(keeper) as deaf, connected(keeper) as reading:
        deaf.send(encode(AskWeights(IDENTITY)))
        assert ask(reading, AskWeights(IDENTITY)) == WeightsHeld(5_000, 0, "")
        assert not is_ended(deaf, 0.0)
    monkeypatch.setattr(process, "IDLE_S", 0.5)
    with connected(keeper) as deaf:
        with suppress(BrokenPipeError):  # where this process stood still
            deaf.send(encode(AskWeights(IDENTITY)))
        assert is_ended(deaf, LIMIT_S)
        assert sum(1 for _ in iter(lambda: deaf.recv(MESSAGE_BYTES_MAX), b"")) < 50
