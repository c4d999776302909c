"""Scheduler, HostPool and Request actors together, over fake workers: commands, losses, drains, and random
schedules."""

from __future__ import annotations

import random
import re

import msgspec
import pytest
import trio
from trio.testing import MockClock

from basics.request_states import POISON_STRIKES, TERMINAL
from coordinator.scheduler.api import DEADLINE_MAX_S, FLOOD_MARGIN
from coordinator.scheduler.scheduler import GRANTED_ALL
from coordinator.state.request_state import RequestState
from coordinator.tokens.token_log import TokenLog
from coordinator.turn import request_table
from coordinator.turn.dispatch import Dispatch
from coordinator.turn.request_table import RequestTable
from protocol import messages
from protocol.arrays import pack_int32, pack_int64
from protocol.errors import (
    BadInput,
    CapacityError,
    ConfigError,
    HiSparseError,
    NotFound,
    ProtocolError,
    Unavailable,
    WrongState,
)
from protocol.settings import CoordinatorSettings
from tests.support.facts import make_facts
from tests.support.scheduler_rig import SETTINGS, SchedulerRig, open_rig

STATES = ["QUEUED", "PREFILLING", "READY", "RUNNING", "RETRACTING", "RETRACTED"]


async def bring_to(rig: SchedulerRig, request_id: str, state: str) -> None:
    """Put a fresh request into `state`, by the shortest way."""
    if state == "QUEUED":
        await rig.submit("ahead!", 1, 1_000, priority=9)
        await rig.run_until("ahead!", "RUNNING")
        await rig.scheduler.drain((), "test", handover=False, deadline_s=1e4)
        await rig.submit(request_id)
        return
    await rig.submit(request_id, 100, 1_000)
    await rig.settle()
    await rig.run_until(request_id, *([state] if state in ("PREFILLING", "READY") else ["RUNNING"]))
    if state in ("RETRACTING", "RETRACTED"):
        await rig.scheduler.retract((request_id,), "test", keep=True, hold=True)
        await rig.settle()
    if state == "RETRACTED":
        await rig.run_until(request_id, "RETRACTED")
    assert rig.state(request_id) == state


async def test_request_runs_to_its_end_with_a_history(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 300)
        await rig.run_until("r!", "FINISHED")
        row, history = rig.scheduler.describe("r!")
        assert (row.generated_tokens, row.host_pages, row.hits, row.misses) == (300, 0, 1, 1)
        assert [line.event for line in history][:4] == ["submitted", "admitted", "staged", "started"]
        assert history[0].at_s >= 1e9
        assert "host pages, resident" in history[1].reason
        assert rig.listener.endings["r!"].outcome == "FINISHED"
        rig.check_nothing_leaked()


async def test_each_history_line_is_a_log_line(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    """In order, when it happens, with request, state and reason; through retraction, resume and the end."""
    caplog.set_level("INFO", "hisparse.coordinator.state.request")
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await bring_to(rig, "r!", "RETRACTED")
        await rig.scheduler.resume(("r!",), "client 7")
        await rig.run_until("r!", "FINISHED")
        _, history = rig.scheduler.describe("r!")
    logged = [(record.message, record.__dict__["fields"]) for record in caplog.records]
    assert {said["request"] for _, said in logged} == {"r!"}
    told = [(event, said["state"], said.get("reason", "")) for event, said in logged]
    assert told == [(line.event, line.state, line.reason) for line in history]
    assert {"retract", "resume"} <= {event for event, *_ in told}
    assert dict(logged)["admitted"]["worker"] == "w0"


async def test_waits_pages_and_failures_are_counted(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 300)
        await rig.run_until("r!", "RUNNING")
        await rig.scheduler.retract(("r!",), "test", keep=True, hold=True)
        await rig.run_until("r!", "RETRACTED")
        waits = rig.counters.waits
        assert [sum(it.counts) for it in (waits.queue_s, waits.retract_s, waits.resume_s)] == [1, 1, 0]
        await rig.scheduler.resume(("r!",), "test")
        await rig.run_until("r!", "FINISHED")
        assert [sum(it.counts) for it in (waits.queue_s, waits.retract_s, waits.resume_s)] == [2, 1, 1]
        assert sum(rig.counters.host_page_s.counts) >= -(-400 // 64)
        await rig.submit("s!", 100, 1_000)
        await rig.run_until("s!", "RUNNING")
        await rig.scheduler.stop(0.0, "test")
        await rig.run_until("s!", "FAILED")
        assert rig.counters.failed == {"stopped": 1}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.refuses("cannot {} a request that is {}")
async def test_abort_in_every_state(autojump_clock: MockClock, state: str) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await bring_to(rig, "r!", state)
        await rig.scheduler.abort(("r!",), "client 7")
        await rig.settle()
        await rig.run_until("r!", "ABORTED")
        assert rig.listener.endings["r!"].reason == "abort by client 7"
        with pytest.raises(WrongState, match="ABORTED"):
            await rig.scheduler.abort(("r!",), "client 7")
        await rig.scheduler.undrain((), "test")
        while rig.live():
            await rig.run_until(rig.live()[0], "FINISHED")
        rig.check_nothing_leaked()


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "drop"])
@pytest.mark.parametrize("state", STATES[:4])
async def test_retract_and_resume_in_every_state(autojump_clock: MockClock, state: str, keep: bool) -> None:
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        await bring_to(rig, "r!", state)
        await rig.scheduler.retract(("r!",), "test", keep=keep, hold=True)
        await rig.settle()
        await rig.run_until("r!", "RETRACTED")
        row, _ = rig.scheduler.describe("r!")
        assert row.held
        assert (row.host_pages > 0) == (keep and state in ("READY", "RUNNING"))
        with pytest.raises(WrongState, match="held"):
            await rig.scheduler.retract(("r!",), "test", keep=keep, hold=True)
        for _ in range(10):
            rig.round()
            await trio.sleep(1)
        assert rig.state("r!") == "RETRACTED"
        await rig.scheduler.undrain((), "test")
        await rig.scheduler.resume(("r!",), "test")
        with pytest.raises(WrongState, match="goes on by itself"):
            await rig.scheduler.resume(("r!",), "test")
        await rig.run_until("r!", "FINISHED")
        assert link.worker.runs == {} or state == "QUEUED"


async def test_worker_is_told_the_rank_of_each_request(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        for request_id, priority in (("r1", 0), ("r2", 0), ("r3", 7)):
            await rig.submit(request_id, priority=priority)
        await rig.run_until("r2", "RUNNING")
        ranks = {run.admit.request_id: run.admit.rank for run in link.worker.runs.values()}
        assert ranks == {it.facts.request_id: it.facts.rank for it in rig.scheduler._requests.live.values()}
        assert ranks["r3"] < ranks["r1"] < ranks["r2"]


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "drop"])
async def test_last_topk_waits_with_its_rows(autojump_clock: MockClock, keep: bool) -> None:
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        await rig.submit("r!", 100, 300)
        await rig.run_until("r!", "RUNNING")
        for _ in range(2):
            await rig.scheduler.retract(("r!",), "test", keep=keep, hold=True)
            await rig.run_until("r!", "RETRACTED")
            assert rig.scheduler._requests.warm_start_bytes == (2 if keep else 0)
            await rig.scheduler.resume(("r!",), "test")
            await rig.run_until("r!", "RUNNING")
            (run,) = link.worker.runs.values()
            assert run.admit.warm_start == (b"r!" if keep else b"")
        await rig.scheduler.retract(("r!",), "test", keep=keep, hold=True)
        await rig.run_until("r!", "RETRACTED")
        await rig.scheduler.abort(("r!",), "test")
        await rig.run_until("r!", "ABORTED")
        await rig.settle()
        assert rig.scheduler._requests.warm_start_bytes == 0


def test_warm_starts_of_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: past the bound what comes is not kept, and its request starts cold."""
    monkeypatch.setattr(request_table, "WARM_STARTS_BYTES_MAX", 100)
    table = RequestTable(TokenLog(4, 1 << 12), SETTINGS, 0.0, Dispatch({}, 96))
    lives = [RequestState(make_facts(index, 10)) for index in range(4)]
    for live in lives:
        table.keep_warm_start(live, bytes(40))
    assert [len(live.warm_start) for live in lives] == [40, 40, 0, 0]
    table.keep_warm_start(lives[0], b"a")
    table.keep_warm_start(lives[2], bytes(59))
    assert [len(live.warm_start) for live in lives] == [1, 40, 59, 0]
    for live in lives:
        table.keep_warm_start(live, b"")
    assert table.warm_start_bytes == 0


@pytest.mark.refuses("{} may not fit {} hot chunks", "name 1 to {} requests")
async def test_commands_are_checked_before_any_takes_effect(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("a!", 100, 1_000)
        await rig.submit("b", 10, 1)
        await rig.run_until("b", "FINISHED")
        with pytest.raises(WrongState, match="cannot abort a request that is FINISHED"):
            await rig.scheduler.abort(("a!", "b"), "test")
        with pytest.raises(NotFound, match="request_id=absent"):
            await rig.scheduler.retract(("a!", "absent"), "test", keep=True, hold=True)
        with pytest.raises(BadInput, match=r"choose resident, auto, or a size of the workers: 128, 256"):
            await rig.scheduler.resize(("a!",), "test", hot_slots=200)
        with pytest.raises(CapacityError, match="may not fit 14 hot chunks"):
            await rig.scheduler.resize(("a!",), "test", hot_slots=0)
        with pytest.raises(BadInput, match="name 1 to"):
            await rig.scheduler.abort((), "test")
        await rig.run_until("a!", "RUNNING")
        assert await rig.scheduler.abort(("a!", "a!"), "test") == ("a!: aborted once its memory is released",)


async def test_operator_forces_hot_sizes(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("a!", 100, 600)
        await rig.run_until("a!", "RUNNING")
        for request_indices in (256, 0, 128):
            await rig.scheduler.resize(("a!",), "test", hot_slots=request_indices)
            for _ in range(3):
                await rig.settle()
                rig.round()
            await rig.settle()
            assert rig.scheduler.describe("a!")[0].hot_slots == request_indices
        await rig.scheduler.resize(("a!",), "test", hot_slots=-1)
        await rig.run_until("a!", "FINISHED")
        rig.check_nothing_leaked()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"prompt": 0}, BadInput, "prompt=0 tokens: the prompt is empty"),
        (
            {"prompt": 8_000},
            BadInput,
            "8000 prompt tokens and max_tokens 300 make 8300, the context of tiny holds 8192",
        ),
        (
            {"prompt": 600},
            CapacityError,
            "needs 600 prompt tokens in a pass, w0 has 512 (shorten it, or change worker.device_mem)",
        ),
        ({"prompt": 3_000}, CapacityError, "needs 52 index pages, w0 has 26 (shorten it"),
        ({"max_tokens": 7_000}, CapacityError, "needs 111 index pages"),
        ({"max_tokens": 0}, BadInput, "max_tokens=0"),
        ({"priority": 5_000}, BadInput, "priority=5000: must be -1000 to 1000"),
        ({"request_id": "a b"}, BadInput, "request_id='a b'"),
        ({"request_id": "taken"}, WrongState, "request_id=taken: is in use"),
    ],
)
async def test_impossible_request_is_refused_at_submission(
    change: dict[str, int], error: type[HiSparseError], text: str
) -> None:
    """SGLang #23704: what the host pool cannot hold is refused, not queued for ever."""
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("taken")
        with pytest.raises(error, match=re.escape(text)):
            await rig.submit(**({"request_id": "r", "prompt": 100, "max_tokens": 300} | change))  # type: ignore[arg-type]
        assert rig.live() == ["taken"]


@pytest.mark.refuses("a stop string has 1 to {} characters", "BadInput prompt={}: token ids of {}")
async def test_tokens_and_sampling_are_checked() -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        sampling = messages.Sampling(max_tokens=5)
        for prompt, changes, text in (
            ([5, 1000], {}, "prompt=1000: token ids of tiny are 0..999"),
            ([-1], {}, "prompt=-1"),
            ([1], {"temperature": float("nan")}, "temperature=nan"),
            ([1], {"top_p": 0.0}, "top_p=0"),
            ([1], {"seed": -1}, "seed=-1"),
            ([1], {"logprobs": 1 << 62}, "logprobs=4611686018427387904: must be 0 to 20"),
            ([1], {"stop": ("",)}, "stop=0 characters"),
            ([1], {"stop": ("x",) * 17}, "stop=17"),
        ):
            fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__} | changes
            submit = messages.Submit(1, pack_int32(prompt), messages.Sampling(**fields))
            with pytest.raises(BadInput, match=text):
                await rig.scheduler.submit(submit, "test")
        for count in (-1, 5):
            submit = messages.Submit(1, pack_int32([1]), sampling, draft_tokens=count)
            with pytest.raises(BadInput, match=f"draft_tokens={count}: must be 0 to 4"):
                await rig.scheduler.submit(submit, "test")
        with pytest.raises(ProtocolError, match="3 bytes do not divide"):
            await rig.scheduler.submit(messages.Submit(1, b"abc", sampling), "test")
        assert (await rig.scheduler.submit(messages.Submit(1, pack_int32([1]), sampling), "test")).request_id == "r1"


@pytest.mark.refuses("(start a worker, then retry)")
async def test_no_request_is_accepted_before_the_first_worker() -> None:
    async with open_rig() as rig:
        assert rig.scheduler.model() is None
        with pytest.raises(Unavailable, match="no worker has registered yet"):
            await rig.submit("r")


async def test_queue_is_bounded_and_refuses_by_name() -> None:
    """I8."""
    async with open_rig(settings=CoordinatorSettings(live_requests_max=64, queue_max=5)) as rig:
        await rig.add_worker("w0", seats=1)
        for number in range(6):
            await rig.submit(f"r{number}")
        await rig.settle()
        with pytest.raises(CapacityError, match=r"coordinator\.queue_max=5: 5 requests waiting already"):
            await rig.submit("r6")


async def test_ended_requests_are_forgotten_in_time(autojump_clock: MockClock) -> None:
    settings = CoordinatorSettings(live_requests_max=64, ended_keep_max=2, ended_keep_s=50.0)
    async with open_rig(settings=settings) as rig:
        await rig.add_worker("w0")
        for number in range(4):
            await rig.submit(f"r{number}", 10, 1)
            await rig.run_until(f"r{number}", "FINISHED")
        await trio.sleep(1)
        with pytest.raises(NotFound, match="request_id=r1"):
            rig.scheduler.lookup("r1")
        assert [row.request_id for row in rig.scheduler.request_rows(10)] == ["r3", "r2"]
        await trio.sleep(60)
        assert rig.scheduler.request_rows(10) == []
        assert len(rig.listener.forgotten_slots) == 4


# ---------------------------------------------------------------- workers


@pytest.mark.refuses(
    "epoch {} is still up",
    "was declared down",
    "its model {} ({}, context {})",
    "its host pool (pages, page bytes, rows, path) is {}",
)
async def test_worker_with_another_model_or_pool_is_refused() -> None:
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        hello, size = link.hello, link.hello.capacity

        async def join(**changes: object) -> None:
            fields = {name: getattr(hello, name) for name in hello.__struct_fields__} | {"worker": "w1"} | changes
            await rig.scheduler.worker_up(messages.WorkerHello(**fields), link)

        def resized(**changes: object) -> messages.WorkerCapacity:
            return messages.WorkerCapacity(**({n: getattr(size, n) for n in size.__struct_fields__} | changes))

        other = messages.ModelInfo("else", "other", 8192, 1000, 4, 128, (0,), "bytes", "")
        with pytest.raises(ConfigError, match="differs from the other workers' tiny"):
            await join(model=other)
        with pytest.raises(ConfigError, match="host pool"):
            await join(capacity=resized(host_pages=32))
        with pytest.raises(ProtocolError, match=r"hot_size_classes=.256, 128.: must ascend"):
            await join(capacity=resized(hot_size_classes=(256, 128)))
        with pytest.raises(ProtocolError, match="seats=0"):
            await join(capacity=resized(seats=0))
        with pytest.raises(BadInput, match="worker=''"):
            await join(worker="")
        with pytest.raises(Unavailable, match="epoch 1 is still up"):
            await join(worker="w0", epoch=5)
        rig.scheduler.worker_down("w0", 1, False)
        with pytest.raises(WrongState, match="epoch=1: was declared down"):
            await join(worker="w0")
        assert [row.state for row in rig.scheduler.worker_rows()] == ["disconnected"]
        await join(model=other, capacity=resized(host_pages=32))
        assert rig.scheduler.model() == other, "nothing depended on the first one"


async def test_worker_of_another_model_than_unfinished_requests_is_refused() -> None:
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        await rig.submit("left")
        rig.lose_worker("w0", proved=True)
        other = messages.ModelInfo("else", "other", 8192, 1000, 4, 128, (0,), "bytes", "")
        hello = msgspec.structs.replace(link.hello, model=other, epoch=9)
        with pytest.raises(
            ConfigError, match=r"differs from that of unfinished requests \(1\), tiny .*abort those requests"
        ):
            await rig.scheduler.worker_up(hello, link)


@pytest.mark.refuses("WrongState worker={}: {} ({})", "no worker or group of this name", "no worker is named")
async def test_disconnected_worker_is_listed_until_it_is_forgotten(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        for name in ("w0", "w1"):
            await rig.add_worker(name)
        with pytest.raises(WrongState, match=r"worker=w0: is connected \(stop its process"):
            await rig.scheduler.forget_workers(("w0",))
        rig.lose_worker("w0", proved=True)
        await rig.settle()
        before = rig.scheduler.worker_rows()[1]
        assert (before.worker, before.state, before.exit_proved) == ("w0", "disconnected", True)
        await trio.sleep(10.0)
        assert rig.scheduler.worker_rows()[1].link_age_s == before.link_age_s + 10.0, "it is not heard any more"
        for names in (("w0", "w1"), ("w0", "other")):
            with pytest.raises((WrongState, NotFound)):
                await rig.scheduler.forget_workers(names)
        assert [row.worker for row in rig.scheduler.worker_rows()] == ["w1", "w0"], "all or none"
        assert await rig.scheduler.forget_workers(("w0", "w0")) == ("w0: forgotten",)
        assert [row.worker for row in rig.scheduler.worker_rows()] == ["w1"]
        with pytest.raises(NotFound, match="worker=w0: no worker or group of this name"):
            await rig.scheduler.forget_workers(("w0",))
        with pytest.raises(BadInput, match="name at least one worker"):
            await rig.scheduler.forget_workers(())
        await rig.add_worker("w0")
        assert {row.worker for row in rig.scheduler.worker_rows()} == {"w0", "w1"}


async def test_workers_are_listed_with_their_standbys(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        for name in ("w0", "w1", "w2"):
            await rig.add_worker(name)
        await rig.scheduler.tell_standbys(("w0", "w1"), ("w1",))
        assert [row.standby for row in rig.scheduler.worker_rows()] == ["missing", "ready", ""]
        await rig.scheduler.tell_standbys(("w0", "w1"), ("w0",))
        assert [row.standby for row in rig.scheduler.worker_rows()] == ["ready", "missing", ""]


@pytest.mark.refuses("have host pages in quarantine, and no exit is proved")
async def test_worker_that_may_still_write_pages_is_not_forgotten(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 1_000)
        await rig.run_until("r!", "RUNNING")
        rig.lose_worker("w0", proved=False)
        await rig.settle()
        assert not rig.scheduler.worker_rows()[0].exit_proved
        with pytest.raises(WrongState, match=r"epochs \[1\] .*release-quarantine w0 --i-am-sure"):
            await rig.scheduler.forget_workers(("w0",))
        await rig.scheduler.release_quarantine(("w0",), "test")  # the remedy
        assert await rig.scheduler.forget_workers(("w0",)) == ("w0: forgotten",)


@pytest.mark.parametrize("died", [True, False], ids=["supervisor", "operator"])
async def test_word_of_a_supervisor_counts_against_requests_and_that_of_an_operator_does_not(
    autojump_clock: MockClock, died: bool
) -> None:
    """A supervisor on the worker's node has seen its process end; an operator only vouches that it is gone."""
    async with open_rig() as rig:
        for _ in range(POISON_STRIKES):
            await rig.add_worker("w0")
            if not rig.live():
                await rig.submit("r!", 100, 1_000)
            await rig.run_until("r!", "PREFILLING")
            rig.lose_worker("w0", proved=False)
            await rig.settle()
            await rig.scheduler.release_quarantine(("w0",), "test", died=died)
            await rig.settle()
        row, _ = rig.scheduler.describe("r!")
        assert (row.state == "FAILED") == died
        assert ("its worker died 6 times" in row.reason) == died


async def test_disconnected_ranks_are_forgotten_by_their_group() -> None:
    async with open_rig() as rig:
        for rank in (0, 1):
            await rig.add_worker(f"w{rank}", member=messages.GroupMember("g0", rank, 2, 1))
        with pytest.raises(WrongState, match="is connected"):
            await rig.scheduler.forget_workers(("g0",))
        for rank in (0, 1):
            rig.lose_worker(f"w{rank}", proved=True)
        assert await rig.scheduler.forget_workers(("g0",)) == ("w0: forgotten", "w1: forgotten")
        assert rig.scheduler.worker_rows() == []


async def test_request_without_a_worker_says_so_in_its_row_and_history(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        assert rig.scheduler.unserved() == "no worker is connected"
        await rig.add_worker("w0")
        assert rig.scheduler.unserved() == ""
        rig.lose_worker("w0", proved=True)
        await rig.submit("r")
        await trio.sleep(1.0)
        row, history = rig.scheduler.describe("r")
        assert (row.waits_for, row.reason) == ("no_worker", "no worker is connected")
        assert [(line.event, line.reason) for line in history][1:] == [("waits", "no worker is connected")]
        await rig.add_worker("w0")
        await rig.run_until("r", "RUNNING")
        assert rig.scheduler.describe("r")[0].waits_for == ""


@pytest.mark.parametrize(
    "proved",
    [
        pytest.param(True, marks=pytest.mark.refuses("still use the host pool that was there before")),
        False,
    ],
    ids=["exit proved", "silent"],
)
async def test_new_pool_has_no_rows_of_the_last(autojump_clock: MockClock, proved: bool) -> None:
    """I3, I5: what was kept in the file that is gone is prefilled again, never read from the new one."""
    async with open_rig() as rig:
        await rig.add_worker("w0", pool_id=1)
        await rig.submit("r", prompt=100, max_tokens=300)
        await rig.run_until("r", "RUNNING")
        for _ in range(30):
            rig.round()
        await rig.settle()
        rig.lose_worker("w0", proved=proved)
        with pytest.raises(Unavailable, match="still use the host pool"):
            await rig.add_worker("w1", pool_id=2)
        await rig.settle()
        assert rig.state("r") == "RETRACTED"
        rig.pools.clear()
        await rig.add_worker("w1", pool_id=2)
        await rig.settle()
        history = rig.scheduler.describe("r")[1]
        assert [line.event for line in history][-2:] == ["demoted", "admitted"]
        await rig.run_until("r", "FINISHED")
        rig.check_nothing_leaked()


@pytest.mark.refuses("accounts of its node's last pool are being closed")
async def test_new_pool_waits_until_the_last_ledger_is_closed(autojump_clock: MockClock) -> None:
    """I1: the end of one epoch and the hello of the next may be heard in one turn."""
    async with open_rig() as rig:
        await rig.add_worker("w0", pool_id=1)
        rig.lose_worker("w0", proved=True)
        with pytest.raises(Unavailable, match="accounts of its node's last pool are being closed"):
            await rig.add_worker("w1", pool_id=2)
        await rig.add_worker("w1", pool_id=2)
        rig.check()


@pytest.mark.parametrize("proved", [True, False], ids=["exit proved", "silent"])
@pytest.mark.parametrize("state", ["PREFILLING", "READY", "RUNNING", "RETRACTING"])
async def test_worker_loss_in_every_state(autojump_clock: MockClock, state: str, proved: bool) -> None:
    """I2: what a silent worker held is quarantined; its requests go on elsewhere, nothing lost or repeated."""
    async with open_rig(host_pages=80) as rig:
        await rig.add_worker("w0")
        await bring_to(rig, "r!", state)
        held = rig.scheduler.describe("r!")[0].host_pages
        rig.lose_worker("w0", proved=proved)
        await rig.settle()
        rig.check()
        row, _ = rig.scheduler.describe("r!")
        assert row.host_pages == (0 if state == "PREFILLING" else 2 if proved else 1)  # of a prompt of 100 tokens
        (pool,) = rig.scheduler.pool_rows()
        assert pool.quarantined == (0 if proved else held - row.host_pages)
        await rig.add_worker("w1")
        if state == "RETRACTING":
            await rig.scheduler.resume(("r!",), "test")
        await rig.run_until("r!", "FINISHED")
        for zombie in list(rig.zombies):
            for placement in list(zombie.worker.runs):
                zombie.worker.advance(placement)
            rig.prove_exit(zombie)
        await rig.settle()
        rig.check_nothing_leaked()


async def test_drain_hands_requests_over_through_the_pool(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 1_000)
        await rig.run_until("r!", "RUNNING")
        await rig.add_worker("w1")
        lines = await rig.scheduler.drain(("w0",), "test", handover=True, deadline_s=100)
        assert lines == ("w0: draining, 1 request handed over or left to finish here, retracted after 100 s",)
        for _ in range(4):
            await rig.settle()
            rig.round()
        await rig.settle()
        assert {row.worker: row.state for row in rig.scheduler.worker_rows()} == {"w0": "drained", "w1": "connected"}
        await rig.run_until("r!", "RUNNING")
        assert rig.scheduler.describe("r!")[0].worker == "w1"
        await rig.run_until("r!", "FINISHED")
        assert [line.event for line in rig.scheduler.describe("r!")[1]].count("staged") == 1, "no second prefill"


async def test_drain_has_a_deadline_and_skips_held_requests(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("held!", 100, 900)
        await rig.submit("r!", 100, 900)
        await rig.run_until("r!", "RUNNING")
        await rig.scheduler.retract(("held!",), "test", keep=True, hold=True)
        await rig.scheduler.drain((), "test", handover=False, deadline_s=1.0)
        for _ in range(8):
            rig.round()
            await trio.sleep(0.25)
        assert [row.state for row in rig.scheduler.worker_rows()] == ["drained"]
        assert rig.state("r!") == "RETRACTED"
        with pytest.raises(NotFound, match="worker=w9"):
            await rig.scheduler.drain(("w9",), "test", handover=False, deadline_s=1.0)
        for none in (float("inf"), float("nan"), -1.0, DEADLINE_MAX_S + 1):
            with pytest.raises(BadInput, match=f"deadline_s={none}: must be 0.0 to 86400.0"):
                await rig.scheduler.drain((), "test", handover=False, deadline_s=none)
            with pytest.raises(BadInput, match="deadline_s="):
                await rig.scheduler.stop(none, "test")


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "drop"])
async def test_resume_says_what_becomes_of_the_request(autojump_clock: MockClock, keep: bool) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 300)
        await rig.run_until("r!", "RUNNING")
        await rig.scheduler.retract(("r!",), "test", keep=keep, hold=True)
        assert await rig.scheduler.resume(("r!",), "test") == (
            "r!: held no longer, runs again once it has left its worker and memory is free",
        )
        await rig.run_until("r!", "RUNNING")
        await rig.scheduler.retract(("r!",), "test", keep=keep, hold=True)
        await rig.run_until("r!", "RETRACTED")
        with pytest.raises(WrongState, match="cannot retract a request that is HELD"):
            await rig.scheduler.retract(("r!",), "test", keep=keep, hold=True)
        (line,) = await rig.scheduler.resume(("r!",), "test")
        kept = r"its \d+ rows were kept, runs" if keep else "its prompt is prefilled again"
        assert re.fullmatch(f"r!: held no longer, {kept} as soon as memory is free", line)


@pytest.mark.parametrize(
    ("requests", "deadline_s", "drains", "stops"),
    [
        (0, 0.0, "draining, and no request is on it", "stopping, and no request is left"),
        (
            1,
            0.0,
            "draining, 1 request retracted at once",
            "stopping at once, 1 unfinished request fails: there is no journal",
        ),
        (
            2,
            0.0,
            "draining, 2 requests retracted at once",
            "stopping at once, 2 unfinished requests fail: there is no journal",
        ),
        (
            2,
            30.0,
            "draining, 2 requests left to finish here, retracted after 30 s",
            "stopping, at most 30 s for 2 requests to finish; what has not then fails: there is no journal",
        ),
    ],
)
async def test_drain_and_stop_say_what_becomes_of_requests(
    requests: int, deadline_s: float, drains: str, stops: str
) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        for number in range(requests):
            await rig.submit(f"r{number}", 100, 300)
            await rig.run_until(f"r{number}", "RUNNING")
        lines = await rig.scheduler.drain(("w0",), "test", handover=False, deadline_s=deadline_s)
        assert lines == (f"w0: {drains}",)
        assert await rig.scheduler.stop(deadline_s, "test") == (stops,)


async def test_worker_is_registered_when_worker_up_returns() -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        (row,) = rig.scheduler.worker_rows()
        assert (row.worker, row.state, row.seats_free, row.step_us) == ("w0", "connected", 3, 2.0)


async def test_worker_may_leave_as_its_last_request_ends(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        await rig.submit("r!", 100, 50)
        await rig.run_until("r!", "RUNNING")
        (request,) = rig.scheduler._requests.by_index.values()
        rig.scheduler.worker_down("w0", 1, True)  # arrives first; what the step of the Request returns is heard before
        request.tell(messages.Faulted(1, "bad row"))
        request.tell(messages.Released(1, 0))
        link.cut()
        await rig.settle()
        assert rig.state("r!") == "FAILED"
        rig.check()
        rig.check_nothing_leaked()


async def test_grants_and_durable_rows_reach_the_token_log(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 500)
        await rig.run_until("r!", "RUNNING")
        request_index = rig.scheduler.lookup("r!")
        assert rig.token_log._granted[request_index] == rig.scheduler.describe("r!")[0].host_pages * 64
        while len(rig.tokens("r!")) < 200:
            rig.round()
            await rig.settle()
        assert rig.token_log._granted[request_index] == rig.scheduler.describe("r!")[0].host_pages * 64
        await rig.scheduler.retract(("r!",), "test", keep=True, hold=True)
        await rig.settle()
        await rig.run_until("r!", "RETRACTED")
        kept = rig.scheduler.describe("r!")[0].durable_tokens
        assert kept >= 100 + 190
        await rig.scheduler.resume(("r!",), "test")
        await rig.settle()
        assert rig.scheduler.describe("r!")[0].durable_tokens == kept
        while rig.scheduler.describe("r!")[0].host_pages < 10:  # 100 + 500 + 2 tokens
            rig.round()
            await rig.settle()
        assert rig.token_log._granted[request_index] == GRANTED_ALL


# ---------------------------------------------------------------- stopping


@pytest.mark.refuses("the coordinator is stopping")
async def test_stop_finishes_running_work_and_refuses_more(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 100)
        await rig.submit("held!", 100, 100)
        await rig.scheduler.retract(("held!",), "test", keep=True, hold=True)
        await rig.scheduler.stop(1_000, "test")
        with pytest.raises(Unavailable, match="stopping"):
            await rig.submit("late")
        await rig.run_until("r!", "FINISHED")
        with trio.fail_after(5):
            await rig.scheduler.stopped.wait()
        assert rig.listener.endings["held!"].outcome == "FAILED"


@pytest.mark.parametrize("answers", [True, False], ids=["worker releases", "worker is silent"])
async def test_stop_deadline_fails_all_requests(autojump_clock: MockClock, answers: bool) -> None:
    """I5, I8."""
    async with open_rig() as rig:
        await rig.add_worker("w0")
        for number in range(5):
            await rig.submit(f"r{number}!", 100, 1_000)
        await rig.run_until("r0!", "RUNNING")
        await rig.scheduler.stop(2.0, "test")
        with trio.fail_after(20):
            while not rig.scheduler.stopped.is_set():
                await trio.sleep(0.5)
                if answers:
                    rig.round()
        assert {ending.outcome for ending in rig.listener.endings.values()} == {"FAILED"}
        assert len(rig.listener.endings) == 5


# ---------------------------------------------------------------- hostile workers


async def test_worker_cannot_touch_requests_of_another_worker(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 300)
        await rig.run_until("r!", "RUNNING")
        for placement in (0, 1, 2, 10**12):
            rig.scheduler.on_event("w9", 1, messages.Released(placement, 0))
            rig.scheduler.on_event("w0", 99, messages.Faulted(placement, "no"))
        await rig.settle()
        assert rig.state("r!") == "RUNNING"


def flood(rig: SchedulerRig, event: messages.Event, count: int) -> None:
    for _ in range(count):
        rig.scheduler.on_event("w0", 1, event)


async def test_impossible_events_are_dropped_and_floods_refused(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r!", 100, 300)
        await rig.run_until("r!", "RUNNING")
        for event in (messages.Staged(1, 0.0, 0.0), messages.Resized(1, 128, 3), messages.Resized(1, 0, -5)):
            rig.scheduler.on_event("w0", 1, event)
        await rig.settle()
        rig.check()
        with pytest.raises(ProtocolError, match="floods request r!"):
            flood(rig, messages.Parked(1), 1_000)
        counters = messages.Counters(0, 0, 0, pack_int64([1, 77]), pack_int64([10, 1]), pack_int64([2, 1]))
        rig.scheduler.on_event("w0", 1, counters)
        assert rig.scheduler.describe("r!")[0].hits == 10
        with pytest.raises(ProtocolError, match="different lengths"):
            rig.scheduler.on_event("w0", 1, messages.Counters(0, 0, 0, pack_int64([1]), b"", b""))
        one, two = pack_int64([1]), pack_int64([4, 3])
        for drafts in ((two, two), (one, b"")):
            with pytest.raises(ProtocolError, match="different lengths"):
                rig.scheduler.on_event("w0", 1, messages.Counters(0, 0, 0, one, one, one, *drafts))
        rig.scheduler.on_event("w0", 1, messages.Counters(0, 0, 0, one, one, one, pack_int64([4]), pack_int64([3])))
        row = rig.scheduler.describe("r!")[0]
        assert (row.drafted_tokens, row.accepted_tokens) == (4, 3)
        await rig.run_until("r!", "FINISHED")
        ending = rig.listener.endings["r!"]
        assert (ending.drafted_tokens, ending.accepted_tokens) == (1, 0), "as the worker counted last"


async def test_flooded_request_and_flooding_worker_leave_turns_to_others(autojump_clock: MockClock) -> None:
    """I8: what one worker may send for one request is bounded, and past the bound that worker is to blame."""
    async with open_rig() as rig:
        await rig.add_worker("w0", seats=1)
        await rig.submit("flooded!", 100, 300)
        await rig.run_until("flooded!", "RUNNING")
        link = await rig.add_worker("w1", "n1")
        flooded = rig.scheduler._requests.by_index[rig.scheduler.lookup("flooded!")]
        for number in range(8):
            await rig.submit(f"r{number}", 100, 100)
        rounds = 0
        while len(rig.listener.endings) < 8:
            with pytest.raises(ProtocolError, match="floods request flooded!"):
                flood(rig, messages.Parked(1), 1_000)
            assert flooded.room() == FLOOD_MARGIN - 1, "the Scheduler has room beside the worker"
            link.round()
            await rig.settle()
            assert flooded.room() == flooded._mailbox.capacity
            rig.check()
            rounds += 1
            assert rounds < 100, "no more than it takes without a flood"
        await rig.run_until("flooded!", "FINISHED")


async def test_request_has_no_task(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        tasks = trio.lowlevel.current_statistics().tasks_living
        for number in range(20):
            await rig.submit(f"r{number}!", 100, 300)
        await rig.run_until("r0!", "RUNNING")
        assert len(rig.scheduler._requests.live) == 20
        assert trio.lowlevel.current_statistics().tasks_living == tasks


# ---------------------------------------------------------------- random schedules


class Chaos:
    """Everything that may happen, in an order drawn from the seed."""

    def __init__(self, rig: SchedulerRig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.submitted = 0

    async def act(self) -> None:
        acts = {
            self.submit: 4,
            self.advance: 10,
            self.obey: 8,
            self.hear: 8,
            self.wait: 2,
            self.command: 3,
            self.lose: 0.2,
            self.join: 0.6,
            self.prove: 0.3,
            self.drain: 0.4,
        }
        (act,) = self.rng.choices(list(acts), list(acts.values()))
        await act()

    async def submit(self) -> None:
        if self.submitted < 20 and self.rig.links:
            self.submitted += 1
            full = "!" * self.rng.randint(0, 1)
            prompt, length = self.rng.randint(1, 300), self.rng.randint(1, 250)
            await self.rig.submit(f"q{self.submitted}{full}", prompt, length, self.rng.randint(0, 2))

    async def advance(self) -> None:
        links = [link for link in (*self.rig.links.values(), *self.rig.zombies) if link.worker.runs]
        if links:
            link = self.rng.choice(links)
            link.worker.advance(self.rng.choice(sorted(link.worker.runs)))

    async def obey(self) -> None:
        if self.rig.links:
            self.rng.choice(list(self.rig.links.values())).obey()

    async def hear(self) -> None:
        if self.rig.links:
            self.rng.choice(list(self.rig.links.values())).hear()

    async def wait(self) -> None:
        await trio.sleep(self.rng.choice([0.0, 0.01, 0.3]))

    async def command(self) -> None:
        live = self.rig.live()
        if not live:
            return
        scheduler, ids = self.rig.scheduler, tuple(self.rng.sample(live, min(len(live), self.rng.randint(1, 2))))
        keep, hold, request_indices = (
            self.rng.random() < 0.6,
            self.rng.random() < 0.4,
            self.rng.choice([-1, 0, 128, 256]),
        )
        try:
            match self.rng.randrange(8):
                case 0:
                    await scheduler.abort(ids, "chaos")
                case 1 | 2 | 3:
                    await scheduler.retract(ids, "chaos", keep=keep, hold=hold)
                case 4 | 5:
                    await scheduler.resume(ids, "chaos")
                case _:
                    await scheduler.resize(ids, "chaos", hot_slots=request_indices)
        except (WrongState, CapacityError):
            return

    async def lose(self) -> None:
        if self.rig.links:
            self.rig.lose_worker(self.rng.choice(sorted(self.rig.links)), proved=self.rng.random() < 0.5)

    async def join(self) -> None:
        for name, counts in (("w0", {}), ("w1", {"seats": 2, "hot_chunks": 10})):
            if name not in self.rig.links:
                await self.rig.add_worker(name, **counts)
                return

    async def prove(self) -> None:
        if self.rig.zombies:
            self.rig.prove_exit(self.rng.choice(self.rig.zombies))

    async def drain(self) -> None:
        try:
            if self.rng.random() < 0.5:
                handover, deadline_s = self.rng.random() < 0.7, self.rng.choice([0.0, 1.0, 50.0])
                await self.rig.scheduler.drain(
                    (self.rng.choice(["w0", "w1"]),), "chaos", handover=handover, deadline_s=deadline_s
                )
            else:
                await self.rig.scheduler.undrain((), "chaos")
        except (NotFound, WrongState):
            return

    async def make_peace(self) -> None:
        """All workers are connected, none is drained, no request is held, every exit is proved."""
        for zombie in list(self.rig.zombies):
            self.rig.prove_exit(zombie)
        await self.join()
        await self.join()
        await self.rig.scheduler.undrain((), "chaos")
        await self.rig.settle()
        held = tuple(row.request_id for row in self.rig.scheduler.request_rows(99) if row.held)
        if held:
            await self.rig.scheduler.resume(held, "chaos")


@pytest.fixture
def fixed_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """trio shuffles the tasks that are ready; from a seed, so that a failure can be replayed."""
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr(trio._core._run, "_r", random.Random(1))


@pytest.mark.parametrize("seed", range(24))
async def test_random_schedules_end_every_request_without_leaks(
    fixed_scheduling: None, autojump_clock: MockClock, seed: int
) -> None:
    async with open_rig(seed, host_pages=random.Random(seed).randint(14, 40), settings=SETTINGS) as rig:
        chaos = Chaos(rig, random.Random(seed))
        await chaos.join()
        await chaos.join()
        for step in range(random.Random(seed).randint(50, 250)):
            await chaos.act()
            if step % 5 == 0:
                await rig.settle()
                rig.check()
        await chaos.make_peace()
        for request_id in rig.live():
            await rig.run_until(request_id, *TERMINAL)
        await rig.settle()
        rig.check()
        rig.check_nothing_leaked()
        assert len(rig.listener.endings) == chaos.submitted, "I5"


async def test_flood_of_one_key_evicts_what_it_has_cached_itself(autojump_clock: MockClock) -> None:
    """One request after the other, so that memory of requests is never short: only the cache is."""

    async def serve(name: str, user: str, first: int) -> None:
        ids = pack_int32([first, *range(300)])
        await rig.scheduler.submit(messages.Submit(1, ids, messages.Sampling(max_tokens=2), name), user, user)
        await rig.run_until(name, "FINISHED")

    settings = msgspec.structs.replace(SETTINGS, prefix_reuse="own")
    async with open_rig(host_pages=40, settings=settings) as rig:
        await rig.add_worker("w0")
        await serve("before", "ann", 0)
        cached = rig.scheduler._prefix_reuse.by_node["n0"]
        assert cached.owners() == {("ann", ""): 4}
        for number in range(20):
            await serve(f"flood{number}", "eve", number)
        assert cached.owners()["ann", ""] == 4
        assert rig.counters.prefix_pages_evicted_lent == rig.counters.prefix_pages_evicted > 0
        rig.check()
