"""A conversation as all APIs mean it: turns, tools, and what the reply may hold. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

NOTHING: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True)
class PastCall:
    """A call that the assistant made in an earlier turn."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """`calls` are of the assistant; `call_id` is of a tool's result, "" where its client sends none."""

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True)
class Tool:
    """`parameters` is a JSON schema of an object. `strict`, where the client sent it, is part of what models read."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI writes a function, which both models were trained on."""
        said = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"name": self.name} | {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True)
class Conversation:
    """`turns` to continue. `tools` are those that the model is shown: none where it may call none. `parameters` are the
    fields of theirs, in the body.

    `parallel`: the reply may hold several calls. `must_call`: it holds calls and no text; with `called`, one of that
    tool. `thinking`: whether the model is to reason first; None: as its template has it. `variables` are further ones
    of the chat template, and come before `thinking`. `skipped` are the kinds of tools, calls and results that the body
    has and the model is not shown, `cleared` the reasoning that the client wants left out, by turn; None: it said
    nothing of that.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    parameters: tuple[str, ...] = ()
    parallel: bool = True
    must_call: bool = False
    called: str = ""
    thinking: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    cleared: tuple[str, ...] | None = None

    @property
    def many(self) -> bool:
        """Whether calls after the first are calls."""
        return self.parallel and not self.called

    @property
    def answers_at_once(self) -> bool:
        """Whether the client wants no reasoning."""
        said = self.all_variables
        return said.get("enable_thinking", said.get("thinking")) is False

    @property
    def keeps_thinking(self) -> bool:
        """Return whether the reasoning of all turns is rendered, and not that behind the last user's turn alone."""
        return self.variables.get("clear_thinking") is False

    @property
    def all_variables(self) -> dict[str, Any]:
        """Both names by which templates know whether to reason, and what the client set."""
        said = {} if self.thinking is None else {"enable_thinking": self.thinking, "thinking": self.thinking}
        return said | dict(self.variables)


def kept_thinking(keeps: bool) -> dict[str, bool]:
    """The variable by which templates such as GLM's know whether to render the reasoning of earlier turns."""
    return {"clear_thinking": not keeps}


def in_call_order(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Results of one turn's calls in the order of the calls: the formats have no ids. Where a result names no call of
    that turn, they stay as they came."""
    ordered: list[Turn] = []
    for came in _groups(turns):
        group = came
        asked = {call.id: number for number, call in enumerate(ordered[-1].calls)} if ordered else {}
        if group[0].role == "tool" and all(turn.call_id in asked for turn in group):
            group = sorted(group, key=lambda turn: asked[turn.call_id])
        ordered += group
    return tuple(ordered)


def _groups(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Runs of tools' results together, every other turn alone."""
    group: list[Turn] = []
    for turn in turns:
        if group and (turn.role != "tool" or group[0].role != "tool"):
            yield group
            group = []
        group.append(turn)
    if group:
        yield group


def template_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """As chat templates expect them: OpenAI's messages, but arguments are objects, and text is never null."""
    return [_message(turn) for turn in in_call_order(turns)]


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.calls
        ]
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    return message


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """None: there are none, which is how templates ask for them."""
    return [{"type": "function", "function": tool.schema} for tool in tools] or None
