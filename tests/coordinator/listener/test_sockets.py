"""coordinator.listener.router over real ipc sockets: the traps of trio with ZMQ, each with its test."""

from __future__ import annotations

import os
import socket as std_socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from coordinator.listener.router import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    BATCH_PARTS_MAX,
    HARD_LIMIT_FACTOR,
    Received,
    RouterSocket,
    Sent,
)
from protocol.errors import BadInput, ConfigError, Unavailable
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import Insecure
from protocol.transport.watched import KEEPALIVE_PROBES, KEEPALIVE_S, context_of
from tests.support.limits import HANG_LIMIT_S
from tests.support.zmtp_peer import connect as connect_by_hand
from tests.support.zmtp_peer import frame as frame_by_hand

BYTES_MAX = 100_000


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/run/client.sock"


@pytest.fixture
async def router(endpoint: str) -> AsyncIterator[RouterSocket]:
    socket = RouterSocket(endpoint, message_bytes_max=BYTES_MAX, queue_messages=50)
    yield socket
    socket.close()


async def connect(router: RouterSocket) -> DealerSocket:
    return await DealerSocket.connect(router.endpoint, message_bytes_max=BYTES_MAX, queue_messages=50)


def raw_dealer(router: RouterSocket) -> zmq.Socket[bytes]:
    """A peer that keeps none of our rules."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.connect(router.endpoint)
    return socket


async def introduce(router: RouterSocket, dealer: DealerSocket) -> bytes:
    await dealer.send(b"hello")
    return (await router.recv_batch())[0].peer


async def test_tcp_connections_are_probed_by_the_kernel() -> None:
    """In place of heartbeats, whose bytes would count as an unfinished message's."""
    router = RouterSocket("tcp://127.0.0.1:*", message_bytes_max=BYTES_MAX, guard=Insecure())
    dealer = await DealerSocket.connect(router.endpoint, message_bytes_max=BYTES_MAX, key=Insecure())
    await dealer.send(b"hello")
    (received,) = await router.recv_batch()
    with std_socket.socket(fileno=os.dup(received.descriptor)) as connection:
        assert connection.getsockopt(std_socket.SOL_SOCKET, std_socket.SO_KEEPALIVE) == 1
        options = std_socket.TCP_KEEPIDLE, std_socket.TCP_KEEPINTVL, std_socket.TCP_KEEPCNT, std_socket.TCP_USER_TIMEOUT
        values = [connection.getsockopt(std_socket.IPPROTO_TCP, option) for option in options]
        assert values == [KEEPALIVE_S, KEEPALIVE_S, KEEPALIVE_PROBES, 1_000 * KEEPALIVE_S * (KEEPALIVE_PROBES + 1)]
    dealer.close()
    router.close()


async def test_message_of_many_parts_does_not_hold_up_other_tasks(router: RouterSocket) -> None:
    """It is taken over several turns of the loop, and arrives as one that no codec accepts."""
    dealer, turns = raw_dealer(router), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    with trio.fail_after(HANG_LIMIT_S):
        await trio.to_thread.run_sync(dealer.send_multipart, [b"x"] * 20 * BATCH_PARTS_MAX)
        dealer.send(b"next")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            frames = [received.frame for received in await router.recv_batch()]
            while len(frames) < 2:
                frames += [received.frame for received in await router.recv_batch()]
            nursery.cancel_scope.cancel()
    assert frames == [b"", b"next"]
    assert turns >= 20
    dealer.close(0)


#: Greeting and empty routing id of a DEALER, then a message.
OLD_PROTOCOLS = {
    "ZMTP 1.0": b"\x01\x00" + b"\x06\x00first",
    "ZMTP 2.0": b"\xff" + bytes(7) + b"\x01\x7f" + b"\x01\x05" + frame_by_hand(b"") + frame_by_hand(b"first"),
}


@pytest.mark.parametrize("version", OLD_PROTOCOLS)
async def test_peer_of_an_old_zmtp_has_no_descriptor(router: RouterSocket, version: str) -> None:
    """libzmq gives no properties to its messages. One of them ended the coordinator once, without a hello."""
    with connect_by_hand(router.endpoint) as connection, trio.fail_after(HANG_LIMIT_S):
        connection.sendall(OLD_PROTOCOLS[version])
        (received,) = await router.recv_batch()
        assert (received.frame, received.descriptor, received.pid) == (b"first", -1, 0)
        router.connection_events.introduce(received.descriptor, received.user)
        router.connection_events.cut(received.descriptor)
        assert router.send(received.peer, b"answer") is Sent.OK
        assert len(router.connection_tracker) == 1, "it has no hello, and will be ended"


async def test_new_dealer_reuses_no_monitor_address(router: RouterSocket) -> None:
    """pyzmq names a monitor by its socket's descriptor, which is free before libzmq lets go of the name."""
    with context_of("dealer").socket(zmq.PAIR) as earlier:
        for descriptor in range(1000):
            earlier.bind(f"inproc://monitor.s-{descriptor}")
        dealer = await connect(router)
        await introduce(router, dealer)
        dealer.close()


async def test_messages_go_both_ways_in_order(router: RouterSocket) -> None:
    dealer = await connect(router)
    peer = await introduce(router, dealer)
    for number in range(40):
        assert router.send(peer, b"%d" % number) is Sent.OK
    got: list[bytes] = []
    with trio.fail_after(HANG_LIMIT_S):
        while len(got) < 40:
            got += await dealer.recv_batch()
    assert got == [b"%d" % number for number in range(40)]
    dealer.close()


async def test_a_cancelled_receive_loses_nothing(router: RouterSocket) -> None:
    dealer = await connect(router)
    peer = await introduce(router, dealer)
    got: list[bytes] = []
    cancelled = 0

    async def receive_under(scope: trio.CancelScope) -> None:
        nonlocal got, cancelled
        with scope:
            got += await dealer.recv_batch()
        cancelled += scope.cancelled_caught

    number = 0
    with trio.fail_after(HANG_LIMIT_S):
        while number < 500 or cancelled <= 10:  # how often a cancellation wins the race is the machine's affair
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive_under, scope)
                await trio.testing.wait_all_tasks_blocked()
                assert router.send(peer, b"%d" % number) is Sent.OK
                await trio.sleep(number % 8 * 30e-6)
                scope.cancel()
            number += 1
            while number % 20 == 0 and len(got) < number:
                got += await dealer.recv_batch()
        while len(got) < number:
            got += await dealer.recv_batch()
    assert got == [b"%d" % sent for sent in range(number)]
    dealer.close()


async def test_send_that_consumes_the_edge_wakes_the_reader(router: RouterSocket) -> None:
    """Ping-pong while other tasks send through the same sockets all the time; a stall trips the deadline."""
    dealer = await connect(router)
    peer = await introduce(router, dealer)
    rounds = 3_000

    async def echo() -> None:
        while True:
            for received in await router.recv_batch():
                router.send(received.peer, received.frame)
                router.send(received.peer, b"noise")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(echo)
        answers: list[bytes] = []
        with trio.fail_after(HANG_LIMIT_S):
            for number in range(rounds):
                await dealer.send(b"%d" % number)
                await dealer.send(b"extra")
                while len(answers) <= number:
                    answers += [frame for frame in await dealer.recv_batch() if frame not in {b"noise", b"extra"}]
        nursery.cancel_scope.cancel()
    assert answers == [b"%d" % number for number in range(rounds)]
    assert peer
    dealer.close()


async def test_parked_reader_is_woken_by_a_send(router: RouterSocket) -> None:
    """The message is already there when the other task's send reads the mailbox: only a re-read of EVENTS tells."""
    dealer = await connect(router)
    peer = await introduce(router, dealer)
    got: list[Received] = []

    async def read() -> None:
        got.extend(await router.recv_batch())

    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            dealer._queue(b"late")
            while not router._events() & zmq.POLLIN:  # consumes the edge, as a send may
                pass
            router.send(peer, b"x")
    assert [received.frame for received in got] == [b"late"]
    dealer.close()


async def test_burst_of_sends_wakes_a_parked_reader_once(router: RouterSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first send that sees the message wakes the reader; those after it do not look. So again for the next one."""
    dealer = await connect(router)
    peer = await introduce(router, dealer)
    got: list[bytes] = []
    looks, events = 0, router._events

    async def read() -> None:
        got.extend(received.frame for received in await router.recv_batch())

    def look() -> int:
        nonlocal looks
        looks += 1
        return events()

    for frame in (b"first", b"second"):
        with trio.fail_after(HANG_LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                dealer._queue(frame)
                while not events() & zmq.POLLIN:
                    pass
                with monkeypatch.context() as patch:
                    looks = 0
                    patch.setattr(router, "_events", look)
                    for _ in range(10):
                        router.send(peer, b"x")
                assert looks == 1
    assert got == [b"first", b"second"]
    dealer.close()


async def test_batch_is_bounded(router: RouterSocket) -> None:
    wide = RouterSocket(router.endpoint + "2", message_bytes_max=BYTES_MAX)
    dealer = await DealerSocket.connect(wide.endpoint, message_bytes_max=BYTES_MAX)
    for number in range(BATCH_MESSAGES_MAX + 10):
        await dealer.send(b"%d" % number)
    await trio.sleep(0.1)
    assert len(await wide.recv_batch()) <= BATCH_MESSAGES_MAX
    dealer.close()
    wide.close()


async def test_batch_ends_with_the_message_that_fills_its_bytes(router: RouterSocket) -> None:
    """Whatever waits behind it is taken in the next batch, in order."""
    size = BYTES_MAX - 1
    dealer = await connect(router)
    for number in range(8):
        await dealer.send(b"%d" % number + bytes(size))
    await trio.sleep(0.2)
    batches = []
    with trio.fail_after(HANG_LIMIT_S):
        while sum(map(len, batches)) < 8:
            batches.append([received.frame[:1] for received in await router.recv_batch()])
    assert max(map(len, batches)) <= -(-BATCH_BYTES_MAX // size)
    assert b"".join(frame for batch in batches for frame in batch) == b"01234567"
    dealer.close()


async def test_full_and_gone_are_distinct_results(router: RouterSocket) -> None:
    dealer = await connect(router)
    peer = await introduce(router, dealer)
    accepted = 0
    with trio.fail_after(HANG_LIMIT_S):
        while router.send(peer, b"%06d" % accepted + bytes(10_000)) is Sent.OK:
            accepted += 1
            await trio.lowlevel.checkpoint()
        got: list[bytes] = []
        while len(got) < accepted:
            got += [frame[:6] for frame in await dealer.recv_batch()]
    assert got == [b"%06d" % number for number in range(accepted)], "no gap up to the refusal"
    assert router.send(b"absent", b"x") is Sent.GONE
    dealer.close()
    with trio.fail_after(HANG_LIMIT_S):
        while router.send(peer, b"x") is not Sent.GONE:  # noqa: ASYNC110 - libzmq has no event for it
            await trio.sleep(0.01)


async def test_a_dealer_waits_for_room(router: RouterSocket) -> None:
    dealer = await connect(router)
    count = 3_000

    async def send_all() -> None:
        for number in range(count):
            await dealer.send(b"%06d" % number + bytes(2_000))

    got: list[bytes] = []
    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            await trio.sleep(0.2)
            while len(got) < count:
                got += [received.frame[:6] for received in await router.recv_batch()]
    assert got == [b"%06d" % number for number in range(count)]
    dealer.close()


async def test_a_second_bind_is_refused_and_names_the_holder(router: RouterSocket) -> None:
    with pytest.raises(Unavailable, match=f"process {os.getpid()} serves it already"):
        RouterSocket(router.endpoint, message_bytes_max=BYTES_MAX)
    dealer = await connect(router)
    await introduce(router, dealer)
    dealer.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to(path.with_name("target")), "it is a symlink"),
        (lambda path: path.symlink_to(path.with_name("missing")), "it is a symlink"),
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "it is not a regular file"),
    ],
)
def test_what_is_no_lock_file_is_refused_and_stays(endpoint: str, make: Callable[[Path], object], reason: str) -> None:
    path = Path(endpoint.removeprefix("ipc://") + ".lock")
    path.parent.mkdir(mode=0o700)
    path.with_name("target").write_text("of another program")
    make(path)
    with pytest.raises(ConfigError, match=f"lock file={path}: cannot lock the endpoint: {reason} .remove it, or"):
        RouterSocket(endpoint, message_bytes_max=BYTES_MAX)
    assert path.with_name("target").read_text() == "of another program"
    assert not path.with_name("missing").exists()
    assert os.path.lexists(path)


def test_socket_path_of_a_killed_process_is_reused(endpoint: str) -> None:
    script = (
        "import os, signal\n"
        "from coordinator.listener.router import RouterSocket\n"
        f"router = RouterSocket({endpoint!r}, message_bytes_max=1000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=HANG_LIMIT_S)
    path = Path(endpoint.removeprefix("ipc://"))
    assert path.exists()
    RouterSocket(endpoint, message_bytes_max=BYTES_MAX).close()
    assert not path.exists()


async def test_socket_lies_in_a_private_directory(router: RouterSocket, tmp_path: Path) -> None:
    directory = Path(router.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    open_directory = tmp_path / "open"
    open_directory.mkdir()
    for mode in (0o755, 0o710, 0o701):  # any access of other users, the group included
        open_directory.chmod(mode)
        with pytest.raises(ConfigError, match="others could reach the sockets"):
            RouterSocket(f"ipc://{open_directory}/x.sock", message_bytes_max=BYTES_MAX)


def test_unusable_endpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than the 107 bytes"):
        RouterSocket(f"ipc://{tmp_path}/{'x' * 107}", message_bytes_max=BYTES_MAX)
    with pytest.raises(ConfigError, match="use ipc"):
        RouterSocket("smoke://signals", message_bytes_max=BYTES_MAX)


async def test_dealer_without_listener_raises_at_once(endpoint: str) -> None:
    with trio.fail_after(HANG_LIMIT_S), pytest.raises(Unavailable, match="no coordinator listens there"):
        await DealerSocket.connect(endpoint, message_bytes_max=BYTES_MAX)
    with pytest.raises(ConfigError, match="use ipc"):
        await DealerSocket.connect("smoke://signals", message_bytes_max=BYTES_MAX)


@pytest.mark.parametrize("parked", ["reader", "writer"])
async def test_a_lost_connection_raises_for_readers_and_writers(router: RouterSocket, parked: str) -> None:
    """No silent reconnect: what was in flight is gone, so the owner must introduce itself again."""
    dealer = await connect(router)
    await introduce(router, dealer)

    async def forever() -> None:
        while True:
            await (dealer.recv_batch() if parked == "reader" else dealer.send(bytes(50_000)))

    async def wait_for_loss() -> None:
        with pytest.raises(Unavailable, match="the connection was lost"):
            await forever()

    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_loss)
            await trio.testing.wait_all_tasks_blocked()
            router.close()
    with pytest.raises(Unavailable):
        await dealer.recv_batch()
    dealer.close()


async def test_received_messages_are_read_before_the_loss(endpoint: str) -> None:
    router = RouterSocket(endpoint, message_bytes_max=BYTES_MAX)
    dealer = await DealerSocket.connect(endpoint, message_bytes_max=BYTES_MAX)
    peer = await introduce(router, dealer)
    router._socket.setsockopt(zmq.LINGER, int(1_000 * HANG_LIMIT_S))
    for number in range(500):
        assert router.send(peer, b"%d" % number) is Sent.OK
    router.close()
    with trio.fail_after(HANG_LIMIT_S):
        while not int(dealer._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # noqa: ASYNC110 - until libzmq sees the end
            await trio.sleep(0.01)
    got: list[bytes] = []

    async def read_all() -> None:
        while True:
            got.extend(await dealer.recv_batch())

    with trio.fail_after(HANG_LIMIT_S), pytest.raises(Unavailable, match="the connection was lost"):
        await read_all()
    assert got == [b"%d" % number for number in range(500)]
    dealer.close()


async def test_loss_seen_by_a_writer_wakes_the_reader(router: RouterSocket) -> None:
    """The writer's look consumes the edge that the reader waits for."""
    dealer = await connect(router)
    await introduce(router, dealer)

    async def expect_loss() -> None:
        with pytest.raises(Unavailable):
            await dealer.recv_batch()

    def look_until_lost() -> None:
        while True:
            dealer._is_ready(zmq.POLLOUT)

    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_loss)
            await trio.testing.wait_all_tasks_blocked()
            router.close()
            with pytest.raises(Unavailable):
                look_until_lost()
    dealer.close()


async def test_closing_wakes_all_waiters(router: RouterSocket) -> None:
    dealer = await connect(router)

    async def expect_closed() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await dealer.recv_batch()

    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed)
            nursery.start_soon(expect_closed)
            await trio.testing.wait_all_tasks_blocked()
            dealer.close()
    with pytest.raises(trio.ClosedResourceError):
        await dealer.send(b"x")


async def test_duplicate_routing_ids_are_ignored(router: RouterSocket) -> None:
    """libzmq ignores the second connection of one routing id; the first goes on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    twins = []
    for _ in range(2):
        twin = context.socket(zmq.DEALER)
        twin.setsockopt(zmq.ROUTING_ID, b"twin")
        twin.connect(router.endpoint)
        twins.append(twin)
        twin.send(b"from %d" % len(twins))
        if twin is twins[0]:
            with trio.fail_after(HANG_LIMIT_S):
                (received,) = await router.recv_batch()
            assert received.frame == b"from 1"
    with trio.move_on_after(0.2) as scope:
        await router.recv_batch()
    assert scope.cancelled_caught
    assert router.send(b"twin", b"to the first") is Sent.OK
    assert await trio.to_thread.run_sync(twins[0].poll, 1_000 * HANG_LIMIT_S)
    for twin in twins:
        twin.close(0)


async def test_multipart_messages_arrive_as_unreadable(router: RouterSocket) -> None:
    raw = raw_dealer(router)
    raw.send_multipart([b"a", b"b"])
    with trio.fail_after(HANG_LIMIT_S):
        assert (await router.recv_batch())[0].frame == b""
    raw.close(0)


async def test_oversized_messages_are_cut_off_above_the_hard_limit(router: RouterSocket) -> None:
    raw = raw_dealer(router)
    raw.send(bytes(BYTES_MAX + 1))
    with trio.fail_after(HANG_LIMIT_S):
        (received,) = await router.recv_batch()
    assert (received.frame, received.frame_bytes) == (b"", BYTES_MAX + 1), "it is refused, so it is not copied"
    raw.send(bytes(BYTES_MAX * HARD_LIMIT_FACTOR + 1))
    neighbour = await connect(router)
    with trio.fail_after(HANG_LIMIT_S):
        peer = await introduce(router, neighbour)
    assert router.send(peer, b"unharmed") is Sent.OK
    raw.close(0)
    with pytest.raises(BadInput, match="exceeds the limit"):
        await neighbour.send(bytes(BYTES_MAX + 1))
    neighbour.close()


async def test_credentials_name_the_sending_process(endpoint: str) -> None:
    router = RouterSocket(endpoint, message_bytes_max=BYTES_MAX, credentials=True)
    dealer = await connect(router)
    await dealer.send(b"hello")
    assert (await router.recv_batch())[0].pid == os.getpid()
    script = (
        "import zmq\n"
        "dealer = zmq.Context().socket(zmq.DEALER)\n"
        f"dealer.connect({endpoint!r}); dealer.send(b'hello'); dealer.recv()"
    )
    child = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [sys.executable, "-c", script]
    )
    with trio.fail_after(HANG_LIMIT_S):
        received = (await router.recv_batch())[0]
    assert received.pid == child.pid
    router.send(received.peer, b"bye")
    child.wait(timeout=HANG_LIMIT_S)
    dealer.close()
    router.close()


async def test_closed_peer_is_not_confused_with_its_successor(endpoint: str) -> None:
    """The next connection is given the descriptor of the one before, which sends nothing by then."""
    router = RouterSocket(endpoint, message_bytes_max=BYTES_MAX, credentials=True)
    script = (
        "import zmq\n"
        "context = zmq.Context()\n"
        "dealer = context.socket(zmq.DEALER)\n"
        f"dealer.connect({endpoint!r}); dealer.send(b'hello'); dealer.close(100_000)\n"
        "context.term()"  # waits until it is sent; the end of the process does not
    )
    child = subprocess.Popen([sys.executable, "-c", script])  # noqa: ASYNC220 - returns at once
    await trio.to_thread.run_sync(child.wait)
    await trio.sleep(0.2)  # time in which libzmq notices
    dealer = await connect(router)
    await dealer.send(b"hello")
    seen: list[Received] = []
    with trio.fail_after(HANG_LIMIT_S):
        while len(seen) < 2:
            seen += await router.recv_batch()
    assert {received.pid for received in seen} == {child.pid, os.getpid()}
    dealer.close()
    router.close()


async def test_peer_cannot_claim_the_pid_of_another_process(endpoint: str) -> None:
    """Its handshake may carry forged properties; those of libzmq win."""
    router = RouterSocket(endpoint, message_bytes_max=BYTES_MAX, credentials=True)
    claims = {b"Socket-Type": b"DEALER", b"Identity": b"", b"Peer-Address": b"localhost:0:0:1", b"User-Id": b"admin"}
    properties = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in claims.items()
    )
    ready = b"\x05READY" + properties
    with std_socket.socket(std_socket.AF_UNIX) as peer:
        peer.connect(endpoint.removeprefix("ipc://"))
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        greeting = await trio.to_thread.run_sync(peer.recv, 64, std_socket.MSG_WAITALL)
        assert len(greeting) == 64  # libzmq ends the connection of a peer that sends more before it has read this
        peer.sendall(bytes([4, len(ready)]) + ready + b"\x00\x05hello")
        with trio.fail_after(HANG_LIMIT_S):
            (received,) = await router.recv_batch()
    assert (received.frame, received.pid, received.user) == (b"hello", os.getpid(), "")
    router.close()


async def test_lost_connection_does_not_return_to_a_successor(router: RouterSocket) -> None:
    """A silent reconnect would continue in the middle, at a coordinator that was never introduced."""
    dealer = await connect(router)
    router.close()
    successor = RouterSocket(router.endpoint, message_bytes_max=BYTES_MAX)
    await trio.sleep(0.5)  # time in which libzmq would have reconnected by itself
    with trio.fail_after(HANG_LIMIT_S), pytest.raises(Unavailable):
        await dealer.send(b"as if nothing had happened")
    with trio.move_on_after(0.2) as scope:
        await successor.recv_batch()
    assert scope.cancelled_caught
    dealer.close()
    successor.close()
