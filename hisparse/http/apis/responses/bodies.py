"""What POST /v1/responses may say, as OpenAI has it. Nothing is stored: what came before is in `input`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import msgspec

from hisparse.http.apis.body import IGNORED, ApiBody
from hisparse.http.apis.generation import NULL, Generation, absent
from hisparse.http.apis.openai.chat_bodies import Choice, Effort
from hisparse.http.apis.structured import STRUCTURE_BYTES_MAX, ObjectFormat, TextFormat, of_response_format
from hisparse.http.apis.tools import TOOLS_BYTES_MAX, Arguments, check_choice, checked_tools, refuse_media
from hisparse.http.models.formats.conversation import Conversation, PastCall, Role, Tool, Turn
from hisparse.http.models.output_form import OutputForm
from protocol.errors import BadInput


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="input_text", tag_field="type"):
    text: str


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="output_text", tag_field="type"):
    text: str
    annotations: msgspec.Raw = msgspec.field(default_factory=absent)  # ignored
    logprobs: msgspec.Raw = msgspec.field(default_factory=absent)  # ignored


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reasoning_text", tag_field="type"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="summary_text", tag_field="type"):
    text: str


class InputImage(msgspec.Struct, frozen=True, tag="input_image", tag_field="type"):
    """Refused, as the next two."""


class InputFile(msgspec.Struct, frozen=True, tag="input_file", tag_field="type"):
    pass


class InputAudio(msgspec.Struct, frozen=True, tag="input_audio", tag_field="type"):
    pass


Part: TypeAlias = InputText | OutputText | ReasoningText | InputImage | InputFile | InputAudio


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of any type: each has some of the fields. Clients send output items back as they got them."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None

    summary: list[SummaryText] | None = None  # ignored, as all below
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None
    namespace: str | None = None
    caller: None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` is passed to the model, and binds nothing."""

    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    type: Literal["function"] = "function"


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: str | None = None  # ignored: there are no summaries, reasoning comes as it is
    generate_summary: str | None = None  # ignored


class FlatSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema", tag_field="type"):
    """`schema` binds, `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None  # ignored
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | ObjectFormat | FlatSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # ignored


_NAMES: Final = {"prompt": "input", "max_tokens": "max_output_tokens"}


class ResponsesBody(ApiBody, frozen=True, kw_only=True):
    """`store` may be true, as OpenAI's default is: nothing is stored in either case, and the answer says so."""

    ignored: ClassVar[Sequence[str]] = (*IGNORED, "prompt_cache_options", "stream_options")
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    raw_types: ClassVar[dict[str, Any]] = {
        "tools": list[FunctionTool],
        "tool_choice": Choice | NamedTool,
        "chat_template_kwargs": dict[str, Any],
        "metadata": dict[str, str],
        "text": TextConfig,
    }

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    reasoning: ReasoningConfig | None = None
    text: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL

    # Not of OpenAI.
    chat_template_kwargs: msgspec.Raw = NULL
    seed: int | None = None
    priority: int = 0
    cache_salt: str = ""
    draft_tokens: int | None = None
    ignore_eos: bool = False

    # Ignored.
    user: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    store: bool | None = None
    service_tier: msgspec.Raw = NULL
    safety_identifier: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL
    prompt_cache_options: msgspec.Raw = NULL
    prompt_cache_retention: msgspec.Raw = NULL

    # Unsupported.
    access_programs: msgspec.Raw = NULL
    background: msgspec.Raw = NULL
    background_options: msgspec.Raw = NULL
    context_management: msgspec.Raw = NULL
    conversation: msgspec.Raw = NULL
    image: msgspec.Raw = NULL
    include: msgspec.Raw = NULL
    max_tool_calls: msgspec.Raw = NULL
    moderation: msgspec.Raw = NULL
    previous_response_id: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    top_logprobs: msgspec.Raw = NULL
    truncation: msgspec.Raw = NULL

    def check(self) -> None:
        if not self.input:
            raise BadInput("is empty", field="input", remedy="give a text, or at least one item")

    @property
    def config(self) -> TextConfig:
        said: TextConfig | None = self.read("text", STRUCTURE_BYTES_MAX)
        return said or TextConfig()

    def generation(self) -> Generation:
        """Raises BadInput."""
        effort = self.reasoning.effort if self.reasoning else None
        variables = {} if effort is None else {"reasoning_effort": effort}
        choice = self.read("tool_choice")
        named = choice.name if isinstance(choice, NamedTool) else ""
        tools, where = _tools(self)
        check_choice(tools, "tool_choice", named or choice or "", named)
        conversation = Conversation(
            turns=tuple(_turns(self)),
            tools=() if choice == "none" else tools,
            parameters=() if choice == "none" else tuple(f"{it}.parameters" for it in where),
            must_call=bool(named) or choice == "required",
            called=named,
            parallel=self.parallel_tool_calls is not False,
            thinking=None if effort is None else effort != "none",
            variables=variables | (self.read("chat_template_kwargs") or {}),
        )
        return Generation(
            model=self.model,
            conversation=conversation,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            structure=_structure(self.config),
            priority=self.priority,
            cache_salt=self.cache_salt,
            draft_tokens=self.draft_tokens,
            stream=bool(self.stream),
            names=_NAMES,
            settings=_settings(self, conversation),
        )


def _settings(body: ResponsesBody, conversation: Conversation) -> dict[str, Any]:
    """What a response repeats of its request."""
    said: list[FunctionTool] = body.read("tools", TOOLS_BYTES_MAX) or []
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.read("metadata") or {},
        "parallel_tool_calls": conversation.parallel,
        "text": {"format": body.config.format or TextFormat()},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "tool_choice": body.read("tool_choice") or "auto",
        "tools": said,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }


def _tools(body: ResponsesBody) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools, and where each is. Raises BadInput."""
    said: list[FunctionTool] = body.read("tools", TOOLS_BYTES_MAX) or []
    tools = [Tool(it.name, it.description, it.parameters, it.strict) for it in said]
    where = [f"tools[{number}]" for number in range(len(tools))]
    return checked_tools(tools, [f"{it}.name" for it in where]), where


def _structure(config: TextConfig) -> OutputForm | None:
    """Raises BadInput."""
    if isinstance(config.format, FlatSchemaFormat):
        return OutputForm("json", config.format.schema, "text.format.schema")
    return of_response_format(config.format, "text.format")


# ---------------------------------------------------------------- items as turns


def _turns(body: ResponsesBody) -> Iterator[Turn]:
    """Reasoning, text and calls that follow one another are one turn of the assistant. Raises BadInput."""
    if body.instructions:
        yield Turn("system", body.instructions)
    if isinstance(body.input, str):
        yield Turn("user", body.input)
        return
    arguments = Arguments()
    said: list[Turn] = []  # parts of the assistant's turn
    for at, item in enumerate(body.input):
        turn = _turn(item, f"input[{at}]", arguments)
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
        return Turn("assistant", reasoning=_text(item.content or "", f"{where}.content"))
    role: Role = _required(item.role, f"{where}.role")
    return Turn(role, _text(_required(item.content, f"{where}.content"), f"{where}.content"))


def _past_call(item: Item, where: str, arguments: Arguments) -> PastCall:
    name, said = _required(item.name, f"{where}.name"), _required(item.arguments, f"{where}.arguments")
    data = said.encode(errors="surrogatepass")
    return arguments.call(_required(item.call_id, f"{where}.call_id"), name, data, f"{where}.arguments")


def _required(value: Any, field: str) -> Any:
    if value is None:
        raise BadInput("is missing", field=field, remedy="add it")
    return value


def _text(content: str | list[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, InputImage | InputFile | InputAudio):
            raise refuse_media(str(part.__struct_config__.tag), f"{where}[{number}].type")
        texts.append(part.text)
    return "".join(texts)
