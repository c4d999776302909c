"""Follows README and docs literally, in order, on a fresh clone of this repository.

    python -m tools.docs.follow                 what is quick
    python -m tools.docs.follow --long          what takes minutes, too
    python -m tools.docs.follow --install       in an empty environment, which `pip install` and `make` fill

Each block of a document has a mark, an HTML comment above it:

    <!-- run -->                                   its lines are run by bash, a block of ```python by Python
    <!-- run: needs Docker, a GPU -->              the same, where all of that is here; else it is reported as skipped
    <!-- run: takes 6 minutes -->                  only with --long
    <!-- run: with a cluster, exits with 8 -->     the follower provides what the text describes; the last line fails so
    <!-- shows settings -->                        TOML, which `hisparse config show` accepts
    <!-- shows a diagram -->                       nothing to run

A line `$ COMMAND` is followed by the output that it must have. A command that serves (`hisparse up` and the like) runs
until the document ends or the next `hisparse up` or `coordinator` starts, as in another terminal, and the next line
waits until it is ready. `hisparse top` gets a terminal, and the key q after a moment.

Directories and ports of the documents (MOVED, PORTS) become some of this run, so that it disturbs no other program.
Exit code 1: a command failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests import ROOT

#: In the order of reading: the README first, since others use what it makes.
DOCUMENTS: Final = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    "CONTRIBUTING.md",
)
MARK: Final = re.compile(r"<!-- (run|shows)(?::? (.*?))? -->")
MINUTES: Final = re.compile(r"takes (\d+) minutes")
EXITS: Final = re.compile(r"exits with (\d+)")
#: Paths of the documents that may belong to another user, or need root.
MOVED: Final = ("/etc/hisparse/keys", "/run/hisparse", "/data/synth", "/tmp/tiny")
PORTS: Final = ("8000", "8001", "8002", "7400")
#: What is printed when a command serves.
READY: Final = {"up": " are up", "coordinator": "to=workers", "worker": "welcomed", "http": "http.link connected"}
READY_LIMIT_S: Final = 120.0
COMMAND_LIMIT_S: Final = 120.0
LONG_LIMIT_S: Final = 3_600.0
STOP_LIMIT_S: Final = 60.0

EMPTY: Final = "an empty environment"
#: Whether what a mark calls missing is here.
NEEDS: Final[Mapping[str, Callable[[], bool]]] = {
    EMPTY: lambda: False,  # --install makes one
    "a GPU": lambda: shutil.which("nvidia-smi") is not None,
    "a checkpoint": lambda: Path("/models/CHECKPOINT").is_dir(),
    "Docker": lambda: False,  # tests/compose goes through the same text, with root and an engine of its own
    "Kubernetes": lambda: False,  # tests/manifests reads what is printed for it
    "a Ray cluster": lambda: False,  # tests/cluster makes one, with root, and runs the same commands there
    "systemd": lambda: Path("/run/systemd/system").is_dir(),
    "two nodes": lambda: False,
    "an address of its own": lambda: False,  # its ports are those that a router knows
    "16 cores": lambda: (os.cpu_count() or 1) >= 16,
    "aiperf": lambda: shutil.which("aiperf") is not None,
    "tmux": lambda: shutil.which("tmux") is not None,
    "10 GB of disk": lambda: shutil.disk_usage(tempfile.gettempdir()).free > 10e9,
}
GIVEN: Final = ("a cluster", "a tiny checkpoint", "config.json")
SHOWN: Final = (
    "a diagram",
    "settings",
    "an error",
    "a log line",
    "two programs side by side",
)


class WrongMark(Exception):
    """A block without a mark, or a mark that says something unknown."""


@dataclass(frozen=True)
class Block:
    """One block of a document: where it is, what its mark says, its language and its lines."""

    document: str
    line: int
    kind: str
    about: tuple[str, ...]
    language: str
    lines: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(it.removeprefix("needs ") for it in self.about if it.removeprefix("needs ") in NEEDS)

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(it.removeprefix("with ") for it in self.about if it.startswith("with "))

    def number(self, pattern: re.Pattern[str]) -> int:
        return next((int(match[1]) for it in self.about if (match := pattern.fullmatch(it))), 0)


def blocks_of(document: str, text: str) -> list[Block]:
    """The blocks of a document in order. Raises WrongMark."""
    return [_block(document, *found) for found in _raw_blocks(text)]


def _raw_blocks(text: str) -> Iterator[tuple[int, str, str, tuple[str, ...]]]:
    """Line, mark above, language and lines of each block: a fence, or indented lines after an empty one."""
    lines, at, mark, is_after_blank = text.splitlines(), 0, "", True
    while at < len(lines):
        line, start = lines[at], at
        if line.startswith("```"):
            at = lines.index("```", at + 1)
            yield start + 1, mark, line[3:], tuple(lines[start + 1 : at])
            mark = ""
        elif line.startswith("    ") and is_after_blank:
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            yield start + 1, mark, "", tuple("\n".join(it[4:] for it in lines[start:at]).strip("\n").split("\n"))
            mark, at = "", at - 1
        elif line.strip():
            mark = line if line.startswith("<!--") else ""
        is_after_blank = not lines[at].strip()
        at += 1


def _block(document: str, line: int, mark: str, language: str, lines: tuple[str, ...]) -> Block:
    match = MARK.fullmatch(mark)
    if match is None:
        raise WrongMark(
            f"{document}:{line}: a block needs a mark above it, as <!-- run --> or <!-- shows a diagram -->"
        )
    kind, words = match[1], tuple(filter(None, (match[2] or "").split(", ")))
    block = Block(document, line, kind, words, language, lines)
    for word in words:
        is_known = word in SHOWN if kind == "shows" else _is_known(word)
        if not is_known:
            raise WrongMark(f"{document}:{line}: unknown word in a mark: {word!r}")
    return block


def _is_known(word: str) -> bool:
    is_given = word.startswith("with ") and word.removeprefix("with ") in GIVEN
    is_need = word.removeprefix("needs ") in NEEDS
    return is_given or is_need or bool(MINUTES.fullmatch(word) or EXITS.fullmatch(word))


def commands_of(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Each command with the output that it must have ("": any). Continued lines are one; comments are none."""
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in joined):
        parts = "\n".join(joined).split("$ ")[1:]
        return [(head, output) for head, _, output in (part.partition("\n") for part in parts)]
    return [(line, "") for line in joined if line.strip() and not line.lstrip().startswith("#")]


def server_of(command: str) -> str:
    """The kind of a command that serves until it is stopped; "" of any other."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    return words[1] if len(words) > 1 and words[0] == "hisparse" and words[1] in READY else ""


# ---------------------------------------------------------------- running


@dataclass
class Outcome:
    """One command: where it stands, what became of it ("ok", "skipped", "failed"), and why."""

    place: str
    command: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.place:<28} {self.command}" + (f"\n         {self.detail}" if self.detail else "")


@dataclass
class Follower:
    """Runs blocks in `clone`, with `binaries` first on the path. Files of the documents lie below `directory`."""

    directory: Path
    clone: Path
    binaries: Path
    is_long: bool = False
    is_install: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    servers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in MOVED:
            self.moved[path] = str(self.directory / path.strip("/"))
            Path(self.moved[path]).parent.mkdir(parents=True, exist_ok=True)
        for port in PORTS:
            self.moved[port] = _free_port()
        self.runtime_dir = Path(self.moved["/run/hisparse"])
        self.home = self.directory / "home"
        self.home.mkdir(parents=True, exist_ok=True)

    @property
    def environ(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HISPARSE_")}
        return inherited | {
            "PATH": f"{self.binaries}:{inherited.get('PATH', '')}",
            "HOME": str(self.home),
            "HISPARSE_CLUSTER_RUNTIME_DIR": str(self.runtime_dir),
            "TERM": "xterm",
            "OMP_NUM_THREADS": "1",
            **({} if self.is_install else {"PYTHONPATH": str(self.clone)}),
        }

    def follow(self, block: Block) -> None:
        """Run a block, or note why not."""
        if block.kind == "shows":
            if "settings" in block.about:
                self._check_settings(block)
            return
        if why := self._missing(block):
            self.outcomes += [Outcome(block.place, it, "skipped", why) for it, _ in self._commands(block)]
            return
        failure = next(filter(None, map(self._give, block.given)), "")
        if failure:
            self.outcomes += [Outcome(block.place, it, "failed", failure) for it, _ in self._commands(block)]
            return
        for command, output in self._commands(block):
            if not self._run(block, command, output):
                return

    def _commands(self, block: Block) -> list[tuple[str, str]]:
        if block.language == "python":
            return [("python PROGRAM", "")]
        return commands_of(block.lines)

    def _missing(self, block: Block) -> str:
        minutes = block.number(MINUTES)
        if minutes and not self.is_long:
            return f"takes {minutes} minutes (--long)"
        lacks = [it for it in block.needs if not NEEDS[it]() and not (self.is_install and it == EMPTY)]
        return f"needs {', '.join(lacks)}" if lacks else ""

    def _run(self, block: Block, command: str, output: str) -> bool:
        began, text = time.monotonic(), self._place(command)
        is_slow = block.number(MINUTES) or EMPTY in block.needs  # an installation reads gigabytes
        limit_s = LONG_LIMIT_S if is_slow else COMMAND_LIMIT_S
        if block.language == "python":
            program = self.directory / "program.py"
            program.write_text(self._place("\n".join(block.lines)))
            failure = self._wait_for(f"python {program}", limit_s)
        elif kind := server_of(command):
            failure = self._serve(kind, text)
        elif text.startswith("hisparse top"):
            failure = self._wait_for(f"(sleep 3; printf q) | script -qec {shlex.quote(text)} /dev/null", limit_s)
        else:
            failure = self._wait_for(text, limit_s, wanted=output, exits_with=block.number(EXITS))
        took = f"{time.monotonic() - began:.0f} s"
        self.outcomes.append(Outcome(block.place, command, "failed" if failure else "ok", failure or took))
        print(self.outcomes[-1], flush=True)
        return not failure

    def _place(self, text: str) -> str:
        """`text` with paths and ports of this run."""
        pattern = "|".join(rf"(?<![\w.-]){re.escape(it)}(?!\w)" for it in self.moved)
        return re.sub(pattern, lambda match: self.moved[match[0]], text)

    def _wait_for(self, command: str, limit_s: float, *, wanted: str = "", exits_with: int = 0) -> str:
        """Run to its end; returns what went wrong, "" for nothing."""
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.clone,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not ended after {limit_s:g} s"
        if done.returncode != exits_with:
            return f"exit code {done.returncode}: {(done.stderr or done.stdout)[-500:]}"
        shown, printed = _lines(wanted), _lines(done.stdout)
        return f"printed {printed}, not {shown}" if wanted and shown != printed else ""

    def _serve(self, kind: str, command: str) -> str:
        if kind in ("up", "coordinator"):
            self.stop_servers()
        log = self.directory / f"{kind}-{len(self.outcomes)}.log"
        with log.open("w") as file:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command}" if command.startswith("hisparse") else command],
                cwd=self.clone,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self.servers[str(log)] = server
        give_up_at = time.monotonic() + READY_LIMIT_S
        while READY[kind] not in log.read_text():
            if server.poll() is not None:
                return f"ended with {server.returncode}: {log.read_text()[-500:]}"
            if time.monotonic() > give_up_at:
                return f"not ready after {READY_LIMIT_S:g} s: {log.read_text()[-500:]}"
            time.sleep(0.2)
        return ""

    def end_document(self) -> None:
        """Stop what serves and forget its journal: the first request of the next document is r1 again."""
        self.stop_servers()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def stop_servers(self) -> None:
        """Ctrl-C in each terminal, the last one first."""
        while self.servers:
            _, server = self.servers.popitem()
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()

    def _give(self, name: str) -> str:
        """What the text around a block describes; returns what went wrong, "" for nothing."""
        tiny, failure = self.moved["/tmp/tiny"], ""
        if name == "config.json":
            write_published_config(self.clone / "config.json")
        elif not Path(tiny).exists():
            failure = self._wait_for(f"hisparse model tiny {tiny}", COMMAND_LIMIT_S)
        if name == "a cluster" and not self.servers:
            failure = failure or self._serve("up", f"hisparse up --model {tiny}")
            failure = failure or self._wait_for("hisparse submit Hello --max-tokens 4", COMMAND_LIMIT_S)
        return f"lacks {name}: {failure}" if failure else ""

    def _check_settings(self, block: Block) -> None:
        file = self.directory / "settings.toml"
        file.write_text("\n".join(block.lines))
        failure = self._wait_for(f"hisparse config show --config {file}", COMMAND_LIMIT_S)
        self.outcomes.append(
            Outcome(block.place, "hisparse config show --config FILE", "failed" if failure else "ok", failure)
        )


def write_published_config(path: Path) -> None:
    """config.json of DeepSeek-V3.2 in FP8."""
    from worker.weights.synth import published_config

    about = json.loads(published_config("deepseek-v3.2").to_json_string(use_diff=False))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    path.write_text(json.dumps(about | {"dtype": "bfloat16", "quantization_config": quantization}))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def make_clone(directory: Path) -> Path:
    """A clone of the last commit, and what is changed since and tracked."""
    clone = directory / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    changes = subprocess.run(["git", "diff", "--binary", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    if changes:
        subprocess.run(["git", "apply"], cwd=clone, input=changes, check=True)
    return clone


def follow_all(
    directory: Path, documents: Sequence[str] = DOCUMENTS, *, is_long: bool, is_install: bool
) -> list[Outcome]:
    """Follow the documents of a fresh clone in `directory`; returns what became of each command."""
    clone, binaries = make_clone(directory), Path(sys.executable).parent
    if is_install:
        subprocess.run([sys.executable, "-m", "venv", str(clone / ".venv")], check=True)
        binaries = clone / ".venv" / "bin"
    follower = Follower(directory, clone, binaries, is_long, is_install)
    for document in documents:
        try:
            for block in blocks_of(document, (clone / document).read_text()):
                follower.follow(block)
        finally:
            follower.end_document()
    return follower.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", default=DOCUMENTS)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--install", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="follow-") as directory:
        outcomes = follow_all(Path(directory), args.documents, is_long=args.long, is_install=args.install)
    for outcome in outcomes:
        if outcome.state != "ok":
            print(outcome)
    counts = {state: sum(it.state == state for it in outcomes) for state in ("ok", "skipped", "failed")}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
