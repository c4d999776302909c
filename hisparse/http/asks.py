"""From a body to requests of the coordinator: one for each sample of each prompt. Pure.

Ids are the client's (header X-Request-Id) or made by the front. One sample has the id itself, several have `ID-0`,
`ID-1`, ... A repeated body under the client's own id makes the same requests, to the last field, so that the
coordinator knows them again; that is why a missing seed is drawn from the id and not from a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from coordinator.scheduling.validation import check_orders, check_priority, check_salt, check_token_ids
from hisparse.http.bodies import CHOICES_MAX, Body, ChatBody, CompletionBody, StreamOptions, read_field
from hisparse.http.errors import ContextExceeded
from hisparse.http.prompts import prompts_of, text_bytes_max, text_ids
from protocol.arrays import Int32Array
from protocol.errors import BadInput, NotFound
from protocol.messages import PRIORITY_MAX, ModelInfo, Sampling
from protocol.text import Tokenizer

#: As OpenAI has it for /v1/completions.
COMPLETION_TOKENS_DEFAULT: Final = 16
#: Of a chat, unless the context leaves less. The whole context, as OpenAI has it, would reserve memory for it.
CHAT_TOKENS_DEFAULT: Final = 4_096
TEMPERATURE_DEFAULT: Final = 1.0
SEED_BITS: Final = 63
#: Template, messages, variables, and the most characters, as in hisparse.http.chat.
Render = Callable[[str, Sequence[Mapping[str, str]], Mapping[str, Any], int], str]

NO_PROMPT: Final[Int32Array] = np.empty(0, np.int32)


@dataclass(frozen=True)
class SampleAsk:
    """One request of the coordinator. Samples of one prompt share its array, whose digest is in the fingerprint."""

    request_id: str
    prompt: Int32Array
    sampling: Sampling
    priority: int
    prompt_digest: bytes
    cache_salt: str = ""

    @property
    def fingerprint(self) -> tuple[bytes, Sampling, int, str]:
        return self.prompt_digest, self.sampling, self.priority, self.cache_salt

    def same_as(self, other: SampleAsk) -> bool:
        return self.fingerprint == other.fingerprint

    def without_prompt(self) -> SampleAsk:
        """Enough to compare it with others: the prompt may be megabytes, and the coordinator has it."""
        return replace(self, prompt=NO_PROMPT)


@dataclass(frozen=True)
class Ask:
    """A body, checked and tokenized. `id` is what its client calls it. `prompt_tokens` counts each prompt once, however
    many samples it has."""

    id: str
    is_chat: bool
    model: str
    choices: tuple[SampleAsk, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool

    def without_prompts(self) -> Ask:
        return replace(self, choices=tuple(choice.without_prompt() for choice in self.choices))


@dataclass(frozen=True)
class Served:
    """What the front knows of the served model."""

    model: ModelInfo
    tokenizer: Tokenizer


def ask_of(
    body: CompletionBody | ChatBody,
    served: Served,
    ask_id: str,
    render: Render,
    scope: str = "",
    priority_max: int = PRIORITY_MAX,
) -> Ask:
    """Raises BadInput, or NotFound for another model. Takes as long as tokenizing the prompts does.

    `scope` keeps an id that a client chose apart from those of other owners at the coordinator. `priority_max` is the
    limit of the client's key.
    """
    check_priority(body.priority, priority_max, "the file of API keys")
    check_salt(body.cache_salt)
    _check_model(body, served.model)
    if isinstance(body, ChatBody):
        prompts = [_chat_prompt(body, served, render)]
        max_tokens = _first(body.max_completion_tokens, body.max_tokens)
        room = max(1, served.model.context_max_tokens - prompts[0].size)
        limits = [_first(max_tokens, min(CHAT_TOKENS_DEFAULT, room))]
    else:
        prompts = list(prompts_of(body.prompt, served.tokenizer, served.model))
        limits = [_first(body.max_tokens, COMPLETION_TOKENS_DEFAULT)] * len(prompts)
    options = body.stream_options or StreamOptions()
    return Ask(
        id=ask_id,
        is_chat=isinstance(body, ChatBody),
        model=served.model.name,
        choices=tuple(_choices(body, prompts, limits, f"{ask_id}.{scope}" if scope else ask_id, served.model)),
        prompt_tokens=sum(prompt.size for prompt in prompts),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        usage_in_every_chunk=bool(options.continuous_usage_stats),
    )


def _check_model(body: Body, model: ModelInfo) -> None:
    if body.model not in (None, model.name):
        raise NotFound("is not served here", field="model", value=body.model, remedy=f"use {model.name}")


def _choices(
    body: Body, prompts: Sequence[Int32Array], limits: Sequence[int], base_id: str, model: ModelInfo
) -> Iterator[SampleAsk]:
    """Checked as the coordinator does: what it would refuse is not sent to it."""
    samples = _first(body.n, 1)
    total = samples * len(prompts)
    if total > CHOICES_MAX:
        text = f"{samples} samples of {len(prompts)} prompts make {total}, and {CHOICES_MAX} are accepted"
        raise BadInput(text, field="n", value=samples, remedy=f"use {CHOICES_MAX // len(prompts)} or less")
    stop = read_field(body, "stop", str | list[str])  # type: ignore[arg-type]  # a union is no type
    adjustments = _adjustments(body)
    digests = [hashlib.sha256(prompt.tobytes()).digest() for prompt in prompts]
    for index in range(total):
        request_id = base_id if total == 1 else f"{base_id}-{index}"
        which = index // samples
        sampling = Sampling(
            max_tokens=limits[which],
            temperature=_first(body.temperature, TEMPERATURE_DEFAULT),
            top_p=_first(body.top_p, 1.0),
            seed=_seed(body.seed, index % samples, request_id),
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            ignore_eos=body.ignore_eos,
            **adjustments,
        )
        _check_orders(sampling, body)
        check_token_ids(sampling, model)
        _check_length(prompts[which].size, sampling.max_tokens, body, model)
        yield SampleAsk(request_id, prompts[which], sampling, body.priority, digests[which], body.cache_salt)


def _adjustments(body: Body) -> dict[str, Any]:
    """What the body asks of its draws beside temperature and top_p, as fields of Sampling."""
    bias = read_field(body, "logit_bias", dict[int, float]) or {}
    return {
        "top_k": 0 if body.top_k in (None, -1) else body.top_k,
        "min_p": _first(body.min_p, 0.0),
        "frequency_penalty": _first(body.frequency_penalty, 0.0),
        "presence_penalty": _first(body.presence_penalty, 0.0),
        "repetition_penalty": _first(body.repetition_penalty, 1.0),
        "logit_bias": tuple(bias.items()),
        "min_tokens": _first(body.min_tokens, 0),
        "stop_token_ids": tuple(read_field(body, "stop_token_ids", list[int]) or ()),
    }


def _limit_field(body: Body) -> str:
    """What the client called the bound of new tokens."""
    return "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"


def _check_orders(sampling: Sampling, body: Body) -> None:
    """By the coordinator's rules, named as the client named its fields."""
    try:
        check_orders(sampling, body.priority)
    except BadInput as error:
        field = _limit_field(body) if error.field == "max_tokens" else error.field
        raise BadInput(error.message, field=field, value=error.value, remedy=error.remedy) from error


def _check_length(prompt_tokens: int, max_tokens: int, body: Body, model: ModelInfo) -> None:
    """Raises ContextExceeded with a remedy that works."""
    room = model.context_max_tokens - prompt_tokens
    if max_tokens <= room:
        return
    limit, prompt = _limit_field(body), "messages" if isinstance(body, ChatBody) else "prompt"
    text = f"the context of {model.name} holds {model.context_max_tokens} tokens, the prompt has {prompt_tokens}"
    if room < 1:
        raise ContextExceeded(text, field=prompt, remedy="shorten it")
    remedy = f"lower {limit} to {room}, or shorten {prompt}"
    raise ContextExceeded(f"{text}, and {limit} is {max_tokens}", field=prompt, remedy=remedy)


def _seed(seed: int | None, sample: int, request_id: str) -> int:
    """Samples of one prompt differ; so do requests that name no seed."""
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")
    return (seed + sample) % (1 << SEED_BITS)


def _chat_prompt(body: ChatBody, served: Served, render: Render) -> Int32Array:
    """The template writes the special tokens itself."""
    model, tokenizer = served.model, served.tokenizer
    if not model.chat_template:
        raise BadInput(
            "the served model has no chat template",
            field="messages",
            value=f"{len(body.messages)} messages",
            remedy="use POST /v1/completions",
        )
    if len(body.messages) > model.context_max_tokens:
        text = f"more than the {model.context_max_tokens} tokens of the context"
        raise ContextExceeded(text, field="messages", value=f"{len(body.messages)} messages", remedy="send fewer")
    variables = read_field(body, "chat_template_kwargs", dict[str, Any]) or {}
    spoken = [{"role": message.role, "content": message.text} for message in body.messages]
    text = render(model.chat_template, spoken, variables, text_bytes_max(tokenizer, model))
    return text_ids(text, tokenizer, model, special=False, field="messages")


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
