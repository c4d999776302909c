"""The state of a worker in words: what its group waits for, beside its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from protocol.messages import WorkerRow

#: Ranks named in one cell of a table; the rest are counted.
RANKS_NAMED_MAX: Final = 4


def state_text(row: WorkerRow) -> str:
    """Say "connected", "connected, rank 3 missing" or "connected, awaits w3"."""
    parts = [row.state]
    if row.ranks_missing:
        ranks = row.ranks_missing
        named = ", ".join(map(str, ranks[:RANKS_NAMED_MAX])) + (", …" if len(ranks) > RANKS_NAMED_MAX else "")
        parts.append(f"rank{'' if len(ranks) == 1 else 's'} {named} missing")
    if row.awaits:
        parts.append(f"awaits {row.awaits}")
    return ", ".join(parts)
