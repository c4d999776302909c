"""First and last steps of requests: they are checked, given a request index, an entry and an actor, written down, and
forgotten.

A room of the Scheduler's, in whose turns all of this happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.journal.records import RequestAccepted, RequestFacts, RequestsForgotten, digest_of, kept_facts
from coordinator.scheduler.validation import check_fits, check_submit
from coordinator.scheduler.worker_registry import WorkerRegistry
from coordinator.state import events
from coordinator.state.events import Handle, WorkerPort
from coordinator.state.request import Request, RequestParts
from coordinator.state.request_state import RequestState
from coordinator.turn.dispatch import Dispatch
from coordinator.turn.request_table import RequestTable
from protocol.arrays import pack_int32
from protocol.errors import Unavailable
from protocol.logprobs import row_words
from protocol.sizing import Length


@dataclass(slots=True)
class Submissions:
    """A request has room for `first_tokens` of output at first. `ids_made` counts names given to requests that came
    without one."""

    requests: RequestTable
    dispatch: Dispatch
    registry: WorkerRegistry
    parts: RequestParts
    first_tokens: int
    ids_made: int = 0

    def submit(self, ask: events.SubmitAsk, now: float, *, stopping: bool) -> Handle:
        """A submission repeated under its id is the same request, whatever became of it: nothing is done again.

        Raises what `SchedulerApi.submit` says, having done nothing.
        """
        submit, sampling = ask.submit, ask.submit.sampling
        if submit.request_id and self.requests.knows(submit.request_id):
            return Handle(submit.request_id, self.requests.index_of_same(submit, ask.user))
        if stopping:
            raise Unavailable("the coordinator is stopping", remedy="submit to another, or later")
        if self.registry.model is None:
            raise Unavailable("no worker has registered yet", remedy="start a worker, then retry")
        prompt = check_submit(submit, self.registry.model)
        length = Length(prompt.size, 0, sampling.max_tokens)
        check_fits(length, self.registry.capacities(), submit.prefill_mode)
        placement_table = self.dispatch.placement_table
        owner = ask.user, submit.tenant
        self.requests.check_room(owner, len(submit.prompt) + len(sampling.grammar), placement_table)
        request_index = self.parts.token_log.open(
            sampling.max_tokens, row_words(sampling.logprobs), tokens=self.first_tokens, owner=owner
        )
        request_id = submit.request_id or self._new_id()
        self.parts.token_log.times.submitted(request_index, now)
        submitted = RequestFacts(
            request_index,
            request_id,
            placement_table.next_rank(submit.priority, owner),
            ask.owner,
            ask.user,
            length.prompt,
            digest_of(submit.prompt),
            sampling,
            now + self.parts.wall_offset_s,
            submit.prefill_mode,
            submit.tenant,
            ask.chain.scope if ask.chain is not None else None,
            submit.trace,
            submit.draft_tokens,
        )
        facts = kept_facts(submitted)
        state = placement_table.add(facts, now, submit.prompt, sampling.grammar)
        state.chain, state.matches = ask.chain, ask.matches
        self.dispatch.dirty = True
        self.requests.add(self.start(state))
        self.parts.journal.accept(RequestAccepted(submitted, submit.prompt), state)
        return Handle(request_id, request_index)

    def start(self, state: RequestState, port: WorkerPort | None = None) -> Request:
        """Make the actor of a live request."""
        request = Request(state, self.parts, port)
        request.tell_history()
        return request

    def forget(self, request_indices: Sequence[int]) -> None:
        """These are over and taken off the list of requests: their outputs go, their indices may be taken again."""
        if request_indices:
            self.parts.journal.append(
                [RequestsForgotten(pack_int32(request_indices), self.parts.journal.state.arrivals)]
            )
        for request_index in request_indices:
            self.parts.listener.forgotten(request_index)
            self.parts.token_log.close(request_index)

    def _new_id(self) -> str:
        while True:
            self.ids_made += 1
            if not self.requests.knows(request_id := f"r{self.ids_made}"):
                return request_id
