"""Bodies of POST /v1/responses, as OpenAI has them. Nothing is stored: earlier turns are in `input`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import msgspec

from hisparse.http.apis.body import ApiBody
from hisparse.http.apis.decoding import decoded
from hisparse.http.apis.fields import NULL, Account, Hint, Repeat, Rule, Rules, unread
from hisparse.http.apis.generation import Generation
from hisparse.http.apis.openai.chat_bodies import Effort, Mode
from hisparse.http.apis.responses.items import Item, items_in, turns_of
from hisparse.http.apis.structured import STRUCTURE_BYTES_MAX, ObjectFormat, TextFormat, of_response_format
from hisparse.http.apis.tools import (
    TOOLS_BYTES_MAX,
    AllowedTool,
    CallChoice,
    Skipped,
    check_tools,
    functions_in,
    names_in,
    shown_tools,
)
from hisparse.http.models.formats.conversation import Conversation, Tool, Turn, kept_thinking
from hisparse.http.models.output_form import OutputForm
from protocol.errors import BadInput


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` is passed to the model, and binds nothing."""

    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Hint = unread()
    defer_loading: Hint = unread()
    output_schema: Repeat = unread()
    runs_async: Hint = unread("async")

    @property
    def told(self) -> dict[str, Any]:
        """The fields that a response repeats."""
        said = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "name": self.name, **said}


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="function", tag_field="type"):
    name: str


class AllowedFlat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="allowed_tools", tag_field="type"):
    """`tools` are AllowedTools; the response repeats them as they came."""

    mode: Literal["auto", "required"]
    tools: list[msgspec.Raw]


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There are no summaries: reasoning comes as it is, and is sent back by the client."""

    effort: Effort | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Hint = unread()
    summary: Hint = unread()
    generate_summary: Hint = unread()


class FlatSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema", tag_field="type"):
    """`schema` binds, `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: Repeat = unread()
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | ObjectFormat | FlatSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


#: Parts of an answer that may be asked for: of tools that are not here, and of reasoning, which is there as it is.
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
STATELESS: Final = "no conversations are stored here"


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: Hint = unread()


_NAMES: Final = {"prompt": "input", "max_tokens": "max_output_tokens"}


class ResponsesBody(ApiBody, frozen=True, kw_only=True):
    """`store` may be true, as OpenAI's default is: nothing is stored in either case, and the answer says so."""

    refused: ClassVar[Rules] = {
        "background_options": Rule("nothing is stored, and so answered at once"),
        "context_management": Rule("conversations are not compacted here", "leave it out, and send a shorter input"),
        "conversation": Rule(STATELESS, "send all items as input"),
        "previous_response_id": Rule(STATELESS, "send all items as input"),
        "prompt": Rule("no templates are stored here", "send its text as instructions"),
    }
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {
        "background": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    raw_types: ClassVar[dict[str, Any]] = {
        "input": str | list[Item],
        "tools": list[FunctionTool],
        "tool_choice": Mode | NamedTool | AllowedFlat,
        "chat_template_kwargs": dict[str, Any],
        "include": list[Included],
        "metadata": dict[str, str],
        "text": TextConfig,
    }

    input: msgspec.Raw
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

    metadata: msgspec.Raw = NULL  # told again

    # Nothing comes of these.
    include: msgspec.Raw = NULL
    store: Account = unread()
    access_programs: Account = unread()
    client_metadata: Account = unread()
    image: Hint = unread()
    max_tool_calls: Hint = unread()
    moderation: Account = unread()
    prompt_cache_key: Account = unread()
    prompt_cache_options: Account = unread()
    prompt_cache_retention: Account = unread()
    safety_identifier: Account = unread()
    service_tier: Account = unread()
    user: Account = unread()

    # Unsupported.
    background: msgspec.Raw = NULL
    top_logprobs: msgspec.Raw = NULL
    truncation: msgspec.Raw = NULL

    def check(self) -> None:
        self.read("include")

    def turns(self, skipped: Skipped) -> Iterator[Turn]:
        """Raises BadInput."""
        if self.instructions:
            yield Turn("system", self.instructions)
        said = decoded(self.input, str | list[msgspec.Raw], "input", is_free=False)
        if not said:
            raise BadInput("is empty", field="input", remedy="give a text, or at least one item")
        if isinstance(said, str):
            yield Turn("user", said)
        else:
            yield from turns_of(items_in(said, skipped))

    @property
    def config(self) -> TextConfig:
        said: TextConfig | None = self.read("text", STRUCTURE_BYTES_MAX)
        return said or TextConfig()

    def generation(self) -> Generation:
        """Raises BadInput."""
        reasoning = self.reasoning or ReasoningConfig()
        variables: dict[str, Any] = {} if reasoning.effort is None else {"reasoning_effort": reasoning.effort}
        if reasoning.context in ("current_turn", "all_turns"):
            variables |= kept_thinking(reasoning.context == "all_turns")
        skipped = Skipped()
        tools = _functions(self, skipped)
        conversation = Conversation(
            turns=tuple(self.turns(skipped)),
            **shown_tools(_tools(tools), _choice(self), skipped),
            skipped=skipped.kinds,
            parallel=self.parallel_tool_calls is not False,
            thinking=None if reasoning.effort is None else reasoning.effort != "none",
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
            settings=_settings(self, conversation, [tool.told for _, tool in tools]),
        )


def _settings(body: ResponsesBody, conversation: Conversation, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of its request that a response repeats."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.read("metadata") or {},
        "parallel_tool_calls": conversation.parallel,
        "text": {"format": body.config.format or TextFormat()},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "tool_choice": body.read("tool_choice") or "auto",
        "tools": tools,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }


def _functions(body: ResponsesBody, skipped: Skipped) -> list[tuple[str, FunctionTool]]:
    """The functions among the tools, each with its field. Raises BadInput."""
    said = functions_in(body.read_each("tools", TOOLS_BYTES_MAX), FunctionTool, "function", skipped)
    check_tools([_tool(tool) for _, tool in said], [f"{where}.name" for where, _ in said])
    return said


def _tools(said: Sequence[tuple[str, FunctionTool]]) -> list[tuple[Tool, str]]:
    return [(_tool(tool), f"{where}.parameters") for where, tool in said]


def _tool(said: FunctionTool) -> Tool:
    return Tool(said.name, said.description, said.parameters, said.strict)


def _choice(body: ResponsesBody) -> CallChoice:
    said = body.read("tool_choice")
    if isinstance(said, NamedTool):
        return CallChoice("required", called=said.name)
    if isinstance(said, AllowedFlat):
        allowed = (decoded(raw, AllowedTool, f"tool_choice.tools[{at}]") for at, raw in enumerate(said.tools))
        return CallChoice(said.mode, allowed=names_in(tuple(allowed)))
    return CallChoice(said or "auto")


def _structure(config: TextConfig) -> OutputForm | None:
    """Raises BadInput."""
    if isinstance(config.format, FlatSchemaFormat):
        return OutputForm("json", config.format.schema, "text.format.schema")
    return of_response_format(config.format, "text.format")
