"""Bodies of POST /v1/chat/completions, as OpenAI has them. Pure."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from hisparse.http.apis.body import ApiBody, Body, check_alternatives
from hisparse.http.apis.fields import NULL, Account, Hint, Rule, Rules, unread
from hisparse.http.apis.generation import Generation
from hisparse.http.apis.openai.chat_messages import ChatMessage, turns_of
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
from hisparse.http.models.formats.conversation import Conversation, Tool
from protocol.errors import BadInput


class FunctionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` is a JSON schema. `strict` is passed to the model, and binds nothing."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionBody
    type: Literal["function"] = "function"
    cache_control: Account = unread()


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="function", tag_field="type"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="allowed_tools", tag_field="type"):
    allowed_tools: AllowedTools


Mode: TypeAlias = Literal["auto", "none", "required"]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(Body, frozen=True, kw_only=True):
    """`chat_template_kwargs` are further variables of the model's template, as vLLM has them."""

    refused: ClassVar[Rules] = {
        **Body.refused,
        "audio": Rule("the model writes text"),
        "functions": Rule("they are now tools", "use tools"),
        "web_search_options": Rule("the server searches nothing", "leave it out, or send a tool that searches"),
    }
    raw_types: ClassVar[dict[str, Any]] = Body.raw_types | {
        "chat_template_kwargs": dict[str, Any],
        "tools": list[ToolBody],
        "tool_choice": Mode | NamedChoice | AllowedChoice,
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

    prediction: Hint = unread()

    function_call: msgspec.Raw = NULL
    modalities: msgspec.Raw = NULL
    verbosity: msgspec.Raw = NULL

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
    skipped = Skipped()
    return Conversation(
        turns=tuple(turns_of(body.messages)),
        **shown_tools(tools_of(body, skipped), _choice(body), skipped),
        skipped=skipped.kinds,
        parallel=body.parallel_tool_calls is not False,
        thinking=None if body.reasoning_effort is None else body.reasoning_effort != "none",
        variables=variables,
    )


def _choice(body: ChatBody) -> CallChoice:
    said = body.read("tool_choice")
    if isinstance(said, NamedChoice):
        return CallChoice("required", called=said.function.name)
    if isinstance(said, AllowedChoice):
        return CallChoice(said.allowed_tools.mode, allowed=names_in(said.allowed_tools.tools))
    return CallChoice(said or "auto")


def tools_of(body: ApiBody, skipped: Skipped) -> list[tuple[Tool, str]]:
    """The functions among the tools, and the field of the parameters of each. Raises BadInput."""
    said = functions_in(body.read_each("tools", TOOLS_BYTES_MAX), ToolBody, "function", skipped)
    found = [(_tool(tool.function), f"{where}.function.parameters") for where, tool in said]
    check_tools([tool for tool, _ in found], [f"{where}.function.name" for where, _ in said])
    return found


def _tool(said: FunctionBody) -> Tool:
    return Tool(said.name, said.description, said.parameters, said.strict)
