"""What listings and `hisparse top` say alike of a request and of a worker. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from protocol.messages import RequestRow, WorkerRow

#: Ranks named in one cell of a table; the rest are counted.
RANKS_NAMED_MAX: Final = 4


def hit_share(row: RequestRow) -> float | None:
    """Share of rows that swap-in found in the hot buffer.

    None: it has looked up no row, or it is resident and has them all.
    """
    lookups = row.hits + row.misses
    return row.hits / lookups if lookups and row.hot_slots else None


def worker_state_text(row: WorkerRow) -> str:
    """Say "connected", "connected, rank 3 missing" or "connected, awaits w3"."""
    parts = [row.state]
    if row.ranks_missing:
        ranks = row.ranks_missing
        named = ", ".join(map(str, ranks[:RANKS_NAMED_MAX])) + (", …" if len(ranks) > RANKS_NAMED_MAX else "")
        parts.append(f"rank{'' if len(ranks) == 1 else 's'} {named} missing")
    if row.awaits:
        parts.append(f"awaits {row.awaits}")
    return ", ".join(parts)
