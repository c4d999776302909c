"""Every room of the coordinator that clients fill: its bound, an owner's share, what happens when it is full. Pure.

A *room* is a container, or a sum, that grows with what clients ask for. `ROOMS` is the one list of them. The page for
operators (`python -m coordinator.rooms`, in docs/operations.md), the metrics hisparse_coordinator_room_used and
_limit, and the alert HiSparseRoomNearlyFull follow from it. A container that grows with requests and is not named here
fails a test (tests/coordinator/test_rooms.py).

Left to their own processes: rooms of the HTTP front (hisparse.http.server), grammars and templates that it and workers
know again (protocol.grammar_trials, hisparse.http.models.templates). They forget, and make what they forgot again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from coordinator.shares import SHARE


class WhenFull(StrEnum):
    """REFUSES: what needs more is told so. FORGETS: the oldest goes, which costs time at most, or an old output. DROPS:
    what comes is lost, and counted."""

    REFUSES = "refuses"
    FORGETS = "forgets"
    DROPS = "drops"


class RoomUse(NamedTuple):
    """The amount that a room holds, and the most that it can hold."""

    used: float
    limit: float


class BoundedRoom(NamedTuple):
    """`holds`, `bound`, `share`: in words. `containers`: what grows with it, as Class.attribute; those of a class that
    there is one of for each request, connection or page are bounded with these, and named once."""

    name: str
    holds: str
    bound: str
    share: str
    when_full: WhenFull
    containers: tuple[str, ...] = ()


_OWN_SHARE: Final = f"{SHARE} times what is free, by user and tenant"
_KEY_SHARE: Final = f"{SHARE} times what is free, by user"

ROOMS: Final = (
    BoundedRoom(
        "output_places",
        "generated tokens of live and ended requests, and words of their log-probabilities",
        "2^28 places of 4 bytes; the room of a request follows what it generates",
        f"{_OWN_SHARE}, when a request is submitted",
        WhenFull.REFUSES,
        ("TokenLog._held",),
    ),
    BoundedRoom(
        "live_requests",
        "requests that have not ended",
        "coordinator.live_requests_max",
        _OWN_SHARE,
        WhenFull.REFUSES,
        (
            "RequestTable.live",
            "RequestTable.by_index",
            "RequestTable.by_placement",
            "RequestTable._live_of",
            "PlacementTable.entries",
            "PlacementTable.by_rank",
            "PlacementTable.starving",
            "PlacementTable.kept",
            "PlacementTable.unexplained",
            "OwnerTurns._counted",
            "OwnerTurns._held",
            "Supervisor._running",
        ),
    ),
    BoundedRoom(
        "waiting_requests",
        "live requests that wait for a worker",
        "coordinator.queue_max",
        _OWN_SHARE,
        WhenFull.REFUSES,
        ("PlacementTable.waiting",),
    ),
    BoundedRoom(
        "prompt_bytes",
        "prompts and grammars of live requests",
        "8 GiB",
        _OWN_SHARE,
        WhenFull.REFUSES,
        ("RequestTable._prompt_bytes_of",),
    ),
    BoundedRoom(
        "ended_requests",
        "states and outputs of ended requests, for clients that attach again",
        "coordinator.ended_keep_max, for coordinator.ended_keep_s",
        "none is kept beside others' need: the owner who has most gives up its oldest",
        WhenFull.FORGETS,
        ("RequestTable.ended", "RequestTable._ended_of", "JournalState.requests", "Deliveries._endings"),
    ),
    BoundedRoom(
        "history_lines",
        "lines of the histories of all requests",
        "64 of each request",
        "needs none: bounded for each request",
        WhenFull.FORGETS,
        ("RequestState.lines",),
    ),
    BoundedRoom(
        "warm_start_bytes",
        "what requests off their workers will ask for first",
        "128 MiB",
        "needs none: a hint, which saves time",
        WhenFull.FORGETS,
        ("WarmStarts._kept",),
    ),
    BoundedRoom(
        "prefix_pages",
        "host pages that hold rows of prompts for reuse, and their index",
        "host pages of all nodes that requests do not need",
        "an equal part of what is cached, lent where it is not used",
        WhenFull.FORGETS,
        (
            "PrefixIndex._digests",
            "PrefixIndex._ends",
            "PrefixIndex._nodes",
            "PrefixIndex._pages",
            "PrefixIndex._scopes",
            "EvictionOrder._accounts",
            "EvictionOrder._present",
            "EvictionOrder._ranking",
            "OwnerAccount.leaves",
        ),
    ),
    BoundedRoom(
        "prefix_roots",
        "roots of prefixes, one for each owner and salt",
        "1,024",
        "needs none: computed again in microseconds",
        WhenFull.FORGETS,
        ("PrefixReuse.roots",),
    ),
    BoundedRoom(
        "connections",
        "connections of clients and admins",
        "coordinator.connections_max",
        "coordinator.connections_per_key_max",
        WhenFull.REFUSES,
        (
            "ClientConnections._by_peer",
            "ClientConnections._by_index",
            "ClientConnections._free",
            "ConnectionTracker._users",
            "ConnectionEvents._counters",
            "UnfinishedMessages._connections",
        ),
    ),
    BoundedRoom(
        "subscriptions",
        "requests whose tokens connections are sent",
        "262,144",
        _KEY_SHARE,
        WhenFull.REFUSES,
        ("Subscriptions._rows", "Subscriptions._free", "Deliveries._reserved"),
    ),
    BoundedRoom(
        "outbox_bytes",
        "answers that wait for clients that do not read",
        "1 GiB; 64 MiB and 4,096 answers of each connection, which is then ended",
        _KEY_SHARE,
        WhenFull.DROPS,
        ("ClientConnection.outbox", "ClientConnections._outbox_bytes"),
    ),
    BoundedRoom(
        "commands",
        "submissions and commands that wait for their answer",
        "4,096",
        _KEY_SHARE,
        WhenFull.REFUSES,
        ("Gateway._asks", "Scheduler._messages"),
    ),
    BoundedRoom(
        "journal_records",
        "records that wait for the next commit",
        "262,144",
        "needs none: bounded by commands and live requests",
        WhenFull.REFUSES,
        ("_Group.records",),
    ),
    BoundedRoom(
        "rate_buckets",
        "rates of messages, by user or connection",
        "8,192 of each listener",
        "needs none: the one unused for longest begins anew",
        WhenFull.FORGETS,
        ("TokenBuckets._lacking", "RateLimiter._excess"),
    ),
    BoundedRoom(
        "kv_event_batches",
        "events of the prefix cache that wait for their thread",
        "256 batches",
        "needs none: subscribers see the gap by its number",
        WhenFull.DROPS,
        ("KvPublisher._queue",),
    ),
    BoundedRoom(
        "kv_replay_bytes",
        "events of the prefix cache that can be asked for again",
        "64 MiB, 10,000 batches",
        "needs none: the oldest goes",
        WhenFull.FORGETS,
        ("KvPublisher._kept",),
    ),
    BoundedRoom(
        "trace_spans",
        "finished spans that wait for the receiver of traces",
        "65,536",
        "needs none: no request depends on a span",
        WhenFull.DROPS,
        ("SpanSender._queue",),
    ),
)

BY_NAME: Final = {room.name: room for room in ROOMS}


def as_markdown() -> str:
    """The table as docs/operations.md has it."""
    rows = (f"| `{it.name}` | {it.holds} | {it.bound} | {it.share} | {it.when_full} |" for it in ROOMS)
    return "\n".join(("| room | holds | bound | an owner's share | when full |", "|---|---|---|---|---|", *rows))


if __name__ == "__main__":
    print(as_markdown())
