"""Prompts of a body as token ids, none longer than the model's context. Pure.

A body of 16 MiB could become 16 million tokens, gigabytes of tokenizer's output and objects of Python. So what cannot
fit is refused before it is decoded or tokenized:

    ids     by counting commas
    text    by its bytes: a context holds at most context_max_tokens x token_bytes_max of them
            by counting tokens piece by piece, where that is too weak a bound: the longest token of a vocabulary may be
            128 blanks, ordinary text has 4 bytes a token

A piece has PIECE_BYTES_PER_TOKEN bytes for each token of the context, so that only text of unusual length is counted
before it is tokenized, and none that is refused costs more than a few contexts. A cut may add tokens, CUT_TOKENS_MAX by
assumption: what is closer to the limit is tokenized whole, and judged by that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from hisparse.http.apis.body import PROMPTS_MAX
from hisparse.http.apis.decoding import UNDECODABLE, undecodable
from hisparse.http.errors import VALUE_CHARS_MAX, ContextExceeded
from protocol.arrays import Int32Array
from protocol.errors import BadInput
from protocol.messages import ModelInfo
from protocol.text import Tokenizer

#: JSON of one byte of text, at most: \\u0041.
JSON_PER_BYTE_MAX: Final = 6
#: Of a text, tokenized at once while tokens are counted.
PIECE_BYTES_PER_TOKEN: Final = 8
CUT_TOKENS_MAX: Final = 16

_ROW: Final = re.compile(rb"\[([^\[\]]*)\]")
_BETWEEN_TEXTS: Final = re.compile(rb'"\s*,\s*"')


def prompts_of(prompt: msgspec.Raw | bytes, tokenizer: Tokenizer, model: ModelInfo) -> Iterator[Int32Array]:
    """One after the other. `prompt` is a text, a list of texts, token ids, or a list of lists of them. Raises
    BadInput."""
    data = bytes(prompt).lstrip()
    inner = data[1:].lstrip()[:1] if data.startswith(b"[") else b""
    if data.startswith(b'"'):
        if len(data) > JSON_PER_BYTE_MAX * text_bytes_max(tokenizer, model) + 2:
            raise _too_long("prompt", f"{len(data)} bytes of JSON", "", model)
        yield text_ids(_decoded(data, str), tokenizer, model)
    elif inner == b'"':
        _check_count(1 + sum(1 for _ in _BETWEEN_TEXTS.finditer(data)))
        for index, text in enumerate(_decoded(data, list[str])):
            yield text_ids(text, tokenizer, model, field=f"prompt[{index}]")
    elif inner == b"[":
        for index, row in enumerate(_rows(data)):
            yield flat_ids(row, model, f"prompt[{index}]")
    elif data.startswith(b"["):
        yield flat_ids(data, model, "prompt")
    else:
        raise _odd("is neither a string nor an array", "prompt")


def text_ids(
    text: str, tokenizer: Tokenizer, model: ModelInfo, *, special: bool = True, field: str = "prompt"
) -> Int32Array:
    """Raises BadInput naming `field` for a text that is empty, or longer than the context."""
    most = text_bytes_max(tokenizer, model)
    size = len(text.encode(errors="surrogatepass"))
    if size > most:
        raise _too_long(field, f"{size} bytes", f"no text of more than {most} bytes fits", model)
    piece = model.context_max_tokens * PIECE_BYTES_PER_TOKEN
    if size > piece:
        _count(text, piece, tokenizer, model, field)
    try:
        ids = tokenizer.encode(text, special=special)
    except UnicodeEncodeError as error:
        raise BadInput("holds half of a surrogate pair", field=field, remedy="send whole characters") from error
    return _checked(ids, model, field)


def text_bytes_max(tokenizer: Tokenizer, model: ModelInfo) -> int:
    return model.context_max_tokens * tokenizer.token_bytes_max


def _count(text: str, piece_bytes: int, tokenizer: Tokenizer, model: ModelInfo, field: str) -> None:
    """Raises BadInput as soon as the pieces so far have more tokens than the context."""
    tokens, chars = 0, max(1, piece_bytes // 4)  # of four bytes at most
    for at in range(0, len(text), chars):
        tokens += max(0, len(tokenizer.encode(text[at : at + chars], special=False)) - CUT_TOKENS_MAX)
        if tokens > model.context_max_tokens:
            raise _too_long(field, f"{len(text)} characters", f"the first {at + chars} exceed it", model)


def _rows(data: bytes) -> Iterator[bytes]:
    """The JSON of each list in a list of lists."""
    rows = [found.span() for found, _ in zip(_ROW.finditer(data), range(PROMPTS_MAX + 1), strict=False)]
    _check_count(len(rows))
    ends = [end for _, end in rows]
    between = [data[start:stop] for start, stop in zip([0, *ends], [*(at for at, _ in rows), len(data)], strict=True)]
    outer = b"0".join(between)
    if outer.count(b",") >= PROMPTS_MAX or _decoded(outer, list[int]) != [0] * len(rows):
        raise _odd("mixes arrays of token ids with other values", "prompt")
    for start, stop in rows:
        yield data[start:stop]


def flat_ids(data: bytes, model: ModelInfo, field: str) -> Int32Array:
    """From the JSON of a flat list. Raises BadInput naming `field`."""
    commas = data.count(b",")
    if commas >= model.context_max_tokens:
        raise _too_long(field, f"{commas + 1} tokens", "", model)
    return _checked(_decoded(data, list[int], field), model, field)


def _decoded(data: bytes, kind: Any, field: str = "prompt") -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise undecodable(error, field) from error


def _checked(ids: list[int], model: ModelInfo, field: str) -> Int32Array:
    if not ids:
        raise BadInput("is empty", field=field, remedy="give at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= model.vocab_size:
        raise BadInput(
            f"token ids of {model.name} are 0 to {model.vocab_size - 1}",
            field=field,
            value=str(low if low < 0 else high)[:VALUE_CHARS_MAX],
            remedy="use the tokenizer of the served model",
        )
    return np.array(ids, np.int32)


def _check_count(prompts: int) -> None:
    if prompts > PROMPTS_MAX:
        text = f"more than {PROMPTS_MAX} prompts"
        raise BadInput(text, field="prompt", value=prompts, remedy="send several requests")


def _odd(why: str, field: str) -> BadInput:
    remedy = "send a string, an array of strings, an array of token ids, or an array of such arrays"
    return BadInput(why, field=field, remedy=remedy)


def _too_long(field: str, size: str, why: str, model: ModelInfo) -> ContextExceeded:
    text = f"the context of {model.name} holds {model.context_max_tokens} tokens" + (f": {why}" if why else "")
    return ContextExceeded(text, field=field, value=size, remedy="shorten it")
