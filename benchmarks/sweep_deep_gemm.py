"""sgl-deep-gemm beside torch's scaled_mm: `python3 -m benchmarks.sweep_deep_gemm FOLDER [FOLDER ...]`, wheels in each.

Each folder is unpacked and tried in a process of its own, since a wheel fits one version of torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SHAPES = {"mlp up": (18432, 7168), "o": (7168, 16384), "q_b": (24576, 1536), "shared up": (2048, 7168)}


def measure() -> None:
    import deep_gemm
    import torch

    import benchmarks.index_topk as timing
    from benchmarks.block_fp8 import draw, off, replayed
    from kernels.block_fp8 import block_linear_w8a8, quantize_rows

    timing.REPLAYS, timing.WARM_UP = 7, 2
    for name, (n, k) in SHAPES.items():
        weights = [draw(n, k) for _ in range(max(2, -(-(200 << 20) // (n * k))))]
        for tokens in (64, 512, 1024, 2048, 4096):
            hidden = torch.randn(tokens, k, device="cuda").bfloat16()
            out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")

            def ours(number: int) -> None:
                block_linear_w8a8(hidden, weights[number])

            def theirs(number: int, prepared: object = None) -> None:
                rows = prepared or quantize_rows(hidden)
                weight = weights[number]
                deep_gemm.fp8_gemm_nt(rows, (weight.values, weight.scales), out)

            rows = quantize_rows(hidden)
            theirs(0)
            error = off(out, block_linear_w8a8(hidden, weights[0]))
            times = [
                statistics.median(replayed(work, len(weights)))
                for work in (ours, theirs, lambda number: theirs(number, rows))
            ]
            print(
                f"{name:10} {tokens:5} scaled_mm {times[0]:7.1f}  deep_gemm {times[1]:7.1f}"
                f"  without quantizing {times[2]:7.1f}  off {error:.5f}",
                flush=True,
            )


def main() -> None:
    if sys.argv[1:] == ["--measure"]:
        measure()
        return
    for folder in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            for wheel in sorted(Path(folder).glob("*.whl")):
                zipfile.ZipFile(wheel).extractall(place)
                print("wheel", wheel.name)
            path = os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])
            libraries = os.pathsep.join([*map(str, Path(place).glob("*/lib")), os.environ.get("LD_LIBRARY_PATH", "")])
            try:
                found = subprocess.run(
                    [sys.executable, "-m", "benchmarks.sweep_deep_gemm", "--measure"],
                    env={
                        **os.environ,
                        "PYTHONPATH": path,
                        "LD_LIBRARY_PATH": libraries,
                        "DG_JIT_CACHE_DIR": place + "/jit",
                    },
                    timeout=70,
                    capture_output=True,
                    text=True,
                )
                print(found.stdout[-2500:], found.stderr[-600:] if found.returncode else "", sep="\n", flush=True)
                if not found.returncode:
                    return
            except subprocess.TimeoutExpired as slow:
                print("timed out", (slow.stdout or b"")[-1500:], flush=True)


if __name__ == "__main__":
    main()
