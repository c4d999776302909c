"""From a body to requests of the coordinator: one for each sample of each prompt. Pure.

Ids are the client's (header X-Request-Id) or made by the front. One sample has the id itself, several have `ID-0`,
`ID-1`, ... A repeated body under the client's own id makes the same requests, to the last field, so that the
coordinator knows them again; that is why a missing seed is drawn from the id and not from a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hisparse.http import chat
from hisparse.http.bodies import CHOICES_MAX, PROMPTS_MAX, Body, ChatBody, CompletionBody, StreamOptions
from protocol.arrays import Int32Array
from protocol.errors import BadInput, NotFound
from protocol.messages import ModelInfo, Sampling
from protocol.text import Tokenizer

#: As OpenAI has it for /v1/completions.
COMPLETION_TOKENS_DEFAULT: Final = 16
#: Of a chat, unless the context leaves less. The whole context, as OpenAI has it, would reserve memory for it.
CHAT_TOKENS_DEFAULT: Final = 4_096
TEMPERATURE_DEFAULT: Final = 1.0
SEED_BITS: Final = 63
#: Of a refused value, in its refusal.
VALUE_CHARS_MAX: Final = 80


@dataclass(frozen=True)
class SampleAsk:
    """One request of the coordinator."""

    request_id: str
    prompt: Int32Array
    sampling: Sampling
    priority: int

    def same_as(self, other: SampleAsk) -> bool:
        same_rest = (self.sampling, self.priority) == (other.sampling, other.priority)
        return same_rest and np.array_equal(self.prompt, other.prompt)


@dataclass(frozen=True)
class Ask:
    """A body, checked and tokenized. `prompt_tokens` counts each prompt once, however many samples it has."""

    id: str
    is_chat: bool
    model: str
    choices: tuple[SampleAsk, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool


@dataclass(frozen=True)
class Served:
    """What the front knows of the served model."""

    model: ModelInfo
    tokenizer: Tokenizer


def ask_of(body: CompletionBody | ChatBody, served: Served, ask_id: str, strftime_now: Callable[[str], str]) -> Ask:
    """Raises BadInput, or NotFound for another model. Takes as long as tokenizing the prompts does."""
    _check_model(body, served.model)
    if isinstance(body, ChatBody):
        prompts = [_chat_prompt(body, served, strftime_now)]
        max_tokens = _first(body.max_completion_tokens, body.max_tokens)
        room = max(1, served.model.context_max_tokens - prompts[0].size)
        limits = [_first(max_tokens, min(CHAT_TOKENS_DEFAULT, room))]
    else:
        prompts = list(_prompts(body.prompt, served))
        limits = [_first(body.max_tokens, COMPLETION_TOKENS_DEFAULT)] * len(prompts)
    options = body.stream_options or StreamOptions()
    return Ask(
        id=ask_id,
        is_chat=isinstance(body, ChatBody),
        model=served.model.name,
        choices=tuple(_choices(body, prompts, limits, ask_id)),
        prompt_tokens=sum(prompt.size for prompt in prompts),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        usage_in_every_chunk=bool(options.continuous_usage_stats),
    )


def _check_model(body: Body, model: ModelInfo) -> None:
    if body.model not in (None, model.name):
        raise NotFound("is not served here", field="model", value=body.model, remedy=f"use {model.name}")


def _choices(body: Body, prompts: Sequence[Int32Array], limits: Sequence[int], ask_id: str) -> Iterator[SampleAsk]:
    samples = _first(body.n, 1)
    total = samples * len(prompts)
    if total > CHOICES_MAX:
        raise BadInput(f"more than {CHOICES_MAX} samples", field="n", value=total, remedy="send several requests")
    for index in range(total):
        request_id = ask_id if total == 1 else f"{ask_id}-{index}"
        which = index // samples
        sampling = Sampling(
            max_tokens=limits[which],
            temperature=_first(body.temperature, TEMPERATURE_DEFAULT),
            top_p=_first(body.top_p, 1.0),
            seed=_seed(body.seed, index % samples, request_id),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            ignore_eos=body.ignore_eos,
        )
        yield SampleAsk(request_id, prompts[which], sampling, body.priority)


def _seed(seed: int | None, sample: int, request_id: str) -> int:
    """Samples of one prompt differ; so do requests that name no seed."""
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")
    return (seed + sample) % (1 << SEED_BITS)


def _chat_prompt(body: ChatBody, served: Served, strftime_now: Callable[[str], str]) -> Int32Array:
    """The template writes the special tokens itself."""
    text = chat.render(served.model.chat_template, body.messages, body.chat_template_kwargs or {}, strftime_now)
    return _checked_ids(served.tokenizer.encode(text, special=False), served.model)


def _prompts(prompt: str | list[Any], served: Served) -> Iterator[Int32Array]:
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    if len(prompts) > PROMPTS_MAX:
        raise BadInput(
            f"more than {PROMPTS_MAX} prompts", field="prompt", value=len(prompts), remedy="send several requests"
        )
    for one in prompts:
        yield _checked_ids(served.tokenizer.encode(one) if isinstance(one, str) else one, served.model)


def _checked_ids(ids: object, model: ModelInfo) -> Int32Array:
    """As int32. Raises BadInput unless `ids` is a list of token ids of the model, at least one."""
    odd = next((it for it in ids if type(it) is not int), None) if isinstance(ids, list) else ids
    if odd is not None or not isinstance(ids, list):
        raise BadInput(
            "is no prompt, or part of one",
            field="prompt",
            value=str(odd)[:VALUE_CHARS_MAX],
            remedy="send a text, a list of texts, token ids, or lists of token ids",
        )
    if not ids:
        raise BadInput("is empty", field="prompt", value="0 tokens", remedy="give at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= model.vocab_size:
        raise BadInput(
            f"token ids of {model.name} are 0..{model.vocab_size - 1}",
            field="prompt",
            value=low if low < 0 else high,
            remedy="use the tokenizer of the served model",
        )
    return np.array(ids, np.int32)


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
