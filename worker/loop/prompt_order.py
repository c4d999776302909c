"""The order of prompts, and the prompts that a pass takes. Pure.

Owners share prompt work: the next tokens are those of the owner who was served least of those who wait. Within an owner
the prompt with the fewest tokens left goes first, and waiting counts: each second takes AGING_TOKENS off, so that a
long prompt is not put off for ever by short ones that keep coming.

A pass takes prompts in this order until it is full, or the slab: it needs pages for the rows of each up to where it
stops. A prompt that does not fit is cut behind a whole page; its next pass goes on there. The first in the order waits
for pages that earlier passes hold, and no other goes before it. Beside prompts that end in a pass, it takes no more
tokens of a prompt that does not: a short prompt waits for as many tokens of others as it has itself.

All prompts of a pass end when it does, so what one owner packs into it the others wait for. Beside prompts of others
that end in a pass an owner has at most OWNER_RATIO times the tokens of any of them, or ALIKE_TOKENS. A prompt for which
that is too little takes a pass of its own: a longer one the next pass, in its owner's turn, and a shorter one a pass
that preempts this one at once.

A pass is *preempted* by one of shorter prompts that came meanwhile: prompts that end in it, each with fewer tokens left
than every prompt of the open pass had, together no more than the open pass has left to do. What preempts a pass is
bounded by the tokens of the pass itself, so that prompts take twice their time at most for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from protocol.units import PAGE_TOKENS, pages_for
from worker.device.passes import PARTS_MAX

#: Tokens by which a second of waiting makes a prompt shorter in the order.
AGING_TOKENS: Final = 512
#: How many times the tokens of another owner an owner may have in a pass, ...
OWNER_RATIO: Final = 2
#: ... and tokens that it may always have: so few take no longer than one.
ALIKE_TOKENS: Final = PAGE_TOKENS


class Taken(NamedTuple):
    """Tokens of a prompt that a pass takes: positions start..stop-1."""

    prompt: int
    start: int
    stop: int


@dataclass(frozen=True)
class WaitingPrompt:
    """Prompt number `prompt` of `owner`: positions below `start` were computed, those below `stop` are its tokens."""

    prompt: int
    owner: str
    start: int
    stop: int
    waited_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def rank(self) -> tuple[float, int]:
        return self.tokens - AGING_TOKENS * self.waited_s, self.prompt


class PromptOrder:
    """Keeps what owners were served."""

    def __init__(self, *, packs: bool = True, unit_tokens: int = PAGE_TOKENS) -> None:
        """`packs`: a pass takes several prompts. `unit_tokens`: a prompt is cut behind a multiple of so many."""
        self._packs, self._unit = packs, unit_tokens
        self._served: dict[str, float] = {}

    def compose(self, prompts: Sequence[WaitingPrompt], tokens: int, pages: int) -> list[Taken]:
        """Compose the next pass, of `tokens` and in `pages` of the slab at most. `prompts` are all that wait."""
        self._served = self._standing({it.owner for it in prompts})
        return self._fill(prompts, tokens, pages, cuts=True)

    def preempting(
        self, prompts: Iterable[WaitingPrompt], open_tokens: Sequence[int], rows_left: float, tokens: int, pages: int
    ) -> list[Taken]:
        """Compose a pass, of `tokens` and in `pages` at most, that preempts one with `rows_left` to do. `open_tokens`:
        what each prompt of that one had left when it began."""
        shortest = min(open_tokens, default=0)
        shorter = [it for it in prompts if it.tokens < shortest]
        return self._fill(shorter, min(tokens, int(rows_left)), pages, cuts=False)

    def took(self, owner: str, tokens: int) -> None:
        """A pass took `tokens` of `owner`."""
        self._served[owner] = self._served.get(owner, 0.0) + tokens

    def _fill(self, prompts: Iterable[WaitingPrompt], tokens: int, pages: int, *, cuts: bool) -> list[Taken]:
        queues: dict[str, list[WaitingPrompt]] = {}
        for waiting in prompts:
            queues.setdefault(waiting.owner, []).append(waiting)
        for queue in queues.values():
            queue.sort(key=lambda it: it.rank, reverse=True)
        served, taken, ending = self._standing(queues.keys()), list[Taken](), 0
        given, ended, shortest = dict[str, int](), set[str](), 0  # tokens by owner, owners of prompts that end
        while queues and tokens > 0 and len(taken) < (PARTS_MAX if self._packs else 1):
            owner = min(queues, key=lambda it: (served[it], queues[it][-1].rank))
            waiting = queues[owner].pop()
            if not queues[owner]:
                del queues[owner]
            ends = waiting.tokens <= tokens
            room = 0 if not cuts else min(tokens, ending) if ending else tokens
            stop = waiting.stop if ends else (waiting.start + room) // self._unit * self._unit
            count = stop - waiting.start
            if count <= 0:
                continue
            if pages_for(stop) > pages:
                if not taken:
                    break
                continue
            own, others = given.get(owner, 0) + count, given.keys() - {owner}
            if own > _most([given[it] for it in others & ended]):
                continue
            if cuts and waiting.tokens < shortest and any(given[it] > _most([own]) for it in others):
                continue
            taken.append(Taken(waiting.prompt, waiting.start, stop))
            tokens, pages, ending = tokens - count, pages - pages_for(stop), ending + count * ends
            shortest = min(shortest or waiting.tokens, waiting.tokens)
            served[owner] += count
            given[owner] = own
            ended |= {owner} if ends else set()
        return taken

    def _standing(self, owners: Iterable[str]) -> dict[str, float]:
        """Return what `owners` were served. One that did not wait begins where the least served of the others is."""
        least = min((self._served[it] for it in owners if it in self._served), default=0.0)
        return {it: self._served.get(it, least) for it in owners}


def _most(tokens: Sequence[int]) -> float:
    """Return how many tokens an owner may have in a pass beside owners that have `tokens`."""
    return max(ALIKE_TOKENS, OWNER_RATIO * min(tokens)) if tokens else inf
