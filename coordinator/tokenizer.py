"""Text to token ids and back, on the client's side of the wire: the service itself speaks ids alone.

The model says which tokenizer it has (`ModelInfo.tokenizer_kind`, `tokenizer_hash`). "bytes": ids 0..255 are bytes.
"json": a Hugging Face tokenizer.json, fetched once through the coordinator and kept under its hash in the user's cache
directory, since it is megabytes and never changes. Its library (`tokenizers`) is imported only then.

Text streams: an id may be half of a character, so text comes out when a character is complete, never before.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from coordinator.errors import BadInput, ConfigError, ProtocolError

BYTES: Final = "bytes"
JSON: Final = "json"
BYTE_IDS: Final = 256


class TextStream(Protocol):
    """Decodes one request's ids in order."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""

    def finish(self) -> str:
        """What is left when no more ids come: an incomplete character reads as U+FFFD."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model puts around one."""

    def stream(self) -> TextStream:
        """A decoder for one request."""


class ByteTokenizer:
    """Ids 0..255 are bytes of UTF-8; ids above are special and have no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in ids if token < BYTE_IDS))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """A tokenizer.json. Raises BadInput when the library cannot read it, ConfigError when the library is missing."""

    def __init__(self, data: bytes) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                "this model has a tokenizer.json and the tokenizers package is not installed",
                field="tokenizer",
                value=JSON,
                remedy="pip install tokenizers, or send ids with --tokens",
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:
            raise BadInput(f"unreadable tokenizer.json: {error}", remedy="send ids with --tokens") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def stream(self) -> TextStream:
        return _JsonStream(self._tokenizer)


class _JsonStream:
    """`DecodeStream` holds a text back while it ends in U+FFFD; what it still holds at the end is decoded whole."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            piece = self._stream.step(self._tokenizer, int(token))
            self._held = [*self._held, token] if piece is None else []
            text += piece or ""
        return text

    def finish(self) -> str:
        held, self._held = self._held, []
        return str(self._tokenizer.decode(held, skip_special_tokens=True)) if held else ""


def build_tokenizer(kind: str, data: bytes) -> Tokenizer:
    """The tokenizer of `kind`. Raises ProtocolError for a kind that this version does not know."""
    if kind == BYTES:
        return ByteTokenizer()
    if kind == JSON:
        return JsonTokenizer(data)
    raise ProtocolError("unknown kind of tokenizer", field="kind", value=kind, remedy="upgrade the client")


# ---------------------------------------------------------------- cache


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where tokenizers are kept, by the XDG base directory convention."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/tmp"), ".cache")
    return Path(home) / "hisparse" / "tokenizers"


def read_cached(directory: Path, content_hash: str) -> bytes | None:
    """The cached tokenizer of `content_hash`; None when there is none or its bytes are not what the hash says."""
    try:
        data = (directory / f"{_safe(content_hash)}.json").read_bytes()
    except OSError:
        return None
    return data if hash_of(data) == content_hash else None


def write_cached(directory: Path, content_hash: str, data: bytes) -> None:
    """Keep `data`; a reader sees all of it or nothing. A cache that cannot be written is no error."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(data)
        os.replace(file.name, directory / f"{_safe(content_hash)}.json")
    except OSError:
        return


def hash_of(data: bytes) -> str:
    """What `ModelInfo.tokenizer_hash` holds."""
    return hashlib.sha256(data).hexdigest()


def _safe(content_hash: str) -> str:
    """A hash comes from the wire: only its hexadecimal digits may reach a path."""
    return "".join(c for c in content_hash if c in "0123456789abcdef")
