"""Rank 0 takes the ranks of one life of its group, refuses all others by name, and passes on what they say."""

from __future__ import annotations

import msgspec
import pytest

from protocol.errors import ProtocolError
from protocol.settings import WorkerSettings
from worker.group import hub as hub_module
from worker.group.awaiting import behind, silent
from worker.group.group import shared_values
from worker.group.hub import Hub
from worker.group.messages import (
    Beat,
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
    Turned,
    Waiting,
    Wake,
)

SETTINGS = {"worker.model": "abcd", "worker.seats": "8"}


def join(number: int, **changed: object) -> Join:
    one = Join("1.0", "g0", number, 3, f"w{number}", 100 + number, "boot", SETTINGS)
    return msgspec.structs.replace(one, **changed)


def peer(rank: int) -> bytes:
    return bytes([rank])


def met() -> Hub:
    hub = Hub(join(0), 7)
    for rank in (0, 2, 1):
        out = hub.received(peer(rank), join(rank), 0.0)
    members = tuple(Member(f"w{rank}", 100 + rank, "boot") for rank in range(3))
    assert sorted(out) == [(peer(rank), Met(7, members)) for rank in range(3)]
    return hub


def test_ranks_meet_in_any_order() -> None:
    hub = Hub(join(0), 7)
    assert hub.received(peer(2), join(2), 0.0) == []
    assert hub.missing == (0, 1)
    assert hub.tick(1.0) == [(peer(2), Waiting((0, 1)))]
    met()


def test_a_join_that_is_said_again_is_answered_again() -> None:
    hub = Hub(join(0), 7)
    assert hub.received(peer(2), join(2), 0.0) == hub.received(peer(2), join(2), 1.0) == []
    assert isinstance(met().received(peer(1), join(1), 9.0)[0][1], Met)


@pytest.mark.parametrize(
    ("changed", "field", "value"),
    [
        ({"version": "2.0"}, "version", "2.0"),
        ({"group": "g1"}, "worker.group", "g1"),
        ({"size": 4}, "worker.group_size", "4"),
        ({"rank": 3}, "worker.group_rank", "3"),
        ({"rank": -1}, "worker.group_rank", "-1"),
        ({"settings": SETTINGS | {"worker.model": "ffff"}}, "worker.model", "ffff"),
        ({"settings": {}}, "worker.model", ""),
    ],
)
def test_a_rank_that_differs_is_turned_away_by_name(changed: dict[str, object], field: str, value: str) -> None:
    hub = Hub(join(0), 7)
    ((_, turned),) = hub.received(peer(1), join(1, **changed), 0.0)
    assert isinstance(turned, Turned)
    assert (turned.field, turned.value, turned.passes) == (field, value, False)
    assert turned.message
    assert turned.remedy
    assert 1 in hub.missing


def test_a_rank_that_drafts_otherwise_is_turned_away_by_name() -> None:
    """Its steps would have other rows."""
    first, other = (shared_values(WorkerSettings(draft_tokens=count), "ab") for count in (2, 1))
    hub = Hub(join(0, settings=first), 7)
    ((_, turned),) = hub.received(peer(1), join(1, settings=other), 0.0)
    assert isinstance(turned, Turned)
    assert (turned.field, turned.value) == ("worker.draft_tokens", "1")


def test_a_rank_that_is_taken_is_refused_and_may_come_when_the_life_has_ended() -> None:
    hub = Hub(join(0), 7)
    hub.received(peer(1), join(1), 0.0)
    ((_, turned),) = hub.received(b"other", join(1, pid=999), 0.0)
    assert isinstance(turned, Turned)
    assert "process 101 (w1)" in turned.message
    assert not turned.passes
    ((_, turned),) = met().received(b"other", join(1, pid=999), 0.0)
    assert isinstance(turned, Turned)
    assert turned.passes


def test_a_rank_that_stopped_joining_is_replaced_by_another_process() -> None:
    hub = Hub(join(0), 7)
    hub.received(peer(1), join(1), 0.0)
    ((_, turned),) = hub.received(b"again", join(1, pid=999), 2.0)
    assert isinstance(turned, Turned)
    assert turned.passes
    hub.received(peer(1), join(1), 2.5)
    assert hub.received(b"again", join(1, pid=999), 5.0) != []
    assert hub.received(b"again", join(1, pid=999), 5.6) == []
    assert hub.missing == (0, 2)
    with pytest.raises(ProtocolError, match="is no rank"):
        hub.received(peer(1), Beat(Standing()), 6.0)


def test_a_rank_that_is_lost_before_the_met_may_join_again() -> None:
    hub = Hub(join(0), 7)
    hub.received(peer(1), join(1), 0.0)
    assert hub.gone(1, left=False) == []
    assert hub.missing == (0, 1, 2)
    assert hub.received(b"again", join(1), 0.0) == []


def test_strangers_are_not_heard() -> None:
    for message in (Beat(Standing()), Wake(1), LeaveGroup(), StoreSet("k", b"v"), StoreGet("k")):
        with pytest.raises(ProtocolError, match="is no rank"):
            met().received(b"stranger", message, 0.0)


def test_standings_wakes_and_departures_reach_all() -> None:
    hub = met()
    hub.received(peer(1), Beat(Standing(5, 2, True, True)), 4.0)
    out = dict(hub.tick(5.0))
    assert out.keys() == {peer(rank) for rank in range(3)}
    standings = out[peer(0)]
    assert isinstance(standings, Standings)
    assert standings.rows[1] == (Standing(5, 2, True, True), 1.0)
    assert dict(hub.received(peer(2), Wake(9), 5.0))[peer(0)] == Wake(9)
    assert dict(hub.received(peer(2), LeaveGroup(), 5.0)) == {peer(0): Gone(2, True), peer(1): Gone(2, True)}
    assert hub.gone(2, left=False) == []
    assert hub.silent(9.0, 5.5) == [0]


def test_the_store_answers_once_a_key_is_set() -> None:
    hub = met()
    assert hub.received(peer(1), StoreGet("k"), 0.0) == []
    assert hub.received(peer(0), StoreSet("k", b"v"), 0.0) == [(peer(1), StoreValue("k", b"v"))]
    hub.received(peer(0), StoreSet("k", b"w", appends=True), 0.0)
    assert hub.received(peer(2), StoreGet("k"), 0.0) == [(peer(2), StoreValue("k", b"vw"))]


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = met()
    monkeypatch.setattr(hub_module, "STORE_BYTES_MAX", 10)
    with pytest.raises(ProtocolError, match="STORE_BYTES_MAX"):
        hub.received(peer(0), StoreSet("k", bytes(11)), 0.0)
    monkeypatch.setattr(hub_module, "STORE_KEYS_MAX", 0)
    with pytest.raises(ProtocolError, match="STORE_KEYS_MAX"):
        hub.received(peer(0), StoreSet("other", b""), 0.0)


def test_the_silent_rank_is_awaited() -> None:
    assert silent([0.1, 2.0, 3.0], 0.1) == 2
    assert silent([0.1, 0.3, 0.2], 0.1) is None
    assert silent([0.1, 9.0, 0.2], 2.0) == 0  # rank 0 itself: nothing is known of others


def test_the_rank_furthest_behind_is_awaited_and_not_one_that_waits_for_it() -> None:
    standings = [Standing(4, 9), Standing(4, 7), Standing(3, 6), Standing(4, 9)]
    assert [behind(rank, standings) for rank in range(4)] == [2, 2, None, 2]
    assert behind(0, [Standing(4, 9), Standing(4, 9)]) is None
