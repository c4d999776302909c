"""The APIs that generate: a path, what its bodies may say, and the words of its answers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from hisparse.http.apis.anthropic.answers import MessagesAnswer
from hisparse.http.apis.anthropic.bodies import MessagesBody
from hisparse.http.apis.asks import Ask
from hisparse.http.apis.body import prepare
from hisparse.http.apis.openai.answers import ChatAnswer, CompletionAnswer
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.apis.responses.answers import ResponsesAnswer
from hisparse.http.apis.responses.bodies import ResponsesBody
from hisparse.http.apis.transcript import Answer
from hisparse.http.server.identities import ANTHROPIC_REQUEST_ID, REQUEST_ID

GeneratingBody: TypeAlias = CompletionBody | ChatBody | MessagesBody | ResponsesBody


@dataclass(frozen=True)
class Api:
    """`prefix` is that of ids which the front makes, `prompt` the field of what is continued, `id_headers` those with
    the id at the coordinator."""

    path: str
    body: type[GeneratingBody]
    prefix: str
    prompt: str
    answer: Callable[[Ask, int], Answer]
    id_headers: tuple[str, ...] = (REQUEST_ID,)


APIS: Final = (
    Api("/v1/completions", CompletionBody, "cmpl-", "prompt", CompletionAnswer),
    Api("/v1/chat/completions", ChatBody, "chatcmpl-", "messages", ChatAnswer),
    Api("/v1/messages", MessagesBody, "msg_", "messages", MessagesAnswer, (REQUEST_ID, ANTHROPIC_REQUEST_ID)),
    Api("/v1/responses", ResponsesBody, "resp_", "input", ResponsesAnswer),
)

prepare(api.body for api in APIS)
