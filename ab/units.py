"""Compile the units of benchmarks: python ab/units.py PART PARTS"""
import sys, time
from kernels.cuda import prompt_index, attention, index_topk as m
from kernels.cuda.jit import cache_dir, cached_unit
todo = [("attend_rows", attention.hopper_defines(k, h)) for k in ("fp8", "bfloat16") for h in (128, 64)]
todo += [("prompt_index", prompt_index.defines_of(64, 1)), ("prompt_index", prompt_index.defines_of(64, 2)), ("prompt_merge", ())]
i = m.Indexer(64, 128, 2, 1); todo += [(i.unit(90), i.defines(90)), ("index_select", m.select_defines())]
a, n = map(int, sys.argv[1:])
for u, d in todo[a::n]:
    t = time.time()
    try: c = cached_unit(u, d, "sm_90", cache_dir()); print(u, d[0][1] if d else "", [(r.registers, r.spill_bytes) for r in c.resources], f"{time.time()-t:.1f}s", flush=True)
    except Exception as e: print(u, "FAILED", str(e)[:300])
