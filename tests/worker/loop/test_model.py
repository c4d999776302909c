"""The executor with the real model classes: no hot size, mode, order of streams or retraction shows in tokens or
logits, and tokens are those of the library's own generate() (docs/architecture.md, how correctness is shown)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.settings import WorkerSettings
from tests.support.checkpoints import LATENT, tiny_checkpoint
from tests.support.fakes.coordinator import Life
from tests.support.history import dealt, in_turn
from tests.support.oracle_rig import run_oracle
from tests.support.pairwise import pairwise
from tests.support.prompts import TEXT
from tests.support.worker_rig import Logits, Rig
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import Streams, make_streams
from worker.streams.cuda import CudaStreams

TOPK = 32
NEW_TOKENS = 20
#: Where generate()'s two best logits are closer, either token is right (fp32, logits of order 5).
TIE_BOUND = 1e-3
SETTINGS = WorkerSettings(
    seats=4,
    hot_size_classes=(64, 128, 256),
    tail_slots=3,
    pass_tokens=128,
    context_max_tokens=1_024,
    host_mem="32MiB",
    device_mem="32MiB",
    deterministic=True,
)
SIZES = ((64, 64, 64), (256, 256, 256), (128, 0, 64))
PROMPTS = (TEXT[:300], TEXT[700:770], TEXT[1_000:1_500])


@pytest.fixture(scope="module", params=LATENT)
def checkpoint(request: pytest.FixtureRequest, run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, request.param, index_topk=TOPK, context_max_tokens=2_048)


@cache
def runner_of(path: Path, device: str, dtype: str) -> TransformersRunner:
    return TransformersRunner.load(path, device=device, dtype=dtype, deterministic_seats=SETTINGS.seats)


def start(
    path: Path,
    streams: Streams | None = None,
    settings: WorkerSettings = SETTINGS,
    dtype: str = "float32",
    *,
    graphs_later: bool = False,
) -> tuple[Rig, list[Life]]:
    """Where the streams are: on a GPU or here."""
    device = "cuda" if isinstance(streams, CudaStreams) else "cpu"
    rig = Rig(streams, settings, runner=runner_of(path, device, dtype), keep_logits=True, graphs_later=graphs_later)
    return rig, create(rig)


def create(rig: Rig) -> list[Life]:
    """A request of each prompt."""
    lives = []
    for number, prompt in enumerate(PROMPTS):
        life = rig.coordinator.create(number, 1, NEW_TOKENS, seed=number)
        life.prompt = tuple(prompt)
        lives.append(life)
    return lives


def run(
    path: Path,
    sizes: tuple[int, ...],
    streams: Streams | None = None,
    settings: WorkerSettings = SETTINGS,
    dtype: str = "float32",
) -> tuple[list[list[int]], Logits, int]:
    rig, lives = start(path, streams, settings, dtype)
    for life, hot_slots in zip(lives, sizes, strict=True):
        assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    rig.check_end()
    return [life.tokens for life in lives], rig.logits, sum(life.misses for life in lives)


def run_moved_about(path: Path, streams: Streams) -> tuple[list[list[int]], Logits]:
    """One request is retracted (keep, then drop) and resumed, others are resized both ways."""
    rig, lives = start(path, streams)
    move_about(rig, lives)
    return [life.tokens for life in lives], rig.logits


def move_about(rig: Rig, lives: Sequence[Life]) -> None:
    """As `run_moved_about` has it, until all have ended."""
    for life, hot_slots in zip(lives, (64, 0, 128), strict=True):
        assert rig.coordinator.admit(life, hot_slots)
    for leaving, hot_slots, tokens in (("keep", 0, 5), ("drop", 64, 11)):
        rig.run_until(lambda tokens=tokens: len(lives[0].tokens) >= tokens)  # type: ignore[misc]
        rig.coordinator.withdraw(lives[0], leaving)
        rig.coordinator.resize(lives[1], 64 - hot_slots)
        rig.coordinator.resize(lives[2], hot_slots)
        rig.run_until(lambda: not lives[0].placement)
        assert rig.coordinator.admit(lives[0], hot_slots)
    rig.run()
    rig.check_end()


def library_agrees(path: Path, tokens: list[list[int]], prompts: Sequence[Sequence[int]] = PROMPTS) -> int:
    """How many tokens the library's generate(), in a separate process, gives too; after a tie of its two best logits
    within rounding, the rest of a request is not compared."""
    job = {
        "model": str(path),
        "prompts": [{"tokens": list(prompt), "max_new_tokens": NEW_TOKENS} for prompt in prompts],
        "ignore_eos": True,
    }
    compared = 0
    for ours, answer in zip(tokens, run_oracle(job), strict=True):
        for token, theirs, gap in zip(ours, answer["tokens"], answer["gaps"], strict=True):
            if token != theirs:
                assert gap < TIE_BOUND
                break
            compared += 1
    return compared


@cache
def resident(path: Path) -> tuple[list[list[int]], Logits, int]:
    return run(path, (0, 0, 0))


@pytest.mark.parametrize(("checkpoint", "sizes"), dealt(LATENT, SIZES), indirect=["checkpoint"])
def test_hot_sizes_change_no_token_or_bit(checkpoint: Path, sizes: tuple[int, ...]) -> None:
    tokens, logits, misses = run(checkpoint, sizes)
    assert misses > 0
    assert tokens == resident(checkpoint)[0]
    assert logits.keys() == resident(checkpoint)[1].keys()
    assert all(torch.equal(logits[step], resident(checkpoint)[1][step]) for step in logits)


@pytest.mark.parametrize(
    ("checkpoint", "chunks", "hot_slots"), pairwise(LATENT, (1, 2, 3), (0, 64)), indirect=["checkpoint"]
)
def test_shared_prefix_changes_no_bit(checkpoint: Path, chunks: int, hot_slots: int) -> None:
    """A prompt of 500 tokens in chunks of 128 begins with host pages that another request has filled."""
    rig, lives = start(checkpoint)
    donor, life = lives[2], rig.coordinator.create(3, 1, NEW_TOKENS, seed=lives[2].sampling.seed)
    assert rig.coordinator.admit(donor, 64)
    shared = donor.host_pages[: 2 * chunks]
    rig.run()
    logits = {step: values.clone() for step, values in rig.logits.items()}
    rig.logits.clear()
    for page in shared:
        rig.coordinator.host_pages.remove(page)
    life.prompt, life.shared = donor.prompt, tuple(shared)
    before = rig.host[shared].clone()
    assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    rig.coordinator.host_pages.extend(shared)
    rig.check_end()
    assert life.tokens == donor.tokens == resident(checkpoint)[0][2]
    assert rig.logits.keys() == logits.keys()
    assert all(torch.equal(rig.logits[step], logits[step]) for step in logits)
    assert torch.equal(rig.host[shared], before)


def test_tokens_ignore_streams_and_operators(checkpoint: Path) -> None:
    """In an order of this commit."""
    seed = in_turn(range(8))
    tokens, logits = run_moved_about(checkpoint, make_streams("simulated", seed))
    assert tokens == resident(checkpoint)[0]
    assert all(torch.equal(values, resident(checkpoint)[1][step]) for step, values in logits.items())


def test_tokens_are_those_of_the_model_library(checkpoint: Path) -> None:
    """SGLang #27258, vLLM #57019: two runs of ours could be wrong alike."""
    assert library_agrees(checkpoint, resident(checkpoint)[0]) > 2 * NEW_TOKENS


def test_tokens_behind_generated_ones_are_those_of_the_model_library(checkpoint: Path) -> None:
    """The next turn of a conversation: its prefix is the turn before, whose last rows decode steps wrote."""
    rig, lives = start(checkpoint, settings=msgspec.structs.replace(SETTINGS, deterministic=False))
    coordinator, turn = rig.coordinator, lives[0]
    turn.prompt, turn.sampling = tuple(TEXT[:100]), msgspec.structs.replace(turn.sampling, max_tokens=40)
    assert coordinator.admit(turn, 64)
    pages = turn.host_pages[:2]
    rig.run()
    heir = coordinator.create(7, 1, NEW_TOKENS)
    heir.prompt, heir.shared = (*turn.prompt, *turn.tokens[:28], *TEXT[3_000:3_128]), tuple(pages)
    for page in pages:
        coordinator.host_pages.remove(page)
    assert coordinator.admit(heir, 64)
    rig.run()
    coordinator.host_pages.extend(pages)
    rig.check_end()
    assert library_agrees(checkpoint, [heir.tokens], [heir.prompt]) > NEW_TOKENS // 2
