"""The trace of selections: what is recorded is what steps selected, and what cannot be read is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.traces import STEPS_MIN, TracedSelections, overlap_of, read_trace, runs_of
from kernels.state import StepBatch
from protocol.errors import BadInput, ConfigError
from tests.support.checkpoints import tiny_checkpoint
from tests.support.worker_rig import Rig
from tests.worker.loop.test_model import SETTINGS
from worker.loop import recording
from worker.loop.recording import SelectionRecorder
from worker.loop.selections import Selection, TraceSizes, encode, encode_head, read_head, read_records
from worker.runners.transformers_dsa import TransformersRunner

SIZES = TraceSizes(groups=2, topk=4)


def trace(records: list[tuple[int, int, int, list[list[int]]]], sizes: TraceSizes = SIZES) -> bytes:
    """`records`: step, request, length, top-k of each group."""
    return encode_head(sizes) + b"".join(encode(*it[:3], np.array(it[3], dtype=np.int32)) for it in records)


def read(data: bytes) -> list[Selection]:
    file = io.BytesIO(data)
    return list(read_records(file, read_head(file)))


RECORDS = [(7, 3, 90, [[5, 80, 2, -1], [1, 0, 89, 3]]), (8, 3, 91, [[5, 90, 2, 4], [-1, -1, -1, -1]])]


def test_a_trace_is_read_as_it_was_written() -> None:
    found = read(trace(RECORDS))
    assert [(it.step, it.request, it.length) for it in found] == [(7, 3, 90), (8, 3, 91)]
    positions = [[part.tolist() for part in it.positions] for it in found]
    assert positions == [[[2, 5, 80], [0, 1, 3, 89]], [[2, 4, 5, 90], []]]


def test_a_record_that_the_end_cuts_off_is_left_out() -> None:
    whole, first = trace(RECORDS), len(trace(RECORDS[:1]))
    assert {len(read(whole[:end])) for end in range(first, len(whole))} == {1}


@pytest.mark.parametrize("data", [b"", b"something else entirely, of some length", encode_head(TraceSizes(0, 4))])
def test_what_is_no_trace_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput, match="trace"):
        read(data)


def test_a_damaged_record_is_refused_by_its_number() -> None:
    data = bytearray(trace(RECORDS))
    data[-1] |= 0x80
    with pytest.raises(BadInput, match="record 1"):
        read(bytes(data))


# ---------------------------------------------------------------- recorded by a worker


@pytest.fixture(scope="module")
def checkpoint(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, index_topk=32)


def recorded_run(checkpoint: Path, path: Path) -> tuple[list[Selection], dict[tuple[int, int], Any]]:
    """Two requests decode; what the file has, and what index_topk gave by (step, group)."""
    runner = TransformersRunner.load(checkpoint, device="cpu", dtype="float32")
    in_flight = SETTINGS.lookahead_steps + 1
    recorder = SelectionRecorder(path, runner.geometry, SETTINGS.seats, "cpu", in_flight)
    given: dict[tuple[int, int], Any] = {}

    def keep(group: int, batch: StepBatch, topk: torch.Tensor) -> None:
        given[len(given) // runner.geometry.groups, group] = topk[: int(batch.num_real)].clone()
        recorder.keep(group, batch, topk)

    runner.after_index_topk = keep
    rig = Rig(settings=SETTINGS, runner=runner, recorder=recorder)
    for number in range(2):
        assert rig.coordinator.admit(rig.coordinator.create(number, 70 + number, 6, seed=number), 64)
    rig.run()
    recorder.close()
    return read(path.read_bytes()), given


def test_a_worker_records_what_each_step_selected(checkpoint: Path, tmp_path: Path) -> None:
    found, given = recorded_run(checkpoint, tmp_path / "trace")
    assert {it.request for it in found} == {1, 2}
    assert len(found) >= 10
    rows: dict[int, int] = {}
    for it in found:
        row = rows.setdefault(it.step, 0)
        rows[it.step] += 1
        for group, positions in enumerate(it.positions):
            expected = sorted(position for position in given[it.step, group][row].tolist() if position >= 0)
            assert positions.tolist() == expected
            assert it.length - 1 in expected or len(expected) < it.length
    assert sum(rows.values()) == sum(len(of) for (_, group), of in given.items() if group == 0)


def test_a_full_queue_leaves_steps_out_and_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    geometry = TransformersRunner.load(checkpoint, device="cpu", dtype="float32").geometry
    monkeypatch.setattr(recording, "QUEUED_STEPS", 3)
    monkeypatch.setattr(recording, "CLOSE_LIMIT_S", 0.01)
    monkeypatch.setattr(SelectionRecorder, "_write", lambda recorder: None)
    recorder = SelectionRecorder(tmp_path / "trace", geometry, 2, "cpu", 2)
    for step in range(5):
        recorder.take(step, [1], [70])
    assert recorder.left_out == 2
    recorder.close()


def test_a_file_that_cannot_be_created_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    geometry = TransformersRunner.load(checkpoint, device="cpu", dtype="float32").geometry
    for path in (tmp_path / "absent" / "trace", tmp_path):
        with pytest.raises(ConfigError, match="record_selections"):
            SelectionRecorder(path, geometry, 2, "cpu", 2)


# ---------------------------------------------------------------- replayed by benchmarks.decode


def steps(request: int, first: int, count: int) -> list[tuple[int, int, int, list[list[int]]]]:
    """A window of four positions that moves by one a step."""
    return [(first + n, request, 100 + n, [[n, n + 1, n + 2, n + 3], [50, 51, 52, 53]]) for n in range(count)]


def test_gaps_end_runs_and_short_ones_are_left_out() -> None:
    records = [*steps(1, 0, STEPS_MIN), *steps(1, 99, STEPS_MIN + 3), *steps(2, 0, STEPS_MIN - 1)]
    runs = runs_of(read(trace(records)))
    assert [(run[0].step, len(run)) for run in runs] == [(0, STEPS_MIN), (99, STEPS_MIN + 3)]
    assert overlap_of(runs) == pytest.approx((0.75 + 1) / 2)


def test_requests_follow_a_trace_forth_and_back(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(trace([*steps(1, 0, 20), *steps(2, 0, 16)]))
    recorded = read_trace(path, 4)
    assert (recorded.context, recorded.counts) == (119, [20, 16])
    traced, batch = TracedSelections(recorded, groups=3, rows=3, device="cpu"), StepBatch.allocate(3, 3)
    seen = []
    for _ in range(40):
        topk = [torch.empty(3, 4, dtype=torch.int32) for _ in range(3)]
        for group in range(3):
            traced(group, batch, topk[group])
        assert torch.equal(topk[0], topk[2]), "a trace of fewer groups begins again"
        assert topk[1].tolist() == [[50, 51, 52, 53]] * 3
        seen.append(topk[0][:, 0].tolist())
    assert [row[0] for row in seen] == [min(n % 38, 38 - n % 38) for n in range(1, 41)]
    assert [row[1] for row in seen] == [min(n % 30, 30 - n % 30) for n in range(1, 41)]
    assert seen[0][2] != seen[0][0], "a second request of one run begins elsewhere"


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(trace(steps(1, 0, 20)))
    with pytest.raises(BadInput, match="another top-k"):
        read_trace(path, 2048)
    path.write_bytes(trace(steps(1, 0, 3)))
    with pytest.raises(BadInput, match="no run"):
        read_trace(path, 4)
