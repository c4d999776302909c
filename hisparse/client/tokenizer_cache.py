"""A cache of tokenizers on the client's disk, by their hash: they have megabytes and never change.

The service handles only token ids; a client fetches the tokenizer once through the coordinator. The hash comes from the
wire, so only its hexadecimal digits reach a path, and a cached file is hashed again when it is read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hisparse.client.client import Client
from protocol.text import Tokenizer, make_tokenizer
from protocol.tokenizer_files import TokenizerFile


async def fetch_tokenizer(client: Client) -> Tokenizer:
    """The served model's tokenizer: from the user's cache by its hash, else through the coordinator.

    Raises Unavailable before a worker has sent it, ConfigError when its library is not installed.
    """
    model = await client.model()
    directory = cache_dir(os.environ)
    data = read_cached(directory, model.tokenizer_hash) if model.tokenizer_hash else b""
    if data is None:
        fetched = await client.tokenizer()
        data = fetched.data
        write_cached(directory, fetched.hash, data)
    return make_tokenizer(model.tokenizer_kind, data)


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Directory of cached tokenizers, by the XDG base directory convention."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/tmp"), ".cache")
    return Path(home) / "hisparse" / "tokenizers"


def read_cached(directory: Path, content_hash: str) -> bytes | None:
    """The cached tokenizer.json of `content_hash`; None when there is none, or its data has another hash."""
    try:
        data = _path(directory, content_hash).read_bytes()
    except OSError:
        return None
    return data if TokenizerFile("json", data).hash == content_hash else None


def write_cached(directory: Path, content_hash: str, data: bytes) -> None:
    """Cache `data`, atomically. A cache that cannot be written is no error."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(data)
        os.replace(file.name, _path(directory, content_hash))
    except OSError:
        return


def _path(directory: Path, content_hash: str) -> Path:
    return directory / ("".join(c for c in content_hash if c in "0123456789abcdef") + ".json")
