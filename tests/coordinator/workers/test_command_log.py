"""coordinator.workers.command_log: commands apply once and in order per epoch (I4), whatever the link does."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.workers.command_log import (
    BATCH_BYTES_MAX,
    BATCH_COMMANDS_MAX,
    COMMANDS_UNACKED_MAX,
    CommandLog,
    command_bytes,
)
from protocol.errors import CapacityError, ProtocolError
from protocol.messages import Admit, Command, Commands, Grant, Resize, Sampling, Stop, Withdraw, encode


def admit(prompt: bytes) -> Admit:
    return Admit(1, 2, "r" * 100, prompt, b"", 0, Sampling(max_tokens=5, stop=("x" * 200,)), bytes(400), 1, 3, 4)


def filled(count: int) -> CommandLog:
    log = CommandLog()
    for placement in range(count):
        log.append(Withdraw(placement))
    return log


def test_numbers_start_at_one_and_batches_are_contiguous() -> None:
    log = filled(BATCH_COMMANDS_MAX + 3)
    first, second = log.take(0.0), log.take(0.0)
    assert first is not None
    assert second is not None
    assert (first.first, len(first.commands)) == (1, BATCH_COMMANDS_MAX)
    assert (second.first, len(second.commands)) == (BATCH_COMMANDS_MAX + 1, 3)
    assert log.take(0.0) is None


def test_batch_stays_below_its_bytes_or_has_a_single_command() -> None:
    log = CommandLog()
    for prompt_bytes in (BATCH_BYTES_MAX // 2, BATCH_BYTES_MAX // 2, 3 * BATCH_BYTES_MAX, 10):
        log.append(admit(bytes(prompt_bytes)))
    taken = []
    while batch := log.take(0.0):
        taken.append((batch.first, len(batch.commands)))
    assert taken == [(1, 1), (2, 1), (3, 1), (4, 1)]


@pytest.mark.parametrize(
    "command", [admit(bytes(1000)), Grant(1 << 40, bytes(400), 9, 9), Resize(1, 2, 3), Withdraw(4), Stop(5.0)]
)
def test_the_estimate_covers_the_encoding(command: Command) -> None:
    assert len(encode(Commands(1, 1, (command,)))) <= command_bytes(command)


def test_round_trip_is_measured_from_first_sending() -> None:
    log = filled(2)
    log.take(10.0)
    assert log.replay_overdue(12.5, limit_s=2.0)
    log.take(12.5)
    assert log.acknowledge(2, 13.0) == 3.0
    assert log.acknowledge(2, 14.0) is None
    assert log.acknowledge(1, 14.0) is None, "an older acknowledgement arrives late"


def test_overdue_commands_are_resent_repeatedly() -> None:
    log = filled(3)
    assert not log.replay_overdue(99.0, limit_s=2.0), "nothing was sent yet"
    log.take(0.0)
    assert not log.replay_overdue(1.9, limit_s=2.0)
    for now in (2.0, 4.0, 6.0):
        assert log.replay_overdue(now, limit_s=2.0)
        batch = log.take(now)
        assert batch is not None
        assert (batch.first, len(batch.commands), batch.repeated) == (1, 3, 3)
    log.acknowledge(3, 7.0)
    assert not log.replay_overdue(99.0, limit_s=2.0)


def test_unsent_commands_are_taken_again() -> None:
    log = filled(4)
    batch = log.take(0.0)
    assert batch is not None
    log.untake(batch)
    log.append(Withdraw(9))
    again = log.take(1.0)
    assert again is not None
    assert (again.first, len(again.commands)) == (1, 5)


@pytest.mark.parametrize("number", [4, 1 << 70])
def test_acknowledging_the_unsent_is_refused_and_changes_nothing(number: int) -> None:
    log = filled(5)
    batch = log.take(0.0)
    assert batch is not None
    log.acknowledge(2, 0.0)
    log = filled(3)
    log.take(0.0)
    with pytest.raises(ProtocolError, match="never sent"):
        log.acknowledge(number, 1.0)
    assert log.unacknowledged == 3


@pytest.mark.parametrize("first", [-1, 0, 2, 6])
def test_replay_of_forgotten_or_unsent_commands_is_refused(first: int) -> None:
    log = filled(4)
    log.take(0.0)
    log.acknowledge(2, 0.0)
    with pytest.raises(ProtocolError, match=r"3\.\.4 can be sent again"):
        log.replay(first)


def test_worker_that_forgot_acknowledged_commands_is_refused() -> None:
    log = filled(4)
    log.take(0.0)
    log.acknowledge(3, 0.0)
    with pytest.raises(ProtocolError, match="acknowledged before"):
        log.reconnect(2, 1.0)


def test_the_log_is_bounded() -> None:
    log = filled(COMMANDS_UNACKED_MAX)
    with pytest.raises(CapacityError):
        log.append(Withdraw(0))
    assert log.unacknowledged == COMMANDS_UNACKED_MAX


class LossyLink(RuleBasedStateMachine):
    """A log and a worker's receiving end, with a link between them that loses, delays and is cut.

    The receiver is the smallest that keeps the rule: apply the next number, ignore what was applied, ask at a gap.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log = CommandLog()
        self.appended: list[int] = []
        self.applied: list[int] = []
        self.to_worker: list[tuple[int, tuple[Command, ...]]] = []
        self.to_log: list[tuple[str, int]] = []
        self.now = 0.0

    @rule(count=st.integers(1, 5))
    def append(self, count: int) -> None:
        for _ in range(count):
            assert self.log.append(Withdraw(len(self.appended))) == len(self.appended) + 1
            self.appended.append(len(self.appended))

    @rule(sendable=st.booleans())
    def send(self, sendable: bool) -> None:
        if batch := self.log.take(self.now):
            if sendable:
                self.to_worker.append((batch.first, batch.commands))
            else:
                self.log.untake(batch)

    @precondition(lambda self: self.to_worker)
    @rule(lost=st.booleans())
    def arrive_at_worker(self, lost: bool) -> None:
        first, commands = self.to_worker.pop(0)
        if lost:
            return
        if first > len(self.applied) + 1:
            self.to_log.append(("replay", len(self.applied) + 1))
        for number, command in enumerate(commands, first):
            if number == len(self.applied) + 1:
                assert isinstance(command, Withdraw)
                self.applied.append(command.placement)
        self.to_log.append(("ack", len(self.applied)))

    @precondition(lambda self: self.to_log)
    @rule(lost=st.booleans())
    def arrive_at_log(self, lost: bool) -> None:
        kind, number = self.to_log.pop(0)
        if lost:
            return
        if kind == "ack":
            self.log.acknowledge(number, self.now)
        else:
            self.log.replay(number)

    @rule(seconds=st.floats(0.1, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.log.replay_overdue(self.now, limit_s=2.0)

    @rule()
    def reconnect(self) -> None:
        self.to_worker.clear()
        self.to_log.clear()
        self.log.reconnect(len(self.applied), self.now)

    @invariant()
    def once_and_in_order(self) -> None:
        self.log.check_invariants()
        assert self.applied == self.appended[: len(self.applied)], "I4: each command once and in order"
        assert self.log.acknowledged <= len(self.applied)

    def teardown(self) -> None:
        """Once the link is good, overdue replay alone brings everything across."""
        for _ in range(2 * len(self.appended) + 8):
            self.wait(2.0)
            self.send(sendable=True)
            while self.to_worker:
                self.arrive_at_worker(lost=False)
            while self.to_log:
                self.arrive_at_log(lost=False)
        assert self.applied == self.appended
        assert self.log.unacknowledged == 0


LossyLink.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestLossyLink = LossyLink.TestCase
