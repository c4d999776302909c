"""Conversations that hold what was answered before: as the openai and anthropic packages keep it, and as routers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from pydantic import BaseModel

from hisparse.http.models.formats.conversation import Conversation, PastCall, Turn, kept_thinking
from hisparse.http.models.formats.deepseek import encode
from tests.hisparse.http.apis.test_agents import (
    ANTHROPIC_TOOLS,
    ASKED,
    MODEL,
    OPENAI_TOOLS,
    RESPONSES_TOOLS,
    TURNS,
    in_thread,
)
from tests.support.agents_rig import agents_rig

#: Of an integer that no 64 bits hold, and of more levels than schemas may have.
LONG: Final = 99_999_999_999_999_999_999_999
DEEP: Final = "[" * 101 + "]" * 101


class Forecast(BaseModel):
    city: str
    days: int


def scripted(*outputs: str) -> Any:
    """The outputs, one after the other; the last one again."""
    left = list(outputs)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


async def test_parsed_messages_of_openai_are_sent_back(tmp_path: Path) -> None:
    tool: Any = openai.pydantic_function_tool(Forecast, name="get_weather")
    form = '{"city": "Paris", "days": 2}'

    def talk(client: openai.OpenAI) -> None:
        said: list[Any] = list(ASKED)
        called = client.chat.completions.parse(model=MODEL, messages=said, tools=[tool])
        message = called.choices[0].message
        assert message.tool_calls is not None
        assert isinstance(message.tool_calls[0].function.parsed_arguments, Forecast)
        said.append(message)
        said += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
        parsed = client.chat.completions.parse(
            model=MODEL, messages=said, response_format=Forecast, reasoning_effort="none"
        )
        assert isinstance(parsed.choices[0].message.parsed, Forecast)
        said += [parsed.choices[0].message, {"role": "user", "content": "And now?"}]
        with client.chat.completions.stream(model=MODEL, messages=said) as stream:
            final = stream.get_final_completion().choices[0].message
        said += [final, {"role": "user", "content": "And then?"}]
        dumped = [one.model_dump() if isinstance(one, BaseModel) else one for one in said]
        assert client.chat.completions.create(model=MODEL, messages=dumped).choices[0].message.content == "Sun."

    async with agents_rig(tmp_path, scripted(TURNS["glm-5"], form, "Sun.")) as rig:
        await in_thread(lambda: talk(rig.openai(strict=False)))
    assert form in rig.model.prompts[-1]


async def test_items_of_openai_are_sent_back(tmp_path: Path) -> None:
    def talk(client: openai.OpenAI) -> None:
        items: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
        answer = client.responses.create(model=MODEL, input=items, tools=RESPONSES_TOOLS)
        results = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": [{"type": "input_text", "text": "rain"}],
            }
            for item in answer.output
            if item.type == "function_call"
        ]
        parsed = client.responses.parse(
            model=MODEL,
            input=[*items, *answer.output, *results],  # type: ignore[list-item]
            text_format=Forecast,
            reasoning={"effort": "none"},
        )
        assert isinstance(parsed.output_parsed, Forecast)
        dumped = [item.model_dump() for item in (*answer.output, *parsed.output)]
        again = [*items, *dumped[:-1], *results, dumped[-1], {"role": "user", "content": "And now?"}]
        assert client.responses.create(model=MODEL, input=again).output_text == "Sun."

    async with agents_rig(tmp_path, scripted(TURNS["glm-5"], '{"city": "Paris", "days": 2}', "Sun.")) as rig:
        await in_thread(lambda: talk(rig.openai(strict=False)))
    assert rig.model.prompts[-1].count("rain") == 2


@pytest.mark.parametrize("beta", [False, True])
async def test_blocks_of_anthropic_are_sent_back(tmp_path: Path, beta: bool) -> None:
    async with agents_rig(tmp_path, scripted(TURNS["glm-5"], TURNS["glm-5"], "Sun.")) as rig:
        client = rig.anthropic()
        api: Any = client.beta.messages if beta else client.messages
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 2_000, "tools": ANTHROPIC_TOOLS}

        def talk() -> None:
            first = api.create(messages=ASKED, **ask)
            said = [*ASKED, *turn_of([block.model_dump() for block in first.content])]
            with api.stream(messages=said, **ask) as stream:
                second = stream.get_final_message()
            said += turn_of(second.content)
            last = api.create(messages=said, **ask)
            assert last.content[0].text == "Sun."
            said += [{"role": "assistant", "content": last.to_dict()["content"]}, {"role": "user", "content": None}]
            assert api.create(messages=said, **ask).content[0].text == "Sun."

        await in_thread(talk)
    assert rig.model.prompts[-1].count("rain") == 4


def turn_of(content: list[Any]) -> list[Any]:
    """The assistant's message, and one with the results of its calls."""
    names = [block["id"] if isinstance(block, dict) else block.id for block in content if "tool_use" in str(block)]
    results = [{"type": "tool_result", "tool_use_id": name, "content": "rain", "is_error": False} for name in names]
    return [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


# ---------------------------------------------------------------- arguments


async def test_arguments_of_ours_are_sent_back(tmp_path: Path) -> None:
    call = (
        f"<tool_call>step<arg_key>n</arg_key><arg_value>{LONG}</arg_value>"
        f"<arg_key>deep</arg_key><arg_value>{DEEP}</arg_value></tool_call>"
    )
    tools: Any = [{"type": "function", "name": "step", "parameters": {"type": "object"}, "strict": False}]
    async with agents_rig(tmp_path, lambda prompt: "Done." if "did it" in prompt else call) as rig:
        client = rig.openai()
        said: list[Any] = list(ASKED)

        def chat() -> str:
            message = client.chat.completions.create(model=MODEL, messages=said, tools=OPENAI_TOOLS).choices[0].message
            said.append(message)
            for one in message.tool_calls or ():
                assert json.loads(one.function.arguments)["n"] == LONG
                said.append({"role": "tool", "tool_call_id": one.id, "content": "did it"})
            again = client.chat.completions.create(model=MODEL, messages=said, tools=OPENAI_TOOLS)
            return again.choices[0].message.content or ""

        def messages() -> str:
            anthropic = rig.anthropic()
            ask: dict[str, Any] = {"model": MODEL, "max_tokens": 2_000, "tools": ANTHROPIC_TOOLS}
            first = anthropic.messages.create(messages=ASKED, **ask)
            block: Any = first.content[0]
            assert block.input["n"] == LONG
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "did it"}
            turns: Any = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            told: Any = anthropic.messages.create(messages=[*ASKED, *turns], **ask).content[0]
            return str(told.text)

        def responses() -> str:
            first = client.responses.create(model=MODEL, input="Go.", tools=tools)
            item: Any = first.output[0]
            result = {"type": "function_call_output", "call_id": item.call_id, "output": "did it"}
            items: Any = [{"role": "user", "content": "Go."}, item, result]
            return client.responses.create(model=MODEL, input=items, tools=tools).output_text

        for api in (chat, messages, responses):
            assert await in_thread(api) == "Done."
            assert f"<arg_value>{LONG}</arg_value>" in rig.model.prompts[-1]
            assert f"<arg_value>{DEEP}</arg_value>" in rig.model.prompts[-1]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": "x', '<arg_key>arguments</arg_key><arg_value>{"a": "x</arg_value>'),
        ("[1, 2]", "<arg_key>arguments</arg_key><arg_value>[1, 2]</arg_value>"),
        ("1e999", "<arg_key>arguments</arg_key><arg_value>1e999</arg_value>"),
        ("[" * 5_000, "<arg_key>arguments</arg_key><arg_value>[[[["),
        ('{"a": ' + "[" * 600 + "]" * 600 + "}", '<arg_key>arguments</arg_key><arg_value>{"a": [[['),
        ("null", "<tool_call>step\n</tool_call>"),
        ("", "<tool_call>step\n</tool_call>"),
    ],
)
async def test_earlier_arguments_are_any_text(tmp_path: Path, arguments: str, shown: str) -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "step", "arguments": arguments}}
    result: Any = {"role": "tool", "tool_call_id": "c", "content": "did it"}
    items: Any = [
        {"role": "user", "content": "Go."},
        {"type": "function_call", "call_id": "c", "name": "step", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "did it"},
    ]
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        client = rig.openai()
        said: list[Any] = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        await in_thread(lambda: client.chat.completions.create(model=MODEL, messages=said, tools=OPENAI_TOOLS))
        await in_thread(lambda: client.responses.create(model=MODEL, input=items, tools=RESPONSES_TOOLS))
    assert len(rig.model.prompts) == 2
    for prompt in rig.model.prompts:
        assert shown in prompt


def test_long_arguments_are_shown_where_no_template_is() -> None:
    turns = (
        Turn("user", "Go."),
        Turn("assistant", calls=(PastCall("c", "step", {"n": LONG, "deep": json.loads(DEEP)}),)),
        Turn("tool", "did it", call_id="c"),
    )
    prompt = encode(Conversation(turns))
    assert f'name="n" string="false">{LONG}<' in prompt
    assert f'string="false">{DEEP}<' in prompt


def test_earlier_thinking_is_kept_where_no_template_is() -> None:
    turns = (
        Turn("user", "A"),
        Turn("assistant", "b", "Hm."),
        Turn("user", "C"),
        Turn("assistant", "d"),
        Turn("user", "E"),
    )
    told = {
        keeps: encode(Conversation(turns, thinking=True, variables=kept_thinking(keeps))) for keeps in (True, False)
    }
    assert "<｜Assistant｜><think>Hm.</think>b" in told[True]
    assert "<｜User｜>C<｜Assistant｜></think>d" in told[True]
    assert "Hm." not in told[False]
    assert all(prompt.endswith("E<｜Assistant｜><think>") for prompt in told.values())


# ---------------------------------------------------------------- empty fields of others

EMPTY: Final[Any] = {"reasoning": None, "reasoning_details": [], "thinking_blocks": [], "provider_specific_fields": {}}


async def test_empty_fields_of_routers_are_taken(tmp_path: Path) -> None:
    """At each level of a body, and of each kind of empty."""
    function = {"name": "step", "arguments": "{}", **EMPTY}
    call = {"id": "c", "type": "function", "function": function, "thought_signature": "", **EMPTY}
    spoken = {"role": "assistant", "content": "So.", "tool_calls": [call], "refusal": None, "audio": None, **EMPTY}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "did it", **EMPTY}], **EMPTY}
    chat = {"messages": [*ASKED, spoken, result], "tools": [OPENAI_TOOLS[1] | EMPTY], "n": 1.0, **EMPTY}
    use = {"type": "tool_use", "id": "c", "name": "step", "input": {"null": None}, "toolset_name": None, **EMPTY}
    blocks = {"role": "assistant", "content": [use, {"type": "text", "text": "So.", "citations": None}], **EMPTY}
    ended = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "did it", **EMPTY}]}
    items = [{"role": "user", "content": "Go.", **EMPTY}, {"type": "reasoning", "summary": [], "id": "r", **EMPTY}]
    tools = [ANTHROPIC_TOOLS[1] | EMPTY]
    bodies: dict[str, Any] = {
        "/v1/chat/completions": chat,
        "/v1/messages": {"max_tokens": 8.0, "messages": [*ASKED, blocks, ended], "tools": tools, **EMPTY},
        "/v1/messages/count_tokens": {"messages": [*ASKED, blocks, ended], "tools": tools, **EMPTY},
        "/v1/responses": {"input": items, "tools": [RESPONSES_TOOLS[0] | EMPTY], "max_output_tokens": 8.0, **EMPTY},
        "/v1/completions": {"prompt": "x", "max_tokens": 8.0, "seed": 1.0, "logit_bias": {}, **EMPTY},
        "/tokenize": {"messages": [*ASKED, spoken, result], **EMPTY},
    }
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        http = rig.openai()._client
        for path, body in bodies.items():
            answer = await in_thread(lambda path=path, body=body: http.post(f"{rig.url}{path}", json=body))
            assert answer.status_code == 200, answer.text
            named = body | {"reasoning_details": [{"type": "reasoning.text"}]}
            refused = await in_thread(lambda path=path, named=named: http.post(f"{rig.url}{path}", json=named))
            assert refused.status_code == 400
            assert "reasoning_details" in refused.text
    assert "<arg_key>null</arg_key><arg_value>null</arg_value>" in rig.model.prompts[1], "values of free form stay"
