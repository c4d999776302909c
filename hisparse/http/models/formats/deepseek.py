"""Conversations as DeepSeek-V3.2 was trained on them. Pure.

It ships no chat template, but a program that encodes and decodes, and examples of what that program makes (encoding/ in
its repository). This is written from those examples.

Calls are written in DSML:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

`string="true"`: the value is text as it stands; otherwise it is JSON. Results follow the turn that called, in the order
of its calls, and in one block. Reasoning is kept from the last user's turn on, and left out of earlier turns.

The format has a place for instructions at the beginning alone. Later ones are text of the user, in their place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from hisparse.http.models.formats.arguments import json_or_quoted, object_of, quoted
from hisparse.http.models.formats.call_grammars import any_of, expressions, members_of, optional
from hisparse.http.models.formats.conversation import Conversation, PastCall, Tool, Turn, arranged, refused_turn
from hisparse.http.models.formats.lark import Rules
from hisparse.http.models.formats.replies import THINK, THINK_END, CallSyntax, Schemas
from hisparse.http.models.formats.scanning import Reading, Scan, UnreadableOutput

DSML: Final = "｜DSML｜"
BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"

_CALLS: Final = f"<{DSML}function_calls>"
_CALLS_END: Final = f"</{DSML}function_calls>"
_INVOKE: Final = f'<{DSML}invoke name="'
_INVOKE_END: Final = f"</{DSML}invoke>"
_PARAMETER: Final = f'<{DSML}parameter name="'
_PARAMETER_END: Final = f"</{DSML}parameter>"
_IS_STRING: Final = '" string="'
_TAG_END: Final = '">'

#: What the model reads before the tools' schemas: part of its format, so to the letter.
_TOOLS: Final = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "{_CALLS}" block like the following as part of your reply to the user:
{_CALLS}
{_INVOKE}$FUNCTION_NAME">
{_PARAMETER}$PARAMETER_NAME{_IS_STRING}true|false">$PARAMETER_VALUE{_PARAMETER_END}
...
{_INVOKE_END}
{_INVOKE}$FUNCTION_NAME2">
...
{_INVOKE_END}
{_CALLS_END}

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

{_CALLS}
...
{_CALLS_END}

<function_results>
...
</function_results>

{THINK}...thinking about results{THINK_END}

Here are the functions available in JSONSchema format:
<functions>
"""
_TOOLS_END: Final = "\n</functions>\n"


# ---------------------------------------------------------------- what the model writes


def _read_call(scan: Scan, _: Schemas) -> Reading[tuple[str, str]]:
    """The call whose opening, up to its name, has been read. Raises UnreadableOutput."""
    name = yield from scan.name()
    yield from scan.expect('">')
    values: dict[str, str] = {}
    while (yield from scan.expect(_PARAMETER, _INVOKE_END)) == _PARAMETER:
        key = yield from scan.until(_IS_STRING)
        is_string = (yield from scan.expect('true">', 'false">')) == 'true">'
        value = yield from scan.until(_PARAMETER_END)
        if key in values:
            raise UnreadableOutput
        values[key] = quoted(value) if is_string else json_or_quoted(value)
    return name, object_of(values.items())


def call_grammar(rules: Rules, tools: Sequence[tuple[Tool, str]], many: bool) -> str:
    """Of a block with one call of `tools`, each with the field of its parameters, or with several. Raises BadInput."""
    call = rules.rule(any_of([_written(rules, tool, field) for tool, field in tools]))
    return f'{rules.literal(_CALLS)} "\\n" ({call} "\\n"){"+" if many else ""} {rules.literal(_CALLS_END)}'


def _written(rules: Rules, tool: Tool, field: str) -> str:
    parts = [rules.literal(f'{_INVOKE}{tool.name}">\n')]
    for member in members_of(tool, field):
        kinds = zip(("true", "false"), expressions(rules, member.values, _PARAMETER_END), strict=True)
        opening = f"{_PARAMETER}{member.name}{_IS_STRING}"
        said = [f"{rules.literal(opening + kind + _TAG_END)} {any_of(values)}" for kind, values in kinds if values]
        parts.append(optional(member, f'{any_of(said)} "\\n"'))
    return " ".join((*parts, rules.literal(_INVOKE_END)))


SYNTAX: Final = CallSyntax(_CALLS, _read_call, next_call=_INVOKE, block_end=_CALLS_END)


# ---------------------------------------------------------------- what it reads


def thinks(conversation: Conversation) -> bool:
    """Whether the model is to reason: only where the client asks for it, as DeepSeek's own service does."""
    said = conversation.all_variables
    return bool(said.get("thinking", said.get("enable_thinking", False)))


def encode(conversation: Conversation) -> str:
    """The prompt, up to where the assistant speaks. Raises BadInput for turns that the format cannot hold."""
    turns = list(_on_sides(arranged(conversation.turns)))
    if not turns or turns[-1].role not in _ANSWERED:
        remedy = "end with a turn of the user, or with a result"
        raise refused_turn("is nothing to answer", len(conversation.turns) - 1, remedy)
    thinking = thinks(conversation)
    last_user = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
    tools = "\n\n" + _tools(conversation.tools) if conversation.tools else ""
    pieces = [BOS, "" if turns[0].role in _INSTRUCTING else tools]
    for at, turn in enumerate(turns):
        opening = THINK if thinking and at >= last_user else THINK_END
        if turn.role == "user":
            pieces.append(f"{USER}{turn.text}{ASSISTANT}{opening}")
        elif turn.role == "tool":
            pieces += _result(turns, at, opening)
        elif turn.role == "assistant":
            if not at or turns[at - 1].role not in _ANSWERED:
                pieces.append(ASSISTANT + opening)
            pieces.append(_assistant(turn, thinking and at > last_user))
        else:
            pieces.append(turn.text + tools)
    return "".join(pieces)


#: Roles of instructions, and of turns behind which the assistant speaks.
_INSTRUCTING: Final = ("system", "developer")
_ANSWERED: Final = ("user", "tool")


def _on_sides(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Instructions on the user's side, as part of a turn of the user beside them or as one of their own: the format has
    a place for them before all other turns alone."""
    head = 1 if len(turns) > 1 and turns[0].role in _INSTRUCTING else 0
    yield from turns[:head]
    group: list[Turn] = []
    speaking = ""  # who speaks in the group: "user" once a user does
    for turn in turns[head:]:
        role = "system" if turn.role in _INSTRUCTING else turn.role
        if group and {speaking, role} not in ({"system"}, {"system", "user"}):
            yield _joined(group)
            group, speaking = [], ""
        group.append(turn)
        speaking = "user" if "user" in (speaking, role) else role
    if group:
        yield _joined(group)


def _joined(group: Sequence[Turn]) -> Turn:
    if len(group) == 1 and group[0].role not in _INSTRUCTING:
        return group[0]
    return Turn("user", "\n\n".join(turn.text for turn in group))


def _tools(tools: Sequence[Tool]) -> str:
    return _TOOLS + "\n".join(_json(tool.schema) for tool in tools) + _TOOLS_END


def _assistant(turn: Turn, reasons: bool) -> str:
    reasoning = turn.reasoning + THINK_END if reasons else ""
    calls = f"\n\n{_CALLS}\n" + "\n".join(map(_call, turn.calls)) + f"\n{_CALLS_END}" if turn.calls else ""
    return f"{reasoning}{turn.text}{calls}{EOS}"


def _call(call: PastCall) -> str:
    lines = [_parameter(key, value) for key, value in call.arguments.items()]
    return f'{_INVOKE}{call.name}">\n' + "\n".join(lines) + f"\n{_INVOKE_END}"


def _parameter(key: str, value: object) -> str:
    is_string = isinstance(value, str)
    text = value if is_string else _json(value)
    return f'{_PARAMETER}{key}{_IS_STRING}{"true" if is_string else "false"}">{text}{_PARAMETER_END}'


def _result(turns: Sequence[Turn], at: int, opening: str) -> Iterator[str]:
    """The first of a block opens it, the last closes it."""
    if turns[at - 1].role != "tool":
        yield "\n\n<function_results>"
    yield f"\n<result>{turns[at].text}</result>"
    if at + 1 == len(turns) or turns[at + 1].role != "tool":
        yield f"\n</function_results>\n\n{opening}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
