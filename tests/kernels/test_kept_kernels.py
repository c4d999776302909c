"""Compiled kernels kept between runs (tests.support.kept_kernels): under which key, and within which bounds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from kernels.cuda import jit
from tests.emulated import device
from tests.support import kept_kernels
from tests.support.kept_kernels import KEPT_BYTES, KEPT_DAYS, folder, kept, prune, sources_key, unit_key

#: Of what hangs.
LIMIT_S: Final = 60.0


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_kernels, "folder", folder.__wrapped__)
    return tmp_path / "hisparse-tests"


@pytest.fixture
def built(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands of the C++ compiler that have run, on a unit of one line."""
    ran: list[str] = []
    build = device.build

    def count(unit: str, sources: dict[str, str], flags: list[str]) -> jit.Compiled:
        ran.append(" ".join(flags))
        return build(unit, {"unit.cpp": f"// {len(sources)}\n"}, flags)

    monkeypatch.setattr(device, "build", count)
    monkeypatch.setattr(device, "library", device.library.__wrapped__)
    return ran


def change_a_header(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """One more declaration in a header that all units include."""
    directory.mkdir()
    for path in jit.SOURCE_DIR.glob("*.cuh"):
        (directory / path.name).write_bytes(path.read_bytes() + b"struct More;\n" * (path.name == "layout.cuh"))
    monkeypatch.setattr(jit, "SOURCE_DIR", directory)
    monkeypatch.setattr(device, "SOURCE_DIR", directory)


def change_own_header(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    directory.mkdir()
    for name in ("cuda.hpp", "ptx.cuh"):
        (directory / name).write_text((device.HERE / name).read_text() + "struct More;\n" * (name == "cuda.hpp"))
    monkeypatch.setattr(device, "HERE", directory)


def change_flags(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(device, "FLAGS", (*device.FLAGS, "-g"))


def change_compiler(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(device, "compiler_version", lambda: "another")


@pytest.mark.skipif(device.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("change", [change_a_header, change_own_header, change_flags, change_compiler])
def test_emulated_kernel_is_built_anew_when_an_input_changes(
    change: Callable[[pytest.MonkeyPatch, Path], None],
    built: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device.library("seat", ())
    device.library("seat", ())
    assert len(built) == 1
    change(monkeypatch, tmp_path / "changed")
    device.library("seat", ())
    device.library("seat", ())
    assert len(built) == 2


@pytest.mark.skipif(device.COMPILER is None, reason="needs g++")
def test_emulated_kernels_of_other_units_defines_and_edits_are_others(built: list[str]) -> None:
    device.library("seat", ())
    device.library("rows", ())
    device.library("rows", (("INDEX_ROW_BYTES", 1),))
    device.library("swap_in", ())
    device.library("swap_in", (), (("    open_gate(&s.chosen);", "    "),))
    assert len(built) == 5


def test_key_holds_when_comments_change_or_defines_that_no_code_names() -> None:
    code = '#include "a.cuh"\n  int a = SIZE;  // SHAPE\n/* of two\nlines */\n\nconst char* b = "/* // " ;\n'
    bare = '#include "a.cuh"\n  int a = SIZE;\nconst char* b = "/* // " ;\n'
    key = sources_key({"unit": code}, (("SIZE", 1), ("SHAPE", 2)))
    assert key == sources_key({"unit": code + "// more\n"}, (("SIZE", 1), ("SHAPE", 3)))
    assert [line.split() for line in key[-1].splitlines() if line.strip()] == [it.split() for it in bare.splitlines()]
    assert key != sources_key({"unit": code}, (("SIZE", 2),))
    assert key != sources_key({"unit": code.replace("int a", "int c")}, (("SIZE", 1),))
    assert key != sources_key({"unit": code.replace('"/* // "', '"/* /* "')}, (("SIZE", 1),))


def test_unit_has_another_key_when_a_header_or_its_compilation_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the nvrtc wheel: pip install 'hisparse[cuda]'")
    keys = [unit_key("seat", (), "sm_90"), unit_key("seat", (), "sm_90")]
    change_a_header(monkeypatch, tmp_path / "changed")
    keys.append(unit_key("seat", (), "sm_90"))
    (tmp_path / "jit.py").write_text("# another way to compile\n")
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    keys.append(unit_key("seat", (), "sm_90"))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_one_of_those_that_ask_at_once_compiles(own_folder: Path) -> None:
    both = threading.Barrier(2)
    compiled: list[int] = []

    def compile_it() -> jit.Compiled:
        compiled.append(1)
        return jit.Compiled(b"code", ())

    def ask() -> None:
        both.wait()
        assert kept("unit", "key", compile_it).cubin == b"code"

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [1]
    assert sorted(path.suffix for path in own_folder.iterdir()) == ["", ".lock"]


def test_kernels_of_one_unit_are_compiled_side_by_side(own_folder: Path) -> None:
    """Each of two compilations ends once the other has begun."""
    both = threading.Barrier(2, timeout=LIMIT_S)

    def compile_it() -> jit.Compiled:
        both.wait()
        return jit.Compiled(b"code", ())

    threads = [threading.Thread(target=kept, args=("unit", key, compile_it)) for key in ("a key", "another")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in own_folder.iterdir() if not path.suffix) == ["unit-a key", "unit-another"]


def test_broken_file_is_compiled_anew(own_folder: Path) -> None:
    ask = partial(kept, "unit", "key", lambda: jit.Compiled(b"code", ()))
    ask()
    (own_folder / "unit-key").write_bytes(b"half")
    assert ask().cubin == b"code"


def test_old_files_and_the_oldest_of_too_many_are_removed(tmp_path: Path) -> None:
    day_s = 86_400.0
    now = (KEPT_DAYS + 1) * day_s
    for name, age_days, size in [
        ("old", KEPT_DAYS + 0.5, 1),
        ("beyond", 3, KEPT_BYTES // 2),
        ("second", 2, KEPT_BYTES // 2),
        ("first", 1, KEPT_BYTES // 2),
    ]:
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
        os.utime(tmp_path / name, (now - age_days * day_s,) * 2)
    (tmp_path / "mypy").mkdir()
    os.utime(tmp_path / "mypy", (0.0, 0.0))
    prune(tmp_path, now)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "mypy", "second"]
