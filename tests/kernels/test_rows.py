"""Rows and index keys: copies between device and host pages, prompt reads and writes, gathers, argument checks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.check import Sizes
from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.rows import (
    copy_slab_pages,
    gather_rows,
    new_keys,
    new_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.seat import clear_seat
from protocol.errors import BadInput
from tests.support.kernel_rig import POISON, Request, Rig

#: Bytes of a row, and where it parts into two planes (0: one).
PLANES = st.one_of(
    st.integers(1, 40).map(lambda size: (size, 0)),
    st.integers(2, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size - 1))),
)


def staged_prompt(rig: Rig, seat: int, length: int, chunk_tokens: int) -> Request:
    """A request whose prompt was written in pieces to the slab, of which two layers are left, and to the index cache;
    its chunks hold all layers, its host pages are poison."""
    request = Request(1 + seat, seat, length)
    rig.requests[seat] = request
    state, pages = rig.state, -(-length // 64)
    for page in range(pages):
        rig.grant(request, page)
        state.slab_table[seat, page], state.chunk_table[seat, page] = rig.free["slab"].pop(), rig.free["chunk"].pop()
    pieces = [range(start, min(start + chunk_tokens, length)) for start in range(0, length, chunk_tokens)]
    for layer in range(rig.geometry.layers):
        for positions in pieces:
            rows = torch.stack([rig.truth("row", layer, request, position) for position in positions])
            for plane, part in enumerate(rows.split(rig.geometry.planes, dim=1)):
                write_slab_rows(state, layer, seat, positions.start, part.contiguous(), plane)
        copy_slab_pages(state, layer, state.slab_table[seat, :pages].long(), state.chunk_table[seat, :pages].long())
    for positions in pieces:
        for group in range(rig.geometry.groups):
            keys = torch.stack([rig.truth("key", group, request, position) for position in positions])
            write_prompt_index_keys(state, group, seat, positions.start, keys)
    return request


def places(table: torch.Tensor, seat: int, positions: torch.Tensor) -> torch.Tensor:
    return table[seat, positions // 64] * 64 + positions % 64


@settings(max_examples=60)
@given(
    groups=st.sampled_from([(0,), (0, 0, 1), (0, 1, 2)]),
    planes=PLANES,
    index_row_bytes=st.integers(1, 12),
    length=st.integers(1, 200),
    chunk_tokens=st.integers(16, 100),
    start=st.integers(0, 199),
    seed=st.integers(0, 99),
)
def test_prompt_to_host_and_back_for_partial_pages(
    groups: tuple[int, ...],
    planes: tuple[int, int],
    index_row_bytes: int,
    length: int,
    chunk_tokens: int,
    start: int,
    seed: int,
) -> None:
    """Slab -> chunks -> host pages -> other chunks: every byte of start..length-1, and no byte outside.

    vLLM #57019: each layer has a separate place."""
    start = min(start, length - 1)
    row_bytes, split = planes
    rig = Rig(groups=groups, row_bytes=row_bytes, split=split, index_row_bytes=index_row_bytes, seed=seed)
    request = staged_prompt(rig, 1, length, chunk_tokens)
    positions = torch.arange(start, length)
    rows = places(rig.state.chunk_table, 1, positions).expand(rig.geometry.groups, -1).contiguous()
    index_rows = places(rig.state.index_table, 1, positions)
    pages, offsets = rig.state.host_table[1, positions // 64].contiguous(), (positions % 64).int()
    copy_rows_to_host(rig.state, rows, index_rows, pages, offsets)
    for position in range(length):
        for kind, layers in (("row", rig.geometry.layers), ("key", rig.geometry.groups)):
            for layer in range(layers):
                got = rig.read_host(kind, layer, request, position)
                want = rig.truth(kind, layer, request, position) if position >= start else torch.full_like(got, POISON)
                assert torch.equal(got, want), (kind, layer, position)
    rig.state.rows.fill_(0)
    rig.state.index_keys.fill_(0)
    target = torch.stack(
        [torch.randperm(rig.state.rows.shape[1])[: len(positions)] for _ in range(rig.geometry.groups)]
    )
    copy_rows_to_device(rig.state, target, index_rows, pages, offsets)
    for layer, group in enumerate(groups):
        for column, position in enumerate(range(start, length)):
            assert torch.equal(
                rig.read_row(layer, int(target[group, column])), rig.truth("row", layer, request, position)
            )
    for group in range(rig.geometry.groups):
        got = rig.state.index_keys[group, index_rows.long()]
        assert torch.equal(got[-1], rig.truth("key", group, request, length - 1))
        assert torch.equal(got[0], rig.truth("key", group, request, start))
    assert int((rig.state.planes[-1] != 0).any(2).sum()) <= len(positions) * len(groups)


def test_skipped_entries_move_nothing_and_keys_are_optional() -> None:
    rig = Rig(groups=(0, 1))
    request = staged_prompt(rig, 0, 70, 70)
    positions = torch.tensor([3, 69, 5])
    rows = places(rig.state.chunk_table, 0, positions).expand(2, -1).contiguous()
    pages = torch.tensor([request.pages[0][1], request.pages[1][1], -1], dtype=torch.int32)
    copy_rows_to_host(rig.state, rows, None, pages, (positions % 64).int())
    assert torch.equal(rig.read_host("row", 1, request, 69), rig.truth("row", 1, request, 69))
    assert (rig.read_host("key", 1, request, 69) == POISON).all()
    assert (rig.read_host("row", 0, request, 5) == POISON).all()
    before = rig.host.clone(), rig.state.rows.clone()
    nothing = torch.full((3,), -1, dtype=torch.int32)
    copy_rows_to_host(rig.state, rows, positions, nothing, (positions % 64).int())
    copy_rows_to_device(rig.state, rows, positions, nothing, (positions % 64).int())
    assert torch.equal(before[0], rig.host)
    assert torch.equal(before[1], rig.state.rows)


@settings(max_examples=60)
@given(
    planes=st.sampled_from([(48, 0), (12, 5)]),
    cuts=st.sets(st.integers(1, 4)),
    length=st.integers(1, 150),
    seed=st.integers(0, 99),
)
def test_copies_by_layer_ranges_equal_a_single_copy(
    planes: tuple[int, int], cuts: set[int], length: int, seed: int
) -> None:
    """And each range leaves every other byte as it was; index keys come with the last one."""
    row_bytes, split = planes
    rig = Rig(groups=(0, 0, 1, 2, 2), row_bytes=row_bytes, split=split, index_row_bytes=8, seed=seed)
    request = staged_prompt(rig, 1, length, 64)
    positions = torch.arange(length)
    rows = places(rig.state.chunk_table, 1, positions).expand(rig.geometry.groups, -1).contiguous()
    keys = places(rig.state.index_table, 1, positions)
    pages, offsets = rig.state.host_table[1, positions // 64].contiguous(), (positions % 64).int()
    ends = [*sorted(cuts), rig.geometry.layers]
    for first, stop in pairwise([0, *ends]):
        last = stop == rig.geometry.layers
        copy_rows_to_host(rig.state, rows, keys if last else None, pages, offsets, range(first, stop))
        for layer in range(rig.geometry.layers):
            got = rig.read_host("row", layer, request, length - 1)
            written = rig.truth("row", layer, request, length - 1) if layer < stop else torch.full_like(got, POISON)
            assert torch.equal(got, written), (first, stop, layer)
        assert bool((rig.read_host("key", 0, request, length - 1) == POISON).all()) is not last
    by_ranges = rig.host.clone()
    rig.host.fill_(POISON)
    copy_rows_to_host(rig.state, rows, keys, pages, offsets)
    assert torch.equal(by_ranges, rig.host)


@pytest.mark.parametrize("layers", [range(1, 1), range(-1, 1), range(0, 3), range(0, 2, 2)])
def test_invalid_ranges_are_refused(layers: range) -> None:
    rig = Rig(groups=(0, 1))
    request = staged_prompt(rig, 0, 1, 1)
    rows, page = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([request.pages[0][1]])
    with pytest.raises(BadInput, match="consecutive layers of 2"):
        copy_rows_to_host(rig.state, rows, None, page, torch.zeros_like(page), layers)
    with pytest.raises(BadInput, match="the last among them with index keys"):
        copy_rows_to_host(rig.state, rows, torch.zeros_like(page), page, torch.zeros_like(page), range(1))


def test_index_keys_alone_come_back_for_a_resumed_request() -> None:
    rig = Rig(groups=(0, 1))
    request = rig.open(0, 130, 8)
    rig.state.index_keys.fill_(0)
    before = rig.state.rows.clone()
    positions = torch.arange(130)
    copy_keys_to_device(
        rig.state, places(rig.state.index_table, 0, positions), rig.state.host_table[0, positions // 64], positions % 64
    )
    for group in (0, 1):
        wanted = torch.stack([rig.truth("key", group, request, position) for position in range(130)])
        assert torch.equal(read_index_keys(rig.state, group, 0, 130), wanted)
    assert torch.equal(before, rig.state.rows)


@pytest.mark.parametrize("split", [0, 5])
def test_prompt_reads_return_the_stored_rows(split: int) -> None:
    rig = Rig(groups=(0, 1), row_bytes=12, split=split)
    request = staged_prompt(rig, 2, 150, 47)
    for stop in (1, 64, 65, 150):
        rows = torch.stack([rig.truth("row", 1, request, position) for position in range(stop)])
        keys = torch.stack([rig.truth("key", 1, request, position) for position in range(stop)])
        got = [read_slab_rows(rig.state, 1, 2, stop, plane) for plane in range(len(rig.geometry.planes))]
        assert torch.equal(torch.cat(got, dim=1), rows)
        assert torch.equal(read_index_keys(rig.state, 1, 2, stop), keys)
        got = [
            read_slab_rows(rig.state, 1, 2, stop, plane, start=stop // 3) for plane in range(len(rig.geometry.planes))
        ]
        assert torch.equal(torch.cat(got, dim=1), rows[stop // 3 :])
        assert torch.equal(read_index_keys(rig.state, 1, 2, stop, start=stop // 3), keys[stop // 3 :])


def test_guests_have_rows_in_the_slab_and_keys_of_their_own() -> None:
    """Through tables of their own, beside a prompt of the state's: neither touches the other's rows or keys."""
    rig = Rig(groups=(0, 0, 1))
    staged_prompt(rig, 0, 64, 64)
    own = read_slab_rows(rig.state, 2, 0, 64), read_index_keys(rig.state, 1, 0, 64), rig.state.index_keys.clone()
    guest, seat = rig.state.guest(5), 4
    assert (guest.seats, rig.state.seats) == (5, 3)
    held = int(rig.state.slab_table[0, 0])
    pages = [page for page in range(guest.slab_table.shape[1]) if page != held][:2]
    guest.slab_table[seat, :2] = torch.tensor(pages, dtype=torch.int32)
    rows, keys = (torch.randint(0, 255, (100, own[it].shape[1]), dtype=torch.uint8) for it in (0, 1))
    write_slab_rows(guest, 2, seat, 0, rows)
    write_prompt_index_keys(guest, 0, seat, 0, keys)
    assert torch.equal(read_slab_rows(guest, 2, seat, 100), rows)
    assert torch.equal(read_index_keys(guest, 0, seat, 100, start=20), keys[20:])
    places = torch.tensor(pages)[torch.arange(100) // 64] * 64 + torch.arange(100) % 64
    assert torch.equal(rig.state.slab(2).rows[2, places], rows)
    assert torch.equal(read_slab_rows(rig.state, 2, 0, 64), own[0])
    assert torch.equal(rig.state.index_keys, own[2])


def test_a_layer_lies_over_the_one_two_before() -> None:
    """And the one between is left as it is."""
    rig = Rig(groups=(0, 0, 0))
    staged_prompt(rig, 0, 64, 64)
    kept = [read_slab_rows(rig.state, layer, 0, 64) for layer in (1, 2)]
    assert not torch.equal(*kept)
    write_slab_rows(rig.state, 0, 0, 0, kept[0])
    assert torch.equal(read_slab_rows(rig.state, 2, 0, 64), kept[0])
    assert torch.equal(read_slab_rows(rig.state, 1, 0, 64), kept[0])


def test_views_of_the_slab_share_all_but_rows() -> None:
    """A tensor of their own would be copied to the device amid a pass, and the host would wait for the copy."""
    state = Rig(groups=(0, 0, 1), row_bytes=12, split=5).state
    for layer in range(2):
        own = {"rows", "planes", "row_words", "dense_rows", "dense_planes", "dense_words"}
        view = vars(state.slab(layer))
        assert {name for name, value in vars(state).items() if view.get(name) is not value} - {"_slab_views"} == own
        assert view["rows"].data_ptr() == state.slab_rows[layer].data_ptr()


def test_one_layer_goes_between_slab_and_host() -> None:
    """The view that staging and refills take of a layer moves its rows alone, and with the last layer index keys."""
    rig = Rig(groups=(0, 0, 1), row_bytes=12, split=5)
    request, positions = staged_prompt(rig, 1, 100, 100), torch.arange(100)
    rows = (rig.state.slab_table[1, positions // 64] * 64 + positions % 64).expand(2, -1).contiguous()
    keys = places(rig.state.index_table, 1, positions)
    pages, offsets = rig.state.host_table[1, positions // 64].contiguous(), (positions % 64).int()
    for layer in (1, 2):
        index_row = keys if layer == 2 else None
        copy_rows_to_host(rig.state.slab(layer), rows, index_row, pages, offsets, range(layer, layer + 1))
        assert torch.equal(rig.read_host("row", layer, request, 99), rig.truth("row", layer, request, 99))
    assert (rig.read_host("row", 0, request, 99) == POISON).all()
    assert torch.equal(rig.read_host("key", 1, request, 99), rig.truth("key", 1, request, 99))
    before, kept = rig.state.rows.clone(), rig.state.slab_rows.clone()
    rig.state.slab_rows.zero_()
    for layer in (1, 2):
        copy_rows_to_device(rig.state.slab(layer), rows, None, pages, offsets, range(layer, layer + 1))
    held = [read_slab_rows(rig.state, layer, 1, 100, plane) for layer in (1, 2) for plane in (0, 1)]
    rig.state.slab_rows.copy_(kept)
    wanted = [read_slab_rows(rig.state, layer, 1, 100, plane) for layer in (1, 2) for plane in (0, 1)]
    assert all(map(torch.equal, held, wanted))
    assert torch.equal(rig.state.rows, before)


def test_ungranted_positions_trip_and_move_nothing() -> None:
    rig = Rig(groups=(0,))
    request = staged_prompt(rig, 0, 64, 64)
    before = rig.state.slab_rows.clone(), rig.state.index_keys.clone()
    rows = torch.full((3, rig.geometry.row_bytes), 9, dtype=torch.uint8)
    keys = torch.full((3, rig.geometry.index_row_bytes), 9, dtype=torch.uint8)
    write_slab_rows(rig.state, 0, 0, 63, rows)
    write_prompt_index_keys(rig.state, 0, 0, 63, keys)
    assert rig.state.tripwires.tolist() == [0, 4, 0, 0]
    changed = [
        (old != new).any(-1).nonzero().tolist()
        for old, new in zip(before, (rig.state.slab_rows, rig.state.index_keys), strict=True)
    ]
    slab, page = int(rig.state.slab_table[0, 0]), request.pages[0][0]
    assert changed == [[[0, slab * 64 + 63]], [[0, page * 64 + 63]]]
    for got in (read_slab_rows(rig.state, 0, 0, 66), read_index_keys(rig.state, 0, 0, 66)):
        assert (got[63] == 9).all()
        assert not got[64:].any()
    assert rig.state.tripwires.tolist() == [0, 8, 0, 0]
    clear_seat(rig.state, 0)
    assert not read_slab_rows(rig.state, 0, 0, 64).any()


def test_invalid_arguments_are_refused_by_name() -> None:
    rig = Rig(groups=(0,))
    rows = torch.zeros(2, rig.geometry.row_bytes, dtype=torch.uint8)
    for field, call in (
        ("slab_table", lambda: write_slab_rows(rig.state, 0, 0, 64 * 16 - 1, rows)),
        ("slab_table", lambda: write_slab_rows(rig.state, 0, 0, -1, rows)),
        ("slab_table", lambda: read_slab_rows(rig.state, 0, 0, -1)),
        ("index_table", lambda: read_index_keys(rig.state, 0, 0, 64 * 16 + 1)),
        ("seat", lambda: read_index_keys(rig.state, 0, 3, 1)),
        ("layer", lambda: write_slab_rows(rig.state, 1, 0, 0, rows)),
        ("group", lambda: read_index_keys(rig.state, -1, 0, 1)),
        ("plane", lambda: read_slab_rows(rig.state, 0, 0, 1, 1)),
    ):
        with pytest.raises(BadInput) as caught:
            call()
        assert caught.value.field == field


def test_gather_gives_zeros_for_minus_one() -> None:
    rig = Rig(groups=(0, 1), row_bytes=10)
    rig.state.rows.random_(1, 256)
    out_rows = torch.tensor([[5, -1, 7], [-1, 0, 5]], dtype=torch.int32)
    got = gather_rows(rig.state, 1, out_rows)
    assert got.shape == (2, 3, 10)
    for row in range(2):
        for column, place in enumerate(out_rows[row].tolist()):
            want = rig.state.rows[1, place] if place >= 0 else torch.zeros(10, dtype=torch.uint8)
            assert torch.equal(got[row, column], want)


def test_step_writes_reach_real_rows_only() -> None:
    rig = Rig(groups=(0, 0), batch=3)
    rig.batch.new_rows[0] = torch.tensor([9, -1, 4])
    rig.batch.new_index_rows[:] = torch.tensor([2, -1, 3])
    rows = torch.full((3, rig.geometry.row_bytes), 7, dtype=torch.uint8)
    keys = torch.full((3, rig.geometry.index_row_bytes), 7, dtype=torch.uint8)
    rig.state.rows.fill_(0)
    write_new_rows(rig.state, 1, rig.batch, rows)
    write_index_keys(rig.state, 0, rig.batch, keys)
    assert (rig.state.rows[1] == 7).all(1).nonzero().flatten().tolist() == [4, 9]
    assert not rig.state.rows[0].any()
    assert (rig.state.index_keys[0] == 7).all(1).nonzero().flatten().tolist() == [2, 3]
    with pytest.raises(BadInput, match=r"rows=uint8: got uint8\[2, 24\].*batch=3, 24"):
        write_new_rows(rig.state, 1, rig.batch, rows[:2])


def test_a_kernel_that_forms_rows_is_told_where_step_writes_store() -> None:
    rig = Rig(groups=(0, 0, 1), batch=3)
    rig.batch.new_rows[:] = torch.tensor([[9, -1, 4], [5, 8, -1]])
    rig.batch.new_index_rows[:] = torch.tensor([2, -1, 3])
    for target, held in (
        (new_rows(rig.state, 1, rig.batch), rig.state.rows[1]),
        (new_rows(rig.state, 2, rig.batch), rig.state.rows[2]),
        (new_keys(rig.state, 1, rig.batch), rig.state.index_keys[1]),
    ):
        assert target.rows.data_ptr() == held.data_ptr()
        assert target.rows.is_contiguous()
        assert target.rows.shape == held.shape
    assert new_rows(rig.state, 1, rig.batch).places.tolist() == [9, -1, 4]
    assert new_rows(rig.state, 2, rig.batch).places.tolist() == [5, 8, -1]
    assert new_keys(rig.state, 0, rig.batch).places.tolist() == [2, -1, 3]


def test_sizes_bind_on_first_use_and_a_mismatch_is_named() -> None:
    sizes = Sizes(heads=2)
    sizes.check("a", torch.zeros(3, 2), ("batch", "heads"), torch.float32)
    assert sizes["batch"] == 3
    for tensor, message in (
        (torch.zeros(4, 2), r"b=float32: got float32\[4, 2\] contiguous on cpu, expected float32\[batch=3, heads=2\]"),
        (torch.zeros(3, 2, dtype=torch.int64), r"b=int64: got int64\[3, 2\]"),
        (torch.zeros(2, 3).t(), r"strided \(1, 3\)"),
        (torch.zeros(3), r"float32\[3\]"),
        (torch.zeros(3, 2, device="meta"), r"on meta, expected .* on cpu"),
    ):
        with pytest.raises(BadInput, match=message):
            sizes.check("b", tensor, ("batch", "heads"), torch.float32)
