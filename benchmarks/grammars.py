"""What grammars cost: to build a matcher, and to compute a mask, over a vocabulary of 128,000 tokens. On a CPU.

    python -m benchmarks.grammars [--tokens 200]

Tokens are pieces of this repository's own text, the frequent ones first; outputs are walks that draw one of the allowed
tokens at random. No model is involved.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from protocol.grammars import Mask, Matcher, Vocabulary
from protocol.text import BYTE_IDS, ByteTokenizer

TOKENS: Final = 128_000
PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WIDE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {f"field_{number}": PERSON for number in range(200)},
    "additionalProperties": False,
}
GRAMMARS: Final = {
    "any JSON object": 'start: %json {"type": "object"}',
    "a person": f"start: %json {json.dumps(PERSON)}",
    "200 persons": f"start: %json {json.dumps(WIDE)}",
    "a regular expression": r"start: /[a-z]{3,12}(-[0-9]{1,4}){2}/",
    "a choice of 1,000": "start: " + " | ".join(f'"option {number}"' for number in range(1_000)),
}


def pieces() -> list[bytes]:
    """TOKENS byte strings: the bytes, then pieces of our own text."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(__file__).parents[1].rglob("*.[mp][dy]")):
        if ".venv" not in path.parts:
            for word in re.findall(r" ?\w+| ?[^\w\s]+|\s+", path.read_text()):
                counts.update(word[:stop] for stop in range(2, min(len(word), 16) + 1))
                counts.update(word[start:] for start in range(1, min(len(word) - 1, 12)))
    found = [text.encode() for text, _ in counts.most_common(TOKENS - BYTE_IDS - 1)]
    return [*(bytes((number,)) for number in range(BYTE_IDS)), *found]


class _Library:
    """Tokens as llguidance takes them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def vocabulary() -> Vocabulary:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = _Library(pieces())
    made = Vocabulary(ByteTokenizer(), BYTE_IDS + 1, (BYTE_IDS,))
    made.size = len(tokens.tokens)
    began = time.perf_counter()
    made.library = LLTokenizer(TokenizerWrapper(tokens), n_vocab=made.size, eos_token=[tokens.eos_token_id])
    click.echo(f"{made.size} tokens in {time.perf_counter() - began:.2f} s")
    return made


def drawn(mask: Mask, dice: random.Random, end: int) -> int:
    """An allowed token, the end where it is one."""
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    return end if end in allowed else int(dice.choice(allowed))


def measure(known: Vocabulary, grammar: str, tokens: int) -> tuple[float, list[float]]:
    """Seconds to build, and of each mask, its token taken in before."""
    began = time.perf_counter()
    matcher = Matcher(known, grammar)
    built_s, masks_s, dice = time.perf_counter() - began, list[float](), random.Random(1)
    token: tuple[int, ...] = ()
    while len(masks_s) < tokens:
        began = time.perf_counter()
        matcher.push(token)
        mask = matcher.mask()
        masks_s.append(time.perf_counter() - began)
        token = (drawn(mask, dice, known.size - 1),)
        if token[0] == known.size - 1:
            matcher, token = Matcher(known, grammar), ()
    return built_s, masks_s


@click.command()
@click.option("--tokens", default=200, help="Of each grammar.")
def main(tokens: int) -> None:
    known = vocabulary()
    for name, grammar in GRAMMARS.items():
        built_s, masks_s = measure(known, grammar, tokens)
        ordered = sorted(masks_s)
        click.echo(
            f"{name:22} built in {built_s * 1e3:7.1f} ms; mask {statistics.median(ordered) * 1e6:6.0f} us,"
            f" p99 {ordered[int(tokens * 0.99)] * 1e6:6.0f}, most {ordered[-1] * 1e6:6.0f}"
        )


if __name__ == "__main__":
    main()
