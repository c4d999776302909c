"""The CUDA backend of streams over a fake torch.cuda: which stream is current, who waits for which event, what is
refused. What a device makes of it is tested on one (tests/gpu/test_streams.py)."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from protocol.errors import ConfigError
from tests.support.fakes.cuda import FakeCuda
from worker.streams import FENCES, HOST, STREAM_NAMES, FenceError, cuda, make_streams
from worker.streams.cuda import HIGH, LOW, SAMPLE_EVERY, SAMPLES_MAX, CudaFence, CudaStreams
from worker.streams.spans import SPANS_MAX


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def streams(fake: FakeCuda) -> CudaStreams:
    return made()


def made(omit: tuple[str, ...] = ()) -> CudaStreams:
    streams = make_streams("cuda", omit=omit)
    assert isinstance(streams, CudaStreams)
    streams.adopt_thread()
    return streams


def test_each_stream_is_current_while_launched_on(fake: FakeCuda) -> None:
    streams = made()
    seen: dict[str, object] = {}
    for stream in streams._by_name.values():
        stream.launch("look", partial(lambda name: seen.update({name: fake.current}), stream.name))
        assert fake.current is streams._by_name["compute"].cuda
    assert seen == {name: stream.cuda for name, stream in streams._by_name.items()}
    assert len(set(map(id, seen.values()))) == len(STREAM_NAMES)
    priorities = {name: stream.cuda.priority for name, stream in streams._by_name.items()}
    low = {"stage": LOW, "backup": LOW, "load": LOW, "refill": LOW}
    assert priorities == {"compute": HIGH, "swap": HIGH, "masks": HIGH} | low


def test_compute_is_current_after_an_error_naming_the_operation(fake: FakeCuda) -> None:
    streams = made()

    def fail() -> None:
        raise ValueError("boom")

    for stream in streams.all:
        with pytest.raises(ValueError, match="boom") as caught:
            stream.launch("copy", fail)
        assert caught.value.__notes__ == [f"in copy on {stream.name}"]
        assert fake.current is streams._by_name["compute"].cuda


@pytest.mark.parametrize("name", FENCES)
def test_declared_edges_wait_and_others_are_refused(name: str, streams: CudaStreams) -> None:
    spec = FENCES[name]
    producer = streams._by_name[next(iter(spec.producers))]
    fence = producer.record(name)
    assert isinstance(fence, CudaFence)
    assert fence.event.stream is producer.cuda  # type: ignore[attr-defined]
    for stream in streams._by_name.values():
        if stream.name in spec.consumers:
            stream.wait(fence)
            assert fence.event in stream.cuda.waited  # type: ignore[attr-defined]
        else:
            with pytest.raises(FenceError, match=name):
                stream.wait(fence)
        if stream.name not in spec.producers:
            with pytest.raises(FenceError, match=name):
                stream.record(name)
    if HOST in spec.consumers:
        assert fence.done()
        fence.wait()
    else:
        with pytest.raises(FenceError, match=name):
            fence.done()


@pytest.mark.usefixtures("fake")
def test_omitted_fence_is_not_awaited() -> None:
    streams = made(("preloaded",))
    streams._by_name["load"].cuda.stuck = True  # type: ignore[attr-defined]
    fence = streams.load.record("preloaded")
    streams.compute.wait(fence)
    fence.wait()
    assert fence.done()
    assert streams._by_name["compute"].cuda.waited == []  # type: ignore[attr-defined]


def test_fence_timeout_names_the_fence(streams: CudaStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8."""
    monkeypatch.setattr(cuda, "HOST_WAIT_LIMIT_S", 0.01)
    monkeypatch.setattr(cuda, "CLOSE_LIMIT_S", 0.01)
    streams._by_name["load"].cuda.stuck = True  # type: ignore[attr-defined]
    fence = streams.load.record("preloaded")
    assert not fence.done()
    with pytest.raises(FenceError, match=r"preloaded#\d+ of load"):
        fence.wait()
    with pytest.raises(FenceError, match="the end of load"):
        streams.close()
    with pytest.raises(FenceError, match="closed"):
        streams.compute.launch("late", lambda: None)


def test_a_rank_of_a_group_waits_for_its_peers_without_a_limit(
    streams: CudaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timeout of a fence decides that a rank is lost: worker/group/control.py does."""
    monkeypatch.setattr(cuda, "HOST_WAIT_LIMIT_S", 0.01)
    streams.waits_for_peers = True
    load: Any = streams._by_name["load"].cuda
    load.stuck = True
    fence = streams.load.record("preloaded")
    release = threading.Timer(0.3, lambda: setattr(load, "stuck", False))
    release.start()
    fence.wait()
    assert fence.done()
    release.join()


def test_only_the_thread_that_adopted_them_launches(streams: CudaStreams) -> None:
    caught: list[FenceError] = []

    def launch() -> None:
        try:
            streams.compute.launch("nothing", lambda: None)
        except FenceError as error:
            caught.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert "adopted" in str(caught[0])


def test_events_are_reused_except_those_of_graphs(streams: CudaStreams) -> None:
    for _ in range(10):
        streams.compute.record("sampled").wait()
    assert len(streams._events) == 1
    streams.capture(lambda: streams.compute.record("selected"))  # type: ignore[arg-type, return-value]
    assert len(streams._events) == 1


def test_sampled_waits_are_timed(streams: CudaStreams) -> None:
    for _ in range(2 * SAMPLE_EVERY + 1):
        streams.backup.wait(streams.compute.record("row_written"))
    assert streams.waits.samples == {"row_written": 2 * SAMPLE_EVERY}
    assert streams.waits.seconds["row_written"] == pytest.approx(2 * SAMPLE_EVERY * 0.002)


def test_unread_timed_waits_are_bounded(streams: CudaStreams) -> None:
    """I8."""
    backup = streams._by_name["backup"]
    backup.cuda.stuck = True  # type: ignore[attr-defined]
    for _ in range(SAMPLE_EVERY * (SAMPLES_MAX + 3)):
        backup.wait(streams.compute.record("row_written"))
    assert len(streams._sampler._timed) == SAMPLES_MAX
    assert len(backup.cuda.waited) == SAMPLE_EVERY * (SAMPLES_MAX + 3)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- how long work takes


def test_work_is_timed_on_its_stream_and_reported_later(streams: CudaStreams) -> None:
    spent: list[float] = []
    backup = streams._by_name["backup"]
    backup.cuda.stuck = True  # type: ignore[attr-defined]
    for _ in range(3):
        streams.backup.launch("copy", streams.timed(lambda: None, spent.append))
    assert spent == []
    backup.cuda.stuck = False  # type: ignore[attr-defined]
    streams.stage.launch("copy", streams.timed(lambda: None, spent.append))
    assert spent == [pytest.approx(0.002)] * 3


def test_nested_timed_work_has_separate_events(streams: CudaStreams) -> None:
    """A step that is not a graph has swap-ins in it."""
    outer: list[float] = []
    inner: list[float] = []
    for _ in range(3):
        streams.timed(streams.timed(lambda: None, inner.append), outer.append)()
    assert (len(inner), len(outer)) == (2, 2)


def test_unread_timed_work_is_bounded(streams: CudaStreams) -> None:
    """I8."""
    streams._by_name["backup"].cuda.stuck = True  # type: ignore[attr-defined]
    done: list[int] = []
    for number in range(SPANS_MAX + 3):
        streams.backup.launch("copy", streams.timed(partial(done.append, number), lambda _: None))
    assert len(streams._spans._open) == SPANS_MAX
    assert len(done) == SPANS_MAX + 3


def test_graph_replay_reports_timed_work_of_the_one_before(streams: CudaStreams) -> None:
    told: list[tuple[int, float]] = []
    streams.layer_spent = lambda layer, seconds: told.append((layer, seconds))

    def launch() -> None:
        for layer in range(2):
            streams.compute.launch("load", streams.of_layer(layer, lambda: None))

    replay = streams.capture(launch)
    streams.layer_spent = None
    replay()
    assert told == []
    replay()
    assert told == [(0, 0.002), (1, 0.002)]


def test_a_graph_without_timed_work_has_no_events(streams: CudaStreams) -> None:
    streams.capture(lambda: streams.compute.launch("load", streams.of_layer(0, lambda: None)))
    assert streams._captured_spans == []


# ---------------------------------------------------------------- graphs


def forked(streams: CudaStreams) -> None:
    streams.compute.launch("select", lambda: None)
    streams.swap.wait(streams.compute.record("selected"))
    streams.swap.launch("replay", lambda: None)
    streams.compute.wait(streams.swap.record("prefetched"))
    streams.compute.launch("attend", lambda: None)


def test_a_fork_that_rejoins_is_captured(streams: CudaStreams) -> None:
    for _ in range(2):
        streams.compute.launch("replay", streams.capture(partial(forked, streams)))
    assert streams.capturing is None
    assert streams.waits.samples == {}, "waits inside a graph are not timed"


def test_invalid_capture_is_refused_and_streams_continue(streams: CudaStreams) -> None:
    def unjoined() -> None:
        forked(streams)
        streams.swap.launch("more", lambda: None)

    outside = streams.swap.record("prefetched")
    for launch, message in (
        (unjoined, "swap does not rejoin"),
        (lambda: streams.stage.launch("copy", lambda: None), "stage is not part of the capture"),
        (lambda: streams.compute.record("row_written"), "row_written lies between replays"),
        (lambda: streams.compute.wait(outside), "recorded outside of captures and is waited for inside capture 4"),
    ):
        with pytest.raises(FenceError, match=message):
            streams.capture(launch)  # type: ignore[arg-type]
        forked(streams)


def test_missing_devices_are_refused(fake: FakeCuda) -> None:
    assert fake
    with pytest.raises(ConfigError) as caught:
        make_streams("cuda", device="cuda:3")
    assert (caught.value.field, caught.value.remedy) == ("worker.device", "use cuda:0 to cuda:0")
    assert torch.device("cuda", 0) == made()._device
