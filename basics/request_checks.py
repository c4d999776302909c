"""Checks of what a request may ask for, whatever its prompt, wherever they are made. Pure."""

from __future__ import annotations

import math
from typing import Final

from protocol.errors import BadInput
from protocol.messages import (
    DRAFT_TOKENS_MAX,
    GRAMMAR_CHARS_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    NAME_CHARS_MAX,
    NO_LOGPROBS,
    PRIORITY_MAX,
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    ModelInfo,
    Sampling,
)

TEMPERATURE_MAX: Final = 100.0
TOP_P_MIN: Final = 1e-6
SEED_MAX: Final = 2**63 - 1
PENALTY_MAX: Final = 2.0
REPETITION_PENALTY_MIN: Final = 1e-3
REPETITION_PENALTY_MAX: Final = 1e3
LOGIT_BIAS_LIMIT: Final = 100.0
TOP_K_MAX: Final = 2**31 - 1


def check_draft_tokens(count: int) -> None:
    """Raises BadInput for a count that no worker drafts. A worker that drafts fewer tokens drafts its own number."""
    check_range("draft_tokens", count, 0, DRAFT_TOKENS_MAX)


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
    check_range("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)


def check_priority(priority: int, limit: int, where: str) -> None:
    """`limit` is the highest that its key may ask for, and `where` it is written. Raises BadInput."""
    check_range("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
    if priority > limit:
        raise BadInput(
            f"the limit of this key is {limit}",
            field="priority",
            value=priority,
            remedy=f"ask for {limit} or less, or let the operator raise the limit in {where}",
        )


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


def _check_sampling(sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise BadInput(
            "at least one token must be asked for", field="max_tokens", value=sampling.max_tokens, remedy="raise it"
        )
    check_range("temperature", sampling.temperature, 0.0, TEMPERATURE_MAX)
    check_range("top_p", sampling.top_p, TOP_P_MIN, 1.0)
    check_range("seed", sampling.seed, 0, SEED_MAX)
    if sampling.logprobs != NO_LOGPROBS:
        check_range("logprobs", sampling.logprobs, 0, LOGPROBS_MAX)
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
    check_range("top_k", sampling.top_k, 0, TOP_K_MAX)
    check_range("min_p", sampling.min_p, 0.0, 1.0)
    check_range("frequency_penalty", sampling.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
    check_range("presence_penalty", sampling.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
    check_range("repetition_penalty", sampling.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX)
    check_range("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    _check_count("logit_bias", len(sampling.logit_bias), LOGIT_BIAS_MAX)
    _check_count("stop_token_ids", len(sampling.stop_token_ids), STOP_TOKEN_IDS_MAX)
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise BadInput("names a token twice", field="logit_bias", remedy="give each token one bias")
    for _, bias in sampling.logit_bias:
        check_range("logit_bias", bias, -LOGIT_BIAS_LIMIT, LOGIT_BIAS_LIMIT)
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


def check_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadInput(f"must be {low} to {high}", field=field, value=value, remedy="choose a value in that range")
