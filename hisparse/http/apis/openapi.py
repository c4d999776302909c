"""GET /openapi.json: the paths, and what their bodies may say, from the types that read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Final

import msgspec

from hisparse.http.apis.body import ApiBody
from hisparse.http.apis.fields import is_raw
from hisparse.http.apis.known import APIS
from hisparse.http.apis.request_state import RequestProgress
from hisparse.http.apis.tokens import TOKEN_APIS
from hisparse.http.errors import STATUSES
from protocol.version import our_version

_JSON: Final = "application/json"
_STREAM: Final = "text/event-stream"
_REF: Final = "#/components/schemas/{name}"
#: Of what a client sent or cannot do now.
_REFUSALS: Final = tuple(str(it) for it in sorted(set(STATUSES.values())) if it not in (431, 505))


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct, frozen=True):
    """Of paths below /v1/messages it is Anthropic's, with `type` beside `error`."""

    error: ErrorDetail


class HealthAnswer(msgspec.Struct, frozen=True):
    status: str


class Version(msgspec.Struct, frozen=True):
    version: str


class Model(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    type: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int
    max_tokens: int


class Models(msgspec.Struct, frozen=True):
    object: str
    data: list[Model]
    has_more: bool
    first_id: str
    last_id: str


_GETS: Final[dict[str, tuple[str, type[msgspec.Struct] | None, str]]] = {
    "/health": ("Whether a request would be served", HealthAnswer, "getHealth"),
    "/metrics": ("Metrics, as Prometheus reads them", None, "getMetrics"),
    "/version": ("The version of hisparse", Version, "getVersion"),
    "/openapi.json": ("This document", None, "getOpenapi"),
    "/v1/models": ("The served model", Models, "listModels"),
    "/v1/models/{id}": ("The served model", Model, "getModel"),
    "/v1/parameters": ("The fields of bodies: served, ignored, accepted at some values only", None, "getParameters"),
    "/v1/requests/{id}": ("A request's life at the coordinator", RequestProgress, "getRequest"),
}
_SUMMARIES: Final = {
    "/v1/completions": "Text for a prompt",
    "/v1/chat/completions": "The next message of a conversation (OpenAI)",
    "/v1/messages": "The next message of a conversation (Anthropic)",
    "/v1/responses": "The next items of a conversation (OpenAI), without stored state",
    "/tokenize": "A text, or a conversation, as token ids",
    "/detokenize": "Token ids as text",
    "/v1/messages/count_tokens": "How many tokens a conversation has",
}


@cache
def document() -> bytes:
    """OpenAPI 3.1, as JSON."""
    bodies = {api.path: _shown(api.body) for api in (*APIS, *TOKEN_APIS)}
    replies = {api.path: api.reply for api in TOKEN_APIS}
    types = [*bodies.values(), *replies.values(), *(kind for _, kind, _ in _GETS.values() if kind), Error]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(map(id, types), schemas, strict=True))

    def schema_of(kind: type[Any] | None) -> dict[str, Any]:
        return {} if kind is None else by_type[id(kind)]

    paths: dict[str, Any] = {}
    for path, (summary, kind, name) in _GETS.items():
        content = _text() if path == "/metrics" else _json(schema_of(kind))
        paths[path] = {"get": _operation(name, summary, content, schema_of(Error), path)}
    for path, body in bodies.items():
        content = _json(schema_of(replies[path])) if path in replies else _json({"type": "object"}) | _events()
        operation = _operation(_name_of(path), _SUMMARIES[path], content, schema_of(Error), path)
        paths[path] = {"post": operation | {"requestBody": {"required": True, "content": _json(schema_of(body))}}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "HiSparse", "version": our_version()},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": _SECURITY},
            "security": [{}, *({name: []} for name in _SECURITY)],
        }
    )


_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _shown(body: type[ApiBody]) -> type[msgspec.Struct]:
    """`body` with the types that its raw fields are read as, in place of JSON of any kind."""
    hints = {field.name: field for field in msgspec.structs.fields(body)}
    members: list[Any] = []
    for name, field in hints.items():
        kind = body.raw_types.get(name, field.type)
        if name in body.neutral:
            accepted = {"enum": [None, *body.neutral[name]]}
            kind = Annotated[Any, msgspec.Meta(extra_json_schema=accepted)]
        optional = not field.required
        shown = kind | None if optional and name in body.raw_types else kind
        members.append((name, shown, None if is_raw(field.type) else field.default) if optional else (name, shown))
    return msgspec.defstruct(body.__name__, members, kw_only=True, forbid_unknown_fields=True)


def _operation(name: str, summary: str, content: dict[str, Any], error: dict[str, Any], path: str) -> dict[str, Any]:
    answers = {"200": {"description": "The answer", "content": content}}
    refused = {"description": "Refused, or failed", "content": _json(error)}
    answers |= dict.fromkeys(_REFUSALS, refused)
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": answers}
    if path.endswith("{id}"):
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path == "/health":
        answers["503"] = {"description": "Why it would not be served", "content": content}
        operation["security"] = [{}]
    return operation


def _name_of(path: str) -> str:
    words: Sequence[str] = path.removeprefix("/v1").strip("/").replace("_", "/").split("/")
    return "create" + "".join(word.capitalize() for word in words)


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {_JSON: {"schema": schema}}


def _events() -> dict[str, Any]:
    return {_STREAM: {"schema": {"type": "string"}}}


def _text() -> dict[str, Any]:
    return {"text/plain": {"schema": {"type": "string"}}}
