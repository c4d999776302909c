"""index_topk on the GPU: scores near float64, the selection exact for the kernel's own scores, equal to the reference
where arithmetic is exact.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda.bindings import driver  # noqa: E402

from kernels.begin_step import begin_step  # noqa: E402
from kernels.cuda.jit import Kernel, compile_source  # noqa: E402
from kernels.index_topk import index_topk, prepare_index  # noqa: E402
from kernels.reference.index_topk import index_topk as reference_topk  # noqa: E402
from kernels.reference.index_topk import top_positions  # noqa: E402
from kernels.state import BackupPlan, StepBatch, Tripwire  # noqa: E402
from protocol.units import PAGE_TOKENS  # noqa: E402
from tests.gpu.index_bench import SCALE, IndexBench  # noqa: E402
from tests.gpu.syncs import no_syncs  # noqa: E402

EXAMPLES = int(os.environ.get("GPU_TEST_EXAMPLES", "100"))
SMALL = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
LIMITS = settings(max_examples=max(4, EXAMPLES // 25), deadline=None, suppress_health_check=list(HealthCheck))
KINDS = [("bfloat16", torch.bfloat16), ("fp8", torch.bfloat16), ("float32", torch.float32), ("fp8", torch.float32)]


@SMALL
@given(
    lengths=st.lists(st.integers(1, 700) | st.sampled_from([63, 64, 65, 128, 1024, 1025]), min_size=1, max_size=6),
    kinds=st.sampled_from(KINDS),
    shape=st.sampled_from([(1, 32), (4, 32), (12, 64), (9, 96), (64, 128)]),
    k=st.sampled_from([1, 2, 31, 64, 128, 300]),
    padding=st.integers(0, 3),
    ids=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_scores_and_selection(
    lengths: list[int],
    kinds: tuple[str, torch.dtype],
    shape: tuple[int, int],
    k: int,
    padding: int,
    ids: torch.dtype,
    seed: int,
) -> None:
    heads, dim = shape
    bench = IndexBench(
        lengths, kind=kinds[0], dtype=kinds[1], heads=heads, dim=dim, k=k, padding=padding, ids=ids, seed=seed
    )
    bench.check()


@SMALL
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=6),
    kinds=st.sampled_from(KINDS),
    k=st.sampled_from([1, 7, 64, 128]),
    seed=st.integers(0, 2**32),
)
def test_reference_selects_alike_where_arithmetic_is_exact(
    lengths: list[int], kinds: tuple[str, torch.dtype], k: int, seed: int
) -> None:
    """Small integers: few different scores, so that ties decide most of the selection."""
    bench = IndexBench(lengths, kind=kinds[0], dtype=kinds[1], k=k, padding=1, seed=seed, exact=True)
    out = bench.run()
    want = torch.empty_like(out)
    reference_topk(bench.state, 1, bench.queries, bench.weights, bench.batch, bench.form, SCALE, want)
    assert out.tolist() == want.tolist()


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="Hopper alone reads keys in fp4")
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("lengths", [[1, 65, 700, 449], [32_768] * 16, [131_072, 4097], [300_001, 70_000]], ids=str)
def test_keys_of_four_bits(lengths: list[int], heads: int) -> None:
    IndexBench(lengths, kind="fp4", heads=heads, dim=128, k=min(2048, 8 * max(lengths) // 100), seed=heads).check()
    bench = IndexBench(lengths, kind="fp4", heads=heads, dim=128, k=64, seed=heads, exact=True)
    out = bench.run()
    want = torch.empty_like(out)
    reference_topk(bench.state, 1, bench.queries, bench.weights, bench.batch, bench.form, SCALE, want)
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize("kinds", KINDS[:3])
@pytest.mark.parametrize("k", [64, 65, 128])
def test_every_length_around_k_and_pages(kinds: tuple[str, torch.dtype], k: int) -> None:
    IndexBench(list(range(1, k + 20)), kind=kinds[0], dtype=kinds[1], k=k).check()


@LIMITS
@given(
    lengths=st.sampled_from([[1_048_576], [300_001, 2049, 70_000, 2048], [32_768] * 64, [5000] * 200, [131_072, 4097]]),
    kind=st.sampled_from(["bfloat16", "fp8"]),
    k=st.sampled_from([2048, 4096]),
    seed=st.integers(0, 2**32),
)
def test_real_dimensions_and_long_contexts(lengths: list[int], kind: str, k: int, seed: int) -> None:
    IndexBench(lengths, kind=kind, heads=64, dim=128, k=k, seed=seed).check()


@pytest.mark.parametrize("length", [5000, 300_000])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_scores_give_the_first_positions(length: int, value: float) -> None:
    """Every position is an edge: more than the list holds, in more than one window of the bitmap."""
    bench = IndexBench([length], k=2048, seed=1)
    bench.state.index_keys[1].copy_(bench.form.encode(torch.full((1, 32), value, device="cuda")))
    bench.weights.fill_(1.0)
    assert bench.run()[0].tolist() == list(range(2048))
    bench.check()


@pytest.mark.parametrize("spread", [1e-6, 1e-3])
def test_scores_crowded_into_a_bin(spread: float) -> None:
    """Different in the last bits alone: both refining passes, over a list that overflowed."""
    bench = IndexBench([200_000], kind="float32", dtype=torch.float32, k=2048, seed=2)
    values = 1 + spread * torch.rand(bench.state.index_keys.shape[1], 32, device="cuda")
    bench.state.index_keys[1].copy_(bench.form.encode(values))
    bench.queries.fill_(1.0)
    bench.weights.fill_(1.0)
    bench.check()


@pytest.mark.parametrize("kinds", KINDS)
def test_infinities_and_nan_have_their_places(kinds: tuple[str, torch.dtype]) -> None:
    """NaN is chosen last of all, after -inf; +inf first."""
    bench = IndexBench([400], kind=kinds[0], dtype=kinds[1], k=390, seed=3)
    bench.weights[:, ::2] = 0.5
    bench.weights[:, 1::2] = -1.5
    row = bench.state.index_table[bench.seats[0]].long().repeat_interleave(64) * 64
    row += torch.arange(64, device="cuda").repeat(len(row) // 64)
    values = bench.keys(0)[:12]
    values[:4], values[4:8, 3], values[8:12, 5] = torch.nan, torch.inf, -torch.inf
    if kinds[0] == "fp8":
        encoded = bench.form.encode(torch.ones(12, 32, device="cuda"))
        encoded[:4, 7] = 0x7F  # NaN as a value, not as a scale
        encoded[4:12, 32:] = torch.tensor([torch.inf], device="cuda").view(torch.uint8)
    else:
        encoded = bench.form.encode(values)
    bench.state.index_keys[1, row[:12]] = encoded
    out = bench.run()[0]
    (scores,) = bench.scores()
    assert scores is not None
    assert bool(scores[:4].isnan().all())
    assert bool((~scores[4:12].isfinite()).all())
    assert out.tolist() == top_positions(scores, 390).tolist()


def test_a_row_does_not_depend_on_neighbours_or_place() -> None:
    """Bit for bit: scores and selection alone in the batch, first of many and last of many."""
    many = IndexBench([70_001, 9000, 2500, 33_000, 8191, 70_001], heads=64, dim=128, k=2048, seed=4)
    out, scores = many.run(), many.scores()
    for row in range(len(many.lengths)):
        alone, lengths = IndexBench([many.lengths[row]], heads=64, dim=128, k=2048, seed=5), many.batch.lengths
        alone.state, alone.queries, alone.weights = many.state, many.queries[row : row + 1], many.weights[row : row + 1]
        alone.batch.seats, alone.batch.lengths = many.batch.seats[row : row + 1], lengths[row : row + 1]
        assert torch.equal(alone.run()[0], out[row])
        (got,), want = alone.scores(), scores[row]
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


def test_draft_rows_select_as_if_alone() -> None:
    """Bit for bit, each below its own length; a seat whose grant ends has fewer rows, and padding has none."""
    bench = IndexBench([70_001, 9000, 700], heads=64, dim=128, k=2048, padding=1, seed=8)
    state = replace(bench.state, seat_rows=5)
    state.granted_rows[bench.seats[1]] = 9001
    batch = StepBatch.allocate(20, 2, "cuda", seat_rows=5)
    batch.seats[:4], batch.lengths[:4] = bench.batch.seats, bench.batch.lengths
    batch.num_real.fill_(3)
    begin_step(state, batch, BackupPlan.allocate(20, 2, "cuda"))
    queries, weights = bench.draw(False, 20, 64, 128).bfloat16(), bench.draw(False, 20, 64)
    out = torch.full((20, 2048), 777, dtype=torch.int32, device="cuda")
    index_topk(state, 1, queries, weights, batch, SCALE, out)
    for depth, rows in enumerate(batch.depths()):
        bench.queries, bench.weights = queries[rows], weights[rows]
        bench.batch.lengths[:3] = torch.tensor([70_001, 9000, 700], device="cuda") + depth
        want = bench.run()
        held = [0, 1, 2] if depth < 2 else [0, 2]
        assert torch.equal(out[rows][held], want[held])
        assert bool((out[rows][[place for place in range(4) if place not in held]] == -1).all())


@pytest.mark.parametrize("length", [50, 500, 5000])
def test_partly_granted_context_trips(length: int) -> None:
    """Rows beside it are whole; a page that does not exist is refused like one not granted."""
    bench = IndexBench([length, 3000, length], k=64)
    seats, pages = bench.seats.tolist(), bench.state.index_keys.shape[1] // PAGE_TOKENS
    want = bench.run()
    for bad in (-1, pages, 2**31 - 1):
        kept = bench.state.index_table.clone()
        bench.state.index_table[seats[0], (length - 1) // 64] = bad
        bench.state.tripwires.zero_()
        out = bench.run()
        assert bool((out[0] == -1).all())
        assert torch.equal(out[1:], want[1:])
        assert int(bench.state.tripwires[Tripwire.UNGRANTED]) == 1
        bench.state.index_table.copy_(kept)
    bench.batch.lengths[0] = 64 * bench.state.index_table.shape[1] + 1
    assert bool((bench.run()[0] == -1).all())
    assert int(bench.state.tripwires[Tripwire.UNGRANTED]) == 2
    bench.batch.lengths[0], bench.state.tripwires[:] = length, 0
    bench.check()


def test_rows_that_do_not_decode_are_padding() -> None:
    bench = IndexBench([500, 600, 700], k=64)
    bench.batch.seats[0], bench.batch.lengths[1] = 99, 0
    bench.state.hot_slots[bench.seats[2]] = -1
    assert bool((bench.run() == -1).all())
    assert not bench.state.tripwires.any()


def test_graphs_follow_lengths_and_never_wait() -> None:
    """One graph, lengths from 1 to the table's end: as without it."""
    bench = IndexBench([40_000, 3000, 2100], heads=64, dim=128, k=2048, padding=1, seed=6)
    prepare_index(bench.state, 64, 128, torch.bfloat16)
    out = torch.empty(4, 2048, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_syncs(), torch.cuda.graph(graph):
        index_topk(bench.state, 1, bench.queries, bench.weights, bench.batch, SCALE, out)
    for lengths in ([40_000, 3000, 2100], [1, 2048, 2049], [2050, 1, 64], [39_999, 2999, 2099]):
        bench.lengths = lengths
        bench.batch.lengths[:3] = torch.tensor(lengths, device="cuda")
        out.fill_(777)
        graph.replay()
        assert torch.equal(out, bench.run())
        bench.check()


LATE: Final = """
struct Late { int* to; const int* from; int count; };
extern "C" __global__ void write_late(const __grid_constant__ Late p) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const long long begin = clock64();
    while (clock64() - begin < 60000) {}
    if (threadIdx.x < p.count) p.to[threadIdx.x] = p.from[threadIdx.x];
}
"""


class Late(ctypes.Structure):
    _fields_ = (("to", ctypes.c_uint64), ("source", ctypes.c_uint64), ("count", ctypes.c_int32))


def write_late(to: torch.Tensor, meanwhile: int) -> torch.Tensor:
    """Launch a kernel that lets the next one begin, and some 30 us later writes to `to` what that held; `meanwhile` is
    there until then. Returns the source, to be kept."""
    cubin = compile_source(LATE, "write_late", (), "sm_90").cubin
    torch.cuda.synchronize()
    kernel = Kernel(driver.cuModuleLoadData(cubin)[1], "write_late")
    held = to.clone()
    to.fill_(meanwhile)
    torch.cuda.synchronize()
    block = Late(to.data_ptr(), held.data_ptr(), to.numel())
    kernel.launch((1, 1), block, torch.cuda.current_stream().cuda_stream, threads=512)
    return held


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="launches begin early on Hopper alone")
@pytest.mark.parametrize("lengths", [[8192], [9000, 100, 33_001, 2049, 5000]])
def test_what_the_kernel_ahead_writes_late_counts(lengths: list[int]) -> None:
    """Lengths, the number of rows, hot slots and the table are read while the kernel ahead still writes them."""
    bench = IndexBench(lengths, kind="fp8", heads=64, dim=128, k=2048)
    bench.check()
    for to, meanwhile in (
        (bench.batch.lengths, 3000),
        (bench.batch.num_real, 0),
        (bench.state.hot_slots, -1),
        (bench.state.index_table.view(-1)[:512], 0),
    ):
        held = write_late(to, meanwhile)
        bench.check()
        assert to.tolist() == held.tolist()
