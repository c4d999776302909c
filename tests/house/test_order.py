"""The order of tests among several processes."""

from __future__ import annotations

from tests.support.order import in_order


def test_waiting_tests_lie_among_computing_ones() -> None:
    tests = [
        *(f"process {n}" for n in range(40)),
        *(f"long {n}" for n in range(60)),
        *(f"short {n}" for n in range(2000)),
    ]
    ordered = in_order(tests, lambda name: name.startswith("process"), lambda name: not name.startswith("short"))
    assert sorted(ordered) == sorted(tests)
    for kind in ("process", "long", "short"):
        assert [name for name in ordered if name.startswith(kind)] == [name for name in tests if name.startswith(kind)]
    computing = [name for name in ordered if not name.startswith("process")]
    assert computing == tests[40:], "long ones begin first"
    places = [place for place, name in enumerate(ordered) if name.startswith("process")]
    beside = [places[n + 1] - places[n] for n in range(20)]
    assert min(beside) >= 2, "no two that wait begin together while long ones remain"
    assert places[-1] < 0.9 * len(ordered)


def test_order_of_one_kind_is_kept() -> None:
    assert in_order(["b", "a"], lambda _: True, lambda _: True) == ["b", "a"]
    assert in_order([], bool, bool) == []
