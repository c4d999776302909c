"""Logits as a request's sampling wants them, before a token is drawn: `messages.Sampling` says what and in which order.

What a seat asks for lies in tables on the device, written when a request takes the seat. Nothing here reads a result
back or takes a shape from data; a step with a request that adjusts draws behind its forward pass, in operations that
are launched one by one, all other steps keep their one graph (worker/loop/decode.py). Rows that adjust nothing keep
their bits.

Generated tokens are counted when they are fed: a step at position p has fed the token of p. So counts are a function of
the tokens below p alone, whatever was drawn in vain, replayed, or drawn by another worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol.grammars import mask_bytes
from protocol.messages import EOS_IDS_MAX, LOGIT_BIAS_MAX, STOP_TOKEN_IDS_MAX
from worker.runners.adjust import Adjust

#: Most tokens that end an output.
ENDS_MAX: Final = EOS_IDS_MAX + STOP_TOKEN_IDS_MAX
#: Occurrences of one token beyond which penalties grow no further.
COUNT_MAX: Final = 16_383


@dataclass
class AdjustTables:
    """By seat, written by operations on `compute`; `masks` on the stream of that name.

    Rows of seats where `adjusts` is false mean nothing.

    | tensor       | dtype, shape                    | meaning                                                        |
    |--------------|---------------------------------|----------------------------------------------------------------|
    | adjusts      | bool [seats]                    |                                                                |
    | top_k        | int64 [seats]                   | 0: all                                                         |
    | factors      | float32 [seats, 4]              | min_p, frequency, presence and repetition penalty              |
    | prompt_tokens | int64 [seats]                  |                                                                |
    | ends_from    | int64 [seats]                   | the first position at which the output may end                 |
    | ends         | int64 [seats, ENDS_MAX]         | tokens that end it; the same again, or vocab, for none         |
    | bias_ids     | int64 [seats, LOGIT_BIAS_MAX]   | distinct; vocab for none                                       |
    | bias         | float32 [seats, LOGIT_BIAS_MAX] |                                                                |
    | occurs       | int16 [seats + 1, vocab]        | where penalties apply: twice how often a generated token was   |
    |              |                                 | fed, COUNT_MAX at most, and 1 if it is in the prompt           |
    | has_grammar  | bool [seats]                    | written with `adjusts`                                         |
    | masks        | uint8 [seats, bytes + 1]        | where it has: tokens that its grammar allows next, one bit     |
    |              |                                 | each, and 1; 0: the mask is late, and no token is drawn        |

    The last row of `occurs` takes the writes of padding. `masks` is written behind the draw before and
    before the one that reads it (fence mask_ready).
    """

    adjusts: Tensor
    top_k: Tensor
    factors: Tensor
    prompt_tokens: Tensor
    ends_from: Tensor
    ends: Tensor
    bias_ids: Tensor
    bias: Tensor
    occurs: Tensor
    has_grammar: Tensor
    masks: Tensor

    @classmethod
    def allocate(cls, seats: int, vocab: int, device: torch.device | str = "cpu") -> AdjustTables:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            adjusts=zeros(seats, dtype=torch.bool),
            top_k=zeros(seats, dtype=torch.int64),
            factors=zeros(seats, 4, dtype=torch.float32),
            prompt_tokens=zeros(seats, dtype=torch.int64),
            ends_from=zeros(seats, dtype=torch.int64),
            ends=zeros(seats, ENDS_MAX, dtype=torch.int64),
            bias_ids=zeros(seats, LOGIT_BIAS_MAX, dtype=torch.int64),
            bias=zeros(seats, LOGIT_BIAS_MAX, dtype=torch.float32),
            occurs=zeros(seats + 1, vocab, dtype=torch.int16),
            has_grammar=zeros(seats, dtype=torch.bool),
            masks=zeros(seats, mask_bytes(vocab) + 1, dtype=torch.uint8),
        )

    @property
    def vocab(self) -> int:
        return self.occurs.shape[1]

    def feed(self, seats: Tensor, tokens: Tensor, positions: Tensor, real: Tensor) -> None:
        """Count `tokens` int64[B], fed at `positions` by rows of `seats` int64[B]; prompts and padding are not counted.

        No seat comes twice.
        """
        counted = real & (positions >= self.prompt_tokens[seats])
        rows = seats.masked_fill(~counted, len(self.occurs) - 1)
        before = self.occurs[rows, tokens]
        self.occurs[rows, tokens] = torch.where((before >> 1) < COUNT_MAX, before + 2, before)

    def drawn(self, seats: Tensor) -> Tensor:
        """bool[B]: rows of `seats` int64[B] that may draw: those without a grammar, and those whose mask is there."""
        return ~self.has_grammar[seats] | self.masks[seats, -1].bool()

    def allowed(self, seats: Tensor) -> Tensor:
        """bool[B, vocab]: what the grammars of `seats` int64[B] allow next; all where there is none."""
        bits = torch.arange(8, dtype=torch.uint8, device=seats.device)
        words = self.masks[seats, :-1].unsqueeze(-1)
        allowed = ((words >> bits) & 1).flatten(1)[:, : self.vocab].bool()
        return allowed | ~self.has_grammar[seats].unsqueeze(1)


def adjusted(tables: AdjustTables, asks: Adjust, logits: Tensor, seats: Tensor, positions: Tensor) -> Tensor:
    """float32[B, vocab]: what greedy rows choose the highest of, for draws at `positions` int64[B]."""
    if asks.grammar:
        logits = logits.masked_fill(~tables.allowed(seats), -torch.inf)
    if not (asks.biases or asks.penalties):
        return logits
    found = _biased(tables, logits, seats, positions) if asks.biases else logits
    if asks.penalties:
        found = _penalized(tables, found, seats)
    return torch.where(tables.adjusts[seats].unsqueeze(1), found, logits)


def narrowed(tables: AdjustTables, asks: Adjust, logits: Tensor, seats: Tensor, temperature: Tensor) -> Tensor:
    """Adjusted logits float32[B, vocab] without what `min_p` and `top_k` drop from a draw at `temperature` float32[B];
    the highest always stays."""
    if asks.min_p:
        share = tables.factors[seats, 0].masked_fill(~tables.adjusts[seats], 0)
        least = logits.amax(-1, keepdim=True) + (temperature * share.log()).unsqueeze(1)
        logits = logits.masked_fill((logits < least) & (share > 0).unsqueeze(1), -torch.inf)
    if asks.top_k:
        most = min(asks.top_k, logits.shape[1])
        wanted = tables.top_k[seats].masked_fill(~tables.adjusts[seats], 0)
        highest = logits.topk(most, dim=-1).values
        least = highest.gather(1, (wanted.clamp(1, most) - 1).unsqueeze(1))
        logits = logits.masked_fill((logits < least) & (wanted > 0).unsqueeze(1), -torch.inf)
    return logits


def _biased(tables: AdjustTables, logits: Tensor, seats: Tensor, positions: Tensor) -> Tensor:
    place = logits.new_zeros(len(logits), tables.vocab + 1)
    added = place.scatter_add(1, tables.bias_ids[seats], tables.bias[seats])
    barred = (positions < tables.ends_from[seats]).unsqueeze(1)
    ends = place.bool().scatter(1, tables.ends[seats], True) & barred
    return (logits + added[:, :-1]).masked_fill(ends[:, :-1], -torch.inf)


def _penalized(tables: AdjustTables, logits: Tensor, seats: Tensor) -> Tensor:
    frequency, presence, repetition = tables.factors[seats, 1:].split(1, dim=1)
    occurs = tables.occurs[seats]
    counts = occurs >> 1
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    found = torch.where(occurs > 0, repeated, logits)
    penalized: Tensor = found - frequency * counts - presence * (counts > 0)
    return penalized
