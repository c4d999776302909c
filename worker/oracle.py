"""What the model library's own generate() says of some prompts: the referee for our tokens.

Run as a file, in a process of its own (`python worker/oracle.py < job.json`): it imports torch, transformers and the
standard library, and nothing of this project, so that two runs that are wrong alike cannot agree by sharing code.

stdin    one JSON object:
           model           checkpoint directory
           prompts         list of {"tokens": [ids], "max_new_tokens": n}
           ignore_eos      go on after an end-of-sequence token (default false)
           threads         torch threads (default 1)
           dtype, device   default "float32", "cpu"
           prefill_chunk   generate()'s own prefill_chunk_size (default 512; 0: the whole prompt at once). The indexer's
                           scores of a whole prompt take 4 * heads * P**2 bytes: 1 GB at 4,000 tokens and 16 heads
stdout   one JSON line per prompt, in order, as soon as it is done:
           index, tokens   greedy ids, an end-of-sequence token included
           runners_up      id of the second-best logit at each step
           gaps            best logit minus second-best at each step: where it is within rounding, either is right
           duration_s

Exit status 2 and one line on stderr for a job that cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # run as a file, the interpreter puts this directory first; nothing here is to be imported

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> int:
    try:
        job = json.load(sys.stdin)
        model_path, prompts = job["model"], [(prompt["tokens"], prompt["max_new_tokens"]) for prompt in job["prompts"]]
    except (ValueError, KeyError, TypeError) as error:
        print(f"oracle: unreadable job: {error!r}", file=sys.stderr)
        return 2
    logging.disable_progress_bar()
    torch.set_num_threads(job.get("threads", 1))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, job.get("dtype", "float32")))
    model = model.to(job.get("device", "cpu")).eval()
    if job.get("ignore_eos", False):
        model.generation_config.eos_token_id = None
    for index, (tokens, max_new_tokens) in enumerate(prompts):
        start = time.monotonic()
        answer = greedy(model, tokens, max_new_tokens, job.get("prefill_chunk", 512))
        print(json.dumps({"index": index, **answer, "duration_s": time.monotonic() - start}), flush=True)
    return 0


@torch.inference_mode()
def greedy(
    model: Any, tokens: list[int], max_new_tokens: int, prefill_chunk: int
) -> dict[str, list[int] | list[float]]:
    """Greedy continuation of one prompt, with the runner-up and its distance at each step."""
    output = model.generate(
        torch.tensor([tokens], device=model.device),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long, device=model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        prefill_chunk_size=prefill_chunk or None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).float().topk(2)
    return {
        "tokens": output.sequences[0, len(tokens) :].tolist(),
        "runners_up": best.indices[:, 1].tolist(),
        "gaps": (best.values[:, 0] - best.values[:, 1]).tolist(),
    }


if __name__ == "__main__":
    sys.exit(main())
