"""Requests that draft and are moved at random between two workers of one host pool: retracted with rows kept and
dropped, resumed there and elsewhere, resized, cut off by the death of a worker, and followed by a second turn that
begins with the pages of the first. Tokens are those of plain decoding; with the hash runner, the draft layer's rows in
host memory and its drafts are those of its oracle, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from protocol.messages import DRAFT_TOKENS_MAX, Sampling
from protocol.settings import WorkerSettings
from protocol.units import PAGE_TOKENS
from tests.support.checkpoints import DRAFTING
from tests.support.drafting_rig import DraftRig, drafting_settings
from tests.support.fakes.coordinator import Life, prompt_of
from tests.support.fakes.drafting_runner import DraftingFakeRunner
from tests.support.fakes.hash_runner import SEPARATE, SHARED, computed
from tests.support.history import first_parent_commits
from tests.support.once import made_once
from tests.support.worker_rig import SETTINGS
from tests.worker.runners.test_drafting import pair_of
from worker.streams import SimulatedStreams, make_streams

#: Half a minute of processor time, on cores that others use too: a limit only ends what hangs.
pytestmark = pytest.mark.timeout(1_200)

SEEDS: Final = range(4, 8)
#: This commit's; the next commit has another. Odd ones have layers that do not share an index.
OWN_SEED: Final = SEEDS[(first_parent_commits() or 0) % len(SEEDS)]
#: Drafts of a step that requests allow.
LIMITS: Final = (0, 1, *[DRAFT_TOKENS_MAX] * 4)
HOT_SIZES: Final = (0, *SETTINGS.hot_size_classes)
MOVES: Final = ("keep", "drop", "resized", "elsewhere", "died")
#: Of all lives of one seed, and turns within which they must have ended.
TURNS_MAX: Final = 20_000
#: In one turn: that a worker runs; that a request is withdrawn, or resized; that one comes back; that a worker dies.
RUNS, LEAVES, RESIZES, RETURNS, DIES = 0.8, 0.03, 0.03, 0.2, 0.02
#: Prompt and output of first turns: the second page ends behind the prompt. What is said behind them.
FIRST: Final = ((100, 40), (90, 44), (9, 60), (70, 30))
SAID: Final = 50
NEXT: Final = 20


@dataclass(frozen=True)
class Text:
    """What one request is given. `shared` pages of request `donor` begin it."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    donor: int = -1
    shared: int = 0
    by_steps: bool = False


def sampling_of(number: int, count: int, *, sampled: bool) -> Sampling:
    """The hash runner draws with seeds; models are greedy but for the second request."""
    return Sampling(count, seed=number, temperature=0.9 if sampled else 0.0, ignore_eos=True)


def texts_of(chance: random.Random, said: Callable[[Text], Sequence[int]], count: int) -> list[Text]:
    """First turns, and second ones whose first pages are those of a first one, as far as decode steps wrote some."""
    texts = [
        Text(number, prompt_of(number, tokens), sampling_of(number, new, sampled=number % 2 > 0))
        for number, (tokens, new) in enumerate(FIRST[:count])
    ]
    for first in texts[:2]:
        whole = (*first.prompt, *said(first))
        shared = (len(whole) - 1) // PAGE_TOKENS
        assert shared * PAGE_TOKENS > len(first.prompt)
        number = count + first.number
        prompt = (*whole, *prompt_of(number, SAID))
        sampling = sampling_of(number, NEXT, sampled=number % 2 > 0)
        texts.append(Text(number, prompt, sampling, first.number, shared, chance.random() < 0.3))
    return texts


class Workers:
    """Two workers over one host pool, and what happens to their requests. `make` makes a worker, with a seed and the
    pool of another one."""

    def __init__(self, chance: random.Random, make: Callable[[int, DraftRig | None], DraftRig], texts: list[Text]):
        self.chance, self.make, self.texts = chance, make, texts
        self.rigs = [make(0, None)]
        self.pages = self.rigs[0].coordinator.host_pages
        self.lives: dict[int, Life] = {}
        self.rigs.append(self._beside(1))
        self.at: dict[int, DraftRig] = {}
        self.held: dict[int, list[int]] = {}  # host pages of requests, as they were before the last turn
        self.kept: dict[int, list[int]] = {}  # of those that have ended, for second turns
        self.dead: DraftRig | None = None
        self.moves = Counter[str]()

    def run(self) -> None:
        for _ in range(TURNS_MAX):
            self._begin()
            for life in list(self.lives.values()):
                self._move(life)
            if self.dead is None and self.chance.random() < DIES:
                self._die()
            self._turn()
            if len(self.lives) == len(self.texts) and self._have_ended():
                break
        else:
            raise AssertionError(f"nothing more happens: {self.lives}")
        for pages in self.kept.values():
            self.pages.extend(pages)
        for rig in self.rigs:
            rig.run()
            assert not rig.wrong()
            rig.check_end()

    def _have_ended(self) -> bool:
        return all(life.outcome and not life.placement for life in self.lives.values())

    def _beside(self, seed: int) -> DraftRig:
        """Another worker of the same pool, whose coordinator has the same accounts of it."""
        rig = self.make(seed, self.rigs[0])
        rig.coordinator.host_pages, rig.coordinator.lives = self.pages, self.rigs[0].coordinator.lives
        return rig

    def _begin(self) -> None:
        """Let requests come: second turns once the pages of the first are there."""
        for text in self.texts:
            if text.number in self.lives or (text.shared and text.donor not in self.kept):
                continue
            life = self.rigs[0].coordinator.create(text.number, 1, 1)
            life.prompt, life.sampling, life.by_steps = text.prompt, text.sampling, text.by_steps
            life.draft_tokens = self.chance.choice(LIMITS)
            life.shared = tuple(self.kept[text.donor][: text.shared]) if text.shared else ()
            self.lives[text.number] = life

    def _move(self, life: Life) -> None:
        chance, rig = self.chance, self.at.get(life.number)
        if life.outcome:
            return
        if rig is not None and life.here:
            if chance.random() < LEAVES:
                leaving = chance.choice(("keep", "keep", "drop"))
                rig.coordinator.withdraw(life, leaving)
                self.moves[leaving] += 1
            elif chance.random() < RESIZES:
                self.moves["resized"] += rig.coordinator.resize(life, chance.choice(HOT_SIZES))
        elif not life.placement and chance.random() < RETURNS:
            resumes, next_rig = life.durable > 0, chance.choice(self.rigs)
            if next_rig.coordinator.admit(life, chance.choice(HOT_SIZES)):
                self.moves["elsewhere"] += resumes and next_rig is not rig
                self.at[life.number] = next_rig

    def _die(self) -> None:
        """A process dies with work queued. Its requests go on from the durable lengths that were reported."""
        dead = self.chance.choice(self.rigs)
        lost = [life for life in self.lives.values() if life.placement and self.at[life.number] is dead]
        if not any(life.durable and not life.outcome for life in lost):
            return
        self.moves["died"] += 1
        if isinstance(dead.streams, SimulatedStreams):
            dead.streams.crash()
        for life in lost:
            if dead.watches:
                dead.look(life, life.durable)
            life.placement, life.resizing, life.leaving, life.warm_start = 0, None, "", b""
            if life.outcome:
                self.pages.extend(life.host_pages[len(life.shared) :])
                life.host_pages = []
        assert not dead.wrong()
        self.rigs = [rig for rig in self.rigs if rig is not dead]
        self.rigs.append(self._beside(2))
        self.dead = dead

    def _turn(self) -> None:
        for life in self.lives.values():
            if life.host_pages:
                self.held[life.number] = list(life.host_pages)
        for rig in self.rigs:
            if self.chance.random() < RUNS:
                rig.turn()
        for text in self.texts:
            life = self.lives.get(text.number)
            if not text.shared and life is not None and life.outcome and not life.placement:
                self._keep(text.number)

    def _keep(self, number: int) -> None:
        """The host pages of a first turn that has ended stay as they are."""
        if number not in self.kept:
            self.kept[number] = self.held[number]
            for page in self.kept[number]:
                self.pages.remove(page)


# ---------------------------------------------------------------- the hash runner


def prefilled_of(text: Text, texts: Sequence[Text]) -> list[range]:
    """Positions that prompt passes compute: of a second turn, also those of the first one's prompt."""
    if not text.shared:
        return [range(len(text.prompt))]
    own = [] if text.by_steps else [range(text.shared * PAGE_TOKENS, len(text.prompt))]
    return [range(len(texts[text.donor].prompt)), *own]


def hash_workers(seed: int, percent: int) -> tuple[Workers, list[DraftRig]]:
    """And all workers that it will have had. The seed decides all else."""
    chance = random.Random(f"{seed} {percent}")
    draft_tokens, groups = chance.choice((1, 2, 2, 3, 4)), (SHARED, SEPARATE)[seed % 2]
    sizes = {"lookahead_steps": chance.randrange(2), "tail_slots": chance.choice((2, 3)) * (1 + draft_tokens)}
    settings, backend = drafting_settings(draft_tokens, **sizes), chance.choice(("inline", "simulated", "simulated"))
    ahead, texts, rigs = chance.choice((0, 8)), list[Text](), list[DraftRig]()

    def said(text: Text) -> list[int]:
        prefilled = prefilled_of(text, texts)
        return computed(text.prompt, text.sampling.max_tokens, text.sampling.seed, prefilled, groups)[0]

    def make(number: int, beside: DraftRig | None) -> DraftRig:
        rig = DraftRig(
            make_streams(backend, seed + 100 * number),
            settings,
            percent,
            runner=DraftingFakeRunner(groups),
            host=None if beside is None else beside.host,
            prefilled_of=lambda life: prefilled_of(texts[life.number], texts),
            ahead_tokens=ahead,
            watches=True,
        )
        rigs.append(rig)
        return rig

    texts += texts_of(chance, said, len(FIRST))
    return Workers(chance, make, texts), rigs


def test_tokens_rows_and_drafts_are_right_wherever_requests_are() -> None:
    """Drafts are right in no place, in most and in all. Where all are, lives are short: all three have all moves."""
    moves, further = Counter[str](), 0
    for percent in (0, 60, 100):
        workers, rigs = hash_workers(OWN_SEED, percent)
        workers.run()
        for rig in rigs:
            assert rig.wrong_rows == [], f"seed {OWN_SEED}, {percent} %"
            assert rig.wrong_drafts() == [], f"seed {OWN_SEED}, {percent} %"
            further += rig.drafts_watched
        assert sum(rig.executor.counters.accepted_tokens for rig in rigs) > 0 or not percent
        moves += workers.moves
    assert min(moves[move] for move in MOVES) > 0
    assert further > 30


# ---------------------------------------------------------------- models


MODEL_SIZES: Final = {"host_mem": "32MiB", "device_mem": "32MiB", "pass_tokens": 64}


def model_settings(draft_tokens: int, **changes: object) -> WorkerSettings:
    return drafting_settings(draft_tokens, **{**MODEL_SIZES, **changes})


def model_texts(family: str, run_dir: Path) -> tuple[list[Text], list[list[int]]]:
    """And what plain decoding gives, decoded once in a run of the suite."""
    count = 2
    outputs: list[list[int]] = made_once(run_dir, f"draft-lives-{family}", lambda: plain_outputs(family, count))
    return texts_of(random.Random(0), lambda text: outputs[text.number], count), outputs


def plain_outputs(family: str, count: int) -> list[list[int]]:
    """Tokens of `count` first turns and of the second turns behind them, drawn without drafts."""
    outputs: list[list[int]] = []

    def decode(texts: Sequence[Text]) -> None:
        settings = model_settings(0, pass_tokens=256)  # whole prompts: the runner has the draft layer
        rig = DraftRig(None, settings, None, runner=copy(pair_of(family).runner))
        for text in texts:
            life = rig.coordinator.create(text.number, 1, 1)
            life.prompt, life.sampling = text.prompt, text.sampling
            assert rig.coordinator.admit(life, 64)
        rig.run()
        rig.check_end()
        outputs.extend(life.tokens for life in rig.coordinator.lives)

    decode(texts_of(random.Random(0), lambda _: [0] * max(new for _, new in FIRST), count)[:count])
    decode(texts_of(random.Random(0), lambda text: outputs[text.number], count)[count:])
    return outputs


def drawn_from(commits: int) -> list[tuple[int, int | None, str]]:
    """Two of the seeds, each with one of the families: another pair with each commit."""
    shares = (0, 60, 100, None)
    return [
        (seed, shares[seed], DRAFTING[(seed // 2 + commits // 2) % len(DRAFTING)])
        for seed in range(commits % 2, len(shares), 2)
    ]


def test_every_seed_meets_each_family_within_two_commits_of_it() -> None:
    assert {case for commits in range(2 * len(DRAFTING)) for case in drawn_from(commits)} == {
        (seed, percent, family) for seed, percent in enumerate((0, 60, 100, None)) for family in DRAFTING
    }
    assert all(len({family for *_, family in drawn_from(commits)}) == 2 for commits in range(2 * len(DRAFTING)))


@pytest.mark.parametrize(("seed", "percent", "family"), drawn_from(first_parent_commits() or 0))
def test_models_give_the_tokens_of_plain_decoding_wherever_requests_are(
    seed: int, percent: int | None, family: str, run_dir: Path
) -> None:
    """Drafts are right in forced shares of places, or those that the model gives."""
    texts, outputs = model_texts(family, run_dir)
    rigs = list[DraftRig]()

    def make(number: int, beside: DraftRig | None) -> DraftRig:
        runner = copy(pair_of(family).runner)
        runner._scratch = {}  # of two workers: the steps of one begin amid those of the other
        rig = DraftRig(
            make_streams(("inline", "simulated")[(seed + DRAFTING.index(family)) % 2], seed + 100 * number),
            model_settings(2, lookahead_steps=seed % 2),
            percent,
            runner=runner,
            host=None if beside is None else beside.host,
            expected=lambda life: outputs[life.number],
        )
        rigs.append(rig)
        return rig

    Workers(random.Random(f"{seed} {family}"), make, texts).run()
    assert sum(rig.executor.counters.drafted_tokens for rig in rigs) > 0
    assert sum(rig.executor.counters.accepted_tokens for rig in rigs) > 0 or not percent
