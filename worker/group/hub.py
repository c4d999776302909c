"""What rank 0 knows of its group and answers to the ranks. Pure. Messages and times in, messages out.

Peers are known by the identity of their connection. All ranks join, rank 0 like the others; then all learn who they
are. From then on the hub passes on standings, wakes and departures, and keeps the store through which
torch.distributed exchanges addresses. It serves one life of the group: a rank that joins later is turned away until
this process has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from protocol.errors import ProtocolError
from worker.group.messages import (
    Beat,
    FromHub,
    Gone,
    Join,
    LeaveGroup,
    Member,
    Met,
    Standing,
    Standings,
    StoreGet,
    StoreSet,
    StoreValue,
    ToHub,
    Turned,
    Waiting,
    Wake,
)

#: Keys of the store, and bytes of all values.
STORE_KEYS_MAX: Final = 65_536
STORE_BYTES_MAX: Final = 1 << 26

#: Until all have met, ranks join again every second. One that was not heard for DOUBTED_S may be dead: another process
#: of its rank may try again, and replaces it after REPLACED_S.
DOUBTED_S: Final = 1.5
REPLACED_S: Final = 3.0

Out = tuple[bytes, FromHub]


@dataclass
class _Joined:
    peer: bytes
    join: Join
    heard_s: float
    standing: Standing = field(default_factory=Standing)
    is_gone: bool = False


class Hub:
    """`ours` is how rank 0 itself joins: what all other ranks must agree with."""

    def __init__(self, ours: Join, incarnation: int) -> None:
        self._ours = ours
        self._incarnation = incarnation
        self._ranks: dict[int, _Joined] = {}
        self._by_peer: dict[bytes, int] = {}
        self._store: dict[str, bytes] = {}
        self._store_bytes = 0
        self._asked: dict[str, list[bytes]] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not joined."""
        return tuple(rank for rank in range(self._ours.size) if rank not in self._ranks)

    def received(self, peer: bytes, message: ToHub, now_s: float) -> list[Out]:
        """What to send for a message. Raises ProtocolError for one that this peer may not send."""
        if isinstance(message, Join):
            return self._join(peer, message, now_s)
        rank = self._by_peer.get(peer)
        if rank is None:
            raise ProtocolError("is no rank of this group", field="peer", value=peer.hex(), remedy="join first")
        self._ranks[rank].heard_s = now_s
        match message:
            case Beat(standing):
                self._ranks[rank].standing = standing
                return []
            case Wake():
                return self._to_all(message)
            case LeaveGroup():
                return self.gone(rank, left=True)
            case StoreSet():
                return self._set(message)
            case StoreGet(key):
                return self._get(peer, key)

    def tick(self, now_s: float) -> list[Out]:
        """Standings for all, or who is missing."""
        if self.missing:
            return self._to_all(Waiting(self.missing))
        return self._to_all(
            Standings(tuple((it.standing, now_s - it.heard_s) for _, it in sorted(self._ranks.items())))
        )

    def silent(self, now_s: float, limit_s: float) -> list[int]:
        """Ranks that have not been heard for `limit_s` and are not known to be gone."""
        return [rank for rank, it in self._ranks.items() if not it.is_gone and now_s - it.heard_s > limit_s]

    def gone(self, rank: int, *, left: bool) -> list[Out]:
        """`rank` left, or is lost. Before all have met it may join again."""
        it = self._ranks[rank]
        if self.missing:
            del self._ranks[rank], self._by_peer[it.peer]
            return []
        if it.is_gone:
            return []
        it.is_gone = True
        return self._to_all(Gone(rank, left))

    # ---------------------------------------------------------------- joining

    def _join(self, peer: bytes, join: Join, now_s: float) -> list[Out]:
        refusal = self._refusal(peer, join, now_s)
        if refusal is not None:
            return [(peer, refusal)]
        before = self._ranks.get(join.rank)
        if before is not None and before.peer != peer:
            del self._by_peer[before.peer]
        if not self.missing:  # said again, or by a new connection, while the answer was on its way
            return [(peer, self._met())]
        self._ranks[join.rank] = _Joined(peer, join, now_s)
        self._by_peer[peer] = join.rank
        return [] if self.missing else self._to_all(self._met())

    def _met(self) -> Met:
        members = tuple(Member(it.join.worker, it.join.pid, it.join.boot) for _, it in sorted(self._ranks.items()))
        return Met(self._incarnation, members)

    def _refusal(self, peer: bytes, join: Join, now_s: float) -> Turned | None:
        """Why `join` is not taken: the first value that differs from rank 0's, or a rank that does not fit."""
        ours, same = self._ours, "give all ranks of a group the same model and settings"
        pairs = {"version": (join.version, ours.version), "worker.group": (join.group, ours.group)}
        pairs |= {"worker.group_size": (str(join.size), str(ours.size))}
        pairs |= {name: (join.settings.get(name, ""), value) for name, value in ours.settings.items()}
        for name, (theirs, value) in pairs.items():
            if theirs != value:
                return Turned(f"rank 0 has {value}", name, theirs, same)
        if not 0 <= join.rank < ours.size:
            text = f"ranks of {ours.group} are 0 to {ours.size - 1}"
            return Turned(text, "worker.group_rank", str(join.rank), "number the ranks from 0")
        held = self._ranks.get(join.rank)
        silent_s = 0.0 if held is None else now_s - held.heard_s
        if held is not None and held.peer != peer and not (self.missing and silent_s > REPLACED_S):
            text = f"process {held.join.pid} ({held.join.worker}) has this rank of {ours.group}"
            remedy = "wait until it has ended, or choose another rank"
            return Turned(
                text, "worker.group_rank", str(join.rank), remedy, passes=not self.missing or silent_s > DOUBTED_S
            )
        return None

    # ---------------------------------------------------------------- the store

    def _set(self, message: StoreSet) -> list[Out]:
        before = self._store.get(message.key)
        if before is None and len(self._store) >= STORE_KEYS_MAX:
            raise ProtocolError("keys of the store", field="STORE_KEYS_MAX", value=STORE_KEYS_MAX)
        value = (before or b"") + message.value if message.appends else message.value
        self._store_bytes += len(value) - len(before or b"")
        if self._store_bytes > STORE_BYTES_MAX:
            raise ProtocolError("bytes of the store", field="STORE_BYTES_MAX", value=STORE_BYTES_MAX)
        self._store[message.key] = value
        return [(peer, StoreValue(message.key, value)) for peer in self._asked.pop(message.key, ())]

    def _get(self, peer: bytes, key: str) -> list[Out]:
        if key in self._store:
            return [(peer, StoreValue(key, self._store[key]))]
        self._asked.setdefault(key, []).append(peer)
        return []

    def _to_all(self, message: FromHub) -> list[Out]:
        return [(it.peer, message) for it in self._live()]

    def _live(self) -> Iterator[_Joined]:
        return (it for it in self._ranks.values() if not it.is_gone)
