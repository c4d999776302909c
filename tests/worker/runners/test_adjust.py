"""Adjusted logits against a definition over plain lists, and that other rows keep their bits."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol.messages import Sampling
from worker.device.sizing import sampler_seat_bytes
from worker.loop.output import Output
from worker.loop.sampler_seats import SamplerSeats
from worker.runners.adjust import Adjust
from worker.runners.base import SamplerState
from worker.runners.logits import COUNT_MAX
from worker.runners.sampling import draw
from worker.streams import make_streams

VOCAB = 24
EOS = (5, 6)


@dataclass
class Seated:
    """The part of a RunningRequest that draws depend on."""

    seat: int
    prompt: np.ndarray
    output: Output
    position: int
    adjust: Adjust | None
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.prompt)


def seated(seat: int, prompt: list[int], generated: list[int], durable: int, sampling: Sampling) -> Seated:
    output = Output(generated, sampling, (), lambda: None)  # type: ignore[arg-type, return-value]
    return Seated(seat, np.asarray(prompt, dtype=np.int32), output, durable or len(prompt), Adjust.of(sampling))


def expected(
    logits: list[float],
    prompt: list[int],
    generated: list[int],
    sampling: Sampling,
    eos: tuple[int, ...] = EOS,
    allowed: Collection[int] | None = None,
) -> list[float]:
    """What is drawn from, by the words of messages.Sampling, one token at a time. `allowed`: by its grammar."""
    found = []
    bias = dict(sampling.logit_bias)
    ends = (*(() if sampling.ignore_eos else eos), *sampling.stop_token_ids)
    for token, logit in enumerate(logits):
        barred = token in ends and len(generated) < sampling.min_tokens
        if barred or (allowed is not None and token not in allowed):
            found.append(-math.inf)
            continue
        value = logit + bias.get(token, 0.0)
        if token in prompt or token in generated:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * generated.count(token)
        value -= sampling.presence_penalty * (token in generated)
        found.append(value)
    if sampling.temperature and sampling.min_p:
        least = max(found) + sampling.temperature * math.log(sampling.min_p)
        found = [value if value >= least else -math.inf for value in found]
    if sampling.temperature and sampling.top_k:
        least = sorted(found, reverse=True)[: sampling.top_k][-1]
        found = [value if value >= least else -math.inf for value in found]
    return found


def sampler_of(requests: list[tuple[Seated, Sampling]]) -> SamplerState:
    sampler, streams = SamplerState.allocate(4, VOCAB), make_streams("inline")
    seats = SamplerSeats(streams.compute, sampler, EOS)
    for request, sampling in requests:
        seats.set(request, sampling)  # type: ignore[arg-type]
    return sampler


def together(requests: list[tuple[Seated, Sampling]]) -> Adjust | None:
    return Adjust.together(request.adjust for request, _ in requests)


samplings = st.builds(
    Sampling,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**40),
    ignore_eos=st.booleans(),
    top_k=st.sampled_from([0, 1, 3, VOCAB, 10 * VOCAB]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.25, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 2.5]), max_size=4).map(
        lambda it: tuple(it.items())
    ),
    min_tokens=st.integers(0, 12),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
)
#: None: it has no grammar.
masks = st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1)
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@settings(max_examples=150)
@given(st.lists(st.tuples(samplings, tokens, tokens, masks), min_size=1, max_size=3), st.integers(0, 2**32), st.data())
def test_draws_are_those_of_the_definition(
    asked: list[tuple[Sampling, list[int], list[int], set[int] | None]], seed: int, data: st.DataObject
) -> None:
    """Wherever the request came to its worker: some generated tokens were fed before, the others are fed here."""
    allowed = [mask for _, _, _, mask in asked]
    rows = [(held(it[0]) if it[3] else it[0], it[1], it[2]) for it in asked]
    requests: list[tuple[Seated, Sampling]] = []
    fed_here: list[int] = []
    for seat, (sampling, prompt, generated) in enumerate(rows):
        fed_before = data.draw(st.integers(0, len(generated)))
        durable = len(prompt) + fed_before if fed_before else 0
        requests.append((seated(seat, prompt, generated, durable, sampling), sampling))
        fed_here.append(fed_before)
    sampler, asks = sampler_of(requests), together(requests)
    for seat, mask in enumerate(allowed):
        bits = np.isin(np.arange(VOCAB), list(mask or ()))
        sampler.adjust.masks[seat, : VOCAB // 8] = torch.from_numpy(np.packbits(bits, bitorder="little"))
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    for seat, ((_, prompt, generated), start) in enumerate(zip(rows, fed_here, strict=True)):
        for place in range(start, len(generated)):
            one = torch.tensor([seat])
            position = torch.tensor([len(prompt) + place])
            sampler.adjust.feed(one, torch.tensor([generated[place]]), position, torch.tensor([True]))
    seats = torch.arange(len(rows))
    positions = torch.tensor([len(prompt) + len(generated) for _, prompt, generated in rows])
    drawn = draw(logits, sampler, seats, positions, asks)
    for row, (sampling, prompt, generated) in enumerate(rows):
        values = logits[row].double().tolist()
        wanted = torch.tensor([expected(values, prompt, generated, sampling, EOS, allowed[row])]).float()
        alone = SamplerState.allocate(1, VOCAB)
        alone.set_seat(0, sampling.temperature, sampling.top_p, sampling.seed)
        best = draw(wanted, alone, torch.tensor([0]), positions[row : row + 1], None)
        assert drawn[row] == best or _is_tie(wanted[0], int(drawn[row]), int(best))


def held(sampling: Sampling) -> Sampling:
    """With a grammar, which says where the output ends."""
    return msgspec.structs.replace(sampling, grammar="any", min_tokens=0, ignore_eos=False)


def _is_tie(logits: Tensor, one: int, other: int) -> bool:
    """float32 and float64 may order what is equal differently."""
    return bool((logits[one] - logits[other]).abs() < 1e-4) and bool(torch.isfinite(logits[one]))


@given(samplings)
def test_rows_that_adjust_nothing_keep_their_bits(sampling: Sampling) -> None:
    plain = Sampling(max_tokens=5, temperature=0.9, seed=3)
    requests = [
        (seated(0, [1, 2], [], 0, plain), plain),
        (seated(1, [3], [4], 0, sampling), sampling),
    ]
    sampler = sampler_of(requests)
    logits, positions = torch.randn(2, VOCAB), torch.tensor([2, 2])
    seats, asks = torch.tensor([0, 1]), together(requests)
    alone = draw(logits[:1], sampler, seats[:1], positions[:1], None)
    assert draw(logits, sampler, seats, positions, asks)[0] == alone[0]


def test_seat_forgets_the_request_before() -> None:
    asked = Sampling(max_tokens=5, frequency_penalty=2.0, logit_bias=((3, 100.0),), min_tokens=5)
    plain, light = Sampling(max_tokens=5), Sampling(max_tokens=5, presence_penalty=0.5)
    logits, positions, seats = torch.zeros(1, VOCAB), torch.tensor([3]), torch.tensor([0])
    logits[0, 7] = 1.0
    first, second, third = (seated(0, [1, 2], [], 0, it) for it in (asked, plain, light))
    sampler = sampler_of([(first, asked)])
    sampler.adjust.feed(seats, torch.tensor([7]), torch.tensor([2]), torch.tensor([True]))
    assert draw(logits, sampler, seats, positions, first.adjust) == 3
    seats_of = SamplerSeats(make_streams("inline").compute, sampler, EOS)
    seats_of.set(second, plain)  # type: ignore[arg-type]
    assert draw(logits, sampler, seats, positions, first.adjust) == 7
    seats_of.set(third, light)  # type: ignore[arg-type]
    assert draw(logits, sampler, seats, positions, third.adjust) == 7


def test_prompts_and_padding_are_not_counted() -> None:
    asked = Sampling(max_tokens=5, frequency_penalty=1.0)
    sampler = sampler_of([(seated(1, [1, 2, 3], [], 0, asked), asked)])
    seats = torch.tensor([1, 0])
    sampler.adjust.feed(seats, torch.tensor([9, 9]), torch.tensor([2, 0]), torch.tensor([True, False]))
    assert int((sampler.adjust.occurs[:-1] >> 1).sum()) == 0
    sampler.adjust.feed(seats, torch.tensor([9, 9]), torch.tensor([3, 0]), torch.tensor([True, False]))
    assert sampler.adjust.occurs[1, 9] == 2
    assert int((sampler.adjust.occurs[:-1] >> 1).sum()) == 1


def test_size_of_tables_is_counted() -> None:
    sampler = SamplerState.allocate(3, 1_000)
    tensors = [it for part in (vars(sampler), vars(sampler.adjust)) for it in part.values() if isinstance(it, Tensor)]
    padding = 2 * 1_000
    assert sum(it.numel() * it.element_size() for it in tensors) == 3 * sampler_seat_bytes(1_000) + padding


def test_counts_end_below_their_width() -> None:
    asked = Sampling(max_tokens=40_000, frequency_penalty=1.0)
    sampler = sampler_of([(seated(0, [7], [9] * (COUNT_MAX + 5), 1 + COUNT_MAX - 1, asked), asked)])
    occurs, seats = sampler.adjust.occurs, torch.tensor([0])
    assert occurs[0, 9] == 2 * (COUNT_MAX - 1)
    for _ in range(3):
        sampler.adjust.feed(seats, torch.tensor([9]), torch.tensor([5]), torch.tensor([True]))
        sampler.adjust.feed(seats, torch.tensor([7]), torch.tensor([5]), torch.tensor([True]))
    assert occurs[0, 9] == 2 * COUNT_MAX
    assert occurs[0, 7] == 2 * 3 + 1


def test_row_whose_mask_is_late_draws_nothing() -> None:
    plain = Sampling(max_tokens=5)
    requests = [(seated(seat, [1], [], 0, it), it) for seat, it in enumerate((held(plain), held(plain), plain))]
    tables = sampler_of(requests).adjust
    tables.masks[0, -1] = 1
    assert tables.drawn(torch.arange(3)).tolist() == [True, False, True]


@pytest.mark.parametrize("sampling", [Sampling(4), Sampling(4, temperature=1.0, top_p=0.5, stop=("x",))], ids=str)
def test_plain_requests_keep_the_single_graph(sampling: Sampling) -> None:
    assert Adjust.of(sampling) is None
    assert Adjust.together([None, None]) is None
