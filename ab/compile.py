"""Compile variants into the cache: python ab/compile.py DIR[:K=V,K=V] ..."""
import sys, time
from pathlib import Path
import kernels.cuda.jit as jit
import kernels.cuda.attention as A
for spec in sys.argv[1:]:
    d, _, extra = spec.partition(":")
    jit.SOURCE_DIR = Path(d)
    extra = tuple((a.split("=")[0], int(a.split("=")[1])) for a in extra.split(",") if a and not a.startswith(("SPLITS", "TOGETHER")))
    import os
    for kb in map(int, os.environ.get("KB", "1,2").split(",")):
        for heads in (None,) if "base" in d else map(int, os.environ.get("HD", "128,64").split(",")):
            t = time.time()
            defines = (*A.hopper_defines("fp8" if kb == 1 else "bfloat16", heads), *extra)
            try:
                c = jit.cached_unit("attend_rows", defines, "sm_90", jit.cache_dir())
                print(spec, kb, heads, c.resources[0].spill_bytes, f"{time.time()-t:.1f}s", flush=True)
            except Exception as e:
                print(spec, kb, heads, "FAILED", str(e)[:1500], flush=True)
