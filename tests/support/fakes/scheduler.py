"""FakeScheduler: requests without workers. Tests speak their tokens and end them; every command is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from coordinator.scheduler.validation import check_submit
from coordinator.state.events import Ending, Handle, Listener
from coordinator.tokens.token_log import TokenLog
from protocol import messages
from protocol.errors import HiSparseError, NotFound, WrongState
from protocol.logprobs import row_words
from tests.support.progress import LINK, RequestEntry, progress

MODEL = messages.ModelInfo("f" * 8, "fake", 4096, 256, 4, 128, (0,), "bytes", "")


class FakeScheduler:
    """`commands` holds what was asked, as (command, arguments). `refuse_with` makes the next command fail,
    `never_answers` lets aborts wait."""

    def __init__(self, log: TokenLog, listener: Listener) -> None:
        self.log = log
        self.listener = listener
        self.request_indices: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.commands: list[tuple[object, ...]] = []
        self.refuse_with: HiSparseError | None = None
        self.never_answers = False
        self.unanswered = 0  # aborts that wait
        self.refuses_all = ""
        self.serves_none = ""
        self.all_wait = ("", "")  # kind and text of what all requests wait for
        self.on_stop: Callable[[], None] = lambda: None
        self.served: messages.ModelInfo | None = MODEL
        self.drafts = (0, 0)  # of each request that ends: verified, and accepted
        self._words: dict[str, int] = {}  # of a row of log-probabilities, by request
        self._facts: dict[str, tuple[object, ...]] = {}  # what was submitted, by request
        self._numbers = 0

    # ------------------------------------------------------------ what tests do

    def speak(self, request_id: str, tokens: Sequence[int]) -> None:
        """With rows of zeros for a request that asks for log-probabilities."""
        request_index, words = self.request_indices[request_id], self._words[request_id]
        start, rows = self.log.length(request_index), [0] * (words * len(tokens))
        entry = RequestEntry(request_index, request_index + 1, start, tokens, words=words, rows=rows)
        self.log.append(progress(entry), LINK)

    def finish(
        self,
        request_id: str,
        outcome: str = "FINISHED",
        tail_text: str = "",
        reason: str = "length",
        prefix_tokens: int = 0,
    ) -> None:
        request_index = self.request_indices[request_id]
        about = request_index, request_id, outcome, reason, self.log.length(request_index), tail_text, prefix_tokens
        self.listener.ended(Ending(*about, *self.drafts))

    def forget(self, request_id: str) -> None:
        request_index = self.request_indices.pop(request_id)
        del self._words[request_id], self._facts[request_id]
        self.listener.forgotten(request_index)
        self.log.close(request_index)

    # ------------------------------------------------------------ the facade

    async def submit(
        self, submit: messages.Submit, owner: str, user: str = "", *, prefix_tenant: str | None = None
    ) -> Handle:
        self._record("submit", submit)
        self._numbers += 1
        request_id = submit.request_id or f"r{self._numbers}"
        if request_id in self.request_indices:
            if self._facts[request_id] != _facts_of(submit, owner):
                raise WrongState("the id is in use", field="request_id", value=request_id, remedy="choose another")
            return Handle(request_id, self.request_indices[request_id])  # sent again by a client that lost the answer
        prompt = check_submit(submit, self.served or MODEL)
        self._facts[request_id] = _facts_of(submit, owner)
        words = self._words[request_id] = row_words(submit.sampling.logprobs)
        request_index = self.log.open(submit.sampling.max_tokens, words)
        self.log.begin_placement(request_index, request_index + 1, prompt.size, 1 << 20)
        self.log.bind(request_index, LINK)
        self.request_indices[request_id] = request_index
        self.owners[request_id] = owner
        return Handle(request_id, request_index)

    async def abort(self, request_ids: tuple[str, ...], owner: str, user: str | None = None) -> tuple[str, ...]:
        if self.never_answers:
            self.unanswered += 1
            await trio.sleep_forever()
        return self._command("abort", request_ids)

    async def acknowledge(self, request_ids: tuple[str, ...], owner: str, user: str | None = None) -> tuple[str, ...]:
        return self._command("acknowledge", request_ids)

    async def retract(self, request_ids: tuple[str, ...], owner: str, *, keep: bool, hold: bool) -> tuple[str, ...]:
        return self._command("retract", request_ids, keep, hold)

    async def resume(self, request_ids: tuple[str, ...], owner: str) -> tuple[str, ...]:
        return self._command("resume", request_ids)

    async def resize(self, request_ids: tuple[str, ...], owner: str, *, hot_slots: int) -> tuple[str, ...]:
        return self._command("resize", request_ids, hot_slots)

    async def drain(
        self, workers: tuple[str, ...], owner: str, *, handover: bool, deadline_s: float
    ) -> tuple[str, ...]:
        self._record("drain", workers, handover, deadline_s)
        return workers

    async def undrain(self, workers: tuple[str, ...], owner: str) -> tuple[str, ...]:
        self._record("undrain", workers)
        return workers

    async def release_quarantine(self, workers: tuple[str, ...], owner: str, *, died: bool = False) -> tuple[str, ...]:
        self._record("release_quarantine", workers)
        return workers

    async def forget_workers(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        self._record("forget_workers", workers)
        return workers

    async def tell_standbys(self, workers: tuple[str, ...], ready: tuple[str, ...]) -> tuple[str, ...]:
        self._record("tell_standbys", workers, ready)
        return ()

    async def stop(self, deadline_s: float, owner: str) -> tuple[str, ...]:
        self._record("stop", deadline_s)
        self.on_stop()
        await trio.lowlevel.checkpoint()
        return ("stopping",)

    async def audit(self, owner: str) -> tuple[tuple[messages.AuditedRow, ...], tuple[messages.DifferenceRow, ...]]:
        self._record("audit", owner)
        return (messages.AuditedRow("w", 1, True, 2, 3, 0),), ()

    def lookup(self, request_id: str, user: str | None = None) -> int:
        request_index = self.request_indices.get(request_id)
        if request_index is None:
            raise NotFound("no such request", field="request_id", value=request_id, remedy="hisparse requests")
        return request_index

    def model(self) -> messages.ModelInfo | None:
        return self.served

    def refusal(self) -> str:
        return self.refuses_all

    def unserved(self) -> str:
        return self.serves_none

    def request_rows(self, limit: int, user: str | None = None) -> list[messages.RequestRow]:
        return [self._row(request_id) for request_id in self.request_indices][:limit]

    def describe(
        self, request_id: str, user: str | None = None
    ) -> tuple[messages.RequestRow, tuple[messages.HistoryLine, ...]]:
        self.lookup(request_id)
        return self._row(request_id), (messages.HistoryLine(1.0, "submitted", "QUEUED", ""),)

    def worker_rows(self) -> list[messages.WorkerRow]:
        return []

    def pool_rows(self) -> list[messages.PoolRow]:
        return [messages.PoolRow("n", 10, 4, 6, 0, 0, 1024, 0, ("w",))]

    def _command(self, command: str, request_ids: tuple[str, ...], *details: object) -> tuple[str, ...]:
        self._record(command, request_ids, *details)
        for request_id in request_ids:
            self.lookup(request_id)
        return tuple(f"{request_id}: {command}" for request_id in request_ids)

    def _record(self, *command: object) -> None:
        self.commands.append(command)
        if self.refuse_with is not None:
            error, self.refuse_with = self.refuse_with, None
            raise error

    def _row(self, request_id: str) -> messages.RequestRow:
        tokens = self.log.length(self.request_indices[request_id])
        kind, text = self.all_wait
        return messages.RequestRow(
            *(request_id, "QUEUED" if kind else "RUNNING", 0, "w", 3, tokens, 9, 0, 1, 0, 1, 0, 0, 0, 0.0, False, text),
            waits_for=kind,
        )


def _facts_of(submit: messages.Submit, owner: str) -> tuple[object, ...]:
    return owner, submit.prompt, submit.sampling, submit.priority
