"""A conversation as all APIs mean it: turns, tools, and what the reply may hold. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from protocol.errors import BadInput

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

NOTHING: Final[Mapping[str, Any]] = {}
#: What the model reads in place of a result that the client did not send.
NO_RESULT: Final = "This call has no result."


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
        """The tool as OpenAI writes a function, which both models were trained on."""
        said = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"name": self.name} | {name: value for name, value in said.items() if value is not None}


_DISABLED: Final = "disabled"


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
        """True where calls after the first are calls, too."""
        return self.parallel and not self.called

    @property
    def answers_at_once(self) -> bool:
        """True where the client wants no reasoning."""
        return self.all_variables.get("thinking_mode") == _DISABLED

    @property
    def keeps_thinking(self) -> bool:
        """Return whether the reasoning of all turns is rendered, and not that behind the last user's turn alone."""
        return self.variables.get("clear_thinking") is False

    @property
    def all_variables(self) -> dict[str, Any]:
        """All names by which templates know whether to reason, and what the client set."""
        said = {} if self.thinking is None else {"enable_thinking": self.thinking, "thinking": self.thinking}
        said |= dict(self.variables)
        at_once = said.get("enable_thinking", said.get("thinking")) is False
        return said | ({"thinking_mode": _DISABLED} if at_once else {})


def kept_thinking(keeps: bool) -> dict[str, bool]:
    """The variable by which templates such as GLM's know whether to render the reasoning of earlier turns."""
    return {"clear_thinking": not keeps}


def arranged(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Each turn that calls, then a result of each call in the order of the calls, then what else was said before the
    assistant's next turn: the formats have no ids. NO_RESULT stands for a result that is missing where anything follows
    the call. Raises BadInput for a result of no call."""
    ordered: list[Turn] = []
    exchanges = list(_exchanges(turns))
    for exchange in exchanges:
        calls, came = exchange[0].calls, [turn for turn in exchange if turn.role == "tool"]
        results = _results(calls, came)
        if len(results) < len(came):
            taken = {id(result) for result in results.values()}
            place = [id(turn) for turn in turns].index(next(id(it) for it in came if id(it) not in taken))
            raise refused_turn("is the result of no call", place, "put it behind the assistant's turn that calls")
        ordered.append(exchange[0])
        if len(exchange) > 1 or exchange is not exchanges[-1]:
            missing = (Turn("tool", NO_RESULT, call_id=call.id) for call in calls)
            ordered += [results.get(place, turn) for place, turn in enumerate(missing)]
        ordered += [turn for turn in exchange[1:] if turn.role != "tool"]
    return tuple(ordered)


def refused_turn(why: str, at: int, remedy: str) -> BadInput:
    return BadInput(f"turn {at + 1} {why}", field="messages", remedy=remedy)


def _exchanges(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """A turn of the assistant with what follows it; before the first of them, what stands there."""
    exchange: list[Turn] = []
    for turn in turns:
        if exchange and turn.role == "assistant":
            yield exchange
            exchange = []
        exchange.append(turn)
    if exchange:
        yield exchange


def _results(calls: Sequence[PastCall], results: Sequence[Turn]) -> dict[int, Turn]:
    """Results by the place of their call. One without an id is that of the next open call; one that names another call,
    or a call that has its result, is of none."""
    places: dict[str, list[int]] = {}
    for place in reversed(range(len(calls))):
        places.setdefault(calls[place].id, []).append(place)
    found: dict[int, Turn] = {}
    others: list[Turn] = []
    for result in results:
        if named := places.get(result.call_id):
            found[named.pop()] = result
        elif not result.call_id:
            others.append(result)
    return found | dict(zip((place for place in range(len(calls)) if place not in found), others, strict=False))


def template_messages(turns: Sequence[Turn], template: str) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: OpenAI's, but arguments are objects, and text is never null. A turn of
    `developer` is one of `system` for a `template` that does not name them: GLM's leaves them out. Raises BadInput."""
    names_developers = "developer" in template
    return [_message(turn, names_developers) for turn in arranged(turns)]


def _message(turn: Turn, names_developers: bool) -> dict[str, Any]:
    role = "system" if turn.role == "developer" and not names_developers else turn.role
    message: dict[str, Any] = {"role": role, "content": turn.text}
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
