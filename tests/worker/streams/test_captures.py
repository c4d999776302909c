"""The rules of a capture, and what runners launch held to them without a GPU: a graph is replayed with other inputs, so
nothing that a step depends on may be read when it is launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.units import PAGE_TOKENS
from tests.support.checkpoints import LATENT, tiny_checkpoint
from tests.support.drafting_rig import DraftRig, drafting_settings
from tests.support.fakes.hash_runner import FakeRunner
from tests.support.history import in_turn
from tests.support.worker_rig import Rig
from tests.worker.loop import test_drafting as drafting
from tests.worker.loop import test_model as model
from tests.worker.loop.test_executor import resident, run_mixed
from worker.loop import executor as executor_module
from worker.loop.decode import STEPS_ALIKE, Decoder
from worker.loop.executor import Executor
from worker.streams import FENCES, FenceError, InlineStreams, Streams, make_streams
from worker.streams.capture import Capture


class CapturingStreams(InlineStreams):
    """Counts the graphs made."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs = 0

    def capture(self, launch: Callable[[], None]) -> Callable[[], object]:
        self.graphs += 1
        return super().capture(launch)


def capture_at_start(monkeypatch: pytest.MonkeyPatch, *, later: bool = False) -> None:
    """Every executor made from now on captures its steps, as on a GPU; every third replays the graph that is timed.
    `later`: between its first steps, as where a standby has taken over."""
    create = Executor.__init__

    def create_and_warm_up(executor: Executor, *arguments: object, **options: object) -> None:
        create(executor, *arguments, **(options | {"timed_every": 3}))  # type: ignore[arg-type]
        executor._decoder.warm_up(graphs=True, later=later)

    monkeypatch.setattr(Executor, "__init__", create_and_warm_up)
    monkeypatch.setattr(executor_module, "REPEATED_STEPS_MAX", 2)
    monkeypatch.setattr(executor_module, "CAPTURE_PAUSE", 0.0)


@pytest.fixture
def warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_at_start(monkeypatch)


def forked(streams: Streams, ran: list[str]) -> None:
    streams.compute.launch("select", partial(ran.append, "select"))
    streams.swap.wait(streams.compute.record("selected"))
    streams.swap.launch("replay", partial(ran.append, "replay"))
    streams.compute.launch("project", partial(ran.append, "project"))
    streams.compute.wait(streams.swap.record("prefetched"))
    streams.compute.launch("attend", partial(ran.append, "attend"))


def test_capture_runs_nothing_and_replay_everything() -> None:
    streams, ran = make_streams("inline"), list[str]()
    replay = streams.capture(partial(forked, streams, ran))
    assert not ran
    assert replay is not None
    for _ in range(2):
        ran.clear()
        streams.compute.launch("replay", replay)
        assert ran == ["select", "replay", "project", "attend"]


def no_join(streams: Streams) -> None:
    streams.swap.wait(streams.compute.record("selected"))


def work_after_the_join(streams: Streams) -> None:
    forked(streams, [])
    streams.swap.launch("more", lambda: None)


def no_fork(streams: Streams) -> None:
    streams.stage.launch("copy", lambda: None)


def no_fork_before_a_fence(streams: Streams) -> None:
    streams.compute.wait(streams.swap.record("prefetched"))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (no_join, "swap does not rejoin"),
        (work_after_the_join, "swap does not rejoin"),
        (no_fork, "stage is not part of the capture"),
        (no_fork_before_a_fence, "swap is not part of the capture"),
    ],
)
def test_forks_begin_and_end_at_compute(launch: Callable[[Streams], None], message: str) -> None:
    streams, ran = make_streams("inline"), list[str]()
    with pytest.raises(FenceError, match=message):
        streams.capture(partial(launch, streams))
    forked(streams, ran)
    assert len(ran) == 4, "the streams go on as if nothing had been captured"


@pytest.mark.parametrize("name", [name for name, spec in FENCES.items() if spec.placement == "between replays"])
def test_fence_between_replays_is_refused_inside_a_capture(name: str) -> None:
    (producer, *_), (consumer, *_) = FENCES[name].producers, FENCES[name].consumers
    capture = Capture(1)
    with pytest.raises(FenceError, match=f"{name} lies between replays"):
        capture.recorded(producer, name)
    with pytest.raises(FenceError, match=f"{name} lies between replays"):
        capture.waited(consumer, name, producer, 0)


def test_a_fence_does_not_cross_the_edge_of_a_capture() -> None:
    """vLLM #56785."""
    streams = make_streams("inline")
    outside, inside = streams.swap.record("prefetched"), []
    with pytest.raises(FenceError, match="recorded outside of captures and is waited for inside capture 1"):
        streams.capture(lambda: streams.compute.wait(outside))
    streams.capture(lambda: inside.append(streams.compute.record("selected")))
    with pytest.raises(FenceError, match="recorded inside capture 2 and is waited for outside"):
        streams.swap.wait(inside[0])
    with pytest.raises(FenceError, match="recorded inside capture 2 and is waited for inside capture 3"):
        streams.capture(lambda: streams.swap.wait(inside[0]))


# ---------------------------------------------------------------- runners


@pytest.mark.usefixtures("warmed_up")
@pytest.mark.parametrize("sizes", [(0,) * 5, (0, 64, 128, 192, 64)], ids=str)
def test_replayed_steps_give_tokens_and_logits_of_launched_ones(sizes: tuple[int, ...]) -> None:
    """vLLM #56158: rows of replayed steps reach the host."""
    streams = CapturingStreams()
    _, logits = run_mixed(sizes, streams=streams)
    assert streams.graphs == 4 * 3, "four for each padded batch size of four seats"
    assert logits.keys() == resident().keys()
    assert all(torch.equal(logits[step], resident()[step]) for step in logits)


@pytest.mark.parametrize("sizes", [(0,) * 5, (0, 64, 128, 192, 64)], ids=str)
def test_steps_between_which_graphs_are_captured_give_the_same(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_at_start(monkeypatch, later=True)
    streams, captured_behind = CapturingStreams(), []
    launch = Decoder.launch

    def launch_and_note(decoder: Decoder, *arguments: Any, **options: Any) -> None:
        captured_behind.append(streams.graphs)
        launch(decoder, *arguments, **options)

    monkeypatch.setattr(Decoder, "launch", launch_and_note)
    _, logits = run_mixed(sizes, streams=streams)
    assert captured_behind[:1] < captured_behind[-1:] == [4 * 3], (
        "steps are launched before, between and behind captures"
    )
    assert len({*captured_behind}) > 3
    assert logits.keys() == resident().keys()
    assert all(torch.equal(logits[step], resident()[step]) for step in logits)


def test_a_graph_that_steps_lack_is_captured_while_requests_repeat_rows_and_the_others_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A takeover: its requests have no new token before steps have repeated what was not durable."""
    capture_at_start(monkeypatch, later=True)
    monkeypatch.setattr(executor_module, "REPEATED_STEPS_MAX", PAGE_TOKENS)
    streams, captured_behind, lacked = CapturingStreams(), [], []
    launch, capture = Decoder.launch, Decoder.capture_next

    def launch_and_note(decoder: Decoder, *arguments: Any, **options: Any) -> None:
        captured_behind.append(streams.graphs)
        launch(decoder, *arguments, **options)

    def capture_and_note(decoder: Decoder) -> None:
        lacked.append(decoder.lacks_graph)
        capture(decoder)
        assert not decoder.lacks_graph

    monkeypatch.setattr(Decoder, "launch", launch_and_note)
    monkeypatch.setattr(Decoder, "capture_next", capture_and_note)
    rig = Rig(streams)
    life = rig.coordinator.create(0, 70, 40)
    assert rig.coordinator.admit(life, 0)
    rig.run()
    assert captured_behind[: STEPS_ALIKE + 1] == [0] * STEPS_ALIKE + [1]
    assert set(captured_behind[STEPS_ALIKE:]) == {1}, "no other graph while the request may repeat rows"
    assert lacked[0]
    for _ in range(4 * 3):
        rig.executor.turn()
    assert (streams.graphs, lacked.count(True)) == (4 * 3, 1), "the others are captured while there is nothing to do"


class Forgetful(FakeRunner):
    """Reads the batch when it launches a step, which a replay does not do again."""

    def launch_sample(self, streams, sampler, batch, outputs, adjust) -> None:  # type: ignore[no-untyped-def]
        super().launch_sample(streams, sampler, batch, outputs, adjust)
        real = int(batch.num_real)
        streams.compute.launch("forget", lambda: outputs.tokens[real:].fill_(0))


@pytest.mark.mutation
@pytest.mark.usefixtures("warmed_up")
def test_runner_that_reads_inputs_at_launch_is_caught() -> None:
    """vLLM #56158: what Python does at capture, no replay does."""
    rig = Rig(make_streams("inline"), runner=Forgetful())
    assert rig.coordinator.admit(rig.coordinator.create(1, 40, 12), 64)
    rig.run()
    assert rig.wrong()


@pytest.fixture(scope="module", params=[in_turn(LATENT)])
def checkpoint(request: pytest.FixtureRequest, run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, request.param, index_topk=model.TOPK, context_max_tokens=2_048)


def test_model_steps_may_be_replayed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, logits, _ = model.run(checkpoint, (128, 0, 64))
    capture_at_start(monkeypatch)
    streams = CapturingStreams()
    replayed, replayed_logits, misses = model.run(checkpoint, (128, 0, 64), streams)
    assert streams.graphs == 4
    assert misses > 0
    assert replayed == tokens
    assert all(torch.equal(values, logits[step]) for step, values in replayed_logits.items())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_replayed_steps_with_drafts_give_tokens_of_plain_decoding(
    draft_tokens: int, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft layer, further drafts and what holds are in the graph; where a step begins is not read at capture."""
    capture_at_start(monkeypatch, later=later)
    streams = CapturingStreams()
    rig = DraftRig(streams, drafting_settings(draft_tokens), 60)
    drafting.a_day(rig)
    assert streams.graphs == 6 * 3, "two more: ahead of begin_step, and behind draws launched by themselves"
    assert rig.executor.counters.accepted_tokens > 0


@pytest.mark.usefixtures("warmed_up")
def test_replayed_steps_draft_with_the_model(tmp_path: Path) -> None:
    """Beside a request whose steps replay two graphs, with the draws between them."""
    path = drafting.write_predictable(tmp_path, LATENT[1])
    plain, rig = (drafting.moved_about(path, number, CapturingStreams(), logprobs=1) for number in (0, 2))
    assert drafting.tokens_in_common(plain, rig) > 2 * model.NEW_TOKENS
    assert rig.executor.counters.accepted_tokens > 0
