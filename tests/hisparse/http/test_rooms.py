"""basics.rooms has every container of the HTTP front that grows with what clients ask for."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest
import trio

from basics.rooms import ROOMS, RoomPlace
from hisparse.http.server.fairness import turns
from hisparse.http.server.fairness.arrears import Arrears
from hisparse.http.server.listener import HttpListener
from metrics.state import HttpCounters
from protocol.settings import HttpSettings
from tests.support.containers import FEW, LISTED, MANY, grown, lengths
from tests.support.http_rig import front_rig


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_containers_that_grow_with_answers_are_in_the_table(tmp_path: Path) -> None:
    """Rooms of as many keys: streams under way, answers that ended, bodies and GETs under way, grammars of each."""
    keys = [f"a-key-of-thirty-two-characters-{number:02}" for number in range(MANY + 1)]
    looks = []
    async with front_rig(tmp_path, HttpSettings(requests_max=4 * MANY), keys=tuple(keys)) as rig:
        for number, key in enumerate(keys):
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
            held = {"prompt": f"held {number}", "stream": True, "max_tokens": 4}
            ends = {"prompt": f"ends {number}", "max_tokens": 4, "structured_outputs": {"json": schema}}
            peers = [await rig.complete(held, **bearer(key)), await rig.complete(ends, **bearer(key))]
            *_, one, two = await rig.submitted(2 * (number + 1))
            for name in (one, two):
                rig.speak(name, "{}")
                if rig.gateway.scheduler.commands and name == two:
                    rig.gateway.scheduler.finish(name)
            part = rig.open("POST", "/v1/completions", bearer(key))
            await part.say(b'{"prompt": "', more=True)
            await trio.sleep(0.05)
            del peers
            if number in (FEW, MANY):
                looks.append(lengths(rig.front, rig.outputs, rig.link))
            if number == MANY:
                use = rig.front.room_use()
    assert sorted(grown(*looks) - LISTED) == [], "name their rooms in basics.rooms"
    assert {"FollowedOutputs._by_id", "PassedGrammars._answers", "Shares._held"} <= grown(*looks), "it can fail"
    used = {name: it.used for name, it in use.items()}
    assert (used["http_requests"], used["http_arriving"], used["http_grammars"]) == (MANY + 1, MANY + 1, MANY + 1)
    assert used["http_body_bytes"] == (MANY + 1) * len(b'{"prompt": "')
    assert used["http_outputs"] == MANY + 1


async def test_containers_that_grow_with_connections_are_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from an address of its own, refused once, which is remembered for the time of the test."""
    monkeypatch.setattr(turns, "Arrears", partial(Arrears, per_s=0.01))
    looks, peers = [], []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        listener = HttpListener(listening, None, HttpCounters())
        stopping = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run, stopping)
            for number in range(MANY + 1):
                peer = await trio.open_tcp_stream(*listening.getsockname(), local_address=f"127.0.0.{number + 2}")
                peers.append(peer)
                await peer.send_all(b"nonsense\r\n\r\n" if number % 2 else b"GET ")
                await trio.sleep(0.05)
                if number in (FEW, MANY):
                    looks.append(lengths(listener))
            nursery.cancel_scope.cancel()
    assert sorted(grown(*looks) - LISTED) == [], "name their rooms in basics.rooms"
    assert {"HttpListener._open", "TokenBuckets._lacking"} <= grown(*looks), "it can fail"


async def test_every_room_of_the_front_is_measured(tmp_path: Path) -> None:
    """But for that of traces, which SpanSender counts."""
    async with front_rig(tmp_path) as rig:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = HttpListener(listening, rig.front.serve, rig.counters)
            measured = rig.front.room_use() | listener.room_use()
    assert measured.keys() | {"http_trace_spans"} == {it.name for it in ROOMS if it.place is RoomPlace.FRONT}
    assert all(it.used <= it.limit for it in measured.values())
