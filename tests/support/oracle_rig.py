"""worker/oracle.py as a program: it must not see this project even by accident.

Its processes are forked from one that has imported the model library, and nothing else: that import takes 4 s of CPU
time, more than the answers of a tiny checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import worker.oracle
from worker.families.table import FAMILIES

#: For each line on stdin, paths of an input, an output and a file for errors, it runs the file that it is given, in a
#: process of its own, and prints the exit status.
_PROGRAM: Final = """
import gc, json, os, runpy, sys, transformers
for family in sys.argv[2:]:
    getattr(transformers, family)
runpy.run_path(sys.argv[1])
assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
gc.collect()
gc.freeze()  # a collection in a forked process would copy all of this memory
while line := sys.stdin.readline():
    child = os.fork()
    if not child:
        for place, path in enumerate(json.loads(line)):
            os.dup2(os.open(path, os.O_RDWR), place)
        try:
            runpy.run_path(sys.argv[1], run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)  # nothing of this memory is taken down
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_COMMAND: Final = (sys.executable, "-P")


def run_oracle(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers to `job` (worker/oracle.py has its form), one for each prompt."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / name for name in ("job", "answers", "errors")]
        for path, text in zip(paths, (json.dumps(job), "", ""), strict=True):
            path.write_text(text)
        # CUDA outlives no fork, not even the question whether there is a device.
        status = _forked(paths) if job.get("device", "cpu") == "cpu" else _executed(paths)
        _, answers, errors = (path.read_text() for path in paths)
    assert status == 0, f"the oracle ended with {status}: {errors}"
    return [json.loads(line) for line in answers.splitlines()]


def _executed(paths: list[Path]) -> int:
    given, answers, errors = paths
    with given.open() as stdin, answers.open("w") as stdout, errors.open("w") as stderr:
        command = [*_COMMAND, worker.oracle.__file__]
        return subprocess.run(command, stdin=stdin, stdout=stdout, stderr=stderr, cwd="/", check=False).returncode


def _forked(paths: list[Path]) -> int:
    """A test whose limit ends this wait leaves no process that still answers to it."""
    process = _zygote()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([str(path) for path in paths]) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())
    except BaseException:
        process.kill()
        _zygote.cache_clear()
        raise


@cache
def _zygote() -> subprocess.Popen[str]:
    """Ends with this process."""
    classes = (it.config_class.replace("Config", "ForCausalLM") for it in FAMILIES.values() if it.config_class)
    command = [*_COMMAND, "-c", _PROGRAM, worker.oracle.__file__, *classes]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
