"""Variants of a rank's step: python ab/rank.py LAYERS"""
import gc, os, sys, time, statistics
from dataclasses import asdict
from unittest.mock import patch
import torch
from pathlib import Path
import kernels.cuda.jit as jit
SRC = jit.SOURCE_DIR
import benchmarks.decode as D
import benchmarks.rank as R
from benchmarks.rank_floor import Links
import worker.runners.swapping as W
import kernels.cuda.swap_in as SW
import kernels.cuda.index_topk as IX
from worker.runners import transformers_dsa
from worker.runners.synthetic import synthetic_matmul, synthetic_runner
from worker.weights.synth import published_config

from kernels.cuda import deep_gemm
deep_gemm.padded_counts = lambda most: [16, 64, 128]
END = float(os.environ.get('END', 'inf'))
began = time.monotonic()
LAYERS, GATE = int(sys.argv[1]), sys.argv[2]
blocks_main, early_main = SW.blocks_per_request, IX.Indexer.on_hopper
TIMELINE = []

def profile(executor, clock):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        D.turn_until(executor, clock, len(clock.steps) + D.PROFILED)
        torch.cuda.synchronize()
    ran = [e for e in profiler.events() or () if e.device_type.name == "CUDA"]
    TIMELINE[:] = sorted((e.time_range.start, e.time_range.end, e.device_resource_id, e.name) for e in ran)
    return [(e.name, e.time_range.start, e.time_range.end) for e in ran]
D.profile = profile

def short(name):
    n = name
    if "fp8_gemm" in n:
        import re
        return "dg " + ",".join(re.findall(r"(\d{3,5})u", n)[:2])
    for a, b in (("void at::native::", ""), ("(anonymous namespace)::", ""), ("unrolled_", ""), ("vectorized_", "")): n = n.replace(a, b)
    return n[:17]

def layer_line(number):
    """One layer of the last profiled step: from one index_scores to the next."""
    marks = [i for i, e in enumerate(TIMELINE) if "index_scores" in e[3]]
    i, j = marks[-number], marks[-number + 1]
    t0 = TIMELINE[i][0]
    streams = {}
    parts = []
    for s, e, r, n in TIMELINE[i : j + 1]:
        parts.append(f"{chr(97 + streams.setdefault(r, len(streams)))}{s - t0:.0f}+{e - s:.1f} {short(n)}")
    return "; ".join(parts)

def table(ran, top):
    spans = {}
    for n, s, e in ran: spans.setdefault(short(n), []).append(e - s)
    rows = sorted(spans.items(), key=lambda x: -sum(x[1]))[:top]
    return "; ".join(f"{n} {sum(v) / D.PROFILED:.0f}/{len(v) / D.PROFILED:.0f}" for n, v in rows)

config = published_config("deepseek-v3.2", layers=LAYERS)
ranks = R.SynthesisedRanks.draw(config, 8, 256, "cuda", quantized=synthetic_matmul("auto", device="cuda", fp8=True).quantizes_rows)
runner = synthetic_runner(config, kv_dtype="fp8", fp8=True, matmul="auto", collectives=ranks, rows_max=256)
print(f"weights {time.monotonic() - began:.0f}s", flush=True)
pool = D.make_pool(runner.geometry, config, int(os.environ.get("POOL", "16")))
print(f"pool {time.monotonic() - began:.0f}s", flush=True)
torch.cuda.empty_cache()
open(GATE + ".up", "w")
while not os.path.exists(GATE): time.sleep(0.2)
began = time.monotonic()

def run(name, rows, overlap=0.99, *, ranks=None, beside=24, show=(), context=32768, src=None):
    """`ranks`: of swap_in at such rows; `beside`: BESIDE_ROWS."""
    t = time.monotonic()
    if time.time() > END - 9: return print('late', name, rows, flush=True)
    choose = blocks_main if ranks is None else (lambda r, k, at_once: ranks)
    jit.SOURCE_DIR = Path(src) if src else SRC
    IX._kernels.cache_clear(); jit.load.cache_clear(); jit._module.cache_clear()
    cell = D.Cell(context, "hisparse", rows, overlap)
    try:
        with patch.object(transformers_dsa, "PREPARED_ROWS", [rows, 8 * rows]), patch.object(D, "STEPS", int(os.environ.get("STEPS", "120"))), \
             patch.object(SW, "blocks_per_request", choose), patch.object(W, "BESIDE_ROWS", beside):
            kept = {}
            share = D.share_out
            with patch.object(D, "share_out", lambda ran: kept.setdefault("ran", ran) and share(ran)):
                row = D.run(cell, runner, pool, 4096)
        parts = " ".join(f"{k} {v:.2f}" for k, v in row["parts_ms"].items())
        print(f"{name} x{rows} {overlap}: p50 {row['itl_p50_ms']:.3f} mean {row['step_ms']:.3f} [{parts}] {time.monotonic() - t:.0f}s", flush=True)
        if "table" in show: print("  " + table(kept["ran"], 44), flush=True)
        if "line" in show: print("  " + layer_line(3), flush=True)
    except BaseException as e:
        print(name, rows, "FAILED", repr(e)[:300], flush=True)
    gc.collect(); torch.cuda.empty_cache()

exec(open(sys.argv[3]).read())
