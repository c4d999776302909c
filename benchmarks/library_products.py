"""Products of DeepGEMM beside ours: `python -m benchmarks.library_products [--seconds N] [--out FILE]`.

Shapes are those of DeepSeek-V3.2 as a worker joins them, codes and scales random, activations quantized with scales
that are powers of two. A CUDA graph holds one product for each of several weights, together well beyond L2. Medians of
replays, µs per product:

    library    kernels/cuda/deep_gemm.py: quantization and product; of experts all launches from rows to their sums
    quantize   quantization alone
    product    the library's product alone
    weight     block_linear with scratch, block_experts: weights decoded

64 and 128: tiles of tokens of experts other than deep_gemm's choice. Before times, each result is
compared with a plain product of the quantized values in float32, eager and from the graph. Kernels of all forms are
compiled first, by PROCESSES processes at once, which takes most of the time of a first run. After --seconds no further
cell begins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.block_fp8 import CHOICES, EXPERTS, EXPERTS_TOTAL, MIDDLE, WIDTH, Load, draw, off, replayed
from benchmarks.index_topk import copy_bytes_per_us
from benchmarks.swap_in import machine
from kernels.block_fp8 import block_linear, halves
from kernels.block_weight import BLOCK, BlockFp8
from kernels.cuda import block_fp8, deep_gemm, quantize

SHAPES: Final = {
    "o": (7168, 16384),
    "gate_up": (4096, 7168),
    "down": (7168, 2048),
    "q_b": (24576, 1536),
    "q_a, wk, kv_a": (2240, 7168),
}
TOKENS: Final = (1, 16, 64, 128, 256, 512, 4096)
EXPERT_TOKENS: Final = (1, 16, 64, 128, 256, 512, 2048)
PROCESSES: Final = 14
WEIGHT_BYTES_LEAST: Final = 200 << 20
ERROR_MOST: Final = 5e-3
Way = Callable[[int], object]


class Layer:
    """Weights of one layer's experts, in both forms."""

    def __init__(self) -> None:
        self.both, self.down = draw(EXPERTS, 2 * MIDDLE, WIDTH), draw(EXPERTS, WIDTH, MIDDLE)
        self.gate, self.up = halves(self.both)

    def library(self, load: Load, **form: Any) -> Tensor:
        return deep_gemm.experts(*load, self.both, self.down, 0, EXPERTS_TOTAL, powers=True, **form)

    def ours(self, load: Load) -> Tensor:
        return block_fp8.experts(*load, self.gate, self.up, self.down, 0, EXPERTS_TOTAL)


FORMS: Final[dict[str, dict[str, Any]]] = {"library": {}, "64": {"multiple": 64}, "128": {"multiple": 128}}


def plain(rows: Tensor, scales: Tensor, weight: BlockFp8) -> Tensor:
    """float32 product of the dequantized operands."""
    left = rows.float() * scales.repeat_interleave(BLOCK, 1)[:, : rows.shape[1]]
    n, k = weight.values.shape
    blocks = weight.scales.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return left @ (weight.values.float() * blocks).T


def plain_quantized(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """By torch: e4m3 and scales that are powers of two."""
    parts = hidden.float().view(len(hidden), -1, BLOCK)
    scales = torch.exp2(torch.ceil(torch.log2(parts.abs().amax(-1) / 448)))
    scales = torch.where(parts.abs().amax(-1) == 0, 1.0, scales)
    return (parts / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(hidden.shape), scales


def plain_experts(load: Load, layer: Layer) -> Tensor:
    total = torch.zeros_like(load.hidden, dtype=torch.float32)
    for expert in range(EXPERTS):
        tokens, choices = (load.chosen == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        one = [BlockFp8(it.values[expert], it.scales[expert]) for it in (layer.gate, layer.up, layer.down)]
        rows = plain_quantized(load.hidden[tokens])
        gate, up = (plain(*rows, it).bfloat16() for it in one[:2])
        middle = torch.nn.functional.silu(gate) * up
        out = plain(*plain_quantized(middle), one[2]).bfloat16()
        total.index_add_(0, tokens, out.float() * load.shares[tokens, choices, None])
    return total


def captured(work: Callable[[], Tensor]) -> Tensor:
    """A result from a replayed graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    graph.replay()
    torch.cuda.synchronize()
    return out


def linear_ways(weights: list[BlockFp8], tokens: int) -> dict[str, Way]:
    n, k = weights[0].values.shape
    hidden = torch.randn(tokens, k, device="cuda").bfloat16()
    scratch = torch.empty(n * k, dtype=torch.bfloat16, device="cuda")
    rows = quantize.quantize(hidden, powers=True)
    return {
        "library": lambda number: deep_gemm.linear(hidden, weights[number], powers=True),
        "quantize": lambda _: quantize.quantize(hidden, powers=True),
        "product": lambda number: deep_gemm.product(rows, weights[number]),
        "weight": lambda number: block_linear(hidden, weights[number], scratch),
    }


def libraries(layers: list[Layer], load: Load, form: dict[str, Any], number: int) -> Tensor:
    return layers[number].library(load, **form)


def expert_ways(layers: list[Layer], tokens: int) -> dict[str, Way]:
    load = Load.draw(tokens)
    ways: dict[str, Way] = {name: partial(libraries, layers, load, form) for name, form in FORMS.items()}
    ways["weight"] = lambda number: layers[number].ours(load)
    return ways


def measured(ways: dict[str, Way], count: int) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, way in ways.items():
        try:
            found[name] = round(statistics.median(replayed(way, count)), 1)
        except Exception as problem:  # the other cells are still worth their time
            found[name] = f"{type(problem).__name__}: {str(problem)[:300]}"
            torch.cuda.synchronize()
    return found


def compile_part(part: str, tokens: list[int]) -> None:
    """Run everything once, so that all caches hold it."""
    torch.manual_seed(1)
    for count in tokens:
        ways = expert_ways([Layer()], count) if part == "experts" else linear_ways([draw(*SHAPES[part])], count)
        for name, way in ways.items():
            began = time.monotonic()
            try:
                way(0)
                torch.cuda.synchronize()
            except Exception as problem:
                print(f"{part} {count} {name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            if time.monotonic() - began > 1:
                print(f"{part} {count} {name}: compiled in {time.monotonic() - began:.1f} s", flush=True)


def compile_all(until: float) -> None:
    parts: list[tuple[str, tuple[int, ...]]] = [
        (name, tokens) for name in SHAPES for tokens in (TOKENS[:3], TOKENS[3:5], TOKENS[5:])
    ]
    parts += [("experts", EXPERT_TOKENS[at : at + 2]) for at in range(0, len(EXPERT_TOKENS), 2)]
    waiting, running = list(reversed(parts)), list[subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            part, tokens = waiting.pop()
            command = [sys.executable, "-m", "benchmarks.library_products", "--compile", part, *map(str, tokens)]
            running.append(subprocess.Popen(command))
        time.sleep(0.1)
        running = [one for one in running if one.poll() is None]
        if time.monotonic() > until:
            for one in running:
                one.kill()
            print("compilation was cut short", flush=True)
            return


def compare() -> Iterator[str]:
    torch.manual_seed(2)
    for name, (n, k) in SHAPES.items():
        weight = draw(n, k)
        for tokens in (1, 64, 512):
            hidden = torch.randn(tokens, k, device="cuda").bfloat16()
            values, scales = plain_quantized(hidden)
            got = quantize.quantize(hidden, powers=True)
            same = torch.equal(got.values.float(), values.float()) and torch.equal(got.scales, scales)
            wanted, work = plain(values, scales, weight), partial(deep_gemm.linear, hidden, weight, powers=True)
            error, again = off(work(), wanted), torch.equal(work(), captured(work))
            yield f"{name} {tokens}: quantized alike {same}, off by {error:.5f}, graph alike {again}"
    layer = Layer()
    for tokens in (1, 64, 512, 2048):
        load = Load.draw(tokens)
        wanted = plain_experts(load, layer)
        for form, options in FORMS.items():
            try:
                work = partial(layer.library, load, **options)
                error, again = off(work(), wanted), torch.equal(work(), captured(work))
                yield f"experts {tokens} {form}: off by {error:.5f}, graph alike {again}"
            except Exception as problem:
                yield f"experts {tokens} {form}: {type(problem).__name__}: {str(problem)[:300]}"


def pieces(tokens: int) -> dict[str, float | str]:
    """µs of each launch of the experts' products."""
    layer, load = Layer(), Load.draw(tokens)
    placed = quantize.place(load.chosen, 0, EXPERTS, multiple=64)
    rows = quantize.quantize(load.hidden, powers=True, placed=placed)
    both = deep_gemm.grouped(rows, layer.both, placed, max(1, tokens * CHOICES // EXPERTS_TOTAL), 64)
    halves = both[:, :MIDDLE], both[:, MIDDLE:]
    gated = quantize.quantize_gated(*halves, powers=True, placed=placed)
    expected = max(1, tokens * CHOICES // EXPERTS_TOTAL)
    products = deep_gemm.grouped(gated, layer.down, placed, expected, 64)
    out = torch.empty_like(load.hidden)
    return measured(
        {
            "place": lambda _: quantize.place(load.chosen, 0, EXPERTS, multiple=64),
            "quantize": lambda _: quantize.quantize(load.hidden, powers=True, placed=placed),
            "gate_up": lambda _: deep_gemm.grouped(rows, layer.both, placed, expected, 64),
            "gated": lambda _: quantize.quantize_gated(*halves, powers=True, placed=placed),
            "down": lambda _: deep_gemm.grouped(gated, layer.down, placed, expected, 64),
            "add": lambda _: quantize.add_rows(products, placed, load.shares, out),
        },
        1,
    )


def measure(until: float) -> Iterator[dict[str, Any]]:
    layers = [Layer(), Layer()]
    for tokens in EXPERT_TOKENS:
        if time.monotonic() < until:
            yield {"part": "experts", "tokens": tokens, **measured(expert_ways(layers, tokens), len(layers))}
    del layers
    for tokens in (64, 512):
        if time.monotonic() < until:
            yield {"part": "pieces", "tokens": tokens, **pieces(tokens)}
    for name, (n, k) in SHAPES.items():
        torch.cuda.empty_cache()
        weights = [draw(n, k) for _ in range(max(2, min(128, -(-WEIGHT_BYTES_LEAST // (n * k)))))]
        for tokens in TOKENS:
            if time.monotonic() < until:
                yield {"part": name, "tokens": tokens, **measured(linear_ways(weights, tokens), len(weights))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library_products")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--compile", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_part(options.compile[0], [int(one) for one in options.compile[1:]])
        return
    began = time.monotonic()
    until = began + options.seconds
    library = deep_gemm.library()
    print(f"deep_gemm {library.__version__} imported in {time.monotonic() - began:.1f} s, torch {torch.__version__}")
    compile_all(began + options.seconds * 0.6)
    print(f"compiled by {time.monotonic() - began:.1f} s", flush=True)
    try:
        for line in compare():
            print(line, flush=True)
    except Exception:
        traceback.print_exc()
    print(f"compared by {time.monotonic() - began:.1f} s; copy {copy_bytes_per_us() / 1e3:.0f} GB/s", flush=True)
    rows = []
    for row in measure(until):
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print(f"ended after {time.monotonic() - began:.1f} s")
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
