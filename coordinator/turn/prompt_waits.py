"""The progress of a prompt on a worker, and what it waits for there. Pure.

A worker tells which rows of a prompt are durable each time a pass of it has ended; the rest is known from the placement
table. Which prompt comes next is the worker's decision: owners share, and of one owner's the shortest rest comes first.
So "behind" counts the prompts that are under way and those that have fewer tokens left. It is an estimate, no order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeAlias

from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from protocol.messages import Rank
from protocol.units import PAGE_TOKENS

#: What orders prompts of a worker: whether no pass of the prompt has ended, its tokens left, its request's rank.
_Place: TypeAlias = tuple[bool, int, Rank]


class PromptWaits:
    """Prompts that are not staged, as of one moment: make another at the next. `durable` gives the durable rows of a
    request index in its present placement."""

    def __init__(self, placement_table: PlacementTable, durable: Callable[[int], int]) -> None:
        self._placement_table = placement_table
        self._durable = durable
        self._places: dict[str, list[_Place]] = {}  # by worker, in order; of those that were asked for

    def explain(self, entry: RequestState) -> str:
        """Return how much of the prompt is computed, or how many prompts come first; "" if it is staged, or goes
        through decode steps, or before its worker is back."""
        if entry.request_index not in self._placement_table.computing:
            return ""
        place = waits, left, _ = self._place(entry)
        places = self._on(entry.worker)
        ahead = places[: bisect_left(places, place)] if waits else []
        if not ahead:
            total = entry.facts.prompt_tokens
            return f"prompt: {total - left} of {total} tokens computed on {entry.worker}"
        prompts = "1 prompt" if len(ahead) == 1 else f"{len(ahead)} prompts"
        tokens = sum(tokens for _, tokens, _ in ahead)
        return f"prompt: {left} tokens wait behind {prompts} of {tokens} tokens on {entry.worker}"

    def _on(self, worker: str) -> list[_Place]:
        if worker not in self._places:
            computing = self._placement_table.computing.values()
            self._places[worker] = sorted(self._place(entry) for entry in computing if entry.worker == worker)
        return self._places[worker]

    def _place(self, entry: RequestState) -> _Place:
        reused = entry.shared_pages * PAGE_TOKENS
        computed = max(reused, self._durable(entry.request_index))
        return computed == reused, entry.facts.prompt_tokens - computed, entry.rank
