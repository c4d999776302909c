"""What listings and `hisparse top` say alike of a request and of a worker. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from protocol.messages import RequestRow, WorkerRow

#: Ranks named in one cell of a table; the rest are counted.
RANKS_NAMED_MAX: Final = 4
#: Hot slots of a request that holds all rows on its device (protocol.sizing.RESIDENT); below: it has no hot buffer.
RESIDENT: Final = 0


def hit_share(row: RequestRow) -> float | None:
    """Share of rows that swap-in found in the hot buffer.

    None: it has looked up no row, or all rows are on the device; of a request that has no hot buffer any more, it has
    missed none.
    """
    lookups = row.hits + row.misses
    is_whole = row.hot_slots == RESIDENT or (row.hot_slots < RESIDENT and not row.misses)
    return row.hits / lookups if lookups and not is_whole else None


def draft_share(row: RequestRow) -> float | None:
    """Share of verified drafts that are in the output; None: no draft was verified."""
    return row.accepted_tokens / row.drafted_tokens if row.drafted_tokens else None


def floor_text(row: WorkerRow) -> str:
    """The smallest hot size that policy gives there, in slots; a dash where none was chosen yet."""
    if row.hot_sizing is None:
        return "-"
    return str(row.hot_sizing.hot_slots) if row.hot_sizing.hot_slots else "resident"


def predicted_text(row: WorkerRow) -> str:
    """Milliseconds that the model of steps predicts at that size."""
    it = row.hot_sizing
    return f"{it.predicted_step_us / 1000:.2f}" if it is not None and it.predicted_step_us else "-"


def swap_text(row: RequestRow) -> str:
    """Say "75.0% hits (3 hits, 1 miss)", or why there is no such figure."""
    share = hit_share(row)
    if share is not None:
        return f"{100 * share:.1f}% hits ({count_text(row.hits, 'hit')}, {count_text(row.misses, 'miss', 'misses')})"
    if row.hot_slots == RESIDENT:
        return "none needed (all rows are on the device)"
    return "none needed (all rows were on the device)" if row.hits else "none yet"


def count_text(count: int, one: str, more: str = "") -> str:
    """Say "1 miss", "2 misses"; without `more` the plural ends in s."""
    return f"{count} {one if count == 1 else more or one + 's'}"


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
