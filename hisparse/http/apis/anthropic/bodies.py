"""What POST /v1/messages and /v1/messages/count_tokens may say, as Anthropic has it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from hisparse.http.apis.anthropic.context import ContextManagement, cleared_of_thinking
from hisparse.http.apis.body import ApiBody
from hisparse.http.apis.fields import NULL, Account, Hint, Repeat, Rule, Rules, unread
from hisparse.http.apis.generation import Generation
from hisparse.http.apis.structured import STRUCTURE_BYTES_MAX
from hisparse.http.apis.tools import (
    TOOLS_BYTES_MAX,
    Arguments,
    CallChoice,
    Skipped,
    check_tools,
    functions_in,
    refuse_media,
    shown_tools,
)
from hisparse.http.models.formats.conversation import Conversation, PastCall, Tool, Turn, kept_thinking
from hisparse.http.models.output_form import OutputForm
from protocol.errors import BadInput


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: Account = unread()


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: Repeat = unread()
    parsed_output: Repeat = unread()


class ImageBlock(msgspec.Struct, frozen=True, tag="image", tag_field="type"):
    """Refused, as the next."""


class DocumentBlock(msgspec.Struct, frozen=True, tag="document", tag_field="type"):
    pass


class ThinkingBlock(Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: Repeat = unread()


class RedactedBlock(Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Of another server: nothing in it can be read."""

    data: Repeat = unread()


class ToolUseBlock(Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
    caller: Repeat = unread()
    toolset_name: Repeat = unread()


class ToolResultBlock(Block, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: Repeat = unread()
    toolset_name: Repeat = unread()


class ServerBlock(msgspec.Struct, frozen=True, tag_field="type"):
    """A call or a result of a tool that is not here, as those below: skipped."""


class ServerToolUse(ServerBlock, frozen=True, tag="server_tool_use"):
    pass


class McpToolUse(ServerBlock, frozen=True, tag="mcp_tool_use"):
    pass


class McpToolResult(ServerBlock, frozen=True, tag="mcp_tool_result"):
    pass


class McpToolListing(ServerBlock, frozen=True, tag="mcp_tool_listing"):
    pass


class AdvisorResult(ServerBlock, frozen=True, tag="advisor_tool_result"):
    pass


class WebSearchResult(ServerBlock, frozen=True, tag="web_search_tool_result"):
    pass


class WebFetchResult(ServerBlock, frozen=True, tag="web_fetch_tool_result"):
    pass


class CodeResult(ServerBlock, frozen=True, tag="code_execution_tool_result"):
    pass


class BashResult(ServerBlock, frozen=True, tag="bash_code_execution_tool_result"):
    pass


class EditorResult(ServerBlock, frozen=True, tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchResult(ServerBlock, frozen=True, tag="tool_search_tool_result"):
    pass


class ContainerUpload(ServerBlock, frozen=True, tag="container_upload"):
    pass


AnyBlock: TypeAlias = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock
    | ServerToolUse
    | McpToolUse
    | McpToolResult
    | McpToolListing
    | AdvisorResult
    | WebSearchResult
    | WebFetchResult
    | CodeResult
    | BashResult
    | EditorResult
    | ToolSearchResult
    | ContainerUpload
)


class AnthropicMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    refused: ClassVar[Rules] = {
        "clear_at": Rule("instructions are kept as they are sent"),
        "output_config": Rule("a body has one output_config", "move it to the body"),
    }

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock] | UnsetType | None = UNSET


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` is passed to the model, and binds nothing."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Account = unread()
    allowed_callers: Hint = unread()
    defer_loading: Hint = unread()
    eager_input_streaming: Hint = unread()
    input_examples: Hint = unread()


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`max_tokens` is the only bound."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    block_binding: Hint = unread()
    display: Hint = unread()

    @property
    def reasons(self) -> bool:
        return self.type in ("enabled", "adaptive")


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Hint = unread()


_NAMES: Final = {"prompt": "messages", "stop": "stop_sequences"}


class CountBody(ApiBody, frozen=True, kw_only=True):
    """The part of a body that becomes a prompt."""

    refused: ClassVar[Rules] = {
        "compaction": Rule("conversations are not compacted here", "leave it out, and send fewer messages"),
        "mcp_servers": Rule("the server calls no other servers", "leave it out, and call them as tools of yours"),
    }
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {}
    raw_types: ClassVar[dict[str, Any]] = {
        "tools": list[CustomTool],
        "tool_choice": ToolChoice,
        "output_config": OutputConfig,
        "chat_template_kwargs": dict[str, Any],
        "context_management": ContextManagement,
    }

    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    output_config: msgspec.Raw = NULL
    chat_template_kwargs: msgspec.Raw = NULL

    context_management: msgspec.Raw = NULL

    billing_policy: Account = unread()
    cache_control: Account = unread()
    speed: Hint = unread()
    user_profile_id: Account = unread()
    workspace_id: Account = unread()

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
        config = self.config
        effort = {} if config.effort is None else {"reasoning_effort": config.effort}
        choice: ToolChoice | None = self.read("tool_choice")
        skipped = Skipped()
        turns, cleared = self._managed(tuple(_turns(self, skipped)))
        return Conversation(
            turns=turns,
            **shown_tools(_tools(self, skipped), _choice(choice), skipped),
            skipped=skipped.kinds,
            cleared=cleared,
            parallel=choice is None or not choice.disable_parallel_tool_use,
            thinking=None if self.thinking is None else self.thinking.reasons,
            variables=effort
            | ({} if cleared is None else kept_thinking(True))
            | (self.read("chat_template_kwargs") or {}),
        )

    def _managed(self, turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], tuple[str, ...] | None]:
        """The turns as context_management wants them, and the thinking that is left out; None: nothing is wanted."""
        said: ContextManagement | None = self.read("context_management")
        if said is None or not said.edits:
            return turns, None
        if len(said.edits) > 1:  # each would go through all turns again
            field, remedy = "context_management.edits", "send one clear_thinking edit"
            raise BadInput("holds more than one edit", field=field, value=f"{len(said.edits)} edits", remedy=remedy)
        keep = said.edits[0].turns
        return (turns, ()) if keep is None else cleared_of_thinking(turns, keep)


class MessagesBody(CountBody, frozen=True, kw_only=True):
    refused: ClassVar[Rules] = {
        **CountBody.refused,
        "container": Rule("the server runs no containers"),
        "inference_geo": Rule("the server does not choose where it runs"),
        "thread": Rule("no conversations are stored here", "send all messages"),
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

    diagnostics: Account = unread()
    fallback_credit_token: Account = unread()
    fallbacks: Hint = unread()
    metadata: Account = unread()
    service_tier: Account = unread()

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


def _choice(said: ToolChoice | None) -> CallChoice:
    """Raises BadInput."""
    if said is None:
        return CallChoice()
    if said.type != "tool":
        return CallChoice(said.type, field="tool_choice.type")
    if not said.name:
        raise BadInput("is missing", field="tool_choice.name", remedy="add it")
    return CallChoice("any", called=said.name, field="tool_choice.name")


def _tools(body: CountBody, skipped: Skipped) -> list[tuple[Tool, str]]:
    """The custom tools, and the field of the parameters of each. Raises BadInput."""
    said = functions_in(body.read_each("tools", TOOLS_BYTES_MAX), CustomTool, "custom", skipped)
    found = [
        (Tool(tool.name, tool.description, tool.input_schema, tool.strict), f"{where}.input_schema")
        for where, tool in said
    ]
    check_tools([tool for tool, _ in found], [f"{where}.name" for where, _ in said])
    return found


def _turns(body: CountBody, skipped: Skipped) -> Iterator[Turn]:
    """Raises BadInput."""
    arguments = Arguments()
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        yield Turn("system", text)
    for at, message in enumerate(body.messages):
        where = f"messages[{at}].content"
        if message.content is UNSET and message.role != "system":
            raise BadInput("is missing", field=where, remedy="add it")
        if message.content is None or isinstance(message.content, str | UnsetType):
            yield Turn(message.role, message.content or "")
        elif message.role == "assistant":
            yield _assistant(message.content, where, arguments, skipped)
        else:
            yield from _spoken(message.role, message.content, where, arguments, skipped)


def _assistant(blocks: Sequence[AnyBlock], where: str, arguments: Arguments, skipped: Skipped) -> Turn:
    texts, thoughts, calls = [], [], list[PastCall]()
    for number, block in enumerate(blocks):
        field = f"{where}[{number}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(arguments.call(block.id, block.name, bytes(block.input), f"{field}.input"))
        elif isinstance(block, ServerBlock):
            skipped.add(str(block.__struct_config__.tag), f"{field}.type")
        elif not isinstance(block, RedactedBlock):
            raise _misplaced(block, field, "an assistant's")
    return Turn("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def _spoken(
    role: Literal["user", "system"], blocks: Sequence[AnyBlock], where: str, arguments: Arguments, skipped: Skipped
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
        elif isinstance(block, ServerBlock):
            skipped.add(str(block.__struct_config__.tag), f"{field}.type")
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
