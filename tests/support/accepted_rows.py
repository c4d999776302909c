"""Which rows of a step hold (worker/loop/acceptance.py), for one request. DraftStep finds them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Drawn by a row whose mask was late.
NOTHING_DRAWN: Final = -1


def accepted_rows(fed: Sequence[int], drawn: Sequence[int], known: int, admitted: int) -> int:
    """How many rows of a step hold: its first ones.

    `fed` and `drawn` are tokens by row. The first `known` rows, 1 at least, were fed tokens that were known before the
    step: published in an earlier placement, or drawn by the step before. The selections of the first `admitted` rows
    fitted the hot buffer. A step whose first row drew nothing is launched again: 0.
    """
    if drawn[0] == NOTHING_DRAWN:
        return 0
    count = 1
    while count < min(len(fed), admitted) and (count < known or fed[count] == drawn[count - 1]):
        count += 1
    return count
