"""The ASGI application: paths, keys, limits; completions from ask to answer.

    GET  /health               200 while work would be taken, else 503 and why; no key needed
    GET  /metrics              what the exporter has, for load generators, which look for it beside the API
    GET  /v1/models[/ID]       the served model
    POST /v1/completions       text
    POST /v1/chat/completions  text, of a conversation

Whatever is refused is answered with OpenAI's error object and counted; whoever leaves is not.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec
import trio
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.scheduling.validation import check_name
from hisparse.http.answers import KEEPALIVE, Answer, Transcript, failure_event, model_card
from hisparse.http.api_keys import ApiKeys
from hisparse.http.asks import Ask, Served, ask_of
from hisparse.http.bodies import ChatBody, CompletionBody, read_body
from hisparse.http.errors import MethodRefused, Unauthorized
from hisparse.http.exchange import BODIES_BYTES_MAX, Budget, Exchange, Receive, Scope, Send
from hisparse.http.link import CoordinatorLink
from hisparse.http.outputs import FollowedOutput, FollowedOutputs
from metrics.state import HttpCounters
from protocol.errors import BadInput, CapacityError, HiSparseError, NotFound
from protocol.logs import fields, logger
from protocol.messages import NAME_CHARS_MAX
from protocol.settings import HttpSettings

#: Longest id of a client's choice, so that the numbers of its samples still fit.
ID_CHARS_MAX: Final = NAME_CHARS_MAX - len("-999")
#: Bodies that are decoded, rendered and tokenized at the same time, in threads beside the loop.
READERS_MAX: Final = 2
#: How long a stream may be silent.
KEEPALIVE_S: Final = 15.0

log = logger("http")

Handler = Callable[[Exchange], Awaitable[None]]


class Front:
    """Call it as ASGI has it. One task per exchange, cancelled when its client leaves."""

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
        self._budget = Budget(BODIES_BYTES_MAX)
        self._readers = trio.CapacityLimiter(READERS_MAX)
        self._created = int(time.time())
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            "/v1/completions": {"POST": partial(self._complete, kind=CompletionBody)},
            "/v1/chat/completions": {"POST": partial(self._complete, kind=ChatBody)},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._exchange(Exchange(scope, receive, send, self._budget))

    async def _exchange(self, exchange: Exchange) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.listen)
            with exchange.leaving:
                await self._serve(exchange)
            nursery.cancel_scope.cancel()
        route = self._route_name(exchange.path)
        if exchange.disconnected:
            self._counters.disconnects += 1
        else:
            self._counters.answers[route, str(exchange.status)] += 1

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self._find(exchange)(exchange)
        except HiSparseError as error:
            level = logging.DEBUG if isinstance(error, Unauthorized) else logging.INFO  # strangers fill no log
            log.log(level, "refused", extra=fields(path=exchange.path, code=error.code, reason=str(error)))
            await exchange.refuse(error)

    # ------------------------------------------------------------ paths

    def _route_name(self, path: str) -> str:
        """For metrics: few values, all of them ours."""
        return path if path in self._routes else "other"

    def _find(self, exchange: Exchange) -> Handler:
        """Raises Unauthorized, NotFound or MethodRefused."""
        path = exchange.path
        if path != "/health":
            self._keys.check(exchange.header("authorization"))
        model_id = path.removeprefix("/v1/models/")
        methods = self._routes.get(path) or ({"GET": partial(self._model, name=model_id)} if model_id != path else None)
        if methods is None:
            raise NotFound("no such path", field="path", value=path, remedy=f"known: {', '.join(self._routes)}")
        method = "GET" if exchange.method == "HEAD" else exchange.method  # the server leaves the body out
        if method not in methods:
            allowed = ", ".join(methods)
            raise MethodRefused(f"takes {allowed}", field="method", value=method, remedy=f"use {allowed}")
        return methods[method]

    async def _health(self, exchange: Exchange) -> None:
        reason = await self._link.refusal()
        await exchange.answer(503 if reason else 200, msgspec.json.encode({"status": reason or "ok"}))

    async def _metrics(self, exchange: Exchange) -> None:
        page = await trio.to_thread.run_sync(self._scrape, limiter=self._readers)
        await exchange.answer(200, page, {"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _models(self, exchange: Exchange) -> None:
        model = await self._link.client.model()
        cards = {"object": "list", "data": [model_card(model, self._created)]}
        await exchange.answer(200, msgspec.json.encode(cards))

    async def _model(self, exchange: Exchange, name: str) -> None:
        model = await self._link.client.model()
        if name != model.name:
            raise NotFound("is not served here", field="model", value=name, remedy=f"use {model.name}")
        await exchange.answer(200, msgspec.json.encode(model_card(model, self._created)))

    # ------------------------------------------------------------ completions

    async def _complete(self, exchange: Exchange, kind: type[CompletionBody] | type[ChatBody]) -> None:
        with self._place():
            began = trio.current_time()
            chosen = exchange.header("x-request-id")
            _check_id(chosen)
            ask_id = chosen or f"{'chatcmpl' if kind is ChatBody else 'cmpl'}-{uuid.uuid4().hex}"
            served = await self._link.served()
            async with exchange.body() as data:
                ask = await trio.to_thread.run_sync(_read, data, kind, served, ask_id, limiter=self._readers)
            with ExitStack() as stack:
                grace_s = self._settings.reattach_grace_s if chosen else 0.0
                outputs = [stack.enter_context(self._outputs.following(it, grace_s)) for it in ask.choices]
                for output in outputs:
                    await output.accepted()
                transcripts = [Transcript(served.tokenizer.detokenizer()) for _ in outputs]
                answer = Answer(ask, int(time.time()))
                how = _stream if ask.stream else _whole
                await how(exchange, answer, outputs, transcripts, {"x-request-id": ask_id})
            self._counters.answer_s.observe(trio.current_time() - began)
            tokens = sum(transcript.tokens for transcript in transcripts)
            told = fields(id=ask_id, path=exchange.path, prompt_tokens=ask.prompt_tokens, tokens=tokens)
            log.info("answered", extra=told)

    @contextmanager
    def _place(self) -> Iterator[None]:
        limit = self._settings.requests_max
        if self._counters.in_flight >= limit:
            raise CapacityError(
                f"{limit} requests are being answered", field="http.requests_max", value=limit, remedy="retry later"
            )
        self._counters.in_flight += 1
        try:
            yield
        finally:
            self._counters.in_flight -= 1


def _read(data: bytes, kind: type[CompletionBody] | type[ChatBody], served: Served, ask_id: str) -> Ask:
    """In a thread of its own: a long prompt takes a second to tokenize."""
    body = read_body(data, ChatBody) if kind is ChatBody else read_body(data, CompletionBody)
    return ask_of(body, served, ask_id, lambda form: datetime.now(UTC).strftime(form))


def _check_id(chosen: str) -> None:
    check_name("x-request-id", chosen, empty=True)
    if len(chosen) > ID_CHARS_MAX:
        text = f"longer than {ID_CHARS_MAX} characters"
        raise BadInput(text, field="x-request-id", value=f"{len(chosen)} characters", remedy="choose a shorter one")


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
    """The next event, a sign of life when none comes for a while, None after the last."""
    with trio.move_on_after(KEEPALIVE_S):
        try:
            return await events.receive()
        except trio.EndOfChannel:
            return None
    return KEEPALIVE


async def _live(receive: Receive, send: Send) -> None:
    """ASGI's lifespan protocol: nothing to set up that the process has not."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
