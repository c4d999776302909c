"""What requests ask of their draws, written into the tables that the device reads (worker/runners/base.py, logits.py).

A request that adjusts its logits brings lists: biases, ends, the tokens of its prompt, and how often each generated
token was fed before it came here. They travel through pinned memory, in buffers used in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from protocol.messages import LOGIT_BIAS_MAX, Sampling
from worker.device.pinned import host_tensor
from worker.loop.batch import RunningRequest
from worker.loop.inputs import RING_BUFFERS, Ring
from worker.loop.output import end_token_ids
from worker.runners.base import SamplerState
from worker.runners.logits import COUNT_MAX, ENDS_MAX, AdjustTables
from worker.streams import Stream

NO_TOKENS = np.zeros(0, dtype=np.int64)


class _Lists:
    """Of one request: ids and how many there are of each kind, distinct within a kind."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self.ids = host_tensor(2 * vocab, dtype=torch.int64, device=device)  # of the prompt, then generated
        self.values = host_tensor(2 * vocab, dtype=torch.int16, device=device)
        self.ends = host_tensor(ENDS_MAX, dtype=torch.int64, device=device)
        self.bias_ids = host_tensor(LOGIT_BIAS_MAX, dtype=torch.int64, device=device)
        self.bias = host_tensor(LOGIT_BIAS_MAX, dtype=torch.float32, device=device)
        self.factors = host_tensor(4, dtype=torch.float32, device=device)
        self.prompt_ids, self.generated_ids = 0, 0

    def fill(self, request: RunningRequest, sampling: Sampling, ends: Sequence[int]) -> None:
        self.ends.fill_(self._vocab)
        self.ends[: len(ends)] = torch.tensor(ends, dtype=torch.int64)
        self.bias_ids.fill_(self._vocab)
        self.bias.zero_()
        for place, (token, bias) in enumerate(sampling.logit_bias):
            self.bias_ids[place], self.bias[place] = token, bias
        self.factors[:] = torch.tensor(
            [sampling.min_p, sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty]
        )
        prompt = fed = counts = NO_TOKENS
        if request.adjust is not None and request.adjust.penalties:
            prompt = np.unique(request.prompt)
            before = request.output.tokens[: max(0, request.position - request.prompt_tokens)]
            fed, counts = np.unique(np.asarray(before, dtype=np.int64), return_counts=True)
        self.prompt_ids, self.generated_ids = len(prompt), len(fed)
        stop = len(prompt) + len(fed)
        self.ids.numpy()[:stop] = np.concatenate([prompt, fed])
        self.values.numpy()[: len(prompt)] = 1
        self.values.numpy()[len(prompt) : stop] = 2 * np.minimum(counts, COUNT_MAX) + np.isin(fed, prompt)

    def apply(self, tables: AdjustTables, seat: int, sampling: Sampling, prompt_tokens: int, counts: bool) -> None:
        """Operation: the tables' rows of `seat`; those of counted tokens where penalties apply."""
        for table, values in (
            (tables.ends, self.ends),
            (tables.bias_ids, self.bias_ids),
            (tables.bias, self.bias),
            (tables.factors, self.factors),
        ):
            table[seat].copy_(values, non_blocking=True)
        tables.top_k[seat].fill_(sampling.top_k)
        tables.prompt_tokens[seat].fill_(prompt_tokens)
        tables.ends_from[seat].fill_(prompt_tokens + sampling.min_tokens)
        tables.adjusts[seat].fill_(True)
        tables.has_grammar[seat].fill_(bool(sampling.grammar))
        if not counts:
            return
        device, row = tables.occurs.device, tables.occurs[seat]
        row.zero_()
        for part in (slice(self.prompt_ids), slice(self.prompt_ids, self.prompt_ids + self.generated_ids)):
            ids, values = (it[part].to(device, non_blocking=True) for it in (self.ids, self.values))
            row.scatter_(0, ids, values)


class SamplerSeats:
    """Sets the draws of seats on `compute`."""

    def __init__(self, compute: Stream, sampler: SamplerState, eos_token_ids: Sequence[int]) -> None:
        tables = sampler.adjust
        self._compute, self._sampler, self._eos = compute, sampler, eos_token_ids
        self._ring = Ring([_Lists(tables.vocab, tables.occurs.device) for _ in range(RING_BUFFERS)])

    def set(self, request: RunningRequest, sampling: Sampling) -> None:
        """`request` takes its seat. Waits, where it adjusts, until an earlier request's lists were read."""
        seat, sampler = request.seat, self._sampler
        self._compute.launch(
            "set sampler", partial(sampler.set_seat, seat, sampling.temperature, sampling.top_p, sampling.seed)
        )
        if request.adjust is None:
            return
        lists = self._ring.next()
        lists.fill(request, sampling, end_token_ids(sampling, self._eos))
        write = partial(lists.apply, sampler.adjust, seat, sampling, request.prompt_tokens, request.adjust.penalties)
        self._compute.launch("set adjustments", write)
        self._ring.launched(self._compute.record("inputs_consumed"))
