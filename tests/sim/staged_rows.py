"""A prompt that was staged is not prefilled again after its worker was lost: full pages of it are begun with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from basics.request_states import State
from coordinator.state.lifecycle import EventKind
from coordinator.state.request_state import Transition
from protocol import messages, units
from tests.sim.trace import Violation


def check_staged(
    admit: messages.Admit, history: Sequence[Transition], prompt_tokens: int, prefills: Callable[[str], bool]
) -> None:
    """`history` ends with this admission. Raise Violation when less is there than the lost worker had staged.

    What an operator or policy dropped meanwhile is not looked at, nor a loss in an earlier life of the coordinator.
    `prefills`: whether a worker computes prompts. What one that only decodes loses is computed anew where it must be in
    the bits of prefill, as in this model.
    """
    there = admit.durable_tokens or admit.prefix_tokens
    full = (prompt_tokens - 1) // units.PAGE_TOKENS * units.PAGE_TOKENS
    if there >= full or not _lost_after_staging(reversed(history[:-1]), prefills):
        return
    raise Violation(
        "staged",
        f"{admit.request_id} was staged when its worker was lost, and begins with {there} rows of {prompt_tokens}",
    )


def _lost_after_staging(lines: Iterator[Transition], prefills: Callable[[str], bool]) -> bool:
    """Whether the last placement was lost once its prompt was staged. `lines`, latest first."""
    is_lost = is_staged = False
    for line in lines:
        match line.event:
            case EventKind.WAITS | EventKind.RESUME if not is_lost:
                continue
            case EventKind.LOST if not is_lost:
                is_lost = True
            case EventKind.STAGED if is_lost:
                is_staged = line.state == State.READY  # and not for another worker
            case EventKind.ADMITTED if is_lost:
                worker = line.reason.partition(",")[0].removeprefix("on ")
                return prefills(worker) and (is_staged or (line.state == State.READY and "steps" not in line.reason))
            case EventKind.RETRACT | EventKind.DEMOTED | EventKind.END | "recovered" | "...":
                return False
            case _ if not is_lost:
                return False
    return False
