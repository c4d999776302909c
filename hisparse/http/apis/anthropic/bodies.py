"""What POST /v1/messages and /v1/messages/count_tokens may say, as Anthropic has it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec

from hisparse.http.apis.body import ApiBody
from hisparse.http.apis.generation import NULL, Generation, absent
from hisparse.http.apis.structured import STRUCTURE_BYTES_MAX
from hisparse.http.apis.tools import TOOLS_BYTES_MAX, Arguments, check_choice, checked_tools, refuse_media
from hisparse.http.models.formats.conversation import Conversation, PastCall, Tool, Turn
from hisparse.http.models.output_form import OutputForm
from protocol.errors import BadInput


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: msgspec.Raw = msgspec.field(default_factory=absent)  # ignored


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: msgspec.Raw = msgspec.field(default_factory=absent)  # ignored


class ImageBlock(msgspec.Struct, frozen=True, tag="image", tag_field="type"):
    """Refused, as the next."""


class DocumentBlock(msgspec.Struct, frozen=True, tag="document", tag_field="type"):
    pass


class ThinkingBlock(Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""  # ignored


class RedactedBlock(Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Of another server: nothing in it can be read."""

    data: str = ""


class ToolUseBlock(Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
    caller: msgspec.Raw = msgspec.field(default_factory=absent)  # ignored


class ToolResultBlock(Block, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None  # ignored: the content says so


AnyBlock: TypeAlias = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
)


class AnthropicMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` is passed to the model, and binds nothing."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: msgspec.Raw = msgspec.field(default_factory=absent)  # ignored
    eager_input_streaming: bool | None = None  # ignored


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # no bound: max_tokens is the only one
    display: str | None = None  # ignored


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


_NAMES: Final = {"prompt": "messages", "stop": "stop_sequences"}


class CountBody(ApiBody, frozen=True, kw_only=True):
    """The part of a body that becomes a prompt."""

    ignored: ClassVar[Sequence[str]] = ("cache_control", "speed", "user_profile_id", "workspace_id")
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {"context_management": (), "mcp_servers": ([],)}
    raw_types: ClassVar[dict[str, Any]] = {
        "tools": list[CustomTool],
        "tool_choice": ToolChoice,
        "output_config": OutputConfig,
        "chat_template_kwargs": dict[str, Any],
    }

    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    output_config: msgspec.Raw = NULL
    chat_template_kwargs: msgspec.Raw = NULL

    cache_control: msgspec.Raw = NULL
    speed: msgspec.Raw = NULL
    user_profile_id: msgspec.Raw = NULL
    workspace_id: msgspec.Raw = NULL

    context_management: msgspec.Raw = NULL
    mcp_servers: msgspec.Raw = NULL

    def check(self) -> None:
        if not self.messages:
            raise BadInput("is empty", field="messages", value="[]", remedy="give at least one message")
        if self.messages[-1].role == "assistant":
            field = f"messages[{len(self.messages) - 1}].role"
            text = "an assistant's turn cannot be continued"
            raise BadInput(text, field=field, value="assistant", remedy="end with a message of the user")
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget < 0:
            remedy = "send at least 0, or leave it out"
            raise BadInput("is below 0", field="thinking.budget_tokens", value=budget, remedy=remedy)

    @property
    def config(self) -> OutputConfig:
        said: OutputConfig | None = self.read("output_config", STRUCTURE_BYTES_MAX)
        return said or OutputConfig()

    def conversation(self) -> Conversation:
        """Raises BadInput."""
        choice: ToolChoice | None = self.read("tool_choice")
        config = self.config
        effort = {} if config.effort is None else {"reasoning_effort": config.effort}
        kind = "auto" if choice is None else choice.type
        named = choice.name or "" if choice is not None and kind == "tool" else ""
        tools, where = _tools(self)
        check_choice(tools, "tool_choice.name" if kind == "tool" else "tool_choice.type", kind, named)
        if kind == "tool" and not named:
            raise BadInput("is missing", field="tool_choice.name", remedy="add it")
        return Conversation(
            turns=tuple(_turns(self)),
            tools=() if kind == "none" else tools,
            parameters=() if kind == "none" else tuple(f"{it}.input_schema" for it in where),
            must_call=kind in ("any", "tool"),
            called=named,
            parallel=choice is None or not choice.disable_parallel_tool_use,
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
            variables=effort | (self.read("chat_template_kwargs") or {}),
        )


class MessagesBody(CountBody, frozen=True, kw_only=True):
    ignored: ClassVar[Sequence[str]] = (*CountBody.ignored, "metadata", "service_tier")
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {
        **CountBody.neutral,
        **{"container": (), "diagnostics": (), "inference_geo": ()},
    }
    raw_types: ClassVar[dict[str, Any]] = CountBody.raw_types | {"stop_sequences": list[str]}

    max_tokens: int
    stop_sequences: msgspec.Raw = NULL
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # Not of Anthropic.
    seed: int | None = None
    priority: int = 0
    cache_salt: str = ""
    draft_tokens: int | None = None
    ignore_eos: bool = False

    metadata: msgspec.Raw = NULL
    service_tier: msgspec.Raw = NULL

    container: msgspec.Raw = NULL
    diagnostics: msgspec.Raw = NULL
    inference_geo: msgspec.Raw = NULL

    def generation(self) -> Generation:
        """Raises BadInput."""
        form = self.config.format
        return Generation(
            model=self.model,
            conversation=self.conversation(),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.read("stop_sequences") or ()),
            ignore_eos=self.ignore_eos,
            adjustments={} if self.top_k is None else {"top_k": max(0, self.top_k)},
            structure=None if form is None else OutputForm("json", form.schema, "output_config.format.schema"),
            priority=self.priority,
            cache_salt=self.cache_salt,
            draft_tokens=self.draft_tokens,
            stream=bool(self.stream),
            names=_NAMES,
        )


def _tools(body: CountBody) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools, and where each is. Raises BadInput."""
    said: list[CustomTool] = body.read("tools", TOOLS_BYTES_MAX) or []
    tools = [Tool(it.name, it.description, it.input_schema, it.strict) for it in said]
    where = [f"tools[{number}]" for number in range(len(tools))]
    return checked_tools(tools, [f"{it}.name" for it in where]), where


def _turns(body: CountBody) -> Iterator[Turn]:
    """Raises BadInput."""
    arguments = Arguments()
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        yield Turn("system", text)
    for at, message in enumerate(body.messages):
        where = f"messages[{at}].content"
        if isinstance(message.content, str):
            yield Turn(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant(message.content, where, arguments)
        else:
            yield from _spoken(message.role, message.content, where, arguments)


def _assistant(blocks: Sequence[AnyBlock], where: str, arguments: Arguments) -> Turn:
    texts, thoughts, calls = [], [], list[PastCall]()
    for number, block in enumerate(blocks):
        field = f"{where}[{number}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(arguments.call(block.id, block.name, bytes(block.input), f"{field}.input"))
        elif not isinstance(block, RedactedBlock):
            raise _misplaced(block, field, "an assistant's")
    return Turn("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def _spoken(
    role: Literal["user", "system"], blocks: Sequence[AnyBlock], where: str, arguments: Arguments
) -> Iterator[Turn]:
    """Results come before the text of their message, as the calls came before them."""
    texts = []
    for number, block in enumerate(blocks):
        field = f"{where}[{number}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            call_id = arguments.result(block.tool_use_id, f"{field}.tool_use_id")
            yield Turn("tool", _result(block, f"{field}.content"), call_id=call_id)
        else:
            raise _misplaced(block, field, "a user's")
    if texts:
        yield Turn(role, "\n".join(texts))


def _result(block: ToolResultBlock, where: str) -> str:
    if not isinstance(block.content, list):
        return block.content or ""
    for number, part in enumerate(block.content):
        if not isinstance(part, TextBlock):
            raise refuse_media(str(part.__struct_config__.tag), f"{where}[{number}].type")
    return "\n".join(part.text for part in block.content if isinstance(part, TextBlock))


def _misplaced(block: AnyBlock, field: str, whose: str) -> BadInput:
    kind = str(block.__struct_config__.tag)
    if isinstance(block, ImageBlock | DocumentBlock):
        return refuse_media(kind, f"{field}.type")
    return BadInput(f"is no part of {whose} message", field=f"{field}.type", value=kind, remedy="leave it out")
