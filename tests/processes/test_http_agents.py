"""Agents before real processes and a tiny checkpoint: what is cached between turns, and ids that are answered twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import anthropic
import jsonschema
import openai
import pytest

from tests.processes.test_up import Up, running
from tests.support.standing import AGENTS, Guest, Standing, guest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

LIMIT_S: Final = 240.0
MODEL: Final = "model"
TURNS: Final = 5
#: Tokens of a page: prefixes are reused by pages.
UNIT: Final = 64
OURS: Final = {"ignore_eos": True, "temperature": 0}
#: Arguments that end: a random model writes what the grammar allows for as long as it may.
PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    name: {
        "type": "object",
        "properties": {name_of: {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": [name_of],
        "additionalProperties": False,
    }
    for name, name_of in (("look", "at"), ("go", "to"))
}
ANTHROPIC_TOOLS: Final[Any] = [{"name": name, "input_schema": it} for name, it in PARAMETERS.items()]
OPENAI_TOOLS: Final[Any] = [
    {"type": "function", "function": {"name": name, "parameters": it}} for name, it in PARAMETERS.items()
]
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
#: More than any answer of these forms has.
ANSWER_TOKENS: Final = 200


@pytest.fixture
def site(agents_cluster: Standing) -> Iterator[Guest]:
    """The run's standing cluster. It reuses prefixes."""
    with guest(agents_cluster) as found:
        yield found


@pytest.fixture
def lone_site(agents_cluster: Standing) -> Iterator[Guest]:
    """Log-probabilities are the same bits again."""
    with guest(agents_cluster, alone=True) as found:
        yield found


def anthropic_client(site: Guest) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=site.url,
        api_key=site.key,
        max_retries=0,
        timeout=LIMIT_S,
        http_client=anthropic.DefaultHttpxClient(event_hooks=site.hooks),
        _strict_response_validation=True,
    )


def openai_client(site: Guest) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{site.url}/v1",
        api_key=site.key,
        max_retries=0,
        timeout=LIMIT_S,
        http_client=openai.DefaultHttpxClient(event_hooks=site.hooks),
        _strict_response_validation=True,
    )


def test_agent_of_many_turns_calls_and_reuses_what_was_said_before(site: Guest) -> None:
    """Any tool, or a named one, must be called: the model writes each call, and its result is fed back."""
    client = anthropic_client(site)
    messages: list[Any] = [{"role": "user", "content": "Go on."}]
    cached, sizes = [], []
    for turn in range(TURNS):
        choice: Any = {"type": "any"} if turn % 2 else {"type": "tool", "name": "look"}
        answer = client.messages.create(
            model=MODEL,
            max_tokens=ANSWER_TOKENS,
            messages=messages,
            tools=ANTHROPIC_TOOLS,
            tool_choice=choice | {"disable_parallel_tool_use": True},
            thinking={"type": "disabled"},
        )
        (call,) = answer.content
        assert call.type == "tool_use"
        assert (answer.stop_reason, call.name) == ("tool_use", "look" if not turn % 2 else call.name)
        jsonschema.validate(call.input, PARAMETERS[call.name])
        cached.append(answer.usage.cache_read_input_tokens or 0)
        sizes.append(cached[-1] + answer.usage.input_tokens)
        messages.append({"role": "assistant", "content": answer.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"did {turn}: {call.input}"}
        messages.append({"role": "user", "content": [result]})
    check_reuse(cached, sizes)


def test_openai_agent_of_many_streamed_turns_calls_and_reuses(site: Guest) -> None:
    client = openai_client(site)
    messages: list[Any] = [{"role": "user", "content": "Go on."}]
    cached, sizes = [], []
    for turn in range(TURNS):
        named: Any = {"type": "function", "function": {"name": "look"}}
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                max_tokens=ANSWER_TOKENS,
                messages=messages,
                tools=OPENAI_TOOLS,
                tool_choice="required" if turn % 2 else named,
                parallel_tool_calls=False,
                reasoning_effort="none",
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        (call,) = (it for chunk in chunks for choice in chunk.choices for it in choice.delta.tool_calls or ())
        assert call.function is not None
        name, arguments = call.function.name, call.function.arguments
        assert name == "look" if not turn % 2 else name in PARAMETERS
        jsonschema.validate(json.loads(arguments or ""), PARAMETERS[name or ""])
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        sizes.append(usage.prompt_tokens)
        said = {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [said]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"did {turn}: {arguments}"})
    check_reuse(cached, sizes)


def check_reuse(cached: list[int], sizes: list[int]) -> None:
    """`sizes` are those of the prompts, each of which begins with the one before."""
    assert sizes == sorted(sizes)
    for before, now in zip(sizes, cached[1:], strict=False):
        assert now >= before // UNIT * UNIT, f"all whole pages of the prompt before: {cached}, {sizes}"


def test_structured_answers_with_log_probabilities_have_the_types_of_the_package(lone_site: Guest) -> None:
    client = openai_client(lone_site)
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    ask = partial(
        client.chat.completions.create,
        model=MODEL,
        messages=[{"role": "user", "content": "Weather?"}],
        response_format=form,
        reasoning_effort="none",
        max_tokens=ANSWER_TOKENS,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )
    (whole,) = ask().choices
    chunks = [it for chunk in ask(stream=True) for it in chunk.choices]
    text, told = whole.message.content, whole.logprobs
    assert text is not None
    assert told is not None
    assert told.content is not None
    jsonschema.validate(json.loads(text), WEATHER)
    assert b"".join(bytes(it.bytes or ()) for it in told.content).decode() == text
    assert all(len(it.top_logprobs) == 2 for it in told.content)
    assert "".join(it.delta.content or "" for it in chunks) == text
    assert [token for it in chunks if it.logprobs for token in it.logprobs.content or ()] == told.content
    assert (whole.finish_reason, chunks[-1].finish_reason) == ("stop", "stop")


def test_structured_answers_of_every_api_are_valid(site: Guest) -> None:
    client = openai_client(site)
    completion = client.completions.create(
        model=MODEL,
        prompt="x",
        logprobs=2,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        extra_body={"structured_outputs": {"json": WEATHER}},
    )
    assert completion.choices[0].logprobs is not None
    assert "".join(completion.choices[0].logprobs.tokens or ()).startswith(completion.choices[0].text)
    said: dict[str, Any] = {
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}},
        "reasoning": {"effort": "none"},
        "max_output_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    response = client.responses.create(model=MODEL, **said)
    events = list(client.responses.create(model=MODEL, stream=True, **said))
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": ANSWER_TOKENS,
        "messages": [{"role": "user", "content": "x"}],
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": WEATHER}},
    }
    message = anthropic_client(site).messages.create(**asked)
    with anthropic_client(site).messages.stream(**asked) as stream:
        final = stream.get_final_message()
    texts = [completion.choices[0].text, response.output_text, streamed]
    texts += [block.text for it in (message, final) for block in it.content if block.type == "text"]
    assert len(texts) == 5
    for text in texts:
        jsonschema.validate(json.loads(text), WEATHER)
    assert (message.stop_reason, final.stop_reason) == ("end_turn", "end_turn")


BODIES: Final[dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    "/v1/responses": {"input": "x", "max_output_tokens": 20},
}


def test_same_body_under_the_same_id_is_answered_byte_for_byte(tmp_path: Path) -> None:
    """Also after the coordinator was killed."""
    (model := tmp_path / MODEL).mkdir()
    AGENTS.write_model(model)
    with running(model, tmp_path, *AGENTS.options) as up, openai.DefaultHttpxClient(timeout=LIMIT_S) as http:
        check_answers_under_their_ids(up, http)


def check_answers_under_their_ids(up: Up, http: Any) -> None:
    url = up.ready["http"]["url"]

    def answers() -> dict[str, bytes]:
        told = {}
        for path, body in BODIES.items():
            headers = {"idempotency-key": f"once{path.replace('/', '-')}"}
            answer = http.post(f"{url}{path}", json=body | {"model": MODEL} | OURS, headers=headers)
            assert answer.status_code == 200, answer.text
            told[path] = answer.content
        return told

    first = answers()
    assert answers() == first
    os.kill(up.ready["coordinator"]["pid"], signal.SIGKILL)
    assert answers() == first


def test_chat_of_a_tiny_checkpoint_counts_as_it_tokenizes(site: Guest) -> None:
    client = openai_client(site)
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages: Any = [{"role": "user", "content": "Hé."}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=8, extra_body=OURS)
    asked = {"messages": messages, "tools": tools}
    told = client._client.post(f"{site.url}/tokenize", json=asked, headers={"Authorization": f"Bearer {site.key}"})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == told.json()["count"]
    assert b"<|user|>H" in bytes(told.json()["tokens"])
    assert answer.choices[0].message.content
