"""A first hour with hisparse, as a script: what a person sees at each step.

    python -m tools.docs.first_hour              write docs/first-hour.txt, 4 minutes on 2 cores
    python -m tools.docs.first_hour --print      print it

Every step runs on real processes with a tiny checkpoint and shows what a terminal shows. What differs from run to run
(times, ports, ids of processes, paths) is replaced by a word for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

from tests import ROOT
from tests.support.ports import free_ports

TRANSCRIPT: Final = ROOT / "docs" / "first-hour.txt"
READY_LIMIT_S: Final = 180.0
COMMAND_LIMIT_S: Final = 120.0
COLUMNS: Final = 120

#: What differs from run to run, in order of replacement.
VARYING: Final = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\.\d+Z?", "TIME"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"(pid|peer=\"pid|process)([= ])\d+", r"\1\2PID"),
    (r"\b\d+(\.\d+)? ms\b", "N ms"),
    (r"\b\d+m\d\ds\b|\b\d+\.\d+s\b", "AGE"),
    (r"incarnation=\d+|epoch=\d+", "NUMBER"),
    (r"\b\d+ of 9000\b", "N of 9000"),
    (r"\b\d+ rows\b", "N rows"),
    (r"--from \d+", "--from N"),
    (r"(device_bytes|bookkeeping_bytes)=\d+", r"\1=N"),
    (r" +AGE", " AGE"),
    (r" {3,}", "   "),
    (r"\b\d+ host pages?, N rows durable, \d+ hot chunks?", "N host pages, N rows durable, N hot chunks"),
)


class Step(NamedTuple):
    """`command` on a terminal. `lines`: which of its output are shown, by a pattern; all without one."""

    command: str
    lines: str = ""
    last: int = 0


class Scene(NamedTuple):
    """Steps on one subject. `serve`: what `hisparse up` is started with before them; "" leaves the cluster as it is."""

    title: str
    steps: Sequence[Step]
    serve: str | None = None


PROGRAM: Final = """
import asyncio, hisparse

async def main():
    async with hisparse.open_client(ENDPOINT) as client:
        print(len(await client.workers()), "worker")

asyncio.run(main())
"""
OUTSIDE: Final = "import hisparse; hisparse.open_client(ENDPOINT).__aenter__().send(None)"

SCENES: Final = (
    Scene(
        "1. A program under asyncio",
        (Step(f"python -c {shlex.quote(PROGRAM)}", last=1), Step(f"python -c {shlex.quote(OUTSIDE)}", last=1)),
        serve="--http 127.0.0.1:0",
    ),
    Scene(
        "2 and 3. No worker takes requests",
        (
            Step("hisparse drain --all"),
            Step("hisparse submit hello --id first --detach"),
            Step("hisparse attach first --timeout 4"),
            Step("hisparse requests | cat"),
            Step("hisparse request first", r"first|waits"),
            Step("curl -s -o /dev/null -w '%{http_code}\\n' $URL/health"),
            Step("curl -s $URL/health; echo"),
            Step("hisparse abort first"),
            Step("hisparse undrain --all"),
        ),
    ),
    Scene(
        "5. Remedies that work",
        (
            Step("hisparse submit more --max-tokens 9000 --ignore-eos --id second --detach"),
            Step("hisparse resize second --hot-slots 0"),
            Step("hisparse resize second --hot-slots 100"),
            Step("hisparse config show --set worker.device_mem=lots --set worker.device=cuda"),
            Step("hisparse config show --set worker.host_mem=60Gib | grep host_mem"),
        ),
    ),
    Scene("6. Roles that serve nothing", (Step("hisparse up --model tiny --roles prefill", last=2),)),
    Scene(
        "7. Workers that left",
        (Step("hisparse forget w0"), Step("hisparse forget nemo")),
    ),
    Scene(
        "9. Errors of HTTP",
        (
            *(
                Step(f"curl -s $URL/v1/completions -d {shlex.quote(body)}; echo")
                for body in (
                    '{"prompt": "x", "temprature": 1}',
                    '{"prompt": ["x", 5]}',
                    '{"prompt": "x", "max_tokens": 99999}',
                    '{"prompt": "x", "n": 1.5}',
                    '{"prompt"',
                )
            ),
            Step("hisparse submit x --max-tokens 0"),
            Step(f"hisparse submit x --seed {10**30}"),
        ),
    ),
    Scene(
        "12 and 16. Retract, resume, drain; a held request",
        (
            Step("hisparse retract second"),
            Step("hisparse request second", r"^second|swap-in|retracted"),
            Step("hisparse resume second"),
            Step("hisparse abort second"),
            Step("hisparse drain w0 --deadline 0"),
            Step("hisparse undrain w0"),
        ),
    ),
    Scene(
        "14. The end of an output",
        (Step("hisparse submit again --max-tokens 4 --temperature 0 --id mine", r"mine"),),
    ),
    Scene(
        "15. Sizes",
        (
            Step("hisparse size --config tiny --host-mem lots --device-mem 1GB --context 1024"),
            Step("hisparse size --config tiny --host-mem 1GB --device-mem 100MB --context 16k"),
        ),
    ),
    Scene(
        "18. Completion, settings, version",
        (
            Step("hisparse completion bash", r"complete .*hisparse"),
            Step("hisparse config show", r"worker\.seats|runtime_dir"),
            Step("curl -s $URL/version; echo"),
            Step("curl -s $URL/v1/models | tr ',' '\\n' | grep '\"id\"'"),
        ),
    ),
    Scene(
        "11. One style of log; peers by address",
        (
            Step("$LOG", r"sized|up .*are up", last=3),
            Step("$LOG", r"connection closed owner=.admin hisparse up", last=1),
        ),
    ),
    Scene(
        "4. Another model, with requests left over",
        (
            Step("hisparse submit more --max-tokens 9000 --ignore-eos --id left --detach"),
            Step("$INTERRUPT", r"up:? +(draining|stopped at once)"),
            Step("hisparse up --model other", r"^hisparse: |exited with 8"),
            Step(
                "hisparse up --model other --abort-unfinished --ready-file ready & "
                "until [ -f ready ]; do sleep 0.2; kill -0 $! || break; done; kill -INT $!; wait $!",
                r"aborted|No such option",
            ),
        ),
    ),
    Scene(
        "8. Stable ports of metrics",
        (Step("$LOG", r"up .*(up;|API|metrics|Ctrl-C)|^hisparse"),),
        serve="--http 127.0.0.1:0 --metrics-port $METRICS",
    ),
)


@dataclass
class Hour:
    """Runs the steps in `directory`."""

    directory: Path
    url: str = ""
    served: str = ""
    up: subprocess.Popen[bytes] | None = None
    shown: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        binaries = self.directory / "bin"
        binaries.mkdir()
        for name, module in (("hisparse", " -m hisparse.cli"), ("python", "")):
            (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
            (binaries / name).chmod(0o755)
        self.environ = inherited() | {
            "PATH": f"{binaries}:{inherited()['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HISPARSE_CLUSTER_RUNTIME_DIR": str(self.directory / "run"),
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "OMP_NUM_THREADS": "1",
            "TERM": "xterm",
        }

    @property
    def log(self) -> Path:
        return self.directory / "up.log"

    def play(self, scenes: Sequence[Scene]) -> None:
        for family, name in (("glm-5", "tiny"), ("deepseek-v3.2", "other")):
            self.sh(f"hisparse model tiny {name} --family {family}")
        try:
            for scene in scenes:
                if scene.serve is not None:
                    self.stop()
                    self.serve(scene.serve)
                self.shown[scene.title] = [text for step in scene.steps for text in self.step(step)]
                print(f"{scene.title}: {len(self.shown[scene.title])} lines", file=sys.stderr, flush=True)
        finally:
            self.stop()

    def step(self, step: Step) -> Iterator[str]:
        if step.command == "$INTERRUPT":
            label, text = "hisparse up --model tiny      # Ctrl-C, and again", self.interrupt()
        elif step.command == "$LOG":
            label, text = self.served, self.log.read_text()
        else:
            label, text = step.command, self.sh(step.command.replace("$URL", self.url))
        lines = [line.rstrip() for line in self.plain(text).splitlines()]
        lines = [line for line in lines if line and re.search(step.lines, line)][-step.last :]
        yield f"$ {' '.join(label.split()) if 'python -c' not in label else label.strip()}"
        yield from lines

    def plain(self, text: str) -> str:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\^D\x08\x08", "", text).replace(str(self.directory), "DIR")
        text = text.replace(str(ROOT), "CODE")
        for pattern, word in VARYING:
            text = re.sub(pattern, word, text)
        return text

    def sh(self, command: str) -> str:
        """What a terminal of COLUMNS shows for it."""
        endpoint = f"ipc://{self.directory}/run/client.sock"
        command = command.replace("ENDPOINT", repr(endpoint).replace("'", '"'))
        done = subprocess.run(
            ["script", "-qec", f"stty cols {COLUMNS} rows 40; {command}", "/dev/null"],
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        return done.stdout

    def serve(self, options: str) -> None:
        self.served = f"hisparse up --model tiny {options.replace('$METRICS', '9400')}"
        options = options.replace("$METRICS", str(free_ports(4)))
        command = f"exec hisparse up --model tiny --threads 1 --ready-file {self.directory}/ready {options}"
        ready = self.directory / "ready"
        ready.unlink(missing_ok=True)
        with self.log.open("w") as file:
            self.up = subprocess.Popen(
                ["bash", "-c", command], cwd=self.directory, env=self.environ, stdout=file, stderr=file
            )
        give_up_at = time.monotonic() + READY_LIMIT_S
        while not ready.exists():
            if self.up.poll() is not None or time.monotonic() > give_up_at:
                self.up = None
                return
            time.sleep(0.2)
        time.sleep(1.0)
        self.url = json.loads(ready.read_text())["http"]["url"]

    def interrupt(self) -> str:
        assert self.up is not None
        self.up.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while "draining" not in self.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        self.up.send_signal(signal.SIGINT)
        self.up.wait(60)
        return self.log.read_text()

    def stop(self) -> None:
        if self.up is not None and self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
            try:
                self.up.wait(60)
            except subprocess.TimeoutExpired:
                self.up.kill()
        self.up = None


# ---------------------------------------------------------------- screens


@contextmanager
def fixed_cluster(directory: Path) -> Iterator[None]:
    """A coordinator's sockets with rows that never change."""
    from protocol import messages

    cli = import_module("tests.hisparse.cli.test_cli")
    row, REQUEST, WORKER = cli.row, cli.REQUEST, cli.WORKER  # noqa: N806
    from tests.support.fakes.gateway import FakeGateway, tag_of

    waits = "needs 1 seat, w0 has 0 of 8 free, w1 has 0 of 8 free"
    requests = (
        row(REQUEST, request_id="chatcmpl-5f3a9c21-0", worker="w0", prompt_tokens=131_072, generated_tokens=1_204,
            max_tokens=4_096, durable_tokens=132_275, host_pages=2_067, reason="on w0"),
        row(REQUEST, request_id="chatcmpl-5f3a9c21-1", worker="w1", hot_slots=0, reason="on w1"),
        row(REQUEST, request_id="r17", state="RETRACTED", held=True, worker="", hot_slots=-1, misses=0,
            reason="held by an operator, its 104 rows kept: hisparse resume lets it go on"),
        row(REQUEST, request_id="r18", state="QUEUED", worker="", hot_slots=-1, hits=0, misses=0, generated_tokens=0,
            durable_tokens=0, host_pages=0, reason=waits),
        *(row(REQUEST, request_id=f"r{number}", state="FINISHED", worker="", hot_slots=-1, reason="stop")
          for number in range(16, 3, -1)),
    )  # fmt: skip
    workers = (WORKER, row(WORKER, worker="w1", steps=1_234_567, seats_free=0, running=8, step_us=12_345.0))
    with FakeGateway(directory, cli.MODEL) as gateway:
        gateway.on(messages.ListRequests, lambda ask: [messages.RequestRows(tag_of(ask), requests)])
        gateway.on(messages.ListWorkers, lambda ask: [messages.WorkerRows(tag_of(ask), workers)])
        yield


def inherited() -> dict[str, str]:
    """This environment without settings of HiSparse and without a terminal's size: a width there hides `stty cols`."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HISPARSE_") and name not in ("COLUMNS", "LINES")
    }


def screens() -> Iterator[tuple[str, list[str]]]:
    """Tables and `hisparse top` at 80, 100 and 120 columns, of rows that are the same each time."""
    test_top = import_module("tests.hisparse.top.test_top")
    with tempfile.TemporaryDirectory() as name, fixed_cluster(Path(name)):
        for columns in (80, 100, 120):
            lines = []
            for command in ("requests", "requests --live", "workers"):
                shell = f"stty cols {columns} rows 40; {sys.executable} -m hisparse.cli {command}"
                environ = inherited() | {"PYTHONPATH": str(ROOT), "HISPARSE_CLUSTER_RUNTIME_DIR": name, "TERM": "xterm"}
                done = subprocess.run(
                    ["script", "-qec", shell, "/dev/null"],
                    env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True,
                )  # fmt: skip
                shown = [line.rstrip() for line in done.stdout.replace("\r", "").replace("^D\x08\x08", "").splitlines()]
                lines += [f"$ hisparse {command}", *shown]
            top = test_top.screen_of(*test_top.numbered(6))
            lines += ["$ hisparse top", *(line.rstrip() for line in test_top.shown(top, columns, 20))]
            yield f"10 and 12. {columns} columns", lines


# ---------------------------------------------------------------- the transcript


def transcript(shown: Iterable[tuple[str, list[str]]]) -> str:
    parts = ["A first hour: what a person sees. Written by: python -m tools.docs.first_hour"]
    for title, lines in shown:
        parts.append(f"{'=' * 100}\n{title}\n")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def record() -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory(prefix="hour-") as directory:
        hour = Hour(Path(directory))
        hour.play(SCENES)
    return hour.shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", dest="prints")
    args = parser.parse_args()
    text = transcript([*record().items(), *screens()])
    if args.prints:
        print(text)
    else:
        TRANSCRIPT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
