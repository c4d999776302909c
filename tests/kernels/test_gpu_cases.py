"""What holds a GPU against the reference sees differences and allows what the contract leaves open. Needs no GPU."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.state import Tripwire
from tests.gpu import lives, run_cases
from tests.gpu.compare import Difference, check
from tests.gpu.program import OF_GROUP, TABLES, Program, pack, unpack

Record = list[list[Tensor]]

reference = importlib.import_module("kernels.reference.swap_in")


@pytest.fixture(scope="module")
def program() -> Program:
    """A drawn world with hits, misses and evictions in it, top-k wide enough to matter."""
    programs = run_cases.draw(1, run_cases.Part("small", 3))
    return max(programs, key=lambda p: (p.geometry.row_bytes > 8, p.geometry.topk))


def recorded(program: Program) -> Record:
    return run_cases.record(program, "cpu")


def swaps(program: Program) -> list[int]:
    return [number for number, op in enumerate(program.ops) if op.call == "swap_in"]


def test_reference_agrees_with_itself(program: Program) -> None:
    check(program, run_cases.host_of(program, "cpu"), recorded(program))


def test_scripts_trip_every_tripwire_except_victims() -> None:
    """With fewer victims than misses no contract says which misses are loaded."""
    trips = torch.zeros(len(Tripwire), dtype=torch.int64)
    for script in run_cases.draw(2, run_cases.Part("small", 1)):
        trips += run_cases.record(script, "cpu")[-2][TABLES.index("tripwires")]
    assert [bool(count) for count in trips] == [wire is not Tripwire.VICTIMS for wire in Tripwire]


def test_victims_may_be_given_to_misses_in_any_order(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not part of the contract, and yet LRU goes on from the tables that were recorded."""
    chosen = reference._victims

    def backwards(*arguments: Any) -> Any:
        victims = chosen(*arguments)
        for row, count in enumerate(arguments[-1].tolist()):
            victims[row, :count] = victims[row, :count][::-1].copy()
        return victims

    straight = recorded(program)
    monkeypatch.setattr(reference, "_victims", backwards)
    record = recorded(program)
    monkeypatch.undo()
    assert any(not torch.equal(straight[number][0], record[number][0]) for number in swaps(program))
    check(program, run_cases.host_of(program, "cpu"), record)


@pytest.mark.mutation
def test_wrong_victim_is_seen(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, never = reference.eviction_keys, reference.NEVER

    def newest_first(*arguments: Any) -> Any:
        order = keys(*arguments)
        return np.where(order == never, never, (2**40 - (order >> 16) << 16) | order & 0xFFFF)

    monkeypatch.setattr(reference, "eviction_keys", newest_first)
    record = recorded(program)
    monkeypatch.undo()
    with pytest.raises(Difference, match="swap_in"):
        check(program, run_cases.host_of(program, "cpu"), record)


def corrupt_bytes(program: Program, record: Record) -> str:
    number = next(n for n in swaps(program) if (record[n][0] >= 0).any())
    row, column = (record[number][0] >= 0).nonzero()[0].tolist()
    record[number][12][row, column, -1] ^= 1
    return "bytes behind out_rows"


def corrupt_padding(program: Program, record: Record) -> str:
    record[swaps(program)[0]][0][-1, -1] = 0
    return "entries of -1"


def corrupt_rejected(program: Program, record: Record) -> str:
    record[swaps(program)[0]][6 + len(OF_GROUP)][0] += 1
    return "rejected"


def corrupt_hits(program: Program, record: Record) -> str:
    record[swaps(program)[0]][5 + OF_GROUP.index("hits")][0] += 1
    return "hits"


def corrupt_slot_map(program: Program, record: Record) -> str:
    slots = record[swaps(program)[-1]][5 + OF_GROUP.index("slot_of")]
    first, other = (slots >= 0).nonzero().flatten()[:2].tolist()
    slots[first], slots[other] = int(slots[other]) + 1, int(slots[first]) + 1
    return "slot_of of the tokens"


def corrupt_memory(_: Program, record: Record) -> str:
    record[-1][0][0, -1] += 1
    return "memory.*output 0"


def corrupt_begin(program: Program, record: Record) -> str:
    record[next(n for n, op in enumerate(program.ops) if op.call == "begin")][2][0, 0] += 1
    return "begin.*output 2"


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_bytes,
        corrupt_padding,
        corrupt_rejected,
        corrupt_hits,
        corrupt_slot_map,
        corrupt_memory,
        corrupt_begin,
    ],
)
@pytest.mark.mutation
def test_each_kind_of_difference_is_seen(corrupt: Callable[[Program, Record], str], program: Program) -> None:
    record = recorded(program)
    message = corrupt(program, record)
    with pytest.raises(Difference, match=message):
        check(program, run_cases.host_of(program, "cpu"), record)


def test_scripts_are_seeded_and_cover_every_operation() -> None:
    """What a label names can be run again."""
    first, again = (run_cases.draw(7, run_cases.Part("small", 2)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert pickle.dumps(one) == pickle.dumps(other)
    calls = {op.args[0] if op.call in ("seat", "copy") else op.call for p in first for op in p.ops}
    assert calls >= {"begin", "swap_in", "write_new", "write_prompt", "read_prompt", "to_host", "to_device", "keys"}
    assert calls >= {"init_resident", "init_managed", "grow_managed", "shrink_managed", "clear_seat"}


def test_parts_cover_all_cases_and_a_label_its_part() -> None:
    assert [part.kind for part in run_cases.parts_of(221, 2, "")] == ["limit"] * 2 + ["small"] * 3
    assert list(run_cases.parts_of(9900, 100, "small:7:3")) == [run_cases.Part("small", 7)]
    assert list(run_cases.parts_of(9900, 100, "limit:41")) == [run_cases.Part("limit", 41, 100)]


def test_ten_cases_at_the_limits_exceed_32_bit_offsets() -> None:
    """vLLM #57602: rows on the device and pages on the host, those in use at the far end of more than 4 GiB."""
    assert set(lives.LARGE) <= set(lives.KINDS[:10])
    (drawn,) = run_cases.draw_examples(lives.LIMITS, 1, 1)
    arena, host = (lives._extent(kind, drawn) for kind in ("arena", "host"))
    assert arena.chunks * 64 * arena.rows[0] > 2**32
    assert host.host_pages * 64 * (host.rows[0] + host.rows[2]) > 2**32


def test_packed_tensors_come_back() -> None:
    tensors = [torch.arange(3, dtype=torch.int16), torch.zeros(0, 4), torch.arange(6).view(2, 3), torch.tensor([True])]
    for one, other in zip(tensors, unpack(pack(tensors), tensors), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
