"""`python -m tools.faults.group_chaos --seconds 1800`: two groups behind a front, under streams of the openai package.

    first       each of PROMPTS streams runs undisturbed: its text
    then        STREAMS clients ask for them again and again, each under an `Idempotency-Key` of its own, and come back
                under that key when their connection ends. One fault after the other, once all processes are there
                again and every stream has had text since: SIGKILL or a stop (SIGSTOP, SIGCONT later) of a rank, the
                coordinator or the front, or SIGKILL of `hisparse up` itself, which is started again
    at the end  SIGTERM to `hisparse up`: exit status 0, nothing of its own in the runtime directory or /dev/shm

The seed decides which faults, of which processes, and for how long; not what the machine makes of them. Prints a line
for each fault, and one line of JSON at the end: faults and their number, streams that ended, texts that differ, streams
that ended with an error, returns to a stream. Exits with 1, and leaves the logs, when a text differs, a stream fails,
or something is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import openai
import psutil

from hisparse.cluster.children import die_with_parent
from tests import ROOT
from tests.support.http_rig import write_chat_model
from tests.support.ports import free_ports

GROUPS, RANKS, STREAMS, PROMPTS = 2, 2, 8, 16
TOKENS: Final = (64, 320)  # of an output
SHARED: Final = Path("/dev/shm")
#: Of a start, of a return after a fault, and of one stream over all faults.
LIMIT_S: Final = 240.0
STREAM_LIMIT_S: Final = 900.0
RETRY_S: Final = 0.3
PAUSE_S: Final = (0.2, 3.0)  # between what a fault waits for and the fault
#: Some stops end before the process is missed, others after it was taken for hung.
STOPPED_S: Final = (0.5, 20.0)
HEARTBEAT_LIMIT_S: Final = 4.0
#: Names of faults, each as often as it stands here.
FAULTS: Final = (
    ("kill rank",) * 4
    + ("stop rank",) * 3
    + ("kill coordinator",) * 2
    + ("stop coordinator",)
    + (
        *("kill front", "stop front"),
        "kill up",
    )
)
#: The words of a command line by which children are told apart.
WORDS: Final = {"rank": "worker", "coordinator": "coordinator", "front": "http"}
#: What may stay in a runtime directory: the journal and its files, and locks. A lock file outlives its holder, since
#: removing one could take away what another process has just locked.
KEPT: Final = ("journal.sqlite", "incarnation")
LOCK: Final = ".lock"
SIZES: Final = ("--host-mem", "64MiB", "--device-mem", "32MiB", "--hot-size-classes", "64,128", "--threads", "1")


class Service:
    """`hisparse up`, which is started again under the same runtime directory and port."""

    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_ports(1)
        self.runtime_dir, self.ready = place / "run", place / "ready.json"
        self.runtime_dir.mkdir(mode=0o700)
        write_chat_model(place / "model")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready. Raises RuntimeError when it does not become so."""
        self.ready.unlink(missing_ok=True)
        settings = {
            "coordinator.heartbeat_interval_s": 0.2,
            "coordinator.heartbeat_limit_s": HEARTBEAT_LIMIT_S,
            "coordinator.ended_keep_s": STREAM_LIMIT_S,
            "http.reattach_grace_s": STREAM_LIMIT_S,
            "http.worker_wait_s": LIMIT_S,
        }
        command = [
            *(sys.executable, "-m", "hisparse.cli", "up", "--model", str(self.place / "model"), "--deterministic"),
            *("--workers", str(GROUPS * RANKS), "--group-size", str(RANKS), "--http", f"127.0.0.1:{self.port}"),
            *("--runtime-dir", str(self.runtime_dir), "--ready-file", str(self.ready), *SIZES),
            *(word for name, value in settings.items() for word in ("--set", f"{name}={value:g}")),
        ]
        with (self.place / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stderr=log,
                stdout=log,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - clients have not begun, or wait
            )
        self.until(self.ready.exists, "is not ready")

    def until(self, condition: Callable[[], bool], why: str) -> None:
        """Wait for a condition. Raises RuntimeError when `hisparse up` ends before, or it takes LIMIT_S."""
        limit = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"the service {why}: {self.place / 'up.log'}")
            time.sleep(0.05)

    def children(self, kind: str) -> list[psutil.Process]:
        """Return the living children of a kind, a key of WORDS."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                if WORDS[kind] in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def is_whole(self) -> bool:
        counts = [len(self.children(kind)) for kind in WORDS]
        return counts == [GROUPS * RANKS, 1, 1]

    def kill(self) -> None:
        """SIGKILL to `hisparse up` alone; its children end by themselves, and it is started again."""
        children = psutil.Process(self.process.pid).children()
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(children, LIMIT_S)
        if left:
            raise RuntimeError(f"children outlive hisparse up: {left}")
        self.start()

    def stop(self) -> list[str]:
        """SIGTERM; return what is wrong afterwards."""
        children = psutil.Process(self.process.pid).children()
        self.process.terminate()
        status = self.process.wait(LIMIT_S)
        _, left = psutil.wait_procs(children, LIMIT_S)
        files = left_behind(it.name for it in self.runtime_dir.iterdir())
        wrong = [f"hisparse up ended with {status}"] if status else []
        return wrong + [f"left: {it}" for it in (*files, *left)]


def left_behind(names: Iterable[str]) -> list[str]:
    """Return those names in a runtime directory that should be gone."""
    return [it for it in names if not it.startswith(KEPT) and not it.endswith(LOCK)]


@dataclass
class Streams:
    """Clients of the service, a thread each."""

    port: int
    seed: int
    expected: dict[int, str] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)  # by client: when its stream last had text
    enough: bool = False
    ended: int = 0
    returns: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=STREAM_LIMIT_S
        )

    def text_of(self, number: int, key: str, client: int) -> str:
        """The text of prompt `number`, over as many connections as it takes. Raises openai.APIStatusError where the
        service refuses, and TimeoutError after STREAM_LIMIT_S."""
        dice = random.Random(f"{self.seed}/{number}")
        prompt = "".join(dice.choices("abcdefghij klmnop", k=dice.randrange(20, 600)))
        limit = time.monotonic() + STREAM_LIMIT_S
        for turn in count():
            if time.monotonic() > limit:
                raise TimeoutError(f"{key} did not end within {STREAM_LIMIT_S:g} s, over {turn} connections")
            pieces, finish = [], None
            try:
                for chunk in self.client.completions.create(
                    model="model",
                    prompt=prompt,
                    max_tokens=tokens_of(self.seed, number),
                    temperature=0.8,
                    seed=number,
                    stream=True,
                    extra_body={"ignore_eos": True},
                    extra_headers={"Idempotency-Key": key},
                ):
                    self.heard_at[client] = time.monotonic()
                    pieces += [choice.text for choice in chunk.choices]
                    finish = next((it.finish_reason for it in chunk.choices if it.finish_reason), finish)
                if finish is not None:
                    return "".join(pieces)
            except openai.APIStatusError as error:
                if error.status_code not in (429, 502, 503):
                    raise
            except openai.APIConnectionError:
                pass
            except openai.APIError as error:  # in a stream: the coordinator is away for too long
                if error.code != "unavailable":
                    raise
            except Exception as error:  # amid a stream the package passes on those of its HTTP library
                if not type(error).__module__.startswith(("httpx", "httpcore")):
                    raise
            self.returns += 1
            time.sleep(RETRY_S)
        raise AssertionError

    def undisturbed(self) -> None:
        for number in range(PROMPTS):
            self.expected[number] = self.text_of(number, f"quiet-{number}", -1)

    def go_on(self, client: int) -> None:
        """Ask until `enough`, then end with the stream under way."""
        for turn in count():
            if self.enough:
                break
            number, key = (client + turn * STREAMS + turn) % PROMPTS, f"c{client}-{turn}"
            try:
                text = self.text_of(number, key, client)
            except Exception as error:
                self.wrong.append(f"{key}: {type(error).__name__}: {error}")
                continue
            self.ended += 1
            if text != self.expected[number]:
                at = next((i for i, (a, b) in enumerate(zip(text, self.expected[number], strict=False)) if a != b), -1)
                self.wrong.append(f"{key} differs from {at} on: {len(text)}, {len(self.expected[number])} characters")
        self.heard_at.pop(client, None)


def tokens_of(seed: int, number: int) -> int:
    """Return how many tokens the output of prompt `number` has."""
    return random.Random(f"{seed}/{number}/tokens").randrange(*TOKENS)


def commit(fault: str, service: Service, dice: random.Random) -> str:
    """Do it, and return what was done."""
    action, _, kind = fault.partition(" ")
    if kind == "up":
        service.kill()
        return fault
    living, seconds = service.children(kind), dice.uniform(*STOPPED_S)
    if not living:  # the last one has just ended
        return f"{fault}: none is there"
    victim = dice.choice(living)
    try:
        if action == "kill":
            victim.kill()
            return f"{fault} {victim.pid}"
        victim.suspend()
        time.sleep(seconds)
        victim.resume()
    except psutil.NoSuchProcess:
        return f"{fault} {victim.pid}, which ended within {seconds:.1f} s"
    return f"{fault} {victim.pid} for {seconds:.1f} s"


def chaos(place: Path, seconds: float, seed: int) -> tuple[dict[str, object], list[str]]:
    """Return the report and what is wrong."""
    dice, before = random.Random(seed), set(os.listdir(SHARED))
    service = Service(place)
    streams, faults = Streams(service.port, seed), Counter[str]()
    wrong: list[str] = []
    streams.undisturbed()
    clients = [threading.Thread(target=streams.go_on, args=(i,), daemon=True) for i in range(STREAMS)]
    for client in clients:
        client.start()
    began, since = time.monotonic(), time.monotonic()
    try:
        while time.monotonic() < began + seconds:
            service.until(service.is_whole, "has lost a process for good")
            service.until(partial(all_heard, streams, since), "has streams that stand still")
            time.sleep(dice.uniform(*PAUSE_S))
            fault = dice.choice(FAULTS)
            did = commit(fault, service, dice)
            faults[fault] += 1
            since = time.monotonic()
            print(f"{since - began:.1f} s: {did}; {streams.ended} ended, {streams.returns} returns", flush=True)
        service.until(service.is_whole, "has lost a process for good")
    except RuntimeError as error:
        wrong.append(str(error))
    streams.enough = True
    for client in clients:
        client.join(STREAM_LIMIT_S)
    wrong += service.stop()
    wrong += [f"left in {SHARED}: {name}" for name in set(os.listdir(SHARED)) - before]
    wrong += [*streams.wrong, *(f"{it.name} has not ended" for it in clients if it.is_alive())]
    report: dict[str, object] = {
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "faults": dict(faults),
        "faults_total": faults.total(),
        "streams": streams.ended,
        "returns": streams.returns,
        "wrong": wrong[:20],
    }
    return report, wrong


def all_heard(streams: Streams, since: float) -> bool:
    """Return whether every stream has had text since then."""
    heard = list(streams.heard_at.values())
    return len(heard) == STREAMS + 1 and all(at > since for at in sorted(heard)[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.group_chaos")
    parser.add_argument("--seconds", type=float, default=1_800.0, help="of faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    place = Path(tempfile.mkdtemp(prefix="hisparse-chaos-"))
    report, wrong = chaos(place, given.seconds, given.seed)
    print(json.dumps(report), flush=True)
    if wrong:
        print(f"logs: {place}", file=sys.stderr)
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
