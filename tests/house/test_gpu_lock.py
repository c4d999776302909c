"""Tests that need a GPU take it one at a time, among all processes that run tests."""

from __future__ import annotations

import fcntl
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


@pytest.mark.parametrize("needs_gpu", [True, False])
def test_a_gpu_test_runs_with_the_lock_held(needs_gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(conftest, "GPU_LOCK", tmp_path / "lock")
    item: Any = SimpleNamespace(get_closest_marker=lambda name: needs_gpu and name == "gpu")
    running = conftest.pytest_runtest_protocol(item)
    next(running)
    with (tmp_path / "lock").open("w") as other:
        if needs_gpu:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(StopIteration):
            running.send(None)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
