"""attend_rows against memory and tensor cores: `python -m benchmarks.attention [--out FILE]` on a CUDA device.

One cell is (row format, batch) at DeepSeek-V3.2's attention: 128 heads, latents of 512 and rope keys of 64, bfloat16
queries, random values, 2048 entries each over a hot buffer of 4096 rows per request. Hy4 has `--heads 64 --sinks`,
A.X-K2-Light `--heads 32 --latent 128 --rope 32`; such cells keep their shape in --out. A CUDA graph holds one launch
per layer, each layer with rows of its own, together well beyond L2. *prompt* cells are a block of prompt tokens, all
over the rows of one context of 32,768, which L2 keeps. Medians of REPLAYS replays, per launch:

    us            attend_rows
    memory_us     bytes of the rows at this card's copy rate, measured in the same run; prompt: of the context once
    mma_us        2 * (576 + 512) operations per head and entry at the rate of an 8192-cubed bfloat16 product, likewise

The floor is the larger of the two. After each cell one head of one row is compared with float64. A plot of all cells
is written beside --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.index_topk import capture, copy_bytes_per_us, operations_per_us, timed
from benchmarks.plots import Row, Series, marks
from benchmarks.swap_in import machine
from kernels.cuda.attention import Blocks, attend_rows
from kernels.layout import Geometry
from kernels.row_format import kv_row_format
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS

TOPK, HOT_SLOTS, CONTEXT = 2048, 4096, 32_768
SCALING = 192**-0.5
KINDS = ("bfloat16", "fp8", "fp4")
BATCHES = (1, 4, 8, 16, 32, 64, 77, 108, 128)
CELLS = (*(("decode", batch) for batch in BATCHES), ("prompt", 512), ("prompt", 2048))
ROW_BYTES_LEAST = 256 << 20  # of all layers
LAYERS_MOST = 64
#: Share of the largest latent by which a result may differ: bfloat16 shares of the softmax, and a bfloat16 result.
ERROR_MOST = 2.0**-7


@dataclass(frozen=True)
class Shape:
    """Heads of a layer, values of a row, whether each head has a sink, and a cut in place of the launcher's choice."""

    heads: int = 128
    latent: int = 512
    rope: int = 64
    sinks: bool = False
    cut: str = ""  # HEADSxROWSxWARPSxSTAGES

    @classmethod
    def of(cls, row: dict[str, Any]) -> Shape:
        """Return the shape of a row of --out; rows of DeepSeek-V3.2's shape name none."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})

    def named(self) -> dict[str, Any]:
        return {} if self == Shape() else asdict(self)

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.latent} + {self.rope} values{', sinks' * self.sinks} {self.cut}".rstrip()

    @property
    def blocks(self) -> Blocks | None:
        return Blocks(*map(int, self.cut.split("x"))) if self.cut else None


class Cell:
    def __init__(self, shape: Shape, kind: str, phase: str, batch: int) -> None:
        self.shape, self.form = shape, kv_row_format(kind, shape.latent, shape.rope)
        self.phase, self.batch = phase, batch
        rows = CONTEXT if phase == "prompt" else batch * HOT_SLOTS
        size = rows * self.form.row_bytes
        self.layers = 2 if phase == "prompt" else max(2, min(LAYERS_MOST, -(-ROW_BYTES_LEAST // size)))
        geometry = Geometry(self.layers, self.form.row_bytes, (0,) * self.layers, 4, TOPK)
        sizes = dict.fromkeys(("seats", "index_pages", "max_pages", "max_chunks", "slab_pages", "tail_slots"), 1)
        host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
        self.state = DeviceState.allocate(geometry, chunks=rows // PAGE_TOKENS, host=host, device="cuda", **sizes)
        for layer in range(self.layers):
            for start in range(0, rows, 1 << 17):
                part = self.state.rows[layer, start : start + (1 << 17)]
                part.copy_(self.form.encode(torch.randn(len(part), self.form.values, device="cuda")))
        own = CONTEXT if phase == "prompt" else HOT_SLOTS
        chosen = torch.rand(batch, own, device="cuda").topk(TOPK).indices.sort().values
        firsts = torch.zeros(batch, device="cuda") if phase == "prompt" else torch.arange(batch, device="cuda") * own
        self.out_rows = (chosen + firsts.unsqueeze(1)).int().contiguous()
        self.queries = torch.randn(batch, shape.heads, self.form.values, device="cuda").bfloat16()
        self.out = torch.empty(batch, shape.heads, shape.latent, dtype=torch.bfloat16, device="cuda")
        self.sinks = torch.randn(shape.heads, device="cuda") if shape.sinks else None

    def run(self, layer: int) -> None:
        given = (self.state, layer, self.queries, self.out_rows, SCALING, self.out, self.sinks)
        attend_rows(*given, blocks=self.shape.blocks)

    def check(self) -> float:
        """Largest error of one head of the last row, as a share of the largest latent."""
        self.run(0)
        rows = self.form.decode(self.state.rows[0][self.out_rows[-1].long()]).double()
        scores = rows @ self.queries[-1, -1].double() * SCALING
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[-1:].double()))
        expected = scores.softmax(0)[: len(rows)] @ rows[:, : self.shape.latent]
        return float((self.out[-1, -1].double() - expected).abs().max() / expected.abs().max())

    @property
    def row_bytes(self) -> int:
        rows = CONTEXT if self.phase == "prompt" else self.batch * TOPK
        return rows * self.form.row_bytes

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.shape.heads * TOPK * (self.shape.latent + self.form.values)


def measure(cell: Cell, copy_rate: float, operation_rate: float) -> dict[str, Any]:
    cell.run(0)  # compiles
    times = timed(capture(cell.run, cell.layers).replay, cell.layers)
    us, error = statistics.median(times), cell.check()
    if error > ERROR_MOST:
        raise SystemExit(f"off by {error:.4f} of the largest value")
    memory, mma = cell.row_bytes / copy_rate, cell.operations / operation_rate
    return {
        "us": us,
        "us_min": min(times),
        "us_max": max(times),
        "memory_us": memory,
        "mma_us": mma,
        "gb_per_s": cell.row_bytes / us / 1e3,
        "tflop_per_s": cell.operations / us / 1e6,
        "share_of_floor": max(memory, mma) / us,
        "error": error,
        "layers": cell.layers,
    }


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['kind']:8}  {row['phase']} {row['batch']:5}  {row['us']:8.1f} us "
        f"[{row['us_min']:.1f}-{row['us_max']:.1f}]  memory {row['memory_us']:6.1f}  mma {row['mma_us']:7.1f}  "
        f"{row['tflop_per_s']:.0f} TFLOP/s  share {100 * row['share_of_floor']:.0f}%  error {row['error']:.4f}"
    )


def plot(shape: Shape, rows: list[dict[str, Any]]) -> str:
    """An SVG of the cells of `shape`."""
    series = {
        "us": Series("attend_rows", "#c0392b", "dot"),
        "memory_us": Series("rows at copy rate", "#2c3e50", "tick"),
        "mma_us": Series("products", "#2980b9", "cross"),
    }
    cells = [
        Row(f"{row['kind']} {row['phase']} {row['batch']}", {one.name: row[key] for key, one in series.items()})
        for row in rows
    ]
    return marks(f"attend_rows, {shape}, 2048 entries: rows, queries", "us", list(series.values()), cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention.json"))
    parser.add_argument("--budget-seconds", type=float, default=300)
    for name in ("heads", "latent", "rope"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape, name))
    parser.add_argument("--sinks", action="store_true", help="one more logit a head in the softmax")
    parser.add_argument("--cut", default="", metavar="HxRxWxS", help="heads, rows, warps and stages of a program")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    shape = Shape(options.heads, options.latent, options.rope, options.sinks, options.cut)
    began = time.monotonic()
    done = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rates = copy_bytes_per_us(), operations_per_us()
    command = " ".join(["python", "-m", "benchmarks.attention", *sys.argv[1:]])
    where = {**machine(), "command": command, "copy_gb_per_s": rates[0] / 1e3, "mma_tflop_per_s": rates[1] / 1e6}
    print(f"copy {rates[0] / 1e3:.0f} GB/s, bfloat16 product {rates[1] / 1e6:.0f} TFLOP/s")
    held = [(row["kind"], row["phase"], row["batch"]) for row in done if Shape.of(row) == shape]
    for kind, phase, batch in ((kind, *cell) for kind in options.kind for cell in CELLS):
        if (kind, phase, batch) in held:
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            break
        cell = Cell(shape, kind, phase, batch)
        row = {"kind": kind, "phase": phase, "batch": batch, **shape.named(), **measure(cell, *rates)}
        del cell
        print(show(row), flush=True)
        done.append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": where, "rows": done}, indent=1) + "\n")
        of_shape = [row for row in done if Shape.of(row) == shape]
        options.out.with_suffix(".svg").write_text(plot(shape, of_shape))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
