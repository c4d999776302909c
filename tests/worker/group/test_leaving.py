"""How a rank ends on a GPU: graphs first, since NCCL ends no communicator that one refers to; then within a bound."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protocol.errors import ConfigError
from protocol.settings import Config
from worker import process
from worker.group import group
from worker.group.group import Group
from worker.process import WorkerProcess


@pytest.mark.parametrize("ends", [True, False])
def test_leaving_waits_for_the_collectives_for_a_bounded_time(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "ABORT_LIMIT_S", 30.0 if ends else 0.05)
    told, may_end = list[str](), threading.Event()
    if ends:
        may_end.set()
    rank = object.__new__(Group)
    rank.control = cast(Any, SimpleNamespace(leave=lambda: told.append("left")))
    rank.process_group = SimpleNamespace(abort=may_end.wait)
    assert rank.leave() is ends
    assert told == ["left"]
    may_end.set()


def test_a_start_that_fails_drops_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = list[str]()
    streams = SimpleNamespace(drop_graphs=lambda: dropped.append("graphs"))
    monkeypatch.setattr(process, "make_streams", lambda *_, **__: streams)

    def fail(*args: object) -> None:
        assert args[-1] is streams
        assert not dropped
        raise ConfigError("the port is in use", field="worker.metrics_port", value=1)

    worker = object.__new__(WorkerProcess)
    monkeypatch.setattr(worker, "_wire_with", fail)
    with pytest.raises(ConfigError, match="in use"):
        worker._wire(Config(), cast(Any, None), cast(Any, None))
    assert dropped == ["graphs"]
