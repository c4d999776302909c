"""Requests and memory of the demo: prompts cut from real text, and memory too small to hold any context. Pure.

The demo must show swap-in, so no request may become resident. With n requests on one worker after the drain, each in a
hot buffer of H slots (managed_chunks(H) chunks), the worker gets exactly n * managed_chunks(H) chunks. H is the largest
size for which that is at most the full chunks of the shortest prompt, so that even a single request could not be
resident. For 8 requests from 2,048 tokens on: H = 192, 4 chunks each, 32 chunks; the shortest prompt with its first new
token needs 33.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS, managed_chunks

#: Largest part of a context for a hot buffer, its tail chunk included, and largest part that the indexer selects.
HOT_SHARE_MAX: Final = 1 / 8
TOPK_SHARE_MAX: Final = 1 / 16
#: Shorter files are not used.
SOURCE_CHARS_MIN: Final = 200

#: New tokens by default: some seconds on either device, to retract, drain and resume in.
CPU_NEW_TOKENS: Final = 128
GPU_NEW_TOKENS: Final = 512
#: What is said between two turns of a conversation.
SAID_TOKENS: Final = 200
#: Owner of the conversation that says what the first one says, and may reuse nothing of it.
APART: Final = "apart"
REQUESTS_MIN: Final = 2  # one to retract, one to hand over
NEW_TOKENS_MIN: Final = 32  # mid-decode must last long enough to retract, resume and drain


@dataclass(frozen=True)
class DemoOptions:
    """The size of a run. Prompt lengths spread evenly from `prompt_tokens_min` to `prompt_tokens_max`.

    With `turns` above 1 each request is the first turn of a conversation, whose later turns begin with all that was
    said; the last conversation says what the first one says, for another owner. `group_size` workers share one copy of
    the model. Workers draft `draft_tokens` tokens for each step. `streams` "": the default backend of the device.
    `weights`: as stored in the checkpoint, float32 or fp8. Hot buffers have a multiple of `hot_multiple` slots.
    """

    family: str = "glm-5"
    requests: int = 8
    workers: int = 2
    group_size: int = 1
    new_tokens: int = CPU_NEW_TOKENS
    prompt_tokens_min: int = 2_048
    prompt_tokens_max: int = 6_000
    topk: int = 128
    device: str = "cpu"
    streams: str = ""
    weights: str = "float32"
    turns: int = 1
    draft_tokens: int = 0
    hot_multiple: int = PAGE_TOKENS

    @property
    def context_tokens_max(self) -> int:
        """Tokens of the longest conversation at its end."""
        return self.prompt_tokens_max + self.turns * self.new_tokens + (self.turns - 1) * SAID_TOKENS

    def __post_init__(self) -> None:
        _at_least("requests", self.requests, REQUESTS_MIN)
        _at_least("workers", self.workers, 2)
        _at_least("group-size", self.group_size, 1)
        if self.workers % self.group_size:
            raise BadInput(
                f"{self.workers} workers cannot be divided into groups of that size",
                field="group-size",
                value=self.group_size,
                remedy="use a divisor of --workers",
            )
        _at_least("turns", self.turns, 1)
        _at_least("new-tokens", self.new_tokens, NEW_TOKENS_MIN)
        _at_least("prompt-tokens", self.prompt_tokens_min, round(self.topk / TOPK_SHARE_MAX))
        _at_least("prompt-tokens", self.prompt_tokens_max, self.prompt_tokens_min)


@dataclass(frozen=True)
class DemoMemory:
    """Device memory of one worker, in the units of the ledger, and its hot-buffer size in slots."""

    hot_slots: int
    hot_chunks: int


@dataclass(frozen=True)
class PromptSource:
    """One text file; `name` is its heading in a prompt."""

    name: str
    text: str


@dataclass(frozen=True)
class DemoRequest:
    """`said` later: what follows the output of each turn but the last."""

    request_id: str
    source: str
    prompt: tuple[int, ...]
    owner: str = ""
    said: tuple[tuple[int, ...], ...] = ()


def memory_for(options: DemoOptions) -> DemoMemory:
    """The largest hot buffer that keeps every request of `options` managed. Raises BadInput when none reaches top-k."""
    chunks_max = options.prompt_tokens_min // PAGE_TOKENS
    concurrent = min(options.requests, chunks_max // managed_chunks(options.topk))
    by_share = int(options.prompt_tokens_min * HOT_SHARE_MAX) - PAGE_TOKENS
    by_chunks = (chunks_max // max(concurrent, 1) - 1) * PAGE_TOKENS
    hot_slots = min(by_share, by_chunks) // options.hot_multiple * options.hot_multiple
    if hot_slots < options.topk:
        raise BadInput(
            f"a hot buffer of {hot_slots} slots cannot hold the {options.topk} rows that one step selects",
            field="prompt-tokens",
            value=options.prompt_tokens_min,
            remedy="raise --prompt-tokens",
        )
    return DemoMemory(hot_slots, concurrent * managed_chunks(hot_slots))


def default_prompt_tokens(topk: int) -> tuple[int, int]:
    """Return the range of prompt lengths for a model that selects `topk` tokens."""
    return max(DemoOptions.prompt_tokens_min, round(topk / TOPK_SHARE_MAX)), DemoOptions.prompt_tokens_max


def prompt_lengths(count: int, low: int, high: int) -> list[int]:
    """`count` lengths spread evenly over low..high, both ends included."""
    return [low + (high - low) * i // max(count - 1, 1) for i in range(count)]


def cut_prompts(
    sources: Sequence[PromptSource], lengths: Sequence[int], encode: Callable[[str], Sequence[int]], turns: int = 1
) -> list[DemoRequest]:
    """One prompt per length. Each begins at another file and continues with the following ones. With several `turns`,
    what is said later follows the prompt in the files, and the last conversation is the first one, of another owner.

    Raises BadInput when all files together are shorter than the longest prompt.
    """
    sources = [source for source in sources if len(source.text) >= SOURCE_CHARS_MIN]
    if not sources:
        raise BadInput("no text for prompts", field="prompts", value=0, remedy="name text files with --prompts")
    encoded = [tuple(encode(f"### {source.name}\n\n{source.text}\n")) for source in sources]
    later = (turns - 1) * SAID_TOKENS
    starts = [i * len(sources) // len(lengths) for i in range(len(lengths))]
    requests = [
        _conversation(f"demo-{i:02}", sources[start].name, _cut(encoded, start, length + later), length)
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    if turns > 1:
        requests[-1] = replace(requests[0], request_id=requests[-1].request_id, owner=APART)
    return requests


def _conversation(request_id: str, source: str, tokens: tuple[int, ...], length: int) -> DemoRequest:
    said = tuple(tokens[at : at + SAID_TOKENS] for at in range(length, len(tokens), SAID_TOKENS))
    return DemoRequest(request_id, source, tokens[:length], said=said)


def _cut(encoded: Sequence[tuple[int, ...]], start: int, length: int) -> tuple[int, ...]:
    """`length` tokens from source `start` on, wrapping around once."""
    tokens: list[int] = []
    for i in range(len(encoded)):
        tokens.extend(encoded[(start + i) % len(encoded)][: length - len(tokens)])
        if len(tokens) == length:
            return tuple(tokens)
    raise BadInput(
        f"all text together has {len(tokens)} tokens, the longest prompt needs {length}",
        field="prompts",
        value=f"{len(encoded)} files",
        remedy="add files to --prompts or lower --prompt-tokens",
    )


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise BadInput(f"the demo needs at least {low}", field=field, value=value, remedy=f"raise --{field}")
