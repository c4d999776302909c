"""A prompt computed on one node and decoded on another: two executors over two host pools, pages sent in between.

The first executor sends by itself, in layer groups, while it computes. Small tests have 1 to 3 groups of 3 layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.state import DeviceState
from protocol.messages import NO_HOT_BUFFER, Admit, Command, Staged
from protocol.sizing import RESIDENT
from protocol.units import pages_for
from tests.support.fakes.coordinator import Life
from tests.support.fakes.hash_runner import FakeRunner
from tests.support.fakes.pace import EvenPace
from tests.support.fakes.page_copier import FakePageCopier
from tests.support.limits import HANG_LIMIT_S
from tests.support.transfer_rig import MODEL, arrivals, make_pool, wait_for
from tests.support.worker_rig import SETTINGS, Rig
from tests.worker.transfer.test_engines import why_absent
from worker.device.sizing import size_worker
from worker.loop.swap import Swap
from worker.runners.base import PromptPass, UnitWritten, no_listener
from worker.streams import Fence, Order, Streams, make_streams
from worker.transfer import Layout, open_receiver, open_sender
from worker.transfer.handover import Outgoing
from worker.transfer.layer_groups import LayerGroups
from worker.transfer.transfers import Transfers

pytestmark = pytest.mark.pd

#: worker.layer_group of 1, 2 and 3 groups in pages of 4 KiB.
GROUPS = {"0": 1, "2KiB": 2, "1KiB": 3}
#: Of one token, of whole pages, and one beside them; chunks have 32 tokens.
PROMPTS = (1, 63, 64, 65, 190, 320)
MUTANT_SEEDS = range(60)


class Pair:
    """What a coordinator of both nodes does for one request after the other, without one. Pages go to the highest free
    ones of the second pool."""

    def __init__(self, streams: Streams, group_bytes: str = "1KiB", *, runner: FakeRunner | None = None) -> None:
        settings = msgspec.structs.replace(SETTINGS, layer_group=group_bytes)
        self.first = Rig(streams, settings, runner=runner, host=self.host(0))
        self.second = Rig(make_streams("simulated", 1), settings, host=self.host(1))
        self.first.coordinator.submit = self._submit
        self.transfer_id, self.destination, self.targets = 0, b"", [0]

    def host(self, node: int) -> torch.Tensor:
        geometry = FakeRunner().geometry
        pages = size_worker(SETTINGS, geometry, FakeRunner().info).capacity.host_pages
        return torch.zeros(pages, geometry.page_bytes, dtype=torch.uint8)

    def _submit(self, command: Command) -> None:
        if isinstance(command, Admit):
            self.transfer_id += 1
            command = msgspec.structs.replace(command, transfer_id=self.transfer_id, destination=self.destination)
        self.first.executor.submit(command)

    def admit(self, prompt_tokens: int, max_tokens: int) -> Life:
        """To the first node, for its prompt alone."""
        life = self.first.coordinator.create(len(self.first.coordinator.lives) + 1, prompt_tokens, max_tokens)
        free = self.second.coordinator.host_pages
        self.targets = [free.pop() for _ in range(pages_for(prompt_tokens))]
        assert self.first.coordinator.admit(life, NO_HOT_BUFFER)
        return life

    def decode(self, life: Life, hot_slots: int) -> None:
        """Give its pages of the first node back, and go on with those of the second."""
        self.first.coordinator.host_pages += life.host_pages
        self.second.coordinator.host_pages.extend(reversed(self.targets))
        life.host_pages = self.targets
        self.second.coordinator.adopt(self.first.coordinator)
        assert self.second.coordinator.admit(life, hot_slots)
        self.second.run()
        self.second.check()


# ---------------------------------------------------------------- by the engines


class TwoNodes(Pair):
    """With ends of page transfer between pools that are files."""

    def __init__(self, engine: str, folder: Path, group_bytes: str) -> None:
        geometry = FakeRunner().geometry
        pages = size_worker(SETTINGS, geometry, FakeRunner().info).capacity.host_pages
        self.pools = [make_pool(folder / f"{name}.pool", geometry, pages) for name in ("p", "d")]
        super().__init__(make_streams("simulated", 0), group_bytes)
        layout = Layout.of(geometry, MODEL)
        self.receiver = open_receiver(engine, self.pools[1], layout, name="decode-0/1", address="tcp://127.0.0.1:0")
        self.first.executor.transfers = Transfers(open_sender(self.pools[0], layout, name="prefill-0/1"))
        self.destination = self.receiver.describe()

    def host(self, node: int) -> torch.Tensor:
        return torch.from_numpy(self.pools[node].pages)

    def prefill(self, prompt_tokens: int, max_tokens: int) -> Life:
        """Until every page has arrived."""
        life = self.admit(prompt_tokens, max_tokens)
        self.receiver.open(self.transfer_id, self.targets)
        give_up_at = time.monotonic() + HANG_LIMIT_S
        while not self.first.executor.idle:
            assert time.monotonic() < give_up_at
            if not self.first.executor.turn():
                time.sleep(0.001)
        wait_for(self.receiver.poll, lambda events: len(arrivals(events)) == len(self.targets))
        return life

    def close(self) -> None:
        self.first.executor.transfers.close()
        self.receiver.close()


@pytest.fixture
def nodes(engine: str, group_bytes: str, tmp_path: Path) -> Iterator[TwoNodes]:
    if engine != "shared" and (reason := why_absent(engine)):
        pytest.skip(reason)
    two = TwoNodes(engine, tmp_path, group_bytes)
    yield two
    two.close()


@pytest.mark.parametrize(
    ("engine", "group_bytes"), [*(("shared", size) for size in GROUPS), ("nixl", "1KiB"), ("mooncake", "1KiB")]
)
def test_two_nodes_prefill_and_decode_with_the_oracle_tokens(nodes: TwoNodes, group_bytes: str) -> None:
    """The oracle's tokens, whatever part of its last page a prompt fills; and not a byte is staged where it decodes."""
    assert LayerGroups.of(nodes.first.runner.geometry, int(group_bytes[0]) * 1024).count == GROUPS[group_bytes]
    for prompt in PROMPTS:
        for hot_slots in (RESIDENT, 64):
            life = nodes.prefill(prompt, 24)
            nodes.decode(life, hot_slots)
            assert life.outcome == "length"
            assert not nodes.second.wrong(), (prompt, hot_slots)
    assert nodes.second.executor.counters.staged_bytes == 0
    assert nodes.first.executor.counters.steps == 0


@pytest.mark.mutation
@pytest.mark.parametrize(("engine", "group_bytes"), [("shared", "1KiB")])
def test_unsent_pages_are_caught(nodes: TwoNodes) -> None:
    life = nodes.prefill(190, 70)
    nodes.targets = [7, 8, 9]
    nodes.decode(life, RESIDENT)
    assert nodes.second.wrong() == [life.number]


# ---------------------------------------------------------------- by a copier that never waits


def handed_over(
    seed: int,
    *,
    order: Order = "seeded",
    omit: tuple[str, ...] = (),
    groups: str = "1KiB",
    runner: FakeRunner | None = None,
) -> tuple[Pair, list[list[tuple[int, int]]]]:
    """Prompts one after another through the first node, each part copied the moment it is let go, and decoded; and the
    parts of each in the order in which they went."""
    pair = Pair(make_streams("simulated", seed, order, omit), groups, runner=runner)
    copier = FakePageCopier(pair.first.host.numpy(), pair.second.host.numpy(), pair.targets)
    pair.first.executor.transfers = Transfers(copier)  # type: ignore[arg-type]
    went = []
    for prompt in (65, 128, 190):
        life = pair.admit(prompt, 12)
        copier.targets = pair.targets
        pair.first.run()
        went.append(copier.sent)
        pair.decode(life, 64)
    return pair, went


@pytest.mark.parametrize("groups", GROUPS)
def test_parts_are_sent_once_in_any_fence_order(groups: str) -> None:
    for seed in range(5):
        pair, went = handed_over(seed, groups=groups)
        assert not pair.second.wrong(), seed
        for prompt, parts in zip((65, 128, 190), went, strict=True):
            every = [(index, part) for index in range(pages_for(prompt)) for part in range(GROUPS[groups])]
            assert sorted(parts) == every, seed


@pytest.mark.parametrize("parts", [1, 4, 7])
def test_failed_partial_transfer_leaves_and_begins_anew(parts: int) -> None:
    """None of its rows counts, whatever has arrived of them; what it held is free."""
    pair = Pair(make_streams("simulated", parts))
    copier = FakePageCopier(pair.first.host.numpy(), pair.second.host.numpy(), pair.targets)
    pair.first.executor.transfers = Transfers(copier)  # type: ignore[arg-type]
    life = pair.admit(130, 12)
    copier.targets, copier.parts_until_failure = pair.targets, parts
    pair.first.run_until(lambda: any(isinstance(event, Staged) for event in pair.first.coordinator.events))
    life.staged = False  # rows here count for nothing by themselves
    pair.first.run()
    assert len(copier.sent) == parts
    assert (life.durable, life.host_pages, life.placement) == (0, [], 0)
    copier.parts_until_failure = 0
    assert pair.first.coordinator.admit(life, NO_HOT_BUFFER)
    pair.first.run()
    pair.decode(life, 64)
    assert not pair.second.wrong()


def test_parts_are_sent_while_later_layers_are_computed() -> None:
    """Without delays, each group goes before the next one's layers were launched, where a turn launches one layer."""
    launched: list[str] = []

    class Noted(FakeRunner):
        def _attend_prompts(self, *arguments: Any) -> None:
            launched.append("layer")
            super()._attend_prompts(*arguments)

    pair = Pair(make_streams("inline"), runner=Noted())
    copier = FakePageCopier(pair.first.host.numpy(), pair.second.host.numpy(), pair.targets)
    pair.first.executor.transfers = Transfers(copier)  # type: ignore[arg-type]
    send = copier.send

    def note(transfer_id: int, index: int, page: int, part: int = 0) -> None:
        launched.append(f"part {part}")
        send(transfer_id, index, page, part)

    copier.send = note  # type: ignore[method-assign]
    executor = pair.first.executor
    executor._pace = executor._prompts._pace = EvenPace(64)
    pair.admit(30, 4)
    pair.first.run()
    assert launched == ["layer", "part 0", "layer", "part 1", "layer", "part 2"]


class HastyRunner(FakeRunner):
    """Says that a block is written before that was launched."""

    def launch_unit(
        self,
        streams: Streams,
        state: DeviceState,
        prompts: PromptPass,
        layer: int,
        first: int,
        stop: int,
        written: UnitWritten = no_listener,
        rows: int = 0,
    ) -> None:
        written()
        super().launch_unit(streams, state, prompts, layer, first, stop, rows=rows)


def one_fence_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's `prefill_written` serves the others of the unit."""
    stage = Swap.stage

    def once(swap: Swap, *arguments: Any) -> Fence:
        layer: int = arguments[-1]
        with pytest.MonkeyPatch.context() as patch:
            if layer:
                patch.setattr(type(swap._streams.stage), "wait", lambda stream, fence: None)
            return stage(swap, *arguments)

    monkeypatch.setattr(Swap, "stage", once)


def whole_pages_with_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged of one group lets go of every part."""
    send = Transfers.send

    def hasty(transfers: Transfers, out: Outgoing, group: int, rows: int, host_pages: list[int]) -> None:
        for part in range(out.parts):
            send(transfers, out, part, rows, host_pages)

    monkeypatch.setattr(Transfers, "send", hasty)


def convicted(play: Callable[[int], Pair]) -> bool:
    return any(play(seed).second.wrong() for seed in MUTANT_SEEDS)


@pytest.mark.mutation
@pytest.mark.parametrize("fence", ["prefill_written", "staged"])
def test_omitted_fence_sends_stale_parts(fence: str) -> None:
    """SGLang #20343. In plain order the mutant passes; under some seed the other node decodes other tokens."""
    assert not handed_over(0, order="plain", omit=(fence,))[0].second.wrong()
    assert convicted(lambda seed: handed_over(seed, omit=(fence,))[0])


@pytest.mark.mutation
def test_each_group_needs_a_separate_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    one_fence_for_all_groups(monkeypatch)
    assert not handed_over(0, order="plain")[0].second.wrong()
    assert convicted(lambda seed: handed_over(seed)[0])


@pytest.mark.mutation
def test_runner_that_reports_a_layer_too_early_is_caught() -> None:
    assert convicted(lambda seed: handed_over(seed, runner=HastyRunner())[0])


@pytest.mark.mutation
def test_parts_sent_with_the_first_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_pages_with_the_first_part(monkeypatch)
    assert convicted(lambda seed: handed_over(seed)[0])
