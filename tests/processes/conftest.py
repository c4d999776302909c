"""Workers of clusters that a test runs in its own process are forked, not executed: tests.support.zygote.

`hisparse up` as a process, as in test_up.py, executes its workers; so do the clusters of test_upgrade_skew.py, whose
workers run the code of two versions.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hisparse.cluster import children
from tests.support import zygote


@pytest.fixture(scope="package", autouse=True)
def _forked_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(children, "subprocess", SimpleNamespace(Popen=zygote.start, DEVNULL=subprocess.DEVNULL))
        yield
