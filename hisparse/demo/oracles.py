"""generate() of the model library on the demo's prompts, in processes that import nothing of hisparse.

They decode on the device of the service, in the same precision. Prompts are divided among as many processes as there
are cores (GPU_PROCESSES on a GPU, whose memory they share), so that the parts take about equally long. A prompt takes
time by its length squared: on a core 4 s for 2,048 tokens, 36 s for 6,000 were measured. Each process loads the
checkpoint once and prints one line per prompt (worker/oracle.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import trio

from hisparse.demo.compare import OracleRun
from hisparse.demo.plan import DemoOptions, DemoRequest
from protocol.errors import InternalError, Unavailable

#: Time limit of all prompts: twenty times the time measured on two cores.
ORACLE_LIMIT_S: Final = 1_800.0
GPU_PROCESSES: Final = 4
#: Largest line an oracle prints: ids, runners-up and gaps of one output.
LINE_BYTES_MAX: Final = 16 * 1024 * 1024

Done = Callable[[str, OracleRun], None]


def deal(sizes: Sequence[int], hands: int) -> list[list[int]]:
    """Indices of `sizes` in at most `hands` groups of about equal sums: largest first, each to the smallest group."""
    dealt: list[list[int]] = [[] for _ in range(min(hands, len(sizes)))]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(dealt, key=lambda hand: sum(sizes[j] for j in hand)).append(i)
    return dealt


async def consult(
    model: Path,
    requests: Sequence[DemoRequest],
    options: DemoOptions,
    work_dir: Path,
    done: Done,
    nudge: int | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Call `done(request_id, run)` for each request as its output arrives. Raises Unavailable when an oracle fails.

    `nudge`: of worker/oracle.py. `limits`: new tokens by request id, where they are fewer than those of `options`.
    """
    processes = (os.cpu_count() or 1) if options.device == "cpu" else GPU_PROCESSES
    hands = deal([len(request.prompt) ** 2 for request in requests], processes)
    with trio.move_on_after(ORACLE_LIMIT_S) as scope:
        async with trio.open_nursery() as nursery:
            for number, hand in enumerate(hands):
                chosen, log_path = [requests[i] for i in hand], work_dir / f"oracle{number}.log"
                nursery.start_soon(_consult_one, model, chosen, options, log_path, done, nudge, limits)
    if scope.cancelled_caught:
        raise Unavailable("the oracle did not finish", field="limit_s", value=ORACLE_LIMIT_S, remedy="lower --requests")


async def _consult_one(
    model: Path,
    requests: Sequence[DemoRequest],
    options: DemoOptions,
    log_path: Path,
    done: Done,
    nudge: int | None,
    limits: Mapping[str, int],
) -> None:
    job = {
        "model": str(model),
        "prompts": [
            {"tokens": request.prompt, "max_new_tokens": limits.get(request.request_id, options.new_tokens)}
            for request in requests
        ],
        "ignore_eos": True,
        "threads": 1,
        "dtype": "float32",
        "device": options.device,
    } | ({} if nudge is None else {"nudge": nudge})
    answered = 0
    with log_path.open("wb") as log:
        async with trio.open_nursery() as nursery:
            start = partial(
                trio.run_process, stdin=json.dumps(job).encode(), stdout=subprocess.PIPE, stderr=log, check=False
            )
            process = await nursery.start(start, [sys.executable, oracle_file()])
            async for line in _lines(process.stdout):
                answer = json.loads(line)
                done(requests[answer["index"]].request_id, _run_of(answer))
                answered += 1
    if answered != len(requests):
        raise Unavailable(
            f"answered {answered} of {len(requests)} prompts and exited with {process.returncode}",
            field="oracle",
            value=log_path,
            remedy=_last_line(log_path),
        )


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    pending = b""
    async for chunk in stream:
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > LINE_BYTES_MAX:
            raise InternalError("the oracle's line does not end", field="bytes", value=len(pending))
        for line in lines:
            yield line


def oracle_file() -> str:
    """Path of worker/oracle.py, without importing it."""
    spec = importlib.util.find_spec("worker")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / "oracle.py")


def _run_of(answer: dict[str, list[float]]) -> OracleRun:
    return OracleRun(
        tuple(map(int, answer["tokens"])),
        tuple(map(int, answer["runners_up"])),
        tuple(map(float, answer["gaps"])),
        float(answer["duration_s"]),  # type: ignore[arg-type]
    )


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it has no output"
