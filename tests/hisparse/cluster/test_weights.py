"""A keeper that cannot be started is told, and its worker starts all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse.cluster.weights import WeightKeepers
from protocol.settings import ClusterSettings, Config, WorkerSettings


def test_a_socket_that_cannot_be_made_is_told_once_a_start(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    said: list[str] = []
    keepers = WeightKeepers(said.append)
    keepers.keep(Config(ClusterSettings(runtime_dir=str(deep)), worker=WorkerSettings(name="w0")), None)
    assert keepers.children == {}
    assert said == ["no keeper for the weights of w0: AF_UNIX path too long"]
    keepers.keep(Config(worker=WorkerSettings(name="w0", keeper=False)), None)
    assert len(said) == 1


@pytest.mark.process
def test_the_end_of_a_keeper_is_told_once_and_the_next_start_gets_another(tmp_path: Path) -> None:
    said: list[str] = []
    config = Config(ClusterSettings(runtime_dir=str(tmp_path)), worker=WorkerSettings(name="w0"))
    keepers = WeightKeepers(said.append)
    keepers.keep(config, None)
    first = keepers.children["w0"]
    try:
        keepers.look()
        assert said == []
        first.process.kill()
        first.process.wait()
        for _ in range(2):
            keepers.look()
        assert said == ["w0-weights killed by SIGKILL: w0 goes on, and its next start loads weights once more"]
        assert keepers.children == {}
        keepers.keep(config, None)
        assert keepers.children["w0"].pid != first.pid
    finally:
        for child in keepers.children.values():
            child.process.kill()
            child.process.wait()
            child.close()
