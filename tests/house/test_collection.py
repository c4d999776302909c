"""Modules of tests that need no model import no torch: collecting them takes 3 s in place of 8, and 200 MB less."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest
from hypothesis.internal.conjecture import providers

from tests import ROOT

ROOMS: Final = ("basics", "coordinator", "examples", "hisparse", "house", "manifests", "metrics", "protocol", "sim")
#: They drive a real worker, or read the library's configuration of a published model.
WITH_TORCH: Final = {
    "tests/coordinator/policy/test_direct_admission.py",
    "tests/hisparse/cluster/test_placement.py",
}
#: Prints the first module with which torch was imported.
IMPORT_EACH: Final = """
import importlib, sys
for path in sys.argv[1:]:
    importlib.import_module(path.removesuffix(".py").replace("/", "."))
    if "torch" in sys.modules:
        sys.exit(path)
"""


@pytest.mark.timeout(1_200)
def test_modules_that_need_no_model_are_collected_without_torch() -> None:
    found = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / "tests" / room).rglob("test_*.py")}
    assert found >= WITH_TORCH
    command = [sys.executable, "-c", IMPORT_EACH, *sorted(found - WITH_TORCH)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_examples_are_drawn_without_constants_of_modules_that_other_tests_import() -> None:
    """They hold strings of the product otherwise, of each module that this process has imported so far."""
    assert not len(providers._get_local_constants())
