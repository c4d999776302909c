"""An independent, deliberately naive hot buffer: plain lists, one token at a time, written from the contract alone.

One object is one seat in one selection. It knows tokens, or whatever units slots hold, not bytes. Everything is a list
scan; nothing is shared with kernels/.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Slot:
    token: int | None = None
    used: int = -1


@dataclass
class Resolved:
    tokens: list[int | None]  # what each output entry must lead to; None: -1
    hits: int = 0  # entries that need no load
    misses: set[int] = field(default_factory=set)
    evicted: set[int] = field(default_factory=set)
    out_of_range: int = 0
    fits: bool = True  # False: a draft's row that loads nothing, since its misses outnumber the slots that may go


class NaiveHotBuffer:
    """`hot_slots` ordinary slots under LRU and `tail_slots` slots for the newest tokens; 0 hot slots: resident."""

    def __init__(self, hot_slots: int, tail_slots: int, first_token: int = 0, tokens: int = 0) -> None:
        self.hot_slots = hot_slots
        self.tail_slots = tail_slots
        self.now = 0
        self.slots = [Slot() for _ in range(hot_slots + tail_slots)] if hot_slots else []
        for slot in range(tokens):
            self.slots[slot] = Slot(first_token + slot, 0)
        self.tail: list[int | None] = [None] * tail_slots

    @property
    def held(self) -> set[int]:
        return {slot.token for slot in self.slots if slot.token is not None}

    def ordinary(self) -> list[int]:
        reserved = [self.hot_slots + ring if slot is None else slot for ring, slot in enumerate(self.tail)]
        return [number for number in range(len(self.slots)) if number not in reserved]

    def hold(self, slot: int, token: int) -> None:
        """Put a token, used at step 0, into a slot of a buffer that is empty."""
        self.slots[slot] = Slot(token, 0)

    def begin(self, *positions: int) -> None:
        """A step: place its new tokens one after the other."""
        self.now += 1
        for position in positions if self.hot_slots else ():
            self._place(position)

    def _place(self, position: int) -> None:
        ring = position % self.tail_slots
        retiring = self.tail[ring]
        holding = [number for number, slot in enumerate(self.slots) if slot.token == position]
        if holding:
            (chosen,) = holding
        else:
            chosen = self.hot_slots + ring if retiring is None else self._oldest(self.ordinary())
        if retiring is not None and retiring != chosen:
            self.slots[retiring].used = self.now - 1
        self.tail[ring] = chosen
        self.slots[chosen] = Slot(position, self.now)

    def resolve(self, topk: list[int], length: int, *, draft: bool = False) -> Resolved:
        result = Resolved([])
        result.out_of_range = sum(1 for t in topk if t != -1 and not 0 <= t < length)
        wanted = {t for t in topk if 0 <= t < length}
        if self.hot_slots:
            result.misses = wanted - self.held
            for slot in self.slots:
                if slot.token in wanted:
                    slot.used = self.now
            free = [n for n in self.ordinary() if self.slots[n].used != self.now]
            if draft and len(free) < len(result.misses):
                wanted, result.misses, result.fits = wanted - result.misses, set(), False
            for token in sorted(result.misses):
                victim = self._oldest([n for n in self.ordinary() if self.slots[n].used != self.now])
                gone = self.slots[victim].token
                result.evicted |= set() if gone is None else {gone}
                self.slots[victim] = Slot(token, self.now)
        result.tokens = [t if t in wanted else None for t in topk]
        result.hits = len(topk) - result.tokens.count(None) - len(result.misses)
        return result

    def shrink(self, hot_slots: int) -> None:
        for slot in self.tail:
            if slot is not None and slot < hot_slots:
                self.slots[slot].used = self.now
        self.slots = self.slots[:hot_slots] + [Slot() for _ in range(self.tail_slots)]
        self.tail = [None] * self.tail_slots
        self.hot_slots = hot_slots

    def grow(self, hot_slots: int) -> None:
        self.slots += [Slot() for _ in range(hot_slots - self.hot_slots)]
        self.hot_slots = hot_slots

    def _oldest(self, numbers: list[int]) -> int:
        return min(numbers, key=lambda n: (self.slots[n].used, n))
