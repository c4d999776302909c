"""Fills DeepGEMM's cache of kernels by several processes at once, before a model's products are first formed.

The library compiles when a product is asked for, one kernel after another, each in some seconds; a model has a hundred.
Each process forms its part of the products over zeros, once, and so leaves their kernels in the cache. What a process
leaves out, because it failed or ran out of time or memory, is compiled by whoever asks for it next.

A file in the cache says that this was done for the same library, card and products. Of workers that start together one
fills it, and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from kernels.block_weight import BLOCK, E4M3, BlockFp8
from kernels.cuda import deep_gemm
from kernels.cuda.jit import cache_dir

#: A process takes 1.5 GB of device memory.
PROCESSES_MAX: Final = 12
LIMIT_S: Final = 900.0
POLL_S: Final = 0.05
COMMAND: Final = (sys.executable, "-m", "kernels.cuda.deep_gemm_cache")


class ProductForm(NamedTuple):
    """A product of `rows` rows with a weight [n, k]; of `experts` > 0 by one each, gate and up [2 * n / 2, k] with down
    [k, n / 2], each row with `choices` of `total` experts."""

    n: int
    k: int
    rows: int
    experts: int = 0
    choices: int = 0
    total: int = 0


def fill(forms: Sequence[ProductForm], device: torch.device) -> float:
    """Compile what `forms` need. Returns the seconds that it took; 0 where a file says that it was done."""
    if not forms:
        return 0.0
    began, stamp = time.monotonic(), stamp_of(forms, device)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    with stamp.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node start together
        if stamp.exists():
            return 0.0
        _fill(forms, device, began + LIMIT_S, stamp)
    return time.monotonic() - began


def _fill(forms: Sequence[ProductForm], device: torch.device, until: float, stamp: Path) -> None:
    parts = divided(forms, min(PROCESSES_MAX, os.cpu_count() or 1))
    running = [_start(part, device) for part in parts]
    try:
        _await(running, until)
    finally:
        for process in running:
            process.kill()
            process.wait()
    if all(process.returncode == 0 for process in running):
        stamp.touch()


def divided(forms: Sequence[ProductForm], parts: int) -> list[list[ProductForm]]:
    """At most `parts` runs of neighbours: forms of one weight and neighbouring counts of rows often share a kernel."""
    ordered = sorted(set(forms), key=lambda form: (form.experts, form.n, form.k, form.rows))
    each = -(-len(ordered) // parts)
    return [ordered[at : at + each] for at in range(0, len(ordered), each)]


def stamp_of(forms: Sequence[ProductForm], device: torch.device) -> Path:
    """Place of the file that says that `forms` were compiled, by this release for this card."""
    about = deep_gemm.library().__version__, torch.cuda.get_device_name(device), sorted(set(forms))
    return cache_dir() / deep_gemm.PACKAGE / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.filled"


def run(forms: Sequence[ProductForm], device: torch.device) -> None:
    """Form each of `forms` once."""
    weights: dict[tuple[int, ...], BlockFp8] = {}

    def zeros(*shape: int) -> BlockFp8:
        if shape not in weights:
            values = torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
            blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
            weights[shape] = BlockFp8(values, torch.zeros(blocks, device=device))
        return weights[shape]

    for form in forms:
        hidden = torch.zeros(form.rows, form.k, dtype=torch.bfloat16, device=device)
        if form.experts:
            gate_up, down = zeros(form.experts, form.n, form.k), zeros(form.experts, form.k, form.n // 2)
            chosen = torch.full((form.rows, form.choices), -1, dtype=torch.int32, device=device)
            deep_gemm.experts(hidden, chosen, chosen.float(), gate_up, down, 0, form.total, powers=True)
        else:
            deep_gemm.linear(hidden, zeros(form.n, form.k), powers=True)


def _start(forms: Sequence[ProductForm], device: torch.device) -> subprocess.Popen[bytes]:
    job = json.dumps({"device": str(device), "forms": forms})
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH", "")) if path)
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.Popen([*COMMAND, job], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _await(running: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    while time.monotonic() < until and any(process.poll() is None for process in running):
        time.sleep(POLL_S)


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.cuda.set_device(job["device"])
    run([ProductForm(*form) for form in job["forms"]], torch.device(job["device"]))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
