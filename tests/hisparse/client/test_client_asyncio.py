"""The client under asyncio.run: the calls and streams of the client under trio, cancelled and closed from both ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from hisparse import Client, open_client, run_client
from protocol.errors import BadInput, NotFound, Unavailable, WrongState
from protocol.messages import Sampling
from tests.support.gateway_rig import GatewayRig, running
from tests.support.limits import HANG_LIMIT_S

SAMPLING = Sampling(max_tokens=1000)
T = TypeVar("T")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    async with running(GatewayRig(tmp_path)) as rig:
        yield rig


async def under_asyncio(program: Callable[[], Awaitable[T]]) -> T:
    """Its result under asyncio.run, in a thread; no thread of a client is left."""

    async def limited() -> T:
        async with asyncio.timeout(HANG_LIMIT_S):
            return await program()

    result = await trio.to_thread.run_sync(lambda: asyncio.run(limited()))
    assert [it.name for it in threading.enumerate() if it.name == "hisparse client"] == []
    return result


def at_rig(action: Callable[..., T], *args: object) -> T:
    """`action(*args)` in the trio run of the rig, from a program under asyncio."""
    return trio.from_thread.run_sync(action, *args)


async def until_unanswered(rig: GatewayRig) -> None:
    """Until an abort has come to the coordinator."""
    while not rig.scheduler.unanswered:  # noqa: ASYNC110 - the trio run of the rig counts
        await asyncio.sleep(0.005)


async def test_submit_and_stream(rig: GatewayRig) -> None:
    async def program() -> list[int]:
        async with open_client(rig.client_socket.endpoint) as client:
            stream = await client.submit([1], SAMPLING, request_id="a")
            tokens: list[int] = []
            at_rig(rig.speak, "a", [4, 5])
            async for chunk in stream:
                tokens += chunk.tolist()
                if len(tokens) == 2:
                    at_rig(rig.speak, "a", [6])
                    at_rig(rig.scheduler.finish, "a")
            assert stream.ended is not None
            assert stream.ended.outcome == "FINISHED"
            assert (stream.offset, (await client.pools())[0].node) == (3, "n")
            return tokens

    assert await under_asyncio(program) == [4, 5, 6]


async def test_two_clients_and_many_tasks_at_once(rig: GatewayRig) -> None:
    async def speak(client: Client, request_id: str) -> None:
        stream = await client.submit([1], SAMPLING, request_id=request_id)
        at_rig(rig.speak, request_id, [int(request_id)] * 3)
        at_rig(rig.scheduler.finish, request_id)
        assert (await stream.collect()).tolist() == [int(request_id)] * 3

    async def program() -> None:
        endpoint = rig.client_socket.endpoint
        async with open_client(endpoint) as first, open_client(endpoint) as second, asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(speak(first if number % 2 else second, str(number)))

    await under_asyncio(program)


async def test_cancelled_readers_lose_no_tokens(rig: GatewayRig) -> None:
    async def program() -> list[int]:
        async with open_client(rig.client_socket.endpoint) as client:
            stream = await client.submit([1], SAMPLING, request_id="a")
            got: list[int] = []
            for i in range(60):
                at_rig(rig.speak, "a", [i])
                try:
                    async with asyncio.timeout(i % 4 * 1e-3):
                        got += (await anext(stream)).tolist()
                except TimeoutError:
                    pass
            at_rig(rig.scheduler.finish, "a")
            return got + (await stream.collect()).tolist()

    assert await under_asyncio(program) == list(range(60))


async def test_a_cancelled_call_ends_in_the_thread_and_leaves_the_client_usable(rig: GatewayRig) -> None:
    async def program() -> None:
        async with open_client(rig.client_socket.endpoint) as client:
            stream = await client.submit([1], SAMPLING, request_id="a")
            rig.scheduler.never_answers = True
            call = asyncio.create_task(client.abort(["a"]))
            await until_unanswered(rig)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            rig.scheduler.never_answers = False
            at_rig(rig.speak, "a", [7])
            assert (await anext(stream)).tolist() == [7]
            assert (await client.pools())[0].node == "n"

    await under_asyncio(program)


async def test_a_cancelled_program_closes_its_client(rig: GatewayRig) -> None:
    async def program() -> None:
        async def read() -> None:
            async with open_client(rig.client_socket.endpoint) as client:
                stream = await client.submit([1], SAMPLING, request_id="a")
                reading.set()
                await anext(stream)

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await under_asyncio(program)


async def test_detached_and_closed_streams_end(rig: GatewayRig) -> None:
    async def program() -> None:
        async with open_client(rig.client_socket.endpoint) as client:
            detached = await client.submit([1], SAMPLING, request_id="a")
            await client.detach(detached)
            assert (await detached.collect()).tolist() == []
            stream = await client.submit([1], SAMPLING, request_id="b")
            reader = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="the client was closed"):
            await reader
        with pytest.raises(Unavailable, match="the client was closed"):
            await client.pools()

    await under_asyncio(program)


async def test_errors_have_their_types(rig: GatewayRig) -> None:
    async def program() -> None:
        with pytest.raises(NotFound) as caught:
            async with open_client(rig.client_socket.endpoint) as client:
                await client.request("absent")
        async with open_client(rig.client_socket.endpoint) as client:
            with pytest.raises(BadInput, match=r"priority=1000000.*: must be -1000 to 1000"):
                await client.submit([1], SAMPLING, priority=10**30)
        assert (caught.value.field, caught.value.value) == ("request_id", "absent")
        with pytest.raises(WrongState, match=r"async with hisparse\.open_client\(ENDPOINT\)"):
            run_client(rig.client_socket.endpoint, Client.pools)

    await under_asyncio(program)


async def test_without_a_coordinator_it_is_unavailable(tmp_path: Path) -> None:
    async def program() -> None:
        with pytest.raises(Unavailable, match="no coordinator listens there"):
            async with open_client(f"ipc://{tmp_path}/client.sock"):
                pass

    await under_asyncio(program)


async def test_calls_and_streams_end_when_the_coordinator_stays_away(rig: GatewayRig) -> None:
    async def program() -> None:
        async with open_client(rig.client_socket.endpoint, reconnect_limit_s=0.2) as client:
            stream = await client.submit([1], SAMPLING)
            rig.scheduler.never_answers = True
            call = asyncio.create_task(client.abort([stream.request_id]))
            await until_unanswered(rig)
            await asyncio.to_thread(trio.from_thread.run, rig.kill, trio_token=token)
            with pytest.raises(Unavailable, match="whether the command was carried out is unknown"):
                await call
            with pytest.raises(Unavailable, match="no coordinator listens"):
                await anext(stream)
            await client.lost()

    token = trio.lowlevel.current_trio_token()
    await under_asyncio(program)
