"""The tokenizer and the chat template of a checkpoint directory, as files. What they mean is in protocol/text.py."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.errors import ConfigError
from protocol.small_files import read_json_object, read_small_file
from protocol.text import BYTES, JSON

FIELD: Final = "worker.model"
#: Of a tokenizer.json: those of large vocabularies have 10 to 40 MB.
TOKENIZER_BYTES_MAX: Final = 256 * 1024 * 1024
#: Names of special tokens in chat templates.
SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer of a checkpoint: `kind` "bytes" (ids 0..255 are bytes, no data) or "json" (a tokenizer.json).

    `chat_template` is complete: its first line binds the special tokens that it may name.
    """

    kind: str
    data: bytes = b""
    chat_template: str = ""

    @property
    def hash(self) -> str:
        """The value of ModelInfo.tokenizer_hash: SHA-256 in hexadecimal; empty without data."""
        return hashlib.sha256(self.data).hexdigest() if self.data else ""


def read_tokenizer(path: str | Path) -> TokenizerFile:
    """The tokenizer of a checkpoint directory, with its chat template; kind "bytes" when it has no tokenizer.json.

    Raises ConfigError when a file cannot be read, or the template cannot be compiled.
    """
    file = Path(path) / "tokenizer.json"
    if not os.path.lexists(file):
        return TokenizerFile(BYTES, chat_template=_chat_template(Path(path)))
    data, _ = read_small_file(file, FIELD, bytes_max=TOKENIZER_BYTES_MAX)
    return TokenizerFile(JSON, data, _chat_template(Path(path)))


def _chat_template(path: Path) -> str:
    file, settings = path / "chat_template.jinja", path / "tokenizer_config.json"
    config = read_json_object(settings, FIELD) if os.path.lexists(settings) else {}
    try:
        if os.path.lexists(file):
            return _bindings(config) + _compilable(read_small_file(file, FIELD)[0].decode(), file)
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {it["name"]: it["template"] for it in template}.get("default")
        return _bindings(config) + _compilable(template, settings) if isinstance(template, str) else ""
    except UnicodeDecodeError as error:
        raise _refusal("is not text", file) from error
    except (TypeError, KeyError) as error:
        raise _refusal("chat_template or a special token has a form that is not known", settings) from error


def _compilable(template: str, file: Path) -> str:
    """`template` itself. Raises ConfigError."""
    from protocol.chat_templates import compiled  # Jinja, which clients of tokenizers need not have

    try:
        compiled(template)
    except ConfigError as error:
        raise _refusal(error.message, file) from error
    return template


def _refusal(message: str, file: Path) -> ConfigError:
    return ConfigError(message, field=FIELD, value=file, remedy="repair or remove the tokenizer files")


def _bindings(settings: dict[str, Any]) -> str:
    """A line of Jinja that binds the special tokens of a tokenizer_config.json; its newline is not output."""
    tokens = {name: settings.get(name) for name in SPECIAL_TOKENS}
    texts = {name: it["content"] if isinstance(it, dict) else it for name, it in tokens.items() if it}
    sets = "".join(f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}" for name, text in texts.items())
    return sets + "\n" if sets else ""
