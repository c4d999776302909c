"""w8a8 products as DeepGEMM forms them: our launches emulated and a fake of the library, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.block_fp8 import (
    block_coded_w8a8,
    block_experts_w8a8,
    block_gated_w8a8,
    block_linear_w8a8,
    halves,
    make_codes,
    quantize_rows,
    takes_w8a8,
)
from kernels.block_weight import BlockFp8
from kernels.cuda import deep_gemm, quantize
from protocol.errors import ConfigError
from tests.emulated.device import COMPILER, Device
from tests.kernels.test_block_fp8 import close, dequantized, draw
from tests.kernels.test_quantize import drawn, plain_quantized
from tests.support.fake_deep_gemm import FakeDeepGemm


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDeepGemm]:
    if COMPILER is None:
        pytest.skip("needs g++")
    library = FakeDeepGemm()
    monkeypatch.setattr(deep_gemm, "library", lambda: library)
    with Device().installed():
        yield library


def wanted(hidden: Tensor, weight: BlockFp8, *, powers: bool) -> Tensor:
    """The product of quantized rows, in float32, rounded once."""
    values, scales = plain_quantized(hidden, powers=powers)
    rows = values.float() * scales.repeat_interleave(128, 1)
    return (rows @ dequantized(weight, torch.float32).T).bfloat16()


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 8, 128), (5, 136, 256), (65, 256, 384), (0, 8, 128)])
def test_product_is_that_of_quantized_rows(
    fake: FakeDeepGemm, tokens: int, rows: int, columns: int, powers: bool
) -> None:
    hidden, weight = drawn(max(1, tokens), columns)[:tokens], draw(rows, columns, seed=tokens)
    got = deep_gemm.linear(hidden, weight, powers=powers)
    assert got.shape == (tokens, rows)
    assert got.is_contiguous()
    assert close(got, wanted(hidden, weight, powers=powers), 5e-3)
    assert close(block_linear_w8a8(hidden, weight, powers=powers), wanted(hidden, weight, powers=powers), 5e-3)
    assert len(fake.calls) == bool(tokens)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("tokens", [1, 17])
def test_rows_that_another_kernel_quantized_give_the_same_product(
    fake: FakeDeepGemm, tokens: int, powers: bool
) -> None:
    hidden, weight = drawn(tokens, 256), draw(40, 256)
    codes = make_codes(tokens, weight, powers=powers)
    assert len(codes.values) == len(codes.scales) == deep_gemm.padded(tokens)
    assert codes.powers == powers
    found = quantize.quantize(hidden, powers=powers)
    codes.values[:tokens], codes.scales[:tokens] = found.values, found.scales
    got = block_coded_w8a8(codes, tokens, weight)
    assert torch.equal(got, deep_gemm.linear(hidden, weight, powers=powers))


@pytest.mark.parametrize("powers", [False, True])
def test_gated_product_is_that_of_the_quantized_middle(fake: FakeDeepGemm, powers: bool) -> None:
    both, weight = drawn(5, 512, seed=1), draw(40, 256, seed=2)
    gate, up = both[:, :256], both[:, 256:]
    middle = torch.nn.functional.silu(gate.float()).bfloat16() * up
    for got in (
        deep_gemm.gated(gate, up, weight, powers=powers),
        block_gated_w8a8(gate, up, weight, powers=powers),
    ):
        assert close(got, wanted(middle, weight, powers=powers), 5e-3)
    assert deep_gemm.gated(gate[:0], up[:0], weight, powers=powers).shape == (0, 40)


def mixture(hidden: Tensor, chosen: Tensor, shares: Tensor, gate_up: BlockFp8, down: BlockFp8, first: int) -> Tensor:
    """Token by token, choice by choice."""
    gate, up = halves(gate_up)
    out = torch.zeros(hidden.shape)
    for token in range(len(hidden)):
        row = hidden[token : token + 1]
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            if not first <= expert < first + len(down.values):
                continue
            one = [BlockFp8(it.values[expert - first], it.scales[expert - first]) for it in (gate, up, down)]
            opened = torch.nn.functional.silu(wanted(row, one[0], powers=True).float()).bfloat16()
            middle = opened * wanted(row, one[1], powers=True)
            out[token] += (wanted(middle, one[2], powers=True)[0] * share.reshape(1)).float()
    return out.bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "choices", "experts", "first"), [(1, 1, 1, 0), (9, 3, 4, 2), (40, 2, 3, 0)])
def test_experts_add_what_their_rank_holds(
    fake: FakeDeepGemm, tokens: int, choices: int, experts: int, first: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    gate_up, down = draw(experts, 256, 128, seed=1), draw(experts, 128, 128, seed=2)
    hidden = torch.randn(tokens, 128, generator=generator).bfloat16()
    chosen = (torch.rand(tokens, 8, generator=generator).argsort(1)[:, :choices] - 1).contiguous()
    shares = torch.rand(tokens, choices, generator=generator).to(dtype)
    got = deep_gemm.experts(hidden, chosen, shares, gate_up, down, first, 8, powers=True)
    truth = mixture(hidden, chosen, shares, gate_up, down, first)
    assert close(got, truth, 5e-3)
    assert close(block_experts_w8a8(hidden, chosen, shares, gate_up, down, first, 8, powers=True), truth, 5e-3)
    apart, out = torch.cat((hidden, hidden), 1)[:, :128], torch.full_like(hidden, torch.nan)
    given = deep_gemm.experts(apart, chosen, shares, gate_up, down, first, 8, powers=True, out=out)
    assert given.data_ptr() == out.data_ptr()
    assert torch.equal(out, got)
    codes = quantize.Codes(*quantize_rows(hidden, powers=True), True)
    assert torch.equal(block_experts_w8a8(codes, chosen, shares, gate_up, down, first, 8, powers=True), got)
    assert fake.calls == ["contiguous"] * 6


def test_experts_of_a_long_block_come_in_pieces(fake: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "PIECE_TOKENS", 4)
    gate_up, down = draw(3, 256, 128, seed=1), draw(3, 128, 128, seed=2)
    hidden = torch.randn(10, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    chosen = torch.arange(20).view(10, 2).remainder(5).int() - 1
    shares = torch.ones(10, 2)
    got = deep_gemm.experts(hidden, chosen, shares, gate_up, down, 0, 3, powers=True)
    assert close(got, mixture(hidden, chosen, shares, gate_up, down, 0), 5e-3)
    assert len(fake.calls) == 6


@pytest.mark.parametrize(("tokens", "tile"), [(2, 64), (40, 128)])
def test_tile_follows_the_rows_that_an_expert_may_expect(
    fake: FakeDeepGemm, tokens: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm, "EXPECTED_FEW", 2)
    gate_up, down = draw(2, 256, 128, seed=1), draw(2, 128, 128, seed=2)
    chosen = torch.zeros(tokens, 1, dtype=torch.int32)
    deep_gemm.experts(
        torch.ones(tokens, 128).bfloat16(), chosen, torch.ones(tokens, 1), gate_up, down, 0, 2, powers=True
    )
    assert fake.tile == tile


def test_no_tokens_form_no_products(fake: FakeDeepGemm) -> None:
    gate_up, down, none = draw(1, 256, 128), draw(1, 128, 128), torch.empty(0, 1, dtype=torch.int32)
    got = deep_gemm.experts(torch.empty(0, 128).bfloat16(), none, torch.empty(0, 1), gate_up, down, 0, 1, powers=True)
    assert got.shape == (0, 128)
    assert fake.calls == []


@pytest.mark.parametrize("rows_max", [1, 16, 17, 64, 65, 500, 512, 513, 8192])
def test_every_count_of_rows_is_padded_to_one_of_those_that_are_prepared(rows_max: int) -> None:
    counts = deep_gemm.padded_counts(rows_max)
    assert list(counts) == sorted(set(counts))
    assert {deep_gemm.padded(rows) for rows in range(1, rows_max + 1)} == set(counts)
    assert all(rows <= deep_gemm.padded(rows) for rows in range(1, rows_max + 1))
    assert len(counts) <= 70


@pytest.mark.parametrize(("choices", "total"), [(8, 256), (8, 32), (1, 1), (3, 7)])
def test_every_form_of_experts_is_prepared(choices: int, total: int) -> None:
    counts = deep_gemm.expert_counts(choices, total)
    prepared = {deep_gemm.expected_rows(count * choices, total) for count in counts}
    pieces = range(1, deep_gemm.PIECE_TOKENS + 1)
    assert prepared == {deep_gemm.expected_rows(tokens * choices, total) for tokens in pieces}
    assert len(counts) == len(prepared) <= 15


def test_weights_without_whole_blocks_are_not_taken() -> None:
    assert takes_w8a8(draw(8, 256))
    assert takes_w8a8(draw(2, 72, 128))
    assert not takes_w8a8(draw(8, 320))
    assert not takes_w8a8(draw(4, 128))


@pytest.mark.parametrize("powers", [False, True])
def test_reference_quantizes_as_the_kernel_does(powers: bool) -> None:
    hidden = drawn(9, 384, seed=5)
    values, scales = quantize_rows(hidden, powers=powers)
    plain_values, plain_scales = plain_quantized(hidden, powers=powers)
    assert torch.equal(values.float(), plain_values.float())
    assert torch.equal(scales, plain_scales)


class TestRequire:
    """What stands in the way of the library is named."""

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    CPU = torch.device("cpu")

    def test_name_and_version_of_what_multiplies(self, fake: FakeDeepGemm) -> None:
        assert deep_gemm.require(self.CPU) == "deep_gemm 0.0"
        assert fake.calls == ["dense"]

    def test_other_cards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        with pytest.raises(ConfigError, match=r"capability 8\.0: has no kernels for this card .*weight_only"):
            deep_gemm.require(self.CPU)

    def test_product_that_fails(self, fake: FakeDeepGemm) -> None:
        fake.fails = RuntimeError("Assertion error: nvcc")
        with pytest.raises(ConfigError, match=r"deep_gemm=0\.0: forms no product: Assertion error: nvcc .*CUDA_HOME"):
            deep_gemm.require(self.CPU)

    def test_product_that_is_another(self, fake: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(a: object, b: object, d: Tensor, *, compiled_dims: str) -> None:
            d.fill_(1)

        monkeypatch.setattr(fake, "fp8_gemm_nt", wrong)
        with pytest.raises(ConfigError, match="gives another product than torch, by"):
            deep_gemm.require(self.CPU)

    def test_package_that_is_missing(self) -> None:
        deep_gemm.library.cache_clear()
        with pytest.raises(ConfigError, match=r"deep_gemm=torch .*cannot be imported: No module named 'deep_gemm'"):
            deep_gemm.require(self.CPU)

    def test_package_of_another_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> object:
            raise RuntimeError("undefined symbol: _ZN3c10") if name == deep_gemm.PACKAGE else ImportError(name)

        monkeypatch.setattr(deep_gemm, "importlib", SimpleNamespace(import_module=broken))
        deep_gemm.library.cache_clear()
        with pytest.raises(ConfigError, match="cannot be imported: undefined symbol"):
            deep_gemm.require(self.CPU)

    @pytest.mark.parametrize(("has_nvcc", "chosen"), [(True, "toolkit"), (False, "unset")])
    def test_nvcc_of_pip_is_used_where_there_is_no_other(
        self, has_nvcc: bool, chosen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "bin").mkdir()
        if has_nvcc:
            (tmp_path / "bin" / "nvcc").touch()
        packages = {deep_gemm.TOOLKIT: SimpleNamespace(__path__=[str(tmp_path)]), deep_gemm.PACKAGE: FakeDeepGemm()}
        monkeypatch.setattr(deep_gemm, "importlib", SimpleNamespace(import_module=packages.__getitem__))
        for others, expected in (({}, chosen), ({"CUDA_PATH": "/opt/cuda"}, "unset")):
            environment = {"PATH": str(tmp_path)} | others
            monkeypatch.setattr(deep_gemm.os, "environ", environment)
            deep_gemm.library.cache_clear()
            deep_gemm.library()
            assert environment.get("CUDA_HOME", "unset") == {"toolkit": str(tmp_path)}.get(expected, "unset")
        deep_gemm.library.cache_clear()

    @pytest.mark.parametrize(
        ("version", "said"),
        [
            ("2.11.0+cu130", "pip install 'hisparse[deepgemm-torch211]'"),
            ("2.13.1", "pip install 'hisparse[deepgemm-torch213]'"),
            ("2.12.0", "install torch 2.11 or 2.13 and its extra"),
        ],
    )
    def test_remedy_names_the_extra_of_this_torch(
        self, version: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        deep_gemm.library.cache_clear()
        with pytest.raises(ConfigError, match=said.replace("[", r"\[").replace("]", r"\]")):
            deep_gemm.require(self.CPU)
