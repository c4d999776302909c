"""Items of a response's input, as OpenAI has them, and the turns that they are. Pure.

Clients send output items back as they got them. Items of tools that are no functions are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from hisparse.http.apis.decoding import decoded
from hisparse.http.apis.fields import Account, Hint, Repeat, unread
from hisparse.http.apis.tools import Arguments, Skipped, kind_of, refuse_media
from hisparse.http.models.formats.conversation import PastCall, Role, Turn
from protocol.errors import BadInput


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="input_text", tag_field="type"):
    text: str
    prompt_cache_breakpoint: Account = unread()


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="output_text", tag_field="type"):
    text: str
    annotations: Repeat = unread()
    logprobs: Repeat = unread()
    parsed: Repeat = unread()


class RefusalText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal", tag_field="type"):
    """The assistant's words, of a model that marks its refusals."""

    text: str = msgspec.field(name="refusal")


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reasoning_text", tag_field="type"):
    text: str


class InputImage(msgspec.Struct, frozen=True, tag="input_image", tag_field="type"):
    """Refused, as the next two."""


class InputFile(msgspec.Struct, frozen=True, tag="input_file", tag_field="type"):
    pass


class InputAudio(msgspec.Struct, frozen=True, tag="input_audio", tag_field="type"):
    pass


Part: TypeAlias = InputText | OutputText | RefusalText | ReasoningText | InputImage | InputFile | InputAudio


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of any type: each has some of the fields."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | UnsetType | None = UNSET
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None

    summary: Repeat = unread()
    id: Repeat = unread()
    status: Repeat = unread()
    phase: Repeat = unread()
    encrypted_content: Repeat = unread()
    parsed_arguments: Repeat = unread()
    namespace: Repeat = unread()
    caller: Repeat = unread()
    runs_async: Hint = unread("async")


#: Calls and results of tools that are no functions.
OF_OTHER_TOOLS: Final = (
    *("apply_patch_call", "apply_patch_call_output"),
    *("code_interpreter_call", "computer_call", "computer_call_output"),
    *("custom_tool_call", "custom_tool_call_output", "file_search_call", "image_generation_call"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
    *("program", "program_output", "tool_search_call", "tool_search_output", "web_search_call"),
)


def items_in(said: Sequence[msgspec.Raw], skipped: Skipped) -> Iterator[tuple[str, Item]]:
    """The items, each with its field. Raises BadInput."""
    for at, raw in enumerate(said):
        where = f"input[{at}]"
        if (kind := kind_of(raw, where)) in OF_OTHER_TOOLS:
            skipped.add(kind, f"{where}.type")
        else:
            yield where, decoded(raw, Item, where, is_free=False)


def turns_of(items: Iterator[tuple[str, Item]]) -> Iterator[Turn]:
    """Reasoning, text and calls that follow one another are one turn of the assistant. Raises BadInput."""
    arguments = Arguments()
    said: list[Turn] = []  # parts of the assistant's turn
    for where, item in items:
        turn = _turn(item, where, arguments)
        if turn.role == "assistant":
            said.append(turn)
            continue
        yield from _joined(said)
        said = []
        yield turn
    yield from _joined(said)


def _joined(parts: Sequence[Turn]) -> Iterator[Turn]:
    if parts:
        text = "".join(part.text for part in parts)
        reasoning = "".join(part.reasoning for part in parts)
        yield Turn("assistant", text, reasoning, tuple(call for part in parts for call in part.calls))


def _turn(item: Item, where: str, arguments: Arguments) -> Turn:
    if item.type == "function_call":
        return Turn("assistant", calls=(_past_call(item, where, arguments),))
    if item.type == "function_call_output":
        output = _required(item.output, f"{where}.output")
        call_id = arguments.result(_required(item.call_id, f"{where}.call_id"), f"{where}.call_id")
        return Turn("tool", _text(output, f"{where}.output"), call_id=call_id)
    if item.type == "reasoning":
        return Turn("assistant", reasoning=_text(item.content, f"{where}.content"))
    role: Role = _required(item.role, f"{where}.role")
    if item.content is UNSET:
        raise BadInput("is missing", field=f"{where}.content", remedy="add it")
    return Turn(role, _text(item.content, f"{where}.content"))


def _past_call(item: Item, where: str, arguments: Arguments) -> PastCall:
    name, said = _required(item.name, f"{where}.name"), item.arguments or ""
    return arguments.call_of_text(_required(item.call_id, f"{where}.call_id"), name, said, f"{where}.arguments")


def _required(value: Any, field: str) -> Any:
    if value is None:
        raise BadInput("is missing", field=field, remedy="add it")
    return value


def _text(content: str | list[Part] | UnsetType | None, where: str) -> str:
    if content is None or isinstance(content, UnsetType):
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, InputImage | InputFile | InputAudio):
            raise refuse_media(str(part.__struct_config__.tag), f"{where}[{number}].type")
        texts.append(part.text)
    return "".join(texts)
