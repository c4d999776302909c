"""Requests that HTTP clients follow: submitted once, read by any number of followers, aborted when none is left.

    HTTP client ── follower ─┐
    HTTP client ── follower ─┴─ Output: tokens so far, then the end ── one task ── the coordinator

The task, not a follower, owns the submission, so that a client who disconnects in the middle of it leaves no
unowned request behind. When the last follower leaves, the request is aborted: at once if the front made its id; if
the client chose it, after a grace in which the same body under the same id finds it again, from the start.

Rejected: a connection to the coordinator for each HTTP client. No fan-out, but a Hello for each, and a client that
comes again under its id would find nothing to come back to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np
import trio

from basics.token_bucket import TokenBuckets, cost_of
from hisparse.client.client import Client
from hisparse.client.connection import ConnectionLost
from hisparse.client.token_stream import TokenStream
from hisparse.http.apis.asks import SampleAsk
from hisparse.http.errors import ending_error
from hisparse.http.link import CoordinatorLink
from hisparse.http.server.fairness.turns import Turns
from metrics.state import HttpCounters
from protocol.arrays import Int32Array
from protocol.errors import CapacityError, HiSparseError, InternalError, NotFound, WrongState
from protocol.logs import fields, logger
from protocol.messages import NO_LOGPROBS, Ended, TraceContext
from protocol.settings import CoordinatorSettings
from protocol.trace_context import headers_of

#: Submissions that the coordinator has not answered; of one API key.
SUBMITS_MAX: Final = 8
SUBMITS_PER_KEY: Final = 4
#: Of the rate that the coordinator hears, for submissions; the rest is for aborts and for what connections need.
RATE_SHARE: Final = 0.5
#: Between attempts to abort, over a connection that was lost or at a coordinator that has no hand free.
ABORT_INTERVAL_S: Final = 0.2
#: How often `settled` looks.
SETTLE_INTERVAL_S: Final = 0.02

log = logger("http.outputs")


class FollowedOutput:
    """One request of the coordinator: its tokens so far, and how it ended. Kept whole: followers begin at the start."""

    def __init__(
        self, choice: SampleAsk, owner: str, grace_s: float, now: float, trace: TraceContext | None = None
    ) -> None:
        self.choice = choice
        self.trace = trace
        self.owner = owner
        self.grace_s = grace_s
        self.began_at = now
        self.followers = 0
        self.chunks: list[tuple[Int32Array, Int32Array]] = []  # tokens, and their rows of log-probabilities
        self._accepted = False
        self._ended: Ended | None = None
        self._failure: HiSparseError | None = None
        self._changed = trio.Event()

    # ------------------------------------------------------------ for followers

    async def accepted(self) -> None:
        """Wait for the coordinator's word on it. Raises its refusal."""
        await self.until(lambda: self._accepted or self._failure is not None)
        if not self._accepted and self._failure is not None:
            raise self._failure

    async def read(self) -> AsyncIterator[tuple[list[int], Int32Array]]:
        """All tokens from the first on, as they come, with their rows int32[tokens, words], of 0 words where none are
        asked for. Those come in the pieces in which the coordinator delivered them. Raises what went wrong, at the
        latest Unavailable when the coordinator stays away."""
        at = 0
        while True:
            await self.until(partial(self._has_more, at))
            if len(self.chunks) > at:
                stop = at + 1 if self.choice.sampling.logprobs != NO_LOGPROBS else len(self.chunks)
                tokens, rows = zip(*self.chunks[at:stop], strict=True)
                at = stop
                yield np.concatenate(tokens).tolist(), np.concatenate(rows)
            elif self._failure is not None:
                raise self._failure
            else:
                return

    async def finished(self) -> bool:
        """Wait until nothing more will come; whether it is whole then."""
        await self.until(lambda: self._over)
        return self._ended is not None and self._ended.outcome == "FINISHED"

    @property
    def begun(self) -> bool:
        """Whether a token has come, or its end."""
        return self._has_more(0)

    def _has_more(self, at: int) -> bool:
        return len(self.chunks) > at or self._over

    @property
    def ended(self) -> Ended:
        """The last word, once `read` is over. Raises Aborted or Failed when it did not finish."""
        assert self._ended is not None
        if self._ended.outcome != "FINISHED":
            raise ending_error(self._ended)
        return self._ended

    # ------------------------------------------------------------ for Outputs

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    @property
    def _over(self) -> bool:
        return self._ended is not None or self._failure is not None

    def follow(self, change: int) -> None:
        self.followers += change
        self._tell()

    def accept(self) -> None:
        """The coordinator has the prompt: it is let go here."""
        self.choice = self.choice.without_prompt()
        self._accepted = True
        self._tell()

    def add(self, tokens: Int32Array, rows: Int32Array) -> None:
        self.chunks.append((tokens, rows))
        self._tell()

    def end(self, ended: Ended | None) -> None:
        self._ended = ended
        self._tell()

    def fail(self, error: HiSparseError) -> None:
        self._failure = error
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class FollowedOutputs:
    """All requests that are followed or not yet over. Its tasks run in `nursery`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        link: CoordinatorLink,
        counters: HttpCounters,
        rate: tuple[float, float] = (CoordinatorSettings().messages_per_s, CoordinatorSettings().messages_burst),
    ) -> None:
        """`rate` is what the coordinator hears of one peer, in a second and at once."""
        per_s, burst = rate
        self._pace: TokenBuckets[None] = TokenBuckets(RATE_SHARE * per_s, RATE_SHARE * burst, parties_max=1)
        self._nursery = nursery
        self._link = link
        self._counters = counters
        self._by_id: dict[str, FollowedOutput] = {}
        self._submits = Turns(SUBMITS_MAX, SUBMITS_PER_KEY)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def waiting(self) -> int:
        """Return how many wait to be submitted."""
        return self._submits.waiting

    @contextmanager
    def following(
        self, choice: SampleAsk, owner: str, grace_s: float, trace: TraceContext | None = None
    ) -> Iterator[FollowedOutput]:
        """The output of `choice`, submitted, as part of the span `trace`, unless it already is. Raises WrongState for
        the id of another request.

        On leaving it is abandoned, unless others follow: aborted after `grace_s`.
        """
        output = self._by_id.get(choice.request_id)
        if output is None:
            output = FollowedOutput(choice, owner, grace_s, trio.current_time(), trace)
            self._by_id[choice.request_id] = output
            self._nursery.start_soon(self._run, output)
        elif not output.choice.same_as(choice):
            raise WrongState(
                "is in use by another request", field="request_id", value=choice.request_id, remedy="choose another"
            )
        output.follow(1)
        try:
            yield output
        finally:
            output.follow(-1)

    async def settled(self) -> None:
        """Wait until the front's own requests, to which no client can return, have ended."""
        while any(not it.grace_s for it in self._by_id.values()):  # noqa: ASYNC110 - only at the end of the process
            await trio.sleep(SETTLE_INTERVAL_S)

    async def _run(self, output: FollowedOutput) -> None:
        try:
            client = self._link.client
            stream = await self._submit(client, output)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._abort_when_abandoned, client, output)
                await self._read(stream, output)
                nursery.cancel_scope.cancel()
        except HiSparseError as error:
            output.fail(error)
        except Exception:  # of one request: the others have done nothing
            log.exception("defect", extra=fields(request=output.choice.request_id))
            output.fail(InternalError("a defect of the HTTP front; its log says more"))
        finally:
            del self._by_id[output.choice.request_id]

    async def _submit(self, client: Client, output: FollowedOutput) -> TokenStream:
        """When it is the owner's turn: a prompt is written out for each of its samples, SUBMITS_MAX at the same time,
        and the coordinator has answered one before the next is sent. Past its rate it would hear the front no more, and
        that is every key."""
        async with self._submits.turn(output.owner):
            it = output.choice
            self._pace.spend(None, cost_of(it.prompt.nbytes + len(it.sampling.grammar)), trio.current_time())
            await trio.sleep_until(self._pace.free_at(None, trio.current_time()))
            stream = await client.submit(
                it.prompt,
                it.sampling,
                request_id=it.request_id,
                priority=it.priority,
                tenant=output.owner,
                cache_salt=it.cache_salt,
                draft_tokens=it.draft_tokens,
                **headers_of(output.trace),
            )
            output.accept()
        return stream

    async def _read(self, stream: TokenStream, output: FollowedOutput) -> None:
        try:
            async for tokens in stream:
                if not output.chunks:
                    self._counters.first_token_s.observe(trio.current_time() - output.began_at)
                output.add(tokens, stream.rows)
        except HiSparseError as error:
            output.fail(error)
        else:
            output.end(stream.ended)

    async def _abort_when_abandoned(self, client: Client, output: FollowedOutput) -> None:
        while True:
            await output.until(lambda: not output.followers)
            with trio.move_on_after(output.grace_s):
                await output.until(lambda: output.followers > 0)
                continue
            break
        self._counters.abandoned += 1
        log.info("abandoned", extra=fields(request=output.choice.request_id))
        await self._abort(client, output.choice.request_id)

    async def _abort(self, client: Client, request_id: str) -> None:
        """Its stream ends when that is done. A coordinator that stays away fails the stream."""
        while True:
            try:
                await client.abort([request_id])
            except (ConnectionLost, CapacityError):
                await trio.sleep(ABORT_INTERVAL_S)
            except (NotFound, WrongState):
                return  # it has ended meanwhile
            except HiSparseError as error:
                log.warning("not aborted", extra=fields(request=request_id, reason=str(error)))
                return
            else:
                return
