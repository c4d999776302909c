"""Repeated queries of a cluster, which reconnect after a loss of the connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NoReturn

import trio

from hisparse.client.client import Client
from protocol.errors import HiSparseError

#: Longest wait for an answer; after it the coordinator counts as gone.
ANSWER_LIMIT_S: Final = 5.0
RETRY_S: Final = 0.5


async def keep_looking(
    connect: Callable[[], AbstractAsyncContextManager[Client]],
    look: Callable[[Client], Awaitable[None]],
    lost: Callable[[str], None],
    pause: Callable[[], Awaitable[None]],
) -> NoReturn:
    """Call `look`, then `pause`, and repeat, until cancelled. Calls `lost(reason)` each time no coordinator answers.

    The clients of `connect` must not reconnect, so that `lost` is called at once and the loss can be shown.
    """
    while True:
        try:
            async with connect() as client:
                while True:
                    with trio.fail_after(ANSWER_LIMIT_S):
                        await look(client)
                    await pause()
        except HiSparseError as error:
            lost(str(error))
        except trio.TooSlowError:
            lost(f"no answer within {ANSWER_LIMIT_S:g} s")
        await trio.sleep(RETRY_S)
