"""Loading a repository: its rate, and the peak of this process's anonymous and shared memory.

    python -m benchmarks.load_weights PATH [--device cuda] [--dtype bfloat16]

Prints one JSON object. The peak is read from /proc/self/status a hundred times a second.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Final

import torch

from worker.weights.model import held_bytes, load_model
from worker.weights.quantization import read_quantization

INTERVAL_S: Final = 0.01


def own_bytes() -> int:
    """Resident anonymous and shared memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    rows = (line.split() for line in lines)
    return sum(int(row[1]) * 1024 for row in rows if row[0] in ("RssAnon:", "RssShmem:"))


class Peak(threading.Thread):
    """Watches `own_bytes` until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = own_bytes()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(INTERVAL_S):
            self.bytes = max(self.bytes, own_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    quantization = read_quantization(json.loads((asked.path / "config.json").read_text()), asked.path)
    import transformers.models.auto.modeling_auto  # noqa: F401 - what is imported is not what is loaded

    before, peak = own_bytes(), Peak()
    peak.start()
    began = time.monotonic()
    model = load_model(
        asked.path,
        quantization,
        dtype=getattr(torch, asked.dtype),
        device=asked.device,
        keeps_fp8=asked.device != "cpu",
    )
    took_s = time.monotonic() - began
    peak.stopped.set()
    peak.join()
    stored = sum(file.stat().st_size for file in asked.path.glob("*.safetensors"))
    held = held_bytes(model)
    report = {
        "stored_bytes": stored,
        "held_bytes": held,
        "seconds": round(took_s, 2),
        "stored_gb_per_s": round(stored / took_s / 1e9, 3),
        "own_bytes_before": before,
        "own_bytes_peak": peak.bytes,
        "beyond_tensors_bytes": peak.bytes - before - (sum(held.values()) if asked.device == "cpu" else 0),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
