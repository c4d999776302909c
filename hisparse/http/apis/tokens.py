"""Texts as token ids and back: vLLM's POST /tokenize and /detokenize, and Anthropic's count of tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from hisparse.http.apis.anthropic.bodies import CountBody
from hisparse.http.apis.asks import Render, Served, chat_prompt, check_model, text_of
from hisparse.http.apis.body import ApiBody, prepare
from hisparse.http.apis.generation import NULL
from hisparse.http.apis.openai.chat_bodies import ChatMessage, ToolBody, turns_of
from hisparse.http.apis.prompts import flat_ids, text_ids
from hisparse.http.apis.tools import TOOLS_BYTES_MAX, checked_tools
from hisparse.http.models.formats.conversation import Conversation, Tool
from protocol.errors import BadInput


class TokenizeBody(ApiBody, frozen=True, kw_only=True):
    """A `prompt`, or else `messages`, to which the chat template adds the special tokens."""

    ignored: ClassVar[Sequence[str]] = ()
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "return_token_strs": (False,),
    }
    raw_types: ClassVar[dict[str, Any]] = {"chat_template_kwargs": dict[str, Any], "tools": list[ToolBody]}

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    tools: msgspec.Raw = NULL

    add_generation_prompt: msgspec.Raw = NULL
    continue_final_message: msgspec.Raw = NULL
    return_token_strs: msgspec.Raw = NULL

    def check(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise BadInput("is missing, or given twice", field="prompt", remedy="give prompt, or else messages")


class DetokenizeBody(ApiBody, frozen=True, kw_only=True):
    ignored: ClassVar[Sequence[str]] = ()
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {}
    raw_types: ClassVar[dict[str, Any]] = {"tokens": list[int]}

    tokens: msgspec.Raw


class TokenizeReply(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None = None


class DetokenizeReply(msgspec.Struct, frozen=True):
    prompt: str


class CountReply(msgspec.Struct, frozen=True):
    input_tokens: int


def tokenized(body: TokenizeBody, served: Served, render: Render) -> TokenizeReply:
    """Raises BadInput or NotFound. Takes as long as tokenizing does, as the next two."""
    check_model(body.model, served.model)
    if body.messages:
        ids = chat_prompt(_conversation(body), served, render, "messages").ids
    else:
        special = body.add_special_tokens is not False
        ids = text_ids(body.prompt or "", served.tokenizer, served.model, special=special)
    return TokenizeReply(ids.size, served.model.context_max_tokens, ids.tolist())


def _conversation(body: TokenizeBody) -> Conversation:
    said: list[ToolBody] = body.read("tools", TOOLS_BYTES_MAX) or []
    tools = [Tool(it.function.name, it.function.description, it.function.parameters, it.function.strict) for it in said]
    checked = checked_tools(tools, [f"tools[{number}].function.name" for number in range(len(tools))])
    variables = body.read("chat_template_kwargs") or {}
    return Conversation(tuple(turns_of(body.messages or [])), checked, variables=variables)


def detokenized(body: DetokenizeBody, served: Served, _: Render) -> DetokenizeReply:
    """Special tokens as their texts."""
    check_model(body.model, served.model)
    ids = flat_ids(bytes(body.tokens), served.model, "tokens")
    return DetokenizeReply(text_of(ids.tolist(), served.tokenizer, served.tokenizer.special_ids))


def counted(body: CountBody, served: Served, render: Render) -> CountReply:
    check_model(body.model, served.model)
    return CountReply(chat_prompt(body.conversation(), served, render, "messages").ids.size)


@dataclass(frozen=True)
class TokenApi:
    """A path, what its bodies may say, and what answers them."""

    path: str
    body: type[ApiBody]
    reply: type[msgspec.Struct]
    answer: Callable[[Any, Served, Render], msgspec.Struct]


TOKEN_APIS: Final = (
    TokenApi("/tokenize", TokenizeBody, TokenizeReply, tokenized),
    TokenApi("/detokenize", DetokenizeBody, DetokenizeReply, detokenized),
    TokenApi("/v1/messages/count_tokens", CountBody, CountReply, counted),
)

prepare(api.body for api in TOKEN_APIS)
