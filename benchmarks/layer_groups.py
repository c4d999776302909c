"""What is left to copy when a prompt is computed, by layer groups: `python -m benchmarks.layer_groups [--device cuda]`.

One executor for each of --groups (worker.layer_group; 0: all layers at once) computes prompts; each takes its turn in a
round, so that all see the same neighbours. Milliseconds, medians of --rounds:

    prefill   from admission until the first token was seen
    staged    from then until the last rows were seen in host memory
    arrived   from then until all pages were verified by a receiver in another process and that was acknowledged
    total     from admission until then

`staged` is of a prompt whose pages do not travel, the others are of one whose pages do.

On a CPU, a layer of a prompt chunk is a sleep of --layer-ms and rows that are written: about what a GPU takes, and the
copies have the processors to themselves. On a GPU, it is DeepSeek-V3.2's, of --layers, with random weights and a dense
MLP. Writes benchmarks/results/layer-groups-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.decode import Clock, sizing_of
from kernels.layout import Geometry
from kernels.rows import write_prompt_index_keys, write_slab_rows
from kernels.state import DeviceState, StepBatch
from protocol.arrays import pack_int32
from protocol.byte_sizes import parse_size
from protocol.messages import NO_HOT_BUFFER, Admit, ModelInfo, Released, Sampling, Staged
from protocol.settings import WorkerSettings
from protocol.text import make_tokenizer
from protocol.units import managed_chunks, pages_for
from worker.loop.executor import Executor
from worker.pool.file import HEADER_BYTES
from worker.pool.host_pool import MappedPool
from worker.pool.registration import CudaRegistrar
from worker.runners.adjust import Adjust
from worker.runners.base import LayerWritten, Runner, SamplerState, StepOutputs, no_listener
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.streams import Streams, make_streams
from worker.transfer import Layout, PoolMemory, open_receiver, open_sender
from worker.transfer.layer_groups import LayerGroups
from worker.transfer.sender import PageSender
from worker.transfer.transfers import Transfers

RESULTS: Final = Path(__file__).with_name("results")
MODEL: Final = "synthetic"
HOT_SLOTS: Final = 4_096
TAIL_SLOTS: Final = 8
LIMIT_S: Final = 300.0
CHUNK_TOKENS_MAX: Final = 8_192
#: Rows of DeepSeek-V3.2 in bfloat16.
ROW_BYTES, INDEX_ROW_BYTES, TOPK, VOCAB = 1_152, 256, 2_048, 1_000


class PacedRunner:
    """Prefills at a given pace, and decodes nothing."""

    def __init__(self, layers: int, layer_s: float) -> None:
        self.geometry = Geometry(layers, ROW_BYTES, tuple(range(layers)), INDEX_ROW_BYTES, TOPK)
        self.info = ModelInfo("paced", "paced", 1 << 20, VOCAB, layers, TOPK, (), "bytes", "")
        self._layer_s = layer_s
        self._rows = torch.randint(0, 256, (CHUNK_TOKENS_MAX, ROW_BYTES), dtype=torch.uint8)

    def launch_prefill_chunk(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        seat: int,
        tokens: Tensor,
        start: int,
        outputs: StepOutputs | None,
        layer_written: LayerWritten = no_listener,
        adjust: Adjust | None = None,
    ) -> None:
        rows = self._rows[: len(tokens)]
        for layer in range(self.geometry.layers):
            streams.compute.launch("write", partial(self._write, state, layer, seat, start, rows))
            layer_written(layer)
            streams.compute.launch("attend", partial(time.sleep, self._layer_s))
        if outputs is not None:
            streams.compute.launch("first token", partial(outputs.tokens.fill_, 1))

    def _write(self, state: DeviceState, layer: int, seat: int, start: int, rows: Tensor) -> None:
        write_slab_rows(state, layer, seat, start, rows)
        write_prompt_index_keys(state, layer, seat, start, rows[:, :INDEX_ROW_BYTES].contiguous())

    def launch_forward(self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch) -> None:
        raise NotImplementedError

    def launch_sample(
        self, streams: Streams, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        raise NotImplementedError


class Receiver:
    """The process that takes pages in."""

    def __init__(self, options: argparse.Namespace, geometry: Geometry, pages: int) -> None:
        shape = [geometry.layers, geometry.row_bytes, geometry.index_row_bytes, geometry.topk]
        command = [sys.executable, "-m", "benchmarks.layer_groups", "--receive", json.dumps([*shape, pages])]
        command += ["--engine", options.engine, "--dir", str(options.dir)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.description = bytes.fromhex(self._answer()["description"])

    def expect(self, transfer_id: int, pages: int) -> None:
        assert self._process.stdin is not None
        print(json.dumps([transfer_id, pages]), file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the receiver has ended: {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)


def receive(options: argparse.Namespace) -> None:
    """Until stdin ends: open the transfers named there."""
    layers, row_bytes, index_row_bytes, topk, pages = json.loads(options.receive)
    geometry = Geometry(layers, row_bytes, tuple(range(layers)), index_row_bytes, topk)
    path = options.dir / f"hisparse-bench-{os.getpid()}.pool"
    pool = MappedPool.open(path, geometry, pages, MODEL)
    memory = PoolMemory(pool.pages.numpy(), str(path), HEADER_BYTES, pool.pool_id)
    layout, address = Layout.of(geometry, MODEL), "tcp://127.0.0.1:0"
    receiver = open_receiver(options.engine, memory, layout, name="bench-receiver", address=address)
    print(json.dumps({"description": receiver.describe().hex()}), flush=True)
    try:
        for line in sys.stdin:
            transfer_id, count = json.loads(line)
            receiver.open(transfer_id, range(count))
            receiver.poll()
            print("{}", flush=True)
    finally:
        receiver.close()
        path.unlink()
    os._exit(0)  # engines keep threads


class Bench:
    """One executor; its figures by name, of all rounds."""

    def __init__(
        self, options: argparse.Namespace, runner: Runner, pool: MappedPool, memory: PoolMemory, group_bytes: str
    ) -> None:
        pages, g = pages_for(options.tokens), runner.geometry
        sizing = sizing_of(
            g,
            seats=1,
            context_pages=pages + 1,
            chunks=managed_chunks(HOT_SLOTS),
            slab_pages=pages,
            hot_slots=HOT_SLOTS,
            host_pages=len(pool.pages),
        )
        settings = WorkerSettings(
            device=options.device,
            seats=1,
            tail_slots=TAIL_SLOTS,
            prefill_chunk_tokens=options.chunk_tokens,
            layer_group=group_bytes,
            graphs=False,  # nothing is decoded
        )
        self.groups = LayerGroups.of(g, parse_size(group_bytes, "groups"))
        self.reports = Clock()
        self.streams = make_streams("cuda" if options.device != "cpu" else "inline", device=options.device)
        name = f"bench-{group_bytes}/{os.getpid()}"
        self.sender: PageSender = open_sender(memory, Layout.of(g, MODEL), name=name, engines=(options.engine,))
        self.executor = Executor(
            runner,
            settings,
            sizing,
            self.streams,
            pool.pages,
            make_tokenizer("bytes"),
            self.reports,
            transfers=Transfers(self.sender),
        )
        self.rounds: list[dict[str, float]] = []

    def stay(self, options: argparse.Namespace, transfer_id: int, destination: bytes) -> tuple[float, ...]:
        """Seconds until the first token, until staged, until released; its pages travel if there is a `destination`."""
        pages = pages_for(options.tokens)
        prompt = [(transfer_id + 37 * token) % VOCAB for token in range(options.tokens)]
        self.reports.steps.clear()
        self.reports.events.clear()
        began = time.perf_counter()
        self.executor.submit(
            Admit(
                placement=transfer_id,
                request_index=0,
                request_id=f"bench-{transfer_id}",
                prompt=pack_int32(prompt),
                generated=b"",
                durable_tokens=0,
                sampling=Sampling(max_tokens=2, ignore_eos=True),
                host_pages=pack_int32(range(pages + 1)),
                index_pages=pages + 1,
                slab_pages=pages,
                hot_slots=NO_HOT_BUFFER,
                hot_chunks=0,
                transfer_id=transfer_id if destination else 0,
                destination=destination,
            )
        )
        self.turn_until(lambda: bool(self.reports.steps))
        self.turn_until(lambda: any(isinstance(event, Staged) for event in self.reports.events))
        staged = time.perf_counter()
        self.turn_until(lambda: any(isinstance(event, Released) for event in self.reports.events))
        ended = time.perf_counter()
        released = next(event for event in self.reports.events if isinstance(event, Released))
        if released.durable_tokens != options.tokens:
            raise SystemExit(f"pages did not arrive: {released}")
        return self.reports.steps[0] - began, staged - began, ended - began

    def turn_until(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > give_up_at:
                raise SystemExit(f"nothing more happens: {self.reports.events}")
            if not self.executor.turn():
                time.sleep(0.0002)

    def measure(self, options: argparse.Namespace, transfer_id: int, receiver: Receiver) -> None:
        receiver.expect(transfer_id, pages_for(options.tokens))
        self.streams.adopt_thread()  # one executor after another has it
        prefill, _, total = self.stay(options, transfer_id, receiver.description)
        first, staged, _ = self.stay(options, transfer_id + 1, b"")
        self.rounds.append({"prefill": prefill, "staged": staged - first, "arrived": total - prefill, "total": total})

    def row(self, pages: int) -> dict[str, Any]:
        figures = {f"{name}_ms": 1e3 * median(it[name] for it in self.rounds) for name in self.rounds[0]}
        return {"groups": self.groups.count, "units": self.groups.count * pages, **figures, "rounds": self.rounds}


def measure(options: argparse.Namespace) -> None:
    is_gpu = options.device != "cpu"
    runner: Runner = PacedRunner(options.layers, options.layer_ms / 1e3)
    if is_gpu:
        config = synthetic_config("deepseek-v3.2", options.layers)
        runner = synthetic_runner(config, device=options.device)
    geometry, pages = runner.geometry, pages_for(options.tokens)
    path = options.dir / f"hisparse-bench-{os.getpid()}.pool"
    pool = MappedPool.open(path, geometry, pages + 1, MODEL)
    if is_gpu:
        pool.register(CudaRegistrar(options.device), threading.Event())
    memory = PoolMemory(pool.pages.numpy(), str(path), HEADER_BYTES, pool.pool_id)
    receiver = Receiver(options, geometry, pages)
    try:
        benches = {text: Bench(options, runner, pool, memory, text) for text in options.groups}
        transfer_id = 1
        for number in range(options.rounds + 1):  # the first one warms up
            for bench in benches.values():
                bench.measure(options, transfer_id, receiver)
                transfer_id += 2
                if not number:
                    bench.rounds.clear()
        report(options, geometry, {text: bench.row(pages) for text, bench in benches.items()})
        for bench in benches.values():
            bench.executor.transfers.close()
            bench.streams.close()
    finally:
        receiver.end()
        path.unlink()


def report(options: argparse.Namespace, geometry: Geometry, rows: dict[str, Any]) -> None:
    print(
        f"{options.device}, {options.engine}: {options.tokens} tokens in chunks of {options.chunk_tokens}, pages of "
        f"{geometry.page_bytes} bytes, {geometry.layers} layers, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    print("| a group has | groups | prefill ms | staged ms | arrived ms | total ms |\n|---|---|---|---|---|---|")
    for text, row in rows.items():
        what = "the page" if text == "0" else text
        figures = " | ".join(f"{row[f'{name}_ms']:.1f}" for name in ("prefill", "staged", "arrived", "total"))
        print(f"| {what} | {row['groups']} | {figures} |", flush=True)
    gpu = torch.cuda.get_device_name() if options.device != "cpu" else ""
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "gpu": gpu}
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    result = {"machine": machine, "setting": setting, "page_bytes": geometry.page_bytes, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"layer-groups-{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="shared", choices=["shared", "nixl", "mooncake"])
    parser.add_argument("--groups", nargs="*", default=["0", "2MiB", "1MiB", "512KiB", "256KiB"])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--layer-ms", type=float, default=1.5)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--name", default="cpu", help="of the file of results")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
