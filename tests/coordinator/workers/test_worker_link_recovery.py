"""Worker links of a coordinator that restarted: epochs that the journal knows, over real ipc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from basics.processes import process_of
from coordinator.journal.journal import GroupCommit
from coordinator.journal.records import TokensAppended, WorkerJoined
from coordinator.journal.state import JournalState
from coordinator.state.events import WorkerPort
from protocol.errors import WrongState
from protocol.inventory import InventoryRow, pack_rows
from protocol.messages import NOT_SEEN, PROTOCOL_VERSION, Commands, Refused, ReportAck, Withdraw, WorkerWelcome
from tests.coordinator.workers.test_worker_link import IMPATIENT, INCARNATION, Rig
from tests.support.fakes.journal import FakeStore
from tests.support.fakes.scheduler import MODEL
from tests.support.fakes.worker import CAPACITY, hello
from tests.support.limits import HANG_LIMIT_S
from tests.support.progress import RequestEntry, progress
from tests.support.version_before import BEFORE

PAST = {"incarnation_seen": INCARNATION - 1, "command_ack": 5, "report_first": 7, "report_next": 9}


def expected(rig: Rig, *, process: int = 0, started: int = 0, epoch: int = 1, is_live: bool = True) -> WorkerPort:
    """`process`: by default this one, which may have been forked since it was collected."""
    process = process or os.getpid()
    joined = WorkerJoined("n", "w0", epoch, CAPACITY, MODEL, process, started, "" if not started else "another boot")
    return rig.links.expect(joined, is_live=is_live)


def idle_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    async with trio.open_nursery() as nursery:
        yield rig
        nursery.cancel_scope.cancel()
    rig.socket.close()


async def start(rig: Rig, nursery: trio.Nursery) -> None:
    nursery.start_soon(rig.links.run)
    await trio.lowlevel.checkpoint()


@pytest.mark.usefixtures("version_before")
@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION, BEFORE])
async def test_journalled_epoch_continues_its_numbers(rig: Rig, protocol: int) -> None:
    port = expected(rig)
    request_index = rig.log.open(100)
    rig.log.begin_placement(request_index, 3, 10, 1 << 20)
    port.send(Withdraw(99))  # waits for the hello
    async with trio.open_nursery() as nursery:
        await start(rig, nursery)
        assert port.stats().link_age_s == NOT_SEEN
        worker = await rig.worker()
        inventory = pack_rows([InventoryRow(3, request_index=request_index)])
        await worker.say(hello(**PAST, inventory=inventory, protocol=protocol))
        assert await worker.hear() == WorkerWelcome(protocol, INCARNATION, 6, want_tokenizer=False, adopted=True)
        assert port.stats().link_age_s >= 0
        assert await worker.hear() == Commands(INCARNATION, 6, (Withdraw(99),))
        await worker.report(progress(RequestEntry(request_index, 3, 0, [4, 5], 10)), number=7, command_ack=6)
        assert await worker.hear() == ReportAck(INCARNATION, 7)
        assert rig.log.length(request_index) == 2, "bound to the link that was adopted"
        assert rig.scheduler.told == [("back", "w0", 1)]
        worker.close()
        nursery.cancel_scope.cancel()


async def test_hello_that_claims_a_foreign_request_binds_nothing(rig: Rig) -> None:
    expected(rig)
    request_index = rig.log.open(100)
    rig.log.begin_placement(request_index, 4, 10, 1 << 20)
    async with trio.open_nursery() as nursery:
        await start(rig, nursery)
        worker = await rig.worker()
        await worker.say(
            hello(
                **PAST,
                inventory=pack_rows(
                    [InventoryRow(3, request_index=request_index), InventoryRow(3, request_index=10_000)]
                ),
            )
        )
        assert isinstance(await worker.hear(), WorkerWelcome)
        await worker.report(progress(RequestEntry(request_index, 4, 0, [4, 5], 10)), number=7, command_ack=5)
        assert await worker.hear() == ReportAck(INCARNATION, 7)
        assert rig.log.length(request_index) == 0
        worker.close()
        nursery.cancel_scope.cancel()


async def test_impossible_inventory_ends_the_epoch(rig: Rig) -> None:
    expected(rig)
    rig.scheduler.refuse_with = WrongState("holds more than it was given")
    async with trio.open_nursery() as nursery:
        await start(rig, nursery)
        worker = await rig.worker()
        await worker.say(hello(**PAST))
        refused = await worker.hear()
        assert isinstance(refused, Refused)
        assert (refused.code, refused.message) == ("wrong_state", "holds more than it was given")
        assert ("down", "w0", 1, False) in rig.scheduler.told
        await worker.say(hello(epoch=2))  # emptied, the same process
        assert isinstance(await worker.hear(), WorkerWelcome)
        assert ("exited", "w0", 1) in rig.scheduler.told, "quiesced, as it reports"
        worker.close()
        nursery.cancel_scope.cancel()


async def test_process_that_ended_unwatched_is_proved_gone(rig: Rig) -> None:
    child = idle_process()
    mark = process_of(child.pid)
    child.kill()
    child.wait()
    assert mark.started > 0
    expected(rig, process=child.pid, started=mark.started)
    async with trio.open_nursery() as nursery:
        await start(rig, nursery)
        await rig.told("down", "w0", 1, True)
        nursery.cancel_scope.cancel()


async def test_reused_process_id_proves_the_earlier_process_gone(rig: Rig) -> None:
    """After a boot another process may have the worker's process id: here, this very process."""
    expected(rig, started=process_of(os.getpid()).started + 1)
    async with trio.open_nursery() as nursery:
        await start(rig, nursery)
        await rig.told("down", "w0", 1, True)
        nursery.cancel_scope.cancel()


async def test_exit_of_a_lost_epoch_is_still_awaited(rig: Rig) -> None:
    """I2: its pages are in quarantine; it is not asked back."""
    child = idle_process()
    expected(rig, process=child.pid, is_live=False)
    async with trio.open_nursery() as nursery:
        await start(rig, nursery)
        worker = await rig.worker()
        await worker.say(hello(**PAST))
        assert (await worker.hear()).code == "wrong_state"  # type: ignore[union-attr]
        assert rig.scheduler.told == []
        child.kill()
        await rig.told("exited", "w0", 1)
        child.wait()
        worker.close()
        nursery.cancel_scope.cancel()


async def test_worker_that_does_not_return_is_down(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=IMPATIENT)
    expected(rig)
    async with trio.open_nursery() as nursery:
        await start(rig, nursery)
        await rig.told("down", "w0", 1, False)
        worker = await rig.worker()
        await worker.say(hello(**PAST))
        assert (await worker.hear()).code == "wrong_state"  # type: ignore[union-attr]
        worker.close()
        nursery.cancel_scope.cancel()
    rig.socket.close()


async def test_reports_are_acknowledged_when_they_are_durable(tmp_path: Path) -> None:
    """Delivered or acknowledged before its commit, a report would be lost in a crash: it is not sent again."""
    store = FakeStore()
    store.error = "disk full"
    rig = Rig(tmp_path, journal=lambda log: GroupCommit(store, JournalState(), log, on_tokens=lambda: None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.journal.run)  # type: ignore[attr-defined]
        await start(rig, nursery)
        worker = await rig.joined()
        request_index = rig.admitted()
        await worker.hear()
        await worker.report(progress(RequestEntry(request_index, 1, 0, [4, 5], 10)), command_ack=1)
        with trio.fail_after(HANG_LIMIT_S):
            while rig.log.length(request_index) < 2:  # noqa: ASYNC110
                await trio.sleep(0.005)
        assert await worker.silence(0.7)
        assert rig.log.committed[request_index] == 0
        again = await rig.worker()
        await again.say(hello(command_ack=1, report_next=2))
        assert await again.hear() == WorkerWelcome(PROTOCOL_VERSION, INCARNATION, 0, want_tokenizer=False), (
            "say it again, if need be"
        )
        store.error = ""
        assert await again.hear() == ReportAck(INCARNATION, 1)
        assert any(isinstance(record, TokensAppended) for record in store.records)
        again.close()
        worker.close()
        nursery.cancel_scope.cancel()
    rig.socket.close()
