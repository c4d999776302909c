"""The repository's files: what .editorconfig says of all, and what .gitattributes says of generated ones."""

from __future__ import annotations

import subprocess
from functools import cache

import pytest

from tests import ROOT
from tests.support.limits import HANG_LIMIT_S

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S)
    return done.stdout


@cache
def generated() -> frozenset[str]:
    files = git("ls-files").splitlines()
    lines = git("check-attr", "linguist-generated", "--", *files).splitlines()
    return frozenset(line.partition(": ")[0] for line in lines if line.endswith(": set"))


def test_generated_files_are_marked() -> None:
    written = {"benchmarks/TABLES.md", "docs/demo.svg", "docs/page.png", "docs/top.svg", "kernels/cuda/src/layout.cuh"}
    written |= {f"docs/{name}.md" for name in ("commands", "metrics", "settings")}
    written |= {str(path.relative_to(ROOT)) for path in (ROOT / "metrics" / "dashboards").glob("*.json")}
    written |= {str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks" / "results").iterdir()}
    written -= {"benchmarks/results/gpu-runs.json"}  # kept by hand
    tracked = set(git("ls-files").splitlines())
    assert written & tracked == generated()


def test_text_files_have_clean_line_ends() -> None:
    for name in sorted(set(git("ls-files").splitlines()) - generated()):
        path = ROOT / name
        if not path.is_file():
            continue  # removed, and not yet committed
        text = path.read_bytes()
        assert b"\r" not in text, name
        assert not text or (text.endswith(b"\n") and not text.endswith(b"\n\n")), name
        assert [line for line in text.split(b"\n") if line != line.rstrip()] == [], name
