"""Page transfer through the engines that cross nodes, between real processes over TCP.

Skipped where their wheels are absent: `make transfer-test` installs them.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kernels.layout import Geometry
from protocol.errors import ConfigError
from tests.support.transfer_rig import LARGE, MODEL, OTHERS, SMALL, arrivals, content, make_pool, peer_process, wait_for
from worker.transfer import (
    Arrived,
    Delivered,
    EngineOptions,
    Failed,
    Layout,
    PoolMemory,
    Revoked,
    open_receiver,
    open_sender,
    sending,
)
from worker.transfer.engines import mooncake, nixl
from worker.transfer.receiver import PageReceiver

pytestmark = [pytest.mark.pd, pytest.mark.process]

SENDER = "prefill-0/1"


def why_absent(engine: str) -> str:
    """Empty when `engine` can be loaded here."""
    modules = {"nixl": nixl.MODULES, "mooncake": ("mooncake",)}[engine]
    if not any(importlib.util.find_spec(module) for module in modules):
        return f"the wheel of {engine} is not installed (make transfer-test)"
    if engine == "mooncake":
        try:
            importlib.import_module("mooncake.engine")
        except ImportError as error:
            return f"mooncake cannot be loaded: {error}"
    return ""


@pytest.fixture(params=["nixl", "mooncake"])
def engine(request: pytest.FixtureRequest) -> str:
    if reason := why_absent(request.param):
        pytest.skip(reason)
    name: str = request.param
    return name


@pytest.fixture
def pool(tmp_path: Path) -> PoolMemory:
    return make_pool(tmp_path / "receiver.pool", SMALL, 64)


@pytest.fixture
def large_pool(tmp_path: Path) -> PoolMemory:
    return make_pool(tmp_path / "large.pool", LARGE, 3)


def make_receiver(engine: str, pool: PoolMemory, geometry: Geometry) -> PageReceiver:
    layout = Layout.of(geometry, MODEL)
    return open_receiver(engine, pool, layout, name="decode-0/1", address="tcp://127.0.0.1:0")


@pytest.fixture
def receiver(engine: str, pool: PoolMemory) -> Iterator[PageReceiver]:
    end = make_receiver(engine, pool, SMALL)
    yield end
    end.close()


@pytest.fixture
def large_receiver(engine: str, large_pool: PoolMemory) -> Iterator[PageReceiver]:
    end = make_receiver(engine, large_pool, LARGE)
    yield end
    end.close()


def order(receiver: PageReceiver, pages: int, **more: object) -> dict[str, object]:
    return {"name": SENDER, "transfer_id": 1, "description": receiver.describe().hex(), "pages": pages, **more}


@pytest.mark.parametrize("parts", [[], [0.25, 1.0]], ids=["whole pages", "layer groups"])
def test_pages_arrive_exactly_where_reserved(
    parts: list[float], receiver: PageReceiver, pool: PoolMemory, tmp_path: Path
) -> None:
    targets = np.random.default_rng(3).permutation(64)[:40].tolist()
    receiver.open(1, targets)
    part_ends = [int(SMALL.page_bytes * part) for part in parts]
    with peer_process(tmp_path, **order(receiver, 40, part_ends=part_ends)) as sender:
        wait_for(receiver.poll, lambda events: len(arrivals(events)) == 40)
        wait_for(sender.said, lambda said: len(said) == 40)
    for index, page in enumerate(targets):
        assert np.array_equal(pool.pages[page], content(index, SMALL.page_bytes)), (index, page)
    assert not pool.pages[[page for page in range(64) if page not in targets]].any()


def test_a_page_with_a_flipped_byte_is_sent_again(receiver: PageReceiver, pool: PoolMemory, tmp_path: Path) -> None:
    receiver.open(1, [1, 2, 3])
    with peer_process(tmp_path, **order(receiver, 3, fault="flip")):
        wait_for(receiver.poll, lambda events: len(arrivals(events)) == 3)
    assert receiver.counters.refused_units == 1
    assert [bool((pool.pages[i + 1] == content(i, SMALL.page_bytes)).all()) for i in range(3)] == [True] * 3


def test_late_write_of_a_stopped_sender_lands_nowhere(
    large_receiver: PageReceiver, large_pool: PoolMemory, tmp_path: Path
) -> None:
    """I2, SGLang #24578: its process stands still with half a write out, its page gets another owner, it goes on."""
    receiver = large_receiver
    receiver.open(1, [1])
    with peer_process(tmp_path, **order(receiver, 1, geometry="large", fault="halt")) as sender:
        wait_for(sender.said, lambda said: "halted" in said)
        receiver.revoke(1, "the client left")
        assert wait_for(receiver.poll, bool) == [Revoked(1, "the client left")]
        large_pool.pages[1] = OTHERS
        sender.process.send_signal(signal.SIGCONT)
        said = wait_for(sender.said, bool)
        assert "a write failed" in said[-1] or "stopped by its receiver" in said[-1]
    assert (large_pool.pages[1] == OTHERS).all()
    assert receiver.counters.shut_out_senders == 1


def test_buffered_writes_of_a_dead_sender_land_nowhere(
    large_receiver: PageReceiver, large_pool: PoolMemory, tmp_path: Path
) -> None:
    """I2: proof of exit alone would not do, since socket buffers outlive the process. The next sender is served."""
    receiver = large_receiver
    receiver.open(1, [1])
    with peer_process(tmp_path, **order(receiver, 1, geometry="large", fault="halt")) as sender:
        wait_for(sender.said, lambda said: "halted" in said)
        sender.kill()
        receiver.sender_exited(SENDER)
        assert wait_for(receiver.poll, bool) == [Revoked(1, f"{SENDER} was shut out")]
        large_pool.pages[1] = OTHERS
    receiver.open(2, [2])
    with peer_process(tmp_path, **{**order(receiver, 1, geometry="large"), "transfer_id": 2, "name": "prefill-0/2"}):
        assert wait_for(receiver.poll, bool) == [Arrived(2, 0)]
    assert (large_pool.pages[1] == OTHERS).all()
    assert np.array_equal(large_pool.pages[2], content(0, LARGE.page_bytes))


def test_a_dead_receiver_fails_its_transfers(
    engine: str, pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sees that its peer is gone: no write waits for its limit."""
    monkeypatch.setattr(sending, "WRITE_LIMIT_S", 1e6)
    with peer_process(tmp_path, engine=engine, transfer_id=1, pages=8) as receiver:
        (description,) = wait_for(receiver.said, bool)
        sender = open_sender(pool, Layout.of(SMALL, MODEL), name=SENDER)
        sender.open(1, bytes.fromhex(description), 8)
        sender.send(1, 0, 0)
        assert wait_for(sender.poll, bool) == [Delivered(1, 0)]
        receiver.kill()
        for index in range(1, 8):
            sender.send(1, index, index)
        (failed,) = wait_for(sender.poll, bool)
        assert isinstance(failed, Failed)
        assert "write" in failed.reason
        sender.close()


def test_idle_receiver_is_reachable_again(
    receiver: PageReceiver, pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "IDLE_LIMIT_S", 0.1)
    source = make_pool(tmp_path / "sender.pool", SMALL, 2)
    source.pages[:] = OTHERS
    sender = open_sender(source, Layout.of(SMALL, MODEL), name=SENDER)
    for transfer_id in (1, 2, 3):
        receiver.open(transfer_id, [transfer_id])
        sender.open(transfer_id, receiver.describe(), 1)
        sender.send(transfer_id, 0, 0)
        assert wait_for(sender.poll, bool) == [Delivered(transfer_id, 0)]
        wait_for(list, lambda _: not sender._core._lanes)
    sender.close()
    assert (pool.pages[1:4] == OTHERS).all()


class DeregisteringTarget(nixl.NixlTarget):
    """Revokes by deregistering memory, and leaves the endpoint as it is."""

    def shut_out(self, sender: str) -> None:
        region = [(self._pool.pages.ctypes.data, self._pool.pages.nbytes, 0, "")]
        self._agents[sender].deregister_memory(self._agents[sender].get_reg_descs(region, nixl.MEMORY))


class TrustingTarget(mooncake.MooncakeTarget):
    """Does nothing to revoke."""

    def shut_out(self, sender: str) -> None: ...


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("engine", "module", "target"),
    [("nixl", nixl, DeregisteringTarget), ("mooncake", mooncake, TrustingTarget)],
    indirect=["engine"],
)
def test_late_writes_land_unless_the_endpoint_is_closed(
    engine: str,
    module: ModuleType,
    target: type,
    large_pool: PoolMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the tests above can fail, and why an endpoint is destroyed: UCX on TCP writes to memory that is not
    registered."""
    monkeypatch.setattr(module, target.__mro__[1].__name__, target)
    receiver = make_receiver(engine, large_pool, LARGE)
    receiver.open(1, [1])
    with peer_process(tmp_path, **order(receiver, 1, geometry="large", fault="halt")) as sender:
        wait_for(sender.said, lambda said: "halted" in said)
        receiver.revoke(1, "the client left")
        assert wait_for(receiver.poll, bool) == [Revoked(1, "the client left")]
        large_pool.pages[1] = OTHERS
        sender.process.send_signal(signal.SIGCONT)
        wait_for(list, lambda _: bool((large_pool.pages[1] != OTHERS).any()))
        sender.kill()
    receiver.close()


@pytest.mark.parametrize("transports", ["all", "cma,tcp", "^tcp", "tcp,", "sm"])
def test_transports_that_cannot_be_revoked_are_refused(transports: str, pool: PoolMemory) -> None:
    """Through shared memory the sender stores by itself, whatever becomes of the receiver's endpoint."""
    options = EngineOptions(transports=transports)
    with pytest.raises(ConfigError, match="cannot be revoked"):
        open_receiver("nixl", pool, Layout.of(SMALL, MODEL), name="x", address="tcp://127.0.0.1:0", options=options)
