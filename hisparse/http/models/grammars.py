"""From what a body asks of the form of an output to a grammar over all of it: reasoning, then calls or a text. Pure.

    start: [<think> reasoning </think>] text by the structure | calls
    start: [<think> reasoning </think>] calls                               where a tool must be called

A grammar of the client's keeps its rules apart from ours: it is one of llguidance's named grammars then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from hisparse.http.models.formats.call_grammars import any_of
from hisparse.http.models.formats.conversation import Conversation
from hisparse.http.models.formats.known import ChatFormat
from hisparse.http.models.formats.lark import Rules, quoted, regex, schema_of
from hisparse.http.models.formats.replies import PLAIN, ReplyPlan
from hisparse.http.models.output_form import OutputForm
from protocol.errors import BadInput
from protocol.messages import GRAMMAR_CHARS_MAX

#: Between reasoning and what follows it.
_BETWEEN: Final = r"/[ \n]{1,4}/"
_IS_LARK: Final = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)
_INNER: Final = "structure"


class GrammarPlan(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that is yet to be checked: `lark`, with `inner`, if any, as the grammar `structure` in it.

    `schemas` are the JSON schemas in it, by their fields: one of them may be to blame. `field` is, if none of them is.
    """

    lark: str
    field: str
    inner: str = ""
    is_gbnf: bool = False
    schemas: tuple[tuple[str, Any], ...] = ()

    def check_size(self) -> None:
        """Raises BadInput for more than workers take."""
        size = len(self.lark) + len(self.inner)
        if size > GRAMMAR_CHARS_MAX:
            text = f"makes a grammar of more than {GRAMMAR_CHARS_MAX} characters"
            raise BadInput(text, field=self.field, value=f"{size} characters", remedy="shorten it")

    def source(self, inner: str) -> str:
        """The grammar as workers take it, with `inner` in Lark's syntax."""
        if not inner:
            return self.lark
        parts = ({"lark_grammar": self.lark}, {"name": _INNER, "lark_grammar": inner})
        return json.dumps({"grammars": parts}, ensure_ascii=False)


def plan_of(
    structure: OutputForm | None,
    special: Mapping[str, int],
    conversation: Conversation | None = None,
    known: ChatFormat | None = None,
    reply: ReplyPlan = PLAIN,
    names: Sequence[str] = (),
) -> GrammarPlan | None:
    """None: any output will do. `special` are the special tokens by their texts, `names` the fields of the parameters
    of the conversation's tools, which are called in the words of `known`. Raises BadInput."""
    must_call = conversation is not None and conversation.must_call
    if structure is None and not must_call:
        return None
    rules, options, schemas = Rules(special), list[str](), list[tuple[str, Any]]()
    field, inner = "tools", ""
    if structure is not None and not must_call:
        field, inner = structure.field, structure.value if structure.kind == "grammar" else ""
        options.append(_text(structure))
        schemas += [(field, structure.value)] if structure.kind == "json" else []
    if conversation is not None and conversation.tools and known is not None and known.call_grammar is not None:
        tools = list(zip(conversation.tools, names, strict=True))
        called = [it for it in tools if conversation.called in ("", it[0].name)]
        options.append(known.call_grammar(rules, called, conversation.many))
        schemas += [(name, dict(tool.parameters)) for tool, name in called if tool.parameters]
    start = f"{_reasoning(rules, reply)} {any_of(options)}".strip()
    return GrammarPlan(rules.grammar(start), field, inner, bool(inner) and not _IS_LARK.search(inner), tuple(schemas))


def _text(structure: OutputForm) -> str:
    match structure.kind:
        case "json":
            return schema_of(structure.value)
        case "regex":
            return regex(structure.value)
        case "choice":
            return any_of([quoted(text) for text in structure.value])
        case "grammar":
            return f"@{_INNER}"


def _reasoning(rules: Rules, reply: ReplyPlan) -> str:
    """What stands before, in a reply that reasons."""
    if reply.is_within:
        return f"{rules.until(reply.think_end)} {_BETWEEN}?"
    if reply.may_reason:
        return f"({rules.literal(reply.think)} {rules.until(reply.think_end)} {_BETWEEN}?)?"
    return ""
