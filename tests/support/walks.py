"""Seeded walks over the tokens that a grammar allows: outputs of a model that knows nothing but the masks."""

from __future__ import annotations

import random
from typing import Final

import numpy as np

from protocol.grammars import Matcher, Vocabulary
from protocol.text import ByteTokenizer

END: Final = 256
#: Ids below END are bytes.
BYTES: Final = Vocabulary(ByteTokenizer(), END + 1, (END,))
#: What free text ends with in the formats of calls and reasoning; of one, by the names that arguments have in tests.
ENDINGS: Final = (
    *("</think>", "</mm:think>", "</arg_value>", "</｜DSML｜parameter>"),
    *(f"]<]minimax[>[</{name}>" for name in ("city", "code", "note", "short")),
)
#: Tokens that are allowed where text is free, at least.
FREE: Final = 80


def walk(grammar: str, seed: int, *, ends_after: int, most: int) -> str:
    """A text of the grammar; "" where it has not ended after `most` tokens. From `ends_after` on the end is taken where
    it is allowed, and what may close a value goes first."""
    dice, matcher, tokens = random.Random(seed), Matcher(BYTES, grammar), list[int]()
    while len(tokens) < most:
        allowed = np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")).tolist()
        hurries = len(tokens) >= ends_after
        if END in allowed and (hurries or len(allowed) == 1):
            return bytes(tokens).decode()
        drawn = _drawn(dice, [token for token in allowed if token != END], hurries)
        if matcher._library.validate_tokens(drawn) < len(drawn):
            continue
        matcher.push(drawn)
        tokens += drawn
    return ""


def _drawn(dice: random.Random, allowed: list[int], hurries: bool) -> list[int]:
    """A token, or the tokens of an ending."""
    closes = hurries and (ord("{") not in allowed or dice.random() < 0.5)  # "]" may open a call, beside a text's "{"
    closing = [token for token in allowed if token in b'"}]'] if closes else []
    printable = [token for token in allowed if 32 <= token < 127]
    if hurries and len(printable) >= FREE and ord("<") in allowed and dice.random() < 0.5:
        return list(dice.choice(ENDINGS).encode())
    return [dice.choice(closing or printable or allowed)]
