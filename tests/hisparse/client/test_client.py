"""hisparse.client: streams outlive connections (I5: each position once and in order), calls never hang."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from hisparse import Client, TokenStream, open_client, run_client
from hisparse.client.connection import Connection, ConnectionLost
from hisparse.client.token_stream import TrioNews
from protocol.arrays import pack_int32
from protocol.errors import BadInput, HiSparseError, NotAllowed, NotFound, ProtocolError, Unavailable, WrongState
from protocol.messages import Ended, Sampling, Submit
from tests.support.fakes.dealer import FakeDealer
from tests.support.gateway_rig import GatewayRig, running
from tests.support.limits import HANG_LIMIT_S

SAMPLING = Sampling(max_tokens=1000)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    async with running(GatewayRig(tmp_path)) as rig:
        yield rig


def endpoint_in(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/run/client.sock"


def test_run_client_without_a_coordinator_is_unavailable(tmp_path: Path) -> None:
    async def ask(client: Client) -> int:
        return len((await client.requests()).rows)

    with pytest.raises(Unavailable, match="no coordinator listens there"):
        run_client(endpoint_in(tmp_path), ask)


def test_open_client_outside_asyncio_and_trio_names_run_client() -> None:
    async def ask() -> None:
        async with open_client("ipc:///nowhere"):
            pass

    with pytest.raises(WrongState, match=r"outside asyncio and trio \(call hisparse\.run_client\(ENDPOINT, ACTION\)"):
        ask().send(None)


async def test_run_client_inside_trio_names_open_client() -> None:
    with pytest.raises(WrongState, match=r"inside asyncio or trio \(async with hisparse\.open_client\(ENDPOINT\)"):
        run_client("ipc:///nowhere", Client.pools)


async def test_a_closed_client_ends_its_streams(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        stream = await client.submit([1], SAMPLING, request_id="a")
        rig.speak("a", [4])
        assert list(await anext(stream)) == [4]
    with trio.fail_after(HANG_LIMIT_S), pytest.raises(Unavailable, match="the client was closed"):
        await anext(stream)


async def test_errors_leave_the_block_unwrapped(rig: GatewayRig) -> None:
    with pytest.raises(NotFound) as caught:
        async with open_client(rig.client_socket.endpoint) as client:
            await client.request("absent")
    assert (caught.value.field, caught.value.value, caught.value.remedy) == (
        "request_id",
        "absent",
        "hisparse requests",
    )
    with pytest.raises(ProtocolError, match="this is the client endpoint"):
        async with open_client(rig.client_socket.endpoint, role="admin"):
            pass


async def test_concurrent_calls_get_their_own_answers(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        ids = [f"r{i}" for i in range(40)]

        async def submit(request_id: str) -> None:
            stream = await client.submit([1], SAMPLING, request_id=request_id)
            assert stream.request_id == request_id
            rig.speak(request_id, [int(request_id[1:])] * 3)
            assert list(await anext(stream)) == [int(request_id[1:])] * 3

        async with trio.open_nursery() as nursery:
            for request_id in ids:
                nursery.start_soon(submit, request_id)


@pytest.mark.parametrize(
    ("ask", "kind", "complaint"),
    [
        (lambda it: it.submit([1.5], SAMPLING), BadInput, "prompt=1 values: expected a list of int32 token ids"),
        (lambda it: it.submit("hello", SAMPLING), BadInput, "expected a list of int32 token ids"),
        (lambda it: it.submit(np.zeros((2, 2), int), SAMPLING), BadInput, "got 2 dimensions of int64"),
        (lambda it: it.submit(np.array([1, -(2**40)]), SAMPLING), BadInput, f"prompt={-(2**40)}: a token id"),
        (
            lambda it: it.submit([1], Sampling(max_tokens="5")),
            BadInput,
            r"max_tokens='5': must be of the type int \(give a value of that type\)",
        ),
        (lambda it: it.submit([1], {"max_tokens": 5}), BadInput, "sampling=.*: must be of the type Sampling"),
        (
            lambda it: it.submit([1], msgspec.defstruct("Odd", [])()),
            BadInput,
            "sampling=.*: must be of the type Sampling",
        ),
        (lambda it: it.submit([1], Sampling(5, stop="END")), BadInput, r"stop='END': must be of the type tuple\[str,"),
        (lambda it: it.submit([1], SAMPLING, priority=10**30), BadInput, f"priority={10**30}: must be -1000 to 1000 "),
        (lambda it: it.submit([1], Sampling(5, seed=2**64)), BadInput, f"seed={2**64}: must be 0 to {2**63 - 1} "),
        (lambda it: it.submit([1], Sampling(2**64)), BadInput, f"max_tokens={2**64}: must be -{2**63} to {2**64 - 1} "),
        (lambda it: it.submit_detached([1], SAMPLING, request_id=7), BadInput, "request_id=7: must be of the type str"),
        (lambda it: it.request("\ud800"), BadInput, "request_id=.*: holds half of a surrogate pair"),
        (lambda it: it.abort("r1"), BadInput, r"ids=r1: one text, not a list of ids \(give \['r1'\]\)"),
        (lambda it: it.abort(["r"] * 65_537), BadInput, "request_ids=65537 names: holds more than 65536 "),
        (lambda it: it.drain(), NotAllowed, 'role=client: may not send DrainWorkers .*role="admin"'),
    ],
)
async def test_unreadable_call_costs_no_other_call(
    rig: GatewayRig, ask: Callable[[Client], Awaitable[object]], kind: type[HiSparseError], complaint: str
) -> None:
    """It is refused by the name of its field before it is sent; the connection and its streams stay."""
    async with open_client(rig.client_socket.endpoint) as client:
        stream = await client.submit([1], SAMPLING, request_id="other")
        with pytest.raises(kind, match=complaint):
            await ask(client)
        rig.speak("other", [4, 5])
        assert list(await anext(stream)) == [4, 5]
        assert client.reconnects == 0


async def test_oversized_prompt_is_a_caller_error(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        with pytest.raises(BadInput, match="exceeds the limit"):
            await client.submit(np.zeros(3_000_000, np.int32), SAMPLING)
        assert await client.pools()


async def test_a_cancelled_call_leaves_the_client_usable(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        for _ in range(5):
            with trio.CancelScope() as scope:
                scope.cancel()
                await client.pools()
            with trio.move_on_after(0.0001):
                await client.pools()
        assert (await client.pools())[0].node == "n"


async def test_streams_continue_at_their_offset_after_a_restart(tmp_path: Path) -> None:
    """The successor knows the request and what it has generated; the client sees no position twice."""
    async with running(GatewayRig(tmp_path)) as first, open_client(endpoint_in(tmp_path)) as client:
        a = await client.submit([1], SAMPLING, request_id="a")
        b = await client.submit([1], SAMPLING, request_id="b")
        first.speak("a", [0, 1, 2])
        assert list(await anext(a)) == [0, 1, 2]
        await first.kill()
        async with running(GatewayRig(tmp_path, incarnation=2)) as second:
            for request_id in ("a", "b"):
                await second.scheduler.submit(resubmitted(request_id), "journal")
            second.speak("a", [0, 1, 2, 3, 4])
            second.speak("b", [7])
            with trio.fail_after(HANG_LIMIT_S):
                assert list(await anext(a)) == [3, 4]
                assert list(await anext(b)) == [7]
            assert (client.reconnects, a.offset) == (1, 5)
            assert (await client.welcome()).incarnation == 2
            second.scheduler.finish("a")
            assert list(await a.collect()) == []
            assert a.ended is not None


def resubmitted(request_id: str) -> Submit:
    return Submit(0, pack_int32([1]), SAMPLING, request_id)


async def test_dropped_client_connects_again(tmp_path: Path) -> None:
    """The gateway dropped its connection; the client learns it from the answer to its next call."""
    async with (
        running(GatewayRig(tmp_path)) as rig,
        open_client(rig.client_socket.endpoint, reconnect_limit_s=HANG_LIMIT_S) as client,
    ):
        stream = await client.submit([1], Sampling(max_tokens=10), request_id="a")
        rig.scheduler.speak("a", [1, 2])
        connections = rig.deliveries.connections
        connections.drop(connections[0], "did not read")
        with pytest.raises(ConnectionLost):
            await client.pools()
        with trio.fail_after(HANG_LIMIT_S):
            assert (await client.pools())[0].node == "n"
            rig.scheduler.speak("a", [3])
            rig.scheduler.finish("a")
            assert list(await stream.collect()) == [1, 2, 3]
        assert client.reconnects == 1


async def test_unknown_request_fails_only_its_stream(tmp_path: Path) -> None:
    async with running(GatewayRig(tmp_path)) as first, open_client(endpoint_in(tmp_path)) as client:
        lost = await client.submit([1], SAMPLING, request_id="lost")
        kept = await client.submit([1], SAMPLING, request_id="kept")
        await first.kill()
        async with running(GatewayRig(tmp_path, incarnation=2)) as second:
            await second.scheduler.submit(resubmitted("kept"), "journal")
            with trio.fail_after(HANG_LIMIT_S), pytest.raises(NotFound):
                await anext(lost)
            second.speak("kept", [5])
            with trio.fail_after(HANG_LIMIT_S):
                assert list(await anext(kept)) == [5]


async def test_calls_in_flight_report_a_lost_connection(rig: GatewayRig) -> None:
    raised: list[Unavailable] = []
    async with open_client(rig.client_socket.endpoint, reconnect_limit_s=0.2) as client:
        stream = await client.submit([1], SAMPLING)

        async def ask() -> None:
            with pytest.raises(Unavailable) as caught:
                await client.abort([stream.request_id])
            raised.append(caught.value)

        rig.scheduler.never_answers = True
        with trio.fail_after(HANG_LIMIT_S):
            async with trio.open_nursery() as callers:
                callers.start_soon(ask)
                while not rig.scheduler.unanswered:  # noqa: ASYNC110
                    await trio.sleep(0.005)
                await rig.kill()
            assert "whether the command was carried out is unknown" in str(raised[0])
            with pytest.raises(Unavailable, match="no coordinator listens"):
                await anext(stream)
            with pytest.raises(Unavailable, match="no coordinator listens"):
                await client.pools()


def test_stream_drops_known_tokens_and_refuses_gaps() -> None:
    stream = TokenStream("a", 5, TrioNews())

    def deliver(start: int, *tokens: int) -> None:
        """Each with a row of one word: ten times the token."""
        array = np.array(tokens, np.int32)
        stream.deliver(start, array, 10 * array.reshape(-1, 1))

    deliver(5, 50, 60)
    deliver(6, 61, 70)
    deliver(5, 51)
    assert stream.received == 8
    with pytest.raises(ProtocolError, match="position 8 is missing"):
        deliver(9, 90)
    stream.end(Ended(0, "a", "FINISHED", "eos", 8))
    assert list(trio.run(stream.collect)) == [50, 60, 70]
    assert stream.rows.tolist() == [[500], [600], [700]]
    assert stream.offset == 8


async def test_a_cancelled_reader_loses_no_tokens(rig: GatewayRig) -> None:
    async with open_client(rig.client_socket.endpoint) as client:
        stream = await client.submit([1], SAMPLING, request_id="a")
        got: list[int] = []
        for i in range(60):
            rig.speak("a", [i])
            with trio.move_on_after(i % 4 * 1e-4):
                got += list(await anext(stream))
        rig.scheduler.finish("a")
        got += list(await stream.collect())
    assert got == list(range(60))


async def test_call_survives_a_connection_lost_before_use() -> None:
    connection = Connection("ipc:///nowhere", "client", "", 1.0, None)
    dealers: list[object] = []

    async def call() -> None:
        dealers.append(await connection._connected())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        connection._ready.set()  # made, and lost again in the same instant
        connection._ready = trio.Event()
        await trio.testing.wait_all_tasks_blocked()
        assert dealers == []
        connection._dealer = dealer = FakeDealer()  # type: ignore[assignment]
        connection._ready.set()
    assert dealers == [dealer]
    await dealer._outgoing.aclose()  # lost while `greet` waits to send
    with pytest.raises(ConnectionLost, match="whether the command was carried out is unknown"):
        await connection.greet()
    connection.close()
    with pytest.raises(Unavailable, match="the client was closed"):
        await connection.greet()
