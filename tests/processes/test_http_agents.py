"""Agents before real processes and a tiny checkpoint: what is cached between turns, and ids that are answered twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import openai
import pytest

from tests.processes.test_up import Up, running
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

LIMIT_S: Final = 120.0
MODEL: Final = "tiny"
TURNS: Final = 20
#: Tokens of a page: prefixes are reused by pages.
UNIT: Final = 64
OURS: Final = {"ignore_eos": True, "temperature": 0}
TOOLS: Final[Any] = [
    {"name": "look", "description": "Looks at it", "input_schema": {"type": "object", "properties": {"at": {}}}}
]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """With the checkpoint's own chat template, and reuse of prefixes."""
    model = tmp_path_factory.mktemp("checkpoint") / MODEL
    write_tiny_checkpoint(model, "glm-5", index_topk=16, context_max_tokens=8_192)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HISPARSE_COORDINATOR_PREFIX_REUSE", "own")
        with running(model, tmp_path_factory.mktemp("up"), "--http", "127.0.0.1:0", "--log-level", "warning") as up:
            yield up


def anthropic_client(up: Up) -> anthropic.Anthropic:
    url = up.ready["http"]["url"]
    return anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S, _strict_response_validation=True
    )


def openai_client(up: Up) -> openai.OpenAI:
    url = up.ready["http"]["url"]
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S, _strict_response_validation=True
    )


def test_agent_of_twenty_turns_reuses_what_it_said_before(up: Up) -> None:
    """The model calls no tool, so that the client says that it did: results, and all that came before, are fed back."""
    client = anthropic_client(up)
    messages: list[Any] = [{"role": "user", "content": "Go on."}]
    cached, sizes = [], []
    for turn in range(TURNS):
        answer = client.messages.create(model=MODEL, max_tokens=16, messages=messages, tools=TOOLS, extra_body=OURS)
        cached.append(answer.usage.cache_read_input_tokens or 0)
        sizes.append(cached[-1] + answer.usage.input_tokens)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 16)
        call = {"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {"at": turn}}
        messages.append({"role": "assistant", "content": [*answer.content, call]})
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": f"seen {turn} " + "and more " * 4}
        messages.append({"role": "user", "content": [result]})
    assert sizes == sorted(sizes)
    assert cached[0] == 0
    for before, now in zip(sizes, cached[1:], strict=False):
        assert now >= before // UNIT * UNIT, f"all whole pages of the prompt before: {cached}, {sizes}"


BODIES: Final[dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    "/v1/responses": {"input": "x", "max_output_tokens": 20},
}


def test_same_body_under_the_same_id_is_answered_byte_for_byte(up: Up) -> None:
    """Also after the coordinator was killed."""
    http = openai_client(up)._client
    url = up.ready["http"]["url"]

    def answers() -> dict[str, bytes]:
        told = {}
        for path, body in BODIES.items():
            headers = {"x-request-id": f"once{path.replace('/', '-')}"}
            answer = http.post(f"{url}{path}", json=body | {"model": MODEL} | OURS, headers=headers)
            assert answer.status_code == 200, answer.text
            told[path] = answer.content
        return told

    first = answers()
    assert answers() == first
    os.kill(up.ready["coordinator"]["pid"], signal.SIGKILL)
    assert answers() == first


def test_chat_of_a_tiny_checkpoint_counts_as_it_tokenizes(up: Up) -> None:
    client = openai_client(up)
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages: Any = [{"role": "user", "content": "Hé."}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=8, extra_body=OURS)
    told = client._client.post(
        f"{up.ready['http']['url']}/tokenize", json={"messages": messages, "tools": tools}
    ).json()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == told["count"]
    assert b"<|user|>H" in bytes(told["tokens"])
    assert answer.choices[0].message.content
