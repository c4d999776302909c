"""Grammars, built in processes (protocol.children) before a request is submitted.

Workers try them again (protocol.grammar_trials): other clients submit grammars too. What does not pass here is refused,
naming the innermost schema that is to blame. Grammars that passed lately are known again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from basics.rooms import RoomUse
from hisparse.http.errors import PLACE_CHARS_MAX, VALUE_CHARS_MAX
from hisparse.http.models.formats.lark import schema_of
from hisparse.http.models.grammars import GrammarPlan
from hisparse.http.server.threads import share_fairly
from protocol.children import Children, serve
from protocol.errors import BadInput
from protocol.grammar_trials import (
    KEPT_BYTES_MAX,
    KNOWN_MAX,
    MEMORY_BYTES_MAX,
    NICENESS,
    STACK_BYTES,
    PassedGrammars,
    bytes_vocabulary,
    too_large,
)
from protocol.grammars import Vocabulary, check_grammar, nameable_tokens
from protocol.messages import ModelInfo
from protocol.text import Tokenizer

#: To build one grammar.
CHECK_LIMIT_S: Final = 5.0
#: Schemas within schemas that are tried, to find the one to blame.
DEPTH_MAX: Final = 16
#: Of the library's words: what comes before those on a schema, and an excerpt of the grammar.
_OF_SCHEMAS: Final = "failed to compile JSON schema: "
_EXCERPT: Final = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_AT: Final = re.compile(r"^at \d+\(\d+\): ")
_QUOTED: Final = re.compile(r"'[^']*'")
_PLACE: Final = re.compile(r" while processing .*", re.DOTALL)
#: Where schemas stand to which others refer.
_DEFINITIONS: Final = ("$defs", "definitions")
#: Words of the library, and ours.
_OURS: Final = (
    (re.compile(r"Resource '([^']*)' is not present.*"), r"$ref leads to \1, out of the schema: nothing is fetched"),
    (re.compile(r"oneOf constraints are not supported\..*"), "schemas of oneOf may allow the same value: use anyOf"),
    (re.compile(r"NoExtensionBias.*"), "it allows no output that ends"),
)


class GrammarRequest(msgspec.Struct, frozen=True, array_like=True):
    plan: GrammarPlan
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    special: dict[str, int]


class GrammarReply(msgspec.Struct, frozen=True, array_like=True):
    """`message` is empty where `source` is the grammar."""

    source: str
    message: str = ""
    field: str = ""


_decode_reply: Final = msgspec.msgpack.Decoder(GrammarReply).decode  # before threads use it: bodies.prepare


class GrammarChecks:
    """Any number of threads may check at once; each has a process for itself meanwhile."""

    def __init__(self, limit_s: float = CHECK_LIMIT_S, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._children = Children(__name__, limit_s, memory_bytes_max, KEPT_BYTES_MAX)
        self._known = PassedGrammars()

    @property
    def use(self) -> RoomUse:
        """Return how many grammars are known again."""
        return RoomUse(len(self._known), KNOWN_MAX)

    def check(self, plan: GrammarPlan, model: ModelInfo, tokenizer: Tokenizer) -> str:
        """The grammar of `plan`, of a size that is checked, as workers take it. Blocks until it is built. Raises
        BadInput for one that cannot be built within limits."""
        request = _request(plan, model, tokenizer)
        digest = hashlib.sha256(request).digest()
        known = self._known.recall(digest)
        if known is not None:
            return known
        reply = self._children.ask(request)
        if reply is None:
            raise too_large(self._children, plan.field)
        answer = _decode_reply(reply)
        if answer.message:
            remedy = "leave out what is not supported, or correct it"
            raise BadInput(f"cannot be held to: {answer.message}", field=answer.field, remedy=remedy)
        self._known.remember(digest, answer.source)
        return answer.source

    def known(self, plan: GrammarPlan, model: ModelInfo, tokenizer: Tokenizer) -> str | None:
        """The same, if it passed lately. Does not block."""
        return self._known.recall(hashlib.sha256(_request(plan, model, tokenizer)).digest())

    def close(self) -> None:
        """While nothing is checked."""
        self._children.close()


def _request(plan: GrammarPlan, model: ModelInfo, tokenizer: Tokenizer) -> bytes:
    ends, special = model.eos_token_ids, nameable_tokens(tokenizer, model.vocab_size)
    return msgspec.msgpack.encode(GrammarRequest(plan, model.vocab_size, ends, special))


# ---------------------------------------------------------------- the process


def _checked(data: bytes) -> bytes:
    request = msgspec.msgpack.decode(data, type=GrammarRequest)
    plan, special = request.plan, tuple(request.special.items())
    vocabulary = _vocabulary(request.vocab_size, request.eos_token_ids, special)
    try:
        source = plan.source(_lark(plan))
        check_grammar(vocabulary, source)
    except BadInput as error:
        blamed = _blamed(plan, vocabulary)
        field, message = (plan.field, error.message) if blamed is None else blamed
        has_place = bool(plan.inner) and blamed is None
        return msgspec.msgpack.encode(GrammarReply("", _words(message, has_place=has_place), field))
    return msgspec.msgpack.encode(GrammarReply(source))


def _lark(plan: GrammarPlan) -> str:
    """The client's grammar in Lark's syntax. Raises BadInput."""
    if not plan.is_gbnf:
        return plan.inner
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(plan.inner))
    except Exception as error:
        raise BadInput(f"is neither Lark (no rule start) nor GBNF: {error}", field=plan.field) from error


def _blamed(plan: GrammarPlan, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """The field of the innermost schema that cannot be built, and why; None: all can."""
    for field, schema in plan.schemas:
        message = _failure(schema, vocabulary)
        if message:
            return _innermost(field, schema, message, vocabulary)
    return None


def _innermost(field: str, schema: dict[str, Any], message: str, vocabulary: Vocabulary) -> tuple[str, str]:
    """A part is to blame where it fails for the reason of the whole: alone it may fail for another, such as a
    reference to what is around it."""
    definitions: dict[str, Any] = {word: schema[word] for word in _DEFINITIONS if word in schema}
    for _ in range(DEPTH_MAX):
        for place, part in _parts(schema):
            if _reason(_failure({**definitions, **part}, vocabulary)) == _reason(message):
                field, schema = f"{field}.{place}"[:PLACE_CHARS_MAX], part
                break
        else:
            break
    return field, message


def _reason(message: str) -> str:
    """Why, without names and places: addresses of references are other ones in a part."""
    return _PLACE.sub("", _QUOTED.sub("", _said(message)))


def _failure(schema: Mapping[str, Any], vocabulary: Vocabulary) -> str:
    """Why a schema cannot be built; empty: it can."""
    try:
        check_grammar(vocabulary, f"start: {schema_of(schema)}")
    except BadInput as error:
        return error.message
    return ""


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas within `schema`, by their places; definitions first, before what refers to them."""
    for word, value in sorted(schema.items(), key=lambda item: item[0] not in _DEFINITIONS):
        if word in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, Mapping):
            yield from ((f"{word}.{name}", part) for name, part in value.items() if isinstance(part, dict))
        elif word in ("items", "additionalProperties", "not", "if", "then", "else", "contains"):
            yield from [(word, value)] if isinstance(value, dict) else []
        elif word in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield from ((f"{word}[{number}]", part) for number, part in enumerate(value) if isinstance(part, dict))


def _said(message: str) -> str:
    """What the library says, without its place in a grammar of ours, and in one line."""
    said = message.partition(_OF_SCHEMAS)[2] or message
    return " ".join(_EXCERPT.sub("", said).split())


def _words(message: str, *, has_place: bool) -> str:
    """The same in words of ours where the library's are about its settings. `has_place`: its place is one in the
    client's grammar."""
    said = _said(message)
    said = said if has_place else _AT.sub("", said)
    for pattern, words in _OURS:
        said = pattern.sub(words, said)
    return said[: 3 * VALUE_CHARS_MAX]


@lru_cache(2)
def _vocabulary(size: int, ends: tuple[int, ...], special: tuple[tuple[str, int], ...]) -> Vocabulary:
    return bytes_vocabulary(size, ends, dict(special))


if __name__ == "__main__":
    os.nice(NICENESS)
    share_fairly()
    serve(_checked, frames=1, stack_bytes=STACK_BYTES)
