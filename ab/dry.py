import sys, runpy, torch, functools
from unittest.mock import MagicMock
import benchmarks.prefix_gpu as b, benchmarks.decode as d
from benchmarks.serve.model import config_of
import worker.runners.synthetic as syn, worker.weights.synth as ws
tiny = lambda *a, **k: config_of(4, tiny=True)
orig = syn.synthetic_runner
ws.published_config = tiny; syn.synthetic_config = tiny
syn.synthetic_runner = lambda config, **k: orig(config, device="cpu", kv_dtype="fp8" if False else "auto")
def pool(g, c, n): return torch.zeros(4000, g.page_bytes, dtype=torch.uint8)
d.make_pool = pool
class W(b.PromptWorker):
    def __init__(self, runner, pool, tokens, **k): super().__init__(runner, pool, tokens, **k, device="cpu")
b.PromptWorker = W
for n in ("synchronize","empty_cache","reset_peak_memory_stats"): setattr(torch.cuda, n, lambda: None)
for n in ("memory_allocated","max_memory_allocated","max_memory_reserved"): setattr(torch.cuda, n, lambda: 5)
sys.argv = sys.argv[1:]
src = open(sys.argv[0]).read().replace("74_112","512").replace("32_768","1024").replace("8192","256").replace("(256, 753)","(30, 60)")
exec(compile(src, sys.argv[0], "exec"), {"__name__": "__main__"})
