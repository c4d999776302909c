"""Ranks of a group as processes, each an executor turned by hand with a small coordinator around it (worker_rig).

parent   GroupRig: starts the ranks, collects what they drew, lets them go once all are done
child    `python -m tests.support.group_rig`: a job on stdin, one line of JSON for each rank on stdout
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.settings import ClusterSettings, Config, WorkerSettings
from tests import ROOT

#: Longest run of one group here.
LIMIT_S = 150.0


@dataclass
class Ask:
    """A request of a rank. `moves`: (tokens, keep or drop or resize, hot slots) once so many tokens were drawn."""

    number: int
    prompt: list[int]
    tokens: int
    hot_slots: int = 64
    temperature: float = 0.0
    moves: list[tuple[int, str, int]] = field(default_factory=list)


@dataclass
class Drawn:
    """What a rank answered: tokens by number of request, digests of logits by "number position"."""

    tokens: dict[str, list[int]]
    logits: dict[str, str]
    rounds: int
    hits: int
    misses: int


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
    return Config(cluster=ClusterSettings(runtime_dir=str(directory)), worker=worker)


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
        prefix: list[list[str]] | None = None,
    ) -> None:
        size = len(asks)
        self.ranks: list[subprocess.Popen[str]] = []
        for rank, own in enumerate(asks):
            config = configs[rank] if configs else settings_of(checkpoint, directory, size, rank, settings)
            job = {
                "config": msgspec.to_builtins(config),
                "asks": [asdict(ask) for ask in own],
                "keep_logits": keep_logits,
            }
            command = [*(prefix[rank] if prefix else []), sys.executable, "-m", "tests.support.group_rig"]
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            assert child.stdin is not None
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
            self.ranks.append(child)

    def drawn(self) -> list[Drawn]:
        """The answers of all ranks, once all are done; then they leave."""
        found = [Drawn(**json.loads(self.line(rank))) for rank in range(len(self.ranks))]
        for child in self.ranks:
            assert child.stdin is not None
            child.stdin.close()
        for child in self.ranks:
            assert child.wait(LIMIT_S) == 0
        return found

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
    from tests.support.fakes.coordinator import Life
    from tests.support.worker_rig import Rig
    from worker.group.group import Group
    from worker.runners.checkpoint import fingerprint
    from worker.runners.transformers_dsa import load_runner

    torch.set_num_threads(1)
    job = json.loads(sys.stdin.readline())
    config = msgspec.convert(job["config"], Config)
    group = Group.join(config, fingerprint(config.worker.model))
    runner = load_runner(config.worker, group.collectives)
    rig = Rig(None, config.worker, runner=runner, keep_logits=job["keep_logits"], group=group)
    lives: list[tuple[Life, Ask]] = []
    for about in job["asks"]:
        ask = Ask(**about)
        life = rig.coordinator.create(ask.number, 1, ask.tokens, seed=ask.number, temperature=ask.temperature)
        life.prompt = tuple(ask.prompt)
        lives.append((life, ask))
    group.control.progress.turns = True
    _run(rig, lives)
    rig.check_end()
    drawn = Drawn(
        {str(life.number): life.tokens for life, _ in lives},
        {f"{number} {position}": _digest(logits) for (number, position), logits in rig.logits.items()},
        group.control.progress.launched,
        sum(life.hits for life, _ in lives),
        sum(life.misses for life, _ in lives),
    )
    print(json.dumps(asdict(drawn)), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        if not rig.executor.turn():
            time.sleep(0.001)
    group.leave()


def _run(rig: Any, lives: list[Any]) -> None:
    """Admit each request as soon as there is room, and move it about as its ask says."""
    coordinator = rig.coordinator
    while not all(life.outcome for life, _ in lives):
        for life, ask in lives:
            if life.outcome:
                continue
            if not life.placement:
                coordinator.admit(life, ask.hot_slots)
            elif life.here and ask.moves and len(life.tokens) >= ask.moves[0][0]:
                _, how, ask.hot_slots = ask.moves.pop(0)
                if how == "resize":
                    coordinator.resize(life, ask.hot_slots)
                else:
                    coordinator.withdraw(life, how)
        if not rig.executor.turn():
            time.sleep(0.0005)
    rig.run()


def _digest(logits: torch.Tensor) -> str:
    return blake2b(logits.numpy().tobytes(), digest_size=8).hexdigest()


if __name__ == "__main__":
    main()
