"""What must hold of groups in the coordinator's eyes; of their rounds tests.sim.groups checks it.

admission   no request is placed on a rank whose group lacks a rank of its latest incarnation
stale       no rank joins once the coordinator knows a later incarnation of its group
blame       no worker is declared down for its executor while the beats that came have grown
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import trio

from coordinator.memory.changes import Reserve
from coordinator.state.worker_entry import WorkerEntry
from coordinator.workers.epoch_link import WorkerLink
from coordinator.workers.worker_epoch import WorkerEpoch
from protocol import messages
from tests.sim.trace import Violation

if TYPE_CHECKING:
    from tests.sim.cluster import CoordinatorLife

NOT_TURNED = "its executor has not turned"


class GroupChecker:
    def __init__(self) -> None:
        self._latest: dict[tuple[int, str], int] = defaultdict(int)  # incarnation, by coordinator's life and group
        self._grown: dict[WorkerEpoch, tuple[int, float]] = {}  # beats that came last, and when they had grown

    def placed(self, life: CoordinatorLife, change: Reserve) -> None:
        """The Scheduler places a request, and does nothing else until memory is reserved: it sees workers as they are
        then. Its command follows the commit, and may find that a rank has died."""
        workers = life.workers()
        worker = workers.get(change.worker)
        if worker is None or worker.member is None:
            return
        member = worker.member
        ranks = [(it.member, it.awaited) for it in workers.values() if it.member and it.member.group == member.group]
        latest = max(it.incarnation for it, _ in ranks)
        connected = {it.rank for it, awaited in ranks if it.incarnation == member.incarnation and not awaited}
        if len(connected) < member.size or latest > member.incarnation:
            raise Violation(
                "admission",
                f"placement {change.placement} is given to {worker.name} while {member.group} has "
                f"ranks {sorted(connected)} of {member.size} in incarnation {member.incarnation}",
            )

    def joined(self, life: CoordinatorLife, worker: WorkerEntry) -> None:
        """`worker` is known to the Scheduler from now on: by its hello, or `awaited`."""
        if worker.member is None:
            return
        key = life.incarnation, worker.member.group
        if worker.member.incarnation < self._latest[key] and not worker.awaited:
            raise Violation("stale", f"{worker.name} joins {worker.member}, {self._latest[key]} has replaced it")
        self._latest[key] = max(self._latest[key], worker.member.incarnation)

    def beat(self, epoch: WorkerEpoch, beat: messages.Heartbeat) -> None:
        """A heartbeat has come."""
        beats, _ = self._grown.get(epoch, (0, 0.0))
        if beat.executor_beats > beats:
            self._grown[epoch] = beat.executor_beats, trio.current_time()

    def put_down(self, link: WorkerLink, reason: str, limit_s: float) -> None:
        """The epoch of `link` is declared down."""
        _, grown_at = self._grown.get(link.state, (0, -limit_s))
        if reason.startswith(NOT_TURNED) and trio.current_time() - grown_at < limit_s:
            raise Violation("blame", f"{link.name} is declared down, and its executor turned at {grown_at:.2f}")
