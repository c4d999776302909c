"""Requests as the journal and the placement table know them, without a submission."""

from __future__ import annotations

from coordinator.journal.records import RequestAccepted, RequestFacts, RequestOrdered, digest_of
from coordinator.scheduling.entries import RequestEntry
from coordinator.scheduling.events import ResumeOrder, RetractOrder
from coordinator.scheduling.placement_table import PlacementTable
from protocol import messages


def make_facts(
    request_index: int,
    prompt_tokens: int,
    max_tokens: int = 100,
    *,
    request_id: str = "r",
    rank: messages.Rank = (0, 0, 1),
    prefill_mode: str = messages.AUTO,
    prompt: bytes = b"",
    tenant: str = "",
    user: str = "",
    logprobs: int = messages.NO_LOGPROBS,
) -> RequestFacts:
    sampling = messages.Sampling(max_tokens=max_tokens, logprobs=logprobs)
    digest = digest_of(prompt)
    about = request_index, request_id, rank, "me", user, prompt_tokens
    return RequestFacts(*about, digest, sampling, 0.0, prefill_mode, tenant)


def make_accepted(
    request_index: int,
    prompt: bytes,
    max_tokens: int = 100,
    *,
    request_id: str = "",
    rank: messages.Rank = (0, 0, 1),
    logprobs: int = messages.NO_LOGPROBS,
) -> RequestAccepted:
    name, tokens = request_id or f"r{request_index}", len(prompt) // 4
    facts = make_facts(request_index, tokens, max_tokens, request_id=name, rank=rank, prompt=prompt, logprobs=logprobs)
    return RequestAccepted(facts, prompt)


def add_request(
    table: PlacementTable,
    request_index: int,
    priority: int,
    prompt_tokens: int,
    max_tokens: int,
    prefill_mode: str = messages.AUTO,
) -> RequestEntry:
    """A new request, waiting."""
    rank = table.next_rank(priority)
    return table.add(make_facts(request_index, prompt_tokens, max_tokens, rank=rank, prefill_mode=prefill_mode))


def make_ordered(request_index: int = 3, *, held: bool) -> RequestOrdered:
    return RequestOrdered(request_index, held, messages.NO_HOT_BUFFER)


def retract(keep: bool, held: bool, reason: str) -> RetractOrder:
    return RetractOrder(keep, make_ordered(held=held), reason)


def resume(reason: str) -> ResumeOrder:
    return ResumeOrder(make_ordered(held=False), reason)
