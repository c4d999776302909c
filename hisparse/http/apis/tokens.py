"""Texts as token ids and back: vLLM's POST /tokenize and /detokenize, and Anthropic's count of tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from hisparse.http.apis.anthropic.bodies import CountBody
from hisparse.http.apis.asks import Render, Served, chat_prompt, check_model, cleared_in, text_of
from hisparse.http.apis.body import ApiBody, prepare
from hisparse.http.apis.fields import NULL
from hisparse.http.apis.openai.chat_bodies import ToolBody, tools_of
from hisparse.http.apis.openai.chat_messages import ChatMessage, turns_of
from hisparse.http.apis.prompts import flat_ids, text_ids
from hisparse.http.apis.tools import Skipped
from hisparse.http.models.formats.conversation import Conversation
from protocol.errors import BadInput


class TokenizeBody(ApiBody, frozen=True, kw_only=True):
    """A `prompt`, or else `messages`, to which the chat template adds the special tokens."""

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


class OriginalCount(msgspec.Struct, frozen=True):
    """Tokens of the prompt before context_management leaves thinking out."""

    original_input_tokens: int


class CountReply(msgspec.Struct, frozen=True, omit_defaults=True):
    input_tokens: int
    context_management: OriginalCount | None = None


#: A reply, and the kinds of tools that were skipped.
Reply: TypeAlias = tuple[msgspec.Struct, Sequence[str]]


def tokenized(body: TokenizeBody, served: Served, render: Render) -> Reply:
    """Raises BadInput or NotFound. Takes as long as tokenizing does, as the next two."""
    check_model(body.model, served.model)
    skipped = Skipped()
    if body.messages:
        ids = chat_prompt(_conversation(body, skipped), served, render, "messages").ids
    else:
        special = body.add_special_tokens is not False
        ids = text_ids(body.prompt or "", served.tokenizer, served.model, special=special)
    return TokenizeReply(ids.size, served.model.context_max_tokens, ids.tolist()), skipped.kinds


def _conversation(body: TokenizeBody, skipped: Skipped) -> Conversation:
    tools = tuple(tool for tool, _ in tools_of(body, skipped))
    variables = body.read("chat_template_kwargs") or {}
    return Conversation(tuple(turns_of(body.messages or [])), tools, variables=variables)


def detokenized(body: DetokenizeBody, served: Served, _: Render) -> Reply:
    """Special tokens as their texts."""
    check_model(body.model, served.model)
    ids = flat_ids(bytes(body.tokens), served.model, "tokens")
    return DetokenizeReply(text_of(ids.tolist(), served.tokenizer, served.tokenizer.special_ids)), ()


def counted(body: CountBody, served: Served, render: Render) -> Reply:
    check_model(body.model, served.model)
    conversation = body.conversation()
    size = chat_prompt(conversation, served, render, "messages").ids.size
    cleared = cleared_in(conversation, served)
    original = None if cleared is None else OriginalCount(size + cleared.tokens)
    return CountReply(size, original), conversation.skipped


@dataclass(frozen=True)
class TokenApi:
    """A path, what its bodies may say, and what answers them."""

    path: str
    body: type[ApiBody]
    reply: type[msgspec.Struct]
    answer: Callable[[Any, Served, Render], Reply]


TOKEN_APIS: Final = (
    TokenApi("/tokenize", TokenizeBody, TokenizeReply, tokenized),
    TokenApi("/detokenize", DetokenizeBody, DetokenizeReply, detokenized),
    TokenApi("/v1/messages/count_tokens", CountBody, CountReply, counted),
)

prepare(api.body for api in TOKEN_APIS)
