"""What a submitted request must look like. Pure. Refuse in full, with field, value and remedy, or accept in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from protocol.arrays import Int32Array, unpack_int32
from protocol.errors import BadInput, CapacityError, Unavailable
from protocol.messages import (
    AUTO,
    BOTH,
    DECODE,
    DIRECT,
    DRAFT_TOKENS_MAX,
    GRAMMAR_CHARS_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    LOGPROBS_OF_ANSWER_MAX,
    NAME_CHARS_MAX,
    NO_LOGPROBS,
    PREFILL,
    PREFILL_MODES,
    PRIORITY_MAX,
    STAGED,
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    ModelInfo,
    Sampling,
    Submit,
    WorkerCapacity,
)
from protocol.sizing import Length, misfit

TEMPERATURE_MAX: Final = 100.0
TOP_P_MIN: Final = 1e-6
SEED_MAX: Final = 2**63 - 1
PENALTY_MAX: Final = 2.0
REPETITION_PENALTY_MIN: Final = 1e-3
REPETITION_PENALTY_MAX: Final = 1e3
LOGIT_BIAS_LIMIT: Final = 100.0
TOP_K_MAX: Final = 2**31 - 1


def check_submit(submit: Submit, model: ModelInfo) -> Int32Array:
    """The prompt's token ids. Raises BadInput, or ProtocolError for bytes that are no int32 array."""
    check_name("request_id", submit.request_id, empty=True)
    check_name("tenant", submit.tenant, empty=True)
    check_salt(submit.cache_salt)
    prompt = unpack_int32(submit.prompt, "prompt")
    if not prompt.size:
        raise BadInput("the prompt is empty", field="prompt", value="0 tokens", remedy="give at least one token")
    _check_tokens(prompt, model)
    check_orders(submit.sampling, submit.priority)
    check_token_ids(submit.sampling, model)
    _check_logprobs(submit.sampling)
    if submit.prefill_mode not in PREFILL_MODES:
        raise BadInput(
            "no such prefill mode",
            field="prefill_mode",
            value=submit.prefill_mode[:NAME_CHARS_MAX],
            remedy=f"use one of {', '.join(PREFILL_MODES)}",
        )
    if (trace := submit.trace) is not None and not (any(trace.trace_id) and any(trace.span_id)):
        raise BadInput("an id of zeros is none", field="trace", value="00", remedy="leave it out")
    check_draft_tokens(submit.draft_tokens)
    check_length(prompt.size, submit.sampling.max_tokens, model)
    return prompt


def check_draft_tokens(count: int) -> None:
    """Raises BadInput for a count that no worker drafts. A worker that drafts fewer tokens drafts its own number."""
    _check_range("draft_tokens", count, 0, DRAFT_TOKENS_MAX)


def check_token_ids(sampling: Sampling, model: ModelInfo) -> None:
    """Raises BadInput for ids in `sampling` that `model` has not, for more alternatives than it has, and for a grammar
    that no token of it can end."""
    if sampling.logprobs > model.vocab_size:
        text = f"{model.name} has {model.vocab_size} tokens"
        raise BadInput(text, field="logprobs", value=sampling.logprobs, remedy=f"ask for {model.vocab_size} or less")
    if sampling.grammar and not model.eos_token_ids:
        raise BadInput(
            f"{model.name} has no end-of-sequence token, with which an output of a grammar ends",
            field="grammar",
            value=f"{len(sampling.grammar)} characters",
            remedy="leave it out",
        )
    named = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": sampling.stop_token_ids}
    for field, ids in named.items():
        for token in ids:
            if not 0 <= token < model.vocab_size:
                raise BadInput(
                    f"token ids of {model.name} are 0..{model.vocab_size - 1}",
                    field=field,
                    value=token,
                    remedy="use the tokenizer of the served model",
                )


def _check_logprobs(sampling: Sampling) -> None:
    """Raises BadInput for more than a request may take of the room of all outputs."""
    each = 1 + sampling.logprobs
    if sampling.max_tokens * each > LOGPROBS_OF_ANSWER_MAX:
        text = (
            f"{sampling.max_tokens} tokens with {each} log-probabilities each make {sampling.max_tokens * each}, "
            f"and {LOGPROBS_OF_ANSWER_MAX} are accepted"
        )
        remedy = f"set max_tokens to {LOGPROBS_OF_ANSWER_MAX // each} or less"
        raise BadInput(text, field="logprobs", value=sampling.logprobs, remedy=remedy)


def check_salt(cache_salt: str) -> None:
    """Raises BadInput for one that is too long."""
    if len(cache_salt) > NAME_CHARS_MAX:
        raise BadInput(
            f"a salt has {NAME_CHARS_MAX} characters at most",
            field="cache_salt",
            value=f"{len(cache_salt)} characters",
            remedy="shorten it, or send a digest of it",
        )


def check_orders(sampling: Sampling, priority: int) -> None:
    """Raises BadInput for what could not be carried out for any prompt."""
    _check_sampling(sampling)
    _check_range("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)


def check_priority(priority: int, limit: int, where: str) -> None:
    """`limit` is the highest that its key may ask for, and `where` it is written. Raises BadInput."""
    _check_range("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
    if priority > limit:
        raise BadInput(
            f"the limit of this key is {limit}",
            field="priority",
            value=priority,
            remedy=f"ask for {limit} or less, or let the operator raise the limit in {where}",
        )


def check_length(prompt_tokens: int, max_tokens: int, model: ModelInfo) -> None:
    """Raises BadInput for what the model's context cannot hold."""
    total = prompt_tokens + max_tokens
    if total > model.context_max_tokens:
        raise BadInput(
            f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} make {total}, "
            f"the context of {model.name} holds {model.context_max_tokens}",
            field="prompt",
            value=f"{prompt_tokens} tokens",
            remedy="shorten the prompt or lower max_tokens",
        )


def check_fits(length: Length, capacities: Sequence[tuple[str, WorkerCapacity]], prefill_mode: str = AUTO) -> None:
    """Raise CapacityError, with the arithmetic of the worker that lacks least, when no worker could run it alone, or
    (directly) no two of them together. Raise Unavailable when there are no workers for the `prefill_mode` that it was
    asked to come."""
    alone = None if prefill_mode == DIRECT else _misfit_alone(length, capacities)
    if not capacities or alone == ():
        return
    paired = None if prefill_mode == STAGED else _misfit_paired(length, capacities, prefill_mode)
    if paired == ():
        return
    known = [misfits for misfits in (alone, paired) if misfits is not None]
    if not known:
        raise Unavailable(
            "no worker prefills and decodes" if prefill_mode == STAGED else "no worker prefills for another to decode",
            field="prefill_mode",
            value=prefill_mode,
            remedy="ask for another prefill mode, or retry when workers of these roles are there",
        )
    raise CapacityError(
        "; ".join(sorted(known, key=len)[0]),
        field="prompt",
        value=f"{length.prompt} tokens, max_tokens {length.max}",
        remedy="shorten it, or give workers more memory",
    )


def _misfit_alone(length: Length, capacities: Sequence[tuple[str, WorkerCapacity]]) -> tuple[str, ...] | None:
    """Why no worker could prefill and decode it, at best; None: there is none for that."""
    found: list[tuple[str, ...]] = []
    for worker, it in capacities:
        if it.role == BOTH:
            found.append(misfit(length, it, worker))
            if not found[-1]:
                return ()
    return sorted(found, key=len)[0] if found else None


def _share(one: WorkerCapacity, other: WorkerCapacity) -> bool:
    return (one.pool_path, one.pool_id) == (other.pool_path, other.pool_id)


def _mismatch(first: str, one: WorkerCapacity, second: str, other: WorkerCapacity) -> tuple[str, ...]:
    """Pages travel as they are, and are never converted."""
    if one.page_bytes == other.page_bytes:
        return ()
    return (f"host pages of {first} have {one.page_bytes} bytes, those of {second} {other.page_bytes}",)


def _misfit_paired(
    length: Length, capacities: Sequence[tuple[str, WorkerCapacity]], prefill_mode: str
) -> tuple[str, ...] | None:
    """Likewise of two workers that can hand pages over. Unless asked for, the first is one that does nothing else."""
    found = [
        _mismatch(first, one, second, other)
        + misfit(length, one, first, PREFILL)
        + misfit(length, other, second, DECODE)
        for first, one in capacities
        if one.role == PREFILL or (prefill_mode == DIRECT and one.role == BOTH)
        for second, other in capacities
        if other.decodes and first != second and (_share(one, other) or (one.sends and other.receives))
    ]
    return sorted(found, key=len)[0] if found else None


def check_name(field: str, name: str, *, empty: bool = False) -> None:
    """A name is printable, without spaces, and short. Raises BadInput."""
    if name.isprintable() and " " not in name and len(name) <= NAME_CHARS_MAX and (name or empty):
        return
    raise BadInput(
        f"must be up to {NAME_CHARS_MAX} printable characters without spaces",
        field=field,
        value=repr(name[:NAME_CHARS_MAX]),
        remedy="choose another name",
    )


def check_deadline(deadline_s: float, max_s: float) -> None:
    """Every wait is bounded (I8). Raises BadInput."""
    _check_range("deadline_s", deadline_s, 0.0, max_s)


def _check_tokens(prompt: Int32Array, model: ModelInfo) -> None:
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= model.vocab_size:
        raise BadInput(
            f"token ids of {model.name} are 0..{model.vocab_size - 1}",
            field="prompt",
            value=low if low < 0 else high,
            remedy="use the tokenizer of the served model",
        )


def _check_sampling(sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise BadInput(
            "at least one token must be asked for", field="max_tokens", value=sampling.max_tokens, remedy="raise it"
        )
    _check_range("temperature", sampling.temperature, 0.0, TEMPERATURE_MAX)
    _check_range("top_p", sampling.top_p, TOP_P_MIN, 1.0)
    _check_range("seed", sampling.seed, 0, SEED_MAX)
    if sampling.logprobs != NO_LOGPROBS:
        _check_range("logprobs", sampling.logprobs, 0, LOGPROBS_MAX)
    _check_adjustments(sampling)
    if len(sampling.stop) > STOP_STRINGS_MAX:
        raise BadInput(
            f"at most {STOP_STRINGS_MAX} stop strings", field="stop", value=len(sampling.stop), remedy="give fewer"
        )
    for text in sampling.stop:
        if not 0 < len(text) <= STOP_CHARS_MAX:
            raise BadInput(
                f"a stop string has 1 to {STOP_CHARS_MAX} characters",
                field="stop",
                value=f"{len(text)} characters",
                remedy="shorten or remove it",
            )


def _check_adjustments(sampling: Sampling) -> None:
    _check_range("top_k", sampling.top_k, 0, TOP_K_MAX)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
    _check_range("presence_penalty", sampling.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
    _check_range("repetition_penalty", sampling.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX)
    _check_range("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    _check_count("logit_bias", len(sampling.logit_bias), LOGIT_BIAS_MAX)
    _check_count("stop_token_ids", len(sampling.stop_token_ids), STOP_TOKEN_IDS_MAX)
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise BadInput("names a token twice", field="logit_bias", remedy="give each token one bias")
    for _, bias in sampling.logit_bias:
        _check_range("logit_bias", bias, -LOGIT_BIAS_LIMIT, LOGIT_BIAS_LIMIT)
    if sampling.grammar:
        _check_grammar(sampling)


def _check_grammar(sampling: Sampling) -> None:
    if len(sampling.grammar) > GRAMMAR_CHARS_MAX:
        raise BadInput(
            f"a grammar has {GRAMMAR_CHARS_MAX} characters at most",
            field="grammar",
            value=f"{len(sampling.grammar)} characters",
            remedy="shorten it",
        )
    for field in ("min_tokens", "ignore_eos"):
        if getattr(sampling, field):
            raise BadInput(
                "does not go with a grammar, which says where an output ends",
                field=field,
                value=getattr(sampling, field),
                remedy=f"leave {field} out",
            )


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise BadInput(f"at most {most} entries", field=field, value=f"{count} entries", remedy="give fewer")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadInput(f"must be {low} to {high}", field=field, value=value, remedy="choose a value in that range")
