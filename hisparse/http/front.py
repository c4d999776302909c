"""The application: paths, keys, limits; completions from ask to answer.

    GET  /health               200 while a request would be served, else 503 and why; no key needed
    GET  /metrics              what the exporter has, for load generators, which look for it beside the API
    GET  /version              of hisparse
    GET  /v1/models[/ID]       the served model
    GET  /v1/parameters        the fields of a body
    POST /v1/completions       text
    POST /v1/chat/completions  text, of a conversation
    OPTIONS                    preflights of browsers, where `http.cors_origins` allows their origin; no key needed

Whatever is refused is answered with OpenAI's error object and counted. A client that disconnects gets no answer
and is not counted.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

import msgspec
import trio
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.scheduling.validation import check_name
from hisparse.http.answers import KEEPALIVE, Answer, Transcript, failure_event, model_card
from hisparse.http.api_keys import NO_OWNER, OWNER_CHARS, ApiKeys, KeyOwner
from hisparse.http.asks import Ask, ask_of
from hisparse.http.bodies import ChatBody, CompletionBody, parameters, read_body
from hisparse.http.cors import Cors
from hisparse.http.decoding import nearest
from hisparse.http.errors import ContextExceeded, MethodRefused, Unauthorized
from hisparse.http.exchange import BODIES_BYTES_MAX, Channel, Exchange
from hisparse.http.large_bodies import LargeBodies
from hisparse.http.link import CoordinatorLink
from hisparse.http.outputs import FollowedOutput, FollowedOutputs
from hisparse.http.renderers import Renderers
from hisparse.http.shares import Shares
from hisparse.http.turns import Turns
from hisparse.http.wire import RequestHead
from metrics.state import HttpCounters
from protocol.errors import BadInput, CapacityError, HiSparseError, NotFound, Unavailable
from protocol.logs import fields, logger
from protocol.messages import NAME_CHARS_MAX
from protocol.settings import HttpSettings
from protocol.version import our_version

#: Longest id of a client's choice, so that its owner and the numbers of its samples still fit.
ID_CHARS_MAX: Final = NAME_CHARS_MAX - len("-999") - len(".") - OWNER_CHARS
#: Bodies that are decoded, rendered and tokenized at the same time, in threads beside the loop; of one API key.
READERS_MAX: Final = 4
READERS_PER_KEY: Final = 2
#: Of a path, where it is told.
PATH_CHARS_MAX: Final = 100
#: How long a stream may be silent.
KEEPALIVE_S: Final = 15.0
#: How often to look whether a worker could take a request.
UNSERVED_POLL_S: Final = 1.0

log = logger("http")

#: The second argument is the owner of the API key.
Handler = Callable[[Exchange, KeyOwner], Awaitable[None]]


class Front:
    """`serve` is the handler of every connection. What works on an answer is cancelled when its client leaves."""

    def __init__(
        self,
        settings: HttpSettings,
        keys: ApiKeys,
        link: CoordinatorLink,
        outputs: FollowedOutputs,
        counters: HttpCounters,
        scrape: Callable[[], bytes],
    ) -> None:
        """`scrape` is called in a thread."""
        self._scrape = scrape
        self._settings = settings
        self._keys = keys
        self._link = link
        self._outputs = outputs
        self._counters = counters
        self._cors = Cors(settings.origins)
        self._budget = Shares(BODIES_BYTES_MAX)
        self._arriving = Shares(settings.requests_max)
        self._places = Shares(settings.requests_max)
        self._readers = Turns(READERS_MAX, READERS_PER_KEY)
        self._reader_threads = trio.CapacityLimiter(READERS_MAX)
        self._renderers = Renderers()
        self._large_bodies = LargeBodies()
        self._scrape_threads = trio.CapacityLimiter(1)
        self._created = int(time.time())
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            "/v1/parameters": {"GET": self._parameters},
            "/v1/completions": {"POST": partial(self._complete, kind=CompletionBody)},
            "/v1/chat/completions": {"POST": partial(self._complete, kind=ChatBody)},
        }

    def close(self) -> None:
        """Once nothing is served any more."""
        self._renderers.close()
        self._large_bodies.close()

    async def serve(self, head: RequestHead, channel: Channel) -> None:
        """Answer one request. Raises nothing that a client can bring about."""
        exchange = Exchange(head, channel, self._budget, self._cors.headers(head.header("origin")))
        preflight = self._cors.preflight(head)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.watch)
            with exchange.leaving:
                if preflight is None:
                    await self._answer(exchange)
                else:  # before the keys: a browser sends none with it
                    await exchange.answer_without_body(preflight)
            nursery.cancel_scope.cancel()
        route = self._route_name(exchange.path)
        if exchange.disconnected:
            self._counters.disconnects += 1
        else:
            self._counters.answers[route, str(exchange.status)] += 1

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._dispatch(exchange)
        except HiSparseError as error:
            level = logging.DEBUG if isinstance(error, Unauthorized) else logging.INFO  # strangers fill no log
            log.log(
                level, "refused", extra=fields(path=exchange.path[:PATH_CHARS_MAX], code=error.code, reason=str(error))
            )
            if not exchange.status:
                await exchange.refuse(error)

    # ------------------------------------------------------------ paths

    def _route_name(self, path: str) -> str:
        """For metrics: few values, all of them ours."""
        return path if path in self._routes else "other"

    async def _dispatch(self, exchange: Exchange) -> None:
        """Raises Unauthorized, or what the handler of the path does."""
        owner = NO_OWNER
        if exchange.path != "/health":
            owner = self._keys.check(exchange.header("authorization"))
            exchange.hold()
        await self._find(exchange)(exchange, owner)

    def _find(self, exchange: Exchange) -> Handler:
        """Raises NotFound or MethodRefused."""
        path = exchange.path
        model_id = path.removeprefix("/v1/models/")
        methods = self._routes.get(path) or ({"GET": partial(self._model, name=model_id)} if model_id != path else None)
        if methods is None:
            told = path[:PATH_CHARS_MAX]
            remedy = nearest(told, self._routes, f"known: {', '.join(self._routes)}")
            raise NotFound("no such path", field="path", value=told, remedy=remedy)
        method = "GET" if exchange.method == "HEAD" else exchange.method  # the connection leaves the body out
        if method not in methods:
            text = ", ".join(methods)
            allowed = [it for known in methods for it in ((known, "HEAD") if known == "GET" else (known,))]
            raise MethodRefused(f"takes {text}", value=method, remedy=f"use {text}", allowed=allowed)
        return methods[method]

    async def _health(self, exchange: Exchange, _: KeyOwner) -> None:
        reason = await self._link.unready()
        await exchange.answer(503 if reason else 200, msgspec.json.encode({"status": reason or "ok"}))

    async def _metrics(self, exchange: Exchange, _: KeyOwner) -> None:
        page = await trio.to_thread.run_sync(self._scrape, limiter=self._scrape_threads)
        await exchange.answer(200, page, {"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _version(self, exchange: Exchange, _: KeyOwner) -> None:
        await exchange.answer(200, msgspec.json.encode({"version": our_version()}))

    async def _parameters(self, exchange: Exchange, _: KeyOwner) -> None:
        completions, chats = parameters(CompletionBody), parameters(ChatBody)
        told = {"/v1/completions": completions, "/v1/chat/completions": chats}
        await exchange.answer(200, msgspec.json.encode(told))

    async def _models(self, exchange: Exchange, _: KeyOwner) -> None:
        model = await self._link.client.model()
        cards = {"object": "list", "data": [model_card(model, self._created)]}
        await exchange.answer(200, msgspec.json.encode(cards))

    async def _model(self, exchange: Exchange, _: KeyOwner, name: str) -> None:
        model = await self._link.client.model()
        if name != model.name:
            raise NotFound("is not served here", field="model", value=name, remedy=f"use {model.name}")
        await exchange.answer(200, msgspec.json.encode(model_card(model, self._created)))

    # ------------------------------------------------------------ completions

    async def _complete(self, exchange: Exchange, key: KeyOwner, kind: type[CompletionBody] | type[ChatBody]) -> None:
        began, owner = trio.current_time(), key.name
        chosen = exchange.header("x-request-id")
        _check_id(chosen)
        ask_id = chosen or f"{'chatcmpl' if kind is ChatBody else 'cmpl'}-{uuid.uuid4().hex}"
        served = await self._link.served()
        scope = key.scope if chosen else ""
        asked = partial(
            ask_of,
            served=served,
            ask_id=ask_id,
            render=self._renderers.render,
            scope=scope,
            priority_max=key.priority_max,
        )
        check = partial(
            self._large_bodies.check,
            kind=kind,
            model=served.model,
            tokenizer=served.tokenizer,
        )
        read = partial(_read, kind=kind, check=check, ask_of_body=asked)
        with ExitStack() as stack:
            ask = await self._receive(exchange, owner, stack, read)
            grace_s = self._settings.reattach_grace_s if chosen else 0.0
            outputs = [stack.enter_context(self._outputs.following(it, owner, grace_s)) for it in ask.choices]
            ask = ask.without_prompts()
            for output in outputs:
                await _accepted(output, kind)
            transcripts = [Transcript(served.tokenizer.detokenizer()) for _ in outputs]
            answer = Answer(ask, int(time.time()))
            begun = partial(self._until_served, outputs) if ask.stream else partial(_all_finished, outputs)
            await self._bounded(outputs, begun)
            how = _stream if ask.stream else _whole
            await how(exchange, answer, outputs, transcripts, {"x-request-id": ask_id})
        self._counters.answer_s.observe(trio.current_time() - began)
        tokens = sum(transcript.tokens for transcript in transcripts)
        told = fields(id=ask_id, path=exchange.path, prompt_tokens=ask.prompt_tokens, tokens=tokens)
        log.info("answered", extra=told)

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

    async def _receive(
        self, exchange: Exchange, owner: str, place: ExitStack, read: Callable[[bytearray], Ask | HiSparseError]
    ) -> Ask:
        """The body, read in a thread when it is the owner's turn. `place` is entered once the body is there, so a
        client that only announces a body takes no place. Its bytes are free when this returns."""
        with ExitStack() as arriving:
            arriving.enter_context(self._share(self._arriving, owner))
            async with exchange.body(owner) as data:
                arriving.close()
                place.enter_context(self._share(self._places, owner))
                async with self._readers.turn(owner):
                    return await self._in_thread(partial(read, data))

    async def _in_thread(self, read: Callable[[], Ask | HiSparseError]) -> Ask:
        """Raises what `read` returns as an error. One that it raised would be part of a cycle with the frames of the
        thread, which hold the body, until a full collection."""
        result = await trio.to_thread.run_sync(read, limiter=self._reader_threads)
        if isinstance(result, Ask):
            return result
        try:
            raise result
        finally:
            del result

    @contextmanager
    def _share(self, shares: Shares, owner: str) -> Iterator[None]:
        if not shares.take(owner):
            raise CapacityError(
                f"{shares.limit} requests are being answered, and this key has its share of them",
                field="http.requests_max",
                value=shares.limit,
                remedy="retry later",
            )
        self._counters.in_flight = self._places.total
        try:
            yield
        finally:
            shares.give(owner)
            self._counters.in_flight = self._places.total


def _read(
    data: bytearray,
    *,
    kind: type[CompletionBody] | type[ChatBody],
    check: Callable[[bytearray], None],
    ask_of_body: Callable[[CompletionBody | ChatBody], Ask],
) -> Ask | HiSparseError:
    """In a thread: a long prompt takes a second to tokenize."""
    try:
        check(data)
        body = read_body(data, ChatBody) if kind is ChatBody else read_body(data, CompletionBody)
        return ask_of_body(body)
    except HiSparseError as error:
        return error.with_traceback(None)


async def _accepted(output: FollowedOutput, kind: type[CompletionBody] | type[ChatBody]) -> None:
    """What would not fit an empty cluster either is the prompt's fault, not that of load."""
    try:
        await output.accepted()
    except CapacityError as error:
        if error.field != "prompt":
            raise
        field = "messages" if kind is ChatBody else "prompt"
        raise ContextExceeded(error.message, field=field, remedy="shorten it, or ask for fewer tokens") from error


def _check_id(chosen: str) -> None:
    check_name("x-request-id", chosen, empty=True)
    if len(chosen) > ID_CHARS_MAX:
        text = f"longer than {ID_CHARS_MAX} characters"
        raise BadInput(text, field="x-request-id", value=f"{len(chosen)} characters", remedy="choose a shorter one")


async def _all_finished(outputs: Sequence[FollowedOutput]) -> None:
    """Wait until all outputs are whole, or one of them goes wrong."""
    for output in outputs:
        if not await output.finished():
            return


async def _whole(
    exchange: Exchange,
    answer: Answer,
    outputs: Sequence[FollowedOutput],
    transcripts: Sequence[Transcript],
    headers: dict[str, str],
) -> None:
    texts = []
    for output, transcript in zip(outputs, transcripts, strict=True):
        pieces = [transcript.push(tokens) async for tokens in output.read()]
        texts.append("".join([*pieces, transcript.end(output.ended)]))
    await exchange.answer(200, answer.whole(texts, transcripts), headers)


async def _stream(
    exchange: Exchange,
    answer: Answer,
    outputs: Sequence[FollowedOutput],
    transcripts: Sequence[Transcript],
    headers: dict[str, str],
) -> None:
    """The status is sent by the time an output goes wrong: a last event says so, and [DONE] does not follow."""
    await exchange.open_stream(headers)
    for opening in answer.opening():
        await exchange.write(opening)
    tell, events = trio.open_memory_channel[bytes | HiSparseError](0)
    failed = False
    async with trio.open_nursery() as nursery, events:
        async with tell:
            for index in range(len(outputs)):
                nursery.start_soon(_narrate, index, answer, outputs[index], transcripts, tell.clone())
        while (event := await _next(events)) is not None:
            failed = isinstance(event, HiSparseError)
            await exchange.write(failure_event(event) if isinstance(event, HiSparseError) else event)
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
            async for tokens in output.read():
                if text := transcript.push(tokens):
                    await tell.send(answer.delta(index, text, transcripts))
            await tell.send(answer.last(index, transcript.end(output.ended), transcripts))
        except HiSparseError as error:
            await tell.send(error)


async def _next(events: trio.MemoryReceiveChannel[bytes | HiSparseError]) -> bytes | HiSparseError | None:
    """The next event, a keepalive when none comes for a while, None after the last."""
    with trio.move_on_after(KEEPALIVE_S):
        try:
            return await events.receive()
        except trio.EndOfChannel:
            return None
    return KEEPALIVE
