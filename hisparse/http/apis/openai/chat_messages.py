"""Messages of chats, as OpenAI has them, and the turns that they are. Pure.

Clients send answers back as they got them, or as their packages and routers store them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from hisparse.http.apis.fields import Account, Repeat, Rule, Rules, unread
from hisparse.http.apis.tools import Arguments, refuse_media
from hisparse.http.models.formats.conversation import PastCall, Turn
from protocol.errors import BadInput


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str
    prompt_cache_breakpoint: Account = unread()
    cache_control: Account = unread()


class RefusalPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal", tag_field="type"):
    """The assistant's words, of a model that marks its refusals."""

    refusal: str


class ImagePart(msgspec.Struct, frozen=True, tag="image_url", tag_field="type"):
    """Refused, as the next three."""


class AudioPart(msgspec.Struct, frozen=True, tag="input_audio", tag_field="type"):
    pass


class FilePart(msgspec.Struct, frozen=True, tag="file", tag_field="type"):
    pass


class VideoPart(msgspec.Struct, frozen=True, tag="video_url", tag_field="type"):
    pass


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`arguments` is a text, and most often a JSON object."""

    name: str
    arguments: str | None
    parsed_arguments: Repeat = unread()


class MessageCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    refused: ClassVar[Rules] = {"custom": Rule("only functions are called here", "send the call of a function")}

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: Repeat = unread()


Part: TypeAlias = TextPart | RefusalPart | ImagePart | AudioPart | FilePart | VideoPart


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of any role."""

    refused: ClassVar[Rules] = {
        "audio": Rule("the model reads text", "send its transcript as content"),
        "function_call": Rule("it is now tool_calls", "use tool_calls"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | UnsetType | None = UNSET
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None

    name: Repeat = unread()
    parsed: Repeat = unread()
    annotations: Repeat = unread()
    cache_control: Account = unread()


def turns_of(messages: Sequence[ChatMessage]) -> Iterator[Turn]:
    """Raises BadInput."""
    arguments = Arguments()
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        _check_fields(message, where)
        calls = (
            _past_call(call, arguments, f"{where}.tool_calls[{number}].function")
            for number, call in enumerate(message.tool_calls or ())
        )
        yield Turn(
            message.role,
            _text(message, f"{where}.content") + (message.refusal or ""),
            message.reasoning_content or "",
            tuple(calls),
            arguments.result(message.tool_call_id or "", f"{where}.tool_call_id") if message.role == "tool" else "",
        )


def _past_call(call: MessageCall, arguments: Arguments, field: str) -> PastCall:
    said = call.function.arguments or ""
    return arguments.call_of_text(call.id, call.function.name, said, f"{field}.arguments")


#: Fields that only messages of one role have.
_OF_ROLE: Final = {
    "reasoning_content": "assistant",
    "refusal": "assistant",
    "tool_calls": "assistant",
    "tool_call_id": "tool",
}


def _check_fields(message: ChatMessage, where: str) -> None:
    for field, role in _OF_ROLE.items():
        if getattr(message, field) and message.role != role:
            raise BadInput(f"is for messages of role {role}", field=f"{where}.{field}", remedy="leave it out")
    if message.role == "tool" and message.tool_call_id is None:
        raise BadInput("is missing", field=f"{where}.tool_call_id", remedy="add it: the id of the call")


def _text(message: ChatMessage, field: str) -> str:
    content = message.content
    if content is UNSET and message.role != "assistant":
        raise BadInput("is missing", field=field, remedy="add it")
    if content is None or isinstance(content, UnsetType):
        return ""
    if isinstance(content, str):
        return content
    return "".join(_part(part, message.role, f"{field}[{number}].type") for number, part in enumerate(content))


def _part(part: Part, role: str, field: str) -> str:
    if isinstance(part, TextPart):
        return part.text
    if not isinstance(part, RefusalPart):
        raise refuse_media(str(part.__struct_config__.tag), field)
    if role != "assistant":
        raise BadInput("is for messages of role assistant", field=field, value="refusal", remedy="send it as text")
    return part.refusal
