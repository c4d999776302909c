"""What the soak (tools/faults/soak.py) works out by itself; the soak takes minutes and is run by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hisparse.client.client import Client
from hisparse.client.connection import Connection
from tools.faults.soak import COMPANIONS, IN_FLIGHT_S, VICTIMS, Load, pause_of, victims_of


@pytest.mark.parametrize("seed", range(3))
def test_seed_kills_all_processes_equally_often(seed: int) -> None:
    victims = victims_of(20, random.Random(seed))
    assert Counter(Counter(victims).values()) == {7: 2, 6: 1}
    assert set(victims) == set(VICTIMS)
    assert victims == victims_of(20, random.Random(seed))
    assert victims != victims_of(20, random.Random(seed + 1))


def test_companions_are_killed_as_often() -> None:
    victims = victims_of(18, random.Random(1), VICTIMS + COMPANIONS)
    assert Counter(Counter(victims).values()) == {2: 9}


def test_pause_lasts_until_the_longest_waiting_stream_continues() -> None:
    in_flight, over, elsewhere = (9.0, 10.0 + IN_FLIGHT_S / 2), (9.5, 10.0), (30.0, 40.0)
    assert pause_of(10.0, [in_flight, over, elsewhere]) == 0.0
    assert pause_of(10.0, [(9.9, 11.5), (10.0 + IN_FLIGHT_S / 2, 12.0), elsewhere]) == pytest.approx(2.0)


def test_output_with_another_token_or_length_is_seen() -> None:
    load = Load(Client(Connection("nowhere", "client", "", 0, None)), [[1]], {0: [5, 6, 7]})
    load.assert_expected(0, "0.0", [5, 6, 7])
    with pytest.raises(AssertionError, match=r"0\.0 differs from the undisturbed run from position 1 on"):
        load.assert_expected(0, "0.0", [5, 8, 7])
    for output in ([5, 6], [5, 6, 6, 7]):
        with pytest.raises(AssertionError, match=r"0\.0 has"):
            load.assert_expected(0, "0.0", output)
