"""Requests of public agents and gateways that a front has misread, by the official packages before `hisparse up`.

What depends on the model's words (calls within reasoning) is in tests/hisparse, where outputs are prescribed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import anthropic
import openai
import pytest

from tests.processes.test_http_agents import MODEL, OPENAI_TOOLS, anthropic_client, openai_client
from tests.support.standing import Guest, Standing, guest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

#: Context of the tiny checkpoints of agents.
CONTEXT: Final = 4_096
USER: Final[Any] = {"role": "user", "content": "Hi"}
SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL: Final[Any] = {"name": "f", "input_schema": SCHEMA}
FUNCTION: Final[Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT: Final[Any] = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}
CALLED: Final[Any] = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x"}}],
}
RESULT: Final[Any] = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "fine"}]}
RULE: Final[Any] = {"role": "system", "content": "The following skills are available: none."}


@pytest.fixture
def site(agents_cluster: Standing) -> Iterator[Guest]:
    """A model of bytes with GLM's template."""
    with guest(agents_cluster) as found:
        yield found


@pytest.fixture
def published(published_cluster: Standing) -> Iterator[Guest]:
    """DeepSeek-V3.2 as published: special tokens and no template."""
    with guest(published_cluster) as found:
        yield found


@pytest.fixture(params=["bytes", "published"])
def either(request: pytest.FixtureRequest) -> Guest:
    found: Guest = request.getfixturevalue("site" if request.param == "bytes" else "published")
    return found


def message(site: Guest, **ask: Any) -> Any:
    return anthropic_client(site).messages.create(**{"model": MODEL, "max_tokens": 3, "messages": [USER]} | ask)


def chat(site: Guest, **ask: Any) -> Any:
    return openai_client(site).chat.completions.create(
        model=MODEL, **{"messages": [USER], "max_completion_tokens": 3} | ask
    )


def response(site: Guest, **ask: Any) -> Any:
    return openai_client(site).responses.create(model=MODEL, **{"input": "Hi", "max_output_tokens": 3} | ask)


# ---------------------------------------------------------------- turns in any order

ORDERS: Final[dict[str, list[Any]]] = {
    "system last": [USER, RULE],
    "system in the middle": [USER, RULE, {"role": "user", "content": "Go on"}],
    "system first": [RULE, USER],
    "no result": [USER, CALLED, {"role": "user", "content": "never mind"}],
    "system before the result": [USER, CALLED, RULE, RESULT],
    "system behind the result": [USER, CALLED, RESULT, RULE],
}


@pytest.mark.parametrize("name", ORDERS)
def test_turns_in_any_order_are_answered_and_counted(either: Guest, name: str) -> None:
    answer = message(either, messages=ORDERS[name], tools=[TOOL])
    counted = anthropic_client(either).messages.count_tokens(model=MODEL, messages=ORDERS[name], tools=[TOOL])
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_instruction_stands_on_the_side_of_the_user(published: Guest) -> None:
    client = openai_client(published)
    turns = [USER, {"role": "system", "content": "Reminder: be brief."}, {"role": "user", "content": "Go on"}]
    tokens = client.post("/../tokenize", cast_to=object, body={"messages": turns})["tokens"]  # type: ignore[index]
    text = client.post("/../detokenize", cast_to=object, body={"tokens": tokens})["prompt"]  # type: ignore[index]
    said = text.partition("Reminder: be brief.")[0]
    assert said.rfind("Hi") > said.rfind("</think>"), text
    assert "Go on" in text.partition("Reminder: be brief.")[2], text


# ---------------------------------------------------------------- fields of the references

TAKEN: Final[dict[str, Callable[[Guest], Any]]] = {
    "context_management": lambda site: anthropic_client(site).beta.messages.create(
        model=MODEL,
        max_tokens=3,
        messages=[USER],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "defer_loading": lambda site: message(site, tools=[TOOL | {"defer_loading": False}]),
    "input_examples": lambda site: message(site, tools=[TOOL | {"input_examples": [{"a": "x"}]}]),
    "allowed_callers": lambda site: message(site, tools=[TOOL | {"allowed_callers": ["direct"]}]),
    "between_tools": lambda site: message(site, thinking={"type": "between_tools"}),
    "toolset_name": lambda site: message(site, tools=[TOOL], messages=[USER, _with(CALLED, toolset_name=None), RESULT]),
    "effort max": lambda site: chat(site, reasoning_effort="max"),
    "allowed_tools": lambda site: chat(
        site,
        tools=[FUNCTION],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
    ),
    "prompt_cache_breakpoint": lambda site: chat(
        site,
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}],
            }
        ],
    ),
    "refusal": lambda site: chat(
        site, messages=[USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER]
    ),
    "client_metadata": lambda site: response(site, extra_body={"client_metadata": {}}),
    "top_p 0": lambda site: chat(site, top_p=0),
    "a user's null": lambda site: chat(site, messages=[{"role": "user", "content": None}, USER]),
    "whole numbers": lambda site: chat(site, max_completion_tokens=8.0, n=1.0, seed=1.0),
}


def _with(turn: Any, **fields: Any) -> Any:
    return turn | {"content": [part | fields for part in turn["content"]]}


@pytest.mark.parametrize("name", TAKEN)
def test_field_that_asks_for_nothing_more_is_taken(site: Guest, name: str) -> None:
    TAKEN[name](site)


def test_tools_that_are_no_functions_are_skipped_and_named(site: Guest) -> None:
    client = openai_client(site)
    tools: Any = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "patch"}, FLAT]
    raw = client.responses.with_raw_response.create(model=MODEL, input="Hi", max_output_tokens=3, tools=tools)
    for word in ("web_search", "local_shell", "custom"):
        assert word in raw.headers["hisparse-ignored"]
    with pytest.raises(openai.BadRequestError, match="web_search"):
        response(site, tools=tools[:1], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        response(site, tools=tools, tool_choice={"type": "web_search"})


def test_unknown_field_that_holds_something_is_refused(site: Guest) -> None:
    chat(site, messages=[USER, {"role": "assistant", "content": "So", "reasoning_details": []}, USER])
    with pytest.raises(openai.BadRequestError, match="reasoning_details"):
        chat(site, messages=[USER, {"role": "assistant", "content": "So", "reasoning_details": [{"a": 1}]}, USER])


# ---------------------------------------------------------------- what was sent, sent back


def test_parsed_message_is_taken_again(site: Guest) -> None:
    client, tools = (
        openai_client(site),
        [OPENAI_TOOLS[0] | {"function": OPENAI_TOOLS[0]["function"] | {"strict": True}}],
    )
    turns: list[Any] = [USER]
    for _ in range(2):
        parsed = client.chat.completions.parse(
            model=MODEL,
            messages=turns,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": "look"}},
            max_completion_tokens=200,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        answer = parsed.choices[0].message
        assert answer.tool_calls
        turns += [answer, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "ok"}]


@pytest.mark.parametrize(
    "arguments", ['{"n": 99999999999999999999999}', '{"n": ' + "[" * 101 + "]" * 101 + "}", '{"a": "x', "null"]
)
def test_arguments_of_an_earlier_call_are_taken(either: Guest, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    chat(either, messages=turns, tools=[FUNCTION])
    items = [
        USER,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    response(either, input=items, tools=[FLAT])


def test_dump_of_an_answer_is_taken_again(site: Guest) -> None:
    called = anthropic.types.ToolUseBlock(id="t1", name="f", input={"a": "x"}, type="tool_use").model_dump()
    said = [block.model_dump() for block in message(site, max_tokens=20).content]
    message(site, messages=[USER, {"role": "assistant", "content": [*said, called]}, RESULT], tools=[TOOL])


# ---------------------------------------------------------------- values, lengths and identities


def test_min_tokens_hold_for_stop_texts(site: Guest) -> None:
    answer = openai_client(site).completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=40,
        stop=["AAA"],
        logit_bias={"65": 100},
        extra_body={"min_tokens": 20},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert 20 <= answer.usage.completion_tokens <= 23


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_answer_near_the_limit_takes_what_is_left(site: Guest, api: str) -> None:
    if api == "completions":
        answer: Any = openai_client(site).completions.create(
            model=MODEL, prompt="x" * (CONTEXT - 5), extra_body={"ignore_eos": True}
        )
    else:
        turns: Any = [{"role": "user", "content": "x" * (CONTEXT - 100)}]
        answer = openai_client(site).chat.completions.create(
            model=MODEL, messages=turns, extra_body={"ignore_eos": True}
        )
    assert answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"


def test_trace_id_is_echoed_and_is_no_key(site: Guest) -> None:
    completions = openai_client(site).completions.with_raw_response
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 1, "extra_headers": {"x-request-id": "t"}}
    one, other, again = (completions.create(prompt=prompt, **ask) for prompt in ("a", "b", "a"))
    assert {it.headers["x-request-id"] for it in (one, other, again)} == {"t"}
    assert len({it.headers["hisparse-request-id"] for it in (one, other, again)}) == 3
    assert one.parse().choices[0].text != again.parse().choices[0].text
    assert json.loads(one.text)["id"] != json.loads(again.text)["id"]


def test_models_are_listed_for_both_packages(site: Guest) -> None:
    assert [it.id for it in openai_client(site).models.list()] == [it.id for it in anthropic_client(site).models.list()]
