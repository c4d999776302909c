"""Turns in orders of real agents, by the official packages, before real processes of DeepSeek-V3.2 as published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import anthropic
import openai
import pytest

from tests.support.standing import Guest, Standing, guest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

LIMIT_S: Final = 240.0
MODEL: Final = "model"

HI: Final = {"role": "user", "content": "Hi"}
BRIEF: Final = {"role": "system", "content": "Reminder: be brief."}
USES: Final = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
RESULT: Final = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]}
TOOLS: Final[Any] = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
ORDERS: Final[dict[str, list[Any]]] = {
    "instruction last": [HI, BRIEF],
    "instruction in the middle": [HI, BRIEF, {"role": "user", "content": "Go on"}],
    "no result": [HI, USES, {"role": "user", "content": "never mind"}],
    "instruction before the result": [HI, USES, BRIEF, RESULT],
}
CALLS: Final = {
    "role": "assistant",
    "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
CALL_ITEM: Final = {"type": "function_call", "call_id": "t1", "name": "f", "arguments": "{}"}


@pytest.fixture
def site(published_cluster: Standing) -> Iterator[Guest]:
    with guest(published_cluster) as found:
        yield found


@pytest.mark.parametrize("name", ORDERS)
def test_messages_are_served_and_counted(site: Guest, name: str) -> None:
    with anthropic.Anthropic(base_url=site.url, api_key=site.key, max_retries=0, timeout=LIMIT_S) as client:
        said: dict[str, Any] = {"model": MODEL, "messages": ORDERS[name], "tools": TOOLS}
        answer = client.messages.create(**said, max_tokens=3)
        counted = client.messages.count_tokens(**said).input_tokens
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted
    assert answer.usage.output_tokens > 0


def test_chats_and_responses_are_served(site: Guest) -> None:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0, timeout=LIMIT_S) as client:
        chats: list[Any] = [[HI, BRIEF], [HI, CALLS, HI], [HI, CALLS, BRIEF]]
        for messages in chats:
            assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3).choices
        items: list[Any] = [[HI, BRIEF], [HI, CALL_ITEM, HI], [HI, CALL_ITEM, BRIEF]]
        for sent in items:
            assert client.responses.create(model=MODEL, input=sent, max_output_tokens=3).output is not None
        with pytest.raises(openai.BadRequestError, match="is the result of no call"):
            client.chat.completions.create(
                model=MODEL, messages=[HI, {"role": "tool", "tool_call_id": "t1", "content": "x"}], max_tokens=3
            )
