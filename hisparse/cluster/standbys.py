"""Standby processes: one for each worker of a node that has `worker.standby`, started once that worker serves.

worker serves    longer than the pause before its last restart: only then a standby is started. So a request
                 that kills its worker at once uses up one standby; what follows are restarts with their pauses
worker ends      its exit is proved (hisparse.cluster.supervision: by pidfd). The standby is ordered to take over: from
                 then on it is the worker's process, and no standby. One that still prepares is ahead of a new
                 process and takes over once it is ready. Without one the worker is started again
group ends       all of its ranks have: their standbys take over together, if each rank has one, and meet then
standby ends     another is started, after a pause that doubles; after too many short lives none is
order unheard    a standby that was ready and has not begun after HEARD_LIMIT_S hangs and is killed: the worker's
                 end, once more. One that still prepares has the time that any start has
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from hisparse.cluster.children import Child
from hisparse.cluster.restarts import Restarts, unseen_service_s
from protocol.start_and_end import STANDBY

#: How often a standby is looked for whose worker does not serve yet.
LOOK_INTERVAL_S: Final = 0.25
#: From the order to the first step of the start that follows.
HEARD_LIMIT_S: Final = 5.0


class Standbys:
    """The standbys of the workers `names` of a node. `start` starts that of a worker, `place` makes it the worker's
    process. The children are the caller's to stop at the end."""

    def __init__(
        self,
        names: Sequence[str],
        start: Callable[[str], Child],
        place: Callable[[str, Child], None],
    ) -> None:
        self.names = names
        self._start = start
        self._place = place
        self._children: dict[str, Child] = {}
        self._ordered: dict[str, tuple[Child, float]] = {}

    @property
    def children(self) -> Mapping[str, Child]:
        """Those that have not been ordered to take over, by the name of their worker."""
        return self._children

    def is_ready(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.running and child.step == STANDBY

    def has(self, name: str) -> bool:
        """Return whether worker `name` has a standby, ready or not."""
        child = self._children.get(name)
        return child is not None and child.running

    @property
    def ready(self) -> list[str]:
        """Names of the workers whose standby is ready."""
        return [name for name in self._children if self.is_ready(name)]

    def take_over(self, name: str) -> bool:
        """Order the standby of `name` to take over; False: there is none.

        Only for a worker whose exit is proved (I2): from the order on the standby writes to pages of the pool.
        """
        was_ready = self.is_ready(name)
        if not self.has(name) or not self._children[name].order():
            return False
        child = self._children.pop(name)
        if was_ready:
            self._ordered[name] = child, trio.current_time() + HEARD_LIMIT_S
        self._place(name, child)
        return True

    async def put(self, name: str, child: Child) -> None:
        """Make `child` the standby of `name`, in place of another, which is ended."""
        before, self._children[name] = self._children.get(name), child
        if before is not None:
            before.signal(signal.SIGKILL)
            await before.wait()
            before.close()

    async def dismiss(self, name: str, child: Child) -> None:
        """End `child`, if it is still the standby of `name`."""
        if self._children.get(name) is child:
            child.signal(signal.SIGKILL)
            await child.wait()
            del self._children[name]
            child.close()

    def kill(self) -> None:
        """End all standbys, as when the pool that they have attached to is damaged: others are started."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    def unheard(self, now: float) -> list[Child]:
        """Children that have not begun in time after their order. Each is named once."""
        for name, (child, _) in list(self._ordered.items()):
            if child.step != STANDBY:
                del self._ordered[name]
        late = [name for name, (_, until) in self._ordered.items() if now > until]
        return [self._ordered.pop(name)[0] for name in late]

    async def keep(
        self, name: str, serves: Callable[[], bool], report: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        """Keep a standby for worker `name` once it `serves`, until it is given up. Cancelled: it runs on.

        `report` is called with lines for the user, `changed` after each line.
        """
        restarts = Restarts()
        while True:
            while name in self._ordered or name in self._children or not serves():  # noqa: ASYNC110 - no task tells either
                await trio.sleep(LOOK_INTERVAL_S)
            began = trio.current_time()
            child = self._children[name] = self._start(name)
            if await self._until_ready(name, child):
                report(f"standby of {name} is ready")
                changed()
            ended = await self._until_over(name, child)
            if ended is None:
                continue
            pause_s = restarts.after(unseen_service_s(trio.current_time() - began))
            what = "given up after too many restarts" if pause_s is None else f"restarted in {pause_s:g} s"
            report(f"standby of {name} {ended}; {what}")
            changed()
            if pause_s is None:
                return
            await trio.sleep(pause_s)

    async def _until_ready(self, name: str, child: Child) -> bool:
        """Wait until `child` says that it is ready; False: it has ended, or has been ordered before."""
        while child.running and self._children.get(name) is child:
            if child.step == STANDBY:
                return True
            await trio.sleep(LOOK_INTERVAL_S)
        return False

    async def _until_over(self, name: str, child: Child) -> str | None:
        """Wait until `child` has ended as a standby, and return how and why; None: it is the worker now."""
        while self._children.get(name) is child:
            with trio.move_on_after(LOOK_INTERVAL_S):
                status = await child.wait()
                if self._children.get(name) is child:
                    del self._children[name]
                    ended = child.end_text(status)
                    child.close()
                    return ended
        return None
