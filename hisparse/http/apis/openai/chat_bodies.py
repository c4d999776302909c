"""What POST /v1/chat/completions may say, as OpenAI has it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hisparse.http.apis.body import Body, check_alternatives
from hisparse.http.apis.generation import NULL, Generation
from hisparse.http.apis.tools import TOOLS_BYTES_MAX, Arguments, check_choice, checked_tools, refuse_media
from hisparse.http.models.formats.conversation import Conversation, PastCall, Tool, Turn
from protocol.errors import BadInput


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image_url", tag_field="type"):
    """Refused, as the next three."""


class AudioPart(msgspec.Struct, frozen=True, tag="input_audio", tag_field="type"):
    pass


class FilePart(msgspec.Struct, frozen=True, tag="file", tag_field="type"):
    pass


class VideoPart(msgspec.Struct, frozen=True, tag="video_url", tag_field="type"):
    pass


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`arguments` is a JSON object, as text."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None  # of a streamed call; ignored


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of any role. Clients send answers back as they got them, with fields that hold nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart | AudioPart | FilePart | VideoPart] | UnsetType | None = UNSET
    name: str | None = None  # ignored
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None

    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None  # ignored


class FunctionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` is a JSON schema. `strict` is passed to the model, and binds nothing."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionBody
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: NamedFunction
    type: Literal["function"] = "function"


Choice = Literal["auto", "none", "required"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatBody(Body, frozen=True, kw_only=True):
    """`chat_template_kwargs` are further variables of the model's template, as vLLM has them."""

    raw_types: ClassVar[dict[str, Any]] = Body.raw_types | {
        "chat_template_kwargs": dict[str, Any],
        "tools": list[ToolBody],
        "tool_choice": Choice | NamedChoice,
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    audio: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    functions: msgspec.Raw = NULL
    modalities: msgspec.Raw = NULL
    prediction: msgspec.Raw = NULL
    verbosity: msgspec.Raw = NULL
    web_search_options: msgspec.Raw = NULL

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise BadInput("is empty", field="messages", value="[]", remedy="give at least one message")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            remedy = "give one of the two"
            raise BadInput("is the old name of max_completion_tokens", field="max_tokens", remedy=remedy)

        check_alternatives("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise BadInput(
                "is for logprobs", field="top_logprobs", value=self.top_logprobs, remedy="set logprobs to true"
            )

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def generation(self) -> Generation:
        """Raises BadInput."""
        is_new = self.max_completion_tokens is not None
        return self.wanted(
            conversation=conversation_of(self),
            max_tokens=self.max_completion_tokens if is_new else self.max_tokens,
            names={"prompt": "messages", "logprobs": "top_logprobs"}
            | ({"max_tokens": "max_completion_tokens"} if is_new else {}),
        )


def conversation_of(body: ChatBody) -> Conversation:
    """Raises BadInput."""
    variables = body.read("chat_template_kwargs") or {}
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort} | variables
    choice = body.read("tool_choice")
    named = choice.function.name if isinstance(choice, NamedChoice) else ""
    tools, where = _tools(body)
    check_choice(tools, "tool_choice", named or choice or "", named)
    return Conversation(
        turns=tuple(turns_of(body.messages)),
        tools=() if choice == "none" else tools,
        parameters=() if choice == "none" else tuple(f"{it}.function.parameters" for it in where),
        parallel=body.parallel_tool_calls is not False,
        must_call=bool(named) or choice == "required",
        called=named,
        thinking=None if body.reasoning_effort is None else body.reasoning_effort != "none",
        variables=variables,
    )


def turns_of(messages: list[ChatMessage]) -> Iterator[Turn]:
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
            _text(message, f"{where}.content"),
            message.reasoning_content or "",
            tuple(calls),
            arguments.result(message.tool_call_id or "", f"{where}.tool_call_id") if message.role == "tool" else "",
        )


def _past_call(call: MessageCall, arguments: Arguments, field: str) -> PastCall:
    said = call.function.arguments.encode(errors="surrogatepass")
    return arguments.call(call.id, call.function.name, said, f"{field}.arguments")


#: Fields that only messages of one role have.
_OF_ROLE: Final = {"reasoning_content": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}


def _check_fields(message: ChatMessage, where: str) -> None:
    for field, role in _OF_ROLE.items():
        if getattr(message, field) is not None and message.role != role:
            raise BadInput(f"is for messages of role {role}", field=f"{where}.{field}", remedy="leave it out")
    if message.role == "tool" and message.tool_call_id is None:
        raise BadInput("is missing", field=f"{where}.tool_call_id", remedy="add it: the id of the call")


def _text(message: ChatMessage, field: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None or content is UNSET:
        if message.role == "assistant":
            return ""
        if content is None:
            raise BadInput("expected a string or an array, not null", field=field, remedy="change its type")
        raise BadInput("is missing", field=field, remedy="add it")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, TextPart):
            raise refuse_media(str(part.__struct_config__.tag), f"{field}[{number}].type")
        texts.append(part.text)
    return "".join(texts)


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools, and where each is. Raises BadInput."""
    said: list[ToolBody] = body.read("tools", TOOLS_BYTES_MAX) or []
    tools = [Tool(it.function.name, it.function.description, it.function.parameters, it.function.strict) for it in said]
    where = [f"tools[{number}]" for number in range(len(tools))]
    return checked_tools(tools, [f"{it}.function.name" for it in where]), where
