"""What bodies of all APIs say of tools, of earlier calls and of media: limits and refusals. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hisparse.http.apis.decoding import decoded
from hisparse.http.errors import VALUE_CHARS_MAX
from hisparse.http.models.formats.conversation import PastCall, Tool
from hisparse.http.models.formats.scanning import NAME, NAME_CHARS_MAX
from protocol.errors import BadInput

#: JSON of all tools of a body: agents send a hundred, with long descriptions.
TOOLS_BYTES_MAX: Final = 1024 * 1024
#: JSON of the arguments of all earlier calls of a body, which becomes twenty times as much in memory.
ARGUMENTS_BYTES_MAX: Final = 2 * 1024 * 1024

#: Choices that want a call, of any tool.
MUST_CALL: Final = ("required", "any")

#: What content parts of other kinds are called.
MEDIA: Final[Mapping[str, str]] = {
    **dict.fromkeys(("image_url", "image", "input_image"), "images are"),
    **dict.fromkeys(("input_audio", "audio"), "audio is"),
    **dict.fromkeys(("file", "document", "input_file"), "files are"),
    "video_url": "video is",
}


def checked_tools(tools: Sequence[Tool], names: Sequence[str]) -> tuple[Tool, ...]:
    """`names` are the fields of their names. Raises BadInput."""
    seen: set[str] = set()
    for tool, field in zip(tools, names, strict=True):
        check_name(tool.name, field)
        if tool.name in seen:
            raise BadInput("is the name of another tool too", field=field, value=tool.name, remedy="rename one of them")
        seen.add(tool.name)
    return tuple(tools)


def check_name(name: str, field: str) -> None:
    if not name or not NAME.fullmatch(name):
        text = f"has 1 to {NAME_CHARS_MAX} letters, digits and _ - . : /"
        raise BadInput(text, field=field, value=name[:VALUE_CHARS_MAX], remedy="rename the tool")


def check_choice(tools: Sequence[Tool], field: str, choice: str, called: str) -> None:
    """Raises BadInput for a choice that must call a tool, or the one that is `called`, where there is none."""
    if called and all(tool.name != called for tool in tools):
        remedy = "name one of the tools, or send it with them"
        raise BadInput("is the name of no tool", field=field, value=called[:VALUE_CHARS_MAX], remedy=remedy)
    if choice in MUST_CALL and not tools:
        raise BadInput("needs a tool to call", field=field, value=choice, remedy="send tools, or use auto")


def refuse_media(kind: str, field: str) -> BadInput:
    """Of a content part that is no text."""
    text = f"{MEDIA.get(kind, f'{kind} is')} not supported: the model reads text"
    return BadInput(text, field=field, value=kind[:VALUE_CHARS_MAX], remedy="send text")


class Arguments:
    """The arguments and the ids of the earlier calls of one body."""

    def __init__(self) -> None:
        self._bytes = 0
        self._called: set[str] = set()

    def call(self, call_id: str, name: str, arguments: bytes, field: str) -> PastCall:
        """`arguments` is a JSON object, `field` where it is. Raises BadInput, also past ARGUMENTS_BYTES_MAX."""
        self._bytes += len(arguments)
        if self._bytes > ARGUMENTS_BYTES_MAX:
            text = f"the arguments of all calls have more than {ARGUMENTS_BYTES_MAX} bytes"
            raise BadInput(text, field=field, remedy="shorten them, or leave earlier turns out")
        said: dict[str, Any] = decoded(arguments, dict[str, Any], field) if arguments.strip() else {}
        self._called.add(call_id)
        return PastCall(call_id, name, said)

    def result(self, call_id: str, field: str) -> str:
        """Return `call_id` of a result. Raises BadInput, naming its `field`, where no call before it has that id."""
        if call_id not in self._called:
            value, remedy = call_id[:VALUE_CHARS_MAX], "send the call before its result, or leave the result out"
            raise BadInput("is the result of no call", field=field, value=value, remedy=remedy)
        return call_id
