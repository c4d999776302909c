"""Sweep of plans for dense block-FP8 products: `python3 -m benchmarks.sweep_block_fp8 --out DIR [--seconds N]`.

A child process runs jobs one by one and writes a line for each; one that makes no progress is killed and the next job
started in a new child.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

SHAPES = {
    "mlp up": (18432, 7168),
    "o": (7168, 16384),
    "q_b": (24576, 1536),
    "mlp down": (7168, 18432),
    "q_a": (1536, 7168),
    "kv_a": (576, 7168),
    "shared up": (2048, 7168),
    "shared down": (7168, 2048),
    "index q_b": (8192, 1536),
    "index k": (128, 7168),
}
# tokens, teams, slices, tiles, stages, chunk
PLANS = {
    16: [
        (16, 1, 4, 1, 12, 0),
        (16, 1, 2, 1, 14, 0),
        (16, 2, 2, 1, 10, 0),
        (16, 2, 1, 1, 10, 0),
        (16, 4, 1, 1, 6, 0),
        (16, 3, 1, 1, 7, 0),
        (16, 2, 1, 2, 6, 0),
        (16, 4, 1, 2, 3, 0),
    ],
    32: [
        (32, 1, 4, 1, 10, 0),
        (32, 2, 2, 1, 8, 0),
        (32, 2, 1, 1, 9, 0),
        (32, 4, 1, 1, 5, 0),
        (32, 3, 1, 1, 6, 0),
        (32, 2, 1, 2, 5, 0),
        (32, 4, 1, 2, 3, 0),
        (32, 2, 1, 4, 3, 0),
    ],
    64: [
        (64, 1, 4, 1, 6, 0),
        (64, 2, 2, 1, 5, 0),
        (64, 2, 1, 1, 7, 0),
        (64, 4, 1, 1, 4, 0),
        (64, 3, 1, 1, 5, 0),
        (64, 2, 1, 2, 4, 0),
        (64, 3, 1, 2, 3, 1),
        (64, 2, 1, 4, 2, 0),
        (64, 4, 1, 2, 2, 1),
    ],
    128: [
        (128, 1, 4, 1, 3, 1),
        (128, 2, 2, 1, 3, 1),
        (128, 2, 1, 1, 4, 0),
        (128, 3, 1, 1, 4, 0),
        (128, 4, 1, 1, 3, 2),
        (128, 4, 1, 1, 3, 1),
        (128, 2, 1, 2, 3, 0),
    ],
    256: [(256, 2, 1, 1, 2, 0), (256, 2, 1, 1, 2, 2), (128, 2, 1, 2, 3, 0), (128, 4, 1, 1, 3, 2), (128, 3, 1, 1, 4, 0)],
    512: [(256, 2, 1, 1, 2, 0), (128, 2, 1, 2, 3, 0), (128, 4, 1, 1, 3, 2)],
}
ABLATED = {16: [(16, 4, 1, 1, 6, 0)], 64: [(64, 4, 1, 1, 4, 0)], 128: [(128, 2, 1, 2, 3, 0)]}
TRITON = {
    16: [(128, 16, 4, 4, 1), (256, 16, 8, 3, 1)],
    32: [(128, 32, 4, 3, 1), (256, 32, 8, 3, 1)],
    64: [(128, 64, 4, 3, 1), (256, 64, 8, 3, 1)],
    128: [(128, 128, 8, 3, 1)],
}
EXPERTS = {
    256: [
        ((64, 32, 2, 2, 4), (128, 32, 2, 3, 4)),
        ((64, 32, 4, 3, 2), (128, 32, 4, 3, 2)),
        ((128, 32, 4, 3, 1), (256, 32, 8, 3, 1)),
    ],
    512: [
        ((64, 32, 2, 2, 4), (128, 32, 2, 3, 4)),
        ((64, 32, 4, 3, 2), (128, 32, 4, 3, 2)),
        ((64, 32, 4, 2, 3), (128, 32, 4, 4, 2)),
        ((128, 32, 4, 3, 1), (256, 32, 8, 3, 1)),
        ((128, 32, 8, 3, 1), (256, 32, 4, 3, 1)),
        ((128, 32, 8, 2, 2), (256, 32, 8, 2, 2)),
        ((64, 32, 2, 3, 3), (256, 32, 4, 2, 2)),
        ((64, 64, 4, 3, 2), (256, 64, 8, 3, 1)),
        ((64, 16, 2, 3, 4), (128, 16, 2, 3, 4)),
    ],
}
CHECKED = [(576, 7168), (256, 1152), (1536, 512), (128, 7168), (64, 128), (200, 304), (24, 48), (2, 16), (1100, 1104)]
CHECK_TOKENS = [1, 3, 16, 17, 40, 65, 130, 600]


def jobs() -> list[dict[str, Any]]:
    plans = sorted({plan for some in PLANS.values() for plan in some})
    listed: list[dict[str, Any]] = [{"kind": "rates"}]
    listed += [{"kind": "check", "plan": plan} for plan in plans]
    for name in SHAPES:
        for tokens in (16, 64, 128, 1, 32, 256, 512):
            bucket = max(16, tokens)
            cell = {"shape": name, "tokens": tokens}
            listed.append({"kind": "today", **cell})
            if tokens >= 128:
                listed.append({"kind": "plain", **cell})
            large = SHAPES[name][0] * SHAPES[name][1] > 30_000_000
            for plan in PLANS[bucket]:
                for least in (2,) if large else (2, 4, 8):
                    listed.append({"kind": "plan", "plan": plan, "least": least, "early": False, **cell})
                listed.append({"kind": "plan", "plan": plan, "least": 2 if large else 4, "early": True, **cell})
            if name in ("mlp up", "o"):
                for tiles in TRITON.get(tokens, []):
                    listed.append({"kind": "triton", "tiles": tiles, **cell})
                for plan in ABLATED.get(tokens, []):
                    for ablate in (1, 2, 3):
                        listed.append({"kind": "ablated", "plan": plan, "ablate": ablate, **cell})
        if name == "mlp up":
            for tokens, pairs in EXPERTS.items():
                listed += [{"kind": "experts", "tokens": tokens, "pair": pair, "shape": "experts"} for pair in pairs]
    return listed


def compile_one(job: tuple[tuple[int, ...], Any]) -> str:
    from kernels.cuda.block_linear import Plan
    from kernels.cuda.jit import cache_dir, cached_unit

    plan, ablate = job
    defines = Plan(*plan).defines
    defines += (("GUARD", 1),) if ablate == "guard" else (("ABLATE", ablate),) if ablate else ()
    try:
        compiled = cached_unit("block_linear", defines, "sm_90", cache_dir())
    except Exception as problem:
        return f"{plan} {ablate}: {problem}"
    return f"{plan} {ablate}: {compiled.resources[0].registers} registers, {compiled.resources[0].spill_bytes} spilled"


def compile_all() -> None:
    wanted = sorted({plan for some in PLANS.values() for plan in some})
    work: list[tuple[Any, Any]] = [(plan, 0) for plan in wanted] + [(plan, "guard") for plan in wanted]
    work += [(plan, ablate) for some in ABLATED.values() for plan in some for ablate in (1, 2, 3)]
    with ProcessPoolExecutor(min(len(work), os.cpu_count() or 1)) as pool:
        for line in pool.map(compile_one, work):
            if ": " not in line or "registers" not in line:
                print("compiled", line, flush=True)


class Child:
    def __init__(self) -> None:
        import torch

        import benchmarks.index_topk as timing

        timing.REPLAYS, timing.WARM_UP = 7, 2
        self.torch = torch
        self.shape: str | None = None
        self.weights: list[Any] = []
        self.wanted: dict[tuple[str, int], Any] = {}

    def load(self, name: str) -> None:
        if name == self.shape:
            return
        from benchmarks.block_fp8 import draw

        self.shape, self.weights, self.wanted = name, [], {}
        self.torch.cuda.empty_cache()
        n, k = SHAPES[name]
        self.weights = [draw(n, k) for _ in range(max(2, min(64, -(-(200 << 20) // (n * k)))))]

    def hidden(self, tokens: int, k: int) -> Any:
        generator = self.torch.Generator("cuda").manual_seed(tokens)
        return self.torch.randn(tokens, k, device="cuda", generator=generator).bfloat16()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["kind"] == "rates":
            from benchmarks.index_topk import copy_bytes_per_us, operations_per_us

            rates = copy_bytes_per_us(), operations_per_us()
            self.torch.cuda.empty_cache()
            return {"copy": rates[0], "mma": rates[1], "gpu": self.torch.cuda.get_device_name()}
        if job["kind"] == "check":
            return self.check(job["plan"])
        if job["kind"] == "experts":
            return self.experts(job)
        return self.cell(job)

    def check(self, numbers: list[int]) -> dict[str, Any]:
        from benchmarks.block_fp8 import draw, off
        from kernels.block_fp8 import decode_blocks
        from kernels.cuda.block_linear import Plan, linear

        plan: Any = Guarded(Plan(*numbers))
        torch = self.torch
        worst, wrong, repeats = 0.0, [], True
        for n, k in CHECKED:
            weight = draw(n, k)
            decoded = decode_blocks(weight, torch.bfloat16)
            for tokens in CHECK_TOKENS:
                hidden = self.hidden(tokens, k)
                try:
                    for least in (1, 2, 8):
                        got = linear(hidden, weight, plan, least)
                        error = off(got, hidden.double() @ decoded.double().T)
                        worst = max(worst, error)
                        if not error < 4e-3:
                            wrong.append((n, k, tokens, least, round(error, 4)))
                        repeats &= torch.equal(got, linear(hidden, weight, plan, least))
                    picked = torch.randint(0, k, (tokens,), device="cuda")
                    got = linear(torch.nn.functional.one_hot(picked, k).bfloat16(), weight, plan, 2)
                    if not torch.equal(got, decoded.T[picked]):
                        wrong.append((n, k, tokens, "one-hot", int((got != decoded.T[picked]).sum())))
                except RuntimeError as problem:
                    if "cuTensorMap" not in str(problem):
                        raise
                    wrong.append((n, k, tokens, str(problem)))
        found: dict[str, Any] = {"worst": worst, "wrong": wrong[:6], "wrongs": len(wrong), "repeats": repeats}
        if wrong:
            found["map"] = self.diagnose(plan)
        return found

    def diagnose(self, plan: Any) -> list[str]:
        """Where values of a weight that number themselves come out: one block of K, one tile."""
        from kernels.block_fp8 import E4M3, BlockFp8
        from kernels.cuda.block_linear import linear

        torch = self.torch
        lines = []
        n, k = plan.rows, 128
        for name, codes in (
            ("row % 8", (torch.arange(n) % 8)[:, None].expand(n, k)),
            ("row // 8 % 8", (torch.arange(n) // 8 % 8)[:, None].expand(n, k)),
            ("k % 8", (torch.arange(k) % 8)[None].expand(n, k)),
            ("k // 8 % 8", (torch.arange(k) // 8 % 8)[None].expand(n, k)),
        ):
            weight = BlockFp8((codes + 1.0).to(E4M3).cuda().contiguous(), torch.ones(-(-n // 128), 1, device="cuda"))
            hidden = torch.eye(128, device="cuda")[: plan.tokens].bfloat16().contiguous()
            got = linear(hidden, weight, plan, 1)
            lines.append(f"{name}: token 0 rows {got[0, :40].tolist()}; row 0 tokens {got[:40, 0].tolist()}")
        return lines

    def cell(self, job: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.block_fp8 import off, replayed
        from kernels.block_fp8 import block_linear, decode_blocks
        from kernels.cuda import block_fp8, block_linear as ours

        name, tokens = job["shape"], job["tokens"]
        self.load(name)
        n, k = SHAPES[name]
        weights, hidden, torch = self.weights, self.hidden(tokens, k), self.torch
        if (name, tokens) not in self.wanted:
            self.wanted[name, tokens] = hidden.float() @ decode_blocks(weights[0], torch.float32).T
        if job["kind"] == "today":
            scratch = torch.empty(n * k, dtype=torch.bfloat16, device="cuda")
            work = lambda number: block_linear(hidden, weights[number], scratch)
        elif job["kind"] == "plain":
            decoded = decode_blocks(weights[0], torch.bfloat16)
            work = lambda number: hidden @ decoded.T
        elif job["kind"] == "triton":
            tiles = block_fp8.Tiles(*job["tiles"])
            work = lambda number: block_fp8.linear(hidden, weights[number], None, tiles)
        elif job["kind"] == "ablated":
            plan = Ablated(ours.Plan(*job["plan"]), job["ablate"])
            work = lambda number: ours.linear(hidden, weights[number], plan, 2)
        else:
            plan = ours.Plan(*job["plan"])
            work = lambda number: ours.linear(hidden, weights[number], plan, job["least"], job["early"])
        error = off(work(0), self.wanted[name, tokens])
        times = replayed(work, len(weights))
        return {"us": statistics.median(times), "us_max": max(times), "error": error}

    def experts(self, job: dict[str, Any]) -> dict[str, Any]:
        from benchmarks import block_fp8 as bench
        from kernels.cuda import block_fp8

        torch = self.torch
        if self.shape != "experts":
            self.shape, self.weights, self.wanted = "experts", [], {}
            torch.cuda.empty_cache()
            e, m, w = bench.EXPERTS, bench.MIDDLE, bench.WIDTH
            self.weights = [(bench.draw(e, m, w), bench.draw(e, m, w), bench.draw(e, w, m)) for _ in range(2)]
        torch.manual_seed(job["tokens"])
        hidden = torch.randn(job["tokens"], bench.WIDTH, device="cuda").bfloat16()
        chosen = torch.rand(job["tokens"], bench.EXPERTS_TOTAL, device="cuda").argsort(1)[:, :8].contiguous()
        shares = torch.rand(job["tokens"], 8, device="cuda")
        pair = tuple(block_fp8.Tiles(*tiles) for tiles in job["pair"])

        def work(number: int) -> Any:
            return block_fp8.experts(
                hidden,
                chosen,
                shares,
                *self.weights[number],
                0,
                256,
                quantized=False,
                tiles=pair,  # type: ignore
            )

        if job["tokens"] not in self.wanted:
            self.wanted[job["tokens"]] = bench.wanted(hidden, chosen, shares, *self.weights[0])
        error = bench.off(work(0), self.wanted[job["tokens"]])
        times = bench.replayed(work, 2)
        held = int((chosen < 32).sum())
        busy = len(chosen[chosen < 32].unique())
        size = busy * sum(one.nbytes for one in self.weights[0]) // 32
        size += 2 * held * 2 * 2048 + 2 * (job["tokens"] + held) * 7168
        return {"us": statistics.median(times), "us_max": max(times), "error": error, "bytes": size}


class Guarded:
    """A plan whose kernel traps after a second of waiting."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    @property
    def defines(self) -> Any:
        return (*self.plan.defines, ("GUARD", 1))


class Ablated:
    """A plan whose kernel leaves decoding (1) or products (2) out: what bounds it, not what is right."""

    def __init__(self, plan: Any, ablate: int) -> None:
        self.plan, self.ablate = plan, ablate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    @property
    def defines(self) -> Any:
        return (*self.plan.defines, ("ABLATE", self.ablate))


def child(listed: list[dict[str, Any]], first: int, file: Path) -> None:
    runner = Child()
    stuck = set()
    if file.exists():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        checked = {line["number"]: line for line in lines if line.get("kind") == "check"}
        for number in range(first):
            if listed[number]["kind"] == "check" and "failed" in checked.get(number, {"failed": 1}):
                stuck.add(tuple(listed[number]["plan"]))
    with file.open("a") as out:
        for number in range(first, len(listed)):
            if listed[number]["kind"] in ("plan", "ablated") and tuple(listed[number]["plan"]) in stuck:
                continue
            out.write(json.dumps({"begin": number}) + "\n")
            out.flush()
            try:
                found = runner.run(listed[number])
            except Exception as problem:
                found = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
                if listed[number]["kind"] == "check":
                    stuck.add(tuple(listed[number]["plan"]))
            out.write(json.dumps({"number": number, **listed[number], **found}) + "\n")
            out.flush()
            if "CUDA error" in str(found.get("failed", "")) or "CUDA_ERROR" in str(found.get("failed", "")):
                return  # the context is lost: the parent goes on with the next


def parent(options: argparse.Namespace) -> None:
    began = time.monotonic()
    listed = jobs()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "sweep.jsonl"
    compile_all()
    print(f"{len(listed)} jobs; compiled after {time.monotonic() - began:.0f} s", flush=True)
    first = 0
    while first < len(listed) and time.monotonic() - began < options.seconds:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sweep_block_fp8", "--child", str(first), "--out", str(options.out)]
        )
        seen, changed = -1, time.monotonic()
        limit = 60.0  # torch and its context first
        while process.poll() is None:
            time.sleep(0.2)
            size = file.stat().st_size if file.exists() else 0
            now = time.monotonic()
            if size != seen:
                if seen > 0:
                    limit = 30.0
                seen, changed = size, now
            if now - changed > limit or now - began > options.seconds:
                process.kill()
        process.wait()
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        done = max((line["number"] for line in lines if "number" in line), default=-1)
        started = max((line["begin"] for line in lines if "begin" in line), default=first)
        if started > done:
            print(f"killed or crashed: {listed[started]}", flush=True)
        first = max(started, done) + 1
    with (options.out / "report.txt").open("w") as text:
        with contextlib.redirect_stdout(text):
            report(file, listed)
    print((options.out / "report.txt").read_text())
    print(f"{time.monotonic() - began:.0f} s")


def short(row: dict[str, Any]) -> str:
    if row["kind"] == "plan":
        return ".".join(map(str, row["plan"])) + f" least {row['least']}" + (" early" if row["early"] else "")
    if row["kind"] == "triton":
        return "triton " + ".".join(map(str, row["tiles"]))
    if row["kind"] == "ablated":
        return ".".join(map(str, row["plan"])) + f" ablated {row['ablate']}"
    return row["kind"]


def report(file: Path, listed: list[dict[str, Any]]) -> None:
    rows = [line for line in map(json.loads, file.read_text().splitlines()) if "number" in line]
    rates = next((row for row in rows if row["kind"] == "rates"), {})
    copy, mma = rates.get("copy", 4.1e6), rates.get("mma", 780e6)
    for name, (n, k) in SHAPES.items():
        for tokens in (1, 16, 32, 64, 128, 256, 512):
            cells = [r for r in rows if r.get("shape") == name and r.get("tokens") == tokens and "us" in r]
            if not cells:
                continue
            memory = (n * k + 4 * -(-n // 128) * -(-k // 128) + 2 * tokens * (n + k)) / copy
            floor = max(memory, 2 * tokens * n * k / mma)
            today = next((r["us"] for r in cells if r["kind"] == "today"), 0)
            plain = next((r["us"] for r in cells if r["kind"] == "plain"), 0)
            good = sorted(
                (r for r in cells if r["kind"] in ("plan", "triton") and r["error"] < 4e-3), key=lambda r: r["us"]
            )
            ablated = "  ".join(f"{short(r)} {r['us']:.1f}" for r in cells if r["kind"] == "ablated")
            best = "  ".join(
                f"[{short(r)} {r['us']:.1f} x{r['us'] / floor:.2f}]" for r in good[: 2 if n * k > 30_000_000 else 1]
            )
            print(
                f"{name:11} {tokens:4} memory {memory:6.1f} floor {floor:6.1f} today {today:6.1f} x{today / floor:.2f}"
                f" plain {plain:.1f} best {best} {ablated}"
            )
    for row in rows:
        if row["kind"] == "experts" and "us" in row:
            print(
                f"experts {row['tokens']} {row['pair']} {row['us']:.1f} us x{row['us'] * copy / row['bytes']:.2f} error {row['error']:.4f}"
            )
    print(rates)
    failed = [row for row in rows if "failed" in row]
    print(len(failed), "failed")
    for row in failed[:6]:
        print("failed", row)
    for row in rows:
        if "failed" in row:
            continue
        if row["kind"] == "check" and (row["wrongs"] or not row["repeats"]):
            print("WRONG", str(row)[:900])
    print(sum(row["kind"] == "check" and not row.get("wrongs", 1) for row in rows), "plans right")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--child", type=int)
    options = parser.parse_args()
    if options.child is not None:
        child(jobs(), options.child, options.out / "sweep.jsonl")
    else:
        parent(options)


if __name__ == "__main__":
    main()
