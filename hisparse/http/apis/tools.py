"""Tools, earlier calls and media in bodies of all APIs: limits and refusals. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from hisparse.http.apis.decoding import UNDECODABLE, decoded, is_deeper
from hisparse.http.errors import VALUE_CHARS_MAX
from hisparse.http.models.formats.conversation import PastCall, Tool
from hisparse.http.models.formats.scanning import NAME, NAME_CHARS_MAX
from protocol.errors import BadInput

#: JSON of all tools of a body: agents send a hundred, with long descriptions.
TOOLS_BYTES_MAX: Final = 1024 * 1024
#: JSON of the arguments of all earlier calls of a body, which becomes twenty times as much in memory.
ARGUMENTS_BYTES_MAX: Final = 2 * 1024 * 1024

#: Levels of the arguments of an earlier call, within those that the encoders of JSON can write.
ARGUMENT_LEVELS_MAX: Final = 400
#: The name under which a model is shown earlier arguments that are no JSON object.
ARGUMENTS: Final = "arguments"

#: Of the kinds that were skipped, in the header that names them.
HEADER_CHARS_MAX: Final = 2_048

#: Choices that want a call, of any tool.
MUST_CALL: Final = ("required", "any")

#: What content parts of other kinds are called.
MEDIA: Final[Mapping[str, str]] = {
    **dict.fromkeys(("image_url", "image", "input_image"), "images are"),
    **dict.fromkeys(("input_audio", "audio"), "audio is"),
    **dict.fromkeys(("file", "document", "input_file"), "files are"),
    "video_url": "video is",
}


def check_tools(tools: Sequence[Tool], names: Sequence[str]) -> None:
    """Raises BadInput for a name that is none, or another's too. `names` are the fields of their names."""
    seen: set[str] = set()
    for tool, field in zip(tools, names, strict=True):
        check_name(tool.name, field)
        if tool.name in seen:
            raise BadInput("is the name of another tool too", field=field, value=tool.name, remedy="rename one of them")
        seen.add(tool.name)


def check_name(name: str, field: str) -> None:
    if not name or not NAME.fullmatch(name):
        text = f"has 1 to {NAME_CHARS_MAX} letters, digits and _ - . : /"
        raise BadInput(text, field=field, value=name[:VALUE_CHARS_MAX], remedy="rename the tool")


class Skipped:
    """Kinds of tools and of their calls and results that a body has and this server has not: they are left out, and the
    answer names them."""

    def __init__(self) -> None:
        self._kinds: dict[str, None] = {}

    def add(self, kind: str, field: str) -> None:
        """Raises BadInput for a kind that no header can name."""
        if not NAME.fullmatch(kind):
            text = "is the name of no kind"
            raise BadInput(text, field=field, value=kind[:VALUE_CHARS_MAX], remedy="use function, or leave it out")
        self._kinds[kind] = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._kinds)


def named_in_header(kinds: Sequence[str]) -> dict[str, str]:
    """The header of an answer that names what the model was not shown."""
    return {"hisparse-ignored": ", ".join(kinds)[:HEADER_CHARS_MAX]} if kinds else {}


class Typed(msgspec.Struct, frozen=True):
    """Any object that may say its type."""

    type: str | None = None


_TYPED: Final = msgspec.json.Decoder(Typed)  # before threads use it: body.prepare


def kind_of(raw: msgspec.Raw, field: str) -> str:
    """The type that an object says, "" where it says none. Raises BadInput."""
    said: Typed = decoded(raw, Typed, field, is_free=False)
    return said.type or ""


class AllowedTool(msgspec.Struct, frozen=True):
    """A tool that a choice allows: of a function its name, in chats within `function`."""

    type: str = "function"
    name: str = ""
    function: AllowedTool | None = None


def names_in(allowed: Sequence[AllowedTool]) -> tuple[str, ...]:
    """The functions among the allowed tools; others are skipped where they are tools."""
    return tuple((tool.function or tool).name for tool in allowed if tool.type == "function")


S = TypeVar("S")


def functions_in(
    tools: Sequence[msgspec.Raw], kind: type[S], named: str, skipped: Skipped, field: str = "tools"
) -> list[tuple[str, S]]:
    """The tools of type `named`, or of none, as `kind`, each with its field. Raises BadInput."""
    found: list[tuple[str, S]] = []
    for number, raw in enumerate(tools):
        where = f"{field}[{number}]"
        said = kind_of(raw, where)
        if said in (named, ""):
            found.append((where, decoded(raw, kind, where)))
        else:
            skipped.add(said, f"{where}.type")
    return found


@dataclass(frozen=True)
class CallChoice:
    """The calls that a body wants: `mode` is auto, none, or one of MUST_CALL; `called` the only tool to call; `allowed`
    those that the model is shown, None for all. `field` is where it says so."""

    mode: str = "auto"
    called: str = ""
    allowed: tuple[str, ...] | None = None
    field: str = "tool_choice"

    @property
    def must_call(self) -> bool:
        return bool(self.called) or self.mode in MUST_CALL


def shown_tools(tools: Sequence[tuple[Tool, str]], choice: CallChoice, skipped: Skipped) -> dict[str, Any]:
    """The fields of a Conversation that say which tools the model is shown, of all `tools`, each with the field of its
    parameters, and whether it must call one. Raises BadInput."""
    names = {tool.name for tool, _ in tools}
    for name in (choice.called, *(choice.allowed or ())):
        if name and name not in names:
            value, remedy = name[:VALUE_CHARS_MAX], "name one of the tools, or send it with them"
            raise BadInput(f"is the name of no tool{_besides(skipped)}", field=choice.field, value=value, remedy=remedy)
    shown = [(tool, field) for tool, field in tools if choice.allowed is None or tool.name in choice.allowed]
    if choice.mode in MUST_CALL and not shown:
        text, remedy = f"needs a tool to call{_besides(skipped)}", "send tools, or use auto"
        raise BadInput(text, field=choice.field, value=choice.mode, remedy=remedy)
    shown = [] if choice.mode == "none" else shown
    return {
        "tools": tuple(tool for tool, _ in shown),
        "parameters": tuple(field for _, field in shown),
        "must_call": choice.must_call,
        "called": choice.called,
    }


def _besides(skipped: Skipped) -> str:
    kinds = ", ".join(skipped.kinds)[:VALUE_CHARS_MAX]
    return f" that is a function, and {kinds} is skipped here" if kinds else ""


def refuse_media(kind: str, field: str) -> BadInput:
    """Make the refusal of a content part that is no text."""
    text = f"{MEDIA.get(kind, f'{kind} is')} not supported: the model reads text"
    return BadInput(text, field=field, value=kind[:VALUE_CHARS_MAX], remedy="send text")


class Arguments:
    """The arguments and the ids of the earlier calls of one body."""

    def __init__(self) -> None:
        self._bytes = 0
        self._called: set[str] = set()

    def call(self, call_id: str, name: str, arguments: bytes, field: str) -> PastCall:
        """A call whose `arguments`, at `field`, are a JSON object. Raises BadInput, also past ARGUMENTS_BYTES_MAX."""
        self._count(call_id, len(arguments), field)
        if not isinstance(said := _value_of(arguments), dict):
            raise BadInput("expected an object", field=field, remedy="send a JSON object")
        return PastCall(call_id, name, _shallow(said, arguments))

    def call_of_text(self, call_id: str, name: str, arguments: str, field: str) -> PastCall:
        """A call whose `arguments` are any text, as the reference has them. A text that is no JSON object is shown to
        the model as an object with that text. Raises BadInput, likewise."""
        data = arguments.encode(errors="replace")
        self._count(call_id, len(data), field)
        said = _value_of(data) if data.strip() else None
        if said is not None and not isinstance(said, dict):
            return PastCall(call_id, name, {ARGUMENTS: arguments})
        return PastCall(call_id, name, _shallow(said or {}, data))

    def _count(self, call_id: str, size: int, field: str) -> None:
        self._called.add(call_id)
        self._bytes += size
        if self._bytes > ARGUMENTS_BYTES_MAX:
            text = f"the arguments of all calls have more than {ARGUMENTS_BYTES_MAX} bytes"
            raise BadInput(text, field=field, remedy="shorten them, or leave earlier turns out")

    def result(self, call_id: str, field: str) -> str:
        """Return `call_id` of a result. Raises BadInput, naming its `field`, where no call before it has that id."""
        if call_id not in self._called:
            value, remedy = call_id[:VALUE_CHARS_MAX], "send the call before its result, or leave the result out"
            raise BadInput("is the result of no call", field=field, value=value, remedy=remedy)
        return call_id


def _value_of(data: bytes) -> Any:
    """Read JSON; a text that is none is itself the value."""
    try:
        return msgspec.json.decode(data)
    except UNDECODABLE:
        return data.decode(errors="replace")


def _shallow(said: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Return what templates can be given: `said`, or its text where it has more levels."""
    if data.count(b"[") + data.count(b"{") <= ARGUMENT_LEVELS_MAX or not is_deeper(said, ARGUMENT_LEVELS_MAX):
        return said
    return {ARGUMENTS: data.decode(errors="replace")}
