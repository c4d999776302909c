"""Ranks of a group as processes, each an executor turned by hand with a small coordinator around it (worker_rig).

parent   GroupRig: starts the ranks, collects what they drew, lets them go once all are done
child    `python -m tests.support.group_rig`: a job on stdin, one line of JSON for each rank on stdout

On CPUs, ranks of one node share one host pool, and each gives a part of its pages. A request may go from rank to rank:
it is withdrawn with its pages kept, passed on as a file, and resumed from the same pages by the other rank.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from protocol.messages import NO_LOGPROBS
from protocol.settings import ClusterSettings, Config, CoordinatorSettings, WorkerSettings
from tests import ROOT
from tests.support import zygote
from tests.support.netns_rig import enter

#: Longest run of one group here, on busy cores.
LIMIT_S = 400.0
#: What masks of a rank may be, and the file that lets those that are held go.
LATE, HELD, MASKS_GO = "late", "held", "masks-go"
#: Said to a rank, and by it, when it needs no peer any more.
LEAVE = "leave"


@dataclass
class Ask:
    """A request of a rank. `moves`: (tokens, keep or drop or resize, hot slots) once so many tokens were drawn.

    `next_ranks`: (tokens, rank) likewise, the rank that it goes to with the pages that it holds. `grammar` is what its
    output is held to; it asks for `logprobs`.
    """

    number: int
    prompt: list[int]
    tokens: int
    hot_slots: int = 64
    temperature: float = 0.0
    moves: list[tuple[int, str, int]] = field(default_factory=list)
    next_ranks: list[tuple[int, int]] = field(default_factory=list)
    grammar: str = ""
    logprobs: int = NO_LOGPROBS


@dataclass
class Drawn:
    """What a rank answered: tokens by number of request, digests of logits by "number position"."""

    tokens: dict[str, list[int]]
    logits: dict[str, str]
    rounds: int
    hits: int
    misses: int
    late_masks: int = 0
    accepted: int = 0  # drafts
    split_units: int = 0


def settings_of(
    checkpoint: Path, directory: Path, size: int, rank: int, settings: WorkerSettings, endpoint: str = ""
) -> Config:
    worker = msgspec.structs.replace(
        settings,
        model=str(checkpoint),
        name=f"w{rank}",
        group="g0",
        group_rank=rank,
        group_size=size,
        group_endpoint=endpoint or f"ipc://{directory}/group-g0.sock",
        stream_backend=settings.stream_backend or "inline",
    )
    patient = CoordinatorSettings(heartbeat_limit_s=LIMIT_S)  # no rank is lost because the machine is busy
    return Config(cluster=ClusterSettings(runtime_dir=str(directory)), coordinator=patient, worker=worker)


class GroupRig:
    """`asks` by rank. The ranks are children of this process; `close` kills what is left of them."""

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        asks: list[list[Ask]],
        settings: WorkerSettings,
        *,
        keep_logits: bool = False,
        configs: list[Config] | None = None,
        netns: list[str] | None = None,
        environs: list[dict[str, str]] | None = None,
        masks: list[str] | None = None,
        dies_in_split: int | None = None,
    ) -> None:
        """By rank: `configs`, network namespaces as `netns` with process numbers of their own, and `environs` beside
        that of this process.

        `masks`, by rank, are LATE once each, or HELD until `let_masks_go`, and until all requests of the rank that have
        no grammar have ended: those behind a token, and builds of a grammar that ends with HELD.

        The rank `dies_in_split` kills itself amid the first pass that all split.
        """
        self._directory = directory
        size = len(asks)
        self.ranks: list[subprocess.Popen[str]] = []
        for rank, own in enumerate(asks):
            config = configs[rank] if configs else settings_of(checkpoint, directory, size, rank, settings)
            job = {
                "config": msgspec.to_builtins(config),
                "asks": [asdict(ask) for ask in own],
                "keep_logits": keep_logits,
                "masks": masks[rank] if masks else "",
                "dies": rank == dies_in_split,
                "netns": netns[rank] if netns else "",
                "arrivals": sum(to == rank for ranks in asks for ask in ranks for _, to in ask.next_ranks),
            }
            command = [sys.executable, "-m", "tests.support.group_rig"]
            start = zygote.start if config.worker.device == "cpu" else subprocess.Popen  # CUDA outlives no fork
            child = start(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environs[rank] if environs else {}),
            )
            assert child.stdin is not None
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
            self.ranks.append(child)

    def drawn(self) -> list[Drawn]:
        """The answers of all ranks, once all are done; then they leave."""
        found = [Drawn(**json.loads(self.line(rank))) for rank in range(len(self.ranks))]
        self.leave()
        return found

    def leave(self) -> None:
        """Once all have answered. None leaves before all need no peer: the others would end with it."""
        for child in self.ranks:
            assert child.stdin is not None
            child.stdin.write(f"{LEAVE}\n")
            child.stdin.flush()
        assert [self.line(rank) for rank in range(len(self.ranks))] == [f"{LEAVE}\n"] * len(self.ranks)
        for child in self.ranks:
            assert child.stdin is not None
            child.stdin.close()
        assert [child.wait(LIMIT_S) for child in self.ranks] == [0] * len(self.ranks)

    def let_masks_go(self) -> None:
        (self._directory / MASKS_GO).touch()

    def line(self, rank: int, limit_s: float = LIMIT_S) -> str:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], limit_s)
        assert ready, f"rank {rank} answered nothing"
        return stdout.readline()

    def close(self) -> None:
        for child in self.ranks:
            child.kill()
            child.wait()


# ---------------------------------------------------------------- a rank


def main() -> None:
    from tests.support.worker_rig import Rig
    from worker.device.sizing import size_worker
    from worker.group.group import Group
    from worker.runners.checkpoint import fingerprint
    from worker.runners.load import load_runner
    from worker.streams import make_streams

    job = json.loads(sys.stdin.readline())
    if job["netns"]:
        enter(job["netns"])
    torch.set_num_threads(1)
    config = msgspec.convert(job["config"], Config)
    group = Group.join(config, fingerprint(config.worker.model))
    runner = load_runner(config.worker, group.collectives)
    sizing = size_worker(config.worker, runner.geometry, runner.info)
    share = sizing.capacity.host_pages // group.size
    is_cpu = config.worker.device == "cpu"
    rig = Rig(
        None if is_cpu else make_streams("cuda", device=config.worker.device),
        config.worker,
        runner=runner,
        host=_pool(config, sizing) if is_cpu else None,  # a GPU reads pinned memory
        keep_logits=job["keep_logits"],
        group=group,
        pages=range(group.rank * share, (group.rank + 1) * share),
    )
    requests = Requests(rig, Path(config.cluster.runtime_dir), group.rank)
    for about in job["asks"]:
        requests.add(Ask(**about))
    _plant(job["masks"], requests, Path(config.cluster.runtime_dir) / MASKS_GO)
    if job["dies"]:
        _plant_death(runner)
    group.control.progress.turns = True
    requests.run(job["arrivals"])
    rig.check_end()
    lives = [life for life, _ in requests.lives]
    drawn = Drawn(
        {str(life.number): life.tokens for life in lives},
        {f"{number} {position}": _digest(logits) for (number, position), logits in rig.logits.items()},
        group.control.progress.launched,
        sum(life.hits for life in lives),
        sum(life.misses for life in lives),
        rig.executor.counters.late_masks,
        rig.executor.counters.accepted_tokens,
        rig.executor.counters.split_units,
    )
    print(json.dumps(asdict(drawn)), flush=True)
    while not (select.select([sys.stdin], [], [], 0)[0] and _is_let_go(group)):
        if not rig.executor.turn():
            time.sleep(0.01)
    rig.executor._streams.close()
    group.leave()


def _is_let_go(group: Any) -> bool:
    """Reads a line: LEAVE, or the end of the input."""
    if not sys.stdin.readline():
        return True
    group.control.is_done = lambda: True
    print(LEAVE, flush=True)
    return False


def _plant(masks: str, requests: Requests, path: Path) -> None:
    from protocol.grammars import Matcher
    from tests.support.late_masks import held_build, held_until, late_once
    from worker.loop import grammars
    from worker.loop.grammars import Grammar

    def wait_for_others() -> None:
        while not (path.exists() and all(life.outcome for life, ask in requests.lives if not ask.grammar)):
            time.sleep(0.005)

    if masks == LATE:
        patch.object(Grammar, "wait", late_once()).start()
    if masks == HELD:
        patch.object(grammars, "GRAMMAR_LIMIT_S", LIMIT_S).start()  # others may take long to end
        patch.object(Matcher, "push", held_until(wait_for_others)).start()
        patch.object(Matcher, "__init__", held_build(wait_for_others, HELD)).start()


def _plant_death(runner: Any) -> None:
    """Kill this process before its stripe of the last layer of a pass."""
    launch, last = runner.launch_split, runner.info.layers - 1

    def launch_split(streams: Any, state: Any, prompts: Any, unit: Any, *rest: Any) -> None:
        if unit.layer == last:
            os.kill(os.getpid(), signal.SIGKILL)
        launch(streams, state, prompts, unit, *rest)

    runner.launch_split = launch_split


def _pool(config: Config, sizing: Any) -> torch.Tensor:
    """The pages that all ranks of one node share."""
    shape = (sizing.capacity.host_pages, sizing.capacity.page_bytes)
    path = Path(config.cluster.runtime_dir) / f"{config.worker.node}.pool"
    with path.open("ab") as file:
        file.truncate(shape[0] * shape[1])
    return torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=torch.uint8).view(shape)


class Requests:
    """Those of one rank: admitted as soon as there is room, moved about and passed on as their asks say."""

    def __init__(self, rig: Any, directory: Path, rank: int) -> None:
        self.lives: list[tuple[Any, Ask]] = []
        self._rig, self._directory, self._rank = rig, directory, rank
        self._leaving: dict[int, int] = {}  # rank to go to, by number
        self._lent: list[int] = []  # pages of requests that have gone on

    def add(self, ask: Ask, pages: list[int] | None = None) -> Any:
        sampling = {"seed": ask.number, "temperature": ask.temperature}
        asked = {"grammar": ask.grammar, "logprobs": ask.logprobs}
        life = self._rig.coordinator.create(ask.number, 1, ask.tokens, **sampling, **asked)
        life.prompt, life.host_pages, life.shared = tuple(ask.prompt), list(pages or ()), tuple(pages or ())
        self.lives.append((life, ask))
        return life

    def run(self, arrivals: int) -> None:
        """Until all have ended, those too that still are to come."""
        while arrivals or self._leaving or not all(life.outcome for life, _ in self.lives):
            arrivals -= self._take_arrived() if arrivals else 0
            for life, ask in list(self.lives):
                if not life.outcome:
                    self._turn(life, ask)
            if not self._rig.executor.turn():
                time.sleep(0.002)
        self._rig.run()
        self._rig.coordinator.host_pages.extend(self._lent)

    def _turn(self, life: Any, ask: Ask) -> None:
        coordinator = self._rig.coordinator
        if not life.placement:
            if ask.number in self._leaving:
                self._pass_on(life, ask, self._leaving.pop(ask.number))
            else:
                coordinator.admit(life, ask.hot_slots)
        elif life.here and ask.next_ranks and len(life.tokens) >= ask.next_ranks[0][0]:
            _, self._leaving[ask.number] = ask.next_ranks.pop(0)
            coordinator.withdraw(life, "keep")
        elif life.here and ask.moves and len(life.tokens) >= ask.moves[0][0]:
            _, how, ask.hot_slots = ask.moves.pop(0)
            if how == "resize":
                coordinator.resize(life, ask.hot_slots)
            else:
                coordinator.withdraw(life, how)

    def _pass_on(self, life: Any, ask: Ask, rank: int) -> None:
        assert life.durable >= len(life.prompt), "the prompt was staged: nothing of it is computed again"
        self._lent += life.host_pages[len(life.shared) :]
        self._rig.coordinator.lives.remove(life)
        self.lives.remove((life, ask))
        about = {
            "ask": asdict(ask),
            "pages": life.host_pages,
            "tokens": life.tokens,
            "durable": life.durable,
            "first_token": life.first_token,
            "warm_start": b64encode(life.warm_start).decode(),
        }
        path = self._directory / f"to-{rank}-{ask.number}"
        path.with_suffix(".partial").write_text(json.dumps(about))
        path.with_suffix(".partial").rename(path.with_suffix(".json"))

    def _take_arrived(self) -> int:
        found = sorted(self._directory.glob(f"to-{self._rank}-*.json"))
        for path in found:
            about = json.loads(path.read_text())
            path.unlink()
            life = self.add(Ask(**about["ask"]), about["pages"])
            life.tokens, life.durable, life.first_token = about["tokens"], about["durable"], about["first_token"]
            life.warm_start = b64decode(about["warm_start"])
        return len(found)


def _digest(logits: torch.Tensor) -> str:
    return blake2b(logits.numpy().tobytes(), digest_size=8).hexdigest()


if __name__ == "__main__":
    main()
