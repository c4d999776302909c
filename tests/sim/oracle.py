"""A language model that fits on a page, and what each request must therefore say.

    prompt row i     mix(token, i)
    digest           sum over rows of row[i] * weight[i], modulo 2**64
    decode row p     mix(token, p) + TURN * digest of rows 0..p-1
    next token       a character, or now and then end-of-sequence, from the digest that includes the new row

A worker has to *read* every row to know the next token, so one row that is wrong, missing, another request's or from
another moment changes what it says from there on. The oracle keeps a running digest instead and never reads a row: the
two agree only if host memory held what it should.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from protocol.arrays import Int32Array, pack_int32
from protocol.messages import AUTO, ModelInfo, Sampling
from tests.sim.shape import PAGE_TOKENS

Rows = npt.NDArray[np.uint64]

CONTEXT_MAX_TOKENS: Final = 1024
#: Ids 0..255 are bytes; 32..126 is all that this model says, and the end.
EOS: Final = 256
#: Decoded rows depend on more than their token and position, so that prefill cannot make them: they are not reused.
MODEL: Final = ModelInfo(
    *("f" * 64, "page", CONTEXT_MAX_TOKENS, EOS + 1, 1, 64, (EOS,), "bytes", ""),
    prefix_unit_tokens=PAGE_TOKENS,
    reuses_generated=False,
)

_MASK: Final = 2**64 - 1
_A: Final = 0x9E3779B97F4A7C15
_B: Final = 0xC2B2AE3D27D4EB4F
_TURN: Final = 0x165667B19E3779F9
_CHARACTERS: Final = 95
_END_ODDS: Final = 149  # one in so many tokens is the last

#: Odd, so that no row can hide behind its weight.
WEIGHTS: Final[Rows] = (np.arange(CONTEXT_MAX_TOKENS, dtype=np.uint64) * np.uint64(_B) ^ np.uint64(_A)) | np.uint64(1)
_WEIGHTS: Final[list[int]] = [int(weight) for weight in WEIGHTS]


def prompt_rows(prompt: Int32Array) -> Rows:
    """Rows that prefill computes, uint64[tokens]."""
    tokens, places = prompt.astype(np.uint64), np.arange(1, len(prompt) + 1, dtype=np.uint64)
    mixed = (tokens + np.uint64(1)) * np.uint64(_A) ^ places * np.uint64(_B)
    rows: Rows = mixed ^ (mixed >> np.uint64(29))
    return rows


def digest_of(rows: Rows) -> int:
    """Digest of rows 0..len-1."""
    return int((rows * WEIGHTS[: len(rows)]).sum(dtype=np.uint64))


def extend_digest(digest: int, row: int, position: int) -> int:
    return (digest + row * _WEIGHTS[position]) & _MASK


def decode_row(token: int, position: int, digest: int) -> int:
    """The row of `token` at `position`, behind rows that have `digest`."""
    mixed = ((token + 1) * _A ^ (position + 1) * _B) & _MASK
    return ((mixed ^ (mixed >> 29)) + digest * _TURN) & _MASK


def next_token(digest: int) -> int:
    """What follows rows that have `digest`."""
    drawn = (digest ^ (digest >> 31)) * _A >> 24 & 0xFFFFFFFF
    return EOS if drawn % _END_ODDS == 0 else 32 + drawn // _END_ODDS % _CHARACTERS


def logprobs_of(token: int, place: int, words: int) -> bytes:
    """The row of log-probabilities of the generated token at `place`."""
    return pack_int32([token * 65_536 + place * 64 + word for word in range(words)])


@dataclass(eq=False)
class Truth:
    """One request and what must come of it. `rows` are those of its whole context, the last token's excepted."""

    request_id: str
    prompt: Int32Array
    sampling: Sampling
    priority: int = 0
    prefill_mode: str = AUTO
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        rows = [int(row) for row in prompt_rows(self.prompt)]
        digest, text = digest_of(np.array(rows, dtype=np.uint64)), ""
        while not self.reason:
            token = next_token(digest)
            self.tokens.append(token)
            text += chr(token) if token < EOS else ""
            self._look_for_the_end(token, text)
            row = decode_row(token, len(rows), digest)
            digest = extend_digest(digest, row, len(rows))
            rows.append(row)
        self.rows = np.array(rows, dtype=np.uint64)

    def _look_for_the_end(self, token: int, text: str) -> None:
        stops = [stop for stop in self.sampling.stop if text.endswith(stop)] if token < EOS else []
        if stops:
            self.reason = "stop"
            kept = len(text) - max(map(len, stops))
            while sum(token < EOS for token in self.tokens) > kept:
                self.tokens.pop()
        elif token == EOS and not self.sampling.ignore_eos:
            self.reason = "eos"
        elif len(self.tokens) == self.sampling.max_tokens:
            self.reason = "length"
