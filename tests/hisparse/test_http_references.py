"""Fields of the references: each one that the packages openai and anthropic declare is taken, ignored, or refused by a
rule, and each verdict is true of the types that read bodies."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Required

import pytest
from typing_extensions import TypedDict

from hisparse.http.apis.body import read_body
from hisparse.http.apis.fields import ACCOUNT, HINT, REPEAT
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.models.formats.conversation import Conversation
from protocol.errors import BadInput
from tests.support import references
from tests.support.references import REFERENCES, Row, mended, rows_of

ROWS: dict[str, list[Row]] = {name: list(rows_of(name)) for name in REFERENCES}


@pytest.mark.parametrize("name", REFERENCES)
def test_every_field_of_a_reference_has_a_verdict(name: str) -> None:
    """`unknown` are fields of a newer package: give each a type, a reason or a rule."""
    rows = ROWS[name]
    assert [row.path for row in rows if row.verdict == "unknown"] == []
    assert {row.why for row in rows if row.verdict == "ignored"} <= {ACCOUNT, REPEAT, HINT}
    assert all(row.why for row in rows if row.verdict == "refused")
    assert len(rows) > 20


@pytest.mark.parametrize("name", REFERENCES)
def test_verdicts_are_true(name: str) -> None:
    kind: Any = REFERENCES[name][1]
    for row in ROWS[name]:
        said = mended(row.body, kind)
        refusal, conversation = read(kind, said)
        assert (refusal is not None) == (row.verdict == "refused"), (row.path, row.verdict, refusal, said)
        assert refusal is None or names(refusal.field, row.path), (row.path, refusal, said)
        if row.verdict == "skipped":
            assert conversation is not None
            assert len(conversation.skipped) == 1, row.path


def names(field: str, path: str) -> bool:
    """Tell whether a refusal of `field` is one of what `path` names: of the field itself, or, where a kind of object is
    named, of the object or one field of it."""
    words, wanted = words_of(field), words_of(path)
    if not path.endswith("]"):
        return words == wanted
    return words[: len(wanted)] == wanted and len(words) <= len(wanted) + 1


def words_of(path: str) -> list[str]:
    """The names of fields in a path, without places, kinds and values."""
    return re.sub(r"\[[^]]*\]|=.*", "", path).split(".")


@pytest.mark.parametrize(
    ("field", "path", "is_named"),
    [
        ("messages[1].clear_at", "messages[system].clear_at", True),
        ("messages[1].content", "messages[system].clear_at", False),
        ("messages[1].content[0].type", "messages[user].content[image]", True),
        ("tools", "messages[user].content[image]", False),
        ("messages", "messages[user].content[image]", False),
        ("messages[1].content[0].source.url", "messages[user].content[image]", False),
    ],
)
def test_refusals_of_another_field_are_told_apart(field: str, path: str, is_named: bool) -> None:
    assert names(field, path) == is_named


def read(kind: Any, said: dict[str, Any]) -> tuple[BadInput | None, Conversation | None]:
    """The refusal of a body, or its conversation."""
    try:
        body: Any = read_body(json.dumps(said).encode(), kind)
        return None, body.generation().conversation if hasattr(body, "generation") else body.conversation()
    except BadInput as error:
        return error, None


@pytest.mark.parametrize(
    ("name", "path", "verdict"),
    [
        ("openai.chat", "messages[assistant].content[refusal].refusal", "taken"),
        ("openai.chat", "messages[user].content[text].prompt_cache_breakpoint", "ignored"),
        ("openai.chat", "reasoning_effort=max", "taken"),
        ("openai.chat", "tools[custom]", "skipped"),
        ("openai.responses", "input[web_search_call]", "skipped"),
        ("openai.responses", "tools[local_shell]", "skipped"),
        ("openai.responses", "moderation", "ignored"),
        ("anthropic.messages", "tools[custom].defer_loading", "ignored"),
        ("anthropic.messages", "thinking[between_tools].type=between_tools", "taken"),
        ("anthropic.messages", "messages[assistant].content[tool_use].toolset_name", "ignored"),
        ("anthropic.messages", "messages[user].content[image]", "refused"),
        ("anthropic.beta.messages", "context_management.edits[clear_tool_uses_20250919]", "refused"),
    ],
)
def test_comparison_reaches_nested_fields(name: str, path: str, verdict: str) -> None:
    assert [row.verdict for row in ROWS[name] if row.path == path][:1] == [verdict]


class NewerMessage(TypedDict, total=False):
    content: str
    role: Literal["user"]
    mood: str


class NewerBody(TypedDict, total=False):
    messages: Required[list[NewerMessage]]
    reasoning_effort: Literal["low", "boundless"]
    weather: str


def test_new_field_of_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the top, in a message, and a value."""
    monkeypatch.setitem(references.REFERENCES, "newer", (NewerBody, ChatBody))
    unknown = [row.path for row in rows_of("newer") if row.verdict == "unknown"]
    assert unknown == ["messages[user].mood", "reasoning_effort=boundless", "weather"]
