"""The rounds of this rank's group, as the decode loop sees them: which comes next, and the wishes that rule later ones.

At the end of each round one operation on `compute` gathers the wishes of all ranks. They are read once the round is
`lag` rounds back (worker/group/agreement.py), so reading waits for nothing that a step would not wait for.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import Tensor

from worker.device.pinned import host_tensor
from worker.group.agreement import WISH_NUMBERS, Agreement, Round, Wish
from worker.group.group import Group
from worker.loop.inputs import Ring
from worker.streams import Fence, Stream


class Rounds:
    """Used by the decode loop's thread: `next`, `begin`, the launches of the round, `end`."""

    def __init__(self, group: Group, agreement: Agreement, compute: Stream, device: torch.device | str) -> None:
        self._group = group
        self._agreement = agreement
        self._compute = compute
        width, size = WISH_NUMBERS, group.size
        self._own = torch.zeros(width, dtype=torch.int32, device=device)
        self._all = torch.zeros(size * width, dtype=torch.int32, device=device)
        buffers = range(agreement.lag + 1)
        self._wishes = Ring([host_tensor(width, dtype=torch.int32, device=device) for _ in buffers])
        self._results = [host_tensor(size * width, dtype=torch.int32, device=device) for _ in buffers]
        self._unread: deque[tuple[Fence, Tensor]] = deque()
        self._woken_at = -1

    @property
    def settled(self) -> bool:
        """Whether the group sleeps, as far as this rank knows."""
        return not self._unread and self._agreement.next() is None

    def next(self, *, has_work: bool) -> Round | None:
        """The round to launch now; None: the group sleeps. Blocks the host until the wishes that rule it were gathered.

        With `has_work` a sleeping group is woken.
        """
        while (found := self._agreement.next()) is None and self._unread:
            self._read()
        if found is not None:
            return found
        number, control = self._agreement.number, self._group.control
        if has_work and self._woken_at < number:
            self._woken_at = number
            control.wake(number)
        return self._agreement.wake() if has_work or control.woken_at >= number else None

    def begin(self, this: Round) -> None:
        """What is launched from now on belongs to `this`, which `next` gave."""
        self._agreement.launched(this)
        self._group.control.progress.launched = this.number

    def end(self, this: Round, wish: Wish) -> None:
        """Everything of `this` was launched: gather the wishes."""
        buffer, result = self._wishes.next(), self._results[this.number % len(self._results)]
        buffer[:] = torch.tensor(wish, dtype=torch.int32)
        self._compute.launch("gather wishes", partial(self._gather, buffer, result))
        self._wishes.launched(self._compute.record("inputs_consumed"))
        self._unread.append((self._compute.record("wishes_gathered"), result))

    def _gather(self, buffer: Tensor, result: Tensor) -> None:
        self._own.copy_(buffer, non_blocking=True)
        self._group.collectives.all_gather(self._all, self._own)
        result.copy_(self._all, non_blocking=True)

    def _read(self) -> None:
        fence, result = self._unread.popleft()
        fence.wait()
        self._agreement.learned([Wish(*numbers) for numbers in result.view(self._group.size, -1).tolist()])
