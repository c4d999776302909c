"""Every room that clients fill: its bound, an owner's share, what happens when it is full. Pure.

A *room* is a container, or a sum, that grows with what clients ask for. `ROOMS` is the one list of them, of the
coordinator, the HTTP front and workers. The page for operators (`python -m basics.rooms`, in docs/operations.md), the
metrics hisparse_room_used and hisparse_room_limit, and the alert HiSparseRoomNearlyFull follow from it. A container
that grows with requests and is not named here fails a test (tests/coordinator/test_rooms.py, of the front
tests/hisparse/http/test_rooms.py, of a worker tests/worker/test_worker_rooms.py).

No client fills a front's or a worker's tokenizer and chat template: each has those of the served model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from basics.shares import SHARE


class RoomPlace(StrEnum):
    """Kinds of processes that have rooms."""

    COORDINATOR = "coordinator"
    FRONT = "front"
    WORKER = "worker"


class WhenFull(StrEnum):
    """REFUSES: what needs more is told so. WAITS: it comes in its turn. FORGETS: the oldest goes, which costs time at
    most, or an old output. DROPS: what comes is lost, and counted."""

    REFUSES = "refuses"
    WAITS = "waits"
    FORGETS = "forgets"
    DROPS = "drops"


#: Why the alert leaves out rooms that do not refuse.
WITHOUT_ALERT: Final = {
    WhenFull.WAITS: "none: full whenever there is much to do",
    WhenFull.FORGETS: "none: full in the long run, by design",
    WhenFull.DROPS: "none: what is lost is counted",
}


class RoomUse(NamedTuple):
    """The amount that a room holds, and the most that it can hold."""

    used: float
    limit: float


class BoundedRoom(NamedTuple):
    """`holds`, `bound`, `share`: in words. `containers`: what grows with it, as Class.attribute; those of a class that
    there is one of for each request, connection or page are bounded with these, and named once."""

    place: RoomPlace
    name: str
    holds: str
    bound: str
    share: str
    when_full: WhenFull
    containers: tuple[str, ...] = ()


_OWN_SHARE: Final = f"{SHARE} times what is free, by user and tenant"
_KEY_SHARE: Final = f"{SHARE} times what is free, by user"
_EQUAL_SHARE: Final = "an equal part, lent where it is not used, by API key"

ROOMS: Final = (
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "output_places",
        "generated tokens of live and ended requests, and words of their log-probabilities",
        "2^28 places of 4 bytes; the room of a request follows what it generates",
        f"{_OWN_SHARE}; beyond, one of its requests at a time grows",
        WhenFull.REFUSES,
        ("Places._held",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
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
        ),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "waiting_requests",
        "live requests that wait for a worker",
        "coordinator.queue_max",
        _OWN_SHARE,
        WhenFull.REFUSES,
        ("PlacementTable.waiting",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "prompt_bytes",
        "prompts and grammars of live requests",
        "8 GiB",
        _OWN_SHARE,
        WhenFull.REFUSES,
        ("RequestTable._prompt_bytes_of",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "ended_requests",
        "states and outputs of ended requests, for clients that attach again",
        "coordinator.ended_keep_max, for coordinator.ended_keep_s",
        "none is kept beside others' need: the owner who has most gives up its oldest",
        WhenFull.FORGETS,
        ("RequestTable.ended", "RequestTable._ended_of", "JournalState.requests", "Deliveries._endings"),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "history_lines",
        "lines of the histories of all requests",
        "64 of each request",
        "needs none: bounded for each request",
        WhenFull.FORGETS,
        ("RequestState.lines",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "warm_start_bytes",
        "what requests off their workers will ask for first",
        "128 MiB",
        "needs none: a hint, which saves time",
        WhenFull.FORGETS,
        ("RequestState.warm_start",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
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
        RoomPlace.COORDINATOR,
        "prefix_roots",
        "roots of prefixes, one for each owner and salt",
        "1,024",
        "needs none: computed again in microseconds",
        WhenFull.FORGETS,
        ("PrefixReuse.roots",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
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
        RoomPlace.COORDINATOR,
        "subscriptions",
        "requests whose tokens connections are sent",
        "262,144",
        _KEY_SHARE,
        WhenFull.REFUSES,
        ("Subscriptions._rows", "Subscriptions._free", "Deliveries._reserved"),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "outbox_bytes",
        "answers that wait for clients that do not read",
        "1 GiB; 64 MiB and 4,096 answers of each connection, which is then ended",
        _KEY_SHARE,
        WhenFull.DROPS,
        ("ClientConnection.outbox", "ClientConnections._outbox_bytes"),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "commands",
        "submissions and commands that wait for their answer",
        "4,096",
        _KEY_SHARE,
        WhenFull.REFUSES,
        ("Gateway._asks", "Scheduler._messages"),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "journal_records",
        "records that wait for the next commit",
        "262,144",
        "needs none: bounded by commands and live requests",
        WhenFull.REFUSES,
        ("_Group.records",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "rate_buckets",
        "rates of messages, by user or connection",
        "8,192 of each listener",
        "needs none: the one unused for longest begins anew",
        WhenFull.FORGETS,
        ("TokenBuckets._lacking", "RateLimiter._excess"),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "kv_event_batches",
        "events of the prefix cache that wait for their thread",
        "256 batches",
        "needs none: subscribers see the gap by its number",
        WhenFull.DROPS,
        ("KvPublisher._queue",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "kv_replay_bytes",
        "events of the prefix cache that can be asked for again",
        "64 MiB, 10,000 batches",
        "needs none: the oldest goes",
        WhenFull.FORGETS,
        ("KvPublisher._kept",),
    ),
    BoundedRoom(
        RoomPlace.COORDINATOR,
        "trace_spans",
        "finished spans that wait for the receiver of traces",
        "65,536",
        "needs none: no request depends on a span",
        WhenFull.DROPS,
        ("SpanSender._queue",),
    ),
    # ---------------------------------------------------------------- of the HTTP front
    BoundedRoom(
        RoomPlace.FRONT,
        "http_requests",
        "requests that are answered",
        "http.requests_max",
        _EQUAL_SHARE,
        WhenFull.REFUSES,
        ("Shares._held",),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_arriving",
        "requests whose bodies arrive",
        "http.requests_max",
        _EQUAL_SHARE,
        WhenFull.REFUSES,
        ("Shares._held",),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_gets",
        "GETs that are answered",
        "http.requests_max",
        _EQUAL_SHARE,
        WhenFull.REFUSES,
        ("Shares._held",),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_body_bytes",
        "bodies that arrive or are read",
        "256 MiB; 16 MiB of each",
        _EQUAL_SHARE,
        WhenFull.REFUSES,
        ("Shares._held",),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_connections",
        "connections, idle ones too",
        "four for each of http.requests_max, 1,024 at least",
        "idle ones beyond a quarter, and those of strangers, are closed first",
        WhenFull.REFUSES,
        ("HttpListener._open",),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_outputs",
        "requests that the coordinator knows for clients, by id, and their tokens",
        "128 choices for each of http.requests_max; live_requests and output_places of the coordinator",
        "that of the coordinator's rooms, by tenant",
        WhenFull.WAITS,
        (
            "FollowedOutputs._by_id",
            "FollowedOutput.chunks",
            "Connection._streams",
            "Connection._attaching",
            "Connection._calls",
            "TokenStream._chunks",
        ),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_turns",
        "bodies that wait to be read, and requests to be submitted",
        "choices of http.requests_max",
        "needs none: owners take turns",
        WhenFull.WAITS,
        ("Turns._taken", "RoundRobin._waiting"),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_arrears",
        "keys and addresses that were refused lately",
        "4,096",
        "needs none: one that is forgotten begins anew",
        WhenFull.FORGETS,
        ("TokenBuckets._lacking",),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_grammars",
        "grammars that were built lately, to be known again",
        "256",
        "needs none: built again within the turns of the owner",
        WhenFull.FORGETS,
        ("PassedGrammars._answers",),
    ),
    BoundedRoom(
        RoomPlace.FRONT,
        "http_trace_spans",
        "finished spans that wait for the receiver of traces",
        "65,536",
        "needs none: no request depends on a span",
        WhenFull.DROPS,
        ("SpanSender._queue",),
    ),
    # ---------------------------------------------------------------- of a worker
    BoundedRoom(
        RoomPlace.WORKER,
        "worker_requests",
        "requests on the worker, and what each holds",
        "worker.seats; the coordinator gives seats and pages",
        "needs none: owners take turns at the coordinator",
        WhenFull.WAITS,
        (
            "Executor._requests",
            "Executor._running",
            "Executor._closing",
            "Executor._waiting",
            "Executor._commands",
            "Prompts._prompts",
            "PromptOrder._served",
            "SeatMemory.host_pages",
            "SeatMemory.index_pages",
            "Output.tokens",
            "Decoder._undurable",
            "StepProgress._progress",
            "StepProgress._stops",
            "_Launched.requests",
            "Grammars._building",
        ),
    ),
    BoundedRoom(
        RoomPlace.WORKER,
        "worker_transfers",
        "transfers of pages under way, with what is remembered of those that ended",
        "4,096 each way, and as many that ended",
        "needs none: one of each request, which the coordinator begins",
        WhenFull.WAITS,
        (
            "Transfers._outgoing",
            "Transfers._incoming",
            "Sending._transfers",
            "Sending._ended",
            "Receiving._transfers",
            "Receiving._ended",
        ),
    ),
    BoundedRoom(
        RoomPlace.WORKER,
        "worker_reports",
        "events that wait for the next report, and tokens with them",
        "1,048,576 events; tokens of the requests on the worker",
        "needs none: a few of each request on the worker",
        WhenFull.WAITS,
        (
            "Outbox._dirt",
            "Outbox._events",
            "Outbox._swaps",
            "Outbox._drafts",
            "Outbox._rows",
            "Outbox._in_flight",
            "_Dirt.ids",
            "_Dirt.rows",
        ),
    ),
    BoundedRoom(
        RoomPlace.WORKER,
        "worker_grammars",
        "grammars that were tried lately, to be known again",
        "256",
        "needs none: tried again, first builds of other owners first",
        WhenFull.FORGETS,
        ("PassedGrammars._answers",),
    ),
)

BY_NAME: Final = {room.name: room for room in ROOMS}


def by_label(*parts: Mapping[str, RoomUse]) -> dict[tuple[str, str], RoomUse]:
    """Join what was measured, by the labels of the metrics: the room's name, and what happens when it is full."""
    return {(name, BY_NAME[name].when_full.value): use for part in parts for name, use in part.items()}


def as_markdown() -> str:
    """The table as docs/operations.md has it."""
    header = ("room", "holds", "bound", "an owner's share", "when full", "alert above 80 %")
    rows = [header, ("---",) * len(header)]
    for place in RoomPlace:
        rows.append((f"**{place}**", *[""] * (len(header) - 1)))
        rows += [
            (f"`{it.name}`", it.holds, it.bound, it.share, it.when_full, WITHOUT_ALERT.get(it.when_full, "yes"))
            for it in ROOMS
            if it.place is place
        ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(as_markdown())
