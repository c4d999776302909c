"""What a hello leads to, where only it tells which process it is of: over tcp."""

from __future__ import annotations

import pytest

from coordinator.workers.worker_epoch import Course, KnownWorker, judge
from protocol.errors import NameTaken
from tests.support.fakes.worker import hello

TCP = 0


def course(epoch: int, first_epoch: int, known: KnownWorker, process: int = TCP) -> Course:
    return judge(hello(epoch=epoch, first_epoch=first_epoch), process, known, 1)


@pytest.mark.parametrize("is_down", [True, False])
def test_new_epoch_over_tcp_proves_an_earlier_one_of_its_process_quiesced(is_down: bool) -> None:
    """I2: a worker that was cut off, and lives, empties itself; what it had is no longer in quarantine."""
    assert course(101, 100, KnownWorker(100, TCP, is_down)) is Course.SUCCEED
    assert course(107, 100, KnownWorker(103, TCP, is_down)) is Course.SUCCEED


@pytest.mark.parametrize("first_epoch", [0, 200, 199], ids=["older version", "later process", "its second epoch"])
def test_epoch_of_another_process_proves_nothing(first_epoch: int) -> None:
    assert course(200, first_epoch, KnownWorker(100, TCP, is_down=True)) is Course.JOIN
    with pytest.raises(NameTaken):
        course(200, first_epoch, KnownWorker(100, TCP, is_down=False))


def test_earlier_process_that_returns_proves_nothing_of_the_one_that_has_its_name() -> None:
    assert course(101, 100, KnownWorker(200, TCP, is_down=True)) is Course.JOIN


def test_process_that_the_kernel_attests_is_not_believed_to_be_another() -> None:
    for known, process in ((17, 18), (17, TCP), (TCP, 18)):
        assert course(101, 100, KnownWorker(100, known, is_down=True), process) is Course.JOIN
    assert course(101, 0, KnownWorker(100, 17, is_down=True), 17) is Course.SUCCEED
