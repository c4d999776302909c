"""First tokens behind a restored prefix of 74k, and of whole prompts of 32k, by the tree on PYTHONPATH."""
import json, os, sys, time
from statistics import median
import torch
import benchmarks.prefix_gpu as b
from benchmarks.decode import make_pool
from worker.runners.synthetic import synthetic_config, synthetic_runner
import benchmarks.resume
benchmarks.resume.TURNS_MAX = 10**9
tag, warm_n, cold_n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
began = time.time()
config = synthetic_config("deepseek-v3.2", 4)
runner = synthetic_runner(config, kv_dtype="fp8")
pool = make_pool(runner.geometry, config, 1)
found, prefix = {}, 74_112
def show(times): return {"ms": round(1e3 * median(times), 2), "all": [round(1e3 * t, 1) for t in sorted(times)]}
for new in (256, 753):
    worker = b.PromptWorker(runner, pool, prefix + new, pass_tokens=8192)
    cold = worker.answer(5); warm = worker.answer(5, prefix); same = sum(x == y for x, y in zip(cold.tokens, warm.tokens))
    found[f"74k+{new}"] = show([worker.answer(n, prefix).first_s for n in range(warm_n)]) | {"same": same, "cold_ms": round(1e3 * cold.first_s)}
    worker.close(); del worker
worker = b.PromptWorker(runner, pool, 32_768, pass_tokens=8192)
worker.answer(1)
found["32k"] = show([worker.answer(n).first_s for n in range(cold_n)])
print(json.dumps({"tag": tag, "s": round(time.time() - began, 1)} | found), flush=True)
os._exit(0)
