"""Requests as the journal and the placement table know them, without a submission."""

from __future__ import annotations

from typing import NamedTuple

from coordinator.journal.records import RequestAccepted, RequestFacts, RequestOrdered, digest_of
from coordinator.state.events import Admitted, DemoteOrder, ResumeOrder, RetractOrder
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import Action, RequestState, Rows
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
) -> RequestState:
    """A new request, waiting."""
    rank = table.next_rank(priority)
    return table.add(make_facts(request_index, prompt_tokens, max_tokens, rank=rank, prefill_mode=prefill_mode))


def make_ordered(request_index: int = 3, *, held: bool) -> RequestOrdered:
    return RequestOrdered(request_index, held, messages.NO_HOT_BUFFER)


class OrderOf(NamedTuple):
    """An order of an operator's, and whether the request is held with it."""

    held: bool
    order: RetractOrder | ResumeOrder


def retract(keep: bool, held: bool, reason: str) -> OrderOf:
    return OrderOf(held, RetractOrder(keep, reason))


def resume(reason: str) -> OrderOf:
    return OrderOf(False, ResumeOrder(reason))


def handle(request: RequestState, event: object, rows: Rows, now: float) -> list[Action]:
    """Have `request` handle `event`; its orders and its place have changed before, as the
    Scheduler does it."""
    if isinstance(event, OrderOf):
        request.ordered = make_ordered(held=event.held)
        event = event.order
    elif isinstance(event, Admitted):
        request.placement, request.worker = event.command.placement, event.worker
        request.own_tokens, request.kept_tokens = request.facts.part_of_prompt(request.kept_tokens), 0
        request.prefills_only = event.command.hot_slots == messages.NO_HOT_BUFFER
    elif isinstance(event, DemoteOrder):
        request.kept_tokens = 0
    return request.handle(event, rows, now)  # type: ignore[arg-type]
