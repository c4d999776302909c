"""Connections that say nothing are bounded in number and time; what a rank says ends its part in that."""

from __future__ import annotations

from worker.group.sockets import NEWCOMERS_MAX, SPEAK_LIMIT_S, Newcomers


def test_oldest_beyond_the_bound_are_ended_once() -> None:
    newcomers = Newcomers()
    for descriptor in range(NEWCOMERS_MAX + 3):
        newcomers.came(descriptor, float(descriptor) * 1e-3)
    assert newcomers.take_overdue(1.0) == [0, 1, 2]
    assert newcomers.take_overdue(1.0) == []
    assert len(newcomers) == NEWCOMERS_MAX


def test_silent_connection_is_ended_in_time_and_one_that_spoke_is_not() -> None:
    newcomers = Newcomers()
    newcomers.came(3, 0.0)
    newcomers.came(4, 0.0)
    newcomers.spoke(4)
    assert newcomers.take_overdue(SPEAK_LIMIT_S) == []
    assert newcomers.take_overdue(SPEAK_LIMIT_S + 0.1) == [3]


def test_end_of_a_silent_connection_is_told_from_that_of_a_rank() -> None:
    newcomers = Newcomers()
    newcomers.came(3, 0.0)
    newcomers.came(4, 0.0)
    newcomers.came(5, 0.0)
    newcomers.spoke(5)
    newcomers.take_overdue(SPEAK_LIMIT_S + 0.1)
    assert newcomers.left(3)  # ended
    assert not newcomers.left(3)
    assert not newcomers.left(5)


def test_descriptor_that_is_used_again_is_a_new_connection() -> None:
    newcomers = Newcomers()
    newcomers.came(3, 0.0)
    newcomers.came(3, SPEAK_LIMIT_S)
    assert newcomers.take_overdue(SPEAK_LIMIT_S + 0.1) == []
    newcomers.take_overdue(2 * SPEAK_LIMIT_S + 0.1)
    newcomers.came(3, 30.0)  # its end was not read
    newcomers.spoke(3)
    assert not newcomers.left(3)
