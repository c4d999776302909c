"""What POST /v1/completions and /v1/chat/completions may say: types, and what is refused. Pure.

Three kinds of fields, so that nothing is dropped in silence:

    served       typed below
    ignored      says nothing about the output (`user`, `metadata`): taken and forgotten
    unsupported  taken at the value that changes nothing (`echo` false), refused at any other

and a field that is in none of them is refused by name.

Fields of any form are kept as the JSON that came: 16 MiB of it become 350 MB of objects. What is ignored is never
decoded; the rest only when it is small. Prompts are decoded by hisparse.http.prompts, which knows how long they may
be.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, TypeVar, get_args, get_type_hints

import msgspec

from hisparse.http.decoding import UNDECODABLE, path_of, undecodable
from hisparse.http.errors import VALUE_CHARS_MAX
from protocol.errors import BadInput

#: Samples of one prompt; prompts of one body; samples of all its prompts together.
N_MAX: Final = 16
PROMPTS_MAX: Final = 128
CHOICES_MAX: Final = 128

#: JSON of a field that is no prompt and no message.
FIELD_BYTES_MAX: Final = 64 * 1024

#: Fields that say nothing about the output.
IGNORED: Final = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
)

#: The values of unsupported fields that change nothing, beside null.
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored
    continuous_usage_stats: bool | None = None  # of vLLM: usage in every chunk


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


NULL: Final = msgspec.Raw(b"null")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both have in common. None, or absent, is the default of docs/http.md."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: msgspec.Raw = NULL  # str | list[str]
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: msgspec.Raw = NULL  # dict[str, float]
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Not of OpenAI; those of draws have vLLM's names.
    top_k: int | None = None  # -1: all
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: msgspec.Raw = NULL  # list[int]
    priority: int = 0
    cache_salt: str = ""
    ignore_eos: bool = False

    # Ignored.
    user: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    store: msgspec.Raw = NULL
    service_tier: msgspec.Raw = NULL
    safety_identifier: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL
    prompt_cache_retention: msgspec.Raw = NULL

    # Unsupported: NEUTRAL.
    logprobs: msgspec.Raw = NULL


class CompletionBody(Body, frozen=True, kw_only=True):
    """`prompt` is a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: msgspec.Raw

    best_of: msgspec.Raw = NULL
    echo: msgspec.Raw = NULL
    suffix: msgspec.Raw = NULL


class ChatBody(Body, frozen=True, kw_only=True):
    """`chat_template_kwargs` are further variables of the model's template, as vLLM has them."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    chat_template_kwargs: msgspec.Raw = NULL  # dict[str, Any]

    audio: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    functions: msgspec.Raw = NULL
    modalities: msgspec.Raw = NULL
    parallel_tool_calls: msgspec.Raw = NULL  # ignored: there are no tools
    prediction: msgspec.Raw = NULL
    reasoning_effort: msgspec.Raw = NULL
    response_format: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    tools: msgspec.Raw = NULL
    top_logprobs: msgspec.Raw = NULL
    verbosity: msgspec.Raw = NULL
    web_search_options: msgspec.Raw = NULL


B = TypeVar("B", CompletionBody, ChatBody)
T = TypeVar("T")


def read_body(data: bytes | bytearray, kind: type[B]) -> B:
    """Decode and check. Raises BadInput naming the field."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from error
    except UNDECODABLE as error:
        raise undecodable(error) from error
    _check(body)
    return body


#: The objects within a body, by their path without indices.
_OBJECTS: Final[dict[str, type[msgspec.Struct]]] = {
    "stream_options": StreamOptions,
    "messages": ChatMessage,
    "messages.content": TextPart,
}


def _invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> BadInput:
    path = re.sub(r"\[\d+\]", "", path_of(error))
    outer, _, name = path.rpartition(".")
    hints = get_type_hints(_OBJECTS.get(outer, kind))
    return undecodable(error, known=_OBJECTS.get(path, kind).__struct_fields__, choices=get_args(hints.get(name)))


def parameters(kind: type[CompletionBody] | type[ChatBody]) -> dict[str, Any]:
    """The names of all fields, and the values of the unsupported ones that are accepted beside null."""
    fields = kind.__struct_fields__
    return {
        "served": [it for it in fields if it not in NEUTRAL and it not in IGNORED],
        "ignored": [it for it in fields if it in IGNORED],
        "accepted_at_these_values_only": {it: list(NEUTRAL[it]) for it in fields if it in NEUTRAL},
    }


def read_field(body: Body, field: str, kind: type[T]) -> T | None:
    """What a field holds that was kept as JSON; None where it is null or absent. Raises BadInput."""
    raw: msgspec.Raw = getattr(body, field, NULL)
    size = memoryview(raw).nbytes
    if size > FIELD_BYTES_MAX:
        text = f"longer than {FIELD_BYTES_MAX} bytes"
        raise BadInput(text, field=field, value=f"{size} bytes", remedy=f"shorten {field}, or leave it out")
    try:
        value: T | None = msgspec.json.decode(raw, type=kind | None)
    except UNDECODABLE as error:
        raise undecodable(error, field) from error
    return value


def _check(body: CompletionBody | ChatBody) -> None:
    for field, neutral in NEUTRAL.items():
        value = read_field(body, field, Any)
        if value is not None and not any(value == it and type(value) is type(it) for it in neutral):
            told = msgspec.json.encode(value).decode()[:VALUE_CHARS_MAX]
            raise BadInput("is not supported", field=field, value=told, remedy=f"leave {field} out")
    if body.n is not None and not 1 <= body.n <= N_MAX:
        raise BadInput(f"must be 1 to {N_MAX}", field="n", value=body.n, remedy="choose a value in that range")
    if body.stream_options is not None and not body.stream:
        raise BadInput("is for streams", field="stream_options", remedy="set stream to true, or leave it out")
    if isinstance(body, ChatBody):
        _check_chat(body)


def _check_chat(body: ChatBody) -> None:
    if not body.messages:
        raise BadInput("is empty", field="messages", value="[]", remedy="give at least one message")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadInput("is the old name of max_completion_tokens", field="max_tokens", remedy="give one of the two")
