import os, re, statistics, sys, time, traceback
T0 = time.monotonic()
from pathlib import Path
from unittest.mock import patch
import torch
from benchmarks.prompt_layer import *
from kernels.cuda import block_fp8, deep_gemm, quantize
from kernels.block_fp8 import BlockFp8

OUT, MODE = Path(os.environ["AB"]), sys.argv[1]
def say(*a): print(f"[{MODE} {time.monotonic()-T0:4.0f}]", *a, flush=True)
def await_(name, limit=75):
    while not (OUT / name).exists() and time.monotonic() - T0 < limit: time.sleep(0.1)
def short(line): return re.sub(r"cute::UMMA::Major|deep_gemm::|at::native::|\(anonymous namespace\)::|void |hisparse::", "", line)[:92]

def map_():
    """Kernel of each padded count, and its time."""
    shapes = [(7168, 16384), (7168, 18432), (18432, 7168), (24576, 1536), (8192, 1536), (2240, 7168), (4096, 7168), (7168, 2048)]
    def weight(n, k):
        v = torch.randint(0, 100, (n, k), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        return BlockFp8(v, torch.ones(-(-n // 128), k // 128, device="cuda"))
    counts = deep_gemm.padded_counts(4096)
    done = []
    limit = 62
    for n, k in shapes:  # compile what is missing
        w = weight(n, k)
        for m in counts:
            if time.monotonic() - T0 > limit: break
            deep_gemm.product(quantize.quantize(torch.randn(m, k, device="cuda").bfloat16(), powers=True), w)
            done.append((n, k, m))
    torch.cuda.synchronize()
    say("compiled", len(done), "of", len(shapes) * len(counts))
    (OUT / "map.ready").touch(); await_("w8a8.done", 80)
    for n, k in shapes:
        w = weight(n, k); rows = {}
        ms = [m for a, b, m in done if (a, b) == (n, k)]
        for m in ms: rows[m] = quantize.quantize(torch.randn(m, k, device="cuda").bfloat16(), powers=True)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            for m in ms:
                for _ in range(5): deep_gemm.product(rows[m], w)
            torch.cuda.synchronize()
        ev = sorted((e for e in p.events() if e.device_type.name == "CUDA" and "gemm" in e.name), key=lambda e: e.time_range.start)
        text, last = [], None
        for i, m in enumerate(ms):
            five = ev[5 * i: 5 * i + 5]
            nums = re.findall(r"(\d+)u?\b", five[0].name.split("impl<")[1])
            form = f"{nums[5]}x{nums[6]}c{nums[14]}" + ("a" if "true" in five[0].name else "")
            us = statistics.median(e.time_range.end - e.time_range.start for e in five)
            text.append(f"{m}:{us:.0f}" + ("" if form == last else f"[{form}]")); last = form
        print(f"{n}x{k}", " ".join(text), flush=True)

def runner_of(matmul):
    config = published_config(FAMILY, layers=LAYERS)
    torch.manual_seed(1)
    ranks = SynthesisedRanks.draw(config, 8, BLOCK_TOKENS_MAX, "cuda")
    with patch.object(transformers_dsa, "prepare_quantized_products", lambda *a, **k: 0):
        r = synthetic_runner(config, kv_dtype="fp8", fp8=True, matmul=matmul, collectives=ranks, rows_max=BLOCK_TOKENS_MAX)
    return config, ranks, r

def ms_of(passed, layer): return measured(passed, layer)

def main_():
    config, ranks, runner = runner_of(MODE)
    say("built", f"{torch.cuda.memory_allocated()/1e9:.1f} GB")
    passed = LayerPass(runner, 32768, 4096)
    hidden = passed.prompts.hidden.clone()
    exchange = runner._layers._exchange
    module = deep_gemm if MODE == "w8a8" else block_fp8
    def run(layer=3):
        ranks.at = 0; passed.prompts.hidden.copy_(hidden); passed.launch(layer); torch.cuda.synchronize()
        return passed.prompts.hidden.clone()
    def with_(pieces, whole, one=8192):
        module.PIECE_TOKENS = pieces; exchange._whole = whole; quantize.PLACED_BY_ONE_MOST = one
    variants = {"main": (2048, False, 1 << 30), "whole 2048": (2048, True), "4096": (4096, True), "8192": (8192, True), "12288": (12288, True), "16384": (16384, True), "32768": (32768, True), "16384 one place": (16384, True, 1 << 30)}
    if MODE != "w8a8": variants = {k: v for k, v in variants.items() if k in ("main", "whole 2048", "4096", "8192")}
    found = {}
    for name, v in variants.items():
        try:
            with_(*v); found[name] = run(); run(0)
        except Exception as e: say(name, type(e).__name__, str(e)[:300])
    base = found["main"]
    say("warm; finite", bool(base.isfinite().all()), "| against main:", " ".join(f"{k} {'same' if torch.equal(f, base) else f'{off(f, base):.5f}'}" for k, f in found.items()))
    del found
    (OUT / f"{MODE}.ready").touch()
    if MODE == "w8a8": await_("weight_only.ready", 55); await_("map.ready", 60)
    else: await_("w8a8.done", 85)
    tf = {l: operations(config, runner.geometry, l, tokens=4096, context=32768, of=8) for l in (0, 3)}
    for name, v in variants.items():
        with_(*v); c = ms_of(passed, 3); torch.cuda.reset_peak_memory_stats(); a = torch.cuda.memory_allocated(); passed.launch(3); torch.cuda.synchronize()
        say(f"moe 4096 {name}: {c} {tf[3]/c['ms']/1e9:.0f} TFLOP/s, peak +{(torch.cuda.max_memory_allocated()-a)/1e9:.2f} GB")
    with_(*variants["16384" if MODE == "w8a8" else "main"])
    c = ms_of(passed, 0); say(f"dense 4096 {c} {tf[0]/c['ms']/1e9:.0f} TFLOP/s")
    print("\n".join(short(l) for l in kernels_of(passed, 3)[: 34 if MODE == "w8a8" else 14]), flush=True)
    if MODE == "w8a8":
        with_(*variants["main"])
        say("main:"); print("\n".join(short(l) for l in kernels_of(passed, 3)[:14]), flush=True)
        with_(*variants["16384"])
        for most in (32, 64, 128, 256):
            with patch.object(deep_gemm, "expected_rows", lambda a, t, most=most: most): c = ms_of(passed, 3)
            say(f"expected {most}: {c['ms']}")
        chosen = torch.rand(16384, 256, device="cuda").topk(8, 1).indices.int()
        for one in (1 << 30, 8192):
            quantize.PLACED_BY_ONE_MOST = one
            took = []
            for _ in range(7):
                b, e = (torch.cuda.Event(enable_timing=True) for _ in range(2)); b.record()
                for _ in range(10): quantize.place(chosen, 0, 32, multiple=128)
                e.record(); e.synchronize(); took.append(b.elapsed_time(e) * 100)
            say(f"place 131072, by one up to {one}: {statistics.median(took):.1f} us")
        quantize.PLACED_BY_ONE_MOST = 8192
        del passed; torch.cuda.empty_cache()
        p8 = LayerPass(runner, 32768, 8192)
        for l in (3, 0):
            c = ms_of(p8, l); t = operations(config, runner.geometry, l, tokens=8192, context=32768, of=8); say(f"8192 layer {l}: {c} {t/c['ms']/1e9:.0f} TFLOP/s")
    (OUT / f"{MODE}.done").touch()
def off(a, b): return float((a.float() - b.float()).norm() / b.float().norm())
try:
    (map_ if MODE == "map" else main_)()
except Exception:
    traceback.print_exc(limit=6)
    for s in ("ready", "done"): (OUT / f"{MODE}.{s}").touch()
