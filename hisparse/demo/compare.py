"""Comparison of each request's tokens with those of the model library. Pure.

Both sides decode greedily in float32, but not in the same order of additions: the library expands the latents of the
whole context and masks, hisparse absorbs and gathers. So a logit may differ in its last bits, and with an index score
one of the tokens that are selected. Where rounding decides, either token is right. Two things excuse a request's first
divergence (`tie_excused`): the *oracle's* gap is below the tie bound, and the service's token is the oracle's
runner-up; or the oracle says all of the service's tokens up to there once the last bits of its embeddings are changed
(`nudge` of worker/oracle.py). After a divergence the two contexts differ, so the rest of that request is neither
verified nor a mismatch: it is counted as `unverified`.

In bfloat16 the order of additions changes the indexer's selection, and with it whole logits. No two programs agree
token by token there; tests/gpu/test_runner.py compares logits instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Largest gap of two logits that a different order of additions may close. The demo model's logits are of order 10. In
#: fp32 one unit in the last place is then 1e-6; a hundred of them is generous (smallest gap of 1,024 steps seen: 4e-4).
TIE_BOUND: Final = 1e-4


@dataclass(frozen=True)
class OracleRun:
    """Output of generate() for one prompt: per new token its id, the runner-up's id and the gap of their logits."""

    tokens: tuple[int, ...]
    runners_up: tuple[int, ...]
    gaps: tuple[float, ...]
    duration_s: float = 0.0


@dataclass(frozen=True)
class OracleVerdict:
    """Result for one request. verified + mismatched + unverified = length of the longer output."""

    request_id: str
    verified: int
    mismatched: int
    unverified: int
    tie_excused: bool
    divergence: int | None  # generated position of the first difference
    gap: float | None  # the oracle's gap there


def compare(
    request_id: str, tokens: Sequence[int], oracle: OracleRun, tie_bound: float, nudged: Sequence[OracleRun] = ()
) -> OracleVerdict:
    """Compare position by position. If the first divergence is not excused, every position that differs mismatches.

    `nudged`: runs of the same prompt with changed embeddings.
    """
    length = max(len(tokens), len(oracle.tokens))
    divergence = first_difference(tokens, oracle.tokens)
    if divergence is None:
        return OracleVerdict(request_id, length, 0, 0, False, None, None)
    in_both = divergence < min(len(tokens), len(oracle.tokens))
    gap = oracle.gaps[divergence] if divergence < len(oracle.gaps) else None
    is_tie = in_both and gap is not None and gap < tie_bound and tokens[divergence] == oracle.runners_up[divergence]
    if is_tie or (in_both and _says(tokens[: divergence + 1], nudged)):
        return OracleVerdict(request_id, divergence, 0, length - divergence, True, divergence, gap)
    equal = sum(ours == theirs for ours, theirs in zip(tokens, oracle.tokens, strict=False))
    return OracleVerdict(request_id, equal, length - equal, 0, False, divergence, gap)


def _says(tokens: Sequence[int], runs: Sequence[OracleRun]) -> bool:
    return any(run.tokens[: len(tokens)] == tuple(tokens) for run in runs)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index where the sequences differ, a missing entry included; None when they are equal."""
    for i, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))
