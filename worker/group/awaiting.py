"""Which rank the others wait for. Pure.

A rank that is stopped is silent. A rank whose decode loop hangs has launched less, or entered fewer exchanges, than
those that wait for it. A rank that waits goes on beating, so that only the one that is awaited is blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from worker.group.messages import Standing

#: Seconds without a word after which a rank counts as silent. Ranks beat every control.BEAT_S.
SILENT_S: Final = 1.0
HUB: Final = 0


def silent(ages_s: Sequence[float], hub_age_s: float) -> int | None:
    """The rank that has been silent longest, past SILENT_S. `ages_s` by rank, as rank 0 said `hub_age_s` ago.

    While rank 0 is silent nothing is known of others.
    """
    if hub_age_s > SILENT_S:
        return HUB
    oldest = max(range(len(ages_s)), key=ages_s.__getitem__)
    return oldest if ages_s[oldest] > SILENT_S else None


def behind(rank: int, standings: Sequence[Standing]) -> int | None:
    """Of the ranks behind `rank`, the one furthest behind, which the others wait for; None: no rank is behind."""
    own = _progress(standings[rank])
    last = min(range(len(standings)), key=lambda other: _progress(standings[other]))
    return last if _progress(standings[last]) < own else None


def _progress(standing: Standing) -> tuple[int, int]:
    return standing.entered, standing.launched
