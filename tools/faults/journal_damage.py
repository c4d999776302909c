"""Damaged journals: `python -m tools.faults.journal_damage --cases 1000 --seed 1`.

Journals of random lives, as a kill leaves them, or closed; then one fault in one of their files: bits flipped, blocks
zeroed or overwritten, a file cut, emptied, deleted or replaced by an older copy of it, a row changed, deleted or moved
by SQL. Each start must serve exactly what was acknowledged, go on, and be read again by the next start; or refuse by
name. What is refused is checked and salvaged: that must name the damage, and keep no token that was not there.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sqlite3
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from coordinator.journal import ledger_image, summary
from coordinator.journal.records import Record, RequestAccepted, RequestEnded, RequestOrdered
from coordinator.journal.salvage import check, salvage
from coordinator.journal.state import replay
from coordinator.journal.store import SqliteStore, open_store
from coordinator.tokens.token_log import TokenLog
from metrics.state import JournalCounters
from protocol.errors import ConfigError
from tests.coordinator.journal import test_state
from tests.coordinator.journal.test_state import SLOTS, JournalMachine

NAME: Final = "journal.sqlite"
SHARED: Final = Path("/dev/shm")
#: Steps of a life, and journals that the cases are made of.
STEPS: Final = 120
LIVES: Final = 8


class Life(JournalMachine):
    """A life on a store, whose groups are those that the machine writes."""

    def __init__(self, store: SqliteStore, dice: random.Random) -> None:
        self.store = store
        self.dice = dice
        self.accepted: dict[str, RequestAccepted] = {}
        self.truths: list[list[Record]] | None = None  # what a start may find, after each commit from now on
        super().__init__()

    def write(self, *records: Record) -> None:
        written = len(self.records)
        super().write(*records)
        self.accepted |= {it.facts.request_id: it for it in records if isinstance(it, RequestAccepted)}
        self.store.write_now(self.records[written:])
        if self.truths is not None:
            self.truths.append(self.store.read())

    def step(self) -> None:
        dice, pick = self.dice, self.dice.randrange(64)
        steps: list[Callable[[], None]] = [
            lambda: self.submit(dice.randrange(-2, 3)),
            lambda: self.admit(pick, dice.randrange(2, 5)) if self.live else self.join("w0"),
            lambda: self.say(pick, dice.randrange(9), dice.randrange(200)),
            lambda: self.say(pick, dice.randrange(9), dice.randrange(200)),
            lambda: self.grow(pick),
            lambda: self.retract(pick, dice.random() < 0.5),
            lambda: self.order(pick, dice.random() < 0.5, ""),
            lambda: self.end(pick),
            lambda: self.forget(pick),
            lambda: self.join(dice.choice(["w0", "w1"])),
            lambda: self.pass_over() if self.summarizing else self.begin_summary(),
            self.pass_over,
        ]
        dice.choice(steps)()


class Base(NamedTuple):
    """A journal: its files, those of an earlier moment, and what each start may find (more than one if the last commit
    was not acknowledged)."""

    files: dict[str, bytes]
    earlier: dict[str, bytes]
    truths: tuple[list[Record], ...]
    accepted: dict[str, RequestAccepted]


def bases(seed: int, place: Path) -> list[Base]:
    dice = random.Random(seed)
    return [_live(number, random.Random(dice.random()), place / f"life{number}") for number in range(LIVES)]


def _live(number: int, dice: random.Random, place: Path) -> Base:
    """Logs of all kinds: never copied into the file, copied often; of a stopped coordinator; ahead of the mark."""
    small = {"REQUESTS_EACH": 1, "TOKENS_EACH": 4}, {"PART_HOLDINGS": 1, "PART_PAGES": 16}
    with _patched(summary, small[0]), _patched(ledger_image, small[1]), _patched(test_state, _prompt(number)):
        store = open_store(place / NAME, JournalCounters())
        store._connection.execute(f"PRAGMA wal_autocheckpoint = {(8, 1_024)[number % 2]}")
        life, earlier = Life(store, dice), dict[str, bytes]()
        for step in range(STEPS):
            life.step()
            if step == STEPS * 2 // 3:
                earlier = _files(place)
        life.truths, marked = [store.read()], _files(place)[NAME + ".head"]
        if number % 4 == 3:
            life.submit(0)
            life.write(RequestOrdered(0, held=False, forced_slots=-1))
    if number % 4 == 2:
        store.close()
    files = _files(place)
    if number % 4 == 3:
        files[NAME + ".head"] = marked
    if number % 4 != 2:
        store.close()
    return Base(files, earlier, tuple(life.truths), life.accepted)


def _prompt(number: int) -> dict[str, object]:
    """Some need more than a page."""
    return {"PROMPT": np.arange((70, 2_000)[number // 4 % 2], dtype=np.int32)}


class _patched:  # noqa: N801
    def __init__(self, module: object, values: Mapping[str, object]) -> None:
        self._module, self._values = module, values
        self._before = {name: getattr(module, name) for name in values}

    def __enter__(self) -> None:
        for name, value in self._values.items():
            setattr(self._module, name, value)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            setattr(self._module, name, value)


def _files(place: Path) -> dict[str, bytes]:
    return {it.name: it.read_bytes() for it in place.iterdir() if not it.name.endswith(".reserve")}


# ---------------------------------------------------------------- faults


def flip(data: bytearray, dice: random.Random) -> bytearray:
    for _ in range(dice.choice([1, 1, 1, 4, 32])):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return data


def overwrite(data: bytearray, dice: random.Random) -> bytearray:
    size = dice.choice([16, 512, 4_096])
    at = dice.randrange(len(data)) // size * size
    size = len(data[at : at + size])
    data[at : at + size] = bytes(size) if dice.random() < 0.5 else dice.randbytes(size)
    return data


def truncate(data: bytearray, dice: random.Random) -> bytearray:
    unit = dice.choice([1, 512, 4_096, 4_120])
    return data[: dice.randrange(len(data)) // unit * unit]


def empty(data: bytearray, dice: random.Random) -> bytearray:
    return bytearray()


def delete(data: bytearray, dice: random.Random) -> None:
    return None


FAULTS: Final[Sequence[Callable[[bytearray, random.Random], bytearray | None]]] = (
    *(flip, flip, flip, flip, overwrite, overwrite, truncate, truncate, truncate),
    *(empty, delete),
)
SQL: Final = (
    "UPDATE records SET body = substr(body, 1, length(body) - 1) || x'7b' WHERE number = {0}",
    "UPDATE records SET request_index = coalesce(request_index, 0) + 1 WHERE number = {0}",
    "UPDATE records SET digest = zeroblob(16) WHERE number = {0}",
    "UPDATE records SET head = NULL WHERE number = (SELECT max(number) FROM records WHERE head NOT NULL)",
    "UPDATE records SET number = number + 100000 WHERE number = {0}",
    "DELETE FROM records WHERE number = {0}",
    "DELETE FROM records WHERE number >= {0}",
    "INSERT INTO records SELECT number + 100000, request_index, body, digest, head FROM records WHERE number = {0}",
)


def damage(base: Base, path: Path, dice: random.Random) -> str:
    """Write `base` with one fault; returns which."""
    path.parent.mkdir()
    kind = dice.random()
    target = dice.choice(sorted(base.files))
    files: dict[str, bytes | None] = dict(base.files)
    if kind < 0.08:
        files[target], what = base.earlier.get(target), "older copy"
    elif kind < 0.85:
        fault = dice.choice(FAULTS)
        spoiled = fault(bytearray(base.files[target]), dice) if base.files[target] else None
        files[target], what = bytes(spoiled) if spoiled is not None else None, fault.__name__
    else:
        target, what = NAME, "sql"
    for name, data in files.items():
        if data is not None:
            (path.parent / name).write_bytes(data)
            (path.parent / name).chmod(0o600)
    if what == "sql":
        what = _change_rows(path, dice)
    return f"{what} {target.removeprefix(NAME) or 'file'}"


def _change_rows(path: Path, dice: random.Random) -> str:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        numbers = [number for (number,) in connection.execute("SELECT number FROM records")]
        statement = dice.choice(SQL)
        connection.execute(statement.format(dice.choice(numbers)))
    return statement.split(" ", 1)[0].lower()


# ---------------------------------------------------------------- outcomes


class Outcome(NamedTuple):
    """`wrong`: why this is no outcome at all."""

    fault: str
    is_served: bool
    wrong: str = ""


def run_case(base: Base, path: Path, dice: random.Random) -> Outcome:
    fault = damage(base, path, dice)
    try:
        served = _start(base, path)
        if served is not None:
            return Outcome(fault, is_served=True, wrong=served)
        return Outcome(fault, is_served=False, wrong=_salvage(base, path))
    except Exception:
        return Outcome(fault, is_served=False, wrong=traceback.format_exc())
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


def _start(base: Base, path: Path) -> str | None:
    """None: refused. Else what is wrong with what was served."""
    before = {it.name: it.read_bytes() for it in path.parent.iterdir()}
    try:
        store = open_store(path, JournalCounters())
    except ConfigError as error:
        after = {it.name: it.read_bytes() for it in path.parent.iterdir()}
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        is_named = error.field == "coordinator.journal" and error.remedy
        return f"changed though refused: {changed}" if changed - {NAME + ".head"} or not is_named else None
    more: Record = RequestOrdered(0, held=True, forced_slots=7)
    with closing(store):
        read = store.read()
        if read not in base.truths:
            return "served something else"
        for _ in range(3):
            store.write_now([more])
    with closing(open_store(path, JournalCounters())) as store:
        return "" if store.read() == [*read, more, more, more] else "went on, and lost something"


def _salvage(base: Base, path: Path) -> str:
    found = check(path)
    if not found.damages:
        return "refused, and the check finds nothing"
    salvage(path)
    with closing(open_store(path, JournalCounters())) as store:
        log = TokenLog(SLOTS, 1 << 12, journalled=True)
        state = replay(store.read(), log)
    names = [it.facts.request_id for it in state.requests.values()]
    if len(set(names)) < len(names):
        return f"salvaged twice: {names}"
    for request_index, known in state.requests.items():
        said = np.frombuffer(log.tokens(request_index, 0), np.int32).tolist()
        was = base.accepted[known.facts.request_id]
        if said != list(range(len(said))):
            return f"salvaged tokens that were never there: {known.facts.request_id}"
        if known.ended is None and (known.facts, known.prompt) != (was.facts, was.prompt):
            return f"salvaged another request: {known.facts.request_id}"
        if isinstance(known.ended, RequestEnded) and known.ended.generated_tokens != len(said):
            return f"salvaged half an output: {known.facts.request_id}"
    return ""


def outcomes(cases: int, seed: int) -> Iterator[Outcome]:
    dice = random.Random(f"cases {seed}")
    shared = SHARED if SHARED.is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as place:
        lives = bases(seed, Path(place))
        for case in range(cases):
            yield run_case(lives[case % len(lives)], Path(place) / f"case{case}" / NAME, dice)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    served: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong = 0
    for case, outcome in enumerate(outcomes(options.cases, options.seed)):
        (served if outcome.is_served else refused)[outcome.fault] += 1
        if outcome.wrong:
            wrong += 1
            print(f"case {case} of seed {options.seed}, {outcome.fault}: {outcome.wrong}")
    for fault in sorted(served.keys() | refused.keys()):
        print(f"{fault:24} served {served[fault]:5}   refused {refused[fault]:5}")
    print(f"{options.cases} cases: {served.total()} served, {refused.total()} refused, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
