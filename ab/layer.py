import os, re, statistics, sys, time, traceback
T0 = time.monotonic()
from contextlib import nullcontext, ExitStack
from pathlib import Path
from unittest.mock import patch
import torch
import benchmarks.prompt_layer as pl
from benchmarks.prompt_layer import *
from kernels.cuda import block_fp8, deep_gemm, quantize
from worker.group.exchange import Exchange
from worker.weights.matmul import DECODED, Matmul
from worker.runners import synthetic

OUT, MODE, DRY = Path(os.environ["AB"]), sys.argv[1], bool(os.environ.get("DRY"))
DEVICE = "cpu" if DRY else "cuda"
def say(*a): print(f"[{MODE} {time.monotonic()-T0:4.0f}]", *a, flush=True)
def await_(name, limit=75):
    while not (OUT / name).exists() and time.monotonic() - T0 < limit: time.sleep(0.1)
def short(line): return re.sub(r"cute::UMMA::Major|deep_gemm::|at::native::|\(anonymous namespace\)::|void |hisparse::", "", line)[:92]
def off(a, b): return float((a.float() - b.float()).norm() / b.float().norm())
def sync(): DRY or torch.cuda.synchronize()

@torch.inference_mode()
def main_():
    quantized = MODE == "w8a8"
    config = published_config(FAMILY, layers=LAYERS)
    rows_max, context, tokens = BLOCK_TOKENS_MAX, 32768, 4096
    if DRY:
        from tests.worker.weights.test_modules import WHOLE
        config = type(config)(**WHOLE | {"hidden_size": 256, "num_hidden_layers": 4, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3 + ["sparse"], "max_position_embeddings": 4096})
        rows_max, context, tokens = 128, 256, 128
    of = 2 if DRY else 8
    def ranks_of(q):
        torch.manual_seed(1)
        return SynthesisedRanks.draw(config, of, rows_max, DEVICE, quantized=q)
    ranks = {q: ranks_of(q) for q in ((False, True) if quantized else (False,))}
    with patch.object(transformers_dsa, "prepare_quantized_products", lambda *a, **k: 0):
        runner = synthetic_runner(config, device=DEVICE, kv_dtype="fp8", fp8=True, matmul=MODE, collectives=ranks[quantized], rows_max=rows_max)
    def exchange(q, matmul):
        return Exchange(ranks[q], hidden=config.hidden_size, choices=config.num_experts_per_tok, rows_max=rows_max, dtype=torch.bfloat16, device=DEVICE, deterministic=False, matmul=matmul)
    own = runner._layers._exchange
    pieces, whole = exchange(False, None), exchange(False, DECODED)
    say("built", "" if DRY else f"{torch.cuda.memory_allocated()/1e9:.1f} GB", own.row_dtype, own.bytes, whole.bytes)
    module = deep_gemm if quantized else block_fp8
    def with_(piece, via, one=8192):
        module.PIECE_TOKENS, runner._layers._exchange, quantize.PLACED_BY_ONE_MOST = piece, via, one
    v = {"main": (2048, pieces, 1 << 30), "bf16 2048": (2048, whole), "bf16 16384": (16384, whole)}
    if quantized: v |= {f"fp8 {n}": (n, own) for n in (2048, 4096, 8192, 12288, 16384, 32768)} | {"fp8 16384 one place": (16384, own, 1 << 30)}
    else: v |= {"bf16 4096": (4096, whole), "bf16 8192": (8192, whole)}; del v["bf16 16384"]
    last = "fp8 16384" if quantized else "bf16 2048"
    for count in (64, tokens):
        passed = LayerPass(runner, context, count, device=DEVICE)
        hidden, found = passed.prompts.hidden.clone(), {}
        for name, one in v.items():
            if count == 64 and name not in ("main", "bf16 2048", "fp8 2048", last): continue
            try:
                for r in ranks.values(): r.at = 0
                with_(*one); passed.prompts.hidden.copy_(hidden); passed.launch(3); sync(); found[name] = passed.prompts.hidden.clone()
                if name == "main" and count == tokens: passed.launch(0); sync()
            except Exception as e: say(name, type(e).__name__, str(e)[:300])
        base = found.get("main")
        if base is not None: say(count, "finite", bool(base.isfinite().all()), f"moved {off(base, hidden):.3f}", "against main:", " ".join(f"{k}: {'same' if torch.equal(f, base) else f'{off(f, base):.5f}'}" for k, f in found.items()))
    del found
    (OUT / f"{MODE}.ready").touch()
    if quantized: await_("weight_only.ready", 62); await_("tests.done", 66)
    else: await_("w8a8.done", 88)
    tf = {l: 1e12 if DRY else operations(config, runner.geometry, l, tokens=tokens, context=context, of=of) for l in (0, 3)}
    for name, one in v.items():
        with_(*one); c = measured(passed, 3); sync()
        text = ""
        if not DRY:
            torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); a = torch.cuda.memory_allocated(); passed.launch(3); sync()
            text = f"peak +{(torch.cuda.max_memory_allocated()-a)/1e9:.2f} GB"
        say(f"moe {tokens} {name}: {c} {tf[3]/c['ms']/1e9:.0f} TFLOP/s {text}")
    with_(*v[last])
    c = measured(passed, 0); say(f"dense {tokens} {c} {tf[0]/c['ms']/1e9:.0f} TFLOP/s")
    if not DRY: print("\n".join(short(l) for l in kernels_of(passed, 3)[: 38 if quantized else 12]), flush=True)
    if quantized:
        with_(*v["main"])
        if not DRY: say("main:"); print("\n".join(short(l) for l in kernels_of(passed, 3)[:12]), flush=True)
        with_(*v[last])
        for most in (64, 128, 256):
            with patch.object(deep_gemm, "expected_rows", lambda a, t, most=most: most): c = measured(passed, 3)
            say(f"expected {most}: {c['ms']}")
        chosen = torch.rand(16384, 256, device=DEVICE).topk(8, 1).indices.int()
        for one in (1 << 30, 8192):
            quantize.PLACED_BY_ONE_MOST, took = one, []
            for _ in range(7):
                b, e = (torch.cuda.Event(enable_timing=True) for _ in range(2)); b.record()
                for _ in range(1 if DRY else 10): quantize.place(chosen, 0, 32, multiple=128)
                e.record(); e.synchronize(); took.append(b.elapsed_time(e) * 100)
            say(f"place 131072, by one up to {one}: {statistics.median(took):.1f} us")
        quantize.PLACED_BY_ONE_MOST = 8192
        del passed
        if not DRY: torch.cuda.empty_cache()
        p8 = LayerPass(runner, context, 2 * tokens, device=DEVICE)
        for l in (3, 0):
            c = measured(p8, l); t = 1e12 if DRY else operations(config, runner.geometry, l, tokens=2 * tokens, context=context, of=of); say(f"{2 * tokens} layer {l}: {c} {t/c['ms']/1e9:.0f} TFLOP/s")
    (OUT / f"{MODE}.done").touch()

try:
    with ExitStack() as stack:
        if DRY:
            from tests.emulated.device import Device
            from tests.support.fake_deep_gemm import FakeDeepGemm
            fake = FakeDeepGemm()
            class Event:
                def __init__(self, **_): pass
                def record(self): self.t = time.perf_counter()
                def synchronize(self): pass
                def elapsed_time(self, o): return (o.t - self.t) * 1e3
            stack.enter_context(patch.object(deep_gemm, "library", lambda: fake))
            stack.enter_context(patch.object(torch.cuda, "Event", Event)); stack.enter_context(patch.object(torch.cuda, "synchronize", lambda *a: None))
            stack.enter_context(Device().installed())
            stack.enter_context(patch.object(synthetic, "resolve_matmul", lambda asked, **_: Matmul("fake", True) if asked == "w8a8" else DECODED))
            stack.enter_context(patch.object(pl, "REPEATS", 1))
        main_()
except Exception:
    traceback.print_exc(limit=-6)
    for s in ("ready", "done"): (OUT / f"{MODE}.{s}").touch()
