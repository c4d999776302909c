"""One prompt of --prompt tokens on one card, 4 layers of GLM-5's published dimensions, and what the allocator's peak was."""
import argparse, json, time
from unittest.mock import patch
import torch
from benchmarks.decode import make_pool
from benchmarks.prefix_gpu import PromptWorker, OUTPUT_TOKENS
from protocol.units import pages_for
from worker.runners import transformers_dsa
from worker.runners.synthetic import synthetic_runner
from worker.weights.synth import published_config

import benchmarks.resume
benchmarks.resume.TURNS_MAX = 10**9
parser = argparse.ArgumentParser()
parser.add_argument("--prompt", type=int)
parser.add_argument("--family", default="glm-5")
parser.add_argument("--matmul", default="weight_only")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--pass-tokens", type=int, default=8192)
parser.add_argument("--anchors", type=int, default=4)
parser.add_argument("--twice", action="store_true")
o = parser.parse_args()
began = time.time()
say = lambda **about: print(json.dumps({"prompt": o.prompt, "family": o.family, "matmul": o.matmul, "at_s": round(time.time() - began, 1)} | about), flush=True)
config = published_config(o.family, layers=o.layers)
config.max_position_embeddings = max(config.max_position_embeddings, o.prompt + 64)
if o.family == "glm-5" and o.anchors < o.layers:
    config.indexer_types = ["full"] * o.anchors + ["shared"] * (o.layers - o.anchors)
with patch.object(transformers_dsa, "prepare_quantized_products", lambda *_: 0):
    runner = synthetic_runner(config, kv_dtype="fp8", fp8=True, matmul=o.matmul)
g = runner.geometry
pages = pages_for(o.prompt + OUTPUT_TOKENS + 1)
gib = 1
while (gib << 30) < pages * g.page_bytes:
    gib *= 2
pool = make_pool(g, config, gib)
worker = PromptWorker(runner, pool, o.prompt, pass_tokens=o.pass_tokens)
state = worker.executor.state
torch.cuda.synchronize()
slab, keys = state.slab_rows.nbytes, state.index_keys.nbytes
say(layers=g.layers, groups=g.groups, weights_gib=round(sum(runner.weights_bytes().values()) / 2**30, 2), slab_mib=slab >> 20,
    keys_mib=keys >> 20, planned_mib=runner.prompt_bytes(o.pass_tokens) >> 20, block=runner.block_tokens_max, made=str(runner.info.arithmetic if hasattr(runner.info, "arithmetic") else ""))
for turn in range(1 + o.twice):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    counters = worker.executor.counters
    answer = worker.answer(3)
    peak, reserved = torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved()
    pages_used = pool[:pages_for(o.prompt)]
    say(turn=turn, first_s=round(answer.first_s, 2), tokens_per_s=round(o.prompt / answer.first_s), peak_mib=peak >> 20,
        with_slab_mib=(peak + slab) >> 20, with_product_slab_mib=(peak + slab + 2 * 262144 * g.row_bytes) >> 20,
        base_mib=base >> 20, reserved_mib=reserved >> 20, refilled_gb=round(counters.refilled_bytes / 1e9, 2), staged_gb=round(counters.staged_bytes / 1e9, 2),
        refill_gb_s=round(counters.refilled_bytes / max(counters.refilling.seconds, 1e-9) / 1e9, 1),
        units=counters.prompt_units, tripwires=state.tripwires.tolist(), tokens=answer.tokens[:6])
import os, sys
sys.stdout.flush(); os._exit(0)
