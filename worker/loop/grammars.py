"""Grammars of requests, and the masks of their next tokens on the way to the device.

    decode loop    open ─► advance(token) ─► … wait ─► mask into its seat's row ─► upload on `load`, mask_ready
    threads        build the matcher, push known tokens, mask · push the token, mask

A matcher is built and moved by threads, since a grammar may take a second to build and a mask milliseconds; the library
lets go of the interpreter meanwhile. Each request has at most one job at a time. A state is a function of the grammar
and the tokens so far, so another worker, or the same one after a retraction, builds it from these.

A mask depends on the token before, so that a step is launched without its draws, and these follow once the masks are
there (worker/loop/decode.py). The loop waits MASK_WAIT_S for them; what is late by then is not drawn.

Masks of all seats travel in one copy. Rows of other seats are as they were copied before: a row changes only once the
draw that read it was seen, and the upload that changes it comes before the next draw of that seat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

from torch import Tensor

from protocol.errors import BadInput, HiSparseError, InternalError
from protocol.grammars import Mask, Matcher, Vocabulary
from protocol.messages import ModelInfo
from protocol.text import Tokenizer
from worker.loop.inputs import host_tensor
from worker.runners.logits import AdjustTables
from worker.streams import Fence, Streams

#: Threads that build matchers and compute masks.
THREADS: Final = 3
#: How long draws wait for masks, behind a forward pass that may take as long.
MASK_WAIT_S: Final = 0.01
#: How long a matcher may take to be built, or a mask to be computed, before its request fails.
GRAMMAR_LIMIT_S: Final = 60.0


class Grammar:
    """The grammar of one request. Used by the decode loop; `work` runs in a thread."""

    def __init__(self, source: str, tokens: Sequence[int], submit: Callable[[Grammar], None]) -> None:
        """`tokens` are known already."""
        self._source = source
        self._submit = submit
        self._matcher: Matcher | None = None
        self._mask: Mask | None = None
        self._failure: HiSparseError | None = None
        self._done = threading.Event()
        self._begin(tokens)

    @property
    def has_mask(self) -> bool:
        """Whether it is known what may come next; False too where the grammar has failed."""
        return self._done.is_set() and self._failure is None

    def advance(self, token: int) -> None:
        """The output goes on with `token`."""
        if not self.has_mask:
            raise InternalError("a token came before its mask", field="token", value=token)
        self._begin((token,))

    def check(self) -> None:
        """Raises what made it fail, and BadInput when it takes too long."""
        if self._done.is_set():
            if self._failure is not None:
                raise self._failure
        elif time.monotonic() - self._since_s > GRAMMAR_LIMIT_S:
            text = f"takes more than {GRAMMAR_LIMIT_S:g} s"
            raise BadInput(text, field="grammar", value=f"{len(self._source)} characters", remedy="simplify it")

    def wait(self, until_s: float) -> Mask | None:
        """The mask of the next token; None: it is not there by `until_s` of time.monotonic(). Raises as `check`."""
        self._done.wait(max(0.0, until_s - time.monotonic()))
        self.check()
        return self._mask if self.has_mask else None

    def work(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """In a thread: what was begun."""
        try:
            if self._matcher is None:
                self._matcher = Matcher(vocabulary(), self._source)
            self._matcher.push(self._tokens)
            self._mask = self._matcher.mask()
        except HiSparseError as error:
            self._failure = error
        except Exception as error:
            self._failure = InternalError(f"the matcher failed: {error}", field="grammar")
        self._done.set()

    def _begin(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._since_s = time.monotonic()
        self._done.clear()
        self._submit(self)


class Grammars:
    """The threads, started with the first grammar, and the masks of all seats."""

    def __init__(
        self, streams: Streams, tables: AdjustTables, tokenizer: Tokenizer, info: ModelInfo, wake: Callable[[], None]
    ) -> None:
        """`wake` is told, from a thread, of each mask."""
        self._load = streams.load
        self._tables = tables
        self._rows = host_tensor(*tables.masks.shape, dtype=tables.masks.dtype, device=tables.masks.device)
        self._make = partial(Vocabulary, tokenizer, info.vocab_size, info.eos_token_ids)
        self._wake = wake
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Grammar | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def open(self, seat: int, source: str, tokens: Sequence[int]) -> Grammar:
        """Of the request that takes `seat`, whose draws are free until a mask is set: they give known tokens."""
        self._rows[seat].fill_(255)
        if not self._threads:
            self._threads = [threading.Thread(target=self._work, name="grammars", daemon=True) for _ in range(THREADS)]
            for thread in self._threads:
                thread.start()
        return Grammar(source, tokens, self._jobs.put)

    def set(self, seat: int, mask: Mask | None) -> None:
        """What the next draw of `seat` is held to; None: it does not draw."""
        row: Tensor = self._rows[seat]
        if mask is None:
            row[-1] = 0
            return
        array: Mask = row.numpy()
        array[:-1] = mask
        row[-1] = 1

    def upload(self) -> Fence:
        """Launch the way of all masks to the device, and return the fence that draws wait for."""
        self._load.launch("upload masks", self._copy)
        return self._load.record("mask_ready")

    def close(self) -> None:
        """End the threads once they have done what was begun."""
        for _ in self._threads:
            self._jobs.put(None)

    def _copy(self) -> None:
        self._tables.masks.copy_(self._rows, non_blocking=True)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.work(self._known)
            self._wake()

    def _known(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make()
            return self._vocabulary
