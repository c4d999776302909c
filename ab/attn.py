"""python ab/bench.py [--check] [--cells a,b] DIR[:K=V,...] ..."""
import os, sys, time, statistics, argparse, ctypes
from pathlib import Path
import torch
sys.path.insert(0, ".")
import kernels.cuda.jit as jit
import kernels.cuda.attention as A
import benchmarks.attention as B
from benchmarks.index_topk import capture
from kernels.cuda.launch import processors, stream_of
from tests.support.attention_rig import Case

EXTRA, SPLITS, TOGETHER = (), None, None
defines_of, cut_of, kernel_main = A.hopper_defines, A.hopper_cut_of, A._hopper_kernel
A.hopper_defines = lambda kind, heads: (*defines_of(kind, heads), *(EXTRA if kind == "bfloat16" or "BOTH" in os.environ else ()))
def forced(kernel, heads, batch, row_blocks):
    cut = cut_of(kernel, heads, batch, row_blocks)
    return A.Cut(TOGETHER or cut.heads, SPLITS or cut.splits)
forced.cache_clear = cut_of.cache_clear
A.hopper_cut_of = forced
def attend(case, splits=None, layer=1):
    A.attend_rows(case.state, layer, case.queries, case.out_rows, case.scaling, case.out, blocks=A.HOPPER_BLOCKS, splits=splits)
def choose(spec):
    global EXTRA, SPLITS, TOGETHER
    d, _, extra = spec.partition(":")
    jit.SOURCE_DIR = Path(d)
    pairs = [(a.split("=")[0], int(a.split("=")[1])) for a in extra.split(",") if a]
    SPLITS, TOGETHER = dict(pairs).get("SPLITS"), dict(pairs).get("TOGETHER"); EXTRA = tuple(x for x in pairs if x[0] not in ("SPLITS", "TOGETHER"))
    cut_of.cache_clear(); kernel_main.cache_clear(); jit.load.cache_clear(); jit._module.cache_clear()

def reference_error(cell, rows):
    worst = 0.0
    for r in rows:
        kv = cell.form.decode(cell.state.rows[0][cell.out_rows[r].clamp(min=0).long()]).double()
        sc = cell.queries[r].double() @ kv.T * B.SCALING
        expected = sc.softmax(-1) @ kv[:, :512]
        worst = max(worst, float((cell.out[r].double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9)))
    return worst

class Cell(B.Cell):
    def __init__(self, kind, phase, batch, heads):
        B.HEADS = heads
        super().__init__(kind, phase, batch)
    def run(self, layer):
        self.scaling = B.SCALING
        attend(self, None, layer)

def truth(case, rows, bf16=False, layer=1):
    stored = case.form.decode(case.state.rows[layer])
    stored = (stored.bfloat16() if bf16 else stored).double()
    out = torch.zeros(len(rows), *case.out.shape[1:], dtype=torch.float64, device="cuda")
    for i, row in enumerate(rows):
        e = case.out_rows[row]; held = stored[e[e >= 0].long()]
        if len(held): out[i] = (case.queries[row].double() @ held.T * case.scaling).softmax(-1) @ held[:, :512]
    return out
def worst(case, out, rows, bf16=False): return float((out[rows].double() - truth(case, rows, bf16)).abs().nan_to_num(9e9).max())
def check(spec):
    bad, n, sharp = [], 0, []
    t = time.time()
    for kind in os.environ.get("KINDS", "bfloat16,fp8").split(","):
        for shape in ({"heads": 128, "k": 2048, "batch": 2, "stored": 5000}, {"heads": 64, "k": 100, "batch": 70}, {"heads": 72, "k": 333},
                      {"heads": 192, "k": 1, "batch": 1}, {"heads": 128, "k": 700, "batch": 150, "stored": 3000}, {"heads": 64, "k": 2048, "batch": 140, "stored": 5000}):
            if shape["heads"] <= 64 and "64" not in os.environ.get("HD", ""): continue
            case = Case(kind, torch.bfloat16, device="cuda", latent=512, rope=64, **shape)
            batch = shape.get("batch", 3)
            rows = sorted({0, 1, 2, 65, 66, 67, 100, batch - 2, batch - 1} & set(range(batch)))
            q, e, o = case.queries, case.out_rows, case.out
            for splits in (None, 1, 2, 7) if batch < 70 else (None, 1):
                outs = []
                for _ in range(3):
                    case.out.fill_(float("nan")); attend(case, splits); torch.cuda.synchronize(); outs.append(case.out.clone())
                n += 1
                err, same = worst(case, outs[0], rows), all(torch.equal(x, outs[0]) for x in outs)
                if not err < 2.0**-6 or not same: bad.append((kind, shape["heads"], shape["k"], splits, round(err, 4), same))
                if batch >= 100 and splits == 1:
                    order = torch.randperm(batch, device="cuda")
                    case.queries, case.out_rows, case.out = q[order].contiguous(), e[order].contiguous(), torch.empty_like(o)
                    attend(case, 1); torch.cuda.synchronize()
                    if not torch.equal(case.out, outs[0][order]): bad.append("place shows")
                    case.relocate(7); attend(case, 1); torch.cuda.synchronize()
                    if not torch.equal(case.out, outs[0][order]): bad.append("relocation shows")
        print("  ", kind, n, f"{time.time()-t:.1f}s", bad, flush=True)
    for kind in os.environ.get("KINDS", "bfloat16,fp8").split(","):
        for heads in map(int, os.environ.get("HD", "64,128").split(",")):
            for falling in (False, True):
                for splits in (1, 3):
                    case = Case(kind, torch.bfloat16, device="cuda", latent=512, rope=64, heads=heads, k=700, batch=2, stored=5000)
                    case.queries *= 30
                    case.sort_entries(0, 5, falling=falling)
                    attend(case, splits); torch.cuda.synchronize(); n += 1
                    sharp.append(f"{kind[:2]}{heads}{'f' if falling else 'r'}{splits} {worst(case, case.out, [0, 1]):.4f}/{worst(case, case.out, [0, 1], True):.4f}")
    print(f"check {spec}: {n} cases {time.time()-t:.1f}s bad: {bad}; sharp, error to rows / to rows rounded to bfloat16: {' '.join(sharp)}", flush=True)

CELLS = {}
for kind, short in (("fp8", "f8"), ("bfloat16", "bf")):
    for heads in (64, 128):
        for b in (4, 8, 16, 24, 32, 40, 48, 64, 66, 77, 108, 128): CELLS[f"{short}x{heads}d{b}"] = (kind, "decode", b, heads)
        for b in (512, 2048, 4096): CELLS[f"{short}x{heads}p{b}"] = (kind, "prompt", b, heads)
def main():
    a = argparse.ArgumentParser(); a.add_argument("--check", action="store_true"); a.add_argument("--cells", default=""); a.add_argument("--noerr", action="store_true")
    a.add_argument("specs", nargs="+"); o = a.parse_args()
    if o.check:
        for spec in o.specs:
            choose(spec)
            try: check(spec)
            except Exception as e:
                print("check", spec, "FAILED", repr(e)[:300], flush=True); return
    for name in filter(None, o.cells.split(",")):
        cell = Cell(*CELLS[name]); cell.layers = min(cell.layers, 16); graphs = []
        for spec in o.specs:
            choose(spec)
            try:
                cell.out.fill_(float("nan")); cell.run(0); torch.cuda.synchronize()
                err = 0 if o.noerr else reference_error(cell, [0, len(cell.out) - 1])
                graphs.append((spec, err, capture(cell.run, cell.layers)))
            except Exception as e: print(name, spec, "FAILED", repr(e)[:200], flush=True)
        times = {spec: [] for spec, _, _ in graphs}
        for turn in range(9 if cell.phase == "prompt" else 15):
            for spec, _, g in graphs:
                b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                b.record(); g.replay(); e.record(); e.synchronize()
                if turn > 1: times[spec].append(b.elapsed_time(e) * 1e3 / cell.layers)
        print(f"{name:9}", " ".join(f"{statistics.median(times[spec]):.1f}" + ("" if o.noerr else f"({min(times[spec]):.1f}-{max(times[spec]):.1f})e{err:.3f}") for spec, err, _ in graphs), flush=True)
        del cell, graphs; torch.cuda.empty_cache()
main()
