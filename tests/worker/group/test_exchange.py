"""A mixture over ranks is the mixture of one process, whatever place its rows and experts have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.block_fp8 import quantize_rows
from kernels.cuda.quantize import Codes
from kernels.routing import add_parts
from protocol.errors import ConfigError
from tests.support.limits import HANG_LIMIT_S
from tests.support.thread_ranks import ThreadCollectives
from worker.group import exchange as exchange_module
from worker.group.exchange import Alike, Exchange, require_alike
from worker.weights.layout import ExpertShare
from worker.weights.matmul import DECODED, Matmul

#: A row chooses experts of each of three ranks: the sum of two parts is the same in any order.
HIDDEN, CHOICES, EXPERTS = 24, 6, 12


WEIGHTS = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5


def experts_of(share: ExpertShare, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Rows one by one, in float32: a result depends on its row alone."""

    def compute(hidden: Tensor, chosen: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(hidden)
        for row, (ids, scales) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            parts = [
                scale * (WEIGHTS[expert] @ hidden[row].float())
                for expert, scale in zip(ids, scales, strict=True)
                if expert in share
            ]
            out[row] = sum(parts, torch.zeros(HIDDEN)).to(dtype)
        return out

    return compute


def rows_of(count: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(count)] or [
        torch.zeros(CHOICES, dtype=torch.long)
    ])[:count]  # fmt: skip
    return hidden, chosen, torch.rand(count, CHOICES, generator=generator)


def mixed(
    counts: list[int], rows: int, dtype: torch.dtype, *, deterministic: bool, seeds: list[int] | None = None
) -> list[Tensor]:
    size = len(counts)
    collectives = ThreadCollectives.of(size)
    found: list[Tensor] = [torch.empty(0)] * size

    def run(rank: int) -> None:
        exchange = Exchange(
            collectives[rank],
            hidden=HIDDEN,
            choices=CHOICES,
            rows_max=rows + 3,
            dtype=dtype,
            device="cpu",
            deterministic=deterministic,
        )
        share = ExpertShare.of(rank, size, EXPERTS)
        for _ in range(2):  # the second round finds the first one's bytes in its buffers
            given = rows_of(counts[rank], (seeds or list(range(size)))[rank], dtype)
            found[rank] = add_parts(exchange.parts(*given, rows, experts_of(share, dtype)), dtype)

    on_threads(run, size)
    return found


def on_threads(run: Callable[[int], None], size: int) -> None:
    """Run each rank in a thread of its own."""
    with ThreadPoolExecutor(size) as threads:
        for done in [threads.submit(run, rank) for rank in range(size)]:
            done.result(HANG_LIMIT_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[4], [4, 0], [1, 4, 2], [0, 0, 4, 4]])
def test_rows_get_the_sum_over_all_experts(counts: list[int], dtype: torch.dtype) -> None:
    whole = experts_of(ExpertShare(0, EXPERTS), torch.float32)
    for deterministic in (False, True):
        for rank, output in enumerate(mixed(counts, 5, dtype, deterministic=deterministic)):
            hidden, chosen, weights = rows_of(counts[rank], rank, dtype)
            assert output.dtype == dtype
            assert output.shape == (counts[rank], HIDDEN)
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(output.float(), whole(hidden.float(), chosen, weights), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_neither_the_rank_nor_the_rows_of_other_ranks(dtype: torch.dtype) -> None:
    """In float32: rounding to fewer bits would hide another order of additions."""
    alone = mixed([3, 0, 0], 5, dtype, deterministic=True, seeds=[9, 1, 2])[0]
    beside = mixed([5, 2, 3], 5, dtype, deterministic=True, seeds=[4, 5, 9])[2]
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("piece_rows", [1, 5, 7, 10, 15, 4_096])
def test_pieces_cover_all_rows_once(piece_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mixed([5, 2, 3], 5, torch.float32, deterministic=False)
    monkeypatch.setattr(exchange_module, "PIECE_ROWS", piece_rows)
    for output, whole in zip(mixed([5, 2, 3], 5, torch.float32, deterministic=False), expected, strict=True):
        assert torch.equal(output, whole)


@pytest.mark.parametrize(("deterministic", "pieces"), [(False, [15]), (True, [5, 5, 5])])
def test_experts_that_bound_their_memory_take_all_rows_at_once(
    deterministic: bool, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for deterministic ones, whose rows must not depend on other ranks."""
    monkeypatch.setattr(exchange_module, "PIECE_ROWS", 5)
    seen: list[int] = []
    form = {"hidden": 8, "choices": 2, "rows_max": 5, "dtype": torch.float32, "device": "cpu", "matmul": DECODED}
    exchange = Exchange(Alike(0, 3), deterministic=deterministic, **form)  # type: ignore[arg-type]

    def experts(hidden: Tensor, chosen: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        seen.append(len(hidden))
        return hidden

    exchange.parts(torch.ones(5, 8), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2), 5, experts)
    assert seen == pieces


@pytest.mark.parametrize("counts", [[4, 1, 0], [5, 2, 3]])
def test_rows_for_experts_that_quantize_travel_quantized(counts: list[int]) -> None:
    """They reach them as they would have been quantized there."""
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    for seen, matmul in zip(found, (None, Matmul("fake", powers=True)), strict=True):
        collectives = ThreadCollectives.of(3)

        def run(
            rank: int, matmul: Matmul | None = matmul, seen: list[tuple[Tensor, ...]] = seen, all_=collectives
        ) -> None:
            form = {"hidden": 256, "choices": CHOICES, "rows_max": 6, "dtype": torch.bfloat16, "device": "cpu"}
            exchange = Exchange(all_[rank], deterministic=False, matmul=matmul, **form)  # type: ignore[arg-type]
            generator = torch.Generator().manual_seed(rank)
            hidden = torch.randn(counts[rank], 256, generator=generator).bfloat16()
            chosen = torch.randint(0, EXPERTS, (counts[rank], CHOICES), generator=generator)

            def experts(rows: Tensor | Codes, chosen: Tensor, weights: Tensor, out: Tensor) -> Tensor:
                real = chosen[:, 0] >= 0
                values, scales, *_ = rows if isinstance(rows, Codes) else quantize_rows(rows, powers=True)
                if rank == 1:
                    seen.append((values[real].float(), scales[real], chosen[real], weights[real]))
                return torch.zeros_like(out)

            exchange.parts(hidden, chosen, torch.rand(counts[rank], CHOICES, generator=generator), 5, experts)
            assert (exchange.row_dtype == torch.float8_e4m3fn) == (matmul is not None)

        on_threads(run, 3)
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert len(found[0]) == 1
    assert len(found[0][0][0]) == sum(counts)


@pytest.mark.parametrize("others", ["", "deep_gemm 0.2"])
def test_ranks_that_came_to_other_products_are_named(others: str) -> None:
    own, collectives, refused = Matmul("deep_gemm 0.1", powers=True), ThreadCollectives.of(3), list[str]()

    def run(rank: int) -> None:
        try:
            require_alike(collectives[rank], Matmul(others, True) if rank == 1 else own, torch.device("cpu"))
        except ConfigError as problem:
            refused.append(f"{rank} {problem}")

    on_threads(run, 3)
    assert sorted(it[0] for it in refused) == ["0", "1", "2"]
    assert "came to w8a8 by deep_gemm 0.1 here, and to other products on rank 1 " in min(refused)
    assert "on rank 0, 2" in sorted(refused)[1]


def test_ranks_that_came_to_the_same_products_go_on() -> None:
    collectives = ThreadCollectives.of(2)
    on_threads(lambda rank: require_alike(collectives[rank], DECODED, torch.device("cpu")), 2)


def test_padding_chose_no_expert_and_the_worst_routing_fits() -> None:
    """All rows of all ranks to one rank's experts, and every other place of a round is expert -1."""
    seen: list[Tensor] = []
    exchange = Exchange(
        Alike(0, 2), hidden=8, choices=2, rows_max=4, dtype=torch.float32, device="cpu", deterministic=False
    )

    def experts(hidden: Tensor, chosen: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        seen.append(chosen.clone())
        return hidden * weights.sum(1, keepdim=True)

    for count in (4, 1):
        exchange.parts(torch.ones(count, 8), torch.zeros(count, 2, dtype=torch.long), torch.ones(count, 2), 4, experts)
    assert (seen[0] == 0).all()
    assert seen[1][:, 0].tolist() == [0, -1, -1, -1, 0, -1, -1, -1]
    assert exchange.bytes == sum(t.numel() * t.element_size() for t in vars(exchange).values() if torch.is_tensor(t))
