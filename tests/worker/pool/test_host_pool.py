"""The host pool: created once, shared by processes, refused when it does not match."""

from __future__ import annotations

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.layout import Geometry
from protocol.config import pool_path
from protocol.errors import ConfigError
from tests import ROOT
from worker.pool.file import HEADER_BYTES
from worker.pool.host_pool import MappedPool

GEOMETRY = Geometry(layers=2, row_bytes=24, group_of_layer=(0, 1), index_row_bytes=8, topk=16)
PAGES = 5


def open_pool(path: Path, geometry: Geometry = GEOMETRY, pages: int = PAGES, model: str = "m") -> MappedPool:
    return MappedPool.open(path, geometry, pages, model)


def test_first_process_creates_and_second_sees_its_bytes(tmp_path: Path) -> None:
    """SGLang #23153: one pool per node, for all its processes."""
    path = pool_path(str(tmp_path / "new"), "node-a")
    first, second = open_pool(path), open_pool(path)
    assert (first.created, second.created) == (True, False)
    first.pages[3, 7] = 42
    assert second.pages[3, 7] == 42
    assert first.pages.shape == (PAGES, GEOMETRY.page_bytes)
    assert not first.pages[4].any()


def test_pool_file_is_private_and_holds_exactly_the_pages(tmp_path: Path) -> None:
    path = pool_path(str(tmp_path), "n")
    open_pool(path).close()
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == HEADER_BYTES + PAGES * GEOMETRY.page_bytes


@pytest.mark.process
def test_bytes_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    path = pool_path(str(tmp_path), "n")
    code = (
        "import os, sys; from pathlib import Path; from tests.worker.pool.test_host_pool import open_pool\n"
        "open_pool(Path(sys.argv[1])).pages[1, 2] = 99\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert killed.returncode == -9
    pool = open_pool(path)
    assert not pool.created
    assert pool.pages[1, 2] == 99


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"pages": 6}, [str(5 * GEOMETRY.page_bytes), str(6 * GEOMETRY.page_bytes)]),
        ({"geometry": replace(GEOMETRY, row_bytes=32)}, [str(GEOMETRY.page_bytes), "5120"]),
        ({"geometry": replace(GEOMETRY, topk=8)}, ["geometry and model"]),
        ({"geometry": replace(GEOMETRY, split=8)}, ["geometry and model"]),
        ({"model": "other"}, ["geometry and model"]),
    ],
)
def test_a_pool_of_another_shape_is_refused_with_both_values(
    tmp_path: Path, change: dict[str, object], names: list[str]
) -> None:
    path = pool_path(str(tmp_path), "n")
    pool = open_pool(path)
    pool.pages[0, 0] = 7
    with pytest.raises(ConfigError) as caught:
        open_pool(path, **change)  # type: ignore[arg-type]
    for name in names:
        assert name in str(caught.value)
    assert open_pool(path).pages[0, 0] == 7


def test_a_half_created_pool_is_created_anew(tmp_path: Path) -> None:
    path = pool_path(str(tmp_path), "n")
    path.write_bytes(bytes(HEADER_BYTES))
    assert open_pool(path).created


def test_an_unwritable_directory_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"worker\.pool_dir"):
        open_pool(tmp_path / "file" / "n.pool")


def test_unlinking_keeps_live_mappings(tmp_path: Path) -> None:
    path = pool_path(str(tmp_path), "n")
    pool = open_pool(path)
    pool.pages[0, 0] = 5
    path.unlink()
    assert pool.pages[0, 0] == 5
