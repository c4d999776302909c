"""When the sweeper has glibc return memory: after growth, and while libzmq may be freeing an unfinished message."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import trio
import trio.testing

from coordinator.listener import sweeper
from coordinator.listener.router import RouterSocket
from coordinator.listener.sweeper import FREEING_S, GROWTH_BYTES, LOOK_INTERVAL_S, TRIM_BYTES, TRIM_INTERVAL_S, Sweeper


class QuietSocket:
    """Has connections that need no end."""

    given_up_at = float("-inf")

    @property
    def connection_events(self) -> QuietSocket:
        return self

    async def watch(self) -> None:
        await trio.sleep_forever()

    def cut_overdue(self) -> int:
        return 0

    def cut_unfinished(self) -> list[str]:
        return []


async def returns(monkeypatch: pytest.MonkeyPatch, memory: Callable[[], int], socket: QuietSocket) -> int:
    """How often memory is returned within ten looks."""
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    async def at_once(work: Callable[[], None]) -> None:
        """In the place of a thread, for which the clock would not wait."""
        work()

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    monkeypatch.setattr(sweeper, "resident_bytes", memory)
    monkeypatch.setattr(sweeper, "return_memory", note)
    with trio.move_on_after(10 * LOOK_INTERVAL_S):
        await Sweeper({"client": cast(RouterSocket, socket)}, {}).run()
    return count


async def test_memory_is_returned_after_growth(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """At first, since nothing is known, and once for each TRIM_BYTES; what stays as it is costs nothing."""
    assert await returns(monkeypatch, lambda: 100 << 20, QuietSocket()) == 1
    growing = lambda: int(trio.current_time() / LOOK_INTERVAL_S * TRIM_BYTES / 4)  # noqa: E731
    assert 1 <= await returns(monkeypatch, growing, QuietSocket()) <= 3


async def test_memory_is_returned_while_unfinished_messages_are_freed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    socket = QuietSocket()
    socket.given_up_at = trio.current_time()
    count = await returns(monkeypatch, lambda: 1 << 20, socket)
    assert FREEING_S // (TRIM_INTERVAL_S + LOOK_INTERVAL_S) < count <= FREEING_S // TRIM_INTERVAL_S + 2


async def test_memory_is_returned_at_once_after_much_growth(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Growth is judged then; otherwise it is returned once in TRIM_INTERVAL_S, since the loop waits for it."""
    slowly = lambda: int(trio.current_time() / LOOK_INTERVAL_S * TRIM_BYTES * 2)  # noqa: E731
    fast = lambda: int(trio.current_time() / LOOK_INTERVAL_S * GROWTH_BYTES * 2)  # noqa: E731
    assert await returns(monkeypatch, slowly, QuietSocket()) <= 10 * LOOK_INTERVAL_S / TRIM_INTERVAL_S + 1
    assert await returns(monkeypatch, fast, QuietSocket()) >= 9
