"""One trace over real processes: an HTTP front, a coordinator that is killed and starts again, and a worker."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import trio

from hisparse.client.client import Client, open_client
from protocol.errors import NotFound
from tests.support.fakes.otlp_receiver import FakeOtlpReceiver
from tests.support.http_rig import write_chat_model
from tests.support.process_rig import LIMIT_S, Place

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER: Final = "00f067aa0ba902b7"
PROMPT: Final = "A prompt that no span may name. " * 4
TOKENS: Final = 600


def ask(url: str, status: list[int]) -> None:
    """A completion, as part of the caller's span."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LIMIT_S)
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    headers = {
        "content-type": "application/json",
        "idempotency-key": "traced",
        "traceparent": f"00-{TRACE}-{CALLER}-01",
        "tracestate": "vendor=1",
    }
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    status.append(connection.getresponse().status)
    connection.close()


def is_healthy(url: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LIMIT_S)
    connection.request("GET", "/health", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
    status = connection.getresponse().status
    connection.close()
    return status == 200


async def until_state(client: Client, state: str) -> None:
    while True:
        try:
            if (await client.request("traced")).row.state == state:
                return
        except NotFound:
            pass
        await trio.sleep(0.02)


async def test_request_is_one_trace_from_the_front_through_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, status = Place(tmp_path, write_chat_model(tmp_path / "model")), list[int]()
    with FakeOtlpReceiver() as receiver:
        monkeypatch.setenv("HISPARSE_CLUSTER_TRACES_ENDPOINT", receiver.url)
        async with trio.open_nursery() as nursery, place.worker(), place.http() as front:
            url = await front.url()
            async with place.coordinator():
                while not await trio.to_thread.run_sync(is_healthy, url):  # noqa: ASYNC110
                    await trio.sleep(0.1)
                nursery.start_soon(trio.to_thread.run_sync, ask, url, status)
                async with open_client(place.endpoint("admin"), role="admin") as operator:
                    await until_state(operator, "RUNNING")
                    await operator.retract(["traced"], hold=True)
                    await until_state(operator, "RETRACTED")
                while not receiver.named("retraction"):  # noqa: ASYNC110 - sent within a second; then the process is killed
                    await trio.sleep(0.05)
            async with place.coordinator() as coordinator:
                await coordinator.metrics_port()  # it listens
                async with open_client(place.endpoint("admin"), role="admin") as operator:
                    await operator.resume(["traced"])
                    await until_state(operator, "FINISHED")
                while not status:  # noqa: ASYNC110
                    await trio.sleep(0.05)
                for process in (coordinator, front):  # what waits is sent at a stop
                    process.signal(signal.SIGTERM)
                    assert (await process.exit())[0] == 0
    assert status == [200]
    check_trace(receiver)


def check_trace(receiver: FakeOtlpReceiver) -> None:
    (answer,), (whole,) = receiver.named("POST /v1/completions"), receiver.named("request")
    stages = [it for it in receiver.spans if it not in (answer, whole)]
    assert {it.span.trace_id.hex() for it in receiver.spans} == {TRACE}
    assert (answer.service, whole.service) == ("hisparse-http", "hisparse-coordinator")
    assert answer.span.parent_span_id.hex() == CALLER
    assert whole.span.parent_span_id == answer.span.span_id
    assert {it.span.parent_span_id for it in stages} == {whole.span.span_id}
    assert {it.span.trace_state for it in receiver.spans} == {"vendor=1"}
    names = [it.span.name for it in sorted(stages, key=lambda it: it.span.start_time_unix_nano)]
    assert names == [
        *("queued", "prefill", "load", "decode", "retraction"),  # then it was killed
        *("retracted", "resume", "decode", "completion"),
    ]
    assert whole.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert answer.attributes["http.response.status_code"] == 200
    assert PROMPT[:16].encode() not in receiver.raw
