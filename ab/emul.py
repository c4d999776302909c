import sys, time, tempfile
from pathlib import Path
import tests.gpu.test_group as g
from tests.support.thread_ranks import run_ranks
from worker.runners.tiny import write_tiny_checkpoint
g.run_ranks_on_gpu = run_ranks
for family in g.FAMILIES:
    p = Path(tempfile.mkdtemp()); write_tiny_checkpoint(p, family, index_topk=32, context_max_tokens=2048)
    t=time.time(); g.test_two_ranks_on_one_gpu_split_the_prompts_of_one(p); print(family, 'plain', time.time()-t, flush=True)
    orig=g.median
    def shown(v):
        print('changes', sorted(v)[::max(1,len(v)//8)]); return orig(v)
    g.median=shown
    for d in ("float32","bfloat16"):
        t=time.time(); g.test_two_ranks_on_one_gpu_split_prompts_of_rows_in_fp8(d, p); print(family, d, time.time()-t, flush=True)
    g.median=orig
    g.splitting.split_behind_a_prefix(p, run_ranks); print('prefix ok', flush=True)
    for a in (False, True): g.splitting.leave_amid_a_split_pass(p, a, run_ranks)
    print('leave ok', flush=True)
