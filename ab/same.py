"""Tokens and log-probabilities of prompts that two ranks on one card split, beside unsplit ones in units of other sizes."""
import json, os, sys, threading, time
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch
import torch
import benchmarks.prefix_gpu as b
import benchmarks.resume
from benchmarks.serve.model import config_of
from protocol.config_checks import WEIGHT_ONLY
from protocol.messages import LOGPROBS_MAX
from protocol.settings import WorkerSettings
from protocol.units import BLOCK_TOKENS_MAX, pages_for
from tests.support.thread_ranks import DeviceCollectives, FakeControl, ThreadCollectives
from worker.device.pinned import host_tensor
from worker.runners import transformers_dsa
from worker.runners.synthetic import synthetic_runner
benchmarks.resume.TURNS_MAX = 10**9
tiny = "--tiny" in sys.argv
matmul = sys.argv[1]
prompts, tokens = (2, 300) if tiny else (6, 16_384)
device, passes = ("cpu", 128) if tiny else ("cuda", 8192)
b.WorkerSettings = partial(WorkerSettings, graphs=False, **({"split_tokens": 24} if tiny else {}))
config, began = config_of(0 if tiny else 5, tiny=tiny), time.time()
ranks = (ThreadCollectives if tiny else DeviceCollectives).of(2)
kinds = {"device": device, "kv_dtype": "auto" if tiny else "fp8", "fp8": not tiny, "matmul": matmul}
with patch.object(transformers_dsa, "prepare_quantized_products", lambda *_: 0):
    runners = [synthetic_runner(config, collectives=own, rows_max=BLOCK_TOKENS_MAX, **kinds) for own in ranks]
controls = []
controls += [FakeControl(controls) for _ in range(2)]
workers, over, ready = {}, threading.Event(), threading.Barrier(2)
found = {}
def rank_of(rank):
    group = SimpleNamespace(rank=rank, size=2, control=controls[rank], collectives=ranks[rank])
    pool = host_tensor(3 * pages_for(tokens) + 6, runners[rank].geometry.page_bytes, dtype=torch.uint8, device=device)
    workers[rank] = w = b.PromptWorker(runners[rank], pool, tokens, group=group, pass_tokens=passes, device=device)
    ready.wait(300)
    if rank:
        while not over.is_set():
            if not w.executor.turn():
                time.sleep(0.0002)
        return
    plain_block = [workers[n].executor._pace.block for n in range(2)]
    def setting(split, block):
        time.sleep(0.1)
        for n in range(2):
            workers[n].executor._rounds._agreement._split_tokens = split
            workers[n].executor._pace.block = (lambda *, beside_steps, left_s=0.0: block) if block else plain_block[n]
    names = {"plain": (0, 0), "again": (0, 0), "blocks 1024": (0, 64 if tiny else 1024), "blocks 512": (0, 32 if tiny else 512), "split": (24 if tiny else 1024, 0), "split 1024": (24 if tiny else 1024, 64 if tiny else 1024)}
    for name, about in names.items():
        setting(*about)
        units = w.executor.counters.split_units
        found[name] = [w.answer(seed, logprobs=LOGPROBS_MAX) for seed in range(prompts)]
        print(name, "split units", w.executor.counters.split_units - units, [round(1e3 * one.first_s, 1) for one in found[name]], flush=True)
    for name, answers in found.items():
        total, same = b.Comparison(), []
        for whole, other in zip(found["plain"], answers):
            total.add(whole, other, b.TIE_BOUND)
            same.append(next((i for i, (x, y) in enumerate(zip(whole.tokens, other.tokens)) if x != y), len(whole.tokens)))
        first = [round(b.changed(x.logprobs[0], y.logprobs[0]), 4) for x, y in zip(found["plain"], answers)]
        print(json.dumps({"matmul": matmul, "variant": name, "same_until": same, "first_token_change": first, "change_max": round(total.change_max, 4),
              "mismatched": total.mismatched, "gaps": [round(g, 4) for g in total.gaps]}), flush=True)
    over.set()
def run(rank):
    try:
        rank_of(rank)
    except BaseException:
        import traceback; traceback.print_exc(); sys.stdout.flush(); os._exit(1)
threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
[t.start() for t in threads]; threads[0].join()
print(f"took {time.time() - began:.0f} s", flush=True); os._exit(0)
