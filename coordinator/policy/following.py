"""Two requests with one new prefix at once: the second waits for the pages of the first, page by page. Pure.

The first is the *leader*: on a worker, computing its prompt. The second, the *follower*, is not admitted yet: it holds
no seat, no pages and no claim, and blocks no other request. It waits only

    behind a leader of its own owner that ranks above it, so that nothing ranked lower holds it up
    while pages that both prompts begin with are still to come on a node that could take it
    while such pages do come: FOLLOW_LIMIT_S without a new one, and it goes on alone

A leader that is retracted, aborted, revoked, lost or past its prompt is none, so its followers go on with what is
cached by then. Nothing of this is written down: a coordinator that restarts has forgotten it.

After nothing in SGLang or vLLM, which compute such a prefix twice. Rejected: admitting the follower and letting its
worker wait (it would hold a seat and pages meanwhile).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from coordinator.memory.prefix_index import Digest
from coordinator.policy.prefix_reuse import PrefixReuse
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from protocol.units import PAGE_TOKENS

#: A follower goes on alone when no page has come for this long.
FOLLOW_LIMIT_S: Final = 10.0


class Following(NamedTuple):
    """Wait of a follower: of `pages` that the prompts of both begin with, `present` are cached."""

    leader: RequestState
    pages: int
    present: int

    @property
    def text(self) -> str:
        return (
            f"computes the first {self.pages * PAGE_TOKENS} tokens of its prompt on {self.leader.worker}, "
            f"{self.present * PAGE_TOKENS} are there"
        )


class Leaders:
    """Requests that compute their prompts, as of one plan."""

    def __init__(self, placement_table: PlacementTable, prefix_reuse: PrefixReuse) -> None:
        self._placement_table = placement_table
        self._prefix_reuse = prefix_reuse
        self._by_first: dict[Digest, list[RequestState]] | None = None

    def begun(self, entry: RequestState) -> None:
        """It was admitted by this plan, and may lead from now on."""
        if self._by_first is not None:
            self._list(entry, self._by_first)

    def may_lead(self, entry: RequestState) -> bool:
        """Return whether any request under way may lead `entry`, on any node. Changes nothing."""
        return not entry.goes_alone and bool(self._candidates(entry))

    def followed_by(self, entry: RequestState, nodes: Iterable[str], now: float) -> Following | None:
        """Return what `entry`, which workers of `nodes` could take, is to wait for; None: it goes on alone."""
        if entry.chain is None or entry.pages or entry.goes_alone:
            return None
        before = entry.follows
        entry.follows = None
        if not (candidates := self._candidates(entry)):
            return None
        present = {node: int(self._prefix_reuse.match(entry, node).size) for node in nodes}
        found = [it for it in candidates if it.leader.node in present]
        best = max(found, key=lambda it: it.pages, default=None)
        if best is None or best.pages <= max(present.values()):  # what is to come is there, here or elsewhere
            return None
        best = best._replace(present=present[best.leader.node])
        if before is None or before[:2] != (best.leader.placement, best.present):
            before = best.leader.placement, best.present, now
        entry.follows = before
        if now - before[2] >= FOLLOW_LIMIT_S:
            entry.goes_alone = True
            return None
        return best

    def _candidates(self, entry: RequestState) -> list[Following]:
        mine, last = entry.chain, (entry.facts.prompt_tokens - 1) // PAGE_TOKENS
        computing, found = self._placement_table.computing, list[Following]()
        if mine is None or not mine.digests or not last or not computing:
            return found
        for leader in self._beginning_with(mine.digests[0]):
            if leader.request_index not in computing:
                continue
            is_own = leader.facts.turn_owner == entry.facts.turn_owner and leader.rank < entry.rank
            if is_own and leader.chain is not None and leader.chain.root == mine.root:
                pages = min(self._prefix_reuse.common_pages(leader.chain, mine), last)
                found.append(Following(leader, self._prefix_reuse.whole(pages), 0))
        return found

    def _beginning_with(self, first: Digest) -> list[RequestState]:
        """Requests under way whose prompts begin with the page of this digest: of thousands that do not, none."""
        if self._by_first is None:
            self._by_first = {}
            for leader in self._placement_table.computing.values():
                self._list(leader, self._by_first)
        return self._by_first.get(first, [])

    @staticmethod
    def _list(leader: RequestState, by_first: dict[Digest, list[RequestState]]) -> None:
        if leader.chain is not None and leader.chain.digests:
            by_first.setdefault(leader.chain.digests[0], []).append(leader)
