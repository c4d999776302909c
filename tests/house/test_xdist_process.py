"""Processes that execnet starts for pytest-xdist are forked from one that has the model library imported."""

from __future__ import annotations

import os
import subprocess
import sys

import execnet
import pytest
from execnet import gateway_io

from tests import ROOT
from tests.support.xdist_process import ForkedIO

ASK = """
import os, sys
from tests.support import zygote
from worker.runners import invariance
channel.send(("torch" in sys.modules, os.getppid(), len(zygote._own), invariance.TRIALS > zygote.TRIALS))
"""
IMPORTED = """
import sys
from tests.support.zygote import import_tests
import_tests("tests/house/test_pairwise.py")
print("@pytest_ar" in vars(sys.modules["tests.house.test_pairwise"]))
"""


def test_tests_that_are_imported_before_a_fork_have_their_assertions_rewritten() -> None:
    """A pytest that runs in the forked process takes them as they are."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_execnet_runs_code_in_a_forked_child_that_has_a_zygote_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests meet the product as it is: the shorter check of forked workers is theirs alone."""
    monkeypatch.setitem(vars(gateway_io), "Popen2IOMaster", ForkedIO)
    group = execnet.Group(execmodel="main_thread_only")
    try:
        channel = group.makegateway("popen").remote_exec(ASK)
        assert channel.receive(120) == (True, os.getpid(), 1, True)
    finally:
        group.terminate(10)
