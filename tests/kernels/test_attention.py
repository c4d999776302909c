"""attend_rows for Hopper without a GPU: the kernel's own source, emulated with its products, against the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.attention import attend_rows
from kernels.cuda import attention as room
from kernels.cuda.attention import Cut
from kernels.row_bytes import KINDS
from protocol.errors import BadInput
from tests.emulated.device import COMPILER, Device
from tests.support.attention_rig import Case

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

BOUND = 2.0**-7


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    room._hopper_kernel.cache_clear()
    with Device(seed=3).installed() as device:
        yield device
    room._hopper_kernel.cache_clear()


def case_of(kind: str, *, sinks: bool = False, **shape: int) -> Case:
    return Case(kind, torch.bfloat16, latent=512, rope=64, sinks=sinks, **shape)


def run(case: Case, splits: int, together: int = 0) -> Tensor:
    """Attend in pairs of blocks that take as many heads as there are up to 128, or `together`."""
    case.out.fill_(float("nan"))
    cut = Cut(together or (64 if case.queries.shape[1] <= 64 else 128), splits)
    given = (case.state, 1, case.form, case.queries, case.out_rows, case.scaling, case.out, case.sinks)
    room._attend_on_hopper(*given, cut)
    return case.out.clone()


@pytest.mark.parametrize(
    ("kind", "splits", "shape"),
    [
        ("bfloat16", 1, {"heads": 64, "k": 600, "batch": 2}),  # both groups come back to each of their stages
        ("bfloat16", 1, {"heads": 128, "k": 300, "batch": 2}),
        ("bfloat16", 2, {"heads": 72, "k": 150, "batch": 1}),
        ("fp8", 1, {"heads": 64, "k": 50, "batch": 3}),  # one group has nothing
        ("fp8", 3, {"heads": 64, "k": 330, "batch": 1}),
        ("fp8", 1, {"heads": 128, "k": 300, "batch": 2}),
        ("fp8", 1, {"heads": 128, "k": 60, "batch": 1}),  # one turn
        ("fp8", 3, {"heads": 192, "k": 290, "batch": 1}),
        ("fp4", 1, {"heads": 64, "k": 600, "batch": 2}),
        ("fp4", 3, {"heads": 24, "k": 330, "batch": 1}),
        ("fp4", 1, {"heads": 128, "k": 300, "batch": 2}),
        ("fp4", 2, {"heads": 192, "k": 290, "batch": 1}),
    ],
    ids=str,
)
def test_attention_is_that_of_the_definition(kind: str, splits: int, shape: dict[str, int]) -> None:
    case = case_of(kind, **shape)
    torch.testing.assert_close(run(case, splits).double(), case.expected(1), rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(
    ("kind", "splits", "shape"),
    [
        ("bfloat16", 1, {"heads": 64, "k": 150, "batch": 2}),  # groups add up their rows
        ("fp8", 3, {"heads": 64, "k": 330, "batch": 1}),
        ("fp8", 1, {"heads": 128, "k": 100, "batch": 2}),  # a group has the whole result
        ("bfloat16", 2, {"heads": 72, "k": 150, "batch": 1}),
        ("fp4", 1, {"heads": 128, "k": 100, "batch": 2}),
    ],
    ids=str,
)
def test_a_sink_counts_once_and_adds_no_row(kind: str, splits: int, shape: dict[str, int]) -> None:
    """However many parts a result has; the last batch row holds nothing where there are two."""
    case = case_of(kind, sinks=True, **shape)
    torch.testing.assert_close(run(case, splits).double(), case.expected(1), rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(("kind", "splits", "heads"), [("fp8", 1, 128), ("bfloat16", 2, 72)])
def test_sinks_of_nothing_leave_every_bit_and_high_ones_leave_nothing(kind: str, splits: int, heads: int) -> None:
    case = case_of(kind, heads=heads, k=150, batch=1)
    without = run(case, splits)
    case.sinks = torch.full((heads,), -torch.inf)
    case.sinks[1::2] = 1e4
    out = run(case, splits)
    assert torch.equal(out[:, ::2], without[:, ::2])
    assert without[0].all()
    assert not out[:, 1::2].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_has_sinks_too(kind: str, dtype: torch.dtype) -> None:
    case = Case(kind, dtype, sinks=True)
    attend_rows(case.state, 1, case.queries, case.out_rows, case.scaling, case.out, case.sinks)
    bound = 1e-5 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(case.out.double(), case.expected(1), rtol=bound, atol=bound)


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(4).double(), torch.zeros(8)[::2]])
def test_sinks_that_are_not_a_logit_a_head_are_refused(wrong: Tensor) -> None:
    case = Case("bfloat16", torch.bfloat16)
    with pytest.raises(BadInput, match="sinks"):
        attend_rows(case.state, 1, case.queries, case.out_rows, case.scaling, case.out, wrong)
    assert case.out.isnan().all()


def test_two_pairs_share_the_heads_of_a_row() -> None:
    case = case_of("fp8", heads=128, k=100, batch=2)
    torch.testing.assert_close(run(case, 1, together=64).double(), case.expected(1), rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(("heads", "falling"), [(64, False), (128, True), (128, False)])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp4"])
def test_levels_move_in_every_block(kind: str, heads: int, falling: bool) -> None:
    """Entries in the order of one head's scores, which are far apart. Products are of rows rounded to bfloat16."""
    case = case_of(kind, heads=heads, k=400, batch=2, stored=600)
    case.queries *= 30
    case.sort_entries(0, 5, falling=falling)
    expected = case.expected(1, torch.bfloat16)
    torch.testing.assert_close(run(case, 1).double(), expected, rtol=2 * BOUND, atol=2 * BOUND)


def test_a_result_does_not_show_its_place() -> None:
    case = case_of("fp8", heads=64, k=200, batch=3, stored=600)
    together = run(case, 1)
    for row in range(3):
        alone = case_of("fp8", heads=64, k=200, batch=3, stored=600)
        alone.queries, alone.out_rows = (
            case.queries[row : row + 1].contiguous(),
            case.out_rows[row : row + 1].contiguous(),
        )
        alone.out = torch.empty_like(together[:1])
        assert torch.equal(run(alone, 1)[0], together[row])


def test_every_code_under_every_scale_is_multiplied_exactly() -> None:
    """Rows of four bits of all bytes: of one row alone the result is its latents, each of which is a bfloat16."""
    case = case_of("fp4", heads=64, k=7, batch=16, stored=64)
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (64, case.form.row_bytes), generator=draw, dtype=torch.uint8)
    rows[:, 256:288] = torch.arange(64 * 32).view(64, 32) % 127  # scales are not negative, and numbers
    rows[:, 288:] &= 0xBF  # no score is beyond float32
    case.state.rows[1, 64:128] = rows
    case.queries *= 1e-3
    case.out_rows.fill_(-1)
    for row in range(16):
        case.out_rows[row, row % 7] = 64 + row
    wanted = case.form.decode(rows[:16])[:, :512]
    assert torch.equal(wanted, wanted.bfloat16().float())
    assert len(set(rows[:16, 256:288].flatten().tolist())) == 127
    assert torch.equal(run(case, 1).float(), wanted.unsqueeze(1).expand(-1, 64, -1))


def test_a_scale_that_is_no_number_makes_its_latents_so() -> None:
    case = case_of("fp4", heads=64, k=5, batch=1, stored=64)
    case.state.rows[1, 70, 256 + 9] = 0x7F
    case.out_rows.fill_(-1)
    case.out_rows[0, 2] = 70
    assert run(case, 1).isnan().all(), "its score is none"


@pytest.mark.parametrize(
    ("shape", "dtype", "capability"),
    [((512, 64), torch.bfloat16, (10, 0)), ((512, 64), torch.float32, (9, 0)), ((128, 32), torch.bfloat16, (9, 0))],
)
def test_rows_of_four_bits_that_no_kernel_reads_are_refused(
    shape: tuple[int, int], dtype: torch.dtype, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    case = Case("fp4", dtype, latent=shape[0], rope=shape[1])
    with pytest.raises(BadInput, match=r"rows=fp4.*keep them in fp8"):
        room.prepare_attention(case.state, 64, case.form, dtype, sinks=False)


def test_rows_of_four_bits_have_one_kernel_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    case = case_of("fp4", heads=24, k=70, batch=1)
    room.prepare_attention(case.state, 24, case.form, torch.bfloat16, sinks=False)
    given = (case.state, 1, case.queries, case.out_rows, case.scaling, case.out)
    room.attend_rows(*given)
    torch.testing.assert_close(case.out.double(), case.expected(1), rtol=BOUND, atol=BOUND)
