"""The real model classes under masks of JSON schemas and regular expressions, beside requests with penalties, top-k,
min-p, log-probabilities and drafts: tokens are those of a plain reference, also where every mask is late once."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from protocol.logprobs import read_rows
from protocol.messages import NO_LOGPROBS
from tests.support.drafting_rig import DraftRig
from tests.support.fakes.coordinator import Life
from tests.support.late_masks import late_once
from tests.support.reference_draws import Judge, wrong_from
from tests.worker.loop import test_drafting, test_model
from tests.worker.loop.test_fences import come_back
from worker.loop import executor
from worker.loop.grammars import Grammar
from worker.streams import Streams
from worker.streams.cuda import CudaStreams

NEW_TOKENS = 24
REGEX = "start: /([a-m][n-z]){40}/"
SCHEMA = (
    'start: %json {"type": "object", "properties": {"name": {"type": "string", "minLength": 30}, '
    '"sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 8}}, "required": ["name", "sizes"], '
    '"additionalProperties": false}'
)
#: Log-probabilities computed from the same logits.
LOGPROB_BOUND = 1e-4
#: Between a logit and the model library's: of nine in ten tokens; and of those where a near-tie at the edge of the
#: indexer's top-k falls the other way.
LOGIT_BOUND = 1e-3
LOGIT_BOUND_OF_TIES = 1e-1


@dataclass(frozen=True)
class Ask:
    """A request: where its prompt lies in the text, its first hot size, and fields of its Sampling."""

    prompt: slice
    hot_slots: int
    sampling: dict[str, object]


ASKS = (
    Ask(slice(0, 300), 64, {"grammar": SCHEMA}),
    Ask(slice(700, 770), 0, {"grammar": REGEX, "temperature": 0.9, "logprobs": 5}),
    Ask(
        slice(1_000, 1_140),
        64,
        {"grammar": SCHEMA, "temperature": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logprobs": 20},
    ),
    Ask(slice(100, 190), 128, {"grammar": REGEX, "repetition_penalty": 1.3, "top_k": 5, "temperature": 1.2}),
    Ask(slice(300, 420), 64, {"temperature": 0.9, "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.5}),
    Ask(slice(500, 700), 128, {"temperature": 0.7, "min_p": 0.1, "logprobs": 3}),
    Ask(slice(40, 170), 64, {}),
    Ask(slice(900, 960), 0, {"temperature": 0.9, "logit_bias": ((101, 3.0),), "presence_penalty": 0.6}),
)


def held_rig(path: Path, draft_tokens: int, streams: Streams | None = None) -> DraftRig:
    """Seats for all requests. Drafts are the model's own."""
    device = "cuda" if isinstance(streams, CudaStreams) else "cpu"
    runner = test_drafting.model_runner(path, device, drafts=draft_tokens > 0)
    settings = msgspec.structs.replace(
        test_model.SETTINGS,
        seats=len(ASKS),
        deterministic=False,
        tail_slots=10,
        draft_tokens=draft_tokens,
    )
    return DraftRig(streams, settings, None, runner=copy(runner), keep_logits=True)


def create(rig: DraftRig) -> list[Life]:
    lives = []
    for number, ask in enumerate(ASKS):
        life = rig.coordinator.create(number, 1, NEW_TOKENS, seed=number, **ask.sampling)
        life.prompt = tuple(test_model.TEXT[ask.prompt])
        lives.append(life)
    return lives


def decode(rig: DraftRig) -> list[Life]:
    """All requests together; two of those with a grammar leave, with their pages kept and dropped, and come back to
    an empty hot buffer."""
    coordinator, lives = rig.coordinator, create(rig)
    for life, ask in zip(lives, ASKS, strict=True):
        rig.run_until(lambda life=life, ask=ask: coordinator.admit(life, ask.hot_slots))  # type: ignore[misc]
    for life, leaving, tokens in ((lives[0], "keep", 4), (lives[3], "drop", 8), (lives[2], "keep", 9)):
        rig.run_until(lambda life=life, tokens=tokens: len(life.tokens) >= tokens)  # type: ignore[misc]
        coordinator.withdraw(life, leaving)
        rig.run_until(lambda life=life: not life.placement)  # type: ignore[misc]
        life.warm_start = b""
        come_back(rig, life, 64)
    rig.run()
    return lives


@cache
def judge_of(path: Path) -> Judge:
    return Judge(path)


def logits_of(rig: DraftRig, life: Life, judge: Judge) -> torch.Tensor:
    """float32[tokens, vocab]: what each token was drawn from. Those of the first, which prefill draws, are the model
    library's; all others are near its."""
    theirs = judge.logits(list(life.prompt), life.tokens)
    start = len(life.prompt)
    ours = torch.stack([rig.logits[life.sampling.seed, start + place] for place in range(1, len(life.tokens))])
    errors = (ours - theirs[1:]).abs().amax(-1)
    assert errors.max() < LOGIT_BOUND_OF_TIES
    assert (errors < LOGIT_BOUND).float().mean() > 0.9
    return torch.cat((theirs[:1], ours))


def logprob_error(logits: torch.Tensor, life: Life) -> float:
    """The largest difference of a log-probability, behind the first token, from that of `logits`."""
    words = np.frombuffer(b"".join(life.rows), np.int32).reshape(len(life.tokens), -1)
    told = read_rows(words)[1:]
    errors = [0.0]
    for right, token, row in zip(logits[1:].log_softmax(-1), life.tokens[1:], told, strict=True):
        best = right.topk(life.sampling.logprobs).values.tolist() if row.top else []
        pairs = [(row.logprob, float(right[token]))]
        pairs += [(value, float(right[other])) for other, value in row.top]
        pairs += [(value, likeliest) for (_, value), likeliest in zip(row.top, best, strict=True)]
        errors += [abs(ours - its) for ours, its in pairs]
    return max(errors)


def assert_right(rig: DraftRig, path: Path) -> None:
    """Every token and log-probability, of logits that are near the model library's; and nothing is held."""
    rig.executor._grammars.close()
    rig.check_end()
    judge = judge_of(path)
    for life in rig.coordinator.lives:
        logits = logits_of(rig, life, judge)
        at = wrong_from(logits, list(life.prompt), life.tokens, life.sampling, judge.eos)
        assert at < 0, f"request {life.number} differs at {at}: {life.sampling}, {bytes(life.tokens)!r}"
        assert life.outcome == "length"
        if life.sampling.logprobs == NO_LOGPROBS:
            assert not life.rows
        else:
            assert logprob_error(logits, life) < LOGPROB_BOUND


@pytest.mark.parametrize(("family", "draft_tokens", "is_late"), [("deepseek-v3.2", 0, False), ("glm-5", 2, True)])
def test_tokens_are_those_of_the_reference(
    family: str, draft_tokens: int, is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/gpu/test_masks.py has all pairs."""
    path = test_drafting.write_predictable(tmp_path, family)
    check_draws(path, draft_tokens, None, is_late=is_late, monkeypatch=monkeypatch)


def check_draws(
    path: Path, draft_tokens: int, streams: Streams | None, *, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_late`: every mask is late once, so that every step of a request with one is launched again; else none is."""
    monkeypatch.setattr(executor, "mask_wait_s", lambda _: 60.0)
    if is_late:
        monkeypatch.setattr(Grammar, "wait", late_once())
    rig = held_rig(path, draft_tokens, streams)
    decode(rig)
    assert_right(rig, path)
    counters, held = rig.executor.counters, sum("grammar" in ask.sampling for ask in ASKS)
    assert bool(counters.late_masks) == is_late
    assert not is_late or counters.late_masks >= held * (NEW_TOKENS - 2)
    assert bool(counters.accepted_tokens) == bool(draft_tokens)
