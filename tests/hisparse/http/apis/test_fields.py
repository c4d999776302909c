"""Fields and values that clients of the references send, on a real front."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import anthropic
import msgspec
import openai
import pytest

from basics.request_checks import TOP_P_MIN
from protocol import messages
from tests.hisparse.http.apis.test_agents import ANTHROPIC_TOOLS, ASKED, MODEL, OPENAI_TOOLS, RESPONSES_TOOLS, in_thread
from tests.support.agents_rig import AgentsRig, agents_rig
from tests.support.fakes.fake_model import Walk
from tests.support.http_rig import front_rig

CACHE: Final = {"type": "ephemeral"}


async def post(rig: AgentsRig, path: str, body: Any) -> Any:
    http = rig.openai()._client
    return await in_thread(lambda: http.post(f"{rig.url}{path}", json=body))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"reasoning_effort": "max", "moderation": {"model": "m"}, "prediction": {"type": "x"}},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    *(
                        {
                            "role": "user",
                            "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {"a": 1}}],
                        },
                    ),
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
                    {"role": "assistant", "content": None, "refusal": "I will not."},
                    {"role": "user", "content": None},
                ],
                "prompt_cache_options": {"mode": "explicit"},
            },
        ),
        ("/v1/responses", {"client_metadata": {"a": "b"}, "prompt_cache_options": {"a": 1}, "max_tool_calls": 5}),
        ("/v1/responses", {"include": ["web_search_call.results"], "reasoning": {"effort": "max", "summary": "auto"}}),
        ("/v1/messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (
            "/v1/messages",
            {"thinking": {"type": "between_tools"}, "cache_control": CACHE, "system": [], "fallbacks": []},
        ),
        (
            "/v1/messages",
            {
                "tools": [
                    ANTHROPIC_TOOLS[0]
                    | {"defer_loading": False, "input_examples": [{"city": "Paris"}], "allowed_callers": ["direct"]}
                ]
            },
        ),
        ("/v1/messages", {"output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 9}}}),
    ],
)
async def test_fields_that_ask_for_nothing_of_ours_are_taken(tmp_path: Path, path: str, body: Any) -> None:
    least = {"input": "x"} if path == "/v1/responses" else {"messages": ASKED, "max_tokens": 50}
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        answer = await post(rig, path, least | body)
    assert answer.status_code == 200, answer.text
    assert "hisparse-ignored" not in answer.headers


# ---------------------------------------------------------------- tools


async def test_tools_that_are_no_functions_are_skipped_and_named(tmp_path: Path) -> None:
    other: Any = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "free"}]
    items: Any = [
        {"role": "user", "content": "Go."},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "free", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
        {"role": "user", "content": "On."},
    ]
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    use: Any = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    found: Any = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    spoken: Any = [*ASKED, {"role": "assistant", "content": [use, found, {"type": "text", "text": "So."}]}, *ASKED]
    free: Any = {"type": "custom", "custom": {"name": "free"}}

    def names(rig: AgentsRig) -> list[str]:
        client, ours = rig.openai(), rig.anthropic()
        ask: dict[str, Any] = {"model": MODEL, "messages": spoken, "tools": [search, ANTHROPIC_TOOLS[0]]}
        answers: list[Any] = [
            client.responses.with_raw_response.create(model=MODEL, input=items, tools=[*other, *RESPONSES_TOOLS]),
            client.chat.completions.with_raw_response.create(model=MODEL, messages=ASKED, tools=[free, *OPENAI_TOOLS]),
            ours.messages.with_raw_response.create(max_tokens=9, **ask),
            ours.messages.with_raw_response.create(max_tokens=9, stream=True, **ask),
            ours.messages.with_raw_response.count_tokens(**ask),
            client.responses.with_raw_response.create(model=MODEL, input="x", tools=RESPONSES_TOOLS),
        ]
        assert [tool.name for tool in answers[0].parse().tools] == ["get_weather"]
        return [answer.headers.get("hisparse-ignored", "") for answer in answers]

    async with agents_rig(tmp_path, lambda _: "x") as rig:
        told = await in_thread(lambda: names(rig))
    assert {frozenset(one.split(", ")) for one in told[2:5]} == {
        frozenset(("server_tool_use", "web_search_tool_result", "web_search_20250305"))
    }
    assert told[0].split(", ") == [
        *("web_search", "local_shell", "custom", "web_search_call", "custom_tool_call", "custom_tool_call_output")
    ]
    assert (told[1], told[5]) == ("custom", "")
    assert "free" not in "".join(rig.model.prompts)
    assert "So." in rig.model.prompts[2]


async def test_only_allowed_tools_are_shown_and_called(tmp_path: Path) -> None:
    function: Any = {"type": "function", "function": {"name": "step"}}
    flat: Any = [{"type": "function", "name": "get_weather"}, {"type": "mcp", "server_label": "other"}]
    tools: Any = [*RESPONSES_TOOLS, RESPONSES_TOOLS[0] | {"name": "step"}]

    def chat(mode: str) -> Any:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function]}}

    async with agents_rig(tmp_path, lambda prompt: Walk() if "step" in prompt else "x") as rig:
        client = rig.openai()
        said: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": OPENAI_TOOLS, "reasoning_effort": "none"}
        called = await in_thread(lambda: client.chat.completions.create(tool_choice=chat("required"), **said))
        choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": flat}
        answer = await in_thread(
            lambda: client.responses.create(model=MODEL, input="x", tools=tools, tool_choice=choice)
        )
        for odd in (chat("required") | {"allowed_tools": {"mode": "required", "tools": []}}, chat("sometimes")):
            with pytest.raises(openai.BadRequestError):
                await in_thread(lambda odd=odd: client.chat.completions.create(tool_choice=odd, **said))
        unknown = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
        with pytest.raises(openai.BadRequestError, match="is the name of no tool"):
            await in_thread(
                lambda: client.responses.create(model=MODEL, input="x", tools=tools, tool_choice=unknown)  # type: ignore[call-overload]
            )
    calls = called.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {"step"}
    assert "get_weather" not in rig.model.prompts[0]
    assert ("get_weather" in rig.model.prompts[1], "step" in rig.model.prompts[1]) == (True, False)
    assert answer.tool_choice.tools == flat
    assert [tool.name for tool in answer.tools] == ["get_weather", "step"]


# ---------------------------------------------------------------- earlier thinking

THOUGHT: Final[Any] = [
    *ASKED,
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "First.", "signature": ""}]},
    {"role": "user", "content": "And?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Second.", "signature": ""},
            {"type": "tool_use", "id": "t", "name": "step", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "did it"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Third.", "signature": ""}]},
    {"role": "user", "content": "Well?"},
]


@pytest.mark.parametrize(
    ("keep", "kept", "cleared"),
    [
        ("all", ["First.", "Second.", "Third."], None),
        ({"type": "all"}, ["First.", "Second.", "Third."], None),
        ({"type": "thinking_turns", "value": 2}, ["First.", "Second.", "Third."], None),
        ({"type": "thinking_turns", "value": 1}, ["Second.", "Third."], (1, len("First."))),
        (None, ["Second.", "Third."], (1, len("First."))),
        ({"type": "thinking_turns", "value": 0}, [], (2, len("First.Second.Third."))),
    ],
)
async def test_earlier_thinking_is_cleared_or_kept(tmp_path: Path, keep: Any, kept: list[str], cleared: Any) -> None:
    """The client says how many turns keep their thinking; the answer says what was done."""
    edit: Any = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": THOUGHT,
        "tools": ANTHROPIC_TOOLS,
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": [edit]},
    }
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        api = rig.anthropic().beta.messages
        whole = await in_thread(lambda: api.create(max_tokens=50, **ask))
        events: list[Any] = await in_thread(lambda: list(api.create(max_tokens=50, stream=True, **ask)))
        count = await in_thread(lambda: api.count_tokens(**ask))
    applied = (
        []
        if cleared is None
        else [{"type": edit["type"], "cleared_thinking_turns": cleared[0], "cleared_input_tokens": cleared[1]}]
    )
    (delta,) = [event for event in events if event.type == "message_delta"]
    for managed in (whole.context_management, delta.context_management):
        assert managed is not None
        assert managed.to_dict() == {"applied_edits": applied}
    assert count.input_tokens == whole.usage.input_tokens
    assert count.context_management is not None
    assert count.context_management.original_input_tokens == count.input_tokens + (cleared[1] if cleared else 0)
    for prompt in rig.model.prompts:
        assert [text for text in ("First.", "Second.", "Third.") if text in prompt] == kept


@pytest.mark.parametrize(("family", "is_told"), [("deepseek-v3.2, published", False), ("glm-5", True)])
async def test_earlier_thinking_is_told_where_the_format_can(tmp_path: Path, family: str, is_told: bool) -> None:
    """DeepSeek's own format leaves it out unless it is to be kept; a template that always tells it tells it anyway."""
    ask: dict[str, Any] = {"model": MODEL, "messages": THOUGHT, "tools": ANTHROPIC_TOOLS, "max_tokens": 50}
    ask["thinking"] = {"type": "adaptive"}
    edits: Any = [{"type": "clear_thinking_20251015", "keep": "all"}]
    async with agents_rig(tmp_path, lambda _: "x", family=family) as rig:
        api = rig.anthropic().beta.messages
        await in_thread(lambda: api.create(**ask))
        await in_thread(lambda: api.create(context_management={"edits": edits}, **ask))
    assert ["First." in prompt for prompt in rig.model.prompts] == [is_told, True]


async def test_context_that_is_not_managed_is_not_told(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        api = rig.anthropic().beta.messages
        plain = await in_thread(lambda: api.create(model=MODEL, max_tokens=5, messages=ASKED, context_management={}))
        edits: Any = [{"type": "clear_tool_uses_20250919"}]
        with pytest.raises(anthropic.BadRequestError, match="clear_tool_uses_20250919"):
            await in_thread(
                lambda: api.create(model=MODEL, max_tokens=5, messages=ASKED, context_management={"edits": edits})
            )
    assert plain.context_management is None


@pytest.mark.parametrize(("context", "kept"), [("all_turns", False), ("current_turn", True), ("auto", None)])
async def test_reasoning_of_all_turns_is_the_templates_variable(
    tmp_path: Path, context: str, kept: bool | None
) -> None:
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        scheduler = rig.front.gateway.scheduler
        assert scheduler.served is not None
        template = "{{ 'unset' if clear_thinking is undefined else clear_thinking }}"
        scheduler.served = msgspec.structs.replace(scheduler.served, chat_template=template)
        await rig.front.link.client.welcome()
        reasoning: Any = {"context": context}
        await in_thread(lambda: rig.openai().responses.create(model=MODEL, input="x", reasoning=reasoning))
    assert rig.model.prompts == ["unset" if kept is None else str(kept)]


# ---------------------------------------------------------------- values


async def test_values_of_other_servers_users_are_taken(tmp_path: Path) -> None:
    """No nucleus at all is its likeliest token; 8.0 is 8; an output without a limit has what the context leaves."""
    async with front_rig(tmp_path) as rig:
        context = rig.gateway.scheduler.served.context_max_tokens  # type: ignore[union-attr]
        bodies: list[dict[str, Any]] = [
            {"prompt": "x", "top_p": 0},
            {"prompt": "x", "max_tokens": 8.0, "n": 1.0, "seed": 1.0, "top_k": 5.00},
            {"prompt": "x" * (context - 5)},
            {"prompt": ["x" * (context - 5), "x"]},
        ]
        for number, body in enumerate(bodies):
            await rig.complete(json.dumps(body).encode(), idempotency_key=f"r{number}")
            await rig.submitted(number + 1)
        await rig.submitted(5)
        sent = [one for command, one, *_ in rig.gateway.scheduler.commands if command == "submit"]
        by_id = {one.request_id.split(".")[0]: one.sampling for one in sent if isinstance(one, messages.Submit)}
    assert (by_id["r0"].top_p, by_id["r0"].temperature) == (TOP_P_MIN, 1.0)
    assert (by_id["r1"].max_tokens, by_id["r1"].seed, by_id["r1"].top_k) == (8, 1, 5)
    assert (by_id["r2"].max_tokens, by_id["r3-0"].max_tokens, by_id["r3-1"].max_tokens) == (5, 5, 16)


async def test_both_packages_list_the_models(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, lambda _: "x") as rig:
        ours, theirs = rig.anthropic(), rig.openai()
        page = await in_thread(lambda: list(ours.models.list()))
        beta = await in_thread(lambda: list(ours.beta.models.list(limit=5)))
        listed = await in_thread(lambda: list(theirs.models.list()))
        one, other = await in_thread(lambda: (ours.models.retrieve(MODEL), theirs.models.retrieve(MODEL)))
        with pytest.raises(anthropic.NotFoundError):
            await in_thread(lambda: ours.models.retrieve("other"))
    assert [one.id for one in page] == [one.id for one in beta] == [one.id for one in listed] == [MODEL]
    assert (one.id, one.type, one.display_name, one.max_input_tokens) == (MODEL, "model", MODEL, 65_536)
    assert (other.id, other.object, other.created) == (MODEL, "model", int(one.created_at.timestamp()))
