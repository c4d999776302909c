"""Processes of clusters are forked, not executed: tests.support.zygote.

Some tests of test_up.py execute `hisparse up` and all that it starts; so do those of test_upgrade_skew.py, whose
processes run the code of two versions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hisparse.cluster import children
from tests.support import zygote


@pytest.fixture(scope="package", autouse=True)
def _forked_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(children, "subprocess", zygote.FORKING)
        yield
