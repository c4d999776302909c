"""Grammars that outputs are held to, through llguidance: Earley's parser over lexemes that are regular expressions,
and a trie of the vocabulary that it walks to find the tokens with which an output may go on.

The library is imported when it is first needed. It lets go of the interpreter while it builds, and while it computes
a mask, but not while it pushes a token (SlowPushes). LIMITS bound a mask, and the states and symbols of a grammar, by
counting steps, so that a grammar does the same on every machine. They do not bound seconds: an item of Earley's parser
costs as much as the row has items, so that the row of `a: a a | "x"` behind 1,000 tokens takes a fifth of a second.

LIMITS bound neither how deep a build recurses nor how long it takes; the length of a grammar does (GRAMMAR_CHARS_MAX).
A chain of 8,400 rules, the longest, fits a stack of 32 MiB and is built in half a second; on a stack of 16 MiB it ends
the process. The slowest known, a chain of repeated terminals (`A: B*`, `B: C*`, and so on), takes 13 s for 2,000 of
them, before it is refused, and more than a minute for 7,500. So builds run in threads with large stacks, or in a
process of their own, and under a limit of time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.errors import BadInput, CapacityError, ConfigError, HiSparseError
from protocol.text import BYTE_IDS, ByteTokenizer, JsonTokenizer, Tokenizer

#: One bit for each token, lowest first: 1 where an output may go on with it.
Mask: TypeAlias = npt.NDArray[np.uint8]

#: Of llguidance.LLParserLimits. A step of so much fuel takes about 15 ms, and 100,000 states 160 MB.
LIMITS: Final[Mapping[str, Any]] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
#: Of an output along which a grammar is tried. What grows in every output, such as a rule that begins with what it
#: repeats twice, grows beyond LIMITS much later; what opens wide behind a few bytes is found.
WALK_BYTES: Final = 64
#: Each of its bytes is the cheapest that is allowed, and costs as much more each time: so it leaves repetitions. Quotes
#: end strings, blanks lead nowhere.
WALK_COSTS: Final = np.arange(BYTE_IDS, dtype=np.int64) + 1_000
WALK_COSTS[0x22] = 0
WALK_COSTS[list(b"\t\n\r ")] = 1_000_000
#: Of the library's words in an error.
ERROR_CHARS_MAX: Final = 300
#: What the library says in place of what LIMITS keep it from telling.
_NOT_TOLD: Final = "<non-verbose/>"
#: What a grammar of one rule holds its output to, by what the rule consists of; with any other it is "a grammar".
_KINDS: Final = {
    "a JSON schema": re.compile(r"%json\s*\{.*\}"),
    "a regular expression": re.compile(r"/(?:\\.|[^/\\])*+/"),
    "a choice": re.compile(r'"(?:\\.|[^"\\])*+"(?:\s*\|\s*"(?:\\.|[^"\\])*+")*+'),
}


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask: whole words of 32 bits."""
    return 4 * -(-vocab_size // 32)


def kind_of(grammar: str) -> str:
    """What `grammar` holds an output to, in words for people."""
    before, _, rule = grammar.strip().partition("start:")
    rule = rule.strip()
    depth = min(len(rule) - len(rule.lstrip("(")), len(rule) - len(rule.rstrip(")")))
    rule = rule[depth : len(rule) - depth]
    kinds = (kind for kind, pattern in _KINDS.items() if not before and pattern.fullmatch(rule))
    return next(kinds, "a grammar")


def nameable_tokens(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    """Tokens that a grammar may name, by their texts. A tokenizer may have ids that its model lacks, such as a padding
    token that was added for training: those are left out."""
    return {text: number for text, number in tokenizer.grammar_tokens.items() if number < vocab_size}


class Vocabulary:
    """The tokens of a model as bytes. Raises ConfigError for a tokenizer that the library cannot read.

    The library knows all tokens of a tokenizer.json, also those that the model lacks: masks are cut behind the model's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes about a second for a tokenizer.json of 130,000 tokens."""
        from llguidance import LLTokenizer

        self.size = vocab_size
        ends = list(eos_token_ids) or [vocab_size - 1]  # a grammar wants an end; without one it is refused before
        self._ends = [number for number in ends if number < BYTE_IDS]
        try:
            if isinstance(tokenizer, JsonTokenizer):
                size = max(vocab_size, tokenizer.ids)
                self.library: Any = LLTokenizer(tokenizer.source(), n_vocab=size, eos_token=ends)
            else:
                plain = _PlainTokens(vocab_size, ends, nameable_tokens(tokenizer, vocab_size))
                self.library = LLTokenizer(_wrapped(plain), n_vocab=vocab_size, eos_token=ends)
        except ValueError as error:
            raise ConfigError(
                f"grammars cannot use it: {str(error)[:ERROR_CHARS_MAX]}",
                field="tokenizer.json",
                value=f"{vocab_size} tokens",
                remedy="replace the file",
            ) from error

    def cheapest_byte(self, mask: Mask, costs: npt.NDArray[np.int64]) -> int | None:
        """The cheapest of the bytes that `mask` allows, where tokens are bytes; None: the output can only end."""
        bits = np.unpackbits(mask[: BYTE_IDS // 8], bitorder="little")
        allowed = np.setdiff1d(np.flatnonzero(bits), self._ends)
        return int(allowed[costs[allowed].argmin()]) if allowed.size else None


class Matcher:
    """One output, held to a grammar. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        """Raises BadInput for a grammar that is none, or exceeds LIMITS."""
        from llguidance import LLMatcher

        self._bytes = mask_bytes(vocabulary.size)
        self._library: Any = LLMatcher(vocabulary.library, grammar, log_level=0, limits=_limits())
        self._check()

    def copy(self) -> Matcher:
        """Another output, held to the same grammar, after the same tokens."""
        other = object.__new__(Matcher)
        other._bytes, other._library = self._bytes, self._library.deep_copy()
        return other

    def push(self, tokens: Sequence[int]) -> None:
        """The output goes on with `tokens`. Raises BadInput for tokens that the grammar does not allow."""
        self._library.consume_tokens(list(tokens))
        self._check()

    def push_slow(self, token: int, pushes: SlowPushes) -> None:
        """As `push` of one token that takes long: other threads run meanwhile."""
        pushes.push(self._library, token)
        self._check()

    def mask(self) -> Mask:
        """What may come next: uint8 of `mask_bytes`, end-of-sequence tokens where the output may end. Raises BadInput
        where that takes more than LIMITS."""
        mask: Mask = np.frombuffer(self._library.compute_bitmask(), np.uint8)
        self._check()
        return mask[: self._bytes]  # the library's has room for one token more, and for those that the model lacks

    def _check(self) -> None:
        if self._library.is_error():
            raise refusal(self._library.get_error())


class SlowPushes:
    """Pushes tokens while other threads use the interpreter, one token at a time, in a thread of the library.

    The library lets go of the interpreter where it pushes to two outputs or more at once. So each push has a companion:
    an output of no grammar, which takes nothing and is never anything but refused. Not thread-safe.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLExecutor, LLMatcher

        self._executor: Any = LLExecutor(num_threads=1)
        self._companion: Any = LLMatcher(vocabulary.library, "", log_level=0)

    def push(self, library: Any, token: int) -> None:
        """The output of `library`, a Matcher's, goes on with `token`."""
        self._executor.consume_token_par([(library, token), (self._companion, token)])


def refusal(words: str) -> BadInput:
    """Of a grammar, in the words of the library."""
    said = words.replace(_NOT_TOLD, "").strip()
    return BadInput(said[:ERROR_CHARS_MAX], field="grammar", remedy="correct or simplify it")


def outgrown(error: HiSparseError, tokens: int) -> HiSparseError:
    """Return `error` of a matcher in words of an output that has `tokens`: its grammar was taken, and has
    outgrown LIMITS since. Before the first token, and where it is no BadInput, `error` is returned as it is."""
    if not tokens or not isinstance(error, BadInput):
        return error
    why = error.message.partition("\n")[0]
    return CapacityError(f"cannot be held to its grammar any further: {why}", field="output", value=f"{tokens} tokens")


def check_grammar(vocabulary: Vocabulary, grammar: str) -> None:
    """Raises BadInput for a grammar that a Matcher would refuse, at its start or along one output of WALK_BYTES. The
    tokens of `vocabulary` are bytes."""
    matcher, costs = Matcher(vocabulary, grammar), WALK_COSTS.copy()
    for _ in range(WALK_BYTES):
        byte = vocabulary.cheapest_byte(matcher.mask(), costs)
        if byte is None:
            return
        matcher.push((byte,))
        costs[byte] += WALK_COSTS[byte]
    matcher.mask()


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


def _wrapped(tokens: _PlainTokens) -> Any:
    from llguidance import TokenizerWrapper

    return TokenizerWrapper(tokens)


class _PlainTokens:
    """Ids below 256 are bytes; those above, and ends, are special tokens that have names. As llguidance expects them of
    a tokenizer: `special` by their texts, other names are made."""

    bos_token_id = None

    def __init__(self, vocab_size: int, ends: Sequence[int], special: Mapping[str, int]) -> None:
        self.eos_token_id = ends[0]
        names = {number: text for text, number in special.items()}
        self.special_token_ids = sorted({*range(BYTE_IDS, vocab_size), *ends, *names})
        self.tokens = [bytes((number,)) for number in range(min(vocab_size, BYTE_IDS))]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        for number in self.special_token_ids:
            self.tokens[number] = names.get(number, f"<|{number}|>").encode()

    def __call__(self, text: bytes | str) -> list[int]:
        return ByteTokenizer().encode(text if isinstance(text, str) else text.decode(errors="replace"))
