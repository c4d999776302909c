"""The tasks of `hisparse top`.

    look     connect, poll, and reconnect after a loss, without a time limit
    type     pass keys to the screen, and its asks to `act`
    act      carry out one ask at a time, each on a new admin connection
    draw     after every change, and once a second for ages
    signals  SIGINT, SIGTERM, SIGHUP leave; SIGTSTP restores the terminal until SIGCONT; SIGWINCH redraws

The terminal is restored at the end in all cases.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import trio

from hisparse.client.client import Client
from hisparse.client.polling import ANSWER_LIMIT_S, keep_looking
from hisparse.console.session import connected
from hisparse.top.draw import draw, page_rows
from hisparse.top.keys import KeyDecoder
from hisparse.top.sample import Sample
from hisparse.top.screen import OperatorAction, OperatorAsk, Screen
from hisparse.top.terminal import Terminal
from protocol.errors import HiSparseError, NotFound
from protocol.messages import RequestDetail
from protocol.settings import Config

REDRAW_S: Final = 1.0
#: Time after Escape for the rest of a sequence to arrive.
SEQUENCE_S: Final = 0.05
#: Asks that wait while one is carried out; more are refused.
ASKS_MAX: Final = 1
DRAIN_DEADLINE_S: Final = 300.0

Act = Callable[[Client, str], Awaitable[tuple[str, ...]]]
ACTS: Final[dict[OperatorAction, Act]] = {
    OperatorAction.RETRACT: lambda client, name: client.retract([name]),
    OperatorAction.RESUME: lambda client, name: client.resume([name]),
    OperatorAction.ABORT: lambda client, name: client.abort([name]),
    OperatorAction.DRAIN: lambda client, name: client.drain([name], handover=True, deadline_s=DRAIN_DEADLINE_S),
    OperatorAction.UNDRAIN: lambda client, name: client.undrain([name]),
}


def run_top(config: Config, interval_s: float, limit: int) -> None:
    """Watch until `q` or a signal. Raises BadInput without a terminal."""
    with Terminal() as terminal:
        trio.run(Top(config, terminal, interval_s, limit).run)


class Top:
    """The screen and its tasks."""

    def __init__(self, config: Config, terminal: Terminal, interval_s: float, limit: int) -> None:
        self._config = config
        self._terminal = terminal
        self._interval_s = interval_s
        self._limit = limit
        self._screen = Screen()
        self._changed = trio.Event()
        self._look_now = trio.Event()
        self._send_ask, self._asks = trio.open_memory_channel[OperatorAsk](ASKS_MAX)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for task in (self._look, self._act, self._draw):
                nursery.start_soon(task)
            for leaving in (self._type, self._watch_signals):
                nursery.start_soon(self._until_done, leaving, nursery.cancel_scope)

    async def _until_done(self, task: Callable[[], Awaitable[None]], everything: trio.CancelScope) -> None:
        await task()
        everything.cancel()

    # ---------------------------------------------------------------- looking

    async def _look(self) -> None:
        await keep_looking(self._connect("client"), self._take_sample, self._lose, self._pause)

    def _connect(self, role: str) -> Callable[[], AbstractAsyncContextManager[Client]]:
        return partial(connected, self._config, role, reconnect_limit_s=0)

    async def _take_sample(self, client: Client) -> None:
        self._look_now = trio.Event()
        self._screen.take(await self._sample(client))
        self._changed.set()

    async def _pause(self) -> None:
        with trio.move_on_after(self._interval_s):
            await self._look_now.wait()

    def _lose(self, why: str) -> None:
        self._screen.disconnected(why, trio.current_time())
        self._changed.set()

    async def _sample(self, client: Client) -> Sample:
        welcome = await client.welcome()
        found = await client.requests(self._limit)
        return Sample(
            at_s=trio.current_time(),
            incarnation=welcome.incarnation,
            model=welcome.model.name if welcome.model else "",
            requests=found.rows,
            truncated=found.truncated,
            workers=await client.workers(),
            pools=await client.pools(),
            history=await self._history(client),
        )

    async def _history(self, client: Client) -> RequestDetail | None:
        name = self._screen.history_id
        if not name:
            return None
        try:
            return await client.request(name)
        except NotFound as error:
            self._screen.note(str(error), trio.current_time(), bad=True)
            self._screen.close_history()  # else each look would say so again
            return None

    # ---------------------------------------------------------------- typing and acting

    async def _type(self) -> None:
        decoder = KeyDecoder()
        while True:
            with trio.move_on_after(SEQUENCE_S if decoder.waiting else float("inf")) as moment:
                await trio.lowlevel.wait_readable(self._terminal.descriptor)
            typed = b"" if moment.cancelled_caught else self._terminal.read()
            if not typed and not moment.cancelled_caught:
                return  # the terminal is gone
            for key in decoder.feed(typed) if typed else decoder.flush():
                if self._handle(key):
                    return

    def _handle(self, key: str) -> bool:
        """Handle one key; True: leave."""
        screen, now = self._screen, trio.current_time()
        ask = screen.handle(key, now, page_rows(self._terminal.size()[1]))
        if ask is not None and ask.command is not OperatorAction.QUIT:
            try:
                self._send_ask.send_nowait(ask)
            except trio.WouldBlock:
                screen.note("not sent: the last command is still in progress", now, bad=True)
        if key == "enter":
            self._look_now.set()
        self._changed.set()
        return ask is not None and ask.command is OperatorAction.QUIT

    async def _act(self) -> None:
        async for ask in self._asks:
            self._note(f"{ask.command.name.lower()} {ask.target} ...")
            try:
                with trio.fail_after(ANSWER_LIMIT_S):
                    async with self._connect("admin")() as client:
                        lines = await ACTS[ask.command](client, ask.target)
            except HiSparseError as error:
                self._note(str(error), bad=True)
            except trio.TooSlowError:
                self._note(f"no answer within {ANSWER_LIMIT_S:g} s: it may still be carried out", bad=True)
            else:
                self._note("; ".join(lines) or f"{ask.command.name.lower()} {ask.target}: done")
            self._look_now.set()

    def _note(self, text: str, *, bad: bool = False) -> None:
        self._screen.note(text, trio.current_time(), bad=bad)
        self._changed.set()

    # ---------------------------------------------------------------- drawing

    async def _draw(self) -> None:
        while True:
            self._changed = trio.Event()
            self._screen.tick(trio.current_time())
            width, height = self._terminal.size()
            self._terminal.draw(draw(self._screen, width, height, trio.current_time()))
            with trio.move_on_after(REDRAW_S):
                await self._changed.wait()

    async def _watch_signals(self) -> None:
        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)
        with trio.open_signal_receiver(*watched) as signals:
            async for number in signals:
                if number == signal.SIGTSTP:
                    self._stop_until_continued()
                elif number == signal.SIGWINCH:
                    self._terminal.forget()
                else:
                    return
                self._changed.set()

    def _stop_until_continued(self) -> None:
        self._terminal.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._terminal.enter()
