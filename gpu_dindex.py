"""Throw-away: variants of the decode index on one H200."""
import itertools, os, statistics, subprocess, sys, time, traceback
import torch

KINDS = {}

def fresh(**changes):
    from kernels.cuda import index_topk as m
    for name, value in changes.items():
        assert hasattr(m, name), name
        setattr(m, name, value)
    m._kernels.cache_clear()
    if hasattr(m, "_clusters"):
        m._clusters.cache_clear()

def scores():
    from tests.gpu.index_bench import IndexBench, SCALE
    from kernels.cuda import index_topk as m
    from kernels.index_topk import index_key_format
    for parts, warps, heads in ((1, 12, 64), (2, 12, 64), (1, 8, 32), (1, 16, 64), (2, 8, 64)):
        fresh(HOPPER_PARTS=parts, HOPPER_WARPS=warps)
        bench = IndexBench([9000, 100, 33_001, 2049, 5000], kind="fp8", heads=heads, dim=128, k=2048, seed=3, padding=1)
        out = torch.full((6, 2048), 777, dtype=torch.int32, device="cuda")
        keys = index_key_format(bench.state, 128, torch.bfloat16)
        m.index_topk(bench.state, 1, bench.queries, bench.weights, bench.batch, keys, SCALE, out, only_scores=True)
        torch.cuda.synchronize()
        told = []
        for row, got in enumerate(bench.scores()):
            if got is None: continue
            k = bench.keys(row).double(); q = bench.queries[row].double(); w = bench.weights[row].double()
            terms = torch.relu(k @ q.t() * SCALE) * w
            want = terms.sum(1)
            reach = ((k.abs() @ q.abs().t()) * SCALE * w.abs()).sum(1)
            told.append((float(((got - want).abs() / reach).max()), float((got - want).std() / want.std())))
        h = m.scratch_of(bench.state).histogram.sum(1).tolist()
        print(f"parts {parts} warps {warps} heads {heads} err/reach, noise/spread", [(f"{a:.2e}", f"{b:.2e}") for a, b in told], "hist", h, flush=True)

def quality():
    from tests.gpu.index_bench import IndexBench, SCALE
    for parts in (1, 2):
        fresh(HOPPER_PARTS=parts)
        for length in (32768, 131072):
            bench = IndexBench([length], kind="fp8", heads=64, dim=128, k=2048, seed=length)
            bench.weights.uniform_()
            out = bench.run()[0].long()
            k = bench.keys(0).double(); q = bench.queries[0].double(); w = bench.weights[0].double()
            want = torch.cat([(torch.relu(c @ q.t() * SCALE) * w).sum(1) for c in k.split(1 << 14)])
            best = want.topk(2048)
            overlap = len(set(best.indices.tolist()) & set(out.tolist())) / 2048
            print(f"parts {parts} length {length} overlap {overlap:.4f} sum {float(want[out].sum() / best.values.sum()):.6f}", flush=True)

def select():
    from tests.gpu.index_bench import IndexBench
    for changes in ({}, dict(RANKS_MAX=1), dict(RANKS_MAX=4, SOLO_POSITIONS=1), A, dict(B, HOPPER_PARTS=2), dict(HOPPER_WARPS=16, HOPPER_PARTS=2)):
        fresh(**{**DEFAULT, **changes})
        for lengths in ([9000, 100, 33_001, 2049, 5000], [300_001], [1_048_576], [131_072] * 16, [8192] * 64, list(range(2040, 2070))):
            IndexBench(lengths, kind="fp8", heads=64, dim=128, k=2048, seed=4).check()
        IndexBench([2100, 8192, 8191, 8193, 2049, 4097], heads=8, dim=32, k=2048, exact=True, seed=5).check()
        b = IndexBench([5000, 300_000], k=2048, seed=1)
        b.state.index_keys[1].zero_(); b.check()
        print("exact", changes, flush=True)

DEFAULT = dict(HOPPER_PARTS=1, HOPPER_WARPS=12, HOPPER_STAGES=12, SELECT_WARPS=16, SOLO_POSITIONS=8192, RANKS_MAX=16, SELECT_BLOCKS=1, SCORE_BLOCKS=1)
A = dict(SELECT_BLOCKS=2, SCORE_BLOCKS=2, HOPPER_STAGES=8, HOPPER_WARPS=8)
B = dict(SELECT_BLOCKS=2, SCORE_BLOCKS=2, HOPPER_STAGES=9, HOPPER_WARPS=12)
VARIANTS = [
    {},
    dict(HOPPER_WARPS=16),
    dict(HOPPER_WARPS=16, HOPPER_PARTS=2),
    dict(HOPPER_PARTS=2),
    dict(RANKS_MAX=8),
    dict(RANKS_MAX=4),
    dict(RANKS_MAX=2),
    dict(RANKS_MAX=1),
    dict(HOPPER_STAGES=15),
    dict(HOPPER_STAGES=16, HOPPER_WARPS=16),
    dict(SELECT_BLOCKS=2),
    A,
    dict(A, RANKS_MAX=8),
    dict(A, RANKS_MAX=4),
    dict(A, RANKS_MAX=1),
    dict(A, HOPPER_PARTS=2),
    B,
    dict(B, RANKS_MAX=8),
    dict(B, RANKS_MAX=4),
    dict(B, RANKS_MAX=1),
]

def times():
    from benchmarks import index_topk as b
    began = time.monotonic()
    rate = b.copy_bytes_per_us()
    print(f"copy {rate / 1000:.0f} GB/s {torch.cuda.get_device_name()}", flush=True)
    for context, batch in itertools.product((8192, 32768, 131072), (1, 16, 64)):
        fresh(**DEFAULT)
        cell = b.Cell("fp8", context, batch)
        memory = batch * context * 132 / rate
        goal = {(8192,1):8.4,(8192,16):14.0,(8192,64):28.3,(32768,1):15.6,(32768,16):35.0,(32768,64):89,(131072,1):16.7,(131072,16):90.4,(131072,64):316}[context, batch]
        print(f"== {context} x {batch}: goal {goal} memory {memory:.1f} groups {cell.groups}", flush=True)
        for changes in VARIANTS:
            if time.monotonic() - began > BUDGET: print("out of time"); return
            fresh(**{**DEFAULT, **changes})
            try:
                cell.whole(0)
                whole = b.timed(b.capture(cell.whole, cell.groups).replay, cell.groups)
                cell.check()
                only = b.timed(b.capture(cell.scores, cell.groups).replay, cell.groups)
                b.scratch_of(cell.state).histogram.zero_()
                b.scratch_of(cell.state).counters.zero_()
                w = statistics.median(whole)
                print(f"{w:7.2f} [{min(whole):.2f}-{max(whole):.2f}] scores {statistics.median(only):7.2f} {'ok ' if w <= goal else '   '} {changes}", flush=True)
            except Exception as problem:
                print("FAILED", changes, repr(problem)[:300], flush=True)
        del cell
        torch.cuda.empty_cache()

BUDGET = float(os.environ.get("LEFT", 60))
STAGES = {"scores": (scores, 25), "select": (select, 30), "quality": (quality, 15), "times": (times, 75), "tests": (None, 60)}
if __name__ == "__main__":
    if len(sys.argv) > 1:
        STAGES[sys.argv[1]][0]()
    else:
        origin = time.monotonic()
        for name, (_, limit) in STAGES.items():
            start = time.monotonic()
            if name == "times": limit = min(75, 114 - (start - origin)); os.environ["LEFT"] = str(limit - 6)
            if name == "tests": limit = 116 - (start - origin)
            print("#", name, flush=True)
            try:
                command = [sys.executable, __file__, name]
                if name == "tests": command = [sys.executable, "-m", "pytest", "tests/gpu/test_index_topk.py", "-q", "-n0", "-p", "no:cacheprovider"]; os.environ["GPU_TEST_EXAMPLES"] = "12"
                code = subprocess.run(command, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                code = "timeout"
            print("#", name, code, f"{time.monotonic() - start:.1f} s", flush=True)
