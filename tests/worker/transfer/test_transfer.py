"""Page transfer between real processes of one host (engine `shared`): bytes, faults, revocation."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zmq
from msgspec.structs import replace

from kernels.layout import Geometry
from protocol.arrays import pack_int64
from protocol.config import HostFacts, build
from protocol.errors import BadInput, CapacityError, ConfigError, ProtocolError, WrongState
from protocol.settings import WorkerSettings
from tests.support.limits import HANG_LIMIT_S
from tests.support.transfer_rig import (
    MODEL,
    OTHERS,
    SMALL,
    arrivals,
    content,
    make_pool,
    peer_process,
    wait_for,
)
from worker import process
from worker.transfer import (
    Arrived,
    Description,
    Failed,
    Layout,
    PoolMemory,
    Revoked,
    open_receiver,
    open_sender,
    receiving,
    sending,
)
from worker.transfer.checksum import checksum
from worker.transfer.engines import shared
from worker.transfer.engines.base import Jobs, WriteEnd
from worker.transfer.engines.nixl import NixlTarget
from worker.transfer.engines.shared import SharedSource, SharedTarget
from worker.transfer.receiver import PageReceiver
from worker.transfer.sender_actions import Post
from worker.transfer.wire import Begin, encode

pytestmark = pytest.mark.pd

SENDER = "prefill-0/1"
#: In place of a limit that no busy machine may reach.
NEVER_S = 1e6
Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def pool(tmp_path: Path) -> PoolMemory:
    return make_pool(tmp_path / "receiver.pool", SMALL, 64)


@pytest.fixture
def receiver(pool: PoolMemory, tmp_path: Path) -> Iterator[PageReceiver]:
    end = open_receiver("shared", pool, Layout.of(SMALL, MODEL), name="decode-0/1", address=f"ipc://{tmp_path}/control")
    yield end
    end.close()


def order(receiver: PageReceiver, pages: int, **more: object) -> dict[str, object]:
    return {"name": SENDER, "transfer_id": 1, "description": receiver.describe().hex(), "pages": pages, **more}


def has_all(pages: int) -> Callable[[list[object]], bool]:
    return lambda events: len(arrivals(events)) == pages  # type: ignore[arg-type]


# ---------------------------------------------------------------- bytes


@pytest.mark.process
@pytest.mark.parametrize("parts", [[], [0.25, 0.5, 1.0]], ids=["whole pages", "layer groups"])
def test_pages_arrive_exactly_where_reserved(
    parts: list[float], receiver: PageReceiver, pool: PoolMemory, tmp_path: Path
) -> None:
    """Destinations in any order; the sender sends the last page first."""
    targets = np.random.default_rng(3).permutation(64)[:40].tolist()
    receiver.open(1, targets)
    part_ends = [int(SMALL.page_bytes * part) for part in parts]
    with peer_process(tmp_path, **order(receiver, 40, part_ends=part_ends)) as sender:
        events = wait_for(receiver.poll, has_all(40))
        wait_for(sender.said, lambda said: len(said) == 40)
    assert arrivals(events) == set(range(40))
    for index, page in enumerate(targets):
        assert np.array_equal(pool.pages[page], content(index, SMALL.page_bytes)), (index, page)
    assert not pool.pages[[page for page in range(64) if page not in targets]].any()
    assert receiver.counters.bytes == 40 * SMALL.page_bytes
    assert receiver.poll() == []


@pytest.mark.process
def test_single_page_is_transferred(receiver: PageReceiver, pool: PoolMemory, tmp_path: Path) -> None:
    """A prompt of one token, or of exactly one page: the unit is the page."""
    receiver.open(1, [9])
    with peer_process(tmp_path, **order(receiver, 1)):
        assert wait_for(receiver.poll, has_all(1)) == [Arrived(1, 0)]
    assert np.array_equal(pool.pages[9], content(0, SMALL.page_bytes))


@pytest.mark.process
def test_a_sender_may_come_before_the_transfer(
    receiver: PageReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, heard = threading.Event(), receiver._core.heard

    def note(*arguments: Any) -> Any:
        came.set()
        return heard(*arguments)

    monkeypatch.setattr(receiver._core, "heard", note)
    with peer_process(tmp_path, **order(receiver, 3)):
        assert came.wait(HANG_LIMIT_S)
        assert receiver.poll() == []
        receiver.open(1, [4, 5, 6])
        wait_for(receiver.poll, has_all(3))


class FakeFuture(Future[int]):
    """A checksum that ends as soon as it was found under way."""

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self.set_result(7)
        return was_done


class FakeJobs(Jobs):
    def submit(self, job: Callable[[], Any]) -> FakeFuture:
        return FakeFuture()


def test_a_page_is_not_lost_whose_checksum_ends_between_two_looks(pool: PoolMemory) -> None:
    jobs = FakeJobs(1, lambda: None)
    source, posts = SharedSource(pool, jobs), [Post("peer", 1, 1, unit, 0, unit, unit, 0, 8) for unit in range(3)]
    for post in posts:
        source.post(post)
    assert source.poll() == []
    assert source.poll() == [WriteEnd(post, 7, "") for post in posts]
    assert source.poll() == []
    jobs.close()


# ---------------------------------------------------------------- corrupted pages


def flip_a_byte(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Of the first `times` copies, before their checksum is taken."""
    left = [times]
    copy = SharedTarget.copy

    def flipping(self: SharedTarget, target: Bytes, source: Bytes) -> int:
        digest = copy(self, target, source)
        left[0] -= 1
        if left[0] < 0:
            return digest
        target[7] ^= 1
        return checksum(target)

    monkeypatch.setattr(SharedTarget, "copy", flipping)


@pytest.mark.process
def test_a_page_with_a_flipped_byte_is_sent_again(
    receiver: PageReceiver, pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_byte(monkeypatch, 1)
    receiver.open(1, [1, 2, 3])
    with peer_process(tmp_path, **order(receiver, 3)):
        wait_for(receiver.poll, has_all(3))
    assert receiver.counters.refused_units == 1
    assert [bool((pool.pages[i + 1] == content(i, SMALL.page_bytes)).all()) for i in range(3)] == [True] * 3


@pytest.mark.process
def test_page_that_never_verifies_fails_its_transfer(
    receiver: PageReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_byte(monkeypatch, 1_000)
    receiver.open(1, [1, 2])
    with peer_process(tmp_path, **order(receiver, 2)) as sender:
        said = wait_for(sender.said, lambda lines: any("checksum" in line for line in lines))
        events = wait_for(receiver.poll, lambda seen: any(isinstance(event, Revoked) for event in seen))
    assert said[-1].endswith(f"arrived with a wrong checksum {sending.ATTEMPTS_MAX} times")
    assert arrivals(events) == set()


# ---------------------------------------------------------------- revocation and death


@pytest.mark.process
def test_unused_transfer_is_revoked_at_once(receiver: PageReceiver) -> None:
    receiver.open(1, [1, 2])
    receiver.revoke(1, "the client left")
    assert wait_for(receiver.poll, bool) == [Revoked(1, "the client left")]


@pytest.mark.process
def test_answering_sender_frees_the_pages(
    receiver: PageReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not shut out; and it says why its transfer failed."""
    monkeypatch.setattr(receiving, "STOP_LIMIT_S", NEVER_S)
    receiver.open(1, list(range(6)))
    with peer_process(tmp_path, **order(receiver, 6, withheld=1)) as sender:
        assert len(wait_for(receiver.poll, has_all(5))) == 5
        receiver.revoke(1, "the client left")
        assert wait_for(receiver.poll, bool) == [Revoked(1, "the client left")]
        said = wait_for(sender.said, lambda lines: len(lines) == 6)
    assert said[-1] == "stopped by its receiver: the client left"


@pytest.mark.process
def test_stopped_sender_holds_no_page(
    receiver: PageReceiver, pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2, SGLang #24578: nothing of it can land late, since it never writes. It is not shut out either."""
    monkeypatch.setattr(receiving, "STOP_LIMIT_S", NEVER_S)
    receiver.open(1, [1])
    with peer_process(tmp_path, **order(receiver, 1, fault="halt")) as sender:
        wait_for(sender.said, lambda said: "halted" in said)
        receiver.revoke(1, "the client left")
        assert wait_for(receiver.poll, bool) == [Revoked(1, "the client left")]
        pool.pages[1] = OTHERS  # the next owner
        sender.process.send_signal(signal.SIGCONT)
        wait_for(sender.said, lambda said: any("stopped by its receiver" in line for line in said))
    assert (pool.pages[1] == OTHERS).all()


@pytest.mark.process
def test_killed_sender_holds_no_page(receiver: PageReceiver, pool: PoolMemory, tmp_path: Path) -> None:
    """The next process of the same name is served."""
    receiver.open(1, [1])
    with peer_process(tmp_path, **order(receiver, 1, fault="halt")) as sender:
        wait_for(sender.said, lambda said: "halted" in said)
        sender.kill()
        receiver.sender_exited(SENDER)
        assert wait_for(receiver.poll, bool) == [Revoked(1, f"{SENDER} was shut out")]
    receiver.open(2, [1])
    with peer_process(tmp_path, **{**order(receiver, 1), "transfer_id": 2}):
        assert wait_for(receiver.poll, bool) == [Arrived(2, 0)]
    assert np.array_equal(pool.pages[1], content(0, SMALL.page_bytes))


@pytest.mark.process
def test_partial_pages_of_a_dead_sender_do_not_count(receiver: PageReceiver, pool: PoolMemory, tmp_path: Path) -> None:
    """All other parts were verified. The pages are free for the next transfer, and none of them was reported."""
    part_ends = [SMALL.page_bytes // 4, SMALL.page_bytes // 2, SMALL.page_bytes]
    receiver.open(1, [1, 2, 3])
    with peer_process(tmp_path, **order(receiver, 3, part_ends=part_ends, withheld_parts=1)) as sender:
        give_up_at = time.monotonic() + HANG_LIMIT_S
        while receiver.counters.bytes < 3 * part_ends[1]:
            assert time.monotonic() < give_up_at
            time.sleep(0.002)
        assert np.array_equal(pool.pages[1][: part_ends[1]], content(0, SMALL.page_bytes)[: part_ends[1]])
        sender.kill()
        assert receiver.poll() == []
        receiver.sender_exited(SENDER)
        assert wait_for(receiver.poll, bool) == [Revoked(1, f"{SENDER} was shut out")]
    assert receiver.counters.pages == 0


@pytest.mark.process
@pytest.mark.parametrize("how", ["revoke", "exit"])
def test_revocation_waits_for_the_copy_under_way(
    how: str, receiver: PageReceiver, pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: the pages are free when the last byte has been stored, and not before."""
    begun, go_on = threading.Event(), threading.Event()
    copy = SharedTarget.copy

    def slow(self: SharedTarget, target: Bytes, source: Bytes) -> int:
        begun.set()
        assert go_on.wait(HANG_LIMIT_S)
        return copy(self, target, source)

    monkeypatch.setattr(SharedTarget, "copy", slow)
    receiver.open(1, [1])
    with peer_process(tmp_path, **order(receiver, 1)):
        assert begun.wait(HANG_LIMIT_S)
        if how == "revoke":
            receiver.revoke(1, "the client left")
        else:
            receiver.sender_exited(SENDER)
        time.sleep(0.3)
        assert receiver.poll() == []
        go_on.set()
        (event,) = wait_for(receiver.poll, bool)
        assert isinstance(event, Revoked)
        pool.pages[1] = OTHERS
    assert (pool.pages[1] == OTHERS).all()


@pytest.mark.process
def test_sender_leaves_a_dead_receiver_when_told(
    pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it may take until nothing was verified for CHECK_LIMIT_S."""
    monkeypatch.setattr(sending, "CHECK_LIMIT_S", NEVER_S)
    (tmp_path / "other").mkdir()
    with peer_process(tmp_path / "other", engine="shared", transfer_id=1, pages=8) as receiver:
        (description,) = wait_for(receiver.said, bool)
        sender = open_sender(pool, Layout.of(SMALL, MODEL), name=SENDER)
        sender.open(1, bytes.fromhex(description), 8)
        sender.send(1, 0, 0)
        wait_for(sender.poll, bool)
        receiver.kill()
        for index in range(1, 8):
            sender.send(1, index, index)
        sender.cancel(1, "its receiver is dead")
        assert wait_for(sender.poll, bool) == [Failed(1, "its receiver is dead")]
        sender.close()


# ---------------------------------------------------------------- refusals


def test_another_layout_is_refused_with_both_values(receiver: PageReceiver, tmp_path: Path) -> None:
    other = Geometry(layers=4, row_bytes=112, group_of_layer=(0, 0, 1, 1), index_row_bytes=16, topk=64)
    sender = open_sender(make_pool(tmp_path / "s.pool", other, 2), Layout.of(other, MODEL), name=SENDER)
    with pytest.raises(ConfigError, match=f"page_bytes {SMALL.page_bytes}, those of this worker {other.page_bytes}"):
        sender.open(1, receiver.describe(), 1)
    sender.close()


def test_rows_of_another_model_are_refused(receiver: PageReceiver, pool: PoolMemory) -> None:
    sender = open_sender(pool, Layout.of(SMALL, "another"), name=SENDER)
    with pytest.raises(ConfigError, match="model model, those of this worker another"):
        sender.open(1, receiver.describe(), 1)
    sender.close()


@pytest.mark.process
def test_transfer_of_another_length_is_refused_with_both_values(receiver: PageReceiver, tmp_path: Path) -> None:
    receiver.open(1, [1, 2, 3])
    with peer_process(tmp_path, **order(receiver, 3, claimed_pages=4)) as sender:
        (reason,) = wait_for(sender.said, bool)
    assert "4 pages to send, 3 reserved" in reason


@pytest.mark.process
def test_inaccessible_pool_fails_cleanly(
    receiver: PageReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was written, so nothing is quarantined."""
    receiver.open(1, [1])
    real = shared._map
    monkeypatch.setattr(shared, "_map", lambda place: real(replace(place, path=f"{place.path}.elsewhere")))
    with peer_process(tmp_path, **order(receiver, 1)) as sender:
        (reason,) = wait_for(sender.said, bool)
        receiver.revoke(1, "its sender failed")
        assert wait_for(receiver.poll, bool) == [Revoked(1, "its sender failed")]
    assert "cannot open the pool of the sender" in reason


def test_receiver_that_never_opens_the_transfer_is_given_up(
    receiver: PageReceiver, pool: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I8."""
    monkeypatch.setattr(sending, "BEGIN_LIMIT_S", 0.3)
    sender = open_sender(pool, Layout.of(SMALL, MODEL), name=SENDER)
    sender.open(1, receiver.describe(), 1)
    sender.send(1, 0, 5)
    assert wait_for(sender.poll, bool) == [Failed(1, "its receiver did not answer within 0.3 s")]
    sender.send(1, 0, 5)  # a transfer that has ended: nothing
    sender.close()


def test_invalid_descriptions_are_refused(receiver: PageReceiver, pool: PoolMemory) -> None:
    sender = open_sender(pool, Layout.of(SMALL, MODEL), name=SENDER, engines=("nixl",))
    with pytest.raises(ProtocolError, match="not a description"):
        sender.open(1, b"\xc1", 1)
    with pytest.raises(ProtocolError, match="not a description"):
        sender.open(1, b"", 1)
    with pytest.raises(BadInput, match="receives by shared, this worker sends by nixl"):
        sender.open(1, receiver.describe(), 1)
    newer = Description.decode(receiver.describe())
    data = Description(99, *(getattr(newer, name) for name in newer.__struct_fields__[1:])).encode()
    with pytest.raises(ConfigError, match="version 99 of page transfer, this worker 1"):
        sender.open(1, data, 1)
    sender.close()


def test_sender_without_the_receivers_key_is_ignored(pool: PoolMemory) -> None:
    """Over tcp; the same message from a sender that has the description is answered."""
    layout = Layout.of(SMALL, MODEL)
    receiver = open_receiver("shared", pool, layout, name="decode-0/1", address="tcp://127.0.0.1:0")
    known = Description.decode(receiver.describe())
    word = encode(Begin(known.version, known.receiver_id, 1, 1, layout, pack_int64([SMALL.page_bytes])))
    heard = []
    for key, wait_s in ((known.key, HANG_LIMIT_S), (b"", 1.0), (zmq.curve_keypair()[0], 1.0)):
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, SENDER.encode())
            if key:
                socket.setsockopt(zmq.CURVE_SERVERKEY, key)
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(known.address)
            socket.send(word)
            heard.append(bool(socket.poll(wait_s * 1e3)))
    receiver.close()
    assert heard == [True, False, False]


def test_misuse_is_refused_by_name(receiver: PageReceiver, pool: PoolMemory) -> None:
    sender = open_sender(pool, Layout.of(SMALL, MODEL), name=SENDER)
    sender.open(1, receiver.describe(), 2)
    sender.send(1, 0, 5)
    with pytest.raises(WrongState, match="it was sent"):
        sender.send(1, 0, 5)
    with pytest.raises(BadInput, match="has 2 pages in 1 parts, the pool 64"):
        sender.send(1, 2, 5)
    with pytest.raises(WrongState, match="it is open"):
        sender.open(1, receiver.describe(), 2)
    with pytest.raises(BadInput, match="ascending ends"):
        sender.open(2, receiver.describe(), 2, [10, 5, SMALL.page_bytes])
    with pytest.raises(ConfigError, match="one of shared"):
        open_receiver("carrier pigeon", pool, Layout.of(SMALL, MODEL), name="x", address="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="no receiver can have it"):
        open_receiver("shared", pool, Layout.of(SMALL, MODEL), name="x", address="tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match="cannot listen"):
        open_receiver("shared", pool, Layout.of(SMALL, MODEL), name="x", address="tcp://192.0.2.1:1")
    sender.close()


def test_transfers_are_bounded(receiver: PageReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8."""
    monkeypatch.setattr("worker.transfer.receiving.TRANSFERS_MAX", 1)
    receiver.open(1, [1])
    with pytest.raises(CapacityError, match="1 transfers are open"):
        receiver.open(2, [2])


def test_transfer_ends_close_twice_and_answer_afterwards(receiver: PageReceiver, pool: PoolMemory) -> None:
    """Whatever descriptor has their number by then is left alone."""
    sender = open_sender(pool, Layout.of(SMALL, MODEL), name=SENDER)
    sender.open(1, receiver.describe(), 1)
    for end in (sender, receiver):
        end.close()
        number = end._kick
        end.close()
        assert number == -1
    receiver.open(1, [1])
    receiver.revoke(1, "late")
    sender.cancel(1, "late")
    assert sender.poll() == [Failed(1, "its sender closes")]


def test_worker_without_transfers_needs_no_checksum_library() -> None:
    """It imports events and layouts only, and may run where xxhash is not installed."""
    code = "import sys; sys.modules['xxhash'] = None; import worker.transfer, worker.transfer.interface"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("engine", "modules"), [("nixl", ("nixl_cu13._api", "nixl_cu12._api")), ("mooncake", ("mooncake.engine",))]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_missing_engine_is_named_before_any_load(
    engine: str, modules: tuple[str, ...], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a worker that only sends, too: the first transfer would be late to find out."""
    monkeypatch.setenv("UCX_TLS", "")  # given back at the end
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    loaded: list[WorkerSettings] = []
    monkeypatch.setattr(process, "load_runner", loaded.append)
    flags = {"worker.role": role, "worker.transfer": engine, "worker.transfer_address": "tcp://127.0.0.1:0"}
    with pytest.raises(ConfigError, match=rf"worker.transfer={engine}: .*hisparse\[{engine}\]"):
        process.WorkerProcess(build({}, {}, flags, HostFacts("host", 1, 1)), threading.Event())
    assert loaded == []


class FakeBrokenAgent:
    def get_new_notifs(self) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")


def test_failing_nixl_agent_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []
    target = object.__new__(NixlTarget)  # without the wheel
    target._agents = {"p0": FakeBrokenAgent(), "p1": SimpleNamespace(get_new_notifs=lambda: asked.append("p1"))}
    target._failing = set()
    with caplog.at_level("WARNING"):
        target.progress()
        target.progress()
    assert asked == ["p1", "p1"]
    assert [(it.levelname, it.message) for it in caplog.records] == [("WARNING", "nixl makes no progress")]
