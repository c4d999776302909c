"""What POST /v1/completions and /v1/chat/completions may say: types, and what is refused. Pure.

Three kinds of fields, so that nothing is dropped in silence:

    served       typed below
    ignored      says nothing about the output (`user`, `metadata`): taken and forgotten
    unsupported  taken at the value that changes nothing (`frequency_penalty` 0), refused at any other

and a field that is in none of them is refused by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from protocol.errors import BadInput

#: Samples of one prompt; prompts of one body; samples of all its prompts together.
N_MAX: Final = 16
PROMPTS_MAX: Final = 128
CHOICES_MAX: Final = 128

#: What fits the wire; the coordinator says what fits the model.
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Rank = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Samples = Annotated[int, msgspec.Meta(ge=1, le=N_MAX)]

#: The values of unsupported fields that change nothing, beside null.
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_k": (0, -1),
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


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both have in common. None, or absent, is the default of docs/http.md."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Samples | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Not of OpenAI.
    priority: Rank = 0
    ignore_eos: bool = False

    # Ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    # Unsupported: NEUTRAL.
    frequency_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    min_p: Any = None
    min_tokens: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    top_k: Any = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """`prompt` is a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[Any]

    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class ChatBody(Body, frozen=True, kw_only=True):
    """`chat_template_kwargs` are further variables of the model's template, as vLLM has them."""

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None  # ignored: there are no tools
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    verbosity: Any = None
    web_search_options: Any = None


B = TypeVar("B", CompletionBody, ChatBody)


def read_body(data: bytes, kind: type[B]) -> B:
    """Decode and check. Raises BadInput naming the field."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        remedy = "send one JSON object in UTF-8"
        raise BadInput(f"not JSON: {error}", field="body", value=f"{len(data)} bytes", remedy=remedy) from error
    _check(body)
    return body


def _invalid(text: str) -> BadInput:
    """From the decoder's words: "... unknown field `x`", "... missing required field `x`", "... - at `$.x`"."""
    named = re.search(r"field `(\w+)`", text) or re.search(r"`\$\.(\w+)", text)
    return BadInput(text, field=named[1] if named else "body", remedy="docs/http.md lists what is accepted")


def _check(body: CompletionBody | ChatBody) -> None:
    for field, neutral in NEUTRAL.items():
        value = getattr(body, field, None)
        if value is not None and not any(value == it and type(value) is type(it) for it in neutral):
            raise BadInput("is not supported", field=field, value=str(value)[:80], remedy=f"leave {field} out")
    if body.stream_options is not None and not body.stream:
        raise BadInput("is for streams", field="stream_options", value="", remedy="set stream, or leave it out")
    if isinstance(body, ChatBody):
        _check_chat(body)


def _check_chat(body: ChatBody) -> None:
    if not body.messages:
        raise BadInput("is empty", field="messages", value="[]", remedy="give at least one message")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadInput("is the old name of max_completion_tokens", field="max_tokens", remedy="give one of the two")
