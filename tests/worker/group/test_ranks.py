"""Ranks as processes over gloo: whatever a rank has to do beside others, tokens are the model library's own, and in
deterministic mode bits are the same on every rank."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from protocol.settings import WorkerSettings
from tests.support.checkpoints import LATENT
from tests.support.group_rig import Ask, Drawn, GroupRig
from tests.support.history import in_turn
from tests.support.once import made_once
from tests.support.oracle_rig import run_oracle
from tests.support.pairwise import pairwise
from tests.support.prompts import TEXT
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.group, pytest.mark.process, pytest.mark.timeout(1_200)]

TOPK = 32
HOT_SIZES = (0, 64, 128)
#: Of requests: tokens of the prompt, how they are moved, and hot slots before and behind that. Every pair occurs.
KINDS = pairwise((10, 60, 64, 130, 300), ("", "resize", "keep", "drop"), HOT_SIZES, HOT_SIZES)
#: Hot buffers that grow and shrink between two sizes, which pairs alone leave out.
KINDS += [(130, "resize", 64, 128), (300, "resize", 128, 64)]
#: Requests of a group; in the other pairs of family and size, fewer.
REQUESTS, FEWER = int(os.environ.get("GROUP_REQUESTS", str(len(KINDS)))), 12
WHOLE = {("glm-5", 1), ("deepseek-v3.2", 2), ("deepseek-v3.2", 3)}
#: Ranks of models in which one layer with experts follows another; fewer ranks have models of two layers.
DEEP_FROM = 4
SETTINGS = WorkerSettings(
    seats=4,
    hot_size_classes=(64, 128, 256),
    tail_slots=3,
    pass_tokens=64,
    split_tokens=24,
    context_max_tokens=512,
    host_mem="32MiB",
    device_mem="32MiB",
    dtype="float32",
)
#: Numbers from here on are of requests that others are not compared with.
COMPANY = 100
#: Where generate()'s two best logits are closer, either token is right (fp32, logits of order 5).
TIE_BOUND = 1e-3


#: What weights are stored in, by family and number of ranks.
STORED = {
    **{("deepseek-v3.2", 1): "float32", ("deepseek-v3.2", 2): "fp8", ("deepseek-v3.2", 3): "bfloat16"},
    **{("glm-5", 1): "fp8", ("glm-5", 2): "bfloat16", ("glm-5", 4): "fp8"},
    **{("a.x-k2", 1): "bfloat16", ("a.x-k2", 2): "fp8", ("a.x-k2", 3): "float32", ("a.x-k2", 4): "bfloat16"},
    **{("hy4", 1): "bfloat16", ("hy4", 2): "fp8", ("hy4", 4): "fp8"},
}


@pytest.fixture(scope="module")
def checkpoints(run_dir: Path) -> Callable[..., Path]:
    """By family and what weights are stored in; 24 experts split over 1, 2, 3 and 4 ranks."""

    def make(
        family: str, stored: str = "float32", choices: int = 0, predictable: bool = False, layers: int = 2
    ) -> Path:
        name = f"ranks-{family}-{stored}-{choices}-{predictable}-{layers}"
        path = run_dir / name

        def write() -> str:
            about: dict[str, Any] = {"index_topk": TOPK, "context_max_tokens": 1_024, "experts": 24}
            about |= {"predictable": predictable, "layers": layers}
            write_tiny_checkpoint(path, family, fp8=stored == "fp8", **about)
            if stored == "bfloat16":
                _round_weights(path)
            if choices:
                _configure(path, num_experts_per_tok=choices)
            return str(path)

        return Path(made_once(run_dir, name, write))

    return make


def _round_weights(path: Path) -> None:
    """Store the weights in bfloat16, except the router's correction, which the library keeps in float32."""
    file = path / "model.safetensors"
    weights = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    _configure(path, dtype="bfloat16")


def _configure(path: Path, **changed: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changed))


def asks_of(count: int, seed: int, tokens: tuple[int, int] = (4, 16)) -> list[Ask]:
    """Mixed requests: short and long prompts, some resized, some retracted and resumed. In the order that the seed
    draws, so many of KINDS: all of them, then again, where there are more requests."""
    chance = random.Random(seed)
    kinds = chance.sample(KINDS, len(KINDS))
    asks = []
    for number, (length, how, hot_slots, next_hot) in enumerate(islice(cycle(kinds), count)):
        start, drawn = chance.randrange(3_000), chance.randint(*tokens)
        moves = [(chance.randint(1, drawn - 1), how, next_hot)] if how else []
        asks.append(Ask(number, list(TEXT[start : start + length]), drawn, hot_slots, moves=moves))
    return asks


def run(
    checkpoint: Path, directory: Path, asks: list[list[Ask]], settings: WorkerSettings, *, keep_logits: bool = False
) -> list[Drawn]:
    directory.mkdir(mode=0o700)
    rig = GroupRig(checkpoint, directory, asks, settings, keep_logits=keep_logits)
    try:
        return rig.drawn()
    finally:
        rig.close()


def wrong(checkpoint: Path, asks: list[list[Ask]], *runs: list[Drawn], dtype: str = "float32") -> list[int]:
    """Requests whose tokens are not generate()'s in one of `runs`, up to a tie."""
    flat = sorted((ask for own in asks for ask in own), key=lambda ask: ask.number)
    each = [{int(number): ids for rank in drawn for number, ids in rank.tokens.items()} for drawn in runs]
    assert [tokens.keys() for tokens in each] == [{ask.number for ask in flat}] * len(runs)
    job = {
        "model": str(checkpoint),
        "prompts": [{"tokens": ask.prompt, "max_new_tokens": ask.tokens} for ask in flat],
        "ignore_eos": True,
        "dtype": dtype,
        "prefill_chunk": SETTINGS.pass_tokens,
    }
    return [
        ask.number
        for ask, answer in zip(flat, run_oracle(job), strict=True)
        if not all(agrees(tokens[ask.number], answer["tokens"], answer["gaps"]) for tokens in each)
    ]


def agrees(ours: list[int], theirs: list[int], gaps: list[float]) -> bool:
    place = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    return place is None or gaps[place] < TIE_BOUND


def spread(asks: list[Ask], size: int, first: int = 0) -> list[list[Ask]]:
    ranks: list[list[Ask]] = [[] for _ in range(size)]
    for place, ask in enumerate(asks):
        ranks[(first + place) % size].append(ask)
    return ranks


@pytest.mark.deep
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("family", LATENT)
def test_mixed_requests_get_the_tokens_of_generate(
    family: str, size: int, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """With resizes, and retractions with pages kept and dropped, from weights stored in each dtype, in float32."""
    stored = STORED.get((family, size), "float32")
    checkpoint = checkpoints(family, stored, layers=4 if size >= DEEP_FROM else 2)
    asks = spread(asks_of(REQUESTS if (family, size) in WHOLE else FEWER, seed=size), size)
    drawn = run(checkpoint, tmp_path / "run", asks, SETTINGS)
    assert not wrong(checkpoint, asks, drawn)


@pytest.mark.parametrize("family", [in_turn(("deepseek-v3.2", "hy4"))])
def test_prompts_on_one_rank_alone_are_split_by_all(
    family: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Or leave the others idle, where that is set. Requests are retracted amid passes, and passes have several."""
    asks, runs = [[], asks_of(8, seed=5), []], []
    for split_tokens in (24, 0):
        settings = msgspec.structs.replace(SETTINGS, split_tokens=split_tokens)
        drawn = run(checkpoints(family), tmp_path / f"run {split_tokens}", asks, settings)
        assert bool(drawn[1].split_units) == bool(split_tokens)
        runs.append(drawn)
    assert not wrong(checkpoints(family), asks, *runs)


def test_ranks_that_draft_give_the_tokens_of_generate(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """Weights are stored in bfloat16; requests are retracted and resized, and one goes to the other rank."""
    settings = msgspec.structs.replace(SETTINGS, draft_tokens=2, tail_slots=6)
    checkpoint, asks = checkpoints("glm-5", "bfloat16", predictable=True), spread(asks_of(6, seed=2), 2)
    asks[0].append(Ask(6, list(TEXT[50:180]), 16, 64, next_ranks=[(5, 1)]))
    drawn = run(checkpoint, tmp_path / "run", asks, settings)
    assert not wrong(checkpoint, asks, drawn)
    assert sum(rank.accepted for rank in drawn) > 10


@pytest.mark.parametrize("deterministic", [in_turn((False, True))])
def test_ranks_whose_heads_select_blocks_give_the_tokens_of_generate(
    *, deterministic: bool, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Requests are resized and retracted, and one goes to the other rank. No pass is split."""
    sizes: dict[str, Any] = {"hot_size_classes": (256, 384, 512), "pass_tokens": 128, "context_max_tokens": 1_024}
    settings = msgspec.structs.replace(SETTINGS, deterministic=deterministic, **sizes)
    asks = [
        Ask(0, list(TEXT[:500]), 14, 256, moves=[(4, "keep", 384)]),
        Ask(1, list(TEXT[90:700]), 12, 384, moves=[(5, "resize", 256)]),
        Ask(2, list(TEXT[300:720]), 16, 256, next_ranks=[(6, 1)]),
        Ask(3, list(TEXT[700:760]), 12, 0),
        Ask(4, list(TEXT[:640]), 12, 0, moves=[(3, "drop", 256)]),
    ]
    checkpoint = checkpoints("minimax-m3")
    drawn = run(checkpoint, tmp_path / "run", spread(asks, 2), settings)
    assert not wrong(checkpoint, [asks], drawn)
    assert not any(rank.split_units for rank in drawn)


@pytest.mark.parametrize(("family", "size"), [in_turn([("deepseek-v3.2", 3), ("glm-5", 4), ("hy4", 3)])])
def test_bits_are_kept_while_requests_move_between_ranks(
    family: str, size: int, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Deterministic: each request is on three ranks in turn, with the pages that it holds, and in other company.

    Each token chooses eight experts: a sum of two parts would be the same in any order.
    """
    settings = msgspec.structs.replace(SETTINGS, deterministic=True)
    checkpoint, runs = checkpoints(family, choices=8), []
    for moves in (False, True):
        asks = [
            Ask(number, list(TEXT[number : number + length]), 14, 64 * (number % 3), temperature=0.8 * (number % 2))
            for number, length in enumerate((10, 60, 64, 130, 200, 300))
        ]
        ranks = spread(asks, size)
        if moves:
            ranks[0] += [Ask(COMPANY + it, list(TEXT[it : it + 90]), 12) for it in range(3)]
            for ask in asks:
                ask.next_ranks = [(2 + ask.number % 4, (ask.number + 1) % size), (9, (ask.number + 2) % size)]
        runs.append(run(checkpoint, tmp_path / f"moves {moves}", ranks, settings, keep_logits=True))
    resting, moving = runs
    bits = {place: digest for rank in resting for place, digest in rank.logits.items()}
    seen = [
        (place, number, digest)
        for number, rank in enumerate(moving)
        for place, digest in rank.logits.items()
        if int(place.split()[0]) < COMPANY
    ]
    assert {place for place, _, _ in seen} == bits.keys()
    assert len({(place.split()[0], number) for place, number, _ in seen}) == 3 * 6  # each request was on three ranks
    assert {place for place, _, digest in seen if digest != bits[place]} == set()
    drawn = [{number: ids for rank in ranks for number, ids in rank.tokens.items()} for ranks in runs]
    assert {number: drawn[1][number] for number in drawn[0]} == drawn[0]
