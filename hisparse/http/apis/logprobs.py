"""Log-probabilities as OpenAI has them: of chats, and in the older form of completions. Pure.

A token is told as text and, in chats, as the `bytes` of UTF-8 that it stands for: a character may be split over several
tokens. Bytes that are no whole characters are escaped (`\\xf0\\x9f`), in completions behind `bytes:`. A token that
stands for no text is `token_id:N`, vLLM's name for it, and its `bytes` are null.

All generated tokens are told, those of reasoning and of calls included, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from protocol.arrays import Int32Array
from protocol.logprobs import TokenLogprobs, read_rows
from protocol.text import Tokenizer

#: What completions put before bytes that are no whole characters.
BYTES_PREFIX: Final = "bytes:"


class Spelling(NamedTuple):
    """Of a token: its text, and its bytes, None where it stands for none. `is_whole`: they are whole characters."""

    text: str
    data: list[int] | None
    is_whole: bool = True


class ToldTokens:
    """Tokens of one choice with their rows, until an answer takes them. `offset` is the place in the text at which a
    token's own begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings: dict[int, Spelling] = {}
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._rows: list[Int32Array] = []

    def add(self, tokens: Sequence[int], offsets: Sequence[int], rows: Int32Array) -> None:
        """`rows` is int32[tokens, words]."""
        self._tokens += tokens
        self._offsets += offsets
        self._rows.append(rows)

    @property
    def is_pending(self) -> bool:
        """Whether tokens were added and not taken."""
        return bool(self._tokens)

    def chat(self) -> dict[str, Any]:
        """Take them, as `logprobs` of a chat's choice."""
        tokens, _, told = self._take()
        content = [
            self._entry(token, it.logprob) | {"top_logprobs": [self._entry(*other) for other in it.top]}
            for token, it in zip(tokens, told, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(self) -> dict[str, Any]:
        """Take them, as those of a completion's. A token itself is always among its likeliest, as OpenAI has it."""
        tokens, offsets, told = self._take()
        tops = []
        for token, it in zip(tokens, told, strict=True):
            top: dict[str, float] = {}
            for other, logprob in (*it.top, (token, it.logprob)):
                top.setdefault(self._old_text(other), logprob)
            tops.append(top)
        return {
            "tokens": [self._old_text(token) for token in tokens],
            "token_logprobs": [it.logprob for it in told],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _take(self) -> tuple[list[int], list[int], list[TokenLogprobs]]:
        taken = self._tokens, self._offsets, read_rows(np.concatenate(self._rows)) if self._rows else []
        self._tokens, self._offsets, self._rows = [], [], []
        return taken

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = self._spelling(token)
        return {"token": spelling.text, "logprob": logprob, "bytes": spelling.data}

    def _old_text(self, token: int) -> str:
        spelling = self._spelling(token)
        return spelling.text if spelling.is_whole else BYTES_PREFIX + spelling.text

    def _spelling(self, token: int) -> Spelling:
        known = self._spellings.get(token)
        if known is None:
            known = self._spellings[token] = spelling_of(token, self._tokenizer)
        return known


def spelling_of(token: int, tokenizer: Tokenizer) -> Spelling:
    data = tokenizer.token_bytes(token)
    if not data:
        return Spelling(f"token_id:{token}", None)
    try:
        return Spelling(data.decode(), list(data))
    except UnicodeDecodeError:
        escaped = "".join(f"\\x{byte:02x}" for byte in data)
        return Spelling(escaped, list(data), is_whole=False)
