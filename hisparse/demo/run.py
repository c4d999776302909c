"""The demo from end to end: checkpoint, service, scenario, oracles, report."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from hisparse.cluster.gpus import gpu_bytes
from hisparse.cluster.placement import CUDA
from hisparse.cluster.up import Cluster, running_cluster
from hisparse.demo.compare import TIE_BOUND, OracleRun, compare
from hisparse.demo.display import Display, stderr_console
from hisparse.demo.oracles import consult
from hisparse.demo.plan import DemoOptions, DemoRequest, cut_prompts, memory_for, prompt_lengths
from hisparse.demo.report import DemoReport, Evidence, build_report
from hisparse.demo.scenario import run_scenario
from hisparse.demo.setup import cluster_config, kv_shape, pool_directory, read_sources, write_checkpoint
from hisparse.demo.watch import Outcome
from protocol.errors import ConfigError
from protocol.settings import Config
from protocol.text import ByteTokenizer

#: Most runs of the oracle with other last bits, for requests whose tokens differ: does rounding decide there?
NUDGES: Final = 4


def run_demo(options: DemoOptions, prompt_paths: Sequence[Path], work_dir: Path | None) -> DemoReport:
    """Run the demo in `work_dir`, or in a directory removed at the end. Raises HiSparseError when it cannot run.

    Interrupted: all processes that it started have ended; sockets and host pool are removed.
    """
    lengths = prompt_lengths(options.requests, options.prompt_tokens_min, options.prompt_tokens_max)
    requests = cut_prompts(read_sources(prompt_paths), lengths, ByteTokenizer().encode, options.turns)
    with _directory(work_dir) as directory:
        return trio.run(_demo, options, requests, directory)


@contextmanager
def _directory(work_dir: Path | None) -> Iterator[Path]:
    """The directory of the run. Its path is short, because that of a Unix socket has at most 107 bytes."""
    if work_dir is not None:
        work_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield work_dir.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="hisparse-demo-") as directory:
        yield Path(directory)


async def _demo(options: DemoOptions, requests: Sequence[DemoRequest], directory: Path) -> DemoReport:
    async with trio.open_nursery() as nursery:
        await nursery.start(_end_on_sigterm)
        evidence = await _gather(options, requests, directory)
        nursery.cancel_scope.cancel()
    return build_report(options, evidence)


async def _end_on_sigterm(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """SIGTERM ends the demo cleanly, like Ctrl-C."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            raise KeyboardInterrupt


async def _gather(options: DemoOptions, requests: Sequence[DemoRequest], directory: Path) -> Evidence:
    """Serve the requests, then run the oracles. The service has ended and freed its memory before they start."""
    outcome, model = Outcome(), directory / "model"
    display = Display(stderr_console(), outcome, options.new_tokens)
    began = trio.current_time()
    display.note(f"writing a small random checkpoint of the real {options.family} model code")
    await write_checkpoint(model, options, directory)
    groups = f" in groups of {options.group_size}" if options.group_size > 1 else ""
    display.note(f"starting a coordinator and {options.workers} workers{groups}")
    gpus = len(gpu_bytes()) if options.device == CUDA and options.group_size > 1 else 0
    with pool_directory(options.device, directory) as pool_dir:
        config = cluster_config(options, model, directory, pool_dir)
        start = partial(
            running_cluster, workers=options.workers, group_size=options.group_size, gpus=gpus, log_dir=directory
        )
        async with _deterministic_if_possible(start, config, display.note) as cluster:
            start_s = trio.current_time() - began
            display.note(_load_text(options, requests))
            async with cluster.client("hisparse demo") as client:
                with display.live():
                    await run_scenario(client, requests, options, outcome, display.note)
    began = trio.current_time()
    served = sorted(outcome.served, key=lambda it: it.request_id)
    runs = await _oracle_runs(model, served, options, directory, display)
    ask = partial(consult, model, options=options, work_dir=directory)
    nudged = await nudged_runs(ask, served, outcome.tokens, runs, display.note)
    layers, row_bytes = kv_shape(model)
    return Evidence(
        outcome=outcome,
        runs=runs,
        nudged=nudged,
        kv_row_bytes=row_bytes,
        layers=layers,
        start_s=start_s,
        oracle_s=trio.current_time() - began,
    )


@asynccontextmanager
async def _deterministic_if_possible(
    start: Callable[[Config], AbstractAsyncContextManager[Cluster]], config: Config, note: Callable[[str], None]
) -> AsyncIterator[Cluster]:
    """The cluster that `start` makes of `config`. Where a worker refuses its settings, deterministic mode among them,
    it is started again without that mode. Raises what `start` raises."""
    async with AsyncExitStack() as stack:
        try:
            cluster = await stack.enter_async_context(start(config))
        except ConfigError:
            if not config.worker.deterministic:
                raise
            note("a worker refused its settings (see above): starting again without deterministic mode")
            worker = msgspec.structs.replace(config.worker, deterministic=False)
            cluster = await stack.enter_async_context(start(msgspec.structs.replace(config, worker=worker)))
        yield cluster


async def _oracle_runs(
    model: Path, requests: Sequence[DemoRequest], options: DemoOptions, directory: Path, display: Display
) -> dict[str, OracleRun]:
    runs: dict[str, OracleRun] = {}

    def answered(name: str, run: OracleRun) -> None:
        runs[name] = run
        display.note(f"  {name} in {run.duration_s:.0f} s, {len(runs)} of {len(requests)}")

    display.note("generate() of the model library decodes the same prompts, in separate processes")
    await consult(model, requests, options, directory, answered)
    return runs


async def nudged_runs(
    ask: Callable[..., Awaitable[None]],
    requests: Sequence[DemoRequest],
    tokens: Mapping[str, Sequence[int]],
    runs: Mapping[str, OracleRun],
    note: Callable[[str], None],
) -> dict[str, list[OracleRun]]:
    """Return outputs of the oracle with other last bits by request id, for requests whose `tokens` differ from `runs`:
    until one of them excuses the difference, NUDGES at most, up to the token that differs. `ask` is `consult`."""
    found: dict[str, list[OracleRun]] = {request.request_id: [] for request in requests}
    for number in range(NUDGES):
        verdicts = [compare(name, tokens[name], runs[name], TIE_BOUND, found[name]) for name in found]
        wrong = [verdict for verdict in verdicts if verdict.mismatched]
        limits = {verdict.request_id: 1 + (verdict.divergence or 0) for verdict in wrong}
        if not limits:
            break
        note(f"{len(limits)} differ: generate() again with last bits changed, {number + 1} of {NUDGES} at most")
        differing = [request for request in requests if request.request_id in limits]
        await ask(requests=differing, done=lambda name, run: found[name].append(run), nudge=number, limits=limits)
    return found


def _load_text(options: DemoOptions, requests: Sequence[DemoRequest]) -> str:
    prompt_tokens = sum(len(request.prompt) for request in requests)
    return (
        f"{len(requests)} {'requests' if options.turns == 1 else f'conversations of {options.turns} turns'}, "
        f"{prompt_tokens:,} prompt tokens, {options.new_tokens} new tokens each; "
        f"hot buffers of {memory_for(options).hot_slots} slots, top-{options.topk}"
    )
