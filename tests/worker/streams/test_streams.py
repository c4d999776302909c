"""Streams: FIFO within one, declared fences between two, and a simulated order that finds what is missing."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from protocol.errors import ConfigError
from worker.streams import (
    FENCES,
    HOST,
    QUEUED_MAX,
    STREAM_NAMES,
    FenceError,
    SimulatedStreams,
    Streams,
    make_streams,
)

SEEDS = range(40)


def simulated(seed: int = 0, order: str = "seeded", omit: tuple[str, ...] = ()) -> SimulatedStreams:
    streams = make_streams("simulated", seed, order, omit)  # type: ignore[arg-type]
    assert isinstance(streams, SimulatedStreams)
    return streams


def every_backend(seed: int) -> list[Streams]:
    return [make_streams("inline"), simulated(seed), simulated(seed, "plain")]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_is_a_fifo(seed: int) -> None:
    for streams in every_backend(seed):
        ran: list[int] = []
        for number in range(20):
            streams.compute.launch("append", partial(ran.append, number))
        streams.compute.record("sampled").wait()
        assert ran == list(range(20))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fence_orders_two_streams(seed: int) -> None:
    for streams in every_backend(seed):
        ran: list[str] = []
        streams.compute.launch("write", partial(ran.append, "write"))
        streams.backup.wait(streams.compute.record("row_written"))
        streams.backup.launch("copy", partial(ran.append, "copy"))
        streams.backup.record("durable").wait()
        assert ran == ["write", "copy"]


def copies_before_the_write(seed: int, order: str, omit: tuple[str, ...]) -> bool:
    streams = simulated(seed, order, omit)
    ran: list[str] = []
    streams.compute.launch("write", partial(ran.append, "write"))
    streams.backup.wait(streams.compute.record("row_written"))
    streams.backup.launch("copy", partial(ran.append, "copy"))
    streams.close()
    return ran == ["copy", "write"]


@pytest.mark.mutation
def test_omitted_fence_passes_in_order_and_fails_under_seeds() -> None:
    assert not copies_before_the_write(0, "plain", ("row_written",))
    assert any(copies_before_the_write(seed, "seeded", ("row_written",)) for seed in SEEDS)
    assert not any(copies_before_the_write(seed, "seeded", ()) for seed in SEEDS)


def test_streams_lag_far_behind_each_other() -> None:
    """For some seed one stream runs all of its queue before another starts, in both directions."""
    firsts = set()
    for seed in SEEDS:
        streams = simulated(seed)
        ran: list[str] = []
        for stream in (streams.backup, streams.swap):
            for _ in range(10):
                stream.launch("mark", partial(ran.append, stream.name))
        streams.close()
        for name in ("backup", "swap"):
            if ran[:10] == [name] * 10:
                firsts.add(name)
    assert firsts == {"backup", "swap"}


def test_seed_determines_the_order() -> None:
    def trace(seed: int) -> list[str]:
        streams = simulated(seed)
        ran: list[str] = []
        for _ in range(30):
            for stream in streams.all:
                stream.launch("mark", partial(ran.append, stream.name))
        streams.close()
        return ran

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


@pytest.mark.parametrize("name", FENCES)
def test_only_declared_edges_are_allowed(name: str) -> None:
    """Every stream that FENCES does not name as producer or consumer is refused, on both backends."""
    spec = FENCES[name]
    for streams in (make_streams("inline"), simulated()):
        by_name = {stream.name: stream for stream in streams.all}
        fence = by_name[next(iter(spec.producers))].record(name)
        for stream in streams.all:
            if stream.name not in spec.producers:
                with pytest.raises(FenceError, match=name):
                    stream.record(name)
            if stream.name not in spec.consumers:
                with pytest.raises(FenceError, match=name):
                    stream.wait(fence)
        if HOST not in spec.consumers:
            with pytest.raises(FenceError, match=name):
                fence.wait()
            with pytest.raises(FenceError, match=name):
                fence.done()
        assert spec.producers <= set(STREAM_NAMES)
        assert spec.consumers <= {*STREAM_NAMES, HOST}


def test_endless_wait_names_the_cycle() -> None:
    streams = simulated()
    foreign = simulated().compute.record("row_written")
    streams.backup.wait(foreign)
    with pytest.raises(FenceError, match="backup waits for row_written#1 of compute"):
        streams.backup.record("durable").wait()
    with pytest.raises(FenceError, match="cannot drain"):
        streams.close()


def test_polling_makes_progress() -> None:
    streams = simulated(seed=5)
    for _ in range(10):
        streams.load.launch("load", lambda: None)
    fence = streams.load.record("preloaded")
    polls = 1
    while not fence.done():
        polls += 1
    assert polls <= 12


def test_the_queue_is_bounded() -> None:
    """I8: past QUEUED_MAX operations a launch runs some."""
    streams = simulated(seed=0)
    ran: list[int] = []
    for number in range(QUEUED_MAX + 10):
        streams.stage.launch("count", partial(ran.append, number))
    assert len(ran) >= 10
    assert len(streams.stage.queue) <= QUEUED_MAX


def test_crash_drops_queued_operations() -> None:
    ran: list[str] = []
    streams = simulated(seed=2)
    streams.backup.launch("copy", partial(ran.append, "copy"))
    streams.crash()
    assert not ran
    with pytest.raises(FenceError, match="crashed"):
        streams.backup.launch("copy", lambda: None)


def test_an_error_names_the_operation() -> None:
    streams = simulated()

    def fail() -> None:
        raise ValueError("boom")

    streams.load.launch("load rows", fail)
    with pytest.raises(ValueError, match="boom") as caught:
        streams.close()
    assert caught.value.__notes__ == ["in load rows on load"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_streams_need_a_device() -> None:
    with pytest.raises(ConfigError) as caught:
        make_streams("cuda", device="cuda:1")
    assert (caught.value.field, caught.value.value) == ("worker.device", "cuda:1")


def test_simulated_streams_have_no_graphs() -> None:
    """Nothing is launched then, and the caller launches each time."""
    ran: list[str] = []
    assert simulated().capture(lambda: ran.append("launched")) is None
    assert not ran


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="rocm"):
        make_streams("rocm")
    with pytest.raises(FenceError, match="no_such"):
        make_streams("simulated", omit=("no_such",))
