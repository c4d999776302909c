"""Random bytes and mutated messages against a real gateway and real worker links, over real ipc sockets.

After every hostile peer the process must still serve, and a request that is not that peer's must have its stream
unchanged: every position once, in order, with the tokens that its worker reported (I5).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import example, given, settings

from hisparse.client.client import open_client
from protocol import messages
from protocol.arrays import pack_int32
from protocol.messages import PROTOCOL_VERSION, Sampling
from protocol.transport.dealer import DealerSocket
from tests.coordinator.workers.test_worker_link import Rig as LinkRig
from tests.coordinator.workers.test_worker_link import running as running_links
from tests.coordinator.workers.test_worker_link import tokens_of
from tests.support.fakes.worker import hello
from tests.support.gateway_rig import GatewayRig, running
from tests.support.hostile import ADMIN_SEEDS, CLIENT_SEEDS, WORKER_SEEDS, harmless, hostile_frames
from tests.support.limits import HANG_LIMIT_S
from tests.support.progress import RequestEntry, progress

pytestmark = pytest.mark.fuzz

FUZZ = settings(max_examples=120)


async def attack(endpoint: str, frames: list[bytes], hello: messages.Message | None = None) -> None:
    """Send `frames` over one connection, after having been let in with `hello` if there is one."""
    dealer = await DealerSocket.connect(endpoint, message_bytes_max=1 << 30)
    if hello is not None:
        await dealer.send(messages.encode(hello))
        await dealer.recv_batch()
    for frame in frames:
        await dealer.send(frame)
    dealer.close()


async def against_gateway(directory: Path, role: str, frames: list[bytes]) -> None:
    async with running(GatewayRig(directory)) as rig, open_client(rig.client_socket.endpoint) as client:
        victim = await client.submit([1, 2, 3], Sampling(max_tokens=1000), request_id="victim")
        rig.speak("victim", [0, 1])
        assert list(await anext(victim)) == [0, 1]
        socket = rig.client_socket if role == "client" else rig.admin_socket
        await attack(socket.endpoint, frames)
        await attack(socket.endpoint, frames, messages.Hello(PROTOCOL_VERSION, role, "fuzz"))
        rig.speak("victim", [2, 3, 4])
        assert list(await anext(victim)) == [2, 3, 4]
        assert (await client.pools())[0].node == "n"
        rig.scheduler.finish("victim")
        assert list(await victim.collect()) == []
        assert victim.ended is not None


async def against_links(directory: Path, frames: list[bytes]) -> None:
    async with running_links(LinkRig(directory)) as rig:
        victim = await rig.joined("victim")
        request_index = rig.admitted("victim", placement=1)
        await victim.hear()
        await victim.report(progress(RequestEntry(request_index, 1, 0, [0, 1])))
        await victim.hear()
        await attack(rig.socket.endpoint, frames)
        await attack(rig.socket.endpoint, frames, hello("fuzz", epoch=1))
        await victim.report(progress(RequestEntry(request_index, 1, 2, [2])), [messages.Finished(1, "eos", 3)])
        assert await victim.hear() == messages.ReportAck(10, 2)
        assert tokens_of(rig, request_index) == [0, 1, 2]
        assert rig.scheduler.told.count(("victim", 1, messages.Finished(1, "eos", 3))) == 1
        assert not [told for told in rig.scheduler.told if told[:2] == ("down", "victim")]
        rig.log.check_invariants()
        victim.close()


def run(step: object, *arguments: object) -> None:
    """One example: a fresh rig, gone when it returns."""

    async def limited() -> None:
        assert callable(step)
        with tempfile.TemporaryDirectory() as directory, trio.fail_after(HANG_LIMIT_S):
            await step(Path(directory), *arguments)

    trio.run(limited)


@FUZZ
@given(hostile_frames(CLIENT_SEEDS))
def test_hostile_clients(frames: list[bytes]) -> None:
    run(against_gateway, "client", frames)


@FUZZ
@given(hostile_frames(ADMIN_SEEDS))
@example([messages.encode(messages.Submit(1, pack_int32([1]), Sampling(0, logprobs=1 << 62), "fuzz"))])
def test_hostile_admins(frames: list[bytes]) -> None:
    """An operator may stop others' requests by right; here the commands are recorded, and nothing else may happen."""
    run(against_gateway, "admin", frames)


@FUZZ
@given(hostile_frames(WORKER_SEEDS))
def test_hostile_workers(frames: list[bytes]) -> None:
    run(against_links, harmless(frames))
