"""Gateway, connections and deliveries over real ipc sockets: clear refusals, streams without a gap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trio

from coordinator.gateway import connections
from coordinator.gateway.deliveries import KEEPALIVE
from coordinator.gateway.gateway import HELLO_BYTES_MAX
from coordinator.listener.flood_control import REFUSED_PER_TURN
from coordinator.listener.router import Received
from hisparse.client.client import open_client
from protocol import messages
from protocol.arrays import pack_int32, unpack_int32
from protocol.errors import CapacityError, ConfigError
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, Sampling
from protocol.skew import PROTOCOL_VERSION_MIN
from protocol.transport.dealer import DealerSocket
from tests.support.fakes.scheduler import MODEL
from tests.support.gateway_rig import GatewayRig, hear, introduce, running, say
from tests.support.limits import HANG_LIMIT_S
from tests.support.version_before import NEWER_FIELDS

SUBMIT = messages.Submit(7, pack_int32([1, 2, 3]), Sampling(max_tokens=1000), "a")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    async with running(GatewayRig(tmp_path)) as rig:
        yield rig


async def failure(dealer: DealerSocket) -> messages.Failure:
    (message,) = await hear(dealer)
    assert isinstance(message, messages.Failure)
    return message


async def read_tokens(dealer: DealerSocket, count: int) -> list[int]:
    """`count` tokens of one request, checked to come once and in order (I5)."""
    tokens: list[int] = []
    while len(tokens) < count:
        for message in await hear(dealer, at_least=True):
            assert isinstance(message, messages.Delivery)
            assert list(unpack_int32(message.starts, "starts")) == [len(tokens)]
            tokens += list(unpack_int32(message.tokens, "tokens"))
    return tokens


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("frame", "code", "field"),
    [
        (b"", "protocol", "message"),
        (b"\xc1garbage", "protocol", "message"),
        (messages.encode(messages.Heartbeat(1, 0, 0, 0, 0.0)), "protocol", "message"),
        (messages.encode(messages.RetractRequests(1, ("a",))), "protocol", "message"),
        (messages.encode(messages.StopCoordinator(1)), "protocol", "message"),
        (messages.encode(messages.ReloadKeys(1)), "protocol", "message"),
        (messages.encode(SUBMIT)[:-3], "protocol", "message"),
        (bytes(CLIENT_MESSAGE_BYTES_MAX + 1), "protocol", "message"),
        (messages.encode(messages.Hello(PROTOCOL_VERSION + 1, "client")), "protocol", "protocol"),
        (messages.encode(messages.Hello(PROTOCOL_VERSION_MIN - 1, "client")), "protocol", "protocol"),
        (messages.encode(messages.Hello(PROTOCOL_VERSION, "admin")), "protocol", "role"),
        pytest.param(
            messages.encode(messages.Hello(PROTOCOL_VERSION, "client", "x" * 200)),
            "bad_input",
            "name",
            marks=pytest.mark.refuses("BadInput name={} characters"),
        ),
    ],
    ids=[
        "empty",
        "garbage",
        "worker's",
        "admin's",
        "admin's stop",
        "admin's reload",
        "cut",
        "oversized",
        "newer version",
        "older version",
        "role",
        "name",
    ],
)
async def test_forbidden_client_message_is_refused_and_counted(
    rig: GatewayRig, frame: bytes, code: str, field: str
) -> None:
    dealer, neighbour = await rig.dealer(), await introduce(rig)
    await say(dealer, frame)
    refusal = await failure(dealer)
    assert (refusal.tag, refusal.code, refusal.field) == (-1, code, field)
    assert refusal.remedy or field == "name"
    assert rig.dropped() == {code: 1}
    assert rig.scheduler.commands == []
    assert rig.connections == 1
    await say(neighbour, messages.ListPools(3))
    assert isinstance((await hear(neighbour))[0], messages.PoolRows)
    dealer.close()
    neighbour.close()


async def test_commands_before_hello_are_refused_by_tag(rig: GatewayRig) -> None:
    dealer = await rig.dealer()
    await say(dealer, SUBMIT)
    refusal = await failure(dealer)
    assert (refusal.tag, refusal.code, refusal.remedy) == (-1, "protocol", "send Hello first")
    assert rig.scheduler.commands == []
    dealer.close()


async def test_large_message_before_hello_is_not_decoded(rig: GatewayRig, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = rig.gateway._decode["client"]
    monkeypatch.setitem(rig.gateway._decode, "client", lambda frame: decoded.append(len(frame)) or decode(frame))
    dealer = await rig.dealer()
    await say(dealer, bytes(HELLO_BYTES_MAX + 1), bytes(HELLO_BYTES_MAX))
    too_large, unread = await hear(dealer, 2)
    assert isinstance(too_large, messages.Failure)
    assert isinstance(unread, messages.Failure)
    assert too_large.remedy == "send Hello first"
    assert unread.message.startswith("not a message of a client")
    assert decoded == [HELLO_BYTES_MAX]
    dealer.close()


async def test_refused_messages_leave_turns_to_other_tasks(rig: GatewayRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task runs after every REFUSED_PER_TURN of a batch, and a known connection's message comes before all."""
    order: list[str] = []
    receive = rig.gateway._receive

    def note(role: str, nursery: trio.Nursery, received: Received) -> None:
        order.append("known" if rig.deliveries.connections.find(role, received.peer) else "unknown")
        receive(role, nursery, received)

    known, stranger = await introduce(rig), await rig.dealer()
    monkeypatch.setattr(rig.gateway, "_receive", note)
    unread = [Received(b"stranger", b"", 0) for _ in range(7)]
    peer = rig.deliveries.connections[0].peer
    batches = [[*unread, Received(peer, messages.encode(messages.ListPools(3)), 0)]]

    async def recv_batch() -> list[Received]:
        if not batches:
            await trio.sleep_forever()
        return batches.pop()

    async def other_task() -> None:
        while True:
            order.append("other task")
            await trio.lowlevel.checkpoint()

    socket = rig.gateway._sockets["client"]
    monkeypatch.setattr(socket, "recv_batch", recv_batch)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other_task)
        nursery.start_soon(rig.gateway._read, "client", nursery)
        while order.count("unknown") < len(unread):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    handled = "".join({"known": "k", "unknown": "u", "other task": " "}[it] for it in order).split()
    assert handled[0].startswith("ku")
    assert max(map(len, handled)) <= 1 + 2 * REFUSED_PER_TURN, "trio may run the other task first, then last"
    known.close()
    stranger.close()


async def test_the_admin_socket_takes_only_admins(rig: GatewayRig) -> None:
    dealer = await rig.dealer("admin")
    await say(dealer, messages.Hello(PROTOCOL_VERSION, "client"))
    assert (await failure(dealer)).message == "this is the admin endpoint"
    assert rig.dropped("admin") == {"protocol": 1}
    dealer.close()


async def test_client_of_the_version_before_is_served_in_it(rig: GatewayRig, version_before: int) -> None:
    """Its rows of requests have no fields that it would refuse."""
    old = await rig.dealer()
    await say(old, messages.Hello(version_before, "client", "old"))
    (welcome,) = await hear(old)
    assert isinstance(welcome, messages.Welcome)
    assert welcome.protocol == version_before
    await say(old, SUBMIT)
    await hear(old)
    await say(old, messages.DescribeRequest(8, SUBMIT.request_id))
    frame = KEEPALIVE
    with trio.fail_after(HANG_LIMIT_S):
        while frame == KEEPALIVE:
            (frame,) = await old.recv_batch()
    _, _, row, _ = msgspec.msgpack.decode(frame)
    detail = messages.decode_gateway(frame)
    assert isinstance(detail, messages.RequestDetail)
    assert len(row) == len(messages.RequestRow.__struct_fields__) - NEWER_FIELDS[messages.RequestRow]
    new = await introduce(rig)
    await say(new, messages.DescribeRequest(8, SUBMIT.request_id))
    assert await hear(new) == [detail]
    old.close()
    new.close()


async def test_client_of_the_version_before_reads_the_end_of_a_request(rig: GatewayRig, version_before: int) -> None:
    old = await rig.dealer()
    await say(old, messages.Hello(version_before, "client", "old"))
    await hear(old)
    await say(old, SUBMIT)
    await hear(old)
    rig.speak("a", [1, 2])
    rig.scheduler.finish("a")
    ends: list[list[object]] = []
    with trio.fail_after(HANG_LIMIT_S):
        while not ends:
            ends = [said for said in map(msgspec.msgpack.decode, await old.recv_batch()) if said[0] == "ended"]
    assert len(ends[0]) == 1 + len(messages.Ended.__struct_fields__) - NEWER_FIELDS[messages.Ended]
    old.close()


async def test_scheduler_refusal_reaches_client_in_full(rig: GatewayRig) -> None:
    dealer = await introduce(rig)
    rig.scheduler.refuse_with = CapacityError(
        "needs 812 host pages, pool has 512", field="prompt", value="52,000 tokens", remedy="shorten it"
    )
    await say(dealer, SUBMIT)
    assert await failure(dealer) == messages.Failure(
        7, "capacity", "needs 812 host pages, pool has 512", "prompt", "52,000 tokens", "shorten it"
    )
    assert rig.counters.refused == {"capacity": 1}
    dealer.close()


@pytest.mark.refuses("{} connections are open")
async def test_connections_are_bounded_and_dead_ones_are_evicted(tmp_path: Path) -> None:
    async with running(GatewayRig(tmp_path, connections_max=2)) as rig:
        first, second, third = await introduce(rig), await introduce(rig), await rig.dealer()
        hello = messages.Hello(PROTOCOL_VERSION, "client")
        await say(third, hello)
        assert (await failure(third)).code == "capacity"
        first.close()
        with trio.fail_after(HANG_LIMIT_S):
            await say(third, hello)
            while not isinstance((await hear(third))[0], messages.Welcome):  # libzmq has not seen that it closed
                await say(third, hello)
        second.close()
        third.close()


# ------------------------------------------------------------ what is carried out


async def test_every_command_reaches_the_scheduler_unchanged(rig: GatewayRig) -> None:
    async with open_client(rig.admin_socket.endpoint, role="admin", name="ops") as admin:
        await admin.submit_detached([1, 2], Sampling(max_tokens=5), request_id="a")
        assert await admin.abort(["a"]) == ("a: abort",)
        assert await admin.retract(["a"], keep=False) == ("a: retract",)
        assert await admin.resume(["a"]) == ("a: resume",)
        assert await admin.resize(["a"], 4096) == ("a: resize",)
        assert await admin.drain(["w"], handover=True, deadline_s=9.0) == ("w",)
        assert await admin.undrain() == ()
        assert await admin.stop(3.0) == ("stopping",)
        assert await admin.reload_keys() == ("allowed keys: changed",)
        rig.reloaded = ConfigError("not a role, a name and a public key", field="allowed.keys:3", value="x")
        with pytest.raises(ConfigError, match=r"allowed\.keys:3=x: not a role"):
            await admin.reload_keys()
        assert (await admin.request("a")).row.request_id == "a"
        assert [row.request_id for row in (await admin.requests()).rows] == ["a"]
        assert (await admin.pools())[0].node == "n"
        assert (await admin.audit()).audited == (messages.AuditedRow("w", 1, True, 2, 3, 0),)
        assert await admin.workers() == ()
        assert await admin.model() == MODEL
    assert rig.scheduler.owners == {"a": "admin ops"}
    assert rig.scheduler.commands[1:] == [
        ("abort", ("a",)),
        ("retract", ("a",), False, True),
        ("resume", ("a",)),
        ("resize", ("a",), 4096),
        ("drain", ("w",), True, 9.0),
        ("undrain", ()),
        ("stop", 3.0),
        ("audit", "admin ops"),
    ]


async def test_long_lists_are_truncated_and_marked(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        for _ in range(4):
            await client.submit_detached([1], Sampling(max_tokens=1))
        shown = await client.requests(limit=3)
        assert (len(shown.rows), shown.truncated) == (3, True)
        shown = await client.requests(limit=-(2**63))
        assert (len(shown.rows), shown.truncated) == (1, True)
        assert not (await client.requests(limit=2**64 - 1)).truncated


async def test_model_is_sent_once_known(rig: GatewayRig) -> None:
    rig.scheduler.served = None
    async with open_client(rig.client_socket.endpoint) as client:
        assert (await client.welcome()).model is None
        rig.scheduler.served = MODEL
        assert await client.model() == MODEL


async def test_a_tokenizer_is_handed_on(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        with pytest.raises(Exception, match="has not arrived yet"):
            await client.tokenizer()
        rig.tokenizers.data = bytes(3_000_000)
        assert (await client.tokenizer()).data == bytes(3_000_000)


# ------------------------------------------------------------ what is delivered


async def test_accepted_comes_first_tokens_in_order_and_ended_last(rig: GatewayRig) -> None:
    dealer = await introduce(rig)
    await say(dealer, SUBMIT)
    (accepted,) = await hear(dealer)
    assert isinstance(accepted, messages.Accepted)
    for i in range(50):
        rig.speak("a", [3 * i, 3 * i + 1, 3 * i + 2])
        await trio.lowlevel.checkpoint()
    assert await read_tokens(dealer, 150) == list(range(150))
    rig.scheduler.finish("a", tail_text="tail")
    assert await hear(dealer) == [messages.Ended(accepted.handle, "a", "FINISHED", "length", 150, "tail")]
    dealer.close()


async def test_submitting_without_subscribing_delivers_nothing(rig: GatewayRig) -> None:
    dealer = await introduce(rig)
    await say(dealer, messages.Submit(7, pack_int32([1]), Sampling(max_tokens=10), "a", subscribe=False))
    assert await hear(dealer) == [messages.Accepted(7, "a", -1)]
    rig.speak("a", [1])
    rig.scheduler.finish("a")
    await trio.sleep(0.05)  # time for flushes
    await say(dealer, messages.ListPools(1))
    assert isinstance((await hear(dealer))[0], messages.PoolRows)
    dealer.close()


@pytest.mark.refuses("{} has {} tokens so far")
async def test_attach_continues_at_offset_even_after_the_end(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        await client.submit_detached([1], Sampling(max_tokens=100), request_id="a")
        rig.speak("a", list(range(10)))
        early = await client.attach("a", 4)
        assert list(await anext(early)) == list(range(4, 10))
        with pytest.raises(Exception, match="attached already"):
            await client.attach("a", 0)
        await client.detach(early)
        rig.speak("a", [10, 11])
        rig.scheduler.finish("a")
        late = await client.attach("a", 9)
        assert list(await late.collect()) == [9, 10, 11]
        assert late.ended is not None
        assert late.ended.generated_tokens == 12
        for offset in (-1, 13, 2**40):
            with pytest.raises(Exception, match=r"has 12 tokens so far \(choose 0 to 12\)"):
                await client.attach("a", offset)
        with pytest.raises(Exception, match="no such request"):
            await client.attach("b")


async def test_slow_reader_does_not_delay_other_clients(tmp_path: Path) -> None:
    """Its cursor stays. When it reads again it gets every position; the other clients get theirs meanwhile (I5)."""
    total = 60_000
    async with running(GatewayRig(tmp_path, queue_messages=5)) as rig:
        rig.scheduler.served = msgspec.structs.replace(MODEL, context_max_tokens=2 * total)
        slow = await DealerSocket.connect(rig.client_socket.endpoint, message_bytes_max=1 << 20, queue_messages=5)
        await say(slow, messages.Hello(PROTOCOL_VERSION, "client"))
        await hear(slow)
        await say(slow, messages.Submit(7, pack_int32([1]), Sampling(max_tokens=total), "a"))
        await hear(slow)
        async with open_client(rig.client_socket.endpoint) as client:
            stream = await client.attach("a")
            got: list[int] = []
            for i in range(0, total, 300):
                rig.speak("a", list(range(i, i + 300)))
                with trio.fail_after(HANG_LIMIT_S):
                    got += list(await anext(stream))
            while len(got) < total:
                got += list(await anext(stream))
            assert got == list(range(total))
        assert rig.counters.stalled_deliveries > 0, "the slow client must have been blocked"
        rig.scheduler.finish("a")
        assert await read_slowly(slow) == list(range(total))
        slow.close()


async def read_slowly(dealer: DealerSocket) -> list[int]:
    tokens: list[int] = []
    with trio.fail_after(HANG_LIMIT_S):
        while True:
            for frame in await dealer.recv_batch():
                message = messages.decode_gateway(frame)
                if isinstance(message, messages.Ended):
                    return tokens
                assert isinstance(message, messages.Delivery)
                if message.starts:
                    assert unpack_int32(message.starts, "starts")[0] == len(tokens)
                    tokens += list(unpack_int32(message.tokens, "tokens"))


async def test_client_is_dropped_when_its_replies_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "OUTBOX_MESSAGES_MAX", 50)
    async with running(GatewayRig(tmp_path, queue_messages=5)) as rig:
        deaf = await DealerSocket.connect(rig.client_socket.endpoint, message_bytes_max=1 << 20, queue_messages=5)
        await say(deaf, messages.Hello(PROTOCOL_VERSION, "client"))
        await hear(deaf)
        await say(deaf, messages.Submit(7, pack_int32([1]), Sampling(max_tokens=10), "a" * 100))
        await hear(deaf)
        with trio.fail_after(HANG_LIMIT_S):
            while rig.connections:
                await say(deaf, *[messages.DescribeRequest(i, "a" * 100) for i in range(100)])
        neighbour = await introduce(rig)
        neighbour.close()
        deaf.close()


async def test_subscriber_of_a_forgotten_output_is_dropped(tmp_path: Path) -> None:
    async with running(GatewayRig(tmp_path, queue_messages=2)) as rig:
        dealer = await introduce(rig)
        await say(dealer, SUBMIT)
        await hear(dealer)
        rig.deliveries.connections.is_blocked[0] = True
        rig.scheduler.speak("a", [1, 2])
        rig.scheduler.forget("a")
        assert rig.connections == 0
        await say(dealer, messages.ListPools(4))
        assert (await failure(dealer)).remedy == "send Hello first"
        dealer.close()


async def test_last_tokens_and_endings_are_sent_before_gateway_stops(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint, reconnect_limit_s=0) as client:
        stream = await client.submit([1], Sampling(max_tokens=10), request_id="a")
        rig.scheduler.speak("a", [1, 2, 3])
        rig.scheduler.finish("a", "ABORTED")
        rig.gateway.close()
        with trio.fail_after(HANG_LIMIT_S):
            assert list(await stream.collect()) == [1, 2, 3]
        assert stream.ended is not None
        assert stream.ended.outcome == "ABORTED"


async def test_stop_is_answered_before_gateway_ends(rig: GatewayRig) -> None:
    async with open_client(rig.admin_socket.endpoint, role="admin", reconnect_limit_s=0) as admin:
        rig.scheduler.on_stop = rig.gateway.close
        assert await admin.stop() == ("stopping",)


async def test_lost_clients_are_detected(rig: GatewayRig) -> None:
    dealer = await introduce(rig)
    assert rig.connections == 1
    dealer.close()
    with trio.fail_after(HANG_LIMIT_S):
        while rig.connections:
            await trio.sleep(0.01)
            rig.deliveries.probe(idle_since=float("inf"))
