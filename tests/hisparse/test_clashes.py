"""Packages of other distributions that hide ours: each entry point says so in one line; nothing else is affected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hisparse.clashes import HEAD_BYTES, MARK, PACKAGES, NameClash, check_packages
from hisparse.cluster.children import child_environ
from hisparse.console.options import EXIT_CODES
from tests import ROOT

COMMAND = ("-m", "hisparse.cli", "--version")
IMPORT = ("-c", "import hisparse; print('imported')")


def python(
    *args: str, path: tuple[Path, ...] = (ROOT,), cwd: Path | None = None, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environ = environ or os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=False, env=environ, cwd=cwd or "/"
    )


def package(directory: Path, name: str, text: str = "") -> Path:
    (directory / name).mkdir(parents=True)
    (directory / name / "__init__.py").write_text(text)
    return directory / name


def assert_reported(done: subprocess.CompletedProcess[str], *said: object) -> None:
    assert done.returncode == EXIT_CODES["config"], done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("hisparse: "), line
    assert [it for it in said if str(it) not in line] == []


def test_no_clash_is_silent() -> None:
    check_packages()
    for args in (COMMAND, IMPORT):
        done = python(*args)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", PACKAGES)
def test_command_names_both_paths(tmp_path: Path, name: str) -> None:
    foreign = package(tmp_path, name)
    assert_reported(python(*COMMAND, path=(tmp_path, ROOT)), f"{name}={foreign}:", ROOT / name, "virtual environment")


def test_installed_script_names_both_paths(tmp_path: Path) -> None:
    """What pip makes of the entry point."""
    foreign = package(tmp_path / "path", "kernels")
    script = tmp_path / "hisparse"
    script.write_text("import sys\nfrom hisparse.cli import main\nsys.exit(main())\n")
    assert_reported(python(str(script), "--help", path=(tmp_path / "path", ROOT)), foreign, ROOT / "kernels")


def test_all_clashes_are_named_at_once(tmp_path: Path) -> None:
    foreign = [package(tmp_path, name) for name in ("kernels", "protocol")]
    assert_reported(python(*COMMAND, path=(tmp_path, ROOT)), *foreign, ROOT / "kernels", ROOT / "protocol")


def test_import_raises(tmp_path: Path) -> None:
    """A module in the working directory counts, too: `python -c` looks there first."""
    (tmp_path / "protocol.py").touch()
    done = python(*IMPORT, cwd=tmp_path)
    assert done.returncode == 1
    assert f"NameClash: protocol={tmp_path / 'protocol.py'}:" in done.stderr.splitlines()[-1]
    assert str(ROOT / "protocol") in done.stderr.splitlines()[-1]


def test_namespace_package_before_an_editable_install_is_named(tmp_path: Path) -> None:
    """Editable installs find packages after the path was searched, so that a mere directory hides them."""
    (tmp_path / "kernels").mkdir()
    finder = f"""
import importlib.machinery, sys
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}]) if path is None else None
sys.meta_path.append(Editable)
import hisparse
"""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = python("-S", "-c", finder, cwd=tmp_path, environ=environ)
    assert f"kernels={tmp_path / 'kernels'}:" in done.stderr
    (tmp_path / "kernels").rmdir()
    assert python("-S", "-c", finder, cwd=tmp_path, environ=environ).returncode == 0


def test_foreign_package_imported_before_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", types.ModuleType("kernels"))  # as tests and shims make them: no spec
    with pytest.raises(NameClash, match="kernels=<module 'kernels'>: it hides") as caught:
        check_packages()
    assert caught.value.name == "kernels"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """As pip leaves it: all packages in one directory."""
    for name in ("__init__", "clashes", "lazy"):
        package(tmp_path, "hisparse") if not (tmp_path / "hisparse").exists() else None
        shutil.copy(ROOT / "hisparse" / f"{name}.py", tmp_path / "hisparse")
    for name in PACKAGES:
        package(tmp_path, name, (ROOT / name / "__init__.py").read_text())
    return tmp_path


def test_distribution_installed_over_ours_is_named(installed: Path) -> None:
    assert python(*IMPORT, path=(installed,)).stdout == "imported\n"
    (installed / "kernels" / "__init__.py").write_text('"""Kernels of another hub."""\n')
    done = python(*IMPORT, path=(installed,))
    assert f"kernels={installed / 'kernels'}: another distribution has written over" in done.stderr


def test_missing_package_is_named(installed: Path) -> None:
    shutil.rmtree(installed / "metrics")
    done = python("-S", *IMPORT, path=(installed,))
    assert f"metrics=none: hisparse's own is missing at {installed / 'metrics'}" in done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_is_marked_internal(name: str) -> None:
    assert MARK in (ROOT / name / "__init__.py").read_bytes()[:HEAD_BYTES]


def test_children_do_not_look_into_the_working_directory(tmp_path: Path) -> None:
    """`hisparse up` in a directory that holds a `kernels/` of the user's."""
    package(tmp_path, "kernels", "raise SystemExit('foreign')")
    assert python(*COMMAND, cwd=tmp_path).returncode == EXIT_CODES["config"]
    done = python("-m", "hisparse.cli", "model", "--help", cwd=tmp_path, environ=child_environ())
    assert (done.returncode, done.stderr) == (0, "")
