"""The worker as a real process: `hisparse worker` with a tiny checkpoint, driven over ipc.

The tests play the coordinator (tests/support/fakes/listening_coordinator.py): they decide what it never would.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import trio

from kernels.layout import Geometry
from protocol.arrays import pack_int32
from protocol.errors import EXIT_DEFECT
from protocol.messages import Admit, Finished, Refused, Released, Sampling, Started
from protocol.units import pages_for
from tests import ROOT
from tests.support import zygote
from tests.support.checkpoints import tiny_checkpoint
from tests.support.fakes.listening_coordinator import FakeListeningCoordinator
from tests.support.process_rig import LIMIT_S, Place
from worker.pool.host_pool import MappedPool
from worker.pool.registration import FirstTouch, Piece, cut
from worker.process import EXIT_CLEAN, EXIT_INTERRUPTED, StartInterruptedError, interruptible

PROMPT = list((b"The host pool is a file that outlives the workers. " * 8)[:300])
TOKENS = 96
PAGES = pages_for(len(PROMPT) + TOKENS + 1)
PLANTED = ("-m", "tests.support.planted")


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, layers=2)


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    return Place(tmp_path, model)


def admit(placement: int, *, generated: list[int] | None = None, durable: int = 0, pages: int = PAGES) -> Admit:
    """A request that holds the first `pages` host pages, managed at the smallest size."""
    return Admit(
        placement=placement,
        request_index=0,
        request_id=f"r{placement}",
        prompt=pack_int32(PROMPT),
        generated=pack_int32(generated or []),
        durable_tokens=durable,
        sampling=Sampling(TOKENS, ignore_eos=True),
        host_pages=pack_int32(range(pages)),
        index_pages=pages,
        hot_slots=128,
        hot_chunks=3,
    )


@pytest.mark.process
async def test_sigterm_leaves_a_pool_for_a_successor(place: Place) -> None:
    """I2, I3, I5: stopped in the middle of decoding, all is released and reported and the process exits cleanly; the
    next one resumes at the durable length and continues with the very tokens of an undisturbed run."""
    with FakeListeningCoordinator(place.endpoint("worker")) as coordinator:
        async with place.worker() as process:
            await coordinator.greet()
            coordinator.command(admit(1))
            assert await coordinator.hear(Finished) == Finished(1, "length", TOKENS)
            await coordinator.hear(Released)
            undisturbed, coordinator.tokens = coordinator.tokens, []
            assert len(undisturbed) == TOKENS

            coordinator.command(admit(2, pages=PAGES - 1))  # it cannot come to its end
            await coordinator.hear(Started)
            await coordinator.hear_tokens(8)
            process.signal(signal.SIGTERM)
            released = await coordinator.hear(Released)
            assert isinstance(released, Released)
            published = list(coordinator.tokens)
            assert len(PROMPT) <= released.durable_tokens <= len(PROMPT) + len(published) - 1
            code, log = await process.exit()
            assert code == EXIT_CLEAN, log
            assert "stopped" in log
        assert place.pool.exists()
        assert published == undisturbed[: len(published)]
        assert len(published) < TOKENS

        async with place.worker("--stream-backend", "simulated") as process:
            coordinator.restart()
            await coordinator.greet()
            coordinator.command(admit(3, generated=published, durable=released.durable_tokens))
            await coordinator.hear(Finished)
            assert [*published, *coordinator.tokens] == undisturbed
            process.signal(signal.SIGINT)
            assert (await process.exit())[0] == EXIT_CLEAN


@pytest.mark.process
async def test_a_second_signal_exits_at_once(tmp_path: Path, model: Path) -> None:
    """The first one waits for the last report's acknowledgement without end."""
    place = Place(tmp_path, model, worker_program=(*PLANTED, "endless-flush"))
    with FakeListeningCoordinator(place.endpoint("worker")) as coordinator:
        async with place.worker() as process:
            await coordinator.greet()
            coordinator.acknowledges = False
            coordinator.command(admit(1))
            await coordinator.hear_tokens(1)
            process.signal(signal.SIGTERM)
            await coordinator.hear(Released)
            process.signal(signal.SIGTERM)
            code, log = await process.exit()
        assert code == EXIT_INTERRUPTED, log
        assert place.pool.exists()


@pytest.mark.process
async def test_failed_executor_ends_its_process(place: Place) -> None:
    """A coordinator that admits twice breaks an invariant of the executor: exit code 70 and one log line."""
    with FakeListeningCoordinator(place.endpoint("worker")) as coordinator:
        async with place.worker() as process:
            await coordinator.greet()
            coordinator.command(admit(1), admit(1))
            code, log = await process.exit()
    assert code == EXIT_DEFECT, log
    (line,) = [line for line in log.splitlines() if "critical" in line]
    assert "admitted twice" in line


@pytest.mark.process
async def test_hanging_thread_does_not_delay_exit(tmp_path: Path) -> None:
    """I8: the end of the interpreter would wait for it without bound."""
    with trio.fail_after(LIMIT_S):
        process = zygote.start([sys.executable, *PLANTED, "stuck", "worker", "--model", "any"], cwd=ROOT)
        assert await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True) == EXIT_DEFECT


@pytest.mark.process
async def test_final_refusal_ends_the_process_with_its_remedy(place: Place) -> None:
    with FakeListeningCoordinator(place.endpoint("worker")) as coordinator:
        async with place.worker() as process:
            await coordinator.greet()
            coordinator.say(Refused("config", "another model than the group's", "start with the same --model"))
            code, log = await process.exit()
    assert code == 8, log
    assert "start with the same --model" in log.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_pool_start_frees_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Answered within a piece, however many are left; a file half made is no pool and takes no room."""
    touched: list[Piece] = []

    def touch_slowly(_: FirstTouch, piece: Piece) -> None:
        touched.append(piece)
        if piece.offset == 0:
            os.kill(os.getpid(), number)
        time.sleep(0.1)

    monkeypatch.setattr(FirstTouch, "__call__", touch_slowly)
    monkeypatch.setattr("worker.pool.host_pool.TOUCH_BYTES", 1)
    geometry = Geometry(layers=2, row_bytes=24, group_of_layer=(0, 1), index_row_bytes=8, topk=16)
    before, handler = threading.active_count(), signal.getsignal(number)
    with pytest.raises(StartInterruptedError), interruptible() as halted:
        MappedPool.open(tmp_path / "n.pool", geometry, 1_000, halted=halted)
    assert len(touched) < len(cut(1_000, geometry.page_bytes, 1)) / 2
    assert (tmp_path / "n.pool").stat().st_size == 0
    assert threading.active_count() <= before + 1
    assert signal.getsignal(number) is handler
