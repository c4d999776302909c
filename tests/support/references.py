"""The request types of the packages openai and anthropic, field by field, beside the types that read our bodies.

Each field of a reference gets a verdict from the product itself: taken, ignored for a reason, skipped, or refused by a
rule. A field that the product has no word for is `unknown`. With each goes a body that holds the field, so that a
verdict can be tried.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from typing_extensions import is_typeddict

from hisparse.http.apis.anthropic.bodies import CountBody, MessagesBody, ServerBlock
from hisparse.http.apis.body import ApiBody
from hisparse.http.apis.fields import ignored, rules_of
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.apis.responses.bodies import ResponsesBody
from hisparse.http.apis.responses.items import OF_OTHER_TOOLS

#: By name: the types of a reference, and the body that reads them.
REFERENCES: Final[dict[str, tuple[Any, type[ApiBody]]]] = {
    "openai.completions": (text_params.CompletionCreateParamsNonStreaming, CompletionBody),
    "openai.chat": (chat_params.CompletionCreateParamsNonStreaming, ChatBody),
    "openai.responses": (response_create_params.ResponseCreateParamsNonStreaming, ResponsesBody),
    "anthropic.messages": (message_create_params.MessageCreateParamsNonStreaming, MessagesBody),
    "anthropic.count_tokens": (message_count_tokens_params.MessageCountTokensParams, CountBody),
    "anthropic.beta.messages": (beta_create_params.MessageCreateParamsNonStreaming, MessagesBody),
    "anthropic.beta.count_tokens": (beta_count_tokens_params.MessageCountTokensParams, CountBody),
}

#: Sent as headers.
HEADERS: Final = ("betas",)
#: Kinds of objects, by the field that says the kind, that are refused by their name; why.
REFUSED_KINDS: Final = {
    "additional_tools": "tools are those of the body",
    "browser_state": "the model reads text",
    "clear_tool_uses_20250919": "only thinking is cleared",
    "compact_20260112": "conversations are not compacted here",
    "compaction": "conversations are not compacted here",
    "compaction_trigger": "conversations are not compacted here",
    "configuration_update": "a body has one configuration",
    "custom": "only functions are called here",
    "fallback": "there is one model",
    "function": "of role function: it is now tool",
    "item_reference": "nothing is stored",
    "search_result": "the model reads text",
    "tool_addition": "tools are those of the body",
    "tool_reference": "tools are those of the body",
    "tool_removal": "tools are those of the body",
}


@dataclass(frozen=True)
class Row:
    """A field, or one kind or value of it, at `path`. `body` holds it; `verdict` is taken, ignored, skipped, refused or
    unknown, `why` its reason or rule."""

    path: str
    verdict: str
    why: str
    body: Mapping[str, Any]


Build = Callable[[Any], dict[str, Any]]


def rows_of(reference: str) -> Iterator[Row]:
    kind, body = REFERENCES[reference]
    yield from _fields("", kind, body, lambda said: said, set())


def _fields(path: str, reference: Any, ours: type[msgspec.Struct], build: Build, seen: set[Any]) -> Iterator[Row]:
    place = reference, ours, role_of(path)
    if place in seen:
        return
    seen.add(place)
    known = {field.encode_name: field for field in msgspec.structs.fields(ours)}
    reasons, rules = ignored(ours), rules_of(ours)
    neutral = getattr(ours, "neutral", {})
    for name, hint in hints_of(reference).items():
        at = f"{path}.{name}".removeprefix(".")

        def whole(value: Any, name: str = name) -> dict[str, Any]:
            return build({**least(reference), name: value})

        sample, odd = whole(sample_of(hint)), whole({"a": "b"})
        if name in HEADERS and not path:
            continue
        if name == ours.__struct_config__.tag_field:
            yield Row(at, "taken", "", sample)
        elif name in reasons:
            yield Row(at, "ignored", reasons[name], sample)
        elif name in rules:
            yield Row(at, "refused", rules[name].why, odd)
        elif name in neutral:
            yield Row(at, "refused", f"but at {neutral[name]}", odd)
        elif name not in known:
            yield Row(at, "unknown", "", sample)
        else:
            told = getattr(ours, "raw_types", {}).get(name) or get_type_hints(ours)[known[name].name]
            yield from _values(at, hint, told, whole, seen)


def _values(path: str, hint: Any, told: Any, build: Build, seen: set[Any]) -> Iterator[Row]:
    """The kinds and values that a taken field has."""
    accepted = {text for part in options(told) if get_origin(part) is Literal for text in get_args(part)}
    is_any_text = str in options(told)
    for option, wrap in wrapped(hint):
        structs = [part for part in options(told) if isinstance(part, type) and issubclass(part, msgspec.Struct)]
        if is_typeddict(option) and structs:
            yield from _kind(path, option, structs, partial(_through, build, wrap), seen)
        elif get_origin(option) is Literal and accepted and not is_any_text:
            for text in get_args(option):
                why = "" if text in accepted else REFUSED_VALUES.get(text, "")
                verdict = "taken" if text in accepted else "refused" if why else "unknown"
                yield Row(f"{path}={text}", verdict, why, build(wrap(text)))
        elif option is not type(None) and not is_model(option):
            yield Row(path, "taken", "", build(wrap(sample_of(option))))


#: Values that are refused by their name; why.
REFUSED_VALUES: Final = {
    "message.output_text.logprobs": "responses have no log-probabilities",
    "low": "the model is told nothing of it",
    "high": "the model is told nothing of it",
}


#: Blocks that the reference allows in all messages, and that only one role can have said.
MISPLACED: Final[dict[str, tuple[str, ...]]] = {
    "user": ("thinking", "redacted_thinking", "tool_use"),
    "assistant": ("tool_result",),
}


def role_of(path: str) -> str:
    """The role of the message that a path leads into."""
    found = re.match(r"messages\[(\w+)\]", path)
    return found[1] if found else ""


def _kind(path: str, reference: Any, ours: list[Any], build: Build, seen: set[Any]) -> Iterator[Row]:
    """An object of `reference`, which says its kind by `type`, or by `role`."""
    hints = hints_of(reference)
    tag = next((text for name in ("type", "role") if name in hints for text in literals(hints[name])), "")
    at = f"{path}[{tag}]" if tag else path
    tagged = {part.__struct_config__.tag: part for part in ours}
    found = tagged.get(tag) or (ours[0] if len(ours) == 1 and _takes(ours[0], reference) else None)
    sample = build(least(reference))
    if tag in MISPLACED.get(role_of(path), ()):
        yield Row(at, "refused", f"is no part of a message of the {role_of(path)}", sample)
    elif found is not None and issubclass(found, ServerBlock):
        yield Row(at, "skipped", "", sample)
    elif found is not None and not found.__struct_config__.forbid_unknown_fields and not found.__struct_fields__:
        yield Row(at, "refused", "the model reads text", sample)
    elif found is not None:
        yield from _fields(at, reference, found, build, seen)
    elif path == "tool_choice":
        yield Row(at, "refused", "names a tool that is skipped", sample)
    elif path.endswith("tools") or (tag in OF_OTHER_TOOLS and path == "input"):
        yield Row(at, "skipped", "", sample)
    else:
        yield Row(at, "refused" if tag in REFUSED_KINDS else "unknown", REFUSED_KINDS.get(tag, ""), sample)


def _takes(ours: type[msgspec.Struct], reference: Any) -> bool:
    """Return whether the only type of ours is for this kind: by its tag, or the values of its field."""
    config = ours.__struct_config__
    for name, hint in hints_of(reference).items():
        if name in ("type", "role"):
            field = next((part for part in msgspec.structs.fields(ours) if part.encode_name == name), None)
            mine = {str(config.tag)} if config.tag_field == name else set()
            mine |= set(literals(get_type_hints(ours)[field.name])) if field is not None else set()
            if mine and not mine & set(literals(hint)):
                return False
    return True


def mended(said: Mapping[str, Any], body: type[ApiBody]) -> dict[str, Any]:
    """Add what one field needs of others: a prompt, a stream, a tool of the name that is chosen."""
    whole = dict(said) | {"model": None}
    if "input" in body.__struct_fields__:
        whole = {"input": "x"} | whole
    if "messages" in body.__struct_fields__ and whole["messages"][-1].get("role") != "user":
        whole["messages"] = [*whole["messages"], {"role": "user", "content": "x"}]
    for place in ("messages", "input"):
        if isinstance(whole.get(place), list):
            whole[place] = [CALLS[body], *(_of_call(turn) for turn in whole[place])] if body in CALLS else whole[place]
    if "stream_options" in whole:
        whole["stream"] = True
    if "top_logprobs" in whole and body is ChatBody:
        whole["logprobs"] = True
    if "tool_choice" in whole:
        whole["tools"] = [TOOLS[body]]
        whole["tool_choice"] = allowing(whole["tool_choice"], TOOLS[body])
    if isinstance(form := whole.get("response_format"), dict) and "json_schema" in form:
        whole["response_format"] = form | {"json_schema": {"schema": {}} | form["json_schema"]}
    return whole


def _of_call(turn: Any) -> Any:
    """A result of the call x, where the turn is one that does not say of which."""
    is_result = isinstance(turn, dict) and turn.get("type") == "function_call_output"
    return {"call_id": "x"} | turn if is_result else turn


#: A call x, as each body has it.
CALLS: Final[dict[type[ApiBody], Any]] = {
    ChatBody: {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "x", "arguments": "{}"}}]},
    ResponsesBody: {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"},
    MessagesBody: {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "x", "input": {}}]},
    CountBody: {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "x", "input": {}}]},
}


def allowing(choice: Any, tool: Any) -> Any:
    """A choice of allowed tools, with one."""
    if not isinstance(choice, dict) or choice["type"] != "allowed_tools":
        return choice
    if "allowed_tools" in choice:
        return choice | {"allowed_tools": choice["allowed_tools"] | {"tools": [tool]}}
    return choice | {"tools": [tool]}


#: A function x, as each body has it.
TOOLS: Final[dict[type[ApiBody], Any]] = {
    ChatBody: {"type": "function", "function": {"name": "x"}},
    ResponsesBody: {"type": "function", "name": "x"},
    MessagesBody: {"name": "x", "input_schema": {}},
    CountBody: {"name": "x", "input_schema": {}},
}


# ---------------------------------------------------------------- hints


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


_MARKS: Final = (
    *(Annotated, typing_extensions.Required, typing_extensions.NotRequired),
    *(typing_extensions.Annotated,),
)


def bare(hint: Any) -> Any:
    while get_origin(hint) in _MARKS:
        hint = get_args(hint)[0]
    return hint


def is_list(hint: Any) -> bool:
    origin = get_origin(hint)
    return origin is not None and origin not in (Union, types.UnionType, Literal, dict) and bool(get_args(hint))


def wrapped(hint: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """Each kind of value of a field, or of the elements of its arrays, and how the field holds one."""
    hint = bare(hint)
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from wrapped(part)
    elif is_list(hint):
        for part, wrap in wrapped(get_args(hint)[0]):
            yield part, partial(_through, _list_of, wrap)
    else:
        yield hint, lambda said: said


def _through(outer: Callable[[Any], Any], inner: Callable[[Any], Any], said: Any) -> Any:
    return outer(inner(said))


def _list_of(said: Any) -> list[Any]:
    return [said]


@cache
def options(hint: Any) -> tuple[Any, ...]:
    return tuple(part for part, _ in wrapped(hint))


def is_model(option: Any) -> bool:
    """Return whether it is a type of answers, which requests may hold too, with the fields of a type of requests."""
    return isinstance(option, type) and issubclass(option, BaseModel)


def literals(hint: Any) -> list[str]:
    return [text for part in options(hint) if get_origin(part) is Literal for text in get_args(part)]


# ---------------------------------------------------------------- samples


def sample_of(hint: Any) -> Any:
    """A value of a type, the first that it allows."""
    hint = bare(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return sample_of(next(part for part in get_args(hint) if part is not type(None)))
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    if is_typeddict(hint):
        return least(hint)
    if get_origin(hint) is dict:
        return {"65": 1} if get_args(hint) == (str, int) else {"a": "b"}
    if is_list(hint):
        return [sample_of(get_args(hint)[0])]
    return {str: "x", int: 1, float: 1.0, bool: True}.get(hint, {})


def least(kind: Any) -> dict[str, Any]:
    """An object with the fields alone that it must have."""
    said = {name: sample_of(hint) for name, hint in hints_of(kind).items() if _is_required(kind, name)}
    return {"model": None} | said if "model" in said else said


def _is_required(kind: Any, name: str) -> bool:
    return name in kind.__required_keys__ or get_origin(hints_of(kind)[name]) is typing_extensions.Required
