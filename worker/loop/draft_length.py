"""How many tokens the next step drafts, where `worker.draft_tokens` is auto. Pure.

Model of a step of S padded seats with n drafts a request:

    seconds     T(S, n), measured: so it has the experts that the rows touch, and the misses that they load
    tokens      E(n) = 1 + P1 + ... + Pn of a request; Pd, measured, is the share of requests whose draft d holds

and the n is chosen that gives most tokens a second, E(n) / T(S, n). Requests that draft less (their `draft_tokens`, a
grammar) are requests whose drafts do not hold.

What is chosen is measured in each step; another n must be tried, which costs. A trial stops when it knows enough, or
has spent the *credit*: steps of the chosen n that could have run in the time that was lost. EARNED a step come in, and
CREDIT_MAX are kept. So K steps lose EARNED K + CREDIT_MAX + OVERRUN to trials at most, under 2 % from 1,500 steps on:
OVERRUN is what the last steps of a trial may cost beyond the credit, with one that is in flight, and the first step
behind it. A trial that gains spends nothing. Steps beside prompts cannot be measured: no trial begins there, and one
that a prompt overtakes ends, at the cost of a step. An n is not tried while it could not win if all drafts beyond the
measured ones held as often as the last of these, except once in STALE_STEPS.

The chosen n of a batch size changes for a gain of MARGIN or more, and at most once in DWELL_STEPS: between values that
are about equal, noise would move it to and fro. Steps of the chosen n move the seconds of all n, since contexts grow
for all; trials move their own.

Source of the idea: Liu et al., Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (2024),
who predict T from a profile. Rejected: that profile, which knows neither experts nor misses; a bandit with bonuses, of
which the whole loss has a bound, and not that of each stretch of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import median_low
from typing import Final

#: Of a step, earned for trials by each step of the chosen n; and most that is kept.
EARNED: Final = 0.006
CREDIT_MAX: Final = 8.0
OVERRUN: Final = 9.0
#: A larger gain than this changes the chosen n; and so many steps pass between two changes.
MARGIN: Final = 0.006
DWELL_STEPS: Final = 32
#: A trial has so many steps at least, and so many requests whose drafts it saw.
TRIAL_STEPS: Final = 12
TRIAL_REQUESTS: Final = 32
#: After so many steps, an n that could not win is tried again.
STALE_STEPS: Final = 2_048
#: Requests that a share remembers, in at least so many steps; and those of the estimate that notices a change.
REMEMBERED: Final = 256
REMEMBERED_STEPS: Final = 16
RECENT: Final = 32
#: Standard deviations of the recent estimate by which a share has changed.
CHANGED: Final = 3.5
#: Weight of a step's seconds, as a logarithm: of the chosen n, and of a trial.
CHOSEN_WEIGHT: Final = 1 / 16
TRIAL_WEIGHT: Final = 1 / 32
#: A step counts as this much longer or shorter than expected at most: the host may have been away.
SECONDS_CLIP: Final = 0.5
#: So many steps of an n are a sample of which the median counts; and those of the chosen n before the first trial.
FIRST_STEPS: Final = 5
MEASURED_MIN: Final = 4

assert EARNED * 1_500 + CREDIT_MAX + OVERRUN <= 0.02 * 1_500  # what the head says


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step that was read: padded seats, drafts of each request, requests, rows of all of them that hold, and of how
    many requests draft 1, 2, ... holds. `seconds` None: other work ran beside it."""

    seats: int
    draft_tokens: int
    requests: int
    rows: int
    holding: Sequence[int]
    seconds: float | None


@dataclass(slots=True)
class _Share:
    """Of requests, those whose draft in one place holds."""

    value: float = 0.0
    recent: float = 0.0
    requests: float = 0.0

    def add(self, holding: int, requests: int) -> bool:
        """Whether it has changed all at once, as when other prompts come."""
        share = holding / requests
        weight = min(requests / REMEMBERED, 1 / REMEMBERED_STEPS)
        self.requests = self.requests * (1 - weight) + requests
        self.value += (share - self.value) * max(weight, requests / self.requests)
        quick = max(weight, min(requests / RECENT, 1 / 8), requests / self.requests)
        self.recent += (share - self.recent) * quick
        has_changed = abs(self.recent - self.value) > CHANGED * self._deviation(max(RECENT, requests))
        if has_changed:
            self.value, self.requests = self.recent, min(self.requests, RECENT)
        return has_changed

    @property
    def is_known(self) -> bool:
        return self.requests >= TRIAL_REQUESTS

    @property
    def highest(self) -> float:
        """What it may be."""
        return min(1.0, self.value + 2 * self._deviation(self.requests)) if self.is_known else 1.0

    def _deviation(self, requests: float) -> float:
        kept = min(max(self.value, 0.05), 0.95)
        return sqrt(kept * (1 - kept) / max(1.0, requests))


@dataclass(slots=True)
class _Seconds:
    """The logarithm of what steps take: the median of the `first` ones, then an average. `steps` were measured."""

    log_s: float = 0.0
    steps: int = 0
    first: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Trial:
    draft_tokens: int
    steps: int = 0
    seen: int = 0  # requests whose last draft it saw


@dataclass(slots=True)
class _OfSize:
    """What is known of steps of one padded size."""

    chosen: int
    seconds: dict[int, _Seconds] = field(default_factory=dict)
    tried_at: dict[int, int] = field(default_factory=dict)
    changed_at: int = 0


class DraftLengths:
    """`choose` before each launch, `observe` for each step that was read, in order of launches."""

    def __init__(self, longest: int) -> None:
        """Chooses from 0 to `longest`, and begins with 0."""
        self._lengths = range(longest + 1)
        self._shares = [_Share() for _ in range(longest)]
        self._sizes: dict[int, _OfSize] = {}
        self._trial: _Trial | None = None
        self._credit = CREDIT_MAX
        self._is_alone = True
        self._steps = 0
        self._before = 0
        self.switches = 0

    def choose(self, seats: int) -> int:
        """Drafts of each request in the next step, of so many padded seats."""
        size = self._size(seats)
        if self._trial is None and self._is_alone and self._credit >= CREDIT_MAX:
            self._begin_trial(seats, size)
        return size.chosen if self._trial is None else self._trial.draft_tokens

    def observe(self, seen: StepSeen) -> None:
        """A step of the trial is one with its drafts, of any size: batches shrink and grow meanwhile."""
        self._steps += 1
        size, before, self._before = self._size(seen.seats), self._before, seen.draft_tokens
        drafted = min(before, seen.draft_tokens)  # the step before drafted no more
        pairs = zip(self._shares[:drafted], seen.holding, strict=False)
        changes = [share.add(holding, seen.requests) for share, holding in pairs]
        if any(changes):
            self._shares[drafted:] = [_Share() for _ in self._shares[drafted:]]  # deeper ones are of other prompts
        self._is_alone = seen.seconds is not None
        if seen.seconds is not None:
            self._pay(size, seen, before, seen.seconds)
            if before == seen.draft_tokens:
                self._measure(size, seen.draft_tokens, seen.seconds)
        trial = self._trial
        if trial is not None and trial.draft_tokens == seen.draft_tokens and not self._is_alone:
            self._credit -= 1.0
            self._trial = None
        elif trial is not None and trial.draft_tokens == seen.draft_tokens:
            trial.steps += 1
            trial.seen += seen.requests if drafted == seen.draft_tokens else 0
            self._end_trial(trial, seen.seats, size)
        elif self._steps % DWELL_STEPS == 0:
            self._decide(seen.seats, size)

    # ---------------------------------------------------------------- what is known

    def _size(self, seats: int) -> _OfSize:
        if seats not in self._sizes:
            near = self._nearest(seats)
            self._sizes[seats] = _OfSize(near.chosen if near is not None else 0)
        return self._sizes[seats]

    def _nearest(self, seats: int, lengths: Sequence[int] = ()) -> _OfSize | None:
        """The size nearest to `seats` whose steps with these drafts were measured."""
        found = [it for it in self._sizes if all(n in self._sizes[it].seconds for n in lengths)]
        return self._sizes[min(found, key=lambda it: abs(log(it / seats)))] if found else None

    def _log_seconds(self, seats: int, size: _OfSize, length: int) -> float | None:
        """As measured; else in the proportion of the nearest size that has both."""
        if (own := size.seconds.get(length)) is not None:
            return own.log_s
        chosen = size.seconds.get(size.chosen)
        near = self._nearest(seats, (length, size.chosen)) if chosen is not None else None
        if chosen is None or near is None:
            return None
        return chosen.log_s + near.seconds[length].log_s - near.seconds[size.chosen].log_s

    def _tokens(self, length: int, *, highest: bool = False) -> float:
        """Of a request in a step. No draft holds more often than the one before. `highest`: at most, where a share that
        is not known is that of the draft before."""
        tokens, most = 1.0, 1.0
        for share in self._shares[:length]:
            most = min(most, share.highest if highest else share.value)
            tokens += most
        return tokens

    def _speed(self, seats: int, size: _OfSize, length: int, *, highest: bool = False) -> float:
        """Tokens of a request in a second; 0 where steps were not measured, or drafts not seen."""
        log_s = self._log_seconds(seats, size, length)
        is_known = highest or all(share.is_known for share in self._shares[:length])
        return self._tokens(length, highest=highest) / exp(log_s) if log_s is not None and is_known else 0.0

    def _measure(self, size: _OfSize, length: int, seconds: float) -> None:
        log_s, known = log(max(seconds, 1e-9)), size.seconds.setdefault(length, _Seconds())
        known.steps += 1
        if known.steps <= FIRST_STEPS:  # the very first one may have compiled something
            known.first.append(log_s)
            known.log_s = median_low(known.first)
            return
        error = min(max(log_s - known.log_s, -SECONDS_CLIP), SECONDS_CLIP)
        is_chosen = length == size.chosen
        change = error * max(1 / known.steps, CHOSEN_WEIGHT if is_chosen else TRIAL_WEIGHT)
        for other in size.seconds.values() if is_chosen else (known,):
            other.log_s += change

    # ---------------------------------------------------------------- what is tried

    def _pay(self, size: _OfSize, seen: StepSeen, before: int, seconds: float) -> None:
        chosen = size.seconds.get(size.chosen)
        if chosen is None:
            return
        if seen.draft_tokens == size.chosen:
            if before >= seen.draft_tokens:  # else it has fewer drafts yet, as the trial before it had
                self._credit = min(CREDIT_MAX, self._credit + EARNED)
            return
        gained = seen.rows / seen.requests / self._tokens(size.chosen)
        lost = min(max(seconds / exp(chosen.log_s) - gained, -1.0), 4.0)
        self._credit = min(CREDIT_MAX, self._credit - lost)

    def _begin_trial(self, seats: int, size: _OfSize) -> None:
        chosen = size.seconds.get(size.chosen)
        if chosen is None or chosen.steps < MEASURED_MIN:
            return
        wanted = [it for it in self._lengths if it != size.chosen and self._may_win(seats, size, it)]
        if wanted:
            nearest = min(wanted, key=lambda it: (size.tried_at.get(it, -1), abs(it - size.chosen)))
            self._trial = _Trial(nearest)

    def _may_win(self, seats: int, size: _OfSize, length: int) -> bool:
        tried_at, log_s = size.tried_at.get(length, -inf), self._log_seconds(seats, size, length)
        if log_s is None or self._steps - tried_at >= STALE_STEPS:
            return True
        return self._speed(seats, size, length, highest=True) > (1 + MARGIN) * self._speed(seats, size, size.chosen)

    def _end_trial(self, trial: _Trial, seats: int, size: _OfSize) -> None:
        """When it knows enough, or has spent the credit."""
        is_seen = trial.seen >= TRIAL_REQUESTS or not trial.draft_tokens
        if (trial.steps >= TRIAL_STEPS and is_seen) or self._credit <= 0:
            self._trial = None
            size.tried_at[trial.draft_tokens] = self._steps
            self._decide(seats, size)

    def _decide(self, seats: int, size: _OfSize) -> None:
        if self._steps - size.changed_at < DWELL_STEPS and size.changed_at:
            return
        speeds = {it: self._speed(seats, size, it) for it in self._lengths}
        best = max(speeds, key=lambda it: speeds[it])
        if speeds[best] > (1 + MARGIN) * speeds[size.chosen] and speeds[size.chosen]:
            size.tried_at[size.chosen] = self._steps  # it was measured until now
            size.chosen, size.changed_at = best, self._steps
            self.switches += 1
