"""index_topk for Hopper without a GPU: both kernels' sources, emulated with their products, against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cuda import index_topk as room
from kernels.cuda.index_topk import HOPPER
from kernels.layout import Geometry
from kernels.reference import index_topk as reference
from kernels.row_format import index_key_format
from kernels.state import DeviceState, StepBatch, Tripwire
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS
from tests.emulated.device import COMPILER, Device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SEATS, PAGES, TOPK, DIM, SCALE = 3, 12, 100, 128, 0.25
FORMS = {kind: index_key_format(kind, DIM) for kind in ("fp8", "fp4")}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    room._kernels.cache_clear()
    monkeypatch.setattr(room, "_arch", lambda device: HOPPER)
    with Device(seed=6).installed() as here:
        yield here
    room._kernels.cache_clear()


class Case:
    """Keys float32[SEATS * PAGES * 64, DIM] in pages that are scattered over the seats, each of which has one row of
    `lengths`."""

    def __init__(self, kind: str, heads: int, keys: Tensor, lengths: tuple[int, ...]) -> None:
        self.form = FORMS[kind]
        geometry = Geometry(1, 8, (0,), self.form.row_bytes, TOPK)
        sizes = {"seats": SEATS, "chunks": SEATS, "index_pages": SEATS * PAGES, "max_pages": PAGES}
        host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
        self.state = DeviceState.allocate(geometry, slab_pages=1, max_chunks=1, tail_slots=1, host=host, **sizes)
        self.state.index_keys[0] = self.form.encode(keys)
        self.state.index_table.copy_(torch.randperm(SEATS * PAGES).view(SEATS, PAGES))
        self.state.hot_slots.fill_(64)
        self.batch = StepBatch.allocate(len(lengths), 1, "cpu", decodes=False)
        self.batch.seats.copy_(torch.arange(len(lengths)))
        self.batch.lengths.copy_(torch.tensor(lengths))
        self.batch.num_real.fill_(len(lengths))
        self.queries = torch.zeros(len(lengths), heads, DIM)
        self.weights = torch.randint(-3, 4, (len(lengths), heads)).float()

    def select(self, kernels: object) -> Tensor:
        out = torch.full((len(self.queries), TOPK), 99, dtype=torch.int32)
        given = self.state, 0, self.queries.bfloat16(), self.weights, self.batch, self.form, SCALE, out
        kernels.index_topk(*given)  # type: ignore[attr-defined]
        return out

    def scores(self, row: int) -> Tensor:
        """Those that the last selection was made from."""
        lengths = [int(length) for length in self.batch.lengths]
        before = sum(-(-length // 16) * 16 for length in lengths[:row] if length > TOPK)
        return room.scratch_of(self.state).scores[before : before + lengths[row]].clone()

    def exact(self, row: int) -> Tensor:
        """Scores float32[length] by the definition."""
        held = reference.row_keys(self.state, 0, row, int(self.batch.lengths[row]))
        assert held is not None
        return reference.index_scores(self.queries[row], self.weights[row], self.form.decode(held), SCALE)


def whole() -> Tensor:
    """Small whole numbers: products and sums are exact in any order, and often equal."""
    values = torch.randint(-3, 4, (SEATS * PAGES * PAGE_TOKENS, DIM)).float()
    values[..., 0] = 3.5  # the scale of fp8 is a power of two
    return values


@pytest.mark.parametrize(("kind", "heads"), [("fp4", 64), ("fp4", 32), ("fp8", 64)])
def test_each_row_selects_as_the_reference(kind: str, heads: int) -> None:
    torch.manual_seed(heads)
    case = Case(kind, heads, whole(), (700, 90, 449))
    case.queries.copy_(torch.randint(-3, 4, case.queries.shape))
    assert torch.equal(case.select(room), case.select(reference))
    for row in (0, 2):
        assert torch.equal(case.scores(row), case.exact(row))
    assert not case.state.tripwires.any()


def test_scales_of_a_key_count_for_their_own_values() -> None:
    """Groups of one key differ by up to 2**11, keys by 2**60; queries have two values in each group, so that sums of
    what is as far apart are exact."""
    torch.manual_seed(1)
    sizes = torch.exp2(torch.randint(-5, 7, (SEATS * PAGES * PAGE_TOKENS, 4)).float())
    sizes *= torch.exp2(torch.randint(-30, 30, (len(sizes), 1)).float())
    case = Case("fp4", 32, (whole().unflatten(-1, (4, 32)) * sizes.unsqueeze(-1)).flatten(1), (700,))
    case.queries[..., ::16] = torch.randint(-1, 2, case.queries[..., ::16].shape).float()
    case.select(room)
    torch.testing.assert_close(case.scores(0), case.exact(0), rtol=1e-5, atol=0.0)


def test_a_group_far_below_the_largest_adds_nothing() -> None:
    """Values below 2**-11 of the key's largest are 0, as the kernel says."""
    keys = torch.zeros(SEATS * PAGES * PAGE_TOKENS, DIM)
    keys[:, 0], keys[:, 33], keys[:, 65], keys[:, 97] = 4.0, 4 * 2.0**-11, 4 * 2.0**-12, 4 * 2.0**-40
    case = Case("fp4", 32, keys, (200,))
    case.queries[..., 33], case.queries[..., 65], case.queries[..., 97] = 1.0, 1.0, 1.0
    case.weights.fill_(1.0)
    case.select(room)
    assert torch.equal(case.scores(0), torch.full((200,), 32 * SCALE * 4 * 2.0**-11))


def test_keys_that_are_no_number_come_last() -> None:
    torch.manual_seed(2)
    keys = whole()
    keys[::3, 40], keys[1::3, 100] = torch.nan, torch.inf
    case = Case("fp4", 64, keys, (299, 240))
    case.queries.copy_(torch.randint(-3, 4, case.queries.shape))
    assert torch.equal(case.select(room), case.select(reference))
    assert torch.equal(case.scores(0).isnan(), case.exact(0).isnan())


def test_values_of_any_size_give_nearly_the_best_scores() -> None:
    """Queries are rounded to e4m3: each of the chosen scores is near to one of the best."""
    torch.manual_seed(3)
    case = Case("fp4", 64, torch.randn(SEATS * PAGES * PAGE_TOKENS, DIM), (700, 650))
    case.queries.copy_(torch.randn(case.queries.shape).bfloat16())
    case.weights.copy_(torch.rand(case.weights.shape))
    found, best = case.select(room), case.select(reference)
    for row in range(2):
        exact = case.exact(row)
        torch.testing.assert_close(case.scores(row), exact, rtol=2.0**-4, atol=0.0)
        assert float(exact[found[row].long()].sum()) >= 0.999 * float(exact[best[row].long()].sum())


def test_a_page_that_is_not_granted_selects_nothing_and_trips() -> None:
    torch.manual_seed(4)
    case = Case("fp4", 32, whole(), (700, 700))
    case.state.index_table[1, 5] = -1
    case.queries.copy_(torch.randint(-3, 4, case.queries.shape))
    out = case.select(room)
    assert (out[1] == -1).all()
    assert torch.equal(out[0], case.select(reference)[0])
    assert int(case.state.tripwires[Tripwire.UNGRANTED]) == 2, "of the kernel and of the reference"


@pytest.mark.parametrize(
    ("arch", "heads", "dtype"),
    [(80, 64, torch.bfloat16), (100, 64, torch.bfloat16), (90, 16, torch.bfloat16), (90, 64, torch.float32)],
)
def test_fp4_keys_of_others_are_refused(
    arch: int, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_arch", lambda device: arch)
    case = Case("fp4", heads, whole(), (200,))
    with pytest.raises(BadInput, match="keep them in fp8") as caught:
        room.prepare_index(case.state, heads, case.form, dtype)
    assert (caught.value.field, caught.value.value) == ("index keys", "fp4")
