"""Log-probabilities of drawn tokens: protocol/logprobs.py says what they are and how a row is laid out.

They are computed behind the draws of a step in which a request asks for them, from the logits before anything is
adjusted, in operations that are launched one by one; other steps keep their one graph. Each row is reduced alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.logprobs import ROW_WORDS_MAX
from protocol.messages import LOGPROBS_MAX


def allocate_rows(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """int32[rows, ROW_WORDS_MAX]."""
    return torch.zeros(rows, ROW_WORDS_MAX, dtype=torch.int32, device=device)


def write_logprobs(logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Operation: the rows int32[B, ROW_WORDS_MAX] of tokens int32[B], drawn from logits float32[B, vocab].

    A vocabulary of fewer than LOGPROBS_MAX tokens leaves the ends of rows as they are; rows of padding (tokens below
    0) mean nothing.
    """
    norm = logits.logsumexp(-1, keepdim=True)
    drawn = logits.gather(1, tokens.long().clamp(min=0).unsqueeze(1))
    likeliest = logits.topk(min(LOGPROBS_MAX, logits.shape[1]), dim=-1)
    stop = 1 + 2 * likeliest.indices.shape[1]
    rows[:, 0] = (drawn - norm).squeeze(1).view(torch.int32)
    rows[:, 1:stop:2] = likeliest.indices.int()
    rows[:, 2:stop:2] = (likeliest.values - norm).view(torch.int32)
