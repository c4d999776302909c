"""The HTTP front before a real gateway: who gets what, what is left when clients leave, and its limits (I8)."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from hisparse.http import answering, front, link, outputs
from hisparse.http import service as server
from hisparse.http.models.grammar_checks import GrammarChecks
from hisparse.http.models.grammars import GrammarPlan
from hisparse.http.server import exchange
from hisparse.http.server.api_keys import owner_of
from hisparse.http.server.exchange import BODY_BYTES_MAX
from hisparse.http.server.identities import TRACE_ID_CHARS_MAX
from hisparse.http.service import run_http
from metrics.exporter import Health, serve
from metrics.http import HttpCollector, http_health, http_readiness
from metrics.names import HTTP, exported_names
from protocol.config import HostFacts, build
from protocol.errors import CapacityError, ConfigError, HiSparseError
from protocol.settings import HttpSettings
from protocol.transport.keys import make_keys
from protocol.version import our_version
from tests.metrics.test_metrics import scrape, values
from tests.support.http_rig import KEY, TEMPLATE, FrontRig, front_rig
from tests.support.limits import HANG_LIMIT_S


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[FrontRig]:
    async with front_rig(tmp_path, HttpSettings(requests_max=3, reattach_grace_s=0.2)) as rig:
        yield rig


OTHER_KEY: Final = "another-key-of-32-characters-00"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def error_of(answer: Any) -> tuple[str, str]:
    return answer["error"]["code"], answer["error"]["param"]


async def until(condition: Any) -> None:
    with trio.fail_after(HANG_LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


# ---------------------------------------------------------------- answers


async def test_completion_without_stream(rig: FrontRig) -> None:
    peer = await rig.complete({"prompt": "abc", "max_tokens": 4, "priority": 2, "draft_tokens": 0})
    (name,) = await rig.submitted(1)
    assert name.startswith("cmpl-")
    submit = rig.gateway.scheduler.commands[0][1]
    assert (submit.priority, submit.sampling.max_tokens, len(submit.prompt)) == (2, 4, 12)
    assert submit.draft_tokens == 0
    rig.speak(name, "hé")
    rig.gateway.scheduler.finish(name, tail_text="!")
    answer = await peer.answer()
    assert (peer.status, peer.headers["x-request-id"], peer.headers["hisparse-request-id"]) == (200, name, name)
    assert answer["choices"][0]["text"] == "hé!"
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert rig.aborted() == []
    await until(lambda: len(rig.outputs) == 0)


async def test_no_body_waits_for_grammars_that_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other owners, and those without a grammar of the same owner; a known grammar is not built again."""
    release, building = threading.Event(), list[str]()

    def built(_: object, plan: GrammarPlan, *__: object) -> str:
        building.append(plan.lark)
        assert release.wait(HANG_LIMIT_S)
        return plan.lark

    monkeypatch.setattr(GrammarChecks, "check", built)
    async with front_rig(tmp_path, keys=(KEY, OTHER_KEY)) as rig:
        bodies = [
            {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "a" * 9 + str(it)}} for it in range(8)
        ]
        peers = [await rig.complete(it, **bearer(key)) for it in bodies for key in (KEY, OTHER_KEY)]
        await until(lambda: len(building) == 2)
        plain = [await rig.complete({"prompt": "abc", "max_tokens": 1}, **bearer(key)) for key in (KEY, OTHER_KEY)]
        for name in await rig.submitted(2):
            rig.speak(name, "!")
            rig.gateway.scheduler.finish(name)
        assert [(await it.answer())["choices"][0]["text"] for it in plain] == ["!", "!"]
        assert len(building) == 2, "one of each owner"
        release.set()
        for name in (await rig.submitted(2 + len(peers)))[2:]:
            rig.gateway.scheduler.finish(name)
        assert [(await it.answer())["object"] for it in peers] == ["text_completion"] * len(peers)


async def test_stream_sends_tokens_as_they_come(rig: FrontRig) -> None:
    peer = await rig.complete({"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}})
    (name,) = await rig.submitted(1)
    rig.speak(name, "h")
    await peer.until('"h"')
    rig.speak(name, "é".encode()[:1])
    rig.speak(name, "é".encode()[1:])
    await peer.until('"é"')
    rig.gateway.scheduler.finish(name)
    *chunks, total, done = await peer.events()
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["h", "é", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert (total["usage"]["completion_tokens"], total["choices"], done) == (3, [], "[DONE]")
    assert peer.headers["content-type"] == "text/event-stream"


async def test_streamed_choices_interleave_with_their_index(rig: FrontRig) -> None:
    peer = await rig.complete({"prompt": "abc", "stream": True, "n": 2})
    first, second = sorted(await rig.submitted(2))
    rig.speak(second, "b")
    await peer.until('"b"')
    rig.speak(first, "a")
    for name in (first, second):
        rig.gateway.scheduler.finish(name)
    *chunks, _ = await peer.events()
    texts = dict.fromkeys(range(2), "")
    for choice in (chunk["choices"][0] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "a", 1: "b"}


async def test_chat_stream_names_the_role(rig: FrontRig) -> None:
    model = rig.gateway.scheduler.served
    rig.gateway.scheduler.served = msgspec.structs.replace(model, chat_template=TEMPLATE)
    await rig.link.client.welcome()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    peer = await rig.post("/v1/chat/completions", body)
    (name,) = await rig.submitted(1)
    assert name.startswith("chatcmpl-")
    rig.speak(name, "yes")
    rig.gateway.scheduler.finish(name)
    opening, *_, done = await peer.events()
    assert (opening["choices"][0]["delta"], done) == ({"role": "assistant", "content": ""}, "[DONE]")


async def test_silent_stream_sends_keepalives(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "KEEPALIVE_S", 0.02)
    peer = await rig.complete({"prompt": "abc", "stream": True})
    await peer.until(": waiting\n\n: waiting\n\n")
    (name,) = await rig.submitted(1)
    rig.gateway.scheduler.finish(name)
    assert (await peer.events())[-1] == "[DONE]"


# ---------------------------------------------------------------- failures


async def test_coordinator_refusal_is_answered_even_to_a_stream(rig: FrontRig) -> None:
    rig.gateway.scheduler.refuse_with = CapacityError("queue full", field="queue_max", value=1)
    peer = await rig.complete({"prompt": "abc", "stream": True})
    assert error_of(await peer.answer()) == ("capacity", None)
    assert (peer.status, peer.headers["retry-after"]) == (429, "1")


async def test_refused_choice_aborts_the_others(rig: FrontRig) -> None:
    rig.gateway.scheduler.refuse_with = CapacityError("queue full", field="queue_max", value=1)
    peer = await rig.complete({"prompt": "abc", "n": 2})
    await peer.answer()
    (name,) = await rig.submitted(1)
    await until(lambda: rig.aborted() == [name])


@pytest.mark.parametrize(("outcome", "status", "code"), [("ABORTED", 409, "aborted"), ("FAILED", 500, "failed")])
async def test_an_output_that_does_not_finish_is_an_error(rig: FrontRig, outcome: str, status: int, code: str) -> None:
    whole = await rig.complete({"prompt": "abc"})
    streamed = await rig.complete({"prompt": "abc", "stream": True})
    for name in await rig.submitted(2):
        rig.speak(name, "a")
        rig.gateway.scheduler.finish(name, outcome)
    assert error_of(await whole.answer()) == (code, "idempotency-key" if code == "aborted" else None)
    assert (whole.status, whole.headers["x-should-retry"]) == (status, "false")
    *_, last = await streamed.events()
    assert (error_of(last)[0], streamed.status) == (code, 200)
    assert rig.aborted() == []


async def test_defect_fails_a_single_request(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    other = await rig.complete({"prompt": "abc"})
    (name,) = await rig.submitted(1)
    with monkeypatch.context() as patched:
        patched.setattr(rig.link.client, "submit", lambda *_, **__: 1 / 0)
        peer = await rig.complete({"prompt": "abc"})
        assert (error_of(await peer.answer())[0], peer.status) == ("internal", 500)
    rig.gateway.scheduler.finish(name)
    await other.answer()
    assert other.status == 200


@pytest.mark.refuses("whether the command was carried out is unknown", "the coordinator is not there")
async def test_missing_coordinator_is_answered_with_503(rig: FrontRig) -> None:
    stream = await rig.complete({"prompt": "abc", "stream": True})
    await rig.submitted(1)
    await rig.gateway.kill()
    assert error_of((await stream.events())[-1])[0] == "unavailable"
    await until(lambda: not rig.link.connected)
    for peer in (rig.open("GET", "/health"), rig.open("GET", "/v1/models"), await rig.complete({"prompt": "x"})):
        await peer.answer()
        assert peer.status == 503


async def test_health_reports_missing_workers(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = rig.open("GET", "/health")
    assert (await healthy.answer(), healthy.status) == ({"status": "ok"}, 200)
    rig.gateway.scheduler.serves_none = "no worker is connected"
    monkeypatch.setattr(link, "HEALTH_INTERVAL_S", 0.0)
    peer = rig.open("GET", "/health")
    assert (await peer.answer(), peer.status) == ({"status": "no worker is connected"}, 503)


async def test_health_reports_why_new_work_is_refused(rig: FrontRig) -> None:
    """A full disk, or a coordinator that stops."""
    rig.gateway.scheduler.refuses_all = "the journal cannot take more: disk full"
    peer = rig.open("GET", "/health")
    assert (await peer.answer(), peer.status) == ({"status": "the journal cannot take more: disk full"}, 503)


async def test_cancelled_health_check_takes_no_answer_of_others(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to greetings come in turn: one that was not sent must not wait for one."""
    monkeypatch.setattr(link, "HEALTH_INTERVAL_S", 0.0)
    for _ in range(10):
        with trio.CancelScope() as scope:
            scope.cancel()
            await rig.link.client.welcome()
    assert await rig.open("GET", "/health").answer() == {"status": "ok"}


async def test_health_checks_share_a_coordinator_query(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8. They need no key, and a coordinator stops hearing a peer that asks too often."""
    asked = []
    welcome = rig.link.client.welcome
    monkeypatch.setattr(link, "HEALTH_INTERVAL_S", HANG_LIMIT_S)

    async def counting() -> Any:
        asked.append(1)
        return await welcome()

    monkeypatch.setattr(rig.link.client, "welcome", counting)
    peers = [rig.open("GET", "/health") for _ in range(20)]
    assert [(await peer.answer())["status"] for peer in peers] == ["ok"] * 20
    assert len(asked) == 1


# ---------------------------------------------------------------- no worker

NO_WORKER = ("no_worker", "no worker is connected")


@pytest.fixture
async def unserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontRig]:
    """No worker is connected, and all requests wait for one."""
    monkeypatch.setattr(link, "HEALTH_INTERVAL_S", 0.0)
    monkeypatch.setattr(answering, "UNSERVED_POLL_S", 0.01)
    async with front_rig(tmp_path, HttpSettings(worker_wait_s=0.1, reattach_grace_s=0.0)) as rig:
        rig.gateway.scheduler.serves_none = NO_WORKER[1]
        rig.gateway.scheduler.all_wait = NO_WORKER
        yield rig


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "samples"])
@pytest.mark.refuses("Unavailable {} (retry later)")
async def test_request_that_no_worker_can_take_gets_503_and_is_aborted(
    unserved: FrontRig, body: dict[str, Any]
) -> None:
    peer = await unserved.complete({"prompt": "abc", **body}, idempotency_key="r")
    answer = await peer.answer()
    assert (peer.status, peer.headers["retry-after"], answer["error"]["code"]) == (503, "1", "unavailable")
    assert "no worker can take the request, for 0.1 s: no worker is connected" in answer["error"]["message"]
    count = body.get("n", 1)
    names = await unserved.submitted(count)
    await until(lambda: sorted(unserved.aborted()) == sorted(names))
    assert len(names) == count


@pytest.mark.parametrize("stream", [False, True])
async def test_request_is_answered_when_a_worker_comes_in_time(
    unserved: FrontRig, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unserved.front.answering, "_settings", HttpSettings(worker_wait_s=30.0))
    peer = await unserved.complete({"prompt": "abc", "stream": stream}, idempotency_key="r")
    (name,) = await unserved.submitted(1)
    await trio.sleep(0.05)
    assert peer.status == 0, "a stream does not begin before it can be served"
    unserved.gateway.scheduler.serves_none, unserved.gateway.scheduler.all_wait = "", ("", "")
    unserved.speak(name, "x")
    unserved.gateway.scheduler.finish(name)
    with trio.fail_after(HANG_LIMIT_S):
        await peer.complete.wait()
    assert (peer.status, unserved.aborted()) == (200, [])


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
async def test_request_on_a_draining_worker_is_not_given_up(
    unserved: FrontRig, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New requests are not served, and this one is."""
    monkeypatch.setattr(unserved.front.answering, "_settings", HttpSettings(worker_wait_s=wait_s))
    unserved.gateway.scheduler.all_wait = ("", "")
    peer = await unserved.complete({"prompt": "abc"}, idempotency_key="r")
    (name,) = await unserved.submitted(1)
    await trio.sleep(0.3)
    unserved.speak(name, "x")
    unserved.gateway.scheduler.finish(name)
    await peer.answer()
    assert peer.status == 200


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_the_request(tmp_path: Path, stream: bool) -> None:
    """At once: no other client can know its id."""
    async with front_rig(tmp_path, HttpSettings(reattach_grace_s=1e6)) as rig:
        peer = await rig.complete({"prompt": "abc", "stream": stream})
        (name,) = await rig.submitted(1)
        rig.speak(name, "a")
        await peer.leave()
        await until(lambda: rig.aborted() == [name])
        rig.gateway.scheduler.finish(name, "ABORTED")
        await until(lambda: len(rig.outputs) == 0)
        assert (rig.counters.disconnects, rig.counters.abandoned, rig.counters.in_flight) == (1, 1, 0)
        assert not peer.complete.is_set()


async def test_disconnect_during_submission_leaves_no_request(rig: FrontRig) -> None:
    """The submission is in flight: only the front's task can know that it was accepted."""
    scheduler = rig.gateway.scheduler
    plain, resumed = scheduler.submit, trio.Event()

    async def slowly(*asked: Any, **more: Any) -> Any:
        await resumed.wait()
        return await plain(*asked, **more)

    scheduler.submit = slowly  # type: ignore[method-assign]
    peer = await rig.complete({"prompt": "abc"})
    await until(lambda: len(rig.outputs) == 1)
    await peer.leave()
    await until(lambda: rig.counters.disconnects == 1)
    resumed.set()
    (name,) = await rig.submitted(1)
    await until(lambda: rig.aborted() == [name])


@pytest.fixture
def slow_clock() -> trio.testing.MockClock:
    """Of trio: a second of it takes twenty, of which a busy machine may lose some."""
    return trio.testing.MockClock(rate=0.05)


async def test_client_id_allows_reconnect(
    slow_clock: trio.testing.MockClock, rig: FrontRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace_s = 2.0
    monkeypatch.setattr(rig.front.answering, "_settings", HttpSettings(reattach_grace_s=grace_s))
    body = {"prompt": "abc", "stream": True}
    first = await rig.complete(body, idempotency_key="mine")
    assert await rig.submitted(1) == ["mine"]
    rig.speak("mine", "a")
    await first.until('"a"')
    await first.leave()
    await until(lambda: rig.counters.disconnects == 1)
    again = await rig.complete(body, idempotency_key="mine")
    await again.until('"a"')
    slow_clock.jump(grace_s + 0.1)
    await trio.testing.wait_all_tasks_blocked()
    rig.speak("mine", "b")
    await again.until('"b"')
    rig.gateway.scheduler.finish("mine")
    *chunks, _ = await again.events()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert rig.aborted() == []
    assert [command for command, *_ in rig.gateway.scheduler.commands] == ["submit"]


async def test_request_with_a_client_id_is_aborted_after_grace(rig: FrontRig) -> None:
    peer = await rig.complete({"prompt": "abc"}, idempotency_key="mine")
    await rig.submitted(1)
    left_at = trio.current_time()
    await peer.leave()
    await until(lambda: rig.aborted() == ["mine"])
    assert trio.current_time() - left_at >= 0.2


async def test_clients_with_the_same_id_share_the_output(rig: FrontRig) -> None:
    body = {"prompt": "abc"}
    peers = [await rig.complete(body, idempotency_key="mine") for _ in range(2)]
    await until(lambda: [it.followers for it in rig.outputs._by_id.values()] == [2])
    await rig.submitted(1)
    rig.speak("mine", "ab")
    rig.gateway.scheduler.finish("mine")
    assert [(await peer.answer())["choices"][0]["text"] for peer in peers] == ["ab", "ab"]
    assert [command for command, *_ in rig.gateway.scheduler.commands] == ["submit"]


@pytest.mark.refuses("is in use by another request")
async def test_id_in_use_refuses_another_body(rig: FrontRig) -> None:
    first = await rig.complete({"prompt": "abc"}, idempotency_key="mine")
    await rig.submitted(1)
    other = await rig.complete({"prompt": "abd"}, idempotency_key="mine")
    assert error_of(await other.answer()) == ("wrong_state", "idempotency-key")
    rig.gateway.scheduler.finish("mine")
    assert (await first.answer())["id"] == "mine"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a b", marks=pytest.mark.refuses("printable characters without spaces")),
        pytest.param("x" * 125, marks=pytest.mark.refuses("BadInput {}={} characters: {} (choose")),
        "a\n",
    ],
)
async def test_invalid_id_is_refused(rig: FrontRig, name: str) -> None:
    peer = await rig.complete({"prompt": "abc"}, idempotency_key=name)
    assert error_of(await peer.answer()) == ("bad_input", "idempotency-key")


# ---------------------------------------------------------------- ids of traces


async def test_trace_id_names_no_request(rig: FrontRig, caplog: pytest.LogCaptureFixture) -> None:
    """Two bodies, and one of them twice: three requests with seeds of their own. All answers carry it."""
    caplog.set_level(logging.INFO, "hisparse.http")
    peers = [await rig.complete({"prompt": prompt}, x_request_id="t") for prompt in ("abc", "abd", "abc")]
    names = await rig.submitted(3)
    assert len({command[1].sampling.seed for command in rig.gateway.scheduler.commands}) == 3
    for name in names:
        rig.gateway.scheduler.finish(name)
    assert {(await peer.answer())["id"] for peer in peers} == set(names)
    assert [peer.headers["x-request-id"] for peer in peers] == ["t", "t", "t"]
    assert {peer.headers["hisparse-request-id"] for peer in peers} == set(names)

    def logged() -> list[str]:
        return [line.fields["x_request_id"] for line in caplog.records if line.message == "answered"]  # type: ignore[attr-defined]

    await until(lambda: logged() == ["t"] * 3)


async def test_request_of_a_trace_has_no_grace(tmp_path: Path) -> None:
    async with front_rig(tmp_path, HttpSettings(reattach_grace_s=1e6)) as rig:
        peer = await rig.complete({"prompt": "abc"}, x_request_id="t")
        (name,) = await rig.submitted(1)
        await peer.leave()
        await until(lambda: rig.aborted() == [name])


async def test_trace_id_comes_beside_the_clients_own(rig: FrontRig) -> None:
    body = {"prompt": "abc", "n": 2}
    peers = [await rig.complete(body, x_request_id=trace, idempotency_key="mine") for trace in ("t", "u")]
    await until(lambda: [it.followers for it in rig.outputs._by_id.values()] == [2, 2])
    assert sorted(await rig.submitted(2)) == ["mine-0", "mine-1"]
    for name in ("mine-0", "mine-1"):
        rig.gateway.scheduler.finish(name)
    assert [(await peer.answer())["id"] for peer in peers] == ["mine", "mine"]
    assert [peer.headers["x-request-id"] for peer in peers] == ["t", "u"]
    assert [peer.headers["hisparse-request-id"] for peer in peers] == ["mine-0", "mine-0"]


async def test_trace_id_is_sent_back_with_every_answer(rig: FrontRig) -> None:
    headers = {"x-request-id": "t 1"}
    peers = [rig.open("GET", path, headers) for path in ("/v1/models", "/health", "/nowhere")]
    peers += [await rig.complete({"prompt": ""}, x_request_id="t 1")]
    stream = await rig.complete({"prompt": "abc", "stream": True}, x_request_id="t 1")
    (name,) = await rig.submitted(1)
    rig.gateway.scheduler.finish(name, "FAILED")
    for peer in (*peers, stream):
        with trio.fail_after(HANG_LIMIT_S):
            await peer.complete.wait()
    assert [peer.status for peer in peers] == [200, 200, 404, 400]
    assert {peer.headers["x-request-id"] for peer in (*peers, stream)} == {"t 1"}
    assert [peer.headers.get("hisparse-request-id") for peer in (*peers, stream)] == [None] * 4 + [name]


async def test_failed_answer_names_its_request(rig: FrontRig) -> None:
    peer = await rig.complete({"prompt": "abc"})
    (name,) = await rig.submitted(1)
    rig.gateway.scheduler.finish(name, "FAILED")
    await peer.answer()
    assert (peer.status, peer.headers["hisparse-request-id"], peer.headers["x-request-id"]) == (500, name, name)


@pytest.mark.parametrize("sent", ["", "é", "\x00", "\x7f", "t" * (TRACE_ID_CHARS_MAX + 1)])
async def test_trace_id_that_cannot_be_sent_back_is_as_good_as_none(rig: FrontRig, sent: str) -> None:
    peer = await rig.complete({"prompt": "abc"}, x_request_id=sent)
    (name,) = await rig.submitted(1)
    rig.gateway.scheduler.finish(name)
    await peer.answer()
    assert (peer.status, peer.headers["x-request-id"]) == (200, name)


# ---------------------------------------------------------------- limits


@pytest.mark.refuses("and this key has its share of them")
async def test_requests_past_the_limit_get_retry_after(rig: FrontRig) -> None:
    """I8."""
    held = [await rig.complete({"prompt": "abc"}) for _ in range(3)]
    names = await rig.submitted(3)
    late = await rig.complete({"prompt": "abc"})
    assert error_of(await late.answer()) == ("capacity", None)
    assert late.status == 429
    for name in names:
        rig.gateway.scheduler.finish(name)
    for peer in held:
        await peer.answer()
    after = await rig.complete({"prompt": "abc"})
    await rig.submitted(4)
    await after.leave()


async def test_only_bodies_take_a_place(tmp_path: Path) -> None:
    """I8. One key announces more bodies than there are places; the other is answered, and only the first is refused."""
    async with front_rig(tmp_path, HttpSettings(requests_max=3), keys=(KEY, OTHER_KEY)) as rig:
        waiting = [rig.open("POST", "/v1/completions", bearer(KEY)) for _ in range(5)]
        await until(lambda: [peer.status for peer in waiting].count(429) == 2)
        assert rig.counters.in_flight == 0
        other = await rig.complete({"prompt": "abc"}, Authorization=f"Bearer {OTHER_KEY}")
        (name,) = await rig.submitted(1)
        rig.gateway.scheduler.finish(name)
        await other.answer()
        assert (other.status, sorted(peer.status for peer in waiting)) == (200, [0, 0, 0, 429, 429])


async def test_key_below_its_share_gets_a_place_when_full(tmp_path: Path) -> None:
    """I8."""
    async with front_rig(tmp_path, HttpSettings(requests_max=4), keys=(KEY, OTHER_KEY)) as rig:
        for _ in range(4):
            await rig.complete({"prompt": "abc"}, Authorization=f"Bearer {KEY}")
        await rig.submitted(4)
        late = await rig.complete({"prompt": "abc"}, Authorization=f"Bearer {KEY}")
        assert error_of(await late.answer()) == ("capacity", None)
        for _ in range(2):
            await rig.complete({"prompt": "abc"}, Authorization=f"Bearer {OTHER_KEY}")
        await rig.submitted(6)
        late = await rig.complete({"prompt": "abc"}, Authorization=f"Bearer {OTHER_KEY}")
        assert error_of(await late.answer()) == ("capacity", None)


async def test_gets_that_wait_take_places_of_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused past the share; another key and a body are not. Places of clients that leave are free."""
    monkeypatch.setattr(front, "LOOK_S", 60.0)
    mine, others = bearer(KEY), bearer(OTHER_KEY)
    async with front_rig(tmp_path, HttpSettings(requests_max=2), keys=(KEY, OTHER_KEY)) as rig:
        waiting = [rig.open("GET", "/v1/requests/a", mine) for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked()
        for path in ("/metrics", "/version", "/v1/models"):
            assert error_of(await rig.open("GET", path, mine).answer()) == ("capacity", None)
        for path in ("/version", "/v1/models"):
            peer = rig.open("GET", path, others)
            await peer.answer()
            assert peer.status == 200
        await rig.complete({"prompt": "abc"}, Authorization=mine["Authorization"])
        await rig.submitted(1)
        for peer in waiting:
            await peer.leave()
        await trio.testing.wait_all_tasks_blocked()
        peer = rig.open("GET", "/version", mine)
        await peer.answer()
        assert [it.status for it in (*waiting, peer)] == [0, 0, 200]


@pytest.mark.refuses("the limit of this key is {}")
async def test_priority_above_the_limit_of_a_key_is_refused(tmp_path: Path) -> None:
    """A key without a limit of its own has 0: it cannot pass the others, and may let them pass."""
    async with front_rig(tmp_path, keys=(KEY, f"{OTHER_KEY} priority=10")) as rig:
        for key, priority, limit in ((KEY, 1, 0), (OTHER_KEY, 11, 10)):
            peer = await rig.complete({"prompt": "abc", "priority": priority}, Authorization=f"Bearer {key}")
            answer = await peer.answer()
            assert (peer.status, *error_of(answer)) == (400, "bad_input", "priority")
            message = answer["error"]["message"]
            assert message.startswith(
                f"priority: the limit of this key is {limit} (got {priority}). Ask for {limit} or less"
            )
        assert rig.gateway.scheduler.commands == []
        taken = [(KEY, 0), (KEY, -7), (OTHER_KEY, 10)]
        for count, (key, priority) in enumerate(taken, start=1):
            await rig.complete({"prompt": "abc", "priority": priority}, Authorization=f"Bearer {key}")
            await rig.submitted(count)
        submits = [command[1] for command in rig.gateway.scheduler.commands]
        assert [(it.priority, it.tenant) for it in submits] == [(it, owner_of(key)) for key, it in taken]


async def test_same_id_under_two_keys_is_two_requests(tmp_path: Path) -> None:
    """No key can take, or join, an id of another key."""
    async with front_rig(tmp_path, keys=(KEY, OTHER_KEY)) as rig:
        peers = [
            await rig.complete({"prompt": prompt}, Authorization=f"Bearer {key}", idempotency_key="mine")
            for key, prompt in ((KEY, "abc"), (OTHER_KEY, "abd"))
        ]
        names = await rig.submitted(2)
        assert sorted(names) == sorted(f"mine.{owner_of(key)}" for key in (KEY, OTHER_KEY))
        for name in names:
            rig.gateway.scheduler.finish(name)
        assert [(await peer.answer())["id"] for peer in peers] == ["mine", "mine"]
        assert [peer.headers["x-request-id"] for peer in peers] == ["mine", "mine"]
        assert {peer.headers["hisparse-request-id"] for peer in peers} == set(names)


async def test_samples_are_submitted_gradually_and_the_prompt_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I8. A key that sends many does not hold up another."""
    async with front_rig(tmp_path, keys=(KEY, OTHER_KEY)) as rig:
        plain, resumed, sent = rig.gateway.scheduler.submit, trio.Event(), []

        async def slowly(submit: Any, *who: Any, **more: Any) -> Any:
            sent.append(submit.request_id)
            if submit.request_id.startswith("many"):
                await resumed.wait()
            return await plain(submit, *who, **more)

        monkeypatch.setattr(rig.gateway.scheduler, "submit", slowly)
        many = await rig.complete({"prompt": "abc", "n": 16}, Authorization=f"Bearer {KEY}", idempotency_key="many")
        await until(lambda: len(sent) == outputs.SUBMITS_PER_KEY)
        other = await rig.complete({"prompt": "abc"}, Authorization=f"Bearer {OTHER_KEY}")
        (name,) = await rig.submitted(1)
        assert len(sent) == outputs.SUBMITS_PER_KEY + 1
        rig.gateway.scheduler.finish(name)
        await other.answer()
        resumed.set()
        await rig.submitted(17)
        held = list(rig.outputs._by_id.values())
        await until(lambda: all(output.choice.prompt.size == 0 for output in held))
        assert len(held) == 16
        assert many.status == 0


@pytest.mark.refuses("at most {} stop strings")
async def test_request_beyond_the_context_is_not_sent(rig: FrontRig) -> None:
    """I8."""
    for body in (
        {"prompt": [1] * 2_000_000, "n": 16},
        {"prompt": "abc", "max_tokens": 4_094},
        {"prompt": "abc", "stop": ["x"] * 17},
        {"prompt": "abc", "priority": 1_001},
        {"prompt": "abc", "temperature": 101},
    ):
        peer = await rig.complete(body)
        is_long = len(body["prompt"]) > 4_096 or "max_tokens" in body
        assert error_of(await peer.answer())[0] == ("context_length_exceeded" if is_long else "bad_input")
    assert rig.gateway.scheduler.commands == []


async def test_refused_body_frees_its_bytes_at_once(rig: FrontRig) -> None:
    """I8. Not when the collector comes by: an error must not be in a cycle with the frames that hold the body."""
    body = b'{"prompt": "' + b"x" * (BODY_BYTES_MAX - 100) + b'"}'
    gc.disable()
    try:
        for refused in range(8):
            peer = await rig.complete(body)
            assert error_of(await peer.answer()) == ("context_length_exceeded", "prompt")
            del peer
            if refused == 1:
                before = psutil.Process().memory_info().rss
        assert psutil.Process().memory_info().rss - before < 3 * BODY_BYTES_MAX
    finally:
        gc.enable()


async def test_refusals_leave_nothing_for_the_collector(rig: FrontRig) -> None:
    """I8. By the decoder, by the checks behind it, by the coordinator."""

    def errors() -> set[int]:
        return {id(it) for it in gc.get_objects() if issubclass(type(it), exchange.HttpExchange | HiSparseError)}

    gc.collect()
    gc.disable()
    before = errors()  # other tests hold some
    try:
        for body in (b"{", {"prompt": "a", "unknown": 1}, {"prompt": "a", "temperature": 101}, {"prompt": [1, "x"]}):
            assert "error" in await (await rig.complete(body)).answer()
            assert "error" in await (await rig.post("/tokenize", body)).answer()
        assert error_of(await rig.open("GET", "/v1/requests/unknown").answer()) == ("not_found", "path")
        await trio.testing.wait_all_tasks_blocked()
        assert errors() <= before
    finally:
        gc.enable()


@pytest.mark.refuses("TooLarge body=: more than {} bytes")
async def test_oversized_body_is_refused_while_it_arrives(rig: FrontRig) -> None:
    """I8. Its rest is the connection's, which throws it away: server/test_connection.py."""
    peer = rig.open("POST", "/v1/completions", queue_messages=BODY_BYTES_MAX >> 20)
    with trio.fail_after(HANG_LIMIT_S):
        for _ in range(BODY_BYTES_MAX // (1 << 20) + 1):
            await peer.say(bytes(1 << 20), more=True)
    assert error_of(await peer.answer()) == ("too_large", "body")
    assert peer.status == 413


@pytest.mark.refuses("CapacityError body=")
async def test_total_body_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8. What was received for a refused one is given back."""
    monkeypatch.setattr(front, "BODIES_BYTES_MAX", 1_000)
    async with front_rig(tmp_path) as rig:
        slow = rig.open("POST", "/v1/completions")
        await slow.say(bytes(800), more=True)
        await trio.testing.wait_all_tasks_blocked()
        peer = await rig.complete(bytes(300))
        assert error_of(await peer.answer()) == ("capacity", None)
        await slow.leave()
        await until(lambda: rig.counters.disconnects == 1)
        again = await rig.complete(bytes(900))
        assert error_of(await again.answer()) == ("bad_input", "body")  # it was read, and is no JSON


@pytest.mark.refuses("no API key, or not one of ours")
async def test_refused_and_abandoned_bodies_free_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8. Strangers who are refused before it is read must not use up the room of the others."""
    monkeypatch.setattr(front, "BODIES_BYTES_MAX", 1_000)
    async with front_rig(tmp_path, keys=(KEY,)) as rig:
        for _ in range(3):
            peer = rig.open("POST", "/v1/completions")
            await peer.say(bytes(800), more=True)
            assert error_of(await peer.answer()) == ("unauthorized", "authorization")
            gone = rig.open("POST", "/v1/completions", {"Authorization": f"Bearer {KEY}"})
            await gone.say(bytes(800), more=True)
            await gone.leave()
        await until(lambda: rig.counters.disconnects == 3)
        again = await rig.complete(bytes(900), Authorization=f"Bearer {KEY}")
        assert error_of(await again.answer()) == ("bad_input", "body")


@pytest.mark.refuses("not there after {} s")
async def test_a_body_must_come_in_time(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8."""
    monkeypatch.setattr(exchange, "BODY_LIMIT_S", 0.05)
    peer = rig.open("POST", "/v1/completions")
    await peer.say(b"{", more=True)
    assert error_of(await peer.answer()) == ("too_slow", "body")


async def test_aborts_are_retried_until_the_coordinator_accepts(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "ABORT_INTERVAL_S", 0.01)
    peer = await rig.complete({"prompt": "abc"})
    (name,) = await rig.submitted(1)
    rig.gateway.scheduler.refuse_with = CapacityError("busy")
    await peer.leave()
    await until(lambda: rig.aborted() == [name, name])


# ---------------------------------------------------------------- paths and keys


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/page.js", 200),
        ("GET", "/page.css", 200),
        ("POST", "/", 405),
        ("GET", "/x", 404),
        ("GET", "/v1/requests/", 404),
        ("GET", "/openapi.json", 200),
        ("GET", "/tokenize", 405),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("HEAD", "/v1/completions", 405),
        ("HEAD", "/metrics", 200),
        ("GET", "/v1/models/fake", 200),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/", 404),
    ],
)
async def test_paths_and_methods(rig: FrontRig, method: str, path: str, status: int) -> None:
    peer = rig.open(method, path)
    await peer.say(b"")
    with trio.fail_after(HANG_LIMIT_S):
        await peer.complete.wait()
    assert peer.status == status


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/fake", "GET, HEAD"),
        ("OPTIONS", "/health", "GET, HEAD"),
        ("CONNECT", "/health", "GET, HEAD"),
    ],
)
async def test_refused_method_is_told_the_allowed_ones(rig: FrontRig, method: str, path: str, allowed: str) -> None:
    peer = rig.open(method, path)
    await peer.answer()
    assert (peer.status, peer.headers["allow"]) == (405, allowed)
    known = rig.open(allowed.rsplit(", ", maxsplit=1)[-1], path)
    await known.say(b"{}")
    with trio.fail_after(HANG_LIMIT_S):
        await known.complete.wait()
    assert known.status != 405


async def test_models_are_listed(rig: FrontRig) -> None:
    (card,) = (await rig.open("GET", "/v1/models").answer())["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 4096)


async def test_version_is_that_of_the_distribution(rig: FrontRig) -> None:
    assert await rig.open("GET", "/version").answer() == {"version": our_version()}


async def test_without_a_key_only_health_and_the_page_are_served(tmp_path: Path) -> None:
    """Before a byte of the body is read."""
    async with front_rig(tmp_path, keys=(KEY,)) as rig:
        made = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize")
        for path in (*made, "/v1/models", "/v1/models/fake", "/v1/requests/a", "/openapi.json", "/metrics", "/other"):
            peer = rig.open("POST", path)
            await peer.answer()
            assert (peer.status, peer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert await rig.open("GET", "/health").answer() == {"status": "ok"}
        page = rig.open("GET", "/")
        with trio.fail_after(HANG_LIMIT_S):
            await page.complete.wait()
        assert page.status == 200
        peer = rig.open("GET", "/v1/models", {"Authorization": f"Bearer {KEY}"})
        await peer.answer()
        assert peer.status == 200
    assert (rig.counters.answers["other", "401"], rig.counters.answers["/v1/models/", "401"]) == (1, 1)


# ---------------------------------------------------------------- settings and metrics


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"http.host": "0.0.0.0"}, "http.host"),
        ({"http.port": 65_536}, "http.port"),
        ({"http.port": -1}, "http.port"),
        ({"http.requests_max": 0}, "http.requests_max"),
        ({"http.reattach_grace_s": -1}, "http.reattach_grace_s"),
        ({"http.worker_wait_s": -1}, "http.worker_wait_s"),
        ({"http.metrics_port": -2}, "http.metrics_port"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({}, {}, flags, HostFacts("host", 1, 1))
    assert caught.value.field == field


@pytest.mark.parametrize("extra", [{"http.api_keys_file": "keys"}, {"cluster.insecure": True}])
def test_non_loopback_address_requires_keys_or_consent(extra: dict[str, object]) -> None:
    assert build({}, {}, {"http.host": "0.0.0.0", **extra}, HostFacts("host", 1, 1)).http.host == "0.0.0.0"


def test_front_uses_the_current_client_key_over_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read for each connection, since it may have been replaced."""
    flags = {"cluster.keys_dir": str(tmp_path), "cluster.client_endpoint": "tcp://127.0.0.1:7400"}
    config = build({}, {}, flags, HostFacts("host", 1, 1))
    shown: list[Any] = []
    monkeypatch.setattr(server, "open_client", lambda endpoint, **how: shown.append(how["key"]))
    for _ in range(2):
        make_keys(tmp_path)
        server._connect(config)
        for file in tmp_path.iterdir():
            file.unlink()
    assert [key.role for key in shown] == ["client", "client"]
    assert shown[0] != shown[1]


def test_unusable_address_is_refused() -> None:
    config = build({}, {}, {"http.host": "127.0.0.1", "http.port": 0}, HostFacts("host", 1, 1))
    elsewhere = msgspec.structs.replace(config, http=HttpSettings(host="192.0.2.1", port=1))
    with pytest.raises(ConfigError, match="cannot listen there") as caught:
        run_http(elsewhere)
    assert caught.value.value == "192.0.2.1:1"


async def test_exported_equals_table(rig: FrontRig) -> None:
    """By the exporter, and by the front itself to clients with a key. Only completions are timed."""
    await rig.open("GET", "/health").answer()
    peer = await rig.complete({"prompt": "abc"})
    (name,) = await rig.submitted(1)
    rig.speak(name, "a")
    rig.gateway.scheduler.finish(name)
    await peer.answer()
    exporter = serve([HttpCollector(rig.sources)], healthy=lambda: Health(True, ""), ready=lambda: Health(True, ""))
    try:
        families = await trio.to_thread.run_sync(scrape, exporter)
    finally:
        await trio.to_thread.run_sync(exporter.close)
    assert families.keys() == exported_names(HTTP)
    assert values(families["hisparse_http_answers_total"]) == {("/health", "200"): 1, ("/v1/completions", "200"): 1}
    assert values(families["hisparse_http_requests"]) == {(): 0}
    assert values(families["hisparse_http_connected"]) == {(): 1}
    for name in ("hisparse_http_first_token_seconds", "hisparse_http_answer_seconds"):
        counts = {sample.name: sample.value for sample in families[name].samples}
        assert counts[f"{name}_count"] == 1, name
    page = rig.open("GET", "/metrics")
    with trio.fail_after(HANG_LIMIT_S):
        await page.complete.wait()
    told = {family.name for family in text_string_to_metric_families(page.body.decode())}
    assert told == {family.name for family in families.values()}
    assert page.headers["content-type"].startswith("text/plain")


async def test_front_is_ready_while_connected_and_not_stopping(rig: FrontRig) -> None:
    assert (http_health(rig.sources).ok, http_readiness(rig.sources).ok) == (True, True)
    rig.stopping = True
    assert (http_health(rig.sources).ok, http_readiness(rig.sources).ok) == (True, False)
    rig.stopping = False
    await rig.gateway.kill()
    await until(lambda: not rig.link.connected)
    assert (http_health(rig.sources).ok, http_readiness(rig.sources).ok) == (True, False)
