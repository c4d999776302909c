"""Incremental decoding of tokens to text, and stop strings across token borders. Imports no torch: clients use it, too.

*Decided* text is text that later tokens cannot change: a character is decided once it is complete. A token is a
*border* when nothing is pending after it: a character and a token end there together.

The output ends before the stop string that is completed first, reading character by character. Of several that end at
the same character, the longest counts. So the result does not depend on how the text was cut into tokens. Rejected:
the occurrence that starts first, because an incomplete longer stop string could always still become it.

Published tokens cannot be taken back, so tokens that may be part of a stop string are held. Let S be the longest suffix
of the decided text that begins a stop string; held is every token after the last border at or before the start of S.
When a stop string starts inside a token, the text between the last published token and it travels as `tail_text`.

With `min_tokens` an output has so many tokens before a stop string ends it, and goes on to the first border from there
on. Up to that border nothing is held and no stop string counts. One that is completed behind it counts wherever it
starts, and takes back nothing that was published before it.

Without stop strings nothing is held.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, Protocol

from protocol.errors import ConfigError

BYTES: Final = "bytes"
JSON: Final = "json"
BYTE_IDS: Final = 256

#: After so many tokens without text, they count as text of length zero, which bounds how many tokens are held. The
#: longest character has 4 byte tokens; a longer run is special tokens, or bytes that begin no character.
PENDING_TOKENS_MAX: Final = 8


class Detokenizer(Protocol):
    """Decodes one output, in order."""

    @property
    def pending(self) -> bool:
        """Whether pushed tokens have not given their text yet: part of a character, or tokens without text."""
        ...

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens decide, empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """The remaining text, after the last token; an incomplete character becomes U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Text to the token ids of a model, and back."""

    @property
    def token_bytes_max(self) -> int:
        """Most bytes of text of one token."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt. With `special`, the tokens that the model puts around a prompt are added.

        Special tokens that `text` spells out become their ids in both cases.
        """
        ...

    def detokenizer(self, shown: Collection[str] = ()) -> Detokenizer:
        """A decoder for one output. Special tokens have no text, except those whose text is in `shown`."""
        ...

    def knows(self, text: str) -> bool:
        """Whether `text` is one token of the vocabulary."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 that a token stands for within a text, which may be part of a character: concatenated, those of an
        output are its text. A special token's own text; empty for ids without any."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens by their texts."""
        ...

    @property
    def grammar_tokens(self) -> Mapping[str, int]:
        """Tokens that a grammar may name, by their texts: llguidance takes more for special than tokenizers do."""
        ...


def make_tokenizer(kind: str, data: bytes = b"") -> Tokenizer:
    """The tokenizer of ModelInfo.tokenizer_kind. Raises ConfigError for unknown kinds and unreadable data."""
    if kind == BYTES:
        return ByteTokenizer()
    if kind == JSON:
        return JsonTokenizer(data)
    raise ConfigError("unknown kind of tokenizer", field="tokenizer_kind", value=kind, remedy="upgrade the client")


class ByteTokenizer:
    """Ids 0..255 are bytes of UTF-8; ids above are special and have no text."""

    token_bytes_max = 1

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def detokenizer(self, shown: Collection[str] = ()) -> Detokenizer:
        return _ByteDetokenizer()

    def knows(self, text: str) -> bool:
        return len(text.encode()) == 1

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < BYTE_IDS else b""

    @property
    def special_ids(self) -> Mapping[str, int]:
        return {}

    @property
    def grammar_tokens(self) -> Mapping[str, int]:
        return {}


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in tokens if token < BYTE_IDS))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """A tokenizer.json through the tokenizers library, special tokens without text. Raises ConfigError."""

    def __init__(self, data: bytes) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                "this model has a tokenizer.json and the tokenizers package is not installed",
                field="tokenizer_kind",
                value=JSON,
                remedy="pip install tokenizers, or send token ids",
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"unreadable: {error}", field="tokenizer.json", value=f"{len(data)} bytes", remedy="replace the file"
            ) from error

    @cached_property
    def token_bytes_max(self) -> int:
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encoded as a batch of one, because only batches let other threads run meanwhile."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def detokenizer(self, shown: Collection[str] = ()) -> Detokenizer:
        texts = {self._tokenizer.token_to_id(text): text for text in shown}
        special = {number for number, it in self._added_tokens.items() if it.special}
        return _JsonDetokenizer(self._tokenizer, {it: texts[it] for it in special & texts.keys()})

    @cached_property
    def ids(self) -> int:
        """One more than the highest id."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def source(self) -> str:
        """The tokenizer.json."""
        return str(self._tokenizer.to_str())

    def knows(self, text: str) -> bool:
        return self._tokenizer.token_to_id(text) is not None

    def token_bytes(self, token: int) -> bytes:
        if token in self._added_tokens:
            return str(self._added_tokens[token].content).encode()
        word = self._tokenizer.id_to_token(token)
        if word is None:
            return b""
        decoders = self._decoders
        if "ByteLevel" in decoders:
            return b"".join(_byte_of_letter().get(letter, letter.encode()) for letter in word)
        if "ByteFallback" in decoders and (named := _NAMED_BYTE.fullmatch(word)):
            return bytes([int(named[1], 16)])
        if decoders and decoders <= _OF_WHOLE_WORDS:
            return str(word).replace(WORD_BEGINS, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of steps of the library's decoder."""
        decoder = self._tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        return frozenset(it["type"] for it in state.get("decoders", [state] if state else []))

    @property
    def special_ids(self) -> Mapping[str, int]:
        return {it.content: number for number, it in self._added_tokens.items() if it.special}

    @cached_property
    def grammar_tokens(self) -> Mapping[str, int]:
        """As llguidance chooses them from a tokenizer.json: special ones, and added ones in angle brackets."""
        added = ((it.content, number, it.special) for number, it in self._added_tokens.items())
        return {text: number for text, number, special in added if special or _IN_BRACKETS.fullmatch(text)}

    @cached_property
    def _added_tokens(self) -> dict[int, Any]:
        tokens: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return tokens


#: The letter with which tokens of SentencePiece begin a word.
WORD_BEGINS: Final = "\u2581"
_IN_BRACKETS: Final = re.compile("<.*>", re.DOTALL)
_NAMED_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
#: Steps of decoders that replace WORD_BEGINS, and change no word otherwise.
_OF_WHOLE_WORDS: Final = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


@cache
def _byte_of_letter() -> dict[str, bytes]:
    """The letters with which byte-level vocabularies write bytes, those of GPT-2: printable ones for themselves, the
    others in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}


class _JsonDetokenizer:
    """The library's DecodeStream holds text back while the next token may change it; `finish` decodes that rest.

    `shown`: special tokens that have text, by id. The stream would leave them out, so it ends before each and begins
    anew after it.
    """

    def __init__(self, tokenizer: Any, shown: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._held: list[int] = []
        self._stream = self._begin()

    def _begin(self) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=True)

    @property
    def pending(self) -> bool:
        return bool(self._held)

    def push(self, tokens: Sequence[int]) -> str:
        text = ""
        for token in tokens:
            if token in self._shown:
                text += self.finish() + self._shown[token]
                self._stream = self._begin()
                continue
            piece = self._stream.step(self._tokenizer, token)
            self._held = [*self._held, token] if piece is None else []
            text += piece or ""
        return text

    def finish(self) -> str:
        held, self._held = self._held, []
        return str(self._tokenizer.decode(held, skip_special_tokens=True)) if held else ""


# ---------------------------------------------------------------- stop strings


@dataclass(frozen=True)
class StopState:
    """Result of a push: tokens 0..`publishable`-1 of the output may be published. `tail_text` only when `finished`."""

    publishable: int
    finished: bool = False
    tail_text: str = ""


class StopMatcher:
    """Finds stop strings in one output. Push every generated token, those of earlier placements included.

    Keeps decided text back to the last publishable border, and to where a stop string may have begun.
    """

    def __init__(self, stops: Sequence[str], detokenizer: Detokenizer, min_tokens: int = 0) -> None:
        """`detokenizer` must not decode another output. Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must have at least one character")
        self._stops = tuple(stops)
        self._detokenizer = detokenizer
        self._longest = max(map(len, stops), default=0)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._window = ""  # decided text from character _window_start on
        self._window_start = 0
        self._borders = [(0, 0)]  # (characters, tokens), the first of them publishable
        self._state = StopState(0)

    def push(self, tokens: Iterable[int]) -> StopState:
        """Process the next tokens. After `finished`, further tokens change nothing."""
        for token in tokens:
            if not self._state.finished:
                self._state = self._push(token)
        return self._state

    def _push(self, token: int) -> StopState:
        self._tokens += 1
        if not self._stops:
            return StopState(self._tokens)
        decided = len(self._window)
        self._window += self._detokenizer.push((token,))
        if not self._detokenizer.pending or self._tokens - self._borders[-1][1] >= PENDING_TOKENS_MAX:
            self._borders.append((self._window_start + len(self._window), self._tokens))
        counts = self._borders[0][1] >= self._min_tokens
        start = self._first_stop(decided) if counts else None
        if start is not None:
            border = self._border(start)
            return StopState(border[1], True, self._window[border[0] - self._window_start : start - self._window_start])
        held = self._window_start + len(self._window) - self._held_characters()
        publishable = self._border(held) if counts else self._borders[-1]
        self._forget(publishable, min(publishable[0], held))
        return StopState(publishable[1])

    def _first_stop(self, decided: int) -> int | None:
        """Start of the stop string completed first by the text behind the first `decided` characters of the window."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            place = self._window.find(stop, max(0, decided - len(stop) + 1))
            if place >= 0:
                found = (place + len(stop), place)
                best = found if best is None else min(best, found)
        return None if best is None else self._window_start + best[1]

    def _held_characters(self) -> int:
        """Length of the longest suffix of the window that begins a stop string."""
        for size in range(min(self._longest - 1, len(self._window)), 0, -1):
            suffix = self._window[-size:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0

    def _border(self, characters: int) -> tuple[int, int]:
        """The last border at or before `characters`, or the publishable one where that is later."""
        return self._borders[max(0, bisect_right(self._borders, (characters, self._tokens)) - 1)]

    def _forget(self, publishable: tuple[int, int], start: int) -> None:
        """Drop borders before the publishable one, and the text before `start`: no stop string can begin there."""
        self._borders = [border for border in self._borders if border >= publishable]
        self._window = self._window[start - self._window_start :]
        self._window_start = start
