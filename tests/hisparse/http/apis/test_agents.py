"""Agents before the front: the openai and anthropic packages, which check every type, and a model that is a fake.

What it writes is prescribed, because a random checkpoint calls no tools. All else is real: sockets, front, gateway.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anthropic
import jsonschema
import openai
import pytest
import trio
from openai.types import CompletionUsage
from pydantic import BaseModel

from tests.support.agents_rig import AgentsRig, agents_rig
from tests.support.fakes.fake_model import Said, Walk
from tests.support.http_rig import KEY

T = TypeVar("T")

MODEL: Final = "fake"
SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ARGUMENTS: Final = {"city": "Paris", "days": 2}
ASKED: Final[Any] = [{"role": "user", "content": "Weather in Paris?"}]

OPENAI_TOOLS: Final[Any] = [
    {"type": "function", "function": {"name": name, "description": "Tells it", "parameters": SCHEMA}}
    for name in ("get_weather", "step")
]
RESPONSES_TOOLS: Final[Any] = [
    {"type": "function", "name": "get_weather", "description": "Tells it", "parameters": SCHEMA, "strict": True}
]
ANTHROPIC_TOOLS: Final[Any] = [
    {"name": name, "description": "Tells it", "input_schema": SCHEMA} for name in ("get_weather", "step")
]

#: A whole turn of each family: reasoning, text, two calls.
TURNS: Final = {
    "glm-5": (
        "<think>\nThey want Paris.\n</think>\nI look, é 😀.\n"
        + "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>\n" * 2
    ),
    "deepseek-v3.2": (
        "They want Paris.</think>I look, é 😀.\n\n<｜DSML｜function_calls>\n" + '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        * 2
        + "</｜DSML｜function_calls>"
    ),
}
THINKING: Final = {"glm-5": {}, "deepseek-v3.2": {"chat_template_kwargs": {"thinking": True}}}

families = pytest.mark.parametrize("family", TURNS)


async def in_thread(call: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


# ---------------------------------------------------------------- a turn with reasoning, text and calls


@families
async def test_chat_turn_is_the_same_whole_and_streamed(tmp_path: Path, family: str) -> None:
    async with agents_rig(tmp_path, lambda _: TURNS[family], family=family) as rig:
        ask = partial(
            rig.openai().chat.completions.create,
            model=MODEL,
            messages=ASKED,
            tools=OPENAI_TOOLS,
            tool_choice="auto",
            extra_body=THINKING[family],
        )
        whole = await in_thread(lambda: ask(extra_headers={"idempotency-key": "turn-1"}))
        chunks = await in_thread(
            lambda: list(ask(stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
        )
    choice = whole.choices[0]
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look, é 😀.")
    assert choice.message.reasoning_content == "They want Paris."
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, ARGUMENTS]
    assert [call.function.name for call in calls] == ["get_weather", "get_weather"]
    assert calls[0].id != calls[1].id
    assert all(call.id.startswith("call_") for call in calls)
    assert whole.usage.completion_tokens_details.reasoning_tokens > len("They want Paris.")

    deltas = [it.choices[0].delta for it in chunks if it.choices]
    assert "".join(it.content or "" for it in deltas) == choice.message.content
    assert "".join(getattr(it, "reasoning_content", None) or "" for it in deltas) == "They want Paris."
    streamed = [call for it in deltas for call in it.tool_calls or ()]
    assert [(call.index, call.function.name) for call in streamed] == [(0, "get_weather"), (1, "get_weather")]
    assert [json.loads(call.function.arguments) for call in streamed] == [ARGUMENTS, ARGUMENTS]
    assert [it.choices[0].finish_reason for it in chunks if it.choices][-1] == "tool_calls"
    assert chunks[-1].usage == whole.usage


async def test_openai_client_reads_what_became_of_drafts(tmp_path: Path) -> None:
    """Of chats and completions, whole and streamed."""
    async with agents_rig(tmp_path, lambda _: "Paris.") as rig:
        rig.front.gateway.scheduler.drafts = (5, 3)
        client, lenient = (
            rig.openai(),
            rig.openai(strict=False),
        )  # its type of a completion has no chunk before the last
        streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chat: dict[str, Any] = {"model": MODEL, "messages": ASKED}
        completion: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 20}
        asks: tuple[Callable[[], Any], ...] = (
            lambda: client.chat.completions.create(**chat),
            lambda: list(client.chat.completions.create(**chat, **streamed))[-1],
            lambda: client.completions.create(**completion),
            lambda: list(lenient.completions.create(**completion, **streamed))[-1],
        )
        usages = [(await in_thread(ask)).usage for ask in asks]
    for usage in usages:
        told = CompletionUsage.model_validate(usage.model_dump(), strict=True).completion_tokens_details
        assert told is not None
        assert (told.accepted_prediction_tokens, told.rejected_prediction_tokens) == (3, 2)


@families
async def test_anthropic_turn_is_the_same_whole_and_streamed(tmp_path: Path, family: str) -> None:
    async with agents_rig(tmp_path, lambda _: TURNS[family], family=family) as rig:
        client = rig.anthropic()
        ask: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 2_000,
            "messages": ASKED,
            "system": "Be brief.",
            "tools": ANTHROPIC_TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 1_024},
        }
        if family == "glm-5":  # its template opens the reasoning itself then
            ask["thinking"] = {"type": "disabled"}
        whole = await in_thread(lambda: client.messages.create(**ask))

        def streamed() -> Any:
            with client.messages.stream(**ask) as stream:
                events = [event.type for event in stream]
                return events, stream.get_final_message()

        events, final = await in_thread(streamed)
        count = await in_thread(
            lambda: client.messages.count_tokens(**{key: ask[key] for key in ask if key != "max_tokens"})
        )
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("They want Paris.", "I look, é 😀.")
    assert [block.input for block in whole.content[2:]] == [ARGUMENTS, ARGUMENTS]
    assert len({block.id for block in whole.content[2:]}) == 2
    assert (whole.stop_reason, whole.role) == ("tool_use", "assistant")
    assert [_block(it) for it in final.content] == [_block(it) for it in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert count.input_tokens == whole.usage.input_tokens


async def test_anthropic_client_knows_its_request_by_the_coordinators_id(tmp_path: Path) -> None:
    """Whole, streamed, and of an output that fails; the openai package has an id of its own."""
    said = [Said("Paris.")]
    async with agents_rig(tmp_path, lambda _: said[-1]) as rig:
        client, scheduler = rig.anthropic(), rig.front.gateway.scheduler
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": ASKED}
        raw = await in_thread(lambda: client.messages.with_raw_response.create(**ask))

        def streamed() -> str | None:
            with client.messages.stream(**ask) as stream:
                stream.until_done()
                return stream.request_id

        ids = [raw.parse()._request_id, await in_thread(streamed)]
        said.append(Said("Par", outcome="FAILED"))
        with pytest.raises(anthropic.APIStatusError) as failed:
            await in_thread(lambda: client.messages.create(**ask))
        assert [*ids, failed.value.request_id] == list(scheduler.request_indices)
        said.append(Said("Paris."))
        chats = rig.openai().chat.completions.with_raw_response
        other = await in_thread(lambda: chats.create(model=MODEL, messages=ASKED))
    assert raw.headers["hisparse-request-id"] == raw.headers["request-id"] == ids[0]
    assert "hisparse-request-id" in other.headers
    assert "request-id" not in other.headers


def _block(block: Any) -> dict[str, Any]:
    told: dict[str, Any] = block.model_dump()
    told.pop("id", None)
    return told


@families
async def test_response_is_the_same_whole_and_streamed(tmp_path: Path, family: str) -> None:
    async with agents_rig(tmp_path, lambda _: TURNS[family], family=family) as rig:
        client = rig.openai()
        ask: dict[str, Any] = {
            "model": MODEL,
            "input": "Weather in Paris?",
            "instructions": "Be brief.",
            "tools": RESPONSES_TOOLS,
            "store": False,
            "metadata": {"a": "b"},
            "extra_body": THINKING[family],
        }
        whole = await in_thread(lambda: client.responses.create(**ask))
        events = await in_thread(lambda: list(client.responses.create(stream=True, **ask)))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "I look, é 😀."
    assert whole.output[0].content[0].text == "They want Paris."
    assert [json.loads(item.arguments) for item in whole.output[2:]] == [ARGUMENTS, ARGUMENTS]
    assert (whole.status, whole.metadata, whole.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert (events[-1].type, [_item(it) for it in final.output]) == (
        "response.completed",
        [_item(it) for it in whole.output],
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.item.id for event in events if event.type == "response.output_item.done"] == [
        item.id for item in final.output
    ]


def _item(item: Any) -> dict[str, Any]:
    return {key: value for key, value in item.model_dump().items() if key not in ("id", "call_id")}


async def test_broken_call_is_text_in_every_api(tmp_path: Path) -> None:
    broken = TURNS["glm-5"][:-25]
    async with agents_rig(tmp_path, lambda _: Said(broken, "length")) as rig:
        chat = await in_thread(
            lambda: rig.openai().chat.completions.create(model=MODEL, messages=ASKED, tools=OPENAI_TOOLS)
        )
        message = await in_thread(
            lambda: rig.anthropic().messages.create(
                model=MODEL, max_tokens=2_000, messages=ASKED, tools=ANTHROPIC_TOOLS
            )
        )
        response = await in_thread(lambda: rig.openai().responses.create(model=MODEL, input="x", tools=RESPONSES_TOOLS))
    assert chat.choices[0].finish_reason == "length"
    assert len(chat.choices[0].message.tool_calls or ()) == 1
    for text in (chat.choices[0].message.content, message.content[-1].text, response.output[-1].content[0].text):
        assert text is not None
        assert broken.endswith(text.removeprefix("I look, é 😀.").lstrip())
        assert "<tool_call>get_weather" in text
    assert (message.stop_reason, response.status, response.output[-1].status) == ("max_tokens",) + ("incomplete",) * 2
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_chosen_tools_and_parallel_calls_are_heeded(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda _: TURNS["glm-5"]) as rig:
        client = rig.openai()
        none = await in_thread(
            lambda: client.chat.completions.create(model=MODEL, messages=ASKED, tools=OPENAI_TOOLS, tool_choice="none")
        )
        single = await in_thread(
            lambda: client.chat.completions.create(
                model=MODEL, messages=ASKED, tools=OPENAI_TOOLS, parallel_tool_calls=False
            )
        )
    assert none.choices[0].message.tool_calls is None
    assert "<tool_call>" in (none.choices[0].message.content or "")
    assert "get_weather" not in rig.model.prompts[0], "the model is not shown what it may not call"
    assert len(single.choices[0].message.tool_calls or ()) == 1
    assert "<tool_call>" in (single.choices[0].message.content or "")


async def test_stop_sequence_is_told(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda _: Said("so far", "stop")) as rig:
        ask = partial(rig.anthropic().messages.create, model=MODEL, max_tokens=9, messages=ASKED)
        one = await in_thread(lambda: ask(stop_sequences=["END"]))
        two = await in_thread(lambda: ask(stop_sequences=["END", "STOP"]))
    assert (one.stop_reason, one.stop_sequence) == ("stop_sequence", "END")
    assert (two.stop_reason, two.stop_sequence) == ("stop_sequence", None)


# ---------------------------------------------------------------- agents

STEPS: Final = 20


def stepping(prompt: str) -> Said:
    """Call `step` until STEPS results are in the prompt, then say so. Each prompt holds the one before it."""
    done = prompt.count("<tool_response>")
    if done == STEPS:
        return Said(f"Done after {done} steps.", prefix_tokens=100 * done)
    call = f"<tool_call>step<arg_key>days</arg_key><arg_value>{done}</arg_value></tool_call>"
    return Said(f"<think>Step {done}.</think>Now.\n{call}", prefix_tokens=100 * done)


async def test_openai_agent_takes_twenty_turns(tmp_path: Path) -> None:
    def loop(rig: AgentsRig) -> tuple[str, list[int]]:
        client, cached = rig.openai(), []
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        for _ in range(STEPS + 1):
            answer = client.chat.completions.create(model=MODEL, messages=messages, tools=OPENAI_TOOLS)
            message = answer.choices[0].message
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
            messages.append(message)  # as it came
            for call in message.tool_calls or ():
                days = json.loads(call.function.arguments)["days"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"did {days}"})
        return message.content or "", cached

    async with agents_rig(tmp_path, stepping) as rig:
        text, cached = await in_thread(lambda: loop(rig))
    assert (text, cached) == (f"Done after {STEPS} steps.", [100 * step for step in range(STEPS + 1)])
    last = rig.model.prompts[-1]
    assert [last.index(f"<tool_response>did {step}<") for step in range(STEPS)] == sorted(
        last.index(f"<tool_response>did {step}<") for step in range(STEPS)
    )


async def test_anthropic_agent_takes_twenty_streamed_turns(tmp_path: Path) -> None:
    def loop(rig: AgentsRig) -> tuple[str, int]:
        client, cached = rig.anthropic(), 0
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        for _ in range(STEPS + 1):
            with client.messages.stream(
                model=MODEL, max_tokens=500, messages=messages, tools=ANTHROPIC_TOOLS
            ) as stream:
                answer = stream.get_final_message()
            cached += answer.usage.cache_read_input_tokens or 0
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"did {block.input['days']}"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if results:
                messages.append({"role": "user", "content": results})
        return answer.content[-1].text, cached

    async with agents_rig(tmp_path, stepping) as rig:
        text, cached = await in_thread(lambda: loop(rig))
    assert (text, cached) == (f"Done after {STEPS} steps.", sum(100 * step for step in range(STEPS + 1)))


async def test_responses_agent_takes_twenty_turns(tmp_path: Path) -> None:
    tools: Any = [{"type": "function", "name": "step", "parameters": SCHEMA, "strict": False}]

    def loop(rig: AgentsRig) -> str:
        client = rig.openai()
        items: list[Any] = [{"role": "user", "content": "Go."}]
        for _ in range(STEPS + 1):
            answer = client.responses.create(model=MODEL, input=items, tools=tools)
            items += answer.output
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "did it"}
                for item in answer.output
                if item.type == "function_call"
            ]
        return answer.output_text

    async with agents_rig(tmp_path, stepping) as rig:
        assert await in_thread(lambda: loop(rig)) == f"Done after {STEPS} steps."
    assert "Step 19." in rig.model.prompts[-1], "reasoning is fed back"


# ---------------------------------------------------------------- structured output


class Weather(BaseModel):
    city: str
    days: int


@families
async def test_openai_gets_what_it_asks_for_by_schema(tmp_path: Path, family: str) -> None:
    """The package reads the answers as its own structured outputs: a parsed message, and calls with arguments."""
    async with agents_rig(tmp_path, lambda _: Walk(), family=family) as rig:
        client = rig.openai(strict=False)  # what it parses is of a type of its own
        said: dict[str, Any] = {"model": MODEL, "messages": ASKED, "reasoning_effort": "none", "seed": 3}
        text = await in_thread(lambda: client.chat.completions.parse(response_format=Weather, **said))
        called = await in_thread(
            lambda: client.chat.completions.create(tools=OPENAI_TOOLS, tool_choice="required", **said)
        )
        named: Any = {"type": "function", "function": {"name": "step"}}
        chunks = await in_thread(
            lambda: list(client.chat.completions.create(tools=OPENAI_TOOLS, tool_choice=named, stream=True, **said))
        )
        response = await in_thread(
            lambda: client.responses.parse(
                model=MODEL, input="Weather?", text_format=Weather, reasoning={"effort": "none"}
            )
        )
        item = await in_thread(
            lambda: client.responses.create(
                model=MODEL, input="x", tools=RESPONSES_TOOLS, tool_choice="required", reasoning={"effort": "none"}
            )
        )
    assert isinstance(text.choices[0].message.parsed, Weather)
    assert isinstance(response.output_parsed, Weather)
    assert response.text.format.type == "json_schema"
    for call in called.choices[0].message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert called.choices[0].finish_reason == "tool_calls"
    deltas = [call for it in chunks for call in it.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in deltas] == ["step"]
    assert {it.type for it in item.output} == {"function_call"}


@families
async def test_anthropic_gets_what_it_asks_for_by_schema(tmp_path: Path, family: str) -> None:
    async with agents_rig(tmp_path, lambda _: Walk(), family=family) as rig:
        client = rig.anthropic()
        said: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 2_000,
            "messages": ASKED,
            "thinking": {"type": "disabled"},
            "tools": ANTHROPIC_TOOLS,
        }
        one = await in_thread(lambda: client.messages.create(tool_choice={"type": "tool", "name": "step"}, **said))
        some = await in_thread(lambda: client.messages.create(tool_choice={"type": "any"}, **said))
    assert [(block.type, block.name) for block in one.content] == [("tool_use", "step")]
    for block in (*one.content, *some.content):
        jsonschema.validate(block.input, SCHEMA)
    assert (one.stop_reason, some.stop_reason) == ("tool_use", "tool_use")


# ---------------------------------------------------------------- errors

TOOL_USE: Final = {"type": "tool_use", "id": "1", "name": "f"}
#: A schema of which no grammar can be made.
UNSUPPORTED: Final = {"type": "object", "properties": {"a": {"if": {}}}}
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:,"}}
AUDIO: Final = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    ("changes", "param", "text"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type",
            "images are not supported",
        ),
        ({"messages": [{"role": "user", "content": [AUDIO]}]}, "messages[0].content[0].type", "audio is not supported"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs a tool to call"),
        (
            {"tools": OPENAI_TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "is the name of no tool",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "rename the tool"),
        ({"tools": OPENAI_TOOLS[:1] * 2}, "tools[1].function.name", "another tool too"),
        (
            {"messages": [{"role": "user", "content": "x", "refusal": "no"}]},
            "messages[0].refusal",
            "for messages of role assistant",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": UNSUPPORTED}}},
            "response_format.json_schema.schema.properties.a",
            'Unimplemented keys: ["if"]',
        ),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs", "logprobs"),
    ],
)
async def test_chat_refusal_is_openais(tmp_path: Path, changes: dict[str, Any], param: str, text: str) -> None:
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await in_thread(
                lambda: rig.openai().chat.completions.create(**{"model": MODEL, "messages": ASKED} | changes)
            )
    assert (caught.value.param, caught.value.code) == (param, "bad_input")
    assert text.lower() in caught.value.message.lower()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images are not supported"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice.type: needs a tool to call"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
            "tool_choice.name: is the name of no tool that is a function, and bash_20250124 is skipped here (got bash)",
        ),
        (
            {"messages": [{"role": "assistant", "content": [TOOL_USE | {"input": [1]}]}, *ASKED]},
            "messages[0].content[0].input: expected an object",
        ),
        ({"messages": [*ASKED, {"role": "assistant", "content": "So"}]}, "cannot be continued"),
        ({"max_tokens": 1_000_000}, "Lower max_tokens to"),
        ({"stop_sequences": [""]}, "stop_sequences: a stop string has 1 to"),
        ({"extra_body": {"container": "x"}}, "container: is not supported"),
        ({"messages": []}, "messages: is empty"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": UNSUPPORTED}}},
            "output_config.format.schema.properties.a",
        ),
        ({"extra_body": {"mesages": [1]}}, "Did you mean messages?"),
    ],
)
async def test_message_refusal_is_anthropics(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await in_thread(
                lambda: rig.anthropic().messages.create(
                    **{"model": MODEL, "max_tokens": 5, "messages": ASKED} | changes
                )
            )
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert text in body["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param", "text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is not supported"),
        ({"background": True}, "background", "is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "Use one of message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "images are"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is missing"),
        ({"tools": [{"type": "a b"}]}, "tools[0].type", "is the name of no kind"),
        ({"max_output_tokens": 1_000_000}, "input", "Lower max_output_tokens to"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "Use one of text, json_object"),
        ({"input": []}, "input", "is empty"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": UNSUPPORTED}}},
            "text.format.schema.properties.a",
            'Unimplemented keys: ["if"]',
        ),
    ],
)
async def test_response_refusal_is_openais(tmp_path: Path, changes: dict[str, Any], param: str, text: str) -> None:
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await in_thread(lambda: rig.openai().responses.create(**{"model": MODEL, "input": "x"} | changes))
    assert caught.value.param == param
    assert text in caught.value.message


async def test_keys_and_models_are_checked_in_every_api(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda _: "x", keys=(KEY,)) as rig:
        for call in (
            lambda: rig.anthropic("wrong").messages.create(model=MODEL, max_tokens=5, messages=ASKED),
            lambda: rig.anthropic("wrong").messages.count_tokens(model=MODEL, messages=ASKED),
        ):
            with pytest.raises(anthropic.AuthenticationError):
                await in_thread(call)
        with pytest.raises(openai.AuthenticationError):
            await in_thread(lambda: rig.openai("wrong").responses.create(model=MODEL, input="x"))
        with pytest.raises(anthropic.NotFoundError):
            await in_thread(lambda: rig.anthropic().messages.create(model="other", max_tokens=5, messages=ASKED))
        with pytest.raises(openai.NotFoundError):
            await in_thread(lambda: rig.openai().responses.create(model="other", input="x"))
        answer = await in_thread(lambda: rig.anthropic().messages.create(model=MODEL, max_tokens=5, messages=ASKED))
    assert answer.content[0].text == "x"


async def test_stream_that_fails_ends_with_the_error_of_its_api(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda _: Said("so far", outcome="FAILED")) as rig:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await in_thread(
                lambda: list(rig.anthropic().messages.create(model=MODEL, max_tokens=50, messages=ASKED, stream=True))
            )
        assert "failed" in str(caught.value)
        with pytest.raises(openai.APIError, match="failed"):
            await in_thread(
                lambda: list(rig.openai().chat.completions.create(model=MODEL, messages=ASKED, stream=True))
            )
        events = await in_thread(lambda: list(rig.openai().responses.create(model=MODEL, input="x", stream=True)))
    assert (events[-1].type, events[-1].code) == ("error", "failed")


# ---------------------------------------------------------------- tokens, echo, progress


async def test_tokens_and_texts_are_each_others(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        http = rig.openai()._client
        post = partial(in_thread)
        told = (await post(lambda: http.post(f"{rig.url}/tokenize", json={"model": MODEL, "prompt": "hé"}))).json()
        assert told == {"count": 3, "max_model_len": 65_536, "tokens": [*"hé".encode()], "token_strs": None}
        back = (await post(lambda: http.post(f"{rig.url}/detokenize", json={"tokens": told["tokens"]}))).json()
        assert back == {"prompt": "hé"}
        chat = {"messages": ASKED, "tools": OPENAI_TOOLS}
        counted = (await post(lambda: http.post(f"{rig.url}/tokenize", json=chat))).json()
        answer = await post(
            lambda: rig.openai().chat.completions.create(model=MODEL, messages=ASKED, tools=OPENAI_TOOLS)
        )
        assert answer.usage.prompt_tokens == counted["count"]
        assert bytes(counted["tokens"]).decode() == rig.model.prompts[0]
        for path, body, field in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": ASKED}, "prompt"),
            ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
            ("/detokenize", {"tokens": [999]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ):
            refused = await post(lambda path=path, body=body: http.post(f"{rig.url}{path}", json=body))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_echo_puts_the_prompt_before_its_text(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda prompt: prompt.upper()) as rig:
        ask = partial(rig.openai().completions.create, model=MODEL, echo=True, max_tokens=9)
        texts = await in_thread(lambda: ask(prompt=["ab", "cd"], n=2))
        ids = await in_thread(lambda: ask(prompt=[104, 105]))
        # The package's type of chunks has no null for `finish_reason`, which OpenAI's own server sends.
        loose = rig.openai(strict=False)
        chunks = await in_thread(
            lambda: list(loose.completions.create(model=MODEL, prompt="ab", echo=True, max_tokens=9, stream=True))
        )
    assert [choice.text for choice in texts.choices] == ["abAB", "abAB", "cdCD", "cdCD"]
    assert ids.choices[0].text == "hiHI"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abAB"


@pytest.mark.refuses("NotFound path={}: no such request")
async def test_progress_is_that_of_the_owners_request(tmp_path: Path) -> None:
    other = "another-key-of-32-characters-00"
    async with agents_rig(tmp_path, lambda _: "x", keys=(KEY, other)) as rig:
        client = rig.openai()
        headers = {"idempotency-key": "mine"}
        await in_thread(lambda: client.completions.create(model=MODEL, prompt="x", max_tokens=2, extra_headers=headers))
        row = await in_thread(lambda: client.get("/requests/mine", cast_to=object))
        assert (row["id"], row["hit_rate"]) == ("mine", None)
        two: Any = {"max_tokens": 2, "n": 2, "extra_headers": {"idempotency-key": "two"}}
        told = await in_thread(lambda: client.completions.create(model=MODEL, prompt="x", **two))
        assert told._request_id == "two"
        sample = await in_thread(lambda: client.get("/requests/two-1", cast_to=object))
        assert sample["id"] == "two-1"
        assert {"state", "worker", "generated_tokens", "waits_for"} <= row.keys()
        for key, name in ((other, "mine"), (KEY, "other"), (KEY, "x" * 500)):
            with pytest.raises(openai.NotFoundError):
                await in_thread(lambda key=key, name=name: rig.openai(key).get(f"/requests/{name}", cast_to=object))
