"""The order in which cached pages of a node go: first by owner, then by last use. Pure.

    accounts   one for each owner with cached pages: how many they are, and a heap of those that may go, by last use
    ranking    a heap of the accounts: away before present, then the one with most pages

Each owner's *share* is an equal part of what is cached. What an owner does not use of its share is lent: no place is
kept empty. Where room is made, the owner with most pages gives it, so the one that is most above its share, and none
that is below loses a page to another's flood. An owner that has used nothing for LENDS_AFTER_S is *away*, and lends all
of its share: otherwise owners that came once would keep most of a pool from those that come all day.

A page counts for the owner whose request cached it first, also where others use it later. Where any owner may reuse
what any has computed (coordinator.prefix_reuse = all), pages below it may be another's; then it may go once those have
gone.

Shares are among owners of cached pages, not between them and requests that run. A request takes any idle page that it
needs, of whichever owner is next in the order: a cached page saves the time of a prefill, and a request without pages
waits for as long as others run. Owners who lose pages so get memory for their own requests by their turns
(coordinator.state.owner_turns), at the cost of one prefill each.

Both heaps keep entries that no longer hold and skip them, and are made anew when these are most. So an eviction takes
the time of a heap's step, however many owners and pages there are.

Rejected: one order of use for all (one key's flood evicts what all others have cached); shares as settings for each
owner (names of keys in the coordinator's settings, and numbers to guess); fixed parts of the pool (empty places); a
part of the cache that running requests of others may not take (their requests wait beside idle memory, for a page that
may never be used again).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, TypeAlias

#: User and tenant, by which requests take turns too (RequestFacts.turn_owner).
Owner: TypeAlias = tuple[str, str]
NO_OWNER: Final[Owner] = "", ""

#: A page that no cached one follows, with its last use: when that grows, the entry holds no more.
Leaf: TypeAlias = tuple[int, bytes]
NO_LEAF: Final[Leaf] = 0, b""

#: An owner that has used nothing for so long lends all of its share.
LENDS_AFTER_S: Final = 3_600.0
#: A heap is made anew when it has more than this many entries for each that can hold, and HEAP_LEAST.
HEAP_SLACK: Final = 4
HEAP_LEAST: Final = 64
_UNRANKED: Final = -1
_IN_HAND: Final = -2  # ranked again once it has given pages


@dataclass(slots=True, eq=False)
class OwnerAccount:
    """The pages of one owner, by count, and the leaves among them."""

    owner: Owner
    pages: int = 0
    used_at: float = 0.0
    is_away: bool = False
    entry: int = _UNRANKED  # the number of its entry in the ranking that holds
    leaves: list[Leaf] = field(default_factory=list)


class EvictionOrder:
    """`holds(leaf)` tells whether a listed leaf still is one, with that last use."""

    def __init__(self, holds: Callable[[Leaf], bool], clock: Callable[[], float]) -> None:
        self._holds = holds
        self._clock = clock
        self._accounts: dict[Owner, OwnerAccount] = {}
        self._present: OrderedDict[OwnerAccount, None] = OrderedDict()  # the one whose last use is oldest comes first
        self._ranking: list[tuple[bool, int, int, OwnerAccount]] = []
        self._numbers = count()
        self.pages = 0
        self.pages_lent = 0  # evicted ones that were above their owner's share, since the start

    def account(self, owner: Owner) -> OwnerAccount:
        """Return the account of `owner`, to which pages are about to be added."""
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = OwnerAccount(owner)
        return account

    def use(self, account: OwnerAccount) -> None:
        """A page of it is used now."""
        account.used_at = self._clock()
        self._present[account] = None
        self._present.move_to_end(account)
        if account.is_away:
            account.is_away = False
            self._rank(account)

    def add(self, account: OwnerAccount, pages: int) -> None:
        """So many pages came to it, or left it."""
        account.pages += pages
        self.pages += pages
        if account.pages:
            if account.entry != _IN_HAND:
                self._rank(account)
        else:
            account.entry = _UNRANKED
            self._present.pop(account, None)
            self._accounts.pop(account.owner, None)

    def list_leaf(self, account: OwnerAccount, leaf: Leaf) -> None:
        """A page of it has no other behind it, or was used."""
        heappush(account.leaves, leaf)
        if len(account.leaves) > HEAP_SLACK * account.pages + HEAP_LEAST:
            account.leaves = [*{listed for listed in account.leaves if self._holds(listed)}]
            heapify(account.leaves)
        if account.entry == _UNRANKED:
            self._rank(account)

    def go_through(self, wanted: int, forget: Callable[[bytes], int]) -> None:
        """Call `forget` for one leaf after the other until `wanted` pages are forgotten, or there is none left. It
        returns how many it forgot and counted off; a leaf of which it forgot none stays listed."""
        self._note_away()
        stayed: list[tuple[OwnerAccount, Leaf]] = []
        while wanted > 0 and (account := self._first()) is not None:
            account.entry = _IN_HAND
            leaf: Leaf | None = NO_LEAF
            while wanted > 0 and self._is_ahead(account) and (leaf := self._take_leaf(account)) is not None:
                is_lent = account.is_away or account.pages * len(self._accounts) > self.pages
                forgotten = forget(leaf[1])
                wanted -= forgotten
                self.pages_lent += forgotten * is_lent
                if not forgotten:
                    stayed.append((account, leaf))
            account.entry = _UNRANKED  # until it has a leaf
            if leaf is not None and account.pages:
                self._rank(account)
        for account, leaf in stayed:
            self.list_leaf(account, leaf)

    def clear(self) -> None:
        """Forget all pages: nothing is cached any more."""
        for kept in (self._accounts, self._present, self._ranking):
            kept.clear()
        self.pages = 0

    def counts(self) -> dict[Owner, int]:
        """Pages by owner."""
        return {owner: account.pages for owner, account in self._accounts.items()}

    def lists(self) -> set[tuple[Owner, Leaf]]:
        """Leaves that can be reached. O(index), for checks."""
        ranked = {account.owner: account for *_, entry, account in self._ranking if account.entry == entry}
        return {(owner, leaf) for owner, account in ranked.items() for leaf in account.leaves if self._holds(leaf)}

    def _note_away(self) -> None:
        since = self._clock() - LENDS_AFTER_S
        while self._present and (account := next(iter(self._present))).used_at < since:
            del self._present[account]
            account.is_away = True
            self._rank(account)

    def _first(self) -> OwnerAccount | None:
        while self._ranking:
            *_, entry, account = self._ranking[0]
            if account.entry == entry:
                return account
            heappop(self._ranking)
        return None

    def _is_ahead(self, account: OwnerAccount) -> bool:
        """Return whether `account`, which is not ranked now, comes before all that are."""
        other = self._first()
        return other is None or (account.is_away, account.pages) >= (other.is_away, other.pages)

    def _take_leaf(self, account: OwnerAccount) -> Leaf | None:
        while account.leaves:
            leaf = heappop(account.leaves)
            if self._holds(leaf):
                return leaf
        return None

    def _rank(self, account: OwnerAccount) -> None:
        account.entry = next(self._numbers)
        heappush(self._ranking, (not account.is_away, -account.pages, account.entry, account))
        if len(self._ranking) > HEAP_SLACK * len(self._accounts) + HEAP_LEAST:
            self._ranking = [ranked for ranked in self._ranking if ranked[3].entry == ranked[2]]
            heapify(self._ranking)
