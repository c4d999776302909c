import tempfile
from pathlib import Path
import worker.runners.splitting as sp
import tests.worker.group.test_splitting as t
from worker.runners.tiny import write_tiny_checkpoint
p = Path(tempfile.mkdtemp()); write_tiny_checkpoint(p, "glm-5", index_topk=32, context_max_tokens=1024, experts=24)
plain = t.run_ranks(p, [[], t.asks()], t.UNSPLIT)
for n in (16384, 24, 64):
    sp.EARLIER_ROWS_MAX = n
    ran = t.run_ranks(p, [[], t.asks()], t.SETTINGS)
    print(n, ran.tokens == plain.tokens, max(float((ran.logits[k]-plain.logits[k]).abs().max()) for k in plain.logits))
