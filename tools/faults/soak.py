"""`python -m tools.faults.soak --rounds 20 --seed N`: real processes, killed at random moments again and again.

    first       8 requests decode undisturbed: what each of them says
    each round  SIGKILL to the coordinator or a worker (a third of the rounds each, in an order and at moments drawn
                from the seed), once it is back from its last death and has a request that came further since the kill
                before. The supervisor of `hisparse up` restarts it. A request is submitted anew as soon as it has ended
                With `--takeovers` workers have standbys, and these, keepers of weights, and a worker together with its
                standby are killed as well
    at the end  all have ended as they did undisturbed, token for token: none missing, none repeated, and the journal
                says the same; audits found no difference; pages, chunks, seats and the pool file are back

The seed decides who and when, not what the machine makes of it: a run is not replayed exactly (tests/sim is). Printed
per kill are durable against generated lengths, and in the end one line. The *pause* of a kill is the time from it to
the next token that the client gets of the stream that waits longest: detection, the supervisor's own pause (which
doubles with each death of a process), start, recovery, and whatever is killed meanwhile. Exits with 1 on any
difference, leak or overdue wait, and then leaves logs and journal behind.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import trio

from hisparse.client.client import Client
from hisparse.cluster.restarts import RESTARTS_MAX
from hisparse.cluster.supervision import COORDINATOR
from hisparse.cluster.up import Cluster
from protocol.config import pool_path
from protocol.errors import Unavailable
from protocol.messages import RequestRow, Sampling
from protocol.settings import Config
from tests.support.cluster_rig import (
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    lengths,
    prompts_of,
    until_all_connected,
    write_model,
)

REQUESTS: Final = 8
NEW_TOKENS: Final = 320
VICTIMS: Final = (COORDINATOR, "w0", "w1")
#: With `--takeovers`: a process beside a worker, or a worker and its standby at once.
STANDBY, WEIGHTS, BOTH = "standby", "weights", "and its standby"
COMPANIONS: Final = tuple(f"{name} {what}" for name in ("w0", "w1") for what in (STANDBY, WEIGHTS, BOTH))
#: With more the supervisor might give a process up.
ROUNDS_MAX: Final = len(VICTIMS) * RESTARTS_MAX
#: How long to wait, at most, once the victim has work; and between looking and killing.
MOMENT_S: Final = 1.0
BLINK_S: Final = 0.02
#: Tokens may still come this long after the kill of their sender.
IN_FLIGHT_S: Final = 0.05
#: Longest wait for a victim with work, and for the last requests: two of the supervisor's longest pauses and starts.
ROUND_LIMIT_S: Final = 180.0
#: Outputs stay attachable until the journal has been asked for them.
KEEP_S: Final = 2 * ROUNDS_MAX * ROUND_LIMIT_S


def pause_of(killed_at: float, silences: Iterable[tuple[float, float]]) -> float:
    """Seconds from a kill to the next token of the stream that was interrupted longest; 0: none was."""
    first_s = killed_at + IN_FLIGHT_S
    return max((end - killed_at for begin, end in silences if begin <= first_s < end), default=0.0)


def victims_of(rounds: int, dice: random.Random, names: Sequence[str] = VICTIMS) -> list[str]:
    """The processes to kill, in turn: each of `names` as often as any other, give or take one."""
    victims = [names[i % len(names)] for i in range(rounds)]
    dice.shuffle(victims)
    return victims


def soak_config(model: Path, runtime_dir: Path, *, standbys: int = 0) -> Config:
    config = crash_config(model, runtime_dir)
    coordinator = msgspec.structs.replace(config.coordinator, ended_keep_s=KEEP_S)
    worker = msgspec.structs.replace(config.worker, standby=standbys)
    return msgspec.structs.replace(config, coordinator=coordinator, worker=worker)


@dataclass
class Load:
    """Requests that decode, again and again, until `enough`."""

    client: Client
    prompts: Sequence[Sequence[int]]
    expected: dict[int, list[int]] = field(default_factory=dict)
    enough: bool = False
    ended: dict[str, int] = field(default_factory=dict)  # request id -> which of the prompts
    silences: list[tuple[float, float]] = field(default_factory=list)  # from a token of a stream to the next

    async def decode(self, i: int, name: str) -> list[int]:
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.8, seed=i)
        stream = await self.client.submit(self.prompts[i], sampling, request_id=name)
        output: list[int] = []
        heard_at: float | None = None
        async for tokens in stream:
            now = trio.current_time()
            if heard_at is not None:
                self.silences.append((heard_at, now))
            heard_at = now
            output += tokens.tolist()
        assert stream.ended is not None
        assert stream.ended.outcome == "FINISHED", f"{name}: {stream.ended}"
        return output

    async def undisturbed(self) -> None:
        async def once(i: int) -> None:
            self.expected[i] = await self.decode(i, f"quiet-{i}")

        async with trio.open_nursery() as nursery:
            for i in range(len(self.prompts)):
                nursery.start_soon(once, i)

    async def go_on(self) -> None:
        """Returns when, after `enough`, all requests have ended. Raises AssertionError at a difference."""
        async with trio.open_nursery() as nursery:
            for i in range(len(self.prompts)):
                nursery.start_soon(self._repeat, i)

    async def _repeat(self, i: int) -> None:
        for turn in count():
            if self.enough:
                return
            name = f"{i}.{turn}"
            self.assert_expected(i, name, await self.decode(i, name))
            self.ended[name] = i

    async def assert_journal_agrees(self) -> None:
        """What a client that comes now is told is what those were told who listened all the time."""
        for name, i in self.ended.items():
            self.assert_expected(i, name, (await (await self.client.attach(name)).collect()).tolist())

    def assert_expected(self, i: int, name: str, output: list[int]) -> None:
        expected = self.expected[i]
        assert len(output) == len(expected), f"request {name} has {len(output)} tokens, not {len(expected)}"
        differ = [at for at, (ours, its) in enumerate(zip(output, expected, strict=True)) if ours != its]
        assert not differ, f"request {name} differs from the undisturbed run from position {differ[0]} on"


@dataclass
class Killer:
    """Kills the `victims` in turn."""

    cluster: Cluster
    client: Client
    load: Load
    dice: random.Random
    marks: dict[str, int] = field(default_factory=dict)  # generated tokens at the last kill
    killed: list[tuple[str, float]] = field(default_factory=list)  # who, when
    behind: int = 0  # tokens that were generated and not durable, over all kills

    async def kill_all(self, victims: Sequence[str]) -> None:
        for number, victim in enumerate(victims, start=1):
            with trio.fail_after(ROUND_LIMIT_S):
                await self._work_of(victim)
                await trio.sleep(self.dice.uniform(0.0, MOMENT_S))
                rows = await self._work_of(victim)
                await trio.sleep(self.dice.uniform(0.0, BLINK_S))
                await self._kill(victim)
            self.marks = {row.request_id: row.generated_tokens for row in rows}
            self.behind += sum(row.prompt_tokens + row.generated_tokens - row.durable_tokens for row in rows)
            at_s = self.killed[-1][1] - self.killed[0][1]
            print(f"round {number} at {at_s:.1f} s: {victim} killed; durable/generated {lengths(rows)}", flush=True)

    async def _kill(self, victim: str) -> None:
        name, _, what = victim.partition(" ")
        children = [] if what in (STANDBY, WEIGHTS) else [self.cluster.by_name[name]]
        if what:
            beside = self.cluster.keepers.children if what == WEIGHTS else self.cluster.standbys.children
            while not (name in beside and beside[name].running):  # noqa: ASYNC110 - started again, or for a new worker
                await trio.sleep(BLINK_S)
            children.insert(0, beside[name])
        assert all(child.running for child in children), f"{victim} has died by itself"
        self.killed.append((victim, trio.current_time()))
        async with trio.open_nursery() as nursery:
            for child in children:
                child.process.kill()
                nursery.start_soon(child.wait)  # before the supervisor, which closes it

    async def _work_of(self, victim: str) -> list[RequestRow]:
        """Who is decoding, once `victim` is back and has one of them that came further since the last kill."""
        name = victim.partition(" ")[0]
        while True:
            with suppress(Unavailable):  # the coordinator is away
                rows = [row for row in (await self.client.requests()).rows if row.state == "RUNNING"]
                if any(
                    name in (COORDINATOR, row.worker) and row.generated_tokens > self.marks.get(row.request_id, 0)
                    for row in rows
                ):
                    return rows
            await trio.sleep(0.05)


async def soak(rounds: int, seed: int, path: Path, *, takeovers: bool = False) -> str:
    """The summary. Raises AssertionError or TooSlowError, in groups."""
    began, dice, runtime_dir = time.monotonic(), random.Random(seed), path / "run"
    runtime_dir.mkdir(mode=0o700)
    victims = victims_of(rounds, dice, VICTIMS + COMPANIONS if takeovers else VICTIMS)
    config = soak_config(write_model(path / "model"), runtime_dir, standbys=int(takeovers))
    pool = pool_path(config.worker.pool_dir, config.worker.node)
    async with cluster_of_two(config, path, kept=True) as (cluster, client, said):
        load = Load(client, prompts_of(seed, REQUESTS))
        killer = Killer(cluster, client, load, dice)
        with trio.fail_after(ROUND_LIMIT_S):
            await load.undisturbed()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.go_on)
            await killer.kill_all(victims)
            load.enough = True
            nursery.cancel_scope.deadline = trio.current_time() + ROUND_LIMIT_S
        assert not nursery.cancel_scope.cancelled_caught, f"not all ended within {ROUND_LIMIT_S:g} s"
        with trio.fail_after(ROUND_LIMIT_S):
            await load.assert_journal_agrees()
            await until_all_connected(client, ROUND_LIMIT_S)
            await assert_nothing_leaked(client)
    assert not pool.exists(), "the pool file is left"
    assert killer.behind > 0, "durable lengths never lagged: nothing was shown"
    return summary(load, killer, said, time.monotonic() - began)


def summary(load: Load, killer: Killer, said: Sequence[str], seconds: float) -> str:
    kills = Counter(victim for victim, _ in killer.killed)
    takeovers = sum("its standby takes over" in line for line in said)
    pauses: dict[str, list[float]] = {"coordinator": [], "worker": []}
    for victim, at in killer.killed:
        if victim in VICTIMS:
            pauses["coordinator" if victim == COORDINATOR else "worker"].append(pause_of(at, load.silences))
    return (
        f"{kills.total()} kills in {seconds:.0f} s, "
        + ", ".join(f"{victim} {kills[victim]}" for victim in VICTIMS + COMPANIONS if kills[victim])
        + f" (and of what hung, by the supervisor: {sum(line.endswith('hangs; killed') for line in said)}); "
        f"{takeovers} takeovers; "
        f"{len(load.ended)} requests of {NEW_TOKENS} tokens ended as undisturbed, differences 0; "
        f"{killer.behind} tokens generated and not durable at the kills; pause after the kill of "
        + ", ".join(
            f"a {kind} {statistics.median(each):.2f} s in the middle, {max(each):.2f} s at most"
            for kind, each in pauses.items()
        )
        + "; audit differences 0, leaks 0"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.soak")
    parser.add_argument("--rounds", type=int, default=20, help=f"kills, {len(VICTIMS)} to {ROUNDS_MAX}")
    parser.add_argument("--seed", type=int, default=0, help="decides who is killed, and when")
    parser.add_argument("--takeovers", action="store_true", help="with standbys, which are killed too, as keepers are")
    options = parser.parse_args()
    if not len(VICTIMS) <= options.rounds <= ROUNDS_MAX:
        parser.error(f"--rounds {options.rounds}: {len(VICTIMS)} to {ROUNDS_MAX}; beyond, the supervisor may give up")
    path = Path(tempfile.mkdtemp(prefix="hisparse-soak-"))
    try:
        line = trio.run(partial(soak, options.rounds, options.seed, path, takeovers=options.takeovers))
    except BaseException:
        print(f"failed; logs and journal are in {path}, seed {options.seed}", file=sys.stderr)
        raise
    shutil.rmtree(path)
    print(f"seed {options.seed}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
