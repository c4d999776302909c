"""A keeper that cannot be started is told, and its worker starts all the same."""

from __future__ import annotations

from pathlib import Path

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
