"""Measures what kinds of KV cost in accuracy, beside float32: `python -m benchmarks.kv_accuracy [--json PATH]`.

Weights are random, so that the figures compare kinds with each other and say nothing of a trained model's answers.
On a CPU; no time is measured.

    rows      error of attention scores and outputs at DeepSeek-V3.2's dimensions: one query of HEADS heads over TOPK
              rows, latents with an RMS of 1. Relative: norm of the difference / norm
    keys      overlap of the best TOPK of CONTEXT positions with the exact best, and the share of the best sum of exact
              scores that they reach; queries as the kernels take them (fp8 where keys are quantised)
    tokens    tiny models of both families fed the tokens that the float32 run decodes: share of steps with the same
              greedy token, median and 99th percentile of the largest difference of logits, beside the gap of the
              two best in float32
    needles   NEEDLE bytes somewhere in a predictable model's context are others, and in float32 the next token is
              another too: share of both contexts in which the kind gives float32's token

Values of rows and keys are normal, heavy-tailed (Student's t with 3 degrees of freedom), or low-rank (16 directions
and a tenth of noise).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import torch
from torch import Tensor

import worker.oracle
from benchmarks.fp8_queries import DIM, TOPK, agreement
from kernels.reference.attention import attend
from kernels.reference.index_topk import index_scores
from kernels.row_format import hadamard, index_key_format, kv_row_format, latent_exponent
from tests.support.runner_rig import Rig
from worker.families.table import latent_names
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner

HEADS, LATENT, ROPE, CONTEXT = 64, 512, 64, 32_768
#: Attention logits then have a standard deviation of about 2: some rows weigh more, none is alone.
QUERY_SIZE: Final = 2 / (LATENT + ROPE) ** 0.5
KINDS: Final = ("bfloat16", "fp8", "fp4")
PROMPT, TINY_TOPK, HOT_SLOTS = 1_000, 128, 256
NEEDLE_CONTEXT, NEEDLE = 300, 8
#: Bytes of TEXT where a context may start.
STARTS: Final = 4_000
TEXT: Final = Path(worker.oracle.__file__).read_bytes()

Row = dict[str, Any]


def normal(tokens: int, dim: int) -> Tensor:
    return torch.randn(tokens, dim)


def heavy(tokens: int, dim: int) -> Tensor:
    drawn: Tensor = torch.distributions.StudentT(torch.tensor(3.0)).sample(torch.Size((tokens, dim)))
    return drawn


def low_rank(tokens: int, dim: int) -> Tensor:
    return torch.randn(tokens, 16) @ torch.randn(16, dim) / 4 + torch.randn(tokens, dim) / 10


VALUES: Final[dict[str, Callable[[int, int], Tensor]]] = {"normal": normal, "heavy": heavy, "low-rank": low_rank}


def rows_accuracy(values: str, kind: str) -> Row:
    """Errors of scores and outputs over TOPK rows of `values` kept in `kind`."""
    torch.manual_seed(0)
    latents = VALUES[values](TOPK, LATENT)
    latents /= latents.square().mean(-1, keepdim=True).sqrt()
    rows = torch.cat((latents, VALUES[values](TOPK, ROPE)), -1)
    queries = torch.randn(1, HEADS, LATENT + ROPE) * QUERY_SIZE
    scale = 2.0 ** -latent_exponent(torch.ones(LATENT)) if kind == "fp4" else 1.0
    factors = torch.cat((torch.full((LATENT,), scale), torch.ones(ROPE)))
    form = kv_row_format(kind, LATENT, ROPE)
    kept = form.decode(form.encode(rows * factors)) / factors
    held = torch.ones(1, TOPK, dtype=torch.bool)
    scores = [queries[0] @ some.T for some in (rows, kept)]
    outputs = [attend(queries, some[None], held, 1.0, LATENT) for some in (rows, kept)]
    return {
        "of": "rows",
        "values": values,
        "kind": kind,
        "bytes": form.row_bytes,
        "scores": _relative(*scores),
        "outputs": _relative(*outputs),
    }


def keys_accuracy(values: str, kind: str) -> Row:
    """Selections by keys of `values` kept in `kind`."""
    torch.manual_seed(0)
    keys, queries, weights = VALUES[values](CONTEXT, DIM), VALUES[values](HEADS, DIM), torch.randn(HEADS)
    exact = index_scores(queries, weights, keys, DIM**-0.5)
    form = index_key_format(kind, DIM)
    if form.is_quantised:
        rotation, fp8 = hadamard(DIM, torch.float32, "cpu"), index_key_format("fp8", DIM)
        keys, queries = keys @ rotation, fp8.decode(fp8.encode(queries @ rotation))
    found = index_scores(queries, weights, form.decode(form.encode(keys)), DIM**-0.5)
    agreed = agreement(exact, found.topk(TOPK).indices)
    about = {"of": "keys", "values": values, "kind": kind, "bytes": form.row_bytes}
    return about | {"overlap": agreed.overlap, "sum_share": agreed.sum_share}


def tokens_accuracy(path: Path, family: str, kind: str, steps: int) -> Row:
    """Greedy tokens and logits of `steps` steps of the tiny model at `path`, fed the tokens of the float32 run."""
    exact, tokens = _decode(path, "float32", steps, None)
    found, _ = _decode(path, kind, steps, tokens)
    best = exact.topk(2, dim=-1)
    same = float((found.argmax(-1) == best.indices[:, 0]).double().mean())
    off = (found - exact).abs().amax(-1).tolist()
    gap = float((best.values[:, 0] - best.values[:, 1]).median())
    about = {"of": "tokens", "values": family, "kind": kind, "steps": steps}
    return about | {"same": same, "off_p50": median(off), "off_p99": quantiles(off, n=100)[98], "gap_p50": gap}


def needles_accuracy(path: Path, family: str, kind: str, trials: int) -> Row:
    """Next tokens behind contexts of the predictable model at `path` that differ in NEEDLE bytes."""
    exact, kept = _runner(path, "float32"), _runner(path, kind)
    draw, counted, same = torch.Generator().manual_seed(0), 0, 0
    for _ in range(trials):
        start, at = (int(torch.randint(most, (), generator=draw)) for most in (STARTS, NEEDLE_CONTEXT - NEEDLE))
        contexts = [bytearray(TEXT[start : start + NEEDLE_CONTEXT]) for _ in range(2)]
        contexts[1][at : at + NEEDLE] = bytes(torch.randint(32, 127, (NEEDLE,), generator=draw).tolist())
        tokens = [_next_token(exact, context) for context in contexts]
        if tokens[0] == tokens[1]:
            continue
        counted += 2
        same += sum(_next_token(kept, context) == token for context, token in zip(contexts, tokens, strict=True))
    return {"of": "needles", "values": family, "kind": kind, "contexts": counted, "same": same / max(1, counted)}


def _runner(path: Path, kind: str) -> TransformersRunner:
    return TransformersRunner.load(path, kv_dtype=kind)


def _next_token(runner: TransformersRunner, context: Sequence[int]) -> int:
    return Rig(runner, seats=1, context_tokens=NEEDLE_CONTEXT + 1).open(0, context, hot_slots=0)[0]


def _decode(path: Path, kind: str, steps: int, given: Sequence[int] | None) -> tuple[Tensor, list[int]]:
    """Logits [steps, vocab], and the tokens that each step was fed: those `given`, or those decoded."""
    rig = Rig(_runner(path, kind), seats=1, context_tokens=PROMPT + steps)
    token, logits = rig.open(0, TEXT[:PROMPT], hot_slots=HOT_SLOTS)
    fed, rows = [], [logits]
    for step in range(steps - 1):
        fed.append(token if given is None else given[step])
        (token,), (logits, *_) = rig.decode([0], inputs=[fed[-1]])
        rows.append(logits)
    return torch.stack(rows), fed


def _relative(exact: Tensor, found: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def measured(steps: int, trials: int) -> Iterator[Row]:
    for measure in (rows_accuracy, keys_accuracy):
        for values in VALUES:
            yield from (measure(values, kind) for kind in KINDS)
    with tempfile.TemporaryDirectory() as folder:
        for family in latent_names():
            plain, predictable = (Path(folder) / f"{family}-{name}" for name in ("plain", "predictable"))
            write_tiny_checkpoint(plain, family, index_topk=TINY_TOPK)
            write_tiny_checkpoint(predictable, family, index_topk=TINY_TOPK, predictable=True)
            yield from (tokens_accuracy(plain, family, kind, steps) for kind in KINDS)
            yield from (needles_accuracy(predictable, family, kind, trials) for kind in KINDS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Accuracy of kinds of KV rows and index keys.")
    parser.add_argument("--steps", type=int, default=2_048, help="decode steps of each tiny model")
    parser.add_argument("--trials", type=int, default=100, help="pairs of contexts with a needle")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(arguments)
    rows = []
    for row in measured(options.steps, options.trials):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
