"""Drawn schemas and bodies, and a grammar whose build does not end, before a front with a real socket.

A short run of `python -m tools.fuzz.schemas`: answers are judged as there.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import trio

from protocol.children import Children
from tests.hisparse.http.apis.test_agents import in_thread
from tests.support.agents_rig import agents_rig
from tests.support.fakes.fake_model import Walk
from tests.support.hostile_schemas import CHAIN, Drawn, draw
from tests.support.http_rig import KEY
from tools.fuzz.schemas import Tally, ask

BODIES = 250
OTHER = "another-key-of-32-characters-00"


async def test_drawn_bodies_are_answered_clearly(tmp_path: Path) -> None:
    """Refusals name a field, outputs that have ended are valid, and no answer is a failure of the server."""
    dice, tally = random.Random("bodies"), Tally()
    bodies = [draw(dice) for _ in range(BODIES)]
    async with agents_rig(tmp_path, lambda _: Walk()) as rig:
        await in_thread(lambda: ask(rig.port, rig.key, bodies, tally.add))
    assert tally.faults == []
    assert tally.outcomes["200"] + tally.outcomes["400"] == BODIES
    assert tally.outcomes["ended and valid"] >= 20
    assert tally.outcomes["length"] <= 0.05 * tally.outcomes["ended and valid"]


def completion(**said: Any) -> Drawn:
    return Drawn("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 50, "temperature": 0} | said).encode())


async def test_build_without_end_is_refused_and_disturbs_no_other_key(tmp_path: Path) -> None:
    """Another key is served meanwhile, with new grammars too. The build is halted, so that it reaches no limit of
    memory before they are served, and ends as its alarm would end it.
    """
    told: list[tuple[int, dict[str, Any]]] = []
    answers: list[int] = []

    def tell(_: Drawn, status: int, answer: bytes) -> None:
        told.append((status, json.loads(answer)))

    async with agents_rig(tmp_path, lambda _: Walk(), keys=(KEY, OTHER)) as rig, trio.open_nursery() as nursery:
        started = unlimited(rig.front.front._grammar_checks._children)
        bomb = completion(structured_outputs={"grammar": CHAIN})
        nursery.start_soon(in_thread, partial(ask, rig.port, KEY, [bomb], tell))
        while not started:  # noqa: ASYNC110 - a thread of the front starts it
            await trio.sleep(0.01)
        try:
            others = [completion(structured_outputs={"regex": f"[a-c]{{{number}}}"}) for number in range(1, 5)]
            await in_thread(lambda: ask(rig.port, OTHER, others, lambda _, status, __: answers.append(status)))
            assert (answers, told) == ([200] * 4, [])
        finally:
            started[0].kill()
    ((status, body),) = told
    assert (status, body["error"]["param"]) == (400, "structured_outputs.grammar")
    assert "takes more than" in body["error"]["message"]


def unlimited(children: Children) -> list[subprocess.Popen[bytes]]:
    """Its processes as they are started, without a limit of time. The first one is stopped at once."""
    started: list[subprocess.Popen[bytes]] = []
    start = children._start
    children._command[-2] = "3600"

    def record() -> subprocess.Popen[bytes]:
        process = start()
        if not started:
            process.send_signal(signal.SIGSTOP)
        started.append(process)
        return process

    children._start = record  # type: ignore[method-assign]
    return started
