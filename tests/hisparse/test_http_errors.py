"""Errors of the HTTP front as its clients read them: one table of requests; remedies that name a value are tried."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import trio

from hisparse.http import front
from hisparse.http.errors import error_body, status_of
from hisparse.http.server import exchange
from hisparse.http.server.wire import HEADER_BYTES_MAX, Wire
from protocol.errors import (
    BadInput,
    CapacityError,
    HiSparseError,
    InternalError,
    ProtocolError,
    Unavailable,
    WrongState,
)
from protocol.settings import HttpSettings
from tests.support.http_rig import KEY, TEMPLATE, Peer, front_rig
from tests.support.limits import HANG_LIMIT_S
from tests.support.refusals import reached_in

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"


class Case(NamedTuple):
    """`body` to `path` gets `status`, `code`, `param` and `text` in its message; `remedied` is then accepted."""

    path: str
    body: Any
    status: int
    code: str
    param: str | None
    text: str
    remedied: Any = None


def said(**changes: Any) -> dict[str, Any]:
    return {"prompt": "x", **changes}


def spoken(*messages: Any, **changes: Any) -> dict[str, Any]:
    return {"messages": list(messages or ({"role": "user", "content": "x"},)), **changes}


def asked(*messages: Any) -> dict[str, Any]:
    """As Anthropic's clients ask."""
    return {"max_tokens": 5, "messages": list(messages)}


def nested(levels: int) -> dict[str, object]:
    """A schema of lists within lists."""
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD: Final = "bad_input"
LONG: Final = "context_length_exceeded"
X: Final = {"role": "user", "content": "x"}
CASES: Final = {
    "no JSON": Case(COMPLETIONS, b'{"prompt": x}', 400, BAD, "body", "body: is not JSON from byte 11 on."),
    "cut JSON": Case(COMPLETIONS, b'{"prompt"', 400, BAD, "body", "body: is not JSON, or ends too early."),
    "array": Case(COMPLETIONS, [], 400, BAD, "body", "body: expected an object, not an array."),
    "no prompt": Case(COMPLETIONS, {}, 400, BAD, "prompt", "prompt: is missing. Add it.", said()),
    "typo": Case(
        COMPLETIONS, said(temprature=1), 400, BAD, "temprature", "Did you mean temperature?", said(temperature=1)
    ),
    "unknown": Case(COMPLETIONS, said(zzz=1), 400, BAD, "zzz", "Leave it out; GET /v1/parameters lists", said()),
    "type": Case(COMPLETIONS, said(temperature="hot"), 400, BAD, "temperature", "expected a number, not a string."),
    "fraction": Case(
        COMPLETIONS, said(n=1.5), 400, BAD, "n", "n: expected an integer, not a number that is no integer."
    ),
    "long number": Case(COMPLETIONS, b'{"prompt":"x","seed":' + b"1" * 5_000 + b"}", 400, BAD, "seed", "too large"),
    "n": Case(COMPLETIONS, said(n=17), 400, BAD, "n", "n: must be 1 to 16 (got 17).", said(n=16)),
    "choices": Case(
        COMPLETIONS, said(prompt=["x"] * 50, n=3), 400, BAD, "n", "Use 2 or less.", said(prompt=["x"], n=2)
    ),
    "max_tokens": Case(COMPLETIONS, said(max_tokens=0), 400, BAD, "max_tokens", "(got 0)", said(max_tokens=1)),
    "temperature": Case(COMPLETIONS, said(temperature=101), 400, BAD, "temperature", "0.0 to 100.0 (got 101"),
    "stop": Case(COMPLETIONS, said(stop=["a", 1]), 400, BAD, "stop[1]", "stop[1]: expected a string, not an integer."),
    "option": Case(
        COMPLETIONS,
        said(stream=True, stream_options={"include_use": True}),
        400,
        BAD,
        "stream_options.include_use",
        "Did you mean include_usage?",
    ),
    "no stream": Case(
        COMPLETIONS,
        said(stream_options={}),
        400,
        BAD,
        "stream_options",
        "Set stream to true",
        said(stream_options={}, stream=True),
    ),
    "unsupported": Case(
        COMPLETIONS, said(best_of=2), 400, BAD, "best_of", "is not supported (got 2). Leave best_of out.", said()
    ),
    "unsupported object": Case(
        COMPLETIONS,
        said(best_of={"1": None, "2": "a"}),
        400,
        BAD,
        "best_of",
        'is not supported (got {"1":null,"2":"a"}). Leave best_of out.',
    ),
    "field of the reference": Case(
        COMPLETIONS,
        said(suffix="a"),
        *(400, BAD, "suffix", "is not supported: the model writes on, and fills no gaps. Leave it out."),
        said(suffix=""),
    ),
    "text for null": Case(
        CHATS,
        spoken(X, {"role": "assistant", "content": "x", "function_call": "f"}),
        *(400, BAD, "messages[1].function_call", "is not supported: it is now tool_calls. Use tool_calls."),
        spoken(X, {"role": "assistant", "content": "x", "function_call": None}),
    ),
    "unknown field that holds something": Case(
        CHATS,
        spoken(X | {"reasoning_details": [1]}),
        *(400, BAD, "messages[0].reasoning_details", "is no known parameter"),
        spoken(X | {"reasoning_details": [], "thinking_blocks": None, "provider_specific_fields": {}, "mood": ""}),
    ),
    "integer with a fraction": Case(
        COMPLETIONS, said(seed=8.5), *(400, BAD, "seed", "not a number that is no integer"), said(seed=8.0, n=1.0)
    ),
    "top_k": Case(COMPLETIONS, said(top_k=-2), 400, BAD, "top_k", "(got -2)", said(top_k=-1)),
    "min_p": Case(COMPLETIONS, said(min_p=1.5), 400, BAD, "min_p", "must be 0.0 to 1.0 (got 1.5)", said(min_p=1)),
    "penalty": Case(
        COMPLETIONS,
        said(frequency_penalty=3),
        400,
        BAD,
        "frequency_penalty",
        "must be -2.0 to 2.0 (got 3",
        said(frequency_penalty=2),
    ),
    "bias": Case(
        COMPLETIONS,
        said(logit_bias={"1": 200}),
        400,
        BAD,
        "logit_bias",
        "must be -100.0 to 100.0 (got 200",
        said(logit_bias={"1": 100}),
    ),
    "bias of no token": Case(COMPLETIONS, said(logit_bias={"999999": 1}), 400, BAD, "logit_bias", "(got 999999)"),
    "min_tokens": Case(
        COMPLETIONS,
        said(max_tokens=4, min_tokens=5),
        400,
        BAD,
        "min_tokens",
        "must be 0 to 4 (got 5)",
        said(max_tokens=4, min_tokens=4),
    ),
    "logprobs": Case(
        COMPLETIONS, said(logprobs=21), 400, BAD, "logprobs", "must be 0 to 20 (got 21)", said(logprobs=20)
    ),
    "no logprobs": Case(COMPLETIONS, said(logprobs=-1), 400, BAD, "logprobs", "(got -1)", said(logprobs=0)),
    "logprobs of completions": Case(
        COMPLETIONS,
        said(logprobs=True),
        400,
        BAD,
        "logprobs",
        "expected an integer, not a boolean",
        said(logprobs=False),
    ),
    "logprobs of an echo": Case(
        COMPLETIONS,
        said(echo=True, logprobs=1),
        *(400, BAD, "logprobs", "only the logits of its last token are computed; an echo would come without", said()),
    ),
    "logprobs of a prompt": Case(
        COMPLETIONS,
        said(prompt_logprobs=1),
        400,
        BAD,
        "prompt_logprobs",
        "logits of its last token are computed. Leave it",
        said(),
    ),
    "many logprobs": Case(
        COMPLETIONS,
        said(n=16, max_tokens=1_000, logprobs=20),
        *(400, BAD, "logprobs", "make 336000, and 262144 are accepted (got 20). Set max_tokens to 780 or less."),
    ),
    "top_logprobs": Case(
        CHATS,
        spoken(logprobs=True, top_logprobs=21),
        *(400, BAD, "top_logprobs", "must be 0 to 20 (got 21)", spoken(logprobs=True, top_logprobs=20)),
    ),
    "top_logprobs alone": Case(
        CHATS, spoken(top_logprobs=2), 400, BAD, "top_logprobs", "Set logprobs to true.", spoken(top_logprobs=0)
    ),
    "stop_token_ids": Case(
        COMPLETIONS, said(stop_token_ids=[-1]), 400, BAD, "stop_token_ids", "(got -1)", said(stop_token_ids=[0])
    ),
    "priority": Case(
        COMPLETIONS, said(priority=1_001), 400, BAD, "priority", "must be -1000 to 1000", said(priority=1_000)
    ),
    "draft_tokens": Case(
        COMPLETIONS, said(draft_tokens=5), 400, BAD, "draft_tokens", "must be 0 to 4 (got 5)", said(draft_tokens=4)
    ),
    "model": Case(
        COMPLETIONS, said(model="gpt"), 404, "not_found", "model", "(got gpt). Use fake.", said(model="fake")
    ),
    "prompt": Case(COMPLETIONS, {"prompt": 5}, 400, BAD, "prompt", "prompt: is neither a string nor an array."),
    "token": Case(COMPLETIONS, {"prompt": [1, "a"]}, 400, BAD, "prompt[1]", "expected an integer, not a string."),
    "row": Case(
        COMPLETIONS, {"prompt": [[1], [999]]}, 400, BAD, "prompt[1]", "are 0 to 255 (got 999)", {"prompt": [255]}
    ),
    "empty": Case(COMPLETIONS, {"prompt": ""}, 400, BAD, "prompt", "Give at least one token."),
    "long": Case(COMPLETIONS, {"prompt": [1] * 5_000}, 400, LONG, "prompt", "(got 5000 tokens). Shorten it."),
    "long output": Case(
        COMPLETIONS, said(max_tokens=4_096), 400, LONG, "prompt", "Lower max_tokens to 4095,", said(max_tokens=4_095)
    ),
    "long chat": Case(
        CHATS, spoken(max_completion_tokens=5_000), 400, LONG, "messages", "Lower max_completion_tokens to "
    ),
    "chat limit": Case(CHATS, spoken(max_completion_tokens=0), 400, BAD, "max_completion_tokens", "(got 0)"),
    "no messages": Case(CHATS, {"messages": []}, 400, BAD, "messages", "Give at least one message.", spoken()),
    "role": Case(
        CHATS,
        spoken(X, {"role": "function", "content": "x"}),
        400,
        BAD,
        "messages[1].role",
        "(got function). Use one of system, developer, user, assistant, tool.",
        spoken(X, {"role": "assistant", "content": "x"}),
    ),
    "content": Case(
        CHATS,
        spoken({"role": "user", "content": 5}),
        400,
        BAD,
        "messages[0].content",
        "expected a string or an array, not an integer.",
        spoken({"role": "user", "content": None}),
    ),
    "contents": Case(
        CHATS, spoken({"role": "user", "contents": "x"}), 400, BAD, "messages[0].contents", "Did you mean content?"
    ),
    "part": Case(
        CHATS,
        spoken({"role": "user", "content": [{"type": "image_url", "text": ""}]}),
        400,
        BAD,
        "messages[0].content[0].type",
        "images are not supported: the model reads text (got image_url). Send text.",
    ),
    "template": Case(
        CHATS, spoken({"role": "developer", "content": "x"}), 400, BAD, "messages", "refuses them: no developers here"
    ),
    "content left out": Case(CHATS, spoken({"role": "user"}), 400, BAD, "messages[0].content", "is missing. Add it."),
    "field of another role": Case(
        CHATS,
        spoken(X | {"refusal": "no"}),
        *(400, BAD, "messages[0].refusal", "role assistant. Leave it out."),
        spoken(X | {"refusal": "", "tool_calls": []}),
    ),
    "result of a call that is not there": Case(
        CHATS,
        spoken(X, {"role": "tool", "tool_call_id": "c1", "content": "x"}),
        *(400, BAD, "messages[1].tool_call_id", "is the result of no call (got c1). Send the call before its"),
        spoken(X),
    ),
    "result before its call": Case(
        CHATS,
        spoken(
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]},
        ),
        *(400, BAD, "messages[0].tool_call_id", "is the result of no call (got c1)."),
    ),
    "result of no call": Case(
        CHATS,
        spoken({"role": "tool", "content": "x"}),
        *(400, BAD, "messages[0].tool_call_id", "is missing. Add it: the id of the call."),
    ),
    "name of a tool": Case(
        CHATS, spoken(tools=[tool("a b")]), 400, BAD, "tools[0].function.name", "(got a b). Rename the tool."
    ),
    "tools of one name": Case(
        CHATS, spoken(tools=[tool("f")] * 2), 400, BAD, "tools[1].function.name", "(got f). Rename one of them."
    ),
    "tool choice": Case(
        CHATS,
        spoken(tool_choice="required"),
        *(400, BAD, "tool_choice", "needs a tool to call (got required). Send tools, or use auto."),
        spoken(tool_choice="auto"),
    ),
    "choice that is none": Case(
        CHATS,
        spoken(tools=[tool("f")], tool_choice="must"),
        *(400, BAD, "tool_choice", "(got must). Use one of auto, none, required."),
    ),
    "tool of another kind": Case(
        CHATS,
        spoken(tools=[tool("f"), {"type": "custom", "custom": {"name": "g"}}], tool_choice=tool("g")),
        *(400, BAD, "tool_choice", "no tool that is a function, and custom is skipped here (got g). Name one of"),
    ),
    "only tools of another kind": Case(
        RESPONSES,
        {"input": "x", "tools": [{"type": "web_search"}, {"type": "local_shell"}], "tool_choice": "required"},
        *(400, BAD, "tool_choice", "and web_search, local_shell is skipped here (got required). Send tools"),
    ),
    "kind of a choice": Case(
        RESPONSES,
        {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        *(400, BAD, "tool_choice.type", "(got web_search). Use one of function, allowed_tools."),
        {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "auto"},
    ),
    "kind of an edit": Case(
        MESSAGES,
        asked(X) | {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        *(400, BAD, "context_management.edits[0].type", "(got clear_tool_uses_20250919). Use one of clear_thinking_"),
        asked(X) | {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ),
    "tool that is none": Case(
        CHATS,
        spoken(tools=[tool("f")], tool_choice=tool("g")),
        *(400, BAD, "tool_choice", "is the name of no tool (got g). Name one of the tools, or send it with them."),
    ),
    "schema": Case(
        COMPLETIONS,
        said(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {"if": 1}}}}),
        *(400, BAD, "response_format.json_schema.schema", 'cannot be held to: Unimplemented keys: ["not"]'),
        said(response_format={"type": "json_object"}),
    ),
    "schema of many levels": Case(
        COMPLETIONS,
        said(structured_outputs={"json": nested(400)}),
        *(400, BAD, "structured_outputs", "is nested deeper than 100 levels. Flatten it."),
        said(structured_outputs={"json": nested(90)}),
    ),
    "integer of many digits": Case(
        COMPLETIONS,
        said(structured_outputs={"json": {"enum": [1, 1 << 64]}}),
        *(400, BAD, "structured_outputs.json.enum[1]", "of more than 64 bits. Use a smaller number."),
        said(structured_outputs={"json": {"enum": [1, 2]}}),
    ),
    "regular expression": Case(
        COMPLETIONS,
        said(structured_outputs={"regex": "(a"}),
        *(400, BAD, "structured_outputs.regex", "unclosed group"),
        said(structured_outputs={"regex": "(a)"}),
    ),
    "vLLM's name of old": Case(
        COMPLETIONS,
        said(guided_regex="a"),
        *(400, BAD, "guided_regex", "is not supported: vLLM's name of old. Use structured_outputs.regex."),
        said(structured_outputs={"regex": "a"}),
    ),
    "grammar without an end": Case(
        COMPLETIONS,
        said(structured_outputs={"regex": "a"}, ignore_eos=True),
        *(400, BAD, "ignore_eos", "which says where an output ends (got True). Leave ignore_eos out."),
        said(structured_outputs={"regex": "a"}),
    ),
    "tools that the template has not": Case(
        CHATS, spoken(tools=[tool("f")]), 400, BAD, "tools", "(got 1 tools). Leave tools out.", spoken()
    ),
    "no Anthropic messages": Case(MESSAGES, asked(), 400, BAD, "messages", "Give at least one message.", asked(X)),
    "turn that goes on": Case(
        MESSAGES,
        asked(X, {"role": "assistant", "content": "So"}),
        *(400, BAD, "messages[1].role", "(got assistant). End with a message of the user."),
    ),
    "block of another role": Case(
        MESSAGES,
        asked({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}),
        *(400, BAD, "messages[0].content[0].type", "is no part of a user's message (got thinking). Leave it out."),
    ),
    "message without content": Case(
        MESSAGES, asked({"role": "user"}), 400, BAD, "messages[0].content", "is missing. Add it.", asked(X)
    ),
    "arguments that are no object": Case(
        MESSAGES,
        asked({"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": [1]}]}, X),
        *(400, BAD, "messages[0].content[0].input", "expected an object. Send a JSON object."),
    ),
    "refusal of a user": Case(
        CHATS,
        spoken({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}),
        *(400, BAD, "messages[0].content[0].type", "is for messages of role assistant (got refusal). Send it as text."),
        spoken({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}),
    ),
    "kind of a tool": Case(
        CHATS,
        spoken(tools=[{"type": "a b"}]),
        *(400, BAD, "tools[0].type", "is the name of no kind (got a b). Use function, or leave it out."),
        spoken(tools=[{"type": "custom"}]),
    ),
    "call without an id": Case(
        RESPONSES,
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        *(400, BAD, "input[0].call_id", "is missing. Add it."),
    ),
    "Anthropic result of no call": Case(
        MESSAGES,
        asked(X, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]}),
        *(400, BAD, "messages[1].content[0].tool_use_id", "is the result of no call (got c1). Send the call"),
        asked(X),
    ),
    "budget below nothing": Case(
        MESSAGES,
        {**asked(X), "thinking": {"type": "enabled", "budget_tokens": -1}},
        *(400, BAD, "thinking.budget_tokens", "is below 0 (got -1). Send at least 0, or leave it out."),
        {**asked(X), "thinking": {"type": "enabled", "budget_tokens": 0}},
    ),
    "two edits of thinking": Case(
        MESSAGES,
        {**asked(X), "context_management": {"edits": [{"type": "clear_thinking_20251015"}] * 2}},
        *(
            400,
            BAD,
            "context_management.edits",
            "holds more than one edit (got 2 edits). Send one",
        ),
        {**asked(X), "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
    ),
    "items of blanks": Case(
        RESPONSES,
        b'{"input": [ ]}',
        *(400, BAD, "input", "is empty. Give a text, or at least one item."),
        {"input": [X]},
    ),
    "name of two lines": Case(
        MESSAGES,
        {**asked(X), "a\nb": 1},
        *(400, BAD, "a\nb", "is no known parameter"),
        asked(X),
    ),
    "output of no call": Case(
        RESPONSES,
        {"input": [X, {"type": "function_call_output", "call_id": "c1", "output": "x"}]},
        *(400, BAD, "input[1].call_id", "is the result of no call (got c1). Send the call before its result"),
        {"input": [X]},
    ),
    "no items": Case(RESPONSES, {"input": []}, 400, BAD, "input", "Give a text, or at least one item.", {"input": "x"}),
    "item without content": Case(
        RESPONSES, {"input": [{"role": "user"}]}, 400, BAD, "input[0].content", "is missing. Add it."
    ),
    "nothing to tokenize": Case("/tokenize", {}, 400, BAD, "prompt", "Give prompt, or else messages."),
    "typo in a path": Case(
        "/v1/completion", {}, 404, "not_found", "path", "(got /v1/completion). Did you mean /v1/completions?"
    ),
    "path without version": Case(
        "/chat/completions", {}, 404, "not_found", "path", "Did you mean /v1/chat/completions?"
    ),
    "path of another API": Case(
        "/v1/embeddings", {}, 404, "not_found", "path", "(got /v1/embeddings). Known: /health, "
    ),
    "path": Case("/x", {}, 404, "not_found", "path", "path: no such path (got /x). Known: /health, "),
    "method": Case("/v1/models", {}, 405, "method", "method", "Use GET."),
}

#: What no client of HTTP can act on: libraries, settings, commands, documents of the repository.
FOREIGN: Final = re.compile(
    r"`|msgspec|jinja|h11|Expected|hisparse |docs/|\.py\b|http\.[a-z]|coordinator\.[a-z]|=.*: |\battach\b"
)


def error_in(body: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(body)["error"]
    assert content.keys() == {"message", "type", "param", "code"}
    assert FOREIGN.search(content["message"]) is None, content["message"]
    return content


@pytest.mark.parametrize("name", CASES)
def test_refusal_is_in_words_of_http_and_its_remedy_works(tmp_path: Path, run_dir: Path, name: str) -> None:
    reached_in(run_dir, "http", name, partial(trio.run, check_http_case, tmp_path, CASES[name]))


async def check_http_case(tmp_path: Path, case: Case) -> None:
    async with front_rig(tmp_path) as rig:
        scheduler = rig.gateway.scheduler
        assert scheduler.served is not None
        scheduler.served = msgspec.structs.replace(
            scheduler.served, chat_template="{% set bos_token = '' %}" + TEMPLATE
        )
        await rig.link.client.welcome()
        peer = await rig.post(case.path, case.body)
        await peer.answer()
        error = error_in(peer.body)
        assert (peer.status, error["code"], error["param"]) == (case.status, case.code, case.param), error
        assert case.text in error["message"]
        assert scheduler.request_indices == {}
        if case.remedied is not None:
            await rig.post(case.path, case.remedied)
            assert await rig.submitted(1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
async def test_template_that_cannot_be_compiled_is_not_the_clients_fault(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what is wrong. Workers of this version do not start with one."""
    async with front_rig(tmp_path) as rig:
        scheduler = rig.gateway.scheduler
        assert scheduler.served is not None
        scheduler.served = msgspec.structs.replace(scheduler.served, chat_template="x\n{% unknown %}")
        await rig.link.client.welcome()
        body = {"messages": [{"role": "user", "content": "x"}]}
        with caplog.at_level("INFO"):
            peer = await rig.post(path, body if path.endswith("tokens") else body | {"max_tokens": 5})
            await peer.answer()
    error = json.loads(peer.body)["error"]
    assert (peer.status, error["code"], error["param"]) == (500, "config", None)
    assert error["message"] == "The server is set up wrongly, and its log says how."
    assert peer.headers["x-should-retry"] == "false"
    assert any("cannot be compiled: line 2" in str(record.__dict__) for record in caplog.records)


@pytest.mark.parametrize(
    ("raised", "status", "code", "param", "text"),
    [
        (CapacityError("9 requests waiting already", field="coordinator.queue_max", value=9, remedy="raise it"),
         429, "capacity", None, "9 requests waiting already. Retry later."),
        pytest.param(CapacityError("no worker has 9 host pages", field="prompt", value="1 tokens"),
         400, LONG, "prompt", "prompt: no worker has 9 host pages. Shorten it",
         marks=pytest.mark.refuses("(shorten it, or ask for fewer tokens)")),
        (Unavailable("no worker has registered yet", remedy="start one with: hisparse worker --model PATH"),
         503, "unavailable", None, "no worker has registered yet. Retry later."),
        (WrongState("is in use by another request", field="request_id", value="a", remedy="attach to it"),
         409, "wrong_state", "idempotency-key", "idempotency-key: is in use by another request. Choose another."),
        (InternalError("KeyError: `x`"), 500, "internal", None, "The server has a defect"),
        (ProtocolError("msgspec said no"), 502, "protocol", None, "do not understand each other"),
    ],
)  # fmt: skip
async def test_error_of_the_coordinator_names_no_setting_and_no_command(
    tmp_path: Path, raised: HiSparseError, status: int, code: str, param: str | None, text: str
) -> None:
    async with front_rig(tmp_path) as rig:
        rig.gateway.scheduler.refuse_with = raised
        peer = await rig.complete({"prompt": "x"})
        await peer.answer()
        error = error_in(peer.body)
        assert (peer.status, error["code"], error["param"]) == (status, code, param)
        assert text in error["message"]


async def test_missing_key_is_told_how_to_send_one(tmp_path: Path) -> None:
    async with front_rig(tmp_path, keys=(KEY,)) as rig:
        peer = rig.open("GET", "/v1/models")
        await peer.answer()
        assert (peer.status, error_in(peer.body)["code"], error_in(peer.body)["param"]) == (
            401,
            "unauthorized",
            "authorization",
        )
        again = rig.open("GET", "/v1/models", {"Authorization": f"Bearer {KEY}"})
        await again.answer()
        assert again.status == 200


# ---------------------------------------------------------------- limits, ids, the protocol


async def refused(peer: Peer) -> tuple[int, str, str | None, str]:
    await peer.answer()
    error = error_in(peer.body)
    return peer.status, error["code"], error["param"], error["message"]


async def test_body_past_its_limits_is_told_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front_rig(tmp_path) as rig:
        text = f"body: more than {exchange.BODY_BYTES_MAX} bytes. Send a smaller one."
        large = rig.open("POST", COMPLETIONS, {"content-length": str(exchange.BODY_BYTES_MAX + 1)})
        assert await refused(large) == (413, "too_large", "body", text)
        monkeypatch.setattr(exchange, "BODY_LIMIT_S", 0.05)
        slow = rig.open("POST", COMPLETIONS)
        await slow.say(b"{", more=True)
        text = "body: not there after 0.05 s. Send it faster."
        assert await refused(slow) == (408, "too_slow", "body", text)


async def test_load_names_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BODIES_BYTES_MAX", 100)
    async with front_rig(tmp_path, HttpSettings(requests_max=1)) as rig:
        (status, code, param, message) = await refused(await rig.complete(b" " * 200))
        assert (status, code, param) == (429, "capacity", None)
        assert message.startswith("bodies of all requests exceed ")
        assert message.endswith("this key has its share of them. Retry later.")
        await rig.complete(said())
        await rig.submitted(1)
        text = "1 requests are being answered, and this key has its share of them. Retry later."
        assert await refused(await rig.complete(said())) == (429, "capacity", None, text)


async def test_id_in_use_is_told_to_choose_another(tmp_path: Path) -> None:
    async with front_rig(tmp_path) as rig:
        await rig.complete(said(), idempotency_key="mine")
        await rig.submitted(1)
        text = "idempotency-key: is in use by another request. Choose another."
        other = {"prompt": "other"}
        taken = await rig.complete(other, idempotency_key="mine")
        assert await refused(taken) == (409, "wrong_state", "idempotency-key", text)
        await rig.complete(other, idempotency_key="another")
        assert await rig.submitted(2)


@pytest.mark.parametrize(("outcome", "status", "param"), [("ABORTED", 409, "idempotency-key"), ("FAILED", 500, None)])
async def test_output_that_did_not_finish_says_so(tmp_path: Path, outcome: str, status: int, param: str | None) -> None:
    async with front_rig(tmp_path) as rig:
        peer = await rig.complete(said())
        (name,) = await rig.submitted(1)
        rig.gateway.scheduler.finish(name, outcome)
        told = await refused(peer)
    assert told[:3] == (status, outcome.lower(), param)
    assert f"{outcome.lower()}: " in told[3]


ASKED: Final = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n%s\r\n"


class WireCase(NamedTuple):
    """`data` gets the others from the connection itself, before the front; `remedied` is then a request."""

    data: bytes
    status: int
    code: str
    param: str
    text: str
    remedied: bytes = ASKED % b""


WIRE_CASES: Final = {
    "another version": WireCase(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "version", "version", "only HTTP/1.1 is spoken here (got 2.0). Use"
    ),
    "upgrade": WireCase(
        ASKED % b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        *(400, "upgrade", "upgrade"),
        "upgrade: connections stay HTTP/1.1 (got websocket). Leave Upgrade out.",
    ),
    "headers": WireCase(
        ASKED % (b"Padding: " + b"p" * HEADER_BYTES_MAX + b"\r\n"),
        *(431, "headers_too_large", "headers"),
        f"headers: more than {HEADER_BYTES_MAX} bytes. Send smaller ones.",
    ),
    "unfinished headers": WireCase(
        b"GET /" + b"p" * (HEADER_BYTES_MAX + 1), 431, "headers_too_large", "headers", "Send smaller ones."
    ),
    "connect": WireCase(
        ASKED.replace(b"GET", b"CONNECT") % b"", 405, "method", "method", "this is no proxy (got CONNECT). Ask for"
    ),
    "two lengths": WireCase(
        ASKED % b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        *(400, "malformed", "transfer-encoding"),
        "not beside Content-Length. Say the length in one way.",
        ASKED % b"Transfer-Encoding: chunked\r\n",
    ),
    "no host": WireCase(
        b"GET / HTTP/1.1\r\n\r\n", 400, "malformed", "request", "is not valid HTTP/1.1. Check the request line"
    ),
    "endless length": WireCase(
        ASKED % (b"Content-Length: " + b"9" * 5_000 + b"\r\n"), 400, "malformed", "request", "length of the body."
    ),
}


@pytest.mark.parametrize("name", WIRE_CASES)
def test_refusal_of_the_protocol_is_in_the_same_words(run_dir: Path, name: str) -> None:
    reached_in(run_dir, "wire", name, partial(check_wire_case, WIRE_CASES[name]))


def check_wire_case(case: WireCase) -> None:
    wire = Wire()
    wire.feed(case.data)
    with pytest.raises(BadInput) as caught:
        wire.next_head()
    error = error_in(error_body(caught.value))
    assert (status_of(caught.value), error["code"], error["param"]) == (case.status, case.code, case.param), error
    assert case.text in error["message"]
    again = Wire()
    again.feed(case.remedied)
    assert again.next_head() is not None


async def test_parameters_lists_each_field_of_a_body_once(tmp_path: Path) -> None:
    async with front_rig(tmp_path) as rig:
        with trio.fail_after(HANG_LIMIT_S):
            told = await rig.open("GET", "/v1/parameters").answer()
    assert told.keys() == {
        *(COMPLETIONS, CHATS, "/v1/messages", "/v1/responses"),
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
    }
    assert "temperature" in told[COMPLETIONS]["served"]
    assert "user" in told[CHATS]["ignored"]
    assert told[CHATS]["accepted_at_these_values_only"]["modalities"] == [["text"]]
    assert told[CHATS]["refused"]["functions"] == "they are now tools"
