"""Products with block-FP8 weights against memory and tensor cores: `python -m benchmarks.block_fp8 [--out FILE]`.

Shapes are those of DeepSeek-V3.2, joined as a worker joins them; activations are bfloat16, codes and scales random. A
CUDA graph holds one launch for each of several weights, together well beyond L2. Medians of REPLAYS replays, per
product:

    us            block_linear as a worker calls it, with scratch: kernel_us or scratch_us, by the crossover;
                  block_experts of a rank of eight, 32 of 256 experts
    memory_us     bytes of the weights read, activations read and written, at this card's copy rate of the same run
    mma_us        operations at the rate of an 8192-cubed bfloat16 product, likewise
    kernel_us     the product that decodes in its kernel: Hopper's for large weights, else Triton's
    scratch_us    the weight decoded to scratch, and torch's product
    plain_us      torch's product of a bfloat16 weight
    w8a8_us       block_linear_w8a8, block_experts_w8a8

The floor is the larger of memory and mma. For experts each of `tokens` of the group chooses 8 of 256 experts at random;
bytes count the experts of the rank that were chosen. After each cell a result is compared with float64 products of the
decoded weight, and w8a8 with the weight-only result (`distance`, a share of its norm).

A worker gets the memory of its weights from the driver once: so do the weights of each shape here. What is compared in
float64 is computed behind all times of a shape: behind such products, what was timed first took up to 12 % longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.index_topk import capture, copy_bytes_per_us, operations_per_us, timed
from benchmarks.swap_in import machine
from kernels.block_fp8 import (
    block_experts,
    block_experts_w8a8,
    block_linear,
    block_linear_w8a8,
    decode_blocks,
    halves,
)
from kernels.block_weight import BLOCK, E4M3, BlockFp8
from kernels.cuda.block_fp8 import crossover, decoded_linear

SHAPES: Final = {
    "q_a, wk, kv_a": (2240, 7168),
    "q_b": (24576, 1536),
    "o": (7168, 16384),
    "mlp up": (18432, 7168),
    "mlp down": (7168, 18432),
    "shared gate, up": (4096, 7168),
    "shared down": (7168, 2048),
    "index q_b": (8192, 1536),
}
TOKENS: Final = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
#: Tokens from which the ways of a prompt block are compared.
BLOCK_TOKENS: Final = 128
EXPERT_TOKENS: Final = (1, 16, 64, 128, 256, 512, 1024, 2048)
EXPERTS, EXPERTS_TOTAL, CHOICES, WIDTH, MIDDLE = 32, 256, 8, 7168, 2048
WEIGHT_BYTES_LEAST: Final = 200 << 20  # of all weights in a graph
WEIGHTS_MOST: Final = 128
#: In a graph, so that its launch does not count: the same weights again, after all others.
LAUNCHES_LEAST: Final = 24
#: Replayed ahead of each measurement, as a worker's steps run one after another: memory that was just given is read
#: more slowly at first, and the clock of a card that is at work is lower.
WARM_S: Final = 0.05
#: Share of its norm by which a result may differ from float64's: bfloat16 results, and for experts bfloat16 between.
LINEAR_ERROR_MOST: Final = 4e-3
EXPERTS_ERROR_MOST: Final = 1.5e-2


def draw(*shape: int) -> BlockFp8:
    codes = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
    codes[codes == 0x7F] = 0
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    return BlockFp8(codes.view(E4M3), torch.rand(blocks, device="cuda") * 1e-3)


def replayed(work: Callable[[int], object], count: int) -> list[float]:
    """us of one product, of `count` weights in turn, by a card that has been at it for WARM_S."""

    def launch(number: int) -> None:
        work(number % count)

    launch(0)  # compiles
    launches = max(count, LAUNCHES_LEAST)
    graph = capture(launch, launches)
    until = time.monotonic() + WARM_S
    while time.monotonic() < until:
        graph.replay()
        torch.cuda.synchronize()
    return timed(graph.replay, launches)


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def checked(error: float, most: float) -> float:
    if not error <= most:
        raise SystemExit(f"off by {error:.4f} of the norm, more than {most}")
    return error


def row_of(times: list[float], memory: float, mma: float) -> dict[str, Any]:
    us = statistics.median(times)
    return {
        "us": us,
        "us_min": min(times),
        "us_max": max(times),
        "memory_us": memory,
        "mma_us": mma,
        "times_memory": us / memory,
        "times_floor": us / max(memory, mma),
    }


def measure_linear(weights: list[BlockFp8], tokens: int, copy_rate: float, operation_rate: float) -> dict[str, Any]:
    n, k = weights[0].values.shape
    hidden = torch.randn(tokens, k, device="cuda").bfloat16()
    scratch = torch.empty(n * k, dtype=torch.bfloat16, device="cuda")
    count = len(weights)
    times = replayed(lambda number: block_linear(hidden, weights[number], scratch), count)
    memory = (weights[0].nbytes + 2 * tokens * (n + k)) / copy_rate
    row = row_of(times, memory, 2 * tokens * n * k / operation_rate)
    if tokens >= BLOCK_TOKENS:
        plain = decode_blocks(weights[0], torch.bfloat16)
        ways: dict[str, Callable[[int], object]] = {
            "kernel_us": lambda number: block_linear(hidden, weights[number]),
            "scratch_us": lambda number: decoded_linear(hidden, weights[number], scratch),
            "plain_us": lambda _: hidden @ plain.T,
            "w8a8_us": lambda number: block_linear_w8a8(hidden, weights[number], powers=True),
        }
        taken = "scratch_us" if tokens >= crossover(weights[0]) else "kernel_us"
        row[taken] = row["us"]
        row |= {name: statistics.median(replayed(way, count)) for name, way in ways.items() if name != taken}
    return row


def compare_linear(weight: BlockFp8, tokens: int) -> dict[str, Any]:
    """What belongs to a row beside its times. Raises SystemExit where the result is not the product."""
    n, k = weight.values.shape
    hidden = torch.randn(tokens, k, device="cuda").bfloat16()
    scratch = torch.empty(n * k, dtype=torch.bfloat16, device="cuda")
    got = block_linear(hidden, weight, scratch)[:64]
    decoded = decode_blocks(weight, torch.bfloat16)
    row = {"error": checked(off(got, hidden[:64].double() @ decoded.double().T), LINEAR_ERROR_MOST)}
    if tokens >= BLOCK_TOKENS:
        row["distance"] = off(block_linear_w8a8(hidden, weight, powers=True)[:64], got)
    return row


def linears(copy_rate: float, operation_rate: float) -> list[dict[str, Any]]:
    rows = []
    for name, (n, k) in SHAPES.items():
        torch.cuda.empty_cache()
        weights = [draw(n, k) for _ in range(max(2, min(WEIGHTS_MOST, -(-WEIGHT_BYTES_LEAST // (n * k)))))]
        times = {tokens: measure_linear(weights, tokens, copy_rate, operation_rate) for tokens in TOKENS}
        for tokens, cell in times.items():
            compared = compare_linear(weights[0], tokens)
            rows.append({"part": "linear", "name": name, "n": n, "k": k, "tokens": tokens, **cell, **compared})
            show(rows[-1])
        del weights
    return rows


class Layer(NamedTuple):
    """Weights of one layer's experts, for both kinds of products."""

    gate: BlockFp8
    up: BlockFp8
    down: BlockFp8
    gate_up: BlockFp8

    @staticmethod
    def draw() -> Layer:
        gate_up = draw(EXPERTS, 2 * MIDDLE, WIDTH)
        return Layer(*halves(gate_up), draw(EXPERTS, WIDTH, MIDDLE), gate_up)

    def decoded(self, load: Load) -> Tensor:
        return block_experts(*load, self.gate, self.up, self.down, experts_total=EXPERTS_TOTAL)

    def quantized(self, load: Load) -> Tensor:
        return block_experts_w8a8(*load, self.gate_up, self.down, experts_total=EXPERTS_TOTAL, powers=True)


def experts(copy_rate: float, operation_rate: float) -> list[dict[str, Any]]:
    rows = []
    layers = [Layer.draw() for _ in range(2)]
    loads = [Load.draw(tokens) for tokens in EXPERT_TOKENS]
    times = [measure_experts(layers, load, copy_rate, operation_rate) for load in loads]
    for load, cell in zip(loads, times, strict=True):
        rows.append({"part": "experts", "tokens": len(load.hidden), **cell, **compare_experts(layers[0], load)})
        show(rows[-1])
    return rows


class Load(NamedTuple):
    """Tokens bfloat16[T, WIDTH] of a group, their choices int64[T, CHOICES] and shares float32[T, CHOICES]."""

    hidden: Tensor
    chosen: Tensor
    shares: Tensor

    @staticmethod
    def draw(tokens: int) -> Load:
        chosen = torch.rand(tokens, EXPERTS_TOTAL, device="cuda").argsort(1)[:, :CHOICES].contiguous()
        chosen[0, 0] = 0  # at least one expert of the rank
        hidden = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
        return Load(hidden, chosen, torch.rand(tokens, CHOICES, device="cuda"))


def measure_experts(layers: list[Layer], load: Load, copy_rate: float, operation_rate: float) -> dict[str, Any]:
    chosen, tokens = load.chosen, len(load.hidden)
    held, busy = int((chosen < EXPERTS).sum()), len(chosen[chosen < EXPERTS].unique())
    weight_bytes = busy * sum(one.nbytes for one in layers[0][:3]) // EXPERTS
    memory = (weight_bytes + 2 * held * 2 * MIDDLE + 2 * (tokens + held) * WIDTH) / copy_rate
    mma = 2 * 3 * held * MIDDLE * WIDTH / operation_rate

    return {
        "assignments": held,
        "experts": busy,
        **row_of(replayed(lambda number: layers[number].decoded(load), len(layers)), memory, mma),
        "w8a8_us": statistics.median(replayed(lambda number: layers[number].quantized(load), len(layers))),
    }


def compare_experts(layer: Layer, load: Load) -> dict[str, Any]:
    """As compare_linear."""
    got = layer.decoded(load)
    error = checked(off(got, wanted(*load, *layer[:3])), EXPERTS_ERROR_MOST)
    return {"error": error, "distance": off(layer.quantized(load), got)}


def wanted(hidden: Tensor, chosen: Tensor, shares: Tensor, gate: BlockFp8, up: BlockFp8, down: BlockFp8) -> Tensor:
    """In float32, by torch."""
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in range(EXPERTS):
        tokens, choices = (chosen == expert).nonzero(as_tuple=True)
        matrices = [
            decode_blocks(BlockFp8(one.values[expert], one.scales[expert]), torch.float32) for one in (gate, up, down)
        ]
        rows = hidden[tokens].float()
        middle = torch.nn.functional.silu(rows @ matrices[0].T) * (rows @ matrices[1].T)
        total.index_add_(0, tokens, middle @ matrices[2].T * shares[tokens, choices, None])
    return total


def show(row: dict[str, Any]) -> None:
    ways = "".join(f"  {key} {value:.1f}" for key, value in row.items() if key.endswith("_us") and "m" not in key)
    print(
        f"{row.get('name', 'experts'):15} {row['tokens']:5}  {row['us']:8.1f} us  memory {row['memory_us']:6.1f}  "
        f"mma {row['mma_us']:6.1f}  x memory {row['times_memory']:.2f}  x floor {row['times_floor']:.2f}{ways}"
        f"  distance {row.get('distance', 0):.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_fp8")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/block_fp8.json"))
    options = parser.parse_args()
    rates = copy_bytes_per_us(), operations_per_us()
    command = " ".join(["python", "-m", "benchmarks.block_fp8", *sys.argv[1:]])
    where = {**machine(), "command": command, "copy_gb_per_s": rates[0] / 1e3, "mma_tflop_per_s": rates[1] / 1e6}
    print(f"copy {rates[0] / 1e3:.0f} GB/s, bfloat16 product {rates[1] / 1e6:.0f} TFLOP/s")
    rows = [*experts(*rates), *linears(*rates)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
