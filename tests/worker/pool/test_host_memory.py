"""How large the host pool may be: cgroup limits decide, MemAvailable advises, the file system has the last word."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.logs import LogfmtFormatter
from protocol.settings import WorkerSettings
from worker.pool.host_memory import Room, memory_room, resolve_host_mem

MEMINFO = "MemTotal: 8192 kB\nMemAvailable:    4096 kB\n"
PLENTY = Room(1 << 50, "a disk", firm=True)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    return tmp_path / "proc"


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


def test_tightest_cgroup_limits_memory(proc: Path, tmp_path: Path) -> None:
    """MemTotal may be small and grow: a limit beyond it is believed."""
    (proc / "self" / "cgroup").write_text("0::/job/task\n")
    root = tmp_path / "cgroup"
    group(root / "job" / "task", memory__max="max", memory__current="1")
    group(root / "job", memory__max="1073741824", memory__current="4096", memory__stat="anon 1\ninactive_file 1096")
    room = memory_room(proc, root)
    assert (room.free_bytes, room.firm) == (1073741824 - 3000, True)
    assert str(root / "job") in room.arithmetic


def test_cgroup_v1_is_read(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("4:memory:/box\n3:cpu:/box\n0::/\n")
    group(
        tmp_path / "cgroup" / "memory" / "box",
        memory__limit_in_bytes="1000000",
        memory__usage_in_bytes="600000",
        memory__stat="total_inactive_file 100000",
    )
    group(
        tmp_path / "cgroup" / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="7000000"
    )
    assert memory_room(proc, tmp_path / "cgroup").free_bytes == 500_000


def test_meminfo_advises_without_a_limit(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/\n")
    room = memory_room(proc, tmp_path / "none")
    assert (room.free_bytes, room.firm) == (4096 << 10, False)


def test_auto_leaves_a_quarter_and_fits_the_file_system() -> None:
    memory, settings = Room(4 << 30, "a limit", firm=True), WorkerSettings(host_mem="auto")
    assert resolve_host_mem(settings, memory, PLENTY) == 3 << 30
    assert resolve_host_mem(settings, memory, Room(1 << 30, "a tmpfs", firm=True)) == 1 << 30


@pytest.mark.parametrize("firm_is_memory", [True, False])
def test_oversized_pool_is_refused_with_arithmetic(firm_is_memory: bool) -> None:
    tight = Room(1 << 30, "the limit of /job is 3072 MiB, 2048 MiB of it in use", firm=True)
    rooms = (tight, PLENTY) if firm_is_memory else (PLENTY, tight)
    settings = WorkerSettings(host_mem="2GiB")
    with pytest.raises(ConfigError, match=r"host_mem=2GiB.*take 2048 MiB, the limit .* 2048 MiB .*set it to 1024MiB"):
        resolve_host_mem(settings, *rooms)
    assert resolve_host_mem(settings, *rooms, have_bytes=1 << 30) == 2 << 30  # it is there already, by half


def test_explicit_size_beyond_meminfo_only_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hisparse"), "propagate", True)
    advice = Room(1 << 30, "MemAvailable 1024 MiB of MemTotal 2048 MiB", firm=False)
    assert resolve_host_mem(WorkerSettings(host_mem="2GiB"), advice, PLENTY) == 2 << 30
    (record,) = caplog.records
    assert 'host_mem=2GiB reason="the host pool would take 2048 MiB, MemAvailable 1024 MiB' in (
        LogfmtFormatter({}).format(record)
    )
