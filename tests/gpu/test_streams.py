"""CUDA streams: events as fences, captures that hold fences to their place, waits that end and are measured."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.delay import spin  # noqa: E402
from worker.streams import FENCES, HOST, STREAM_NAMES, FenceError, make_streams  # noqa: E402
from worker.streams import cuda as backend  # noqa: E402
from worker.streams.cuda import SAMPLE_EVERY, CudaStreams  # noqa: E402

SPIN_S = 0.05
#: A fence of each stream for which the host waits, in the order of STREAM_NAMES; none on swap and masks.
LAST_FENCES = ("sampled", "staged", "durable", None, "preloaded", None, "refilled")


def cuda(omit: tuple[str, ...] = ()) -> CudaStreams:
    streams = make_streams("cuda", omit=omit)
    assert isinstance(streams, CudaStreams)
    streams.adopt_thread()
    return streams


@pytest.fixture
def streams() -> Iterator[CudaStreams]:
    streams = cuda()
    torch.zeros(1, device="cuda")
    yield streams
    torch.cuda.synchronize()


def write_late(value: torch.Tensor) -> None:
    spin(SPIN_S)
    value.add_(1)


def copied(streams: CudaStreams) -> int:
    """What `backup` copies of a value that `compute` writes late."""
    value, copy = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    streams.compute.launch("write", partial(write_late, value))
    streams.backup.wait(streams.compute.record("row_written"))
    streams.backup.launch("copy", lambda: copy.copy_(value))
    streams.backup.record("durable").wait()
    return int(copy)


def test_a_fence_orders_two_streams(streams: CudaStreams) -> None:
    assert copied(streams) == 1


@pytest.mark.mutation
def test_an_omitted_fence_orders_nothing(streams: CudaStreams) -> None:
    copied(streams)  # the first launch of a kernel loads it, and waits for the device
    assert copied(cuda(("row_written",))) == 0


def test_streams_are_apart_and_launches_do_not_wait(streams: CudaStreams) -> None:
    torch.cuda.synchronize()
    began = time.perf_counter()
    fences = []
    for stream, name in zip(streams.all, LAST_FENCES, strict=True):
        stream.launch("spin", partial(spin, SPIN_S))
        fences += [stream.record(name)] if name else []
    launched_s = time.perf_counter() - began
    assert not any(fence.done() for fence in fences)
    for fence in fences:
        fence.wait()
    assert launched_s < SPIN_S / 2
    assert time.perf_counter() - began < 2 * SPIN_S
    assert len({stream.cuda.cuda_stream for stream in streams._by_name.values()}) == len(STREAM_NAMES)


@pytest.mark.parametrize("name", FENCES)
def test_only_declared_edges_are_allowed(name: str, streams: CudaStreams) -> None:
    spec = FENCES[name]
    by_name = {stream.name: stream for stream in streams.all}
    fence = by_name[next(iter(spec.producers))].record(name)
    for stream in streams.all:
        if stream.name not in spec.producers:
            with pytest.raises(FenceError, match=name):
                stream.record(name)
        if stream.name in spec.consumers:
            stream.wait(fence)
        else:
            with pytest.raises(FenceError, match=name):
                stream.wait(fence)
    if HOST not in spec.consumers:
        with pytest.raises(FenceError, match=name):
            fence.done()


def test_events_are_used_again(streams: CudaStreams) -> None:
    for _ in range(100):
        streams.compute.record("sampled").wait()
    assert len(streams._events) <= 2


def test_fence_timeout_names_the_fence(streams: CudaStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: the executor's thread, and the end of the process, are held for a bounded time."""
    monkeypatch.setattr(backend, "HOST_WAIT_LIMIT_S", 0.05)
    monkeypatch.setattr(backend, "CLOSE_LIMIT_S", 0.1)
    streams.load.launch("spin", partial(spin, 0.6))
    with pytest.raises(FenceError, match=r"preloaded#\d+ of load"):
        streams.load.record("preloaded").wait()
    with pytest.raises(FenceError, match="the end of load"):
        streams.close()
    with pytest.raises(FenceError, match="closed"):
        streams.compute.launch("late", lambda: None)


def test_only_the_thread_that_adopted_them_launches(streams: CudaStreams) -> None:
    """Elsewhere another stream is the current one, and work for compute would go there."""
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


def test_fence_cost_is_sampled(streams: CudaStreams) -> None:
    for _ in range(2 * SAMPLE_EVERY):
        streams.compute.launch("spin", partial(spin, 0.002))
        streams.backup.wait(streams.compute.record("row_written"))
    streams.backup.record("durable").wait()
    streams.backup.wait(streams.compute.record("row_written"))  # the third sample; it finds two to read
    assert streams.waits.samples["row_written"] == 2 * SAMPLE_EVERY
    assert 0.002 < streams.waits.seconds["row_written"] / SAMPLE_EVERY < 0.1
    assert streams.waits.seconds["durable"] > 0.01


def test_timed_work_is_bounded_by_the_host_wait(streams: CudaStreams) -> None:
    """No more than the host waited: others may use the device too."""
    spent: list[float] = []
    began = time.perf_counter()
    for _ in range(3):
        streams.stage.launch("spin", streams.timed(partial(spin, 0.003), spent.append))
    streams.stage.record("staged").wait()
    waited_s = time.perf_counter() - began
    streams.stage.launch("spin", streams.timed(partial(spin, 0.003), spent.append))
    assert len(spent) == 3
    assert all(seconds > 0.0029 for seconds in spent)
    assert sum(spent) < waited_s


def test_timed_work_in_a_graph_is_measured_at_every_replay(streams: CudaStreams) -> None:
    """External events: nodes of the graph, one pair per layer."""
    told: list[tuple[int, float]] = []
    streams.layer_spent = lambda layer, seconds: told.append((layer, seconds))

    def launch() -> None:
        for layer, seconds in ((0, 0.002), (1, 0.005)):
            streams.compute.launch("spin", streams.of_layer(layer, partial(spin, seconds)))

    replay = streams.capture(launch)
    streams.layer_spent = None
    assert replay is not None
    began = time.perf_counter()
    for _ in range(3):
        streams.compute.launch("replay", replay)
        streams.compute.record("sampled").wait()
    assert [layer for layer, _ in told] == [0, 1, 0, 1]
    assert all(seconds - 0.003 * layer > 0.0019 for layer, seconds in told)
    assert sum(seconds for _, seconds in told) < time.perf_counter() - began


# ---------------------------------------------------------------- graphs


def forked(streams: CudaStreams, value: torch.Tensor, other: torch.Tensor) -> None:
    """Doubles `value` twice, the second time by way of `swap`, which is late."""
    streams.compute.launch("double", lambda: value.mul_(2))
    streams.swap.wait(streams.compute.record("selected"))
    streams.swap.launch("copy", lambda: (spin(0.005), other.copy_(value)))
    prefetched = streams.swap.record("prefetched")
    streams.compute.launch("beside", lambda: torch.ones(1000, device="cuda").sum())
    streams.compute.wait(prefetched)
    streams.compute.launch("join", lambda: value.add_(other))


def test_a_forked_capture_replays_in_order(streams: CudaStreams) -> None:
    value, other = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    forked(streams, value, other)
    streams.compute.record("sampled").wait()
    assert int(value) == 4
    replay = streams.capture(partial(forked, streams, value, other))
    assert int(value) == 4
    for expected in (16, 64, 256):
        streams.compute.launch("replay", replay)
        streams.compute.record("sampled").wait()
        assert int(value) == expected


def test_a_fork_that_does_not_rejoin_is_refused(streams: CudaStreams) -> None:
    def launch() -> None:
        streams.swap.wait(streams.compute.record("selected"))
        streams.swap.launch("copy", lambda: spin(0.001))
        streams.compute.wait(streams.swap.record("prefetched"))
        streams.swap.launch("more", lambda: spin(0.001))

    streams.compute.launch("nothing", lambda: spin(0.0))
    with pytest.raises(FenceError, match="swap does not rejoin"):
        streams.capture(launch)
    assert copied(streams) == 1


def test_a_stream_that_was_not_forked_is_refused(streams: CudaStreams) -> None:
    with pytest.raises(FenceError, match="stage is not part of the capture"):
        streams.capture(lambda: streams.stage.launch("copy", lambda: spin(0.001)))
    assert copied(streams) == 1


@pytest.mark.parametrize("name", ["row_written", "sampled", "inputs_consumed"])
def test_fence_between_replays_is_refused_inside_a_capture(streams: CudaStreams, name: str) -> None:
    with pytest.raises(FenceError, match=f"{name} lies between replays"):
        streams.capture(lambda: streams.compute.record(name))
    assert copied(streams) == 1


def test_a_fence_does_not_cross_the_edge_of_a_capture(streams: CudaStreams) -> None:
    outside = streams.swap.record("prefetched")
    with pytest.raises(FenceError, match="recorded outside of captures and is waited for inside capture 1"):
        streams.capture(lambda: streams.compute.wait(outside))
    inside = []

    def launch() -> None:
        streams.compute.launch("spin", lambda: spin(0.001))
        inside.append(streams.compute.record("selected"))

    streams.capture(launch)
    with pytest.raises(FenceError, match="recorded inside capture 2 and is waited for outside"):
        streams.swap.wait(inside[0])
    assert copied(streams) == 1


def test_a_capture_outlives_collected_graphs(streams: CudaStreams) -> None:
    """A graph that is destroyed while another is captured invalidates it; collection may come at any allocation."""
    value = torch.zeros(1, device="cuda")
    cycle: list[object] = [streams.capture(lambda: streams.compute.launch("add", lambda: value.add_(1)))]
    cycle.append(cycle)
    del cycle
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        replay = streams.capture(lambda: streams.compute.launch("add", lambda: [value.add_(1) for _ in range(100)]))
    finally:
        gc.set_threshold(*threshold)
    value.zero_()
    replay()
    torch.cuda.synchronize()
    assert int(value) == 100
    assert gc.isenabled()
