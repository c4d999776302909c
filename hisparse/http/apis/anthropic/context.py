"""Edits of the context of /v1/messages: earlier thinking is kept, or cleared but for the latest turns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal

import msgspec

from hisparse.http.models.formats.conversation import Turn

#: The edit that is done; others are refused by name.
CLEAR_THINKING: Final = "clear_thinking_20251015"
#: Turns whose thinking is kept where a body does not say how many.
TURNS_DEFAULT: Final = 1


class AllTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="all", tag_field="type"):
    pass


class LatestTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="thinking_turns", tag_field="type"):
    value: int


class ClearThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=CLEAR_THINKING, tag_field="type"):
    keep: AllTurns | LatestTurns | Literal["all"] | None = None

    @property
    def turns(self) -> int | None:
        """The number of the latest turns that keep their thinking; None: all."""
        if self.keep is None:
            return TURNS_DEFAULT
        return max(0, self.keep.value) if isinstance(self.keep, LatestTurns) else None


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    edits: list[ClearThinking] | None = None


def cleared_of_thinking(turns: Sequence[Turn], keep: int) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """The turns without the thinking of all but the latest `keep` turns that have some, and that thinking, by turn. A
    turn of the assistant is all that was said between two texts of the user: results of tools end none."""
    spans = [span for span in _spans(turns) if any(turns[at].reasoning for at in span)]
    cleared = spans[: len(spans) - keep] if keep else spans
    places = {at for span in cleared for at in span}
    left = tuple(replace(turn, reasoning="") if at in places else turn for at, turn in enumerate(turns))
    return left, tuple("".join(turns[at].reasoning for at in span) for span in cleared)


def _spans(turns: Sequence[Turn]) -> Iterator[list[int]]:
    """The places of the assistant's messages, by turn."""
    span: list[int] = []
    for at, turn in enumerate(turns):
        if turn.role == "assistant":
            span.append(at)
        elif turn.role != "tool":
            yield span
            span = []
    yield span
