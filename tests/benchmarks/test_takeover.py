"""The benchmark of takeovers: what it counts as new, which lines of logs it reads, and the weights that it writes."""

from __future__ import annotations

import argparse
import json
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import takeover
from benchmarks.takeover import Logs, RepeatedSource, Run, Stream
from worker.families.base import TensorSpec


class Coming:
    """A client whose streams bring the chunks that it is given."""

    def __init__(self, *chunks: list[int]) -> None:
        self._chunks = chunks

    async def submit(self, *_: object, **__: object) -> Any:
        async def chunks() -> Any:
            for chunk in self._chunks:
                yield torch.tensor(chunk)

        return chunks()


async def test_token_is_new_behind_those_that_were_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 12.0])
    monkeypatch.setattr(takeover, "time", SimpleNamespace(time=lambda: next(clock)))
    stream = Stream("s", [1])
    await stream.run(Coming([5, 6], [7], [8, 9]), 5)  # type: ignore[arg-type]
    assert stream.tokens == [5, 6, 7, 8, 9]
    assert [stream.past(count) for count in range(6)] == [10.0, 10.0, 11.0, 12.0, 12.0, None]
    assert stream.is_over


def test_parts_are_the_first_lines_behind_the_signal(tmp_path: Path) -> None:
    worker, coordinator = tmp_path / "w0.log", tmp_path / "coordinator.log"
    worker.write_text("2026-01-31T12:00:01.000Z info    worker.link welcomed worker=w0\n")
    coordinator.touch()
    logs = Logs(tmp_path)
    with worker.open("a") as log:
        log.write("2026-01-31T12:00:02.250Z info    worker.link welcomed worker=w0\nTraceback\n")
        log.write("2026-01-31T12:00:03.000Z info    worker.link welcomed worker=w0\n")
        log.write("2026-01-31T12:00:02.500Z info    worker.loop.executor graphs captured worker=w0\n")
    line = "info    coordinator.state.request started request=r1"
    coordinator.write_text(f"2026-01-31T12:00:01.900Z {line}\n2026-01-31T12:00:02.400Z {line}\n")
    assert logs.parts(1769860802.0) == {"welcomed": 250.0, "step": 400.0, "captured": 500.0}


def test_tokens_are_compared_as_far_as_both_go(tmp_path: Path) -> None:
    options = argparse.Namespace(requests=2, prompt_tokens=(2, 3))
    run, streams = Run(options, tmp_path), [Stream("a", []), Stream("b", [])]
    run.quiet, streams[0].tokens, streams[1].tokens = [[1, 2, 3], [4, 5]], [1, 9], [4, 5, 6]
    assert run.compared(streams) == {"compared": 4, "differ": 1}


def test_written_weights_have_the_variance_of_their_width() -> None:
    source, spec = RepeatedSource(), TensorSpec("a.weight", (256, 512), converts=True)
    (scale,) = source.scales(spec, 0, 256).unique().tolist()
    first, second = (source.values(spec, 0, 256).float() * scale for _ in range(2))
    plain = source.plain(spec, 0, 256)
    assert [float(it.std()) for it in (first, second, plain)] == pytest.approx([1 / sqrt(512)] * 3, rel=0.02)
    assert not torch.equal(first, second)


def test_model_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    options = argparse.Namespace(layers=0, experts=0)
    takeover.write_model(tmp_path, options)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    takeover.write_model(tmp_path, options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
