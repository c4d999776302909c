"""Pauses and limits of the restarts of processes that have died. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from basics.request_states import POISON_STRIKES

#: The first and the longest pause before a restart.
RESTART_PAUSE_MIN_S: Final = 0.5
RESTART_PAUSE_MAX_S: Final = 30.0
#: A child is given up after more short lives in a row than these.
RESTARTS_MAX: Final = 12
#: From when on a process counts as serving whose service is not seen, as that of an HTTP front.
STABLE_S: Final = 60.0

assert RESTART_PAUSE_MIN_S * 2**RESTARTS_MAX > RESTART_PAUSE_MAX_S  # the longest pause is reached before giving up
assert RESTARTS_MAX >= 2 * POISON_STRIKES  # two poisonous requests are found before their worker is given up


@dataclass
class Restarts:
    """Pauses before the restarts of one child. Pure."""

    short_lives: int = 0
    pause_s: float = RESTART_PAUSE_MIN_S

    def after(self, served_s: float) -> float | None:
        """Seconds to wait after a life in which the child served for `served_s`; None: do not restart it."""
        self.short_lives = 1 if served_s > self.pause_s else self.short_lives + 1
        if self.short_lives > RESTARTS_MAX:
            return None
        self.pause_s = min(RESTART_PAUSE_MIN_S * 2 ** (self.short_lives - 1), RESTART_PAUSE_MAX_S)
        return self.pause_s


def unseen_service_s(ran_s: float) -> float:
    """Estimate how long a process has served that ran for `ran_s`, where the begin of its service is not seen."""
    return ran_s if ran_s >= STABLE_S else 0.0
