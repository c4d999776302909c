"""Checks of a submitted request. Pure. Refuse in full, with field, value and remedy, or accept in full."""

from __future__ import annotations

from collections.abc import Sequence

from basics.request_checks import check_draft_tokens, check_name, check_orders, check_salt, check_token_ids
from protocol.arrays import Int32Array, unpack_int32
from protocol.errors import BadInput, CapacityError, Unavailable
from protocol.messages import (
    AUTO,
    BOTH,
    DECODE,
    DIRECT,
    LOGPROBS_OF_ANSWER_MAX,
    NAME_CHARS_MAX,
    PREFILL,
    PREFILL_MODES,
    STAGED,
    ModelInfo,
    Sampling,
    Submit,
    WorkerCapacity,
)
from protocol.sizing import Length, Misfit, misfit


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


def check_length(prompt_tokens: int, max_tokens: int, model: ModelInfo) -> None:
    """Raises BadInput for what the model's context cannot hold."""
    total = prompt_tokens + max_tokens
    if total > model.context_max_tokens:
        raise BadInput(
            f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} make {total}, "
            f"the context of {model.name} holds {model.context_max_tokens} (the model's, or worker.context_max_tokens)",
            field="prompt",
            value=f"{prompt_tokens} tokens",
            remedy="shorten the prompt or lower max_tokens",
        )


def check_fits(length: Length, capacities: Sequence[tuple[str, WorkerCapacity]], prefill_mode: str = AUTO) -> None:
    """Raise CapacityError, with what the worker that lacks least lacks first, when no worker could run it alone, or
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
    first = min(known, key=len)[0]
    raise CapacityError(
        first.text,
        field="prompt",
        value=f"{length.prompt} tokens, max_tokens {length.max}",
        remedy=f"shorten it, or change {first.setting}",
    )


def _misfit_alone(length: Length, capacities: Sequence[tuple[str, WorkerCapacity]]) -> tuple[Misfit, ...] | None:
    """Why no worker could prefill and decode it, at best; None: there is none for that."""
    found: list[tuple[Misfit, ...]] = []
    for worker, capacity in capacities:
        if capacity.role == BOTH:
            found.append(misfit(length, capacity, worker))
            if not found[-1]:
                return ()
    return sorted(found, key=len)[0] if found else None


def _share(one: WorkerCapacity, other: WorkerCapacity) -> bool:
    return (one.pool_path, one.pool_id) == (other.pool_path, other.pool_id)


def _mismatch(first: str, one: WorkerCapacity, second: str, other: WorkerCapacity) -> tuple[Misfit, ...]:
    """Pages travel as they are, and are never converted."""
    if one.page_bytes == other.page_bytes:
        return ()
    text = f"host pages of {first} have {one.page_bytes} bytes, those of {second} {other.page_bytes}"
    return (Misfit(text, "worker.kv_dtype"),)


def _misfit_paired(
    length: Length, capacities: Sequence[tuple[str, WorkerCapacity]], prefill_mode: str
) -> tuple[Misfit, ...] | None:
    """Return what is too small on the best pair of workers that can hand pages over. Unless asked for, the first is one
    that does nothing else."""
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


def _check_tokens(prompt: Int32Array, model: ModelInfo) -> None:
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= model.vocab_size:
        raise BadInput(
            f"token ids of {model.name} are 0..{model.vocab_size - 1}",
            field="prompt",
            value=low if low < 0 else high,
            remedy="use the tokenizer of the served model",
        )
