"""Answers that are generated: from a body to requests of the coordinator, and from their outputs to its answer."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import trio

from basics.request_checks import check_name
from hisparse.http.apis.asks import Ask, Served, ask_of
from hisparse.http.apis.body import read_body
from hisparse.http.apis.generation import Generation
from hisparse.http.apis.known import Api
from hisparse.http.apis.large_bodies import LargeBodies
from hisparse.http.apis.logprobs import ToldTokens
from hisparse.http.apis.tools import named_in_header
from hisparse.http.apis.transcript import Answer, Transcript
from hisparse.http.errors import ContextExceeded
from hisparse.http.link import CoordinatorLink
from hisparse.http.models.formats.replies import Piece
from hisparse.http.models.grammar_checks import GrammarChecks
from hisparse.http.models.renderers import Renderers
from hisparse.http.outputs import FollowedOutput, FollowedOutputs
from hisparse.http.server.api_keys import OWNER_CHARS, KeyOwner
from hisparse.http.server.body_reader import BodyReader, in_thread
from hisparse.http.server.exchange import HttpExchange
from hisparse.http.server.fairness.turns import Turns
from hisparse.http.server.identities import IDEMPOTENCY_KEY
from metrics.state import HttpCounters
from protocol.errors import BadInput, CapacityError, HiSparseError, Unavailable
from protocol.logs import fields, logger
from protocol.messages import NAME_CHARS_MAX
from protocol.settings import HttpSettings

#: Longest id of a client's choice, so that its owner and the numbers of its samples still fit.
ID_CHARS_MAX: Final = NAME_CHARS_MAX - len("-999") - len(".") - OWNER_CHARS
#: Grammars that are built at the same time; of one API key.
BUILDERS_MAX: Final = 4
BUILDERS_PER_KEY: Final = 1
#: How long a stream may be silent.
KEEPALIVE_S: Final = 15.0
#: How often to look whether a worker could take a request.
UNSERVED_POLL_S: Final = 1.0

log = logger("http")


class Answering:
    """Each `answer` is cancelled when its client leaves."""

    def __init__(
        self,
        settings: HttpSettings,
        link: CoordinatorLink,
        outputs: FollowedOutputs,
        counters: HttpCounters,
        body_reader: BodyReader,
        renderers: Renderers,
        large_bodies: LargeBodies,
        grammar_checks: GrammarChecks,
    ) -> None:
        self._settings = settings
        self._link = link
        self._outputs = outputs
        self._counters = counters
        self._body_reader = body_reader
        self._renderers = renderers
        self._large_bodies = large_bodies
        self._grammar_checks = grammar_checks
        self._builders = Turns(BUILDERS_MAX, BUILDERS_PER_KEY)
        self._build_threads = trio.CapacityLimiter(BUILDERS_MAX)

    async def answer(self, exchange: HttpExchange, key: KeyOwner, api: Api) -> None:
        """Raises HiSparseError for what is refused, or goes wrong before an answer has begun."""
        began, owner = trio.current_time(), key.name
        chosen = exchange.header(IDEMPOTENCY_KEY)
        _check_id(chosen)
        ask_id = chosen or api.prefix + uuid.uuid4().hex
        served = await self._link.served()
        asked = partial(
            ask_of,
            served=served,
            ask_id=ask_id,
            render=self._renderers.render,
            scope=key.scope if chosen else "",
            priority_max=key.priority_max,
        )
        check = partial(self._large_bodies.check, kind=api.body, model=served.model, tokenizer=served.tokenizer)
        read = partial(_read, api=api, check=check, ask_of_body=asked)
        with ExitStack() as stack:
            ask = await self._with_grammar(await self._body_reader.receive(exchange, owner, stack, read), served, owner)
            grace_s = self._settings.reattach_grace_s if chosen else 0.0
            outputs = [
                stack.enter_context(self._outputs.following(it, owner, grace_s, exchange.trace)) for it in ask.choices
            ]
            ask = ask.without_prompts()
            for output in outputs:
                await _accepted(output, api.prompt)
            exchange.identify(ask_id, dict.fromkeys(api.id_headers, outputs[0].choice.request_id))
            transcripts = [_transcript(ask, served) for _ in outputs]
            answer = api.answer(ask, await self._created(outputs[0], chosen))
            begun = partial(self._until_served, outputs) if ask.stream else partial(_all_finished, outputs)
            await self._bounded(outputs, begun)
            how = _stream if ask.stream else _whole
            exchange.tell(named_in_header(ask.skipped))
            await how(exchange, answer, outputs, transcripts)
        self._counters.answer_s.observe(trio.current_time() - began)
        tokens = sum(transcript.tokens for transcript in transcripts)
        told = {"id": ask_id, "path": exchange.path, "prompt_tokens": ask.prompt_tokens, "tokens": tokens}
        log.info("answered", extra=fields(**told, **exchange.logged_ids))

    async def _with_grammar(self, ask: Ask, served: Served, owner: str) -> Ask:
        """Raises BadInput for a form that no grammar can be built of. No body that is read waits for one."""
        if ask.form is None:
            return ask
        about = ask.form, served.model, served.tokenizer
        grammar = self._grammar_checks.known(*about)
        if grammar is None:
            async with self._builders.turn(owner):
                grammar = await in_thread(partial(self._grammar_checks.check, *about), self._build_threads)
        return ask.held_to(grammar)

    async def _created(self, output: FollowedOutput, chosen: str) -> int:
        """Seconds since 1970. Of an id that the client chose, when the coordinator first had it, so that it is answered
        alike each time."""
        if chosen:
            try:
                first = (await self._link.client.request(output.choice.request_id)).history[0]
            except HiSparseError:
                return int(time.time())  # the coordinator has forgotten it, or is away
            return int(first.at_s)
        return int(time.time())

    async def _until_served(self, outputs: Sequence[FollowedOutput]) -> None:
        """Until an output has begun, or a worker takes requests: from then on a stream may be silent."""
        while not any(it.begun for it in outputs) and await self._link.unserved():  # noqa: ASYNC110 - it is asked
            await trio.sleep(UNSERVED_POLL_S)

    async def _bounded(self, outputs: Sequence[FollowedOutput], step: Callable[[], Awaitable[None]]) -> None:
        """Await `step`. Raises Unavailable once no worker could have taken an output for `http.worker_wait_s`."""
        refusals: list[Unavailable] = []
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                refusals.append(await self._refusal(outputs))
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await step()
            refusals.clear()
            nursery.cancel_scope.cancel()
        if refusals:
            raise refusals[0]

    async def _refusal(self, outputs: Sequence[FollowedOutput]) -> Unavailable:
        """Of the request whose first output that has not begun could be taken by no worker, for long enough. What that
        output itself waits for is asked last: on a worker that drains it waits for nothing."""
        limit_s, since = self._settings.worker_wait_s, math.inf
        while True:
            reason, now = await self._link.unserved(), trio.current_time()
            since = min(since, now) if reason else math.inf
            waiting = next((it for it in outputs if not it.begun), None)
            if now >= since + limit_s and waiting:
                if why := await self._link.waits_unserved(waiting.choice.request_id):
                    text = f"no worker can take the request, for {limit_s:g} s: {why}"
                    return Unavailable(text, remedy="retry later")
                since = now
            left_s = since + limit_s - now
            await trio.sleep(left_s if 0 < left_s < UNSERVED_POLL_S else UNSERVED_POLL_S)


def _read(
    data: bytearray, *, api: Api, check: Callable[[bytearray], None], ask_of_body: Callable[[Generation], Ask]
) -> Ask:
    """In a thread: a long prompt takes a second to tokenize. Raises HiSparseError."""
    check(data)
    return ask_of_body(read_body(data, api.body).generation())


def _transcript(ask: Ask, served: Served) -> Transcript:
    told = ToldTokens(served.tokenizer) if ask.has_logprobs else None
    return Transcript(served.tokenizer.detokenizer(ask.shown), ask.plan, told, served.model.eos_token_ids)


async def _accepted(output: FollowedOutput, prompt: str) -> None:
    """What would not fit an empty cluster either is the prompt's fault, not that of load."""
    try:
        await output.accepted()
    except CapacityError as error:
        if error.field != "prompt":
            raise
        raise ContextExceeded(error.message, field=prompt, remedy="shorten it, or ask for fewer tokens") from error


def _check_id(chosen: str) -> None:
    check_name(IDEMPOTENCY_KEY, chosen, empty=True)
    if len(chosen) > ID_CHARS_MAX:
        text = f"longer than {ID_CHARS_MAX} characters"
        raise BadInput(text, field=IDEMPOTENCY_KEY, value=f"{len(chosen)} characters", remedy="choose a shorter one")


async def _all_finished(outputs: Sequence[FollowedOutput]) -> None:
    """Wait until all outputs are whole, or one of them goes wrong."""
    for output in outputs:
        if not await output.finished():
            return


async def _whole(
    exchange: HttpExchange,
    answer: Answer,
    outputs: Sequence[FollowedOutput],
    transcripts: Sequence[Transcript],
) -> None:
    said = []
    for output, transcript in zip(outputs, transcripts, strict=True):
        pieces: list[Piece] = []
        async for tokens, rows in output.read():
            pieces += transcript.push(tokens, rows)
        said.append([*pieces, *transcript.end(output.ended)])
    whole = partial(answer.whole, said, transcripts)  # log-probabilities may be megabytes
    body = await trio.to_thread.run_sync(whole) if any(it.told for it in transcripts) else whole()
    await exchange.answer(200, body)


async def _stream(
    exchange: HttpExchange,
    answer: Answer,
    outputs: Sequence[FollowedOutput],
    transcripts: Sequence[Transcript],
) -> None:
    """The status is sent by the time an output goes wrong: a last event says so."""
    await exchange.open_stream()
    for opening in answer.opening():
        await exchange.write(opening)
    tell, events = trio.open_memory_channel[bytes | HiSparseError](0)
    failed = False
    async with trio.open_nursery() as nursery, events:
        async with tell:
            for index in range(len(outputs)):
                nursery.start_soon(_narrate, index, answer, outputs[index], transcripts, tell.clone())
        while (event := await _next(events, answer.keepalive)) is not None:
            failed = isinstance(event, HiSparseError)
            await exchange.write(answer.failure(event) if isinstance(event, HiSparseError) else event)
            if failed:
                break
        nursery.cancel_scope.cancel()
    for closing in () if failed else answer.closing(transcripts):
        await exchange.write(closing)
    await exchange.close()


async def _narrate(
    index: int,
    answer: Answer,
    output: FollowedOutput,
    transcripts: Sequence[Transcript],
    tell: trio.MemorySendChannel[bytes | HiSparseError],
) -> None:
    """Tell what becomes of one choice."""
    transcript = transcripts[index]
    async with tell:
        try:
            async for tokens, rows in output.read():
                if told := answer.delta(index, transcript.push(tokens, rows), transcripts):
                    await tell.send(b"".join(told))
            await tell.send(b"".join(answer.last(index, transcript.end(output.ended), transcripts)))
        except HiSparseError as error:
            if told := answer.delta(index, transcript.break_off(), transcripts):
                await tell.send(b"".join(told))
            await tell.send(error)


async def _next(
    events: trio.MemoryReceiveChannel[bytes | HiSparseError], keepalive: bytes
) -> bytes | HiSparseError | None:
    """The next events, `keepalive` when none come for a while, None after the last."""
    with trio.move_on_after(KEEPALIVE_S):
        try:
            return await events.receive()
        except trio.EndOfChannel:
            return None
    return keepalive
