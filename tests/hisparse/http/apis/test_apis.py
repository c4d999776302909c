"""What holds for every API of the front: shares, leaving, ids, draining workers, its words for errors, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trio

from hisparse.http import front
from hisparse.http.apis.anthropic.bodies import MessagesBody
from hisparse.http.apis.asks import ECHO_CHARS_MAX, echoes_of
from hisparse.http.apis.body import read_body
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.responses.bodies import ResponsesBody
from hisparse.http.apis.tools import ARGUMENTS_BYTES_MAX, TOOLS_BYTES_MAX
from hisparse.http.errors import STATUSES, anthropic_error, error_body
from protocol.errors import BadInput, HiSparseError
from protocol.settings import HttpSettings
from protocol.text import ByteTokenizer
from tests.support.http_rig import KEY, FrontRig, front_rig
from tests.support.limits import HANG_LIMIT_S
from tests.support.tiny_templates import TEMPLATES

USER: Final = {"role": "user", "content": "x"}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 5},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/responses": {"input": "x", "max_output_tokens": 5},
}
every_api = pytest.mark.parametrize("path", BODIES)
OTHER_KEY: Final = "another-key-of-32-characters-00"


async def chats(rig: FrontRig) -> FrontRig:
    """With a chat template."""
    scheduler = rig.gateway.scheduler
    assert scheduler.served is not None
    scheduler.served = msgspec.structs.replace(scheduler.served, chat_template=TEMPLATES["glm-5"])
    await rig.link.client.welcome()
    return rig


def error_of(path: str, answer: Any) -> tuple[str, str]:
    """Its code and message, whose object is that of its API."""
    assert (answer.get("type") == "error") == (path == "/v1/messages")
    return answer["error"]["code"], answer["error"]["message"]


@every_api
async def test_share_of_a_key_is_that_of_all_apis(tmp_path: Path, path: str) -> None:
    """One key with all places, taken by completions, is refused; another key is not."""
    headers = {key: f"Bearer {key}" for key in (KEY, OTHER_KEY)}
    async with front_rig(tmp_path, HttpSettings(requests_max=2), keys=(KEY, OTHER_KEY)) as rig:
        await chats(rig)
        for _ in range(2):
            await rig.post("/v1/completions", BODIES["/v1/completions"], authorization=headers[KEY])
        await rig.submitted(2)
        refused = await rig.post(path, BODIES[path], x_api_key=KEY)
        code, message = error_of(path, await refused.answer())
        assert (refused.status, refused.headers["retry-after"], code) == (429, "1", "capacity")
        assert "this key has its share of them" in message
        await rig.post(path, BODIES[path], authorization=headers[OTHER_KEY])
        await rig.submitted(3)


@every_api
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_aborts_its_request(tmp_path: Path, path: str, stream: bool) -> None:
    async with front_rig(tmp_path) as rig:
        await chats(rig)
        peer = await rig.post(path, BODIES[path] | {"stream": stream})
        (name,) = await rig.submitted(1)
        rig.speak(name, "a")
        await peer.leave()
        with trio.fail_after(HANG_LIMIT_S):
            while rig.aborted() != [name]:  # noqa: ASYNC110
                await trio.sleep(0.005)


@every_api
async def test_request_waits_for_a_worker_no_longer_than_it_may(tmp_path: Path, path: str) -> None:
    async with front_rig(tmp_path, HttpSettings(worker_wait_s=0.1)) as rig:
        await chats(rig)
        rig.gateway.scheduler.serves_none = "all workers drain"
        rig.gateway.scheduler.all_wait = ("no_worker", "no worker is connected")
        peer = await rig.post(path, BODIES[path])
        code, message = error_of(path, await peer.answer())
        assert (peer.status, code) == (503, "unavailable")
        assert "no worker can take the request" in message


@every_api
async def test_id_of_the_client_names_the_answer_and_is_refused_another_body(tmp_path: Path, path: str) -> None:
    async with front_rig(tmp_path) as rig:
        await chats(rig)
        first = await rig.post(path, BODIES[path], idempotency_key="mine")
        await rig.submitted(1)
        other = await rig.post(path, BODIES[path] | {"temperature": 0}, idempotency_key="mine")
        assert error_of(path, await other.answer())[0] == "wrong_state"
        rig.speak("mine", "a")
        rig.gateway.scheduler.finish("mine", reason="eos")
        answer = await first.answer()
        assert (answer["id"], first.headers["x-request-id"]) == ("mine", "mine")
        assert answer.get("created", answer.get("created_at", 1)) == 1, "when the coordinator first had it"


async def test_looks_at_requests_are_paced_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that asks a hundred times at once is answered slowly; another key is not delayed by it."""
    monkeypatch.setattr(front, "LOOK_S", 0.2)
    async with front_rig(tmp_path, keys=(KEY, OTHER_KEY)) as rig:
        flood = [rig.open("GET", "/v1/requests/none", {"authorization": f"Bearer {KEY}"}) for _ in range(50)]
        began = trio.current_time()
        other = rig.open("GET", "/v1/requests/none", {"authorization": f"Bearer {OTHER_KEY}"})
        assert (await other.answer())["error"]["code"] == "not_found"
        assert sum(peer.complete.is_set() for peer in flood) <= 2 + (trio.current_time() - began) / 0.2


# ---------------------------------------------------------------- bodies


def chat_with(**said: Any) -> bytes:
    return msgspec.json.encode({"messages": [USER]} | said)


@pytest.mark.refuses("(shorten them, or leave earlier turns out)")
def test_tools_and_arguments_are_bounded() -> None:
    large = {"type": "function", "function": {"name": "f", "description": "x" * TOOLS_BYTES_MAX}}
    with pytest.raises(BadInput, match="longer than") as caught:
        read_body(chat_with(tools=[large]), ChatBody).generation()
    assert caught.value.field == "tools"
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": "' + "x" * (ARGUMENTS_BYTES_MAX // 2) + '"}'}}
    said = {"role": "assistant", "tool_calls": [call, call]}
    with pytest.raises(BadInput, match="arguments of all calls") as caught:
        read_body(chat_with(messages=[said]), ChatBody).generation()
    assert caught.value.field == "messages[0].tool_calls[1].function.arguments"


@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    body = read_body(chat_with(messages=[{"role": "assistant", "tool_calls": [call]}]), ChatBody)
    conversation = body.generation().conversation
    assert conversation is not None
    assert conversation.turns[0].calls[0].arguments == {}


@pytest.mark.refuses("(leave echo out)")
def test_long_prompts_are_not_sent_back() -> None:
    """They would be kept until their outputs have ended."""
    with pytest.raises(BadInput, match="are not sent back") as caught:
        echoes_of([], msgspec.json.encode(["x" * ECHO_CHARS_MAX, "x"]), ByteTokenizer())
    assert caught.value.field == "echo"


def test_effort_and_variables_reach_the_template() -> None:
    def variables(**said: Any) -> dict[str, Any]:
        conversation = read_body(chat_with(**said), ChatBody).generation().conversation
        assert conversation is not None
        return conversation.all_variables

    assert variables() == {}
    assert variables(reasoning_effort="none") == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
        "thinking_mode": "disabled",
    }
    own = {"enable_thinking": True}
    assert variables(reasoning_effort="none", chat_template_kwargs=own)["enable_thinking"] is True


def test_parts_of_one_turn_are_joined() -> None:
    """Of responses: reasoning, text and calls that follow one another are one turn."""
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "did"}]},
    ]
    body = read_body(msgspec.json.encode({"input": items}), ResponsesBody)
    conversation = body.generation().conversation
    assert conversation is not None
    (said, result) = conversation.turns
    assert (said.reasoning, said.text, [call.name for call in said.calls]) == ("hm", "so", ["f", "g"])
    assert (result.role, result.text, result.call_id) == ("tool", "did", "2")


def test_results_come_before_the_text_of_their_message() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    blocks = [{"type": "text", "text": "and now?"}, {"type": "tool_result", "tool_use_id": "1", "content": "did"}]
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": blocks}]
    body = read_body(msgspec.json.encode({"max_tokens": 5, "messages": messages}), MessagesBody)
    conversation = body.generation().conversation
    assert conversation is not None
    assert [(turn.role, turn.text) for turn in conversation.turns[1:]] == [("tool", "did"), ("user", "and now?")]


X = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS: list[tuple[type[ChatBody | MessagesBody | ResponsesBody], str, dict[str, Any], dict[str, Any]]] = [
    (
        ChatBody,
        "messages",
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ),
    (
        MessagesBody,
        "messages",
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": ""}]},
    ),
    (
        ResponsesBody,
        "input",
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": ""},
    ),
]


@pytest.mark.parametrize(("kind", "field", "call", "result"), CALLS)
def test_result_names_a_call_before_it_and_a_call_may_have_none(
    kind: type[ChatBody | MessagesBody | ResponsesBody], field: str, call: dict[str, Any], result: dict[str, Any]
) -> None:
    def roles(*said: dict[str, Any]) -> list[str]:
        body = read_body(
            msgspec.json.encode({"max_output_tokens" if field == "input" else "max_tokens": 5, field: said}), kind
        )
        conversation = body.generation().conversation
        assert conversation is not None
        return [turn.role for turn in conversation.turns]

    assert roles(X, call, result, X) == ["user", "assistant", "tool", "user"]
    assert roles(X, call, X, result, X)[3:] == ["tool", "user"], "another turn may come before it"
    assert roles(X, call, X) == ["user", "assistant", "user"]
    for said in ((X, result), (result, call, X)):
        with pytest.raises(BadInput, match="result of no call"):
            roles(*said)


@pytest.mark.parametrize("code", STATUSES)
def test_both_error_objects_say_the_same(code: str) -> None:
    class Some(HiSparseError):
        pass

    Some.code = code
    error = Some("it is so", field="prompt", value="x", remedy="change it")
    openais, anthropics = msgspec.json.decode(error_body(error))["error"], anthropic_error(error)["error"]
    assert {name: openais[name] for name in ("message", "param", "code")} == {
        name: anthropics[name] for name in ("message", "param", "code")
    }
    assert anthropics["type"].endswith(("_error", "_too_large"))
