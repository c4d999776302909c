"""Costs of the rest of a prompt, behind cached pages, through decode steps and through prefill. Pure.

By what was measured on the worker: the time from admission to staged of its prompts, in units of SHORT_TOKENS that they
computed, and the time of a decode step. A step takes one token of the rest, whatever else the batch decodes; a prefill
takes one unit of time at least, and its cached rows are loaded layer by layer. As long
as one of the two was not measured, prompts are prefilled.
"""

from __future__ import annotations

from typing import Final

from protocol.units import PAGE_TOKENS

#: Prompts up to so many tokens cost one unit of time, whatever their length: reading the weights of all layers takes
#: most of it.
SHORT_TOKENS: Final = 512
#: A longer rest is prefilled in any case: each of its tokens is a step of the whole batch.
REST_TOKENS_MAX: Final = PAGE_TOKENS
#: Weight of the latest prompt.
WEIGHT: Final = 1 / 4


class PrefillCosts:
    """Seconds of a short prompt, by worker."""

    def __init__(self) -> None:
        self._unit_s: dict[str, float] = {}

    def note(self, worker: str, tokens: int, seconds: float) -> None:
        """A prompt was computed and staged, but for its cached pages: `tokens` of it in `seconds`."""
        unit_s = seconds / max(1, -(-tokens // SHORT_TOKENS))
        before = self._unit_s.get(worker, unit_s)
        self._unit_s[worker] = before + (unit_s - before) * WEIGHT

    def forget(self, worker: str) -> None:
        """It is gone, and another of its name may be another machine."""
        self._unit_s.pop(worker, None)

    def prefers_steps(self, worker: str, rest_tokens: int, step_s: float) -> bool:
        """Return whether `rest_tokens` go through decode steps of `step_s` seconds (0: not measured)."""
        unit_s = self._unit_s.get(worker, 0.0)
        return step_s > 0 and 0 < rest_tokens <= REST_TOKENS_MAX and rest_tokens * step_s < unit_s
