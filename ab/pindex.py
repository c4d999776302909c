"""Variants of prompts' index: python ab/pindex.py compile|run SPEC..."""
import statistics, sys, time
from pathlib import Path
import kernels.cuda.jit as jit
from kernels.cuda import prompt_index as m
SHAPES = {k: dict(v) for k, v in m.SHAPES.items()}
def choose(spec):
    d, _, extra = spec.partition(":")
    jit.SOURCE_DIR = Path(d)
    for k in SHAPES: m.SHAPES[k] = dict(SHAPES[k])
    for a in filter(None, extra.split(",")):
        n, v = a.split("="); m.SHAPES[1][n] = int(v)
    jit.load.cache_clear(); jit._module.cache_clear(); m.kernels_of.cache_clear()
what, *specs = sys.argv[1:]
if what == "compile":
    for spec in specs:
        choose(spec)
        for kb in (1, 2):
            if kb == 2 and ":" in spec: continue
            t = time.time()
            try: c = jit.cached_unit("prompt_index", m.defines_of(64, kb), "sm_90", jit.cache_dir()); print(spec, kb, c.resources[0].spill_bytes, f"{time.time()-t:.1f}s")
            except Exception as e: print(spec, kb, "FAILED", str(e)[:300])
        jit.cached_unit("prompt_merge", (), "sm_90", jit.cache_dir())
    sys.exit()
import torch
import benchmarks.prompt_index as b
from kernels.prompt_pieces import PromptPiece, PromptPieces
from kernels.prompt_topk import prompt_topk
from kernels.row_format import index_key_format
began = time.time()
for kind, context, tokens in (("fp8", 8192, 4096), ("fp8", 32768, 4096), ("fp8", 8192, 4096), ("fp8", 8192, 1024), ("fp8", 131072, 1024), ("fp8", 32768, 128), ("fp8", 32768, 1), ("bfloat16", 8192, 4096)):
    torch.manual_seed(context + tokens)
    form = index_key_format(kind, 128); state = b._state(form, context)
    queries = torch.randn(tokens, 64, 128, device="cuda").bfloat16(); weights = torch.rand(tokens, 64, device="cuda") / 8
    pieces = PromptPieces.of([PromptPiece(0, tokens, 0, context - tokens)], queries.device)
    out, rows = torch.empty(2, tokens, 2048, dtype=torch.int32, device="cuda")
    def launch(group): prompt_topk(state, group, pieces, queries, weights, b.SCALE, out, rows)
    times, same, first = {s: [] for s in specs}, [], None
    for turn in range(9):
        for spec in specs:
            if kind == "bfloat16" and ":" in spec: continue
            choose(spec)
            if turn == 0:
                out.fill_(-7); rows.fill_(-7); launch(0); torch.cuda.synchronize()
                now = (out.clone(), rows.clone()); first = first or now
                same.append(all(torch.equal(x, y) for x, y in zip(now, first)))
                if spec == specs[0]: same[-1] = bool((out >= 0).all() or context < 3001) and b._checked(state, form, context, queries, weights, out)["sum_share"] > 0.999 if context > 3000 else True
            else: times[spec].append(b._time(launch))
    print(f"{kind[:2]} {context}x{tokens}:", " ".join(f"{statistics.median(t):.0f}({min(t):.0f})" for t in times.values() if t), "same" if all(same) else f"DIFFER {same}", flush=True)
    del state
