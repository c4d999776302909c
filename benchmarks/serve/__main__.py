"""The whole service on published workloads: `python -m benchmarks.serve --as rank-of-8 --workload 8k1k agents`.

A coordinator, a worker and an HTTP front run as processes, as `hisparse up` starts them; clients send token ids over
HTTP and read streams. The model is DeepSeek-V3.2 with random weights in block-FP8, of which the worker holds what one
rank of a group holds: all that ranks replicate, and a share of the experts. The other ranks' rows are synthesised, so
that experts have the load of all ranks, in prompts as in steps. Prompts and steps are computed; selections of steps
have a stated overlap (benchmarks/serve/worker.py). The exchange between GPUs is computed, not measured: figures are
told without and with it (benchmarks/serve/measures.py).

Workloads (benchmarks/serve/workloads.py) are a closed loop. A cell's clients enter it in a steady state, with contexts
that are written, not computed. Its window follows, in which every prompt is computed, and counts.

    --cells             some of the cells of the workloads, in that order; a cell that is named twice runs twice
    --all-resident      no hot buffers: requests have all of their rows on the device, or wait
    --no-prefix-reuse   prompts begin with no cached pages
    --join FILE...      tables of results that are there, in one; nothing is run

Refused before weights are made: a workload that is not known, no GPU without `--device cpu`, a machine with too little
memory. All processes end with the command, after Ctrl-C too.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from benchmarks.rank_floor import BF16_BYTES, Links
from benchmarks.serve.load import Load, Pace, run_cell
from benchmarks.serve.model import Spec, config_of, ranks_of
from benchmarks.serve.needs import GIB, POOL_BYTES_MAX, Machine, Needs, TooLittleError, check, needs_of
from benchmarks.serve.report import joined, line, picture, tables, write_csv
from benchmarks.serve.service import Service, configured, control_of, journal_of, running
from benchmarks.serve.workloads import WORKLOADS, Asked, Cell, cells_of
from protocol.config_checks import WEIGHT_ONLY
from protocol.errors import HiSparseError
from protocol.settings import Config, WorkerSettings
from protocol.units import PAGE_TOKENS

AS_IS, RESIDENT, NO_REUSE = "as is", "all resident", "no prefix reuse"
#: Of a cell, beside its window: contexts written, requests that leave.
CELL_MARGIN_S: Final = 25.0
#: Every length is divided by this for the tiny model.
TINY_SHRINK: Final = 64
#: What a result does not say of the command that wrote it.
PATH_OPTIONS: Final = frozenset(("--out", "--logs", "--model"))
EXIT_REFUSED: Final = 2
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--as", dest="role", default="rank-of-8", metavar="rank-of-N")
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--cells", nargs="+", default=[], metavar="NAME-CLIENTS[:SECONDS]", help="some cells, in order")
    parser.add_argument("--all-resident", action="store_true")
    parser.add_argument("--no-prefix-reuse", action="store_true")
    parser.add_argument("--layers", type=int, default=0, help="0: as published")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu: a tiny model")
    parser.add_argument("--overlap", type=float, default=0.93, help="of successive selections of a request")
    parser.add_argument("--window", type=float, default=60.0, help="seconds of a cell")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds between entry and window")
    parser.add_argument("--alone", type=float, default=20.0, help="seconds of a mix without its long prompts")
    parser.add_argument("--long", type=float, default=240.0, help="seconds of a mix beside long prompts, at most")
    parser.add_argument("--pool-gib", type=float, default=POOL_BYTES_MAX / GIB, help="largest host pool")
    parser.add_argument("--host-gib", type=float, default=0.0, help="host memory, where the kernel says less at first")
    parser.add_argument("--device-mem", default="auto", help="worker.device_mem")
    parser.add_argument("--set", nargs="+", default=[], dest="settings", metavar="NAME=VALUE", help="other settings")
    parser.add_argument("--budget-seconds", type=float, default=1500.0, help="cells that do not fit are not run")
    parser.add_argument("--logs", type=Path, help="directory for the logs of the processes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve.json"), help="rows are added to it")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="results to join")
    parser.add_argument("--picture", type=Path, help="of --join: an SVG file")
    parser.add_argument("--csv", type=Path, help="of --join: a directory for each row in aiperf's form")
    return parser.parse_args(arguments)


class Run:
    """One service and the cells that are run on it; results are written as they come."""

    def __init__(self, options: argparse.Namespace, began: float) -> None:
        self.options, self.began = options, began
        self.tiny = options.device == "cpu"
        self.ranks = ranks_of(options.role)
        self.asked = cells_of(options.workload, options.cells, TINY_SHRINK if self.tiny else 1)
        self.cells = [it.cell for it in self.asked]
        self.kv_dtype = "bfloat16" if self.tiny else "fp8"
        self.chosen = dict(it.split("=", 1) for it in options.settings)
        is_quantized = self.chosen.get("worker.matmul", WorkerSettings().matmul) != WEIGHT_ONLY
        self.links = Links(self.ranks, row_value_bytes=1 if is_quantized else BF16_BYTES)
        self.config = config_of(options.layers, tiny=self.tiny)
        self.found: dict[str, Any] = {"runs": [], "rows": []}
        if options.out.exists():
            self.found = json.loads(options.out.read_text())

    @property
    def variant(self) -> str:
        named = (RESIDENT, self.options.all_resident), (NO_REUSE, self.options.no_prefix_reuse)
        return ", ".join(name for name, is_on in named if is_on) or AS_IS

    def needs(self) -> Needs:
        pass_tokens = int(self.chosen.get("worker.pass_tokens", WorkerSettings().pass_tokens))
        return needs_of(
            self.config,
            self.cells,
            kv_dtype=self.kv_dtype,
            ranks=self.ranks,
            pass_tokens=pass_tokens,
            pool_bytes_max=int(self.options.pool_gib * GIB),
        )

    def settings(self, needs: Needs) -> dict[str, object]:
        """Return the service's settings as an operator would choose them for these cells."""
        longest = max(cell.context_tokens for cell in self.cells) + PAGE_TOKENS
        chosen: dict[str, object] = {
            "worker.device": self.options.device,
            "worker.kv_dtype": self.kv_dtype,
            "worker.seats": max(cell.clients + bool(cell.workload.long_prompt) for cell in self.cells),
            "worker.device_mem": "64MiB" if self.tiny else self.options.device_mem,
            "worker.host_mem": str(needs.pages * needs.page_bytes),
            "worker.context_max_tokens": longest,
        }
        if self.tiny:
            chosen |= {"worker.threads": 1, "worker.hot_size_classes": (64, 128), "worker.pass_tokens": 64}
        if self.options.all_resident:  # an index page for each chunk: no context is cheaper than a page
            chosen |= {"coordinator.hot_floor": "smallest", "worker.context_target_tokens": PAGE_TOKENS}
        if self.options.no_prefix_reuse:
            chosen["coordinator.prefix_reuse"] = "off"
        return chosen

    def spec(self, directory: Path) -> Spec:
        return Spec(
            layers=self.options.layers,
            ranks=self.ranks,
            overlap=self.options.overlap,
            fp8=not self.tiny,
            tiny=self.tiny,
            resident=self.options.all_resident,
            control=str(control_of(directory)),
            journal=str(journal_of(directory)),
        )

    def left_s(self) -> float:
        return float(self.options.budget_seconds - (time.monotonic() - self.began))

    def pace(self, asked: Asked) -> Pace | None:
        """None where the time that is left does not suffice."""
        it, left = self.options, self.left_s() - CELL_MARGIN_S - self.options.settle
        window = it.window if asked.window is None else asked.window
        if not asked.cell.workload.long_prompt:
            return Pace(window, it.settle, it.alone, it.long) if left >= window else None
        long = min(it.long, left - it.alone)
        return Pace(window, it.settle, it.alone, long) if long >= min(it.long, window) else None

    async def run(self, needs: Needs) -> None:
        with tempfile.TemporaryDirectory(prefix="hisparse-serve-") as name:
            directory = Path(name)
            config = configured(directory, self.settings(needs), self.chosen)
            started = time.monotonic()
            try:
                async with running(config, self.spec(directory), directory) as service:
                    start_s = time.monotonic() - started
                    print(f"{self.variant}: up after {start_s:.1f} s", flush=True)
                    await self.describe(service, config, needs, start_s)
                    await self.run_cells(service)
            finally:
                if self.options.logs is not None:
                    self.keep_logs(directory)

    async def describe(self, service: Service, config: Config, needs: Needs, start_s: float) -> None:
        has, worker = (await service.worker()).capacity, config.worker
        setting = {
            "as": self.options.role,
            "layers": self.config.num_hidden_layers,
            "variant": self.variant,
            "overlap": self.options.overlap,
            "kv_dtype": self.kv_dtype,
            "prompts": f"passes of {worker.pass_tokens:,}",
            "context_max_tokens": worker.context_max_tokens,
            "device_mem": worker.device_mem,
            "seats": has.seats,
            "hot_chunks": has.hot_chunks,
            "hot_size_classes": list(has.hot_size_classes),
            "index_pages": has.index_pages,
            "prompt_max_tokens": has.prompt_max_tokens,
            "host_pages": has.host_pages,
            "page_bytes": has.page_bytes,
            "distinct_gib": has.host_pages * has.page_bytes / GIB,
            "wanted_gib": needs.pages_wanted * needs.page_bytes / GIB,
            "set": self.chosen,
            "links": asdict(self.links),
            "start_s": round(start_s, 1),
        }
        print(f"setting: {json.dumps(setting)}", flush=True)
        self.found["runs"].append({"machine": machine(self.options.device), "setting": setting})

    async def run_cells(self, service: Service) -> None:
        for number, asked in enumerate(self.asked):
            pace = self.pace(asked)
            rows = [self.missing(asked.cell, "the time was over")]
            if pace is not None:
                with trio.move_on_after(max(1.0, self.left_s())):
                    rows = await self.run_cell(service, asked.cell, pace, number)
            for row in rows:
                self.add(row)

    async def run_cell(self, service: Service, cell: Cell, pace: Pace, number: int) -> list[dict[str, Any]]:
        """Run a cell; its failure does not end the others."""
        link_ms = partial(self.links.step_ms, self.config)
        seed, reuses = f"{cell.name} {number}", not self.options.no_prefix_reuse
        load = Load(service, cell, seed, self.config.vocab_size, link_ms, self.config.num_hidden_layers, reuses)
        try:
            return await run_cell(load, pace)
        except* HiSparseError as errors:
            why = "; ".join(map(str, _leaves(errors)))
        return [self.missing(cell, why)]

    def missing(self, cell: Cell, why: str) -> dict[str, Any]:
        return {"workload": cell.workload.name, "cell": cell.name, "clients": cell.clients, "not_run": why}

    def add(self, row: dict[str, Any]) -> None:
        row |= {"variant": self.variant, "run": len(self.found["runs"]) - 1}
        self.found["rows"].append(row)
        print(line(row), flush=True)
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        self.options.out.write_text(json.dumps(self.found, indent=1) + "\n")

    def keep_logs(self, directory: Path) -> None:
        kept = self.options.logs / self.variant.replace(" ", "-").replace(",", "")
        kept.mkdir(parents=True, exist_ok=True)
        for log in directory.glob("*.log"):
            (kept / log.name).write_bytes(log.read_bytes())


def machine(device: str) -> dict[str, str]:
    about = {"gpu": "none", "driver_pcie": "none"}
    if device != "cpu":
        query = "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current"
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        name, _, rest = done.stdout.partition("\n")[0].partition(", ")
        about = {"gpu": name, "driver_pcie": rest}
    command = " ".join(["python", *without_paths(sys.orig_argv[1:])])
    return about | {"python": platform.python_version(), "kernel": platform.release(), "command": command}


def without_paths(words: Sequence[str]) -> list[str]:
    """A command line without the options that say where its files lie."""
    return [it for before, it in zip(("", *words), words, strict=False) if not PATH_OPTIONS & {before, it}]


async def _with_signals(run: Run, needs: Needs) -> int:
    """The exit code. The first SIGINT or SIGTERM ends the processes."""
    code = EXIT_INTERRUPTED
    async with trio.open_nursery() as nursery:

        async def watch(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                task_status.started()
                async for _ in signals:
                    nursery.cancel_scope.cancel()
                    return

        await nursery.start(watch)
        await run.run(needs)
        code = 0
        nursery.cancel_scope.cancel()
    return code


def join(options: argparse.Namespace) -> int:
    found = joined([json.loads(path.read_text()) for path in options.join])
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found))
    if options.picture:
        options.picture.write_text(picture(found))
    if options.csv:
        write_csv(found, options.csv)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options, began = parsed(arguments), time.monotonic()
    if options.join:
        return join(options)
    try:
        run = Run(options, began)
        needs = run.needs()
        check(needs, Machine.look(options.device, int(options.host_gib * GIB)), options.device)
        code = EXIT_FAILED
        try:
            code = trio.run(_with_signals, run, needs)
        except* HiSparseError as errors:
            for error in _leaves(errors):
                print(f"benchmarks.serve: {error}", file=sys.stderr, flush=True)
    except (ValueError, TooLittleError, HiSparseError) as refused:
        print(f"benchmarks.serve: {refused}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    return code


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [leaf for it in group.exceptions for leaf in (_leaves(it) if isinstance(it, BaseExceptionGroup) else [it])]


if __name__ == "__main__":
    sys.exit(main())
