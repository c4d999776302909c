"""FakeService: the client's commands over an imaginary service, on whatever clock trio has. No sockets, no model.

Each running request makes one token per `step_s`; retracted ones stop; a drained worker's requests go to the other one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import trio

from protocol.errors import WrongState
from protocol.messages import PoolRow, RequestRow, RequestRows, Sampling, WorkerCapacity, WorkerRow

PAGES_EACH = 10
CAPACITY = WorkerCapacity(8, 32, 512, 8_192, 1024, 98_304, (192,), 8, 1, "/tmp/p")


@dataclass
class _Request:
    request_id: str
    prompt_tokens: int
    max_tokens: int
    worker: str
    state: str = "QUEUED"
    tokens: list[int] = field(default_factory=list)
    retractions: int = 0


class FakeService:
    """`leak` pages never come back; `refuse_retract` answers as for a request that has just ended; `ahead` is a worker
    that takes a thousandth of `step_s`."""

    def __init__(self, step_s: float = 0.05, leak: int = 0, refuse_retract: bool = False, ahead: str = "") -> None:
        self.step_s = step_s
        self.ahead = ahead
        self.leak = leak
        self.refuse_retract = refuse_retract
        self.live: dict[str, _Request] = {}
        self.workers_up = {"w0": "connected", "w1": "connected"}
        self.said: list[tuple[object, ...]] = []
        self._news = trio.Event()

    # ------------------------------------------------------------ the client's commands

    async def submit(
        self, prompt: Sequence[int], sampling: Sampling, *, request_id: str = "", tenant: str = ""
    ) -> AsyncIterator[list[int]]:
        worker = f"w{len(self.live) % 2}"
        request = _Request(request_id, len(prompt), sampling.max_tokens, worker)
        self.live[request_id] = request
        return self._decode(request)

    async def retract(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        if self.refuse_retract:
            raise WrongState("it is FINISHED", field="request_id", value=request_ids[0])
        for name in request_ids:
            self.live[name].state = "RETRACTED"
            self.live[name].retractions += 1
        self.said.append(("retract", *request_ids, trio.current_time()))
        return ()

    async def resume(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        for name in request_ids:
            self.live[name].state = "RUNNING"
            self._leave_drained(self.live[name])
        self.said.append(("resume", *request_ids, trio.current_time()))
        return ()

    async def drain(self, workers: Sequence[str], *, handover: bool, deadline_s: float) -> tuple[str, ...]:
        self.said.append(("drain", *workers, handover))
        (drained,) = workers
        self.workers_up[drained] = "drained"
        for request in self.live.values():
            if request.state == "RUNNING":
                self._leave_drained(request)
        return ()

    async def requests(self) -> RequestRows:
        return RequestRows(0, tuple(_row_of(request) for request in self.live.values()))

    async def workers(self) -> tuple[WorkerRow, ...]:
        return tuple(
            WorkerRow(name, "n", state, 1, 0, CAPACITY, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0)
            for name, state in self.workers_up.items()
        )

    async def pools(self) -> tuple[PoolRow, ...]:
        live = sum(request.state != "FINISHED" for request in self.live.values())
        used = PAGES_EACH * live + (self.leak if self.live else 0)
        return (PoolRow("n", 1024, 1024 - used, used, 0, 0, 98_304, 0, ("w0", "w1")),)

    # ------------------------------------------------------------ the imaginary workers

    def _leave_drained(self, request: _Request) -> None:
        if self.workers_up[request.worker] == "drained":
            request.worker = next(name for name, state in self.workers_up.items() if state != "drained")

    async def _decode(self, request: _Request) -> AsyncIterator[list[int]]:
        step_s = self.step_s / (1000 if request.worker == self.ahead else 1)
        await trio.sleep(step_s)
        request.state = "RUNNING"
        while len(request.tokens) < request.max_tokens:
            await trio.sleep(step_s)
            if request.state == "RUNNING":
                request.tokens.append(len(request.tokens))
                yield request.tokens[-1:]
        request.state = "FINISHED"


def _row_of(request: _Request) -> RequestRow:
    return RequestRow(
        request.request_id, request.state, 0, request.worker, request.prompt_tokens, len(request.tokens),
        request.max_tokens, 0, PAGES_EACH, 192, 4, 0, 0, request.retractions, 0.0, False, "",
    )  # fmt: skip
