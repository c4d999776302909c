"""Names, groups, roles and GPUs of the workers of `hisparse up`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hisparse.cluster.placement import Weights, choose_group_size, place
from protocol.config import HostFacts, build, to_environ
from protocol.errors import ConfigError
from protocol.settings import WorkerSettings
from protocol.units import BLOCK_TOKENS_MAX
from worker.keeper.messages import GPU_SEGMENT_BYTES
from worker.weights.shares import rank_bytes
from worker.weights.synth import published_config

GPU = WorkerSettings(device="cuda", device_mem="auto")


def placed(workers: int, settings: WorkerSettings = GPU, **options: Any) -> tuple[WorkerSettings, ...]:
    return place(settings, workers, **{"experts": 256} | options)


def test_workers_without_groups_are_numbered() -> None:
    settings = WorkerSettings(metrics_port=9400, role="decode")
    found = placed(3, settings, roles=("prefill", "decode", "both"))
    assert [(it.name, it.metrics_port, it.role) for it in found] == [
        ("w0", 9400, "prefill"),
        ("w1", 9401, "decode"),
        ("w2", 9402, "both"),
    ]
    assert {(it.group, it.group_size, it.device) for it in found} == {("", 1, "cpu")}


def test_ranks_of_a_group_are_neighbours_with_one_role_and_a_gpu_each() -> None:
    found = placed(4, group_size=2, roles=("prefill", "decode"), gpus=8)
    assert [(it.name, it.group, it.group_rank, it.group_size, it.role, it.device) for it in found] == [
        ("w0", "g0", 0, 2, "prefill", "cuda:0"),
        ("w1", "g0", 1, 2, "prefill", "cuda:1"),
        ("w2", "g1", 0, 2, "decode", "cuda:2"),
        ("w3", "g1", 1, 2, "decode", "cuda:3"),
    ]


@pytest.mark.parametrize(
    ("asked", "device", "standbys"), [("auto", "cuda", 1), ("auto", "cpu", 0), (0, "cuda", 0), (1, "cpu", 1)]
)
def test_a_worker_has_a_standby_on_a_gpu_or_if_asked_for(asked: Any, device: str, standbys: int) -> None:
    settings = WorkerSettings(device=device, standby=asked)
    assert [it.standby for it in placed(2, settings)] == [standbys] * 2


def test_ranks_have_standbys_if_asked_for() -> None:
    for asked, standbys in (("auto", 0), (1, 1)):
        ranks = placed(2, msgspec.structs.replace(GPU, standby=asked), group_size=2, gpus=2)
        assert [it.standby for it in ranks] == [standbys] * 2


def test_a_worker_reads_the_same_settings_from_its_environment() -> None:
    config = build({}, {}, {"cluster.runtime_dir": "/run/h"}, HostFacts("h", 1, 1))
    (_, rank) = place(config.worker, 2, group_size=2, experts=4)
    environ = to_environ(msgspec.structs.replace(config, worker=rank))
    found = build({}, environ, {}, HostFacts("h", 2, 1)).worker
    assert found == msgspec.structs.replace(rank, group_endpoint="ipc:///run/h/group-g0.sock")


def test_one_gpu_may_be_named_for_all_workers() -> None:
    assert {it.device for it in placed(2, msgspec.structs.replace(GPU, device="cuda:1"), gpus=1)} == {"cuda:1"}
    assert {it.device for it in placed(2)} == {"cuda"}, "where their number is not known"


@pytest.mark.parametrize(
    ("workers", "settings", "options", "field", "text"),
    [
        (4, {}, {"group_size": 3}, "group-size", "use one of 1, 2, 4, or another number of workers"),
        (2, {}, {"group_size": 4}, "group-size", "use one of 1, 2, or another"),
        (6, {}, {"group_size": 3}, "worker.group_size", "use one of 1, 2, 4, 8"),
        (4, {}, {"group_size": 2, "roles": ("both",) * 3}, "roles", "3 for 2 groups"),
        (3, {}, {"roles": ("prefill", "decode")}, "roles", "2 for 3 workers"),
        (1, {}, {"roles": ("prefill",)}, "roles", "none of the workers decodes"),
        (2, {"role": "prefill"}, {}, "roles", "give one of them the role decode or both"),
        (4, {}, {"group_size": 2, "roles": ("decode",) * 2}, "roles", "none of the groups computes prompts"),
        (2, {}, {"gpus": 1}, "worker.device", "start at most 1, or name one GPU for all of them"),
        (2, {"device": "cuda:0"}, {"group_size": 2}, "worker.device", "set it to cuda"),
        (2, {"group": "mine"}, {}, "worker.group", "pass --group-size"),
        (2, {"group_size": 2}, {}, "worker.group", "pass --group-size"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    workers: int, settings: dict[str, Any], options: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(workers, msgspec.structs.replace(GPU, **settings), **options)
    assert refused.value.field == field
    assert text in str(refused.value)


# ---------------------------------------------------------------- the size of a group

DEEPSEEK = Weights(published_config("deepseek-v3.2"), "bfloat16", (128, 128))
H200 = 141_000_000_000


def test_a_group_is_as_small_as_the_gpus_permit() -> None:
    assert choose_group_size(GPU, 8, [H200] * 8, DEEPSEEK) == 8
    assert choose_group_size(GPU, 16, [H200] * 16, DEEPSEEK) == 8
    assert choose_group_size(GPU, 8, [10 * H200] * 8, DEEPSEEK) == 1
    assert choose_group_size(GPU, 8, [2 * H200] * 8, DEEPSEEK) == 4
    assert choose_group_size(GPU, 8, [2 * H200] * 7 + [H200], DEEPSEEK) == 8, "the smallest GPU decides"


def test_memory_for_kv_counts_where_it_is_set() -> None:
    held = rank_bytes(*DEEPSEEK, 4, BLOCK_TOKENS_MAX, pass_tokens=GPU.pass_tokens).total
    gpus = [held + 20_000_000_000] * 8
    assert choose_group_size(msgspec.structs.replace(GPU, device_mem="19GB"), 8, gpus, DEEPSEEK) == 4
    assert choose_group_size(msgspec.structs.replace(GPU, device_mem="21GB"), 8, gpus, DEEPSEEK) == 8


def test_the_last_piece_of_a_keeper_is_counted() -> None:
    """A keeper takes memory in whole pieces."""
    held = rank_bytes(*DEEPSEEK, 4, BLOCK_TOKENS_MAX, pass_tokens=GPU.pass_tokens).total
    gpus = [held + GPU_SEGMENT_BYTES] * 8
    assert choose_group_size(GPU, 8, gpus, DEEPSEEK) == 8
    assert choose_group_size(msgspec.structs.replace(GPU, keeper=False), 8, gpus, DEEPSEEK) == 4
    with pytest.raises(ConfigError, match=r"and the last piece of their keeper 0\.1 GB of"):
        choose_group_size(GPU, 4, [held + GPU_SEGMENT_BYTES] * 4, DEEPSEEK)


def test_drafts_take_memory_for_the_draft_layer() -> None:
    gpus = [rank_bytes(*DEEPSEEK, 4, BLOCK_TOKENS_MAX, pass_tokens=GPU.pass_tokens).total + 2_000_000_000] * 8
    assert choose_group_size(GPU, 8, gpus, DEEPSEEK) == 4
    assert choose_group_size(msgspec.structs.replace(GPU, draft_tokens=1), 8, gpus, DEEPSEEK) == 8


def test_too_few_gpus_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as refused:
        choose_group_size(GPU, 4, [H200] * 4, DEEPSEEK)
    assert (refused.value.field, refused.value.value) == ("group-size", "4")
    assert "the weights take 184.5 GB" in refused.value.message
    assert (
        "and the exchange 0.8 GB and prompt passes 3.2 GB and the last piece of their keeper 0.1 GB of 141.0 GB"
        in refused.value.message
    )
    assert "start 8 workers, which fit as one group" in refused.value.remedy


def test_a_model_that_no_group_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a checkpoint in FP8") as refused:
        choose_group_size(GPU, 2, [10_000_000_000] * 2, DEEPSEEK)
    assert "start" not in refused.value.remedy
