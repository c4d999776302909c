"""`hisparse worker` with a fault of page transfer: python -m tests.support.faulty_worker FAULT worker ...

| fault     | in a worker that | what goes wrong                                                                  |
|-----------|------------------|----------------------------------------------------------------------------------|
| refuse    | decodes          | REFUSED transfers are refused, though there is room                                |
| mute      | decodes          | MUTED transfers are never answered, and of MUTED others no page is acknowledged    |
| impatient | prefills         | gives up after LIMIT_S what others give 30 s                                     |
| slow      | decodes          | each page takes PAGE_S to be checked, and waits while the file PLANTED_WHILE exists  |
| flip      | decodes          | every page of one transfer is spoilt each time until it is given up, then one page |
| twice     | does either      | every word about transfers, and every Released, is said twice                    |
| halt      | prefills         | the process stops (SIGSTOP) with its first write begun                           |
| die       | prefills         | likewise by SIGKILL                                                              |

It says "planted" when a fault takes effect. Everything else is the worker's own code.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from protocol.errors import CapacityError
from tests.support import planted
from worker.loop.reporting import Reporter
from worker.transfer import sending
from worker.transfer.checksum import checksum
from worker.transfer.control import ReceiverControl, SenderControl
from worker.transfer.engines.network import NetworkSource, NetworkTarget
from worker.transfer.engines.shared import SharedSource, SharedTarget
from worker.transfer.receiver import PageReceiver
from worker.transfer.receiving import CheckUnit, Receiving
from worker.transfer.wire import Checked, Ready, ReceiverMessage, SenderMessage, Stopped

REFUSED: Final = 3
#: Some of those requests end with their first token, and no answer is awaited.
MUTED: Final = 6
LIMIT_S: Final = 4.0
PAGE_S: Final = 0.05
TARGETS: Final = (SharedTarget, NetworkTarget)
SOURCES: Final = (SharedSource, NetworkSource)


def say(what: str) -> None:
    print(f"planted: {what}", file=sys.stderr, flush=True)


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper(whole, self, ...)` called in place of a method, whose own code is `whole`."""
    whole = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **more: wrapper(partial(whole, self), self, *args, **more))


def refuse() -> None:
    left = [REFUSED]

    def opened(whole: Callable[..., None], _: PageReceiver, transfer_id: int, pages: Any) -> None:
        if left[0]:
            left[0] -= 1
            say(f"transfer {transfer_id} refused")
            raise CapacityError("planted", field="transfer_id", value=transfer_id)
        whole(transfer_id, pages)

    around(PageReceiver, "open", opened)


def mute() -> None:
    unsaid: dict[type, set[int]] = {Ready: set(), Checked: set()}

    def sent(whole: Callable[..., None], _: ReceiverControl, sender: str, message: ReceiverMessage) -> None:
        transfers = unsaid.get(type(message), set())
        if len(transfers) < MUTED and not any(message.transfer_id in others for others in unsaid.values()):
            transfers.add(message.transfer_id)
        if message.transfer_id in transfers:
            say(f"{type(message).__name__} of transfer {message.transfer_id} not said")
        else:
            whole(sender, message)

    around(ReceiverControl, "send", sent)


def impatient() -> None:
    sending.BEGIN_LIMIT_S = sending.CHECK_LIMIT_S = LIMIT_S  # type: ignore[misc]


def slow() -> None:
    def taken(whole: Callable[[CheckUnit], int], _: Any, check: CheckUnit) -> int:
        time.sleep(PAGE_S)
        while planted.shows():
            time.sleep(PAGE_S)
        return whole(check)

    for target in TARGETS:
        around(target, "take", taken)


def flip() -> None:
    ended: set[int] = set()
    victim: int | None = None
    is_given_up = is_last_spoilt = False

    def heard(whole: Callable[..., Any], _: Receiving, sender: str, message: SenderMessage, now: float) -> Any:
        nonlocal victim, is_given_up
        if isinstance(message, Stopped):
            ended.add(message.transfer_id)
            if message.transfer_id == victim:  # or its request has ended by its first token
                victim, is_given_up = None, "wrong checksum" in message.reason
        return whole(sender, message, now)

    def is_spoilt(transfer: int) -> bool:
        nonlocal victim, is_last_spoilt
        if is_given_up:
            was_spoilt, is_last_spoilt = is_last_spoilt, True
            return not was_spoilt
        if victim is None and transfer not in ended:
            victim = transfer
        return transfer == victim

    def taken(whole: Callable[[CheckUnit], int], target: Any, check: CheckUnit) -> int:
        digest = whole(check)
        if not is_spoilt(check.transfer_id):
            return digest
        pool = target._pages if isinstance(target, SharedTarget) else target._pool.pages
        page = pool[check.page, check.offset : check.offset + check.length]
        page[3::4] ^= 0x40  # exponents of float32: rows unlike any others
        say(f"page {check.page} of transfer {check.transfer_id} spoilt")
        return checksum(page)

    around(Receiving, "heard", heard)
    for target in TARGETS:
        around(target, "take", taken)


def twice() -> None:
    def doubled(whole: Callable[..., None], _: Any, *args: Any, **more: Any) -> None:
        for _ in range(2):
            whole(*args, **more)

    say("everything twice")
    for control in (ReceiverControl, SenderControl):
        around(control, "send", doubled)
    around(Reporter, "released", doubled)


def strike(number: signal.Signals) -> None:
    struck: list[int] = []

    def posted(whole: Callable[..., None], _: Any, post: Any) -> None:
        whole(post)
        if not struck:
            struck.append(post.transfer_id)
            say(f"{number.name} amid transfer {post.transfer_id}")
            os.kill(os.getpid(), number)

    for source in SOURCES:
        around(source, "post", posted)


FAULTS: Final[dict[str, Callable[[], None]]] = {
    **{fault.__name__: fault for fault in (refuse, mute, impatient, slow, flip, twice)},
    "halt": partial(strike, signal.SIGSTOP),
    "die": partial(strike, signal.SIGKILL),
}


if __name__ == "__main__":
    from hisparse.cli import main

    FAULTS[sys.argv.pop(1)]()
    sys.exit(main())
