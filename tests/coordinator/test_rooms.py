"""basics.rooms: its table has every container that grows with what clients ask for, and documents follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from basics.rooms import BY_NAME, ROOMS, WhenFull, as_markdown
from coordinator.gateway import deliveries as deliveries_module
from coordinator.gateway import gateway as gateway_module
from coordinator.gateway.connections import OUTBOX_BYTES_MAX, ClientConnections
from coordinator.listener.router import Sent
from coordinator.scheduler.api import Handle
from protocol import messages
from protocol.arrays import pack_int32
from protocol.errors import WrongState
from protocol.messages import PROTOCOL_VERSION
from protocol.settings import CoordinatorSettings
from tests import ROOT
from tests.coordinator.turn.test_recovery import Life
from tests.support.containers import FEW, LISTED, MANY, grown, lengths
from tests.support.gateway_rig import GatewayRig, hear, running, say

#: They hold one thing for each of something that is bounded elsewhere, and clients do not make more of it.
OF_WORKERS = {
    # ranks of requests on a worker: its seats bound them
    "WorkerEntry.ranks",
    "WorkerEntry.managed",
    "WorkerEntry.leaving",
    # pages given, and who holds them: the pool bounds them
    "Ledger._holdings",
    "_Budget.holdings",
}


async def test_containers_that_grow_with_requests_are_in_the_table(autojump_clock: trio.testing.MockClock) -> None:
    """Waiting, running, held and ended ones, of as many owners."""
    settings = CoordinatorSettings(live_requests_max=1_024, prefix_reuse="own")
    async with Life.over(settings=settings) as life:
        life.host_pages = 1_000
        await life.add_worker("w0", seats=200, index_pages=1_000, hot_chunks=1_000, prompt_max_tokens=64_000)
        await life.add_worker("w1", "n1", seats=1)
        looks = []
        for number in range(MANY + 1):
            tenant = f"t{number}"
            for kind in ("ends", "held!", "runs!"):
                prompt = 130 if kind == "runs!" else 20
                await life.submit(f"{kind}{number}", prompt, 1 if kind == "ends" else 200, tenant=tenant)
            await life.settle()
            await life.scheduler.retract((f"held!{number}",), "test", keep=True, hold=True)
            await life.run_until(f"ends{number}", "FINISHED")
            if number in (FEW, MANY):
                looks.append(lengths(life.scheduler, life.token_log))
        unlisted = grown(*looks) - LISTED - OF_WORKERS
        assert sorted(unlisted) == [], "name their rooms in basics.rooms"
        assert {"RequestTable.live", "RequestTable.ended", "PlacementTable.entries"} <= grown(*looks), "it can fail"


async def test_containers_that_grow_with_connections_are_in_the_table(tmp_path: Path) -> None:
    looks = []
    async with running(GatewayRig(tmp_path)) as rig:
        dealers = []
        for number in range(MANY + 1):
            dealers.append(dealer := await rig.dealer())
            await say(dealer, messages.Hello(PROTOCOL_VERSION, "client", f"c{number}"))
            submit = messages.Submit(1, pack_int32([1]), messages.Sampling(4), f"r{number}", subscribe=True)
            await say(dealer, submit)
            await hear(dealer, 2)
            if number in (FEW, MANY):
                looks.append(lengths(rig.gateway, rig.deliveries))
        for dealer in dealers:
            dealer.close()
    assert sorted(grown(*looks) - LISTED) == [], "name their rooms in basics.rooms"
    assert {"ClientConnections._by_peer", "Subscriptions._rows"} <= grown(*looks), "it can fail"


async def test_every_room_says_what_it_holds(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        await life.add_worker("w0")
        await life.submit("r1!", 100, 100, tenant="t")
        await life.settle()
        use = life.scheduler.room_use() | life.scheduler._journal.room_use()
    assert use.keys() <= BY_NAME.keys()
    assert (use["live_requests"].used, use["prompt_bytes"].used) == (1, 400)
    assert use["output_places"].used >= 64
    assert use["history_lines"].used >= 2
    assert all(0 <= it.used <= it.limit for it in use.values())


def test_guide_has_the_table() -> None:
    assert as_markdown() in (ROOT / "docs" / "operations.md").read_text(), "python -m basics.rooms"


def test_rooms_that_refuse_have_a_share_for_each_owner() -> None:
    lacking = [
        room.name for room in ROOMS if room.when_full is WhenFull.REFUSES and room.share.startswith("needs none")
    ]
    assert lacking == ["journal_records"], "its bound follows from others"


# ---------------------------------------------------------------- shares of users


class FullSocket:
    """A socket of a client that does not read."""

    def send(self, peer: bytes, frame: bytes) -> Sent:
        return Sent.FULL


def test_outboxes_of_one_user_do_not_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.gateway.connections.OUTBOXES_BYTES_MAX", 8_000)
    dropped: list[str] = []
    connections = ClientConnections(20, lambda connection, reason: dropped.append(f"{connection.user}: {reason}"))
    socket: Any = FullSocket()
    hostile = [connections.open(socket, bytes([at]), "client", "", 0.0, "hostile") for at in range(10)]
    other = connections.open(socket, b"other", "client", "", 0.0, "other")
    for connection in hostile:
        connections.send(connection, bytes(900), 0.0)
    connections.send(other, bytes(500), 0.0)
    assert set(dropped) == {"hostile: does not read"}
    assert not other.is_gone
    assert connections.room_use()["outbox_bytes"].used == sum(
        it.outbox_bytes for it in [*hostile, other] if not it.is_gone
    )
    for connection in [*hostile, other]:
        connections.drop(connection, "over")
    assert connections.room_use()["outbox_bytes"].used == 0
    assert OUTBOX_BYTES_MAX > 8_000


@pytest.mark.parametrize(
    ("module", "limit", "most", "said"),
    [
        (deliveries_module, "SUBSCRIPTIONS_MAX", 2, "2 subscriptions already"),
        (gateway_module, "ASKS_MAX", 0, "0 commands in progress already"),
    ],
)
async def test_bounds_of_a_user_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, limit: str, most: int, said: str
) -> None:
    monkeypatch.setattr(module, limit, most)
    async with running(GatewayRig(tmp_path)) as rig:
        dealer = await rig.dealer()
        await say(dealer, messages.Hello(PROTOCOL_VERSION, "client", "c"))
        await hear(dealer)
        answers = []
        for number in range(3):
            submit = messages.Submit(number, pack_int32([1]), messages.Sampling(4), f"r{number}", subscribe=True)
            await say(dealer, submit)
            answers += await hear(dealer)
        dealer.close()
    refused = [it for it in answers if isinstance(it, messages.Failure)]
    assert {(it.code, it.message) for it in refused} == {("capacity", said)}
    assert len(answers) - len(refused) == most


async def test_submissions_that_come_together_do_not_pass_the_bound_on_subscriptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at once, none of which has subscribed yet when the next one is checked. What fails gives back its room."""
    monkeypatch.setattr(deliveries_module, "SUBSCRIPTIONS_MAX", 2)
    goes_on = trio.Event()
    async with running(GatewayRig(tmp_path)) as rig:
        submit = rig.scheduler.submit

        async def slow(message: messages.Submit, *rest: Any, **more: Any) -> Handle:
            await goes_on.wait()
            if message.request_id == "r0":
                raise WrongState("refused")
            return await submit(message, *rest, **more)

        monkeypatch.setattr(rig.scheduler, "submit", slow)
        dealer = await rig.dealer()
        await say(dealer, messages.Hello(PROTOCOL_VERSION, "client", "c"))
        await hear(dealer)
        for number in range(3):
            sampling = messages.Sampling(4)
            await say(dealer, messages.Submit(number, pack_int32([1]), sampling, f"r{number}", subscribe=True))
        (refused,) = await hear(dealer)
        assert isinstance(refused, messages.Failure)
        assert (refused.tag, refused.message) == (2, "2 subscriptions already")
        assert rig.deliveries.room_use()["subscriptions"].used == 2
        goes_on.set()
        answers = await hear(dealer, 2)
        assert {type(it) for it in answers} == {messages.Failure, messages.Accepted}
        assert rig.deliveries.room_use()["subscriptions"].used == 1
        dealer.close()
