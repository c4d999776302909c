"""Steps in halves (worker.decode_halves): tokens and, on a CPU, bits of whole steps, in every mode that decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.state import DeviceState
from tests.support.drafting_rig import DraftRig, drafting_settings
from tests.support.fakes.hash_runner import SEPARATE, SHARED, FakeRunner
from tests.support.thread_ranks import run_ranks
from tests.support.worker_rig import Rig
from tests.worker.group import test_drafts as ranks
from tests.worker.loop import test_drafting as drafting
from tests.worker.loop import test_model as model
from tests.worker.loop.test_fences import a_day, a_grammar
from tests.worker.streams.test_captures import CapturingStreams, capture_at_start
from worker.runners import invariance, layers, swapping
from worker.runners.tiny import FAMILIES, write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner, load_runner
from worker.streams import make_streams

#: Three requests, padded to 4: two in the first half, one and padding in the second. Odd: halves of two and of one.
ODD = msgspec.structs.replace(model.SETTINGS, seats=3, deterministic=False)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, request.param, index_topk=model.TOPK, context_max_tokens=2_048)
    return path


@pytest.fixture
def halved(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint, and its runner takes steps in halves from now on; what whole steps give was computed before."""
    model.resident(checkpoint)
    runner = model.runner_of(checkpoint, "cpu", "float32")
    monkeypatch.setattr(runner, "halves_from", 2)
    return checkpoint


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """In how many parts batches were attended to."""
    seen, launch = set[int](), swapping.SwappedIn.launch_attention
    monkeypatch.setattr(
        swapping.SwappedIn, "launch_attention", lambda it, *of: (seen.add(len(it.parts)), launch(it, *of))[1]
    )
    return seen


@pytest.mark.parametrize("sizes", [(0, 0, 0), (64, 64, 64), (128, 0, 64)], ids=str)
def test_halves_change_no_bit(halved: Path, sizes: tuple[int, ...], parts: set[int]) -> None:
    """Deterministic mode, resident and managed: logits are those of whole steps."""
    tokens, logits, misses = model.run(halved, sizes)
    assert parts == {2}
    assert (misses > 0) == any(sizes)
    assert tokens == model.resident(halved)[0]
    assert all(torch.equal(values, model.resident(halved)[1][step]) for step, values in logits.items())


def test_halves_of_unequal_size_change_no_bit_of_hot_buffers(halved: Path, parts: set[int]) -> None:
    """Batches of one request, two and three: the first ones run whole."""
    (tokens, logits, _), (resident, expected, _) = (
        model.run(halved, sizes, settings=ODD) for sizes in ((64, 128, 64), (0, 0, 0))
    )
    assert parts == {1, 2}
    assert tokens == resident
    assert logits.keys() == expected.keys()
    assert all(torch.equal(values, expected[step]) for step, values in logits.items())


def test_orders_of_streams_and_operators_change_no_bit(halved: Path) -> None:
    tokens, logits = model.run_moved_about(halved, make_streams("simulated", 5))
    assert tokens == model.resident(halved)[0]
    assert all(torch.equal(values, model.resident(halved)[1][step]) for step, values in logits.items())


def test_halves_may_be_replayed(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph forks to `swap` for both halves, and joins it again."""
    capture_at_start(monkeypatch)
    streams = CapturingStreams()
    tokens, logits, misses = model.run(halved, (128, 0, 64), streams)
    assert (streams.graphs, misses > 0) == (4, True)
    assert tokens == model.resident(halved)[0]
    assert all(torch.equal(values, model.resident(halved)[1][step]) for step, values in logits.items())


@pytest.mark.parametrize("groups", [SEPARATE, SHARED], ids=["separate", "shared"])
def test_replayed_halves_give_right_tokens(groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of layers that share a selection: their replays go by halves too."""
    monkeypatch.setattr(FakeRunner, "halves_from", 2)
    capture_at_start(monkeypatch)
    rig = a_day(CapturingStreams, groups)  # type: ignore[arg-type]
    assert not rig.wrong()
    rig.check_end()


def test_requests_with_grammars_decode_in_halves(monkeypatch: pytest.MonkeyPatch, parts: set[int]) -> None:
    monkeypatch.setattr(FakeRunner, "halves_from", 2)
    rig = a_grammar(lambda: make_streams("simulated", 3))  # type: ignore[arg-type,return-value]
    assert not rig.wrong()
    assert 2 in parts
    rig.check_end()


@pytest.mark.parametrize(("backend", "draft_tokens"), [("inline", 1), ("simulated", 2), ("simulated", 4)])
def test_drafts_in_halves_change_no_token(
    backend: str, draft_tokens: int, monkeypatch: pytest.MonkeyPatch, parts: set[int]
) -> None:
    monkeypatch.setattr(FakeRunner, "halves_from", 2)
    drafting.a_day(DraftRig(make_streams(backend, draft_tokens), drafting_settings(draft_tokens), 60))
    assert 2 in parts


def test_ranks_decode_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: set[int]) -> None:
    """Deterministic: a group's tokens and bits are those of its whole steps, drafts among them."""
    monkeypatch.setattr(invariance, "TRIALS", 4)  # of the check at start, which others test
    write_tiny_checkpoint(tmp_path, FAMILIES[1], index_topk=32, context_max_tokens=512, predictable=True)
    settings = msgspec.structs.replace(ranks.SETTINGS, deterministic=True, prefill_chunk_tokens=64)
    asks = [[ranks.ask(0, 12, 64), ranks.ask(1, 10, 0), ranks.ask(2, 8, 128)], [ranks.ask(3, 8, 64)]]
    whole = run_ranks(tmp_path, asks, settings)
    assert parts == {1}
    halves = run_ranks(tmp_path, asks, msgspec.structs.replace(settings, decode_halves=2))
    assert parts == {1, 2}
    assert halves.tokens == whole.tokens
    assert all(torch.equal(values, whole.logits[place]) for place, values in halves.logits.items())


def test_setting_reaches_the_runner(checkpoint: Path, parts: set[int]) -> None:
    settings = msgspec.structs.replace(ODD, model=str(checkpoint), decode_halves=3)
    runner = load_runner(settings)
    assert isinstance(runner, TransformersRunner)
    rig = Rig(None, settings, runner=runner)
    lives = model.create(rig)
    for life in lives:
        assert rig.coordinator.admit(life, 64)
    rig.run()
    assert parts == {1, 2}


def test_check_of_rows_apart_attends_in_halves(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, attend = set[int](), layers.attend_rows

    def counted(state: DeviceState, layer: int, queries: torch.Tensor, *rest: Any) -> None:
        launches.add(len(queries))
        attend(state, layer, queries, *rest)

    monkeypatch.setattr(layers, "attend_rows", counted)
    monkeypatch.setattr(invariance, "TRIALS", 1)
    load_runner(msgspec.structs.replace(model.SETTINGS, model=str(checkpoint), decode_halves=2))
    assert launches == {model.SETTINGS.seats // 2}
