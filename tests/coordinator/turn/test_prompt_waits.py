"""Progress of a prompt on a worker, and prompts that come first: one text, in rows of requests."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from coordinator.turn.request_table import PromptWaits
from protocol import messages
from protocol.arrays import pack_int32
from tests.support.fakes.fake_cluster import FakeCluster
from tests.support.scheduler_rig import open_rig


def admitted(*prompts: int) -> FakeCluster:
    """Slots 0, 1, … were admitted by w0, which has computed nothing."""
    fake = FakeCluster(1, ("n0",), 256)
    fake.add_worker("w0", "n0", seats=8, hot_chunks=256, index_pages=256, prompt_max_tokens=16_384)
    for request_index, prompt in enumerate(prompts):
        fake.submit(request_index, prompt, 10)
    fake.settle()
    return fake


def texts(fake: FakeCluster, count: int, durable: dict[int, int]) -> list[str]:
    waits = PromptWaits(fake.dispatch.placement_table, lambda request_index: durable.get(request_index, 0))
    return [waits.explain(fake.entry(request_index)) for request_index in range(count)]


def test_prompt_alone_says_how_much_is_computed() -> None:
    fake = admitted(1_000)
    assert texts(fake, 1, {}) == ["prompt: 0 of 1000 tokens computed on w0"]
    assert texts(fake, 1, {0: 640}) == ["prompt: 640 of 1000 tokens computed on w0"]


def test_prompts_under_way_and_shorter_ones_come_first() -> None:
    fake = admitted(4_000, 300, 2_000, 300)
    assert texts(fake, 4, {0: 1_024}) == [
        "prompt: 1024 of 4000 tokens computed on w0",
        "prompt: 300 tokens wait behind 1 prompt of 2976 tokens on w0",
        "prompt: 2000 tokens wait behind 3 prompts of 3576 tokens on w0",
        "prompt: 300 tokens wait behind 2 prompts of 3276 tokens on w0",
    ]


def test_reused_tokens_are_no_pass_of_the_prompt() -> None:
    """A prompt behind cached pages waits as any other, and has fewer tokens left."""
    fake = admitted(1_000, 500)
    fake.entry(0).shared_pages = 10
    assert texts(fake, 2, {0: 640}) == [
        "prompt: 640 of 1000 tokens computed on w0",
        "prompt: 500 tokens wait behind 1 prompt of 360 tokens on w0",
    ]


def test_nothing_is_said_of_prompts_elsewhere_or_staged() -> None:
    fake = FakeCluster(1, ("n0",), 256)
    for name in ("w0", "w1"):
        fake.add_worker(name, "n0", seats=1, hot_chunks=64, index_pages=64, prompt_max_tokens=4_096)
    for request_index in range(3):
        fake.submit(request_index, 100, 1_000)
    fake.settle()
    on = [fake.entry(request_index).worker for request_index in range(3)]
    assert sorted(on) == ["", "w0", "w1"]
    said = texts(fake, 3, {})
    assert [text.rpartition(" ")[2] for text in said] == on, "each is alone on its worker, and one waits for a seat"
    for _ in range(4):
        fake.round()
    assert texts(fake, 2, {}) == ["", ""]


async def test_row_of_a_prompt_says_how_far_it_is(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        await rig.submit("r", prompt=100)
        await rig.run_until("r", "PREFILLING")
        row, history = rig.scheduler.describe("r")
        assert (row.reason, row.waits_for) == ("prompt: 0 of 100 tokens computed on w0", "")
        assert rig.scheduler.request_rows(10)[0].reason == row.reason
        assert history[-1].reason.startswith("on w0, "), "the history keeps what admission said"
        await rig.run_until("r", "RUNNING")
        assert "prompt" not in rig.scheduler.describe("r")[0].reason


@pytest.mark.parametrize(("user", "tenant", "owner"), [("", "", ""), ("ann", "", "ann"), ("front", "a/b", "front/a/b")])
async def test_worker_hears_whose_prompt_it_is(autojump_clock: MockClock, user: str, tenant: str, owner: str) -> None:
    async with open_rig() as rig:
        link = await rig.add_worker("w0")
        submit = messages.Submit(1, pack_int32([1, 2, 3]), messages.Sampling(max_tokens=5), "r", tenant=tenant)
        await rig.scheduler.submit(submit, "test", user)
        await trio.testing.wait_all_tasks_blocked()
        (command,) = [command for command in link.downlink if isinstance(command, messages.Admit)]
        assert command.owner == owner
