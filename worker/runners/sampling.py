"""Drawing tokens. Every draw is a function of (logits, temperature, top_p, seed, position) and of nothing else.

The random number of a draw comes from a counter, not from a generator that advances: splitmix64 (Steele, Lea and
Flood 2014), finalising `mix(seed) + position * golden`. A request that is retracted, replayed, batched differently or
moved to another worker therefore draws the same numbers at the same positions, and no generator state travels.

One uniform number per draw picks from the cumulated probabilities in descending order (inverse transform), which top-p
needs sorted and cumulated anyway. Rejected: Gumbel-max, which hashes a number for every vocabulary entry.

Probabilities are formed in float64: the cumulated sum of a 150k vocabulary keeps its small terms. Each row is reduced
alone, so its result does not depend on its neighbours.

On a GPU the same token is found by search instead of by sorting (kernels/cuda/sampling.py): shapes that depend on no
data, nothing to wait for, and next to no time for greedy rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import Tensor

from worker.runners.adjust import Adjust
from worker.runners.logits import adjusted, narrowed

if TYPE_CHECKING:
    from worker.runners.base import SamplerState


def _signed(bits: int) -> int:
    """The int64 with the bit pattern of an unsigned 64-bit number."""
    return bits - (1 << 64) if bits >> 63 else bits


GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
MIX_1: Final = _signed(0xBF58476D1CE4E5B9)
MIX_2: Final = _signed(0x94D049BB133111EB)
FRACTION_BITS: Final = 53


def draw(
    logits: Tensor,
    sampler: SamplerState,
    seats: Tensor,
    positions: Tensor,
    adjust: Adjust | None,
    real: Tensor | None = None,
) -> Tensor:
    """int32[B] tokens at `positions` int64[B] from float32[B, vocab] logits, as the seats int64[B] ask for them.

    `adjust` is what they ask for together. Where `real` bool[B] is false the token means nothing, and takes no time.
    """
    temperature = sampler.temperature[seats]
    if real is not None:
        temperature = temperature.masked_fill(~real, 0)
    if adjust is not None:
        logits = adjusted(sampler.adjust, adjust, logits, seats, positions)
        logits = narrowed(sampler.adjust, adjust, logits, seats, temperature)
    return sample(logits, temperature, sampler.top_p[seats], sampler.seed[seats], positions)


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """int32[B] tokens from float32[B, vocab] logits.

    temperature float32[B] (0 is greedy: the highest logit, the lowest id on ties), top_p float32[B] in (0, 1], seed
    and position int64[B].
    """
    tokens = logits.argmax(-1)
    if logits.is_cuda:
        from kernels.cuda.sampling import draw_tokens

        found = tokens.int()
        draw_tokens(logits, temperature, top_p, uniform(seed, position), found)
        return found
    drawn = (temperature > 0).nonzero().flatten()
    if len(drawn):
        uniforms = uniform(seed[drawn], position[drawn])
        tokens[drawn] = _draw(logits[drawn], temperature[drawn], top_p[drawn], uniforms)
    return tokens.int()


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """float64[B] in [0, 1), the number of draw `position` under `seed` (both int64[B])."""
    bits = _mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN)
    return _shift(bits, 64 - FRACTION_BITS).double() * 2.0**-FRACTION_BITS


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """int64[B]: the token at which the kept probability, cumulated in descending order, passes the uniform share.

    Top-p keeps the shortest such run of tokens whose probability reaches top_p, hence always the first.
    """
    scaled = (logits.double() - logits.amax(-1, keepdim=True)) / temperature.double().unsqueeze(1)
    probability, token = scaled.softmax(-1).sort(descending=True, stable=True)
    cumulated = probability.cumsum(-1)
    kept = cumulated - probability < top_p.double().unsqueeze(1)
    target = uniforms.unsqueeze(1) * (probability * kept).sum(-1, keepdim=True)
    place = (cumulated <= target).sum(-1, keepdim=True)
    last = kept.sum(-1, keepdim=True) - 1  # rounding must not pass the end of what is kept
    return token.gather(1, place.minimum(last)).squeeze(1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * MIX_1
    bits = (bits ^ _shift(bits, 27)) * MIX_2
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
