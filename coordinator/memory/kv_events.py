"""Events of the prefix caches of all nodes, for routers that send a prompt to its prefix. Pure.

The service is one place for a router, so a page that two nodes cache is stored once and removed with the last of them
(PrefixReuse sees to that). Events of one turn of the Scheduler are published together, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from coordinator.memory.prefix_index import Chain, Digest
from protocol.units import PAGE_TOKENS

#: Pages of one event, so that a long prompt is encoded in pieces.
EVENT_PAGES_MAX: Final = 256


class PagesStored(NamedTuple):
    """Pages of `digests` follow each other, behind `parent`, or at the beginning where that is None. `tokens`: int32.

    `scope` says at the beginning whose they are: user, tenant and salt, as far as there are any.
    """

    digests: tuple[Digest, ...]
    parent: Digest | None
    tokens: bytes
    scope: tuple[str, ...]


class PagesRemoved(NamedTuple):
    digests: tuple[Digest, ...]


class AllRemoved(NamedTuple):
    """No page is cached any more."""


KvEvent: TypeAlias = PagesStored | PagesRemoved | AllRemoved


class KvEvents:
    """Events of one turn. `tokens_of(request_index, first, last)` gives tokens of prompt and output, int32."""

    def __init__(self, tokens_of: Callable[[int, int, int], bytes]) -> None:
        self._tokens_of = tokens_of
        self._events: list[KvEvent] = [AllRemoved()]  # what an earlier coordinator has told holds no longer
        self._removed: list[Digest] = []

    def stored(
        self, chain: Chain, digests: Sequence[Digest], is_news: npt.NDArray[np.bool_], request_index: int
    ) -> None:
        """Note that those of `digests` that `is_news` marks were cached. `digests` follow the root of `chain`."""
        if not is_news.any():
            return
        self._flush_removed()
        scope = tuple(filter(None, chain.scope))
        edges = np.flatnonzero(np.diff(is_news, prepend=False, append=False))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            for begin, end in pairwise([*range(first, last, EVENT_PAGES_MAX), last]):
                self._events.append(
                    PagesStored(
                        tuple(digests[begin:end]),
                        digests[begin - 1] if begin else None,
                        self._tokens_of(request_index, PAGE_TOKENS * begin, PAGE_TOKENS * end),
                        scope if not begin else (),
                    )
                )

    def removed(self, digest: Digest) -> None:
        self._removed.append(digest)

    def cleared(self) -> None:
        self._removed.clear()
        self._events.append(AllRemoved())

    def take(self) -> list[KvEvent]:
        """All since the last call, in order."""
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        for begin in range(0, len(self._removed), EVENT_PAGES_MAX):
            self._events.append(PagesRemoved(tuple(self._removed[begin : begin + EVENT_PAGES_MAX])))
        self._removed.clear()
