"""Drawing a token per row without sorting, in Triton. Launched by kernels/cuda/sampling.py.

worker/runners/sampling.py defines a draw over tokens in descending order of probability, ties by id. Sorting a whole
vocabulary for each row would cost milliseconds in every step, drawn or greedy, since a captured step cannot leave it
out. But where a cumulated probability passes a bound can be found by search: take logits as integers that compare as
logits do, and find the highest such integer KEY with

    mass(tokens with key >= KEY) reaches the bound

two bits at a time, three candidates per pass over the row, sixteen passes. Tokens of equal logit have equal weight, so
the place within them is a division. Weights exp((logit - peak) / temperature) are float64, computed once per row into
scratch memory; sums run in one order. A row with temperature 0 ends at once.

    bits of key   31 .. 0     0x8000_0000 ^ bits of a positive logit, all bits flipped of a negative one
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(logits):
    """uint32 in int64 that compares as float32 does."""
    bits = logits.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits < 0x80000000, bits + 0x80000000, 0xFFFFFFFF - bits)


@triton.jit
def mass_above(logits, weights, vocab, low, middle, high, BLOCK: tl.constexpr):
    """float64 sums of the weights whose key is at least low, middle, high."""
    sum_low = tl.zeros((BLOCK,), tl.float64)
    sum_middle = tl.zeros((BLOCK,), tl.float64)
    sum_high = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        key = key_of(tl.load(logits + token, mask=inside, other=float("-inf")))
        weight = tl.load(weights + token, mask=inside, other=0.0)
        sum_low += tl.where(key >= low, weight, 0.0)
        sum_middle += tl.where(key >= middle, weight, 0.0)
        sum_high += tl.where(key >= high, weight, 0.0)
    return tl.sum(sum_low, 0), tl.sum(sum_middle, 0), tl.sum(sum_high, 0)


@triton.jit
def highest_key(logits, weights, vocab, bound, reaches: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key whose mass is at least `bound`, or more than it; 0 when there is none."""
    key = tl.zeros((), tl.int64)
    for digit in range(16):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * digit)
        low, middle, high = mass_above(logits, weights, vocab, key + unit, key + 2 * unit, key + 3 * unit, BLOCK)
        if reaches:
            steps = (low >= bound).to(tl.int64) + (middle >= bound).to(tl.int64) + (high >= bound).to(tl.int64)
        else:
            steps = (low > bound).to(tl.int64) + (middle > bound).to(tl.int64) + (high > bound).to(tl.int64)
        key += steps * unit
    return key


@triton.jit
def tied(logits, weights, vocab, key, BLOCK: tl.constexpr):
    """Mass above `key`, how many tokens have it, and the weight of one."""
    above = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        keys = key_of(tl.load(logits + token, mask=inside, other=float("-inf")))
        weight = tl.load(weights + token, mask=inside, other=0.0)
        above += tl.where(keys > key, weight, 0.0)
        count += (inside & (keys == key)).to(tl.int32)
        own = tl.where(inside & (keys == key), weight, own)
    return tl.sum(above, 0), tl.sum(count, 0), tl.max(own, 0)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_p"])  # may be those of one seat
def draw(logits, temperature, top_p, uniforms, weights, tokens, vocab, BLOCK: tl.constexpr):
    """One row: replaces tokens[row] where temperature[row] > 0. Grid (rows,)."""
    row = tl.program_id(0)
    heat = tl.load(temperature + row).to(tl.float64)
    if heat > 0:
        share = tl.load(top_p + row).to(tl.float64)
        uniform = tl.load(uniforms + row)
        logits += row.to(tl.int64) * vocab
        weights += row.to(tl.int64) * vocab
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for begin in range(0, vocab, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(logits + token, mask=token < vocab, other=float("-inf")))
        peak = tl.max(best, 0).to(tl.float64)
        mass = tl.zeros((BLOCK,), tl.float64)
        for begin in range(0, vocab, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            logit = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float64)
            weight = tl.exp((logit - peak) / heat)
            tl.store(weights + token, weight, mask=token < vocab)
            mass += weight
        tl.debug_barrier()  # threads read weights that others stored
        total = tl.sum(mass, 0)

        kept = total
        last = tl.zeros((), tl.int64)
        last_count = tl.full((), 0x7FFFFFFF, tl.int32)
        if share < 1:
            bound = share * total
            last = highest_key(logits, weights, vocab, bound, True, BLOCK)
            above, count, weight = tied(logits, weights, vocab, last, BLOCK)
            if count > 0:  # rounding of sums may leave none
                needed = tl.ceil((bound - above) / weight).to(tl.int32)
                last_count = tl.minimum(tl.maximum(needed, 1), count)
                kept = above + last_count.to(tl.float64) * weight
        target = uniform * kept
        key = highest_key(logits, weights, vocab, target, False, BLOCK)
        key = tl.maximum(key, last)  # rounding must not pass the end of what is kept
        above, count, weight = tied(logits, weights, vocab, key, BLOCK)
        if key == last:
            count = tl.minimum(count, last_count)
        place = tl.minimum(tl.floor((target - above) / weight).to(tl.int32), count - 1)
        place = tl.maximum(place, 0)
        seen = tl.zeros((), tl.int32)
        for begin in range(0, vocab, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            inside = token < vocab
            equal = inside & (key_of(tl.load(logits + token, mask=inside, other=float("-inf"))) == key)
            number = seen + tl.cumsum(equal.to(tl.int32), 0) - 1
            found = tl.max(tl.where(equal & (number == place), token, -1), 0)
            if found >= 0:
                tl.store(tokens + row, found)
            seen += tl.sum(equal.to(tl.int32), 0)
