"""A prompt computed on one node and decoded on another: two executors over two host pools, pages sent in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coordinator.messages import NO_HOT_BUFFER
from coordinator.scheduling.sizing import RESIDENT
from kernels.layout import pages_for
from tests.fakes.coordinator import Life
from tests.fakes.hash_runner import FakeRunner
from tests.test_transfer_engines import why_absent
from tests.transfer_rig import MODEL, arrivals, make_pool, wait_for
from tests.worker_rig import SETTINGS, Rig
from worker.sizing import size_worker
from worker.streams import make_streams
from worker.transfer import Layout, open_receiver, open_sender

pytestmark = pytest.mark.pd


class TwoNodes:
    """What a coordinator of both nodes does for one request after the other, without one."""

    def __init__(self, engine: str, folder: Path) -> None:
        runner = FakeRunner()
        capacity = size_worker(SETTINGS, runner.geometry, runner.info).capacity
        pools = [make_pool(folder / f"{name}.pool", runner.geometry, capacity.host_pages) for name in ("p", "d")]
        rigs = [
            Rig(make_streams("simulated", seed), host=torch.from_numpy(pool.pages)) for seed, pool in enumerate(pools)
        ]
        self.first, self.second = rigs
        layout = Layout.of(runner.geometry, MODEL)
        self.receiver = open_receiver(engine, pools[1], layout, name="decode-0/1", address="tcp://127.0.0.1:0")
        self.sender = open_sender(pools[0], layout, name="prefill-0/1")

    def prefill(self, prompt_tokens: int, max_tokens: int) -> Life:
        number = len(self.first.coordinator.lives) + 1
        life = self.first.coordinator.create(number, prompt_tokens, max_tokens)
        assert self.first.coordinator.admit(life, NO_HOT_BUFFER)
        self.first.run()
        return life

    def send(self, life: Life) -> None:
        """The prompt's pages, from where they were staged to the highest free ones of the other pool."""
        count = pages_for(len(life.prompt))
        free = self.second.coordinator.host_pages
        targets = [free.pop() for _ in range(count)]
        self.receiver.open(life.number, targets)
        self.sender.open(life.number, self.receiver.describe(), count)
        for index, page in enumerate(life.host_pages[:count]):
            self.sender.send(life.number, index, page)
        wait_for(self.receiver.poll, lambda events: len(arrivals(events)) == count)
        wait_for(self.sender.poll, lambda events: len(events) == count)
        free.extend(reversed(targets))
        self.first.coordinator.host_pages += life.host_pages
        life.host_pages = targets

    def decode(self, life: Life, hot_slots: int) -> None:
        self.second.coordinator.adopt(self.first.coordinator)
        assert self.second.coordinator.admit(life, hot_slots)
        self.second.run()
        self.second.check()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def nodes(engine: str, tmp_path: Path) -> Iterator[TwoNodes]:
    if engine != "shared" and (reason := why_absent(engine)):
        pytest.skip(reason)
    two = TwoNodes(engine, tmp_path)
    yield two
    two.close()


@pytest.mark.parametrize("engine", ["shared", "nixl", "mooncake"])
def test_what_one_node_prefills_another_decodes(nodes: TwoNodes) -> None:
    """The oracle's tokens, whatever part of its last page a prompt fills; and not a byte is staged where it decodes."""
    for prompt in (1, 63, 64, 65, 190, 320):
        for hot_slots in (RESIDENT, 64):
            life = nodes.prefill(prompt, 70)
            nodes.send(life)
            nodes.decode(life, hot_slots)
            assert life.outcome == "length"
            assert not nodes.second.wrong(), (prompt, hot_slots)
    assert nodes.second.executor.counters.staged_bytes == 0
    assert nodes.first.executor.counters.steps == 0


@pytest.mark.mutation
@pytest.mark.parametrize("engine", ["shared"])
def test_pages_that_are_not_sent_are_noticed(nodes: TwoNodes) -> None:
    life = nodes.prefill(190, 70)
    life.host_pages = [7, 8, 9]
    nodes.decode(life, RESIDENT)
    assert nodes.second.wrong() == [life.number]
