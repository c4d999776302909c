"""The application: paths, keys, limits. What is generated is hisparse.http.answering's.

    GET  /                             a page for people, unless `http.page` is off; its two files; no key needed
    GET  /health                       200 while a request would be served, else 503 and why; no key needed
    GET  /metrics                      what the exporter has, for load generators, which look for it beside the API
    GET  /version                      of hisparse
    GET  /openapi.json                 this table, and what bodies may say
    GET  /v1/models[/ID]               the served model
    GET  /v1/parameters                the fields of bodies
    GET  /v1/requests/ID               a request's life at the coordinator
    POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages       apis/known.py
    POST /tokenize, /detokenize, /v1/messages/count_tokens                        apis/tokens.py
    OPTIONS                            preflights of browsers, where `http.cors_origins` allows their origin; no key

Whatever is refused is answered with the error object of the path's API and counted. A client that disconnects gets no
answer and is not counted.

The coordinator hears the front as one client, whose messages all keys share. So few look at the life of a request at
once, one at a time of each key, and each look takes a while.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec
import trio
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from basics.rooms import RoomUse
from hisparse.http.answering import Answering
from hisparse.http.apis.asks import Served, check_model
from hisparse.http.apis.body import CHOICES_MAX, parameters, read_body
from hisparse.http.apis.decoding import nearest
from hisparse.http.apis.known import APIS
from hisparse.http.apis.large_bodies import LargeBodies
from hisparse.http.apis.openai.answers import model_card, model_page
from hisparse.http.apis.openapi import document
from hisparse.http.apis.request_state import RequestProgress, progress_of
from hisparse.http.apis.tokens import TOKEN_APIS, TokenApi
from hisparse.http.apis.tools import named_in_header
from hisparse.http.errors import MethodRefused, Unauthorized, anthropic_error_body, error_body, is_ours
from hisparse.http.link import CoordinatorLink
from hisparse.http.models.grammar_checks import GrammarChecks
from hisparse.http.models.renderers import Renderers
from hisparse.http.outputs import FollowedOutputs
from hisparse.http.page import FILES, HEADERS
from hisparse.http.server.api_keys import NO_OWNER, ApiKeys, KeyOwner
from hisparse.http.server.body_reader import BodyReader, place_in
from hisparse.http.server.cors import Cors
from hisparse.http.server.exchange import BODIES_BYTES_MAX, Channel, HttpExchange
from hisparse.http.server.fairness.shares import Shares
from hisparse.http.server.fairness.turns import Turns
from hisparse.http.server.identities import scoped_id
from hisparse.http.server.tracing import ServerTracing
from hisparse.http.server.wire import RequestHead
from metrics.state import HttpCounters
from protocol.errors import HiSparseError, NotFound
from protocol.logs import fields, logger
from protocol.messages import NAME_CHARS_MAX
from protocol.settings import HttpSettings
from protocol.trace_context import context_of_headers
from protocol.version import our_version

#: Looks at once; of one key.
LOOKS_MAX: Final = 8
LOOKS_PER_KEY: Final = 1
#: How long a look keeps its turn: at most 10 in a second of one key, and 80 of all.
LOOK_S: Final = 0.1


class ProgressWatch:
    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._turns = Turns(LOOKS_MAX, LOOKS_PER_KEY)

    async def of(self, request_id: str, key: KeyOwner) -> RequestProgress:
        """Look up a request whose id its client chose: other ids of an owner are not known here. Raises NotFound or
        Unavailable."""
        known = scoped_id(request_id, key.scope)
        if len(known) > NAME_CHARS_MAX:
            raise NotFound("no such request", field="path", value=request_id[:NAME_CHARS_MAX], remedy="check the id")
        async with self._turns.turn(key.name):
            try:
                row = (await self._link.client.request(known)).row
            except NotFound as error:
                raise NotFound("no such request", field="path", value=request_id, remedy="check the id") from error
            finally:
                await trio.sleep(LOOK_S)
        return progress_of(row, request_id)


#: Of a path, where it is told.
PATH_CHARS_MAX: Final = 100
#: Paths whose errors are Anthropic's.
ANTHROPIC: Final = "/v1/messages"

log = logger("http")

#: The second argument is the owner of the API key.
Handler = Callable[[HttpExchange, KeyOwner], Awaitable[None]]


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
        tracing: ServerTracing | None = None,
    ) -> None:
        """`scrape` is called in a thread. `tracing` None: completions have no spans here."""
        self._tracing = tracing
        self._scrape = scrape
        self._keys = keys
        self._link = link
        self._counters = counters
        self._cors = Cors(settings.origins)
        self._budget = Shares(BODIES_BYTES_MAX)
        self._renderers = Renderers()
        self._large_bodies = LargeBodies()
        self._grammar_checks = GrammarChecks()
        self._body_reader = BodyReader(settings.requests_max, counters)
        self._gets = Shares(settings.requests_max)
        self._requests_max, self._outputs = settings.requests_max, outputs
        self._progress = ProgressWatch(link)
        self._scrape_threads = trio.CapacityLimiter(1)
        self._created = datetime.now(UTC).replace(microsecond=0)
        helpers = self._renderers, self._large_bodies, self._grammar_checks
        self.answering = Answering(settings, link, outputs, counters, self._body_reader, *helpers)
        self._pages = FILES if settings.page else {}
        self._generating = frozenset(api.path for api in APIS)
        self._routes = self._made_routes()

    def room_use(self) -> dict[str, RoomUse]:
        """Measure the front's rooms but for connections and traces (basics.rooms). From any thread."""
        choices = CHOICES_MAX * self._requests_max
        waiting = self._body_reader.waiting + self._outputs.waiting
        return self._body_reader.room_use() | {
            "http_gets": self._gets.use,
            "http_body_bytes": self._budget.use,
            "http_outputs": RoomUse(len(self._outputs), choices),
            "http_turns": RoomUse(waiting, choices),
            "http_grammars": self._grammar_checks.use,
        }

    def _made_routes(self) -> dict[str, dict[str, Handler]]:
        """A path that ends with a slash is one for all names behind it, the page apart."""
        generated: dict[str, dict[str, Handler]] = {
            api.path: {"POST": partial(self.answering.answer, api=api)} for api in APIS
        }
        counted: dict[str, dict[str, Handler]] = {
            api.path: {"POST": partial(self._tokens, api=api)} for api in TOKEN_APIS
        }
        pages: dict[str, dict[str, Handler]] = {path: {"GET": self._page} for path in self._pages}
        return {
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/version": {"GET": self._version},
            "/openapi.json": {"GET": self._openapi},
            "/v1/models": {"GET": self._models},
            "/v1/models/": {"GET": self._model},
            "/v1/parameters": {"GET": self._parameters},
            "/v1/requests/": {"GET": self._request},
            **generated,
            **counted,
            **pages,
        }

    def close(self) -> None:
        """Once nothing is served any more."""
        self._renderers.close()
        self._large_bodies.close()
        self._grammar_checks.close()

    async def serve(self, head: RequestHead, channel: Channel) -> None:
        """Answer one request. Raises nothing that a client can bring about."""
        exchange = HttpExchange(head, channel, self._budget, self._cors.headers(head.header("origin")))
        preflight = self._cors.preflight(head)
        span = None
        if head.method == "POST" and exchange.path in self._generating:
            exchange.trace = context_of_headers(head.headers)
            span = self._tracing.begin(exchange) if self._tracing is not None else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.watch)
            with exchange.leaving:
                if preflight is None:
                    await self._answer(exchange)
                else:  # before the keys: a browser sends none with it
                    await exchange.answer_without_body(preflight)
            nursery.cancel_scope.cancel()
        route = self._route_of(exchange.path) or "other"  # for metrics: few values, all of them ours
        if span is not None and self._tracing is not None and exchange.status != 401:  # spans are for those with a key
            self._tracing.end(span, exchange, route)
        if exchange.disconnected:
            self._counters.disconnects += 1
        else:
            self._counters.answers[route, str(exchange.status)] += 1

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            await self._dispatch(exchange)
        except HiSparseError as error:
            level = logging.ERROR if is_ours(error) else logging.INFO
            if isinstance(error, Unauthorized):  # strangers fill no log
                level = logging.DEBUG
            told = {"path": exchange.path[:PATH_CHARS_MAX], "code": error.code, "reason": str(error)}
            log.log(level, "refused", extra=fields(**told, **exchange.logged_ids))
            if not exchange.status:
                body = anthropic_error_body if exchange.path.startswith(ANTHROPIC) else error_body
                await exchange.refuse(error, body)

    # ------------------------------------------------------------ paths

    def _route_of(self, path: str) -> str:
        """The key of `_routes`, "" when there is none. Names of models and requests are behind their paths."""
        if path in self._routes and (path in self._pages or not path.endswith("/")):
            return path
        return next((it for it in ("/v1/models/", "/v1/requests/") if path.startswith(it) and path != it), "")

    async def _dispatch(self, exchange: HttpExchange) -> None:
        """Raises Unauthorized, CapacityError, or what the handler of the path does."""
        if exchange.path == "/health" or exchange.path in self._pages:  # its connection may be closed meanwhile
            await self._find(exchange)(exchange, NO_OWNER)
            return
        owner = self._keys.check(_authorization(exchange))
        await exchange.admit(owner.name)
        handler = self._find(exchange)
        if exchange.method == "POST":  # takes a place of the body reader's once its body is there
            await handler(exchange, owner)
        else:
            with place_in(self._gets, owner.name):
                await handler(exchange, owner)

    def _find(self, exchange: HttpExchange) -> Handler:
        """Raises NotFound or MethodRefused."""
        path = exchange.path
        route = self._route_of(path)
        if not route:
            told = path[:PATH_CHARS_MAX]
            known = [it for it in self._routes if it not in self._pages]
            raise NotFound(
                "no such path",
                field="path",
                value=told,
                remedy=nearest(told, known, f"known: {', '.join(known)}"),
            )
        methods = self._routes[route]
        method = "GET" if exchange.method == "HEAD" else exchange.method  # the connection leaves the body out
        if method not in methods:
            text = ", ".join(methods)
            allowed = [it for known in methods for it in ((known, "HEAD") if known == "GET" else (known,))]
            raise MethodRefused(f"takes {text}", value=method, remedy=f"use {text}", allowed=allowed)
        return methods[method]

    async def _page(self, exchange: HttpExchange, _: KeyOwner) -> None:
        kind, content = self._pages[exchange.path]
        await exchange.answer(200, content, {"content-type": kind, **HEADERS})

    async def _health(self, exchange: HttpExchange, _: KeyOwner) -> None:
        reason = await self._link.unready()
        await exchange.answer(503 if reason else 200, msgspec.json.encode({"status": reason or "ok"}))

    async def _metrics(self, exchange: HttpExchange, _: KeyOwner) -> None:
        page = await trio.to_thread.run_sync(self._scrape, limiter=self._scrape_threads)
        await exchange.answer(200, page, {"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _version(self, exchange: HttpExchange, _: KeyOwner) -> None:
        await exchange.answer(200, msgspec.json.encode({"version": our_version()}))

    async def _openapi(self, exchange: HttpExchange, _: KeyOwner) -> None:
        await exchange.answer(200, document())

    async def _parameters(self, exchange: HttpExchange, _: KeyOwner) -> None:
        told = {api.path: parameters(api.body) for api in (*APIS, *TOKEN_APIS)}
        await exchange.answer(200, msgspec.json.encode(told))

    async def _models(self, exchange: HttpExchange, _: KeyOwner) -> None:
        model = await self._link.client.model()
        await exchange.answer(200, msgspec.json.encode(model_page(model, self._created)))

    async def _model(self, exchange: HttpExchange, _: KeyOwner) -> None:
        name, model = exchange.path.removeprefix("/v1/models/"), await self._link.client.model()
        check_model(name, model)
        await exchange.answer(200, msgspec.json.encode(model_card(model, self._created)))

    async def _request(self, exchange: HttpExchange, key: KeyOwner) -> None:
        told = await self._progress.of(exchange.path.removeprefix("/v1/requests/"), key)
        await exchange.answer(200, msgspec.json.encode(told), {"cache-control": "no-store"})

    async def _tokens(self, exchange: HttpExchange, key: KeyOwner, api: TokenApi) -> None:
        served = await self._link.served()

        with ExitStack() as place:
            read = partial(self._reply, api=api, served=served)
            reply, skipped = await self._body_reader.receive(exchange, key.name, place, read)
            await exchange.answer(200, reply, named_in_header(skipped))

    def _reply(self, data: bytearray, api: TokenApi, served: Served) -> tuple[bytes, Sequence[str]]:
        """In a thread. Raises HiSparseError."""
        self._large_bodies.check(data, api.body, served.model, served.tokenizer)
        reply, skipped = api.answer(read_body(data, api.body), served, self._renderers.render)
        return msgspec.json.encode(reply), skipped


def _authorization(exchange: HttpExchange) -> str:
    """As OpenAI's clients send a key, or as Anthropic's do."""
    key = exchange.header("x-api-key")
    return exchange.header("authorization") or (f"Bearer {key}" if key else "")
