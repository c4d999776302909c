"""The published workloads as data: requests of a cell, what enters it in its steady state, memory that it needs. Pure.

A cell is a workload with a number of clients. Each client has one request at a time and sends the next one when that
has ended (a closed loop). A cell begins as if it had run for long: client i of n has i/n of its output behind it, and
the context of that request is written, not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, NamedTuple

from protocol.units import pages_for

#: Pages that the coordinator grants ahead, and the page that a request has begun.
AHEAD_PAGES: Final = 4
#: Share of the pool that cached pages of ended requests may take.
SPARE_SHARE: Final = 0.02


@dataclass(frozen=True)
class Published:
    """A figure of another engine, in its own words, and where it was read."""

    figure: str
    source: str


@dataclass(frozen=True)
class Workload:
    """`fresh`: the fewest and the most new tokens of a prompt. `history`: the shortest and the longest context that a
    session's prompt goes on from; (0, 0): prompts have nothing in common. `long_prompt`: tokens of a prompt of which
    one at a time is sent beside the clients; 0: none is."""

    name: str
    clients: tuple[int, ...]
    fresh: tuple[int, int]
    output: int
    about: str
    history: tuple[int, int] = (0, 0)
    long_prompt: int = 0
    published: Mapping[int, Published] = field(default_factory=dict)

    @property
    def has_sessions(self) -> bool:
        return self.history[1] > 0

    @property
    def longest(self) -> int:
        """Tokens of the longest context of a client."""
        return self.history[1] + self.fresh[1] + self.output

    def shrunk(self, by: int) -> Workload:
        """Every length divided by `by`."""

        def less(tokens: int) -> int:
            return -(-tokens // by)

        fresh, history = ((less(low), less(high)) for low, high in (self.fresh, self.history))
        return replace(self, fresh=fresh, history=history, output=less(self.output), long_prompt=less(self.long_prompt))


@dataclass(frozen=True)
class Cell:
    workload: Workload
    clients: int

    @property
    def name(self) -> str:
        return f"{self.workload.name}-{self.clients}"

    @property
    def published(self) -> Published | None:
        return self.workload.published.get(self.clients)

    @property
    def pages(self) -> int:
        """Host pages that the contexts of all clients take at their longest."""
        long = pages_for(self.workload.long_prompt + 1) + AHEAD_PAGES if self.workload.long_prompt else 0
        return self.clients * (pages_for(self.workload.longest) + AHEAD_PAGES) + long

    @property
    def context_tokens(self) -> int:
        """The longest context that a worker has to take."""
        return max(self.workload.longest, self.workload.long_prompt + 1)


@dataclass(frozen=True)
class Entry:
    """How client `number` enters a cell: with `history` and `prompt` tokens written, and `output` tokens to come."""

    number: int
    history: int
    prompt: int
    output: int


WORKLOADS: Final = {
    it.name: it
    for it in (
        Workload(
            "8k1k",
            (1, 8, 32),
            fresh=(8_192, 8_192),
            output=1_024,
            about="prompts of 8,192 tokens, outputs of 1,024",
            published={
                1: Published("one prompt of 8k alone: TTFT 1.05 s", "SGLang #30514, DeepSeek-V3.2, 8 x H200"),
                32: Published(
                    "2,399 total, 267 output tokens/s a GPU; TTFT 66 s, 30 ms a token",
                    "SGLang #31554, GLM-5.2, 256 requests on 8 x H200",
                ),
            },
        ),
        Workload(
            "agents",
            (4, 7, 14),
            fresh=(4_000, 8_000),
            output=300,
            history=(75_000, 100_000),
            about="sessions of 75k to 100k tokens, turns of 4,000 to 8,000 new tokens and 300 out",
            published={
                4: Published(
                    "at 3 sessions a GPU 818 total tokens/s a GPU, TTFT 3.8 s; at 4 TTFT 24.8 s",
                    "InferenceX #2275, SGLang with HiSparse, 24 H200",
                ),
                14: Published(
                    "at 8 sessions a GPU 12,603 total tokens/s a GPU, at 16 3,421 (prefix hits 0.97, 0.39)",
                    "InferenceX #2268, 8 x B300",
                ),
            },
        ),
        Workload(
            "32k8k",
            (48,),
            fresh=(32_768, 32_768),
            output=8_192,
            about="prompts of 32,768 tokens, outputs of 8,192",
            published={
                48: Published(
                    "55 output tokens/s a GPU without offload, flat from 16 requests on 8 GPUs",
                    "SGLang #30985, 8 x H200",
                )
            },
        ),
        Workload(
            "mix",
            (16,),
            fresh=(8_192, 8_192),
            output=16_384,
            long_prompt=131_072,
            about="chats of 8k, beside prompts of 131,072 tokens, one at a time",
            published={16: Published("a decode of 272 tokens/s falls to 6.6", "users' reports of other engines")},
        ),
        Workload("32k1", (2,), fresh=(32_768, 32_768), output=1, about="prompts of 32,768 tokens alone"),
        Workload(
            "1k1",
            (1,),
            fresh=(1_024, 1_024),
            output=1,
            long_prompt=131_072,
            about="prompts of 1,024 tokens one by one, alone and beside those of 131,072",
        ),
        Workload("128k1", (1,), fresh=(131_072, 131_072), output=1, about="the long prompts of `mix` alone"),
        Workload(
            "turns",
            (64,),
            fresh=(500, 500),
            output=1,
            history=(32_256, 32_768),
            about="prompts of 500 tokens behind 32k that are cached, alone",
        ),
    )
}


class Asked(NamedTuple):
    """A cell, and the seconds of its window; None: those of all cells."""

    cell: Cell
    window: float | None = None


def cells_of(names: Sequence[str], wanted: Sequence[str] = (), shrink: int = 1) -> list[Asked]:
    """All cells of the workloads `names`, in the order of the table; or those of them that `wanted` names as NAME or
    NAME:SECONDS, in its order, each as often as it is named. Raises ValueError for a cell that no workload of them
    has."""
    cells = [Cell(WORKLOADS[name].shrunk(shrink), clients) for name in names for clients in WORKLOADS[name].clients]
    known = {cell.name: cell for cell in cells}
    if not wanted:
        return [Asked(cell) for cell in cells]
    parted = [text.partition(":") for text in wanted]
    unknown = sorted({name for name, _, _ in parted} - known.keys())
    if unknown:
        raise ValueError(f"no such cell: {', '.join(unknown)}; choose from {', '.join(known)}")
    return [Asked(known[name], float(seconds) if seconds else None) for name, _, seconds in parted]


def entries(cell: Cell, random: Random) -> Iterator[Entry]:
    """How the clients of `cell` enter it, at points of their outputs that are evenly apart."""
    work, clients = cell.workload, cell.clients
    low, high = work.history
    for number in range(clients):
        done = work.output * number // clients
        history = low + (high - low) * number // clients
        yield Entry(number, history, drawn(work.fresh, random) + done, work.output - done)


def drawn(bounds: tuple[int, int], random: Random) -> int:
    return random.randint(*bounds)


def next_history(work: Workload, tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens that a session's next prompt continues: all of `tokens`, or their beginning where they have
    become too long, as of an agent that compacts its context. Without sessions, nothing."""
    low, high = work.history
    return tokens if len(tokens) <= high else tokens[:low]


def pool_pages(cells: Sequence[Cell]) -> int:
    """Host pages that hold any one of `cells`."""
    return int(max(cell.pages for cell in cells) * (1 + SPARE_SHARE))
