"""Cross-origin requests: which origin may read answers, errors and streams, and how preflights are answered."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest
import trio

from hisparse.http.server.cors import Cors
from hisparse.http.server.wire import RequestHead, Wire
from protocol.config import HostFacts, build
from protocol.errors import ConfigError
from protocol.settings import HttpSettings
from tests.support.http_rig import KEY, FrontRig, Peer, front_rig
from tests.support.limits import HANG_LIMIT_S

APP: Final = "https://app.example.com"
OTHER: Final = "http://localhost:3000"
STRANGER: Final = "https://example.com"
LISTED: Final = HttpSettings(cors_origins=f"{APP}, {OTHER}", requests_max=3)
ASKED: Final = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


def allowed(peer: Peer) -> str | None:
    assert "access-control-allow-credentials" not in peer.headers
    return peer.headers.get("access-control-allow-origin")


async def asked(rig: FrontRig, method: str, path: str, headers: dict[str, str]) -> Peer:
    peer = rig.open(method, path, headers)
    await peer.say(b"")
    with trio.fail_after(HANG_LIMIT_S):
        await peer.complete.wait()
    return peer


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("origin", [APP, OTHER])
async def test_listed_origin_may_read_answers_errors_and_streams(tmp_path: Path, origin: str) -> None:
    async with front_rig(tmp_path, LISTED) as rig:
        peers = [
            await asked(rig, "GET", "/v1/models", {"Origin": origin}),
            await asked(rig, "GET", "/nowhere", {"Origin": origin}),
            await rig.complete({"prompt": ""}, origin=origin),
        ]
        await peers[-1].answer()
        stream = await rig.complete({"prompt": "abc", "stream": True}, origin=origin)
        (name,) = await rig.submitted(1)
        rig.speak(name, "a")
        rig.gateway.scheduler.finish(name)
        await stream.until("[DONE]")
    assert [it.status for it in (*peers, stream)] == [200, 404, 400, 200]
    assert [allowed(it) for it in (*peers, stream)] == [origin] * 4
    assert [it.headers["vary"] for it in (*peers, stream)] == ["origin"] * 4
    exposed = set(stream.headers["access-control-expose-headers"].split(", "))
    assert {"x-request-id", "hisparse-request-id"} <= exposed & stream.headers.keys()


async def test_missing_key_can_be_read_by_a_listed_origin(tmp_path: Path) -> None:
    async with front_rig(tmp_path, LISTED, keys=(KEY,)) as rig:
        peer = await asked(rig, "GET", "/v1/models", {"Origin": APP})
    assert (peer.status, allowed(peer)) == (401, APP)


@pytest.mark.parametrize("origin", [STRANGER, APP + ":8443", APP.replace("https", "http"), APP + "/", "null", ""])
async def test_origin_that_is_not_listed_gets_no_header(tmp_path: Path, origin: str) -> None:
    async with front_rig(tmp_path, LISTED) as rig:
        answer = await asked(rig, "GET", "/v1/models", {"Origin": origin} if origin else {})
        preflight = await asked(rig, "OPTIONS", "/v1/completions", {"Origin": origin, **ASKED})
    assert (answer.status, preflight.status) == (200, 405)
    for peer in (answer, preflight):
        assert [it for it in peer.headers if it.startswith("access-control")] == []
        assert peer.headers["vary"] == "origin", "a cache may not show this answer to a listed origin"


async def test_every_origin_may_read_answers_with_a_star(tmp_path: Path) -> None:
    async with front_rig(tmp_path, HttpSettings(cors_origins="*")) as rig:
        peer = await asked(rig, "GET", "/v1/models", {"Origin": STRANGER})
        preflight = await asked(rig, "OPTIONS", "/v1/completions", {"Origin": STRANGER, **ASKED})
    assert [(it.status, allowed(it), "vary" in it.headers) for it in (peer, preflight)] == [
        (200, "*", False),
        (204, "*", False),
    ]


async def test_without_the_setting_there_are_no_headers(tmp_path: Path) -> None:
    async with front_rig(tmp_path) as rig:
        peer = await asked(rig, "GET", "/v1/models", {"Origin": APP})
        preflight = await asked(rig, "OPTIONS", "/v1/completions", {"Origin": APP, **ASKED})
    assert (peer.status, preflight.status) == (200, 405)
    for it in (peer, preflight):
        assert not {"vary", "access-control-allow-origin", "access-control-allow-methods"} & it.headers.keys()


# ---------------------------------------------------------------- preflights


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/nowhere"])
async def test_preflight_of_a_listed_origin_needs_no_key(tmp_path: Path, path: str) -> None:
    """Of unknown paths too: the page then reads the 404."""
    async with front_rig(tmp_path, LISTED, keys=(KEY,)) as rig:
        peer = await asked(rig, "OPTIONS", path, {"Origin": APP, **ASKED})
        assert not peer.held, "it shows no right to its place"
    assert (peer.status, peer.body, allowed(peer)) == (204, b"", APP)
    assert peer.headers["access-control-allow-methods"] == "GET, HEAD, POST"
    assert peer.headers["access-control-max-age"] == "600"
    names = peer.headers["access-control-allow-headers"].split(", ")
    assert {"authorization", "content-type", "idempotency-key", "x-request-id", "*"} == set(names)
    assert "content-length" not in peer.headers


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("OPTIONS", {"origin": APP}),
        ("OPTIONS", {"access-control-request-method": "POST"}),
        ("GET", {"origin": APP, "access-control-request-method": "POST"}),
    ],
)
def test_other_requests_are_no_preflight(method: str, headers: dict[str, str]) -> None:
    for cors in (Cors((APP,)), Cors(("*",))):
        assert cors.preflight(RequestHead(method, "/v1/models", tuple(headers.items()))) is None


def test_answer_to_a_preflight_has_no_body_on_the_wire() -> None:
    """The connection takes the next request after it."""
    wire = Wire()
    wire.feed(b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: %s\r\n\r\n" % APP.encode())
    assert wire.next_head() is not None
    sent = wire.start(204, Cors((APP,)).headers(APP), time.time(), last=False) + wire.end()
    head, body = sent.lower().split(b"\r\n\r\n")
    assert (head.split()[1], body, wire.reuse()) == (b"204", b"", True)
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head


# ---------------------------------------------------------------- the setting


def origins(text: str) -> tuple[str, ...]:
    return build({}, {"HISPARSE_HTTP_CORS_ORIGINS": text}, {}, HostFacts("host", 1, 1)).http.origins


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        (" ", ()),
        ("*", ("*",)),
        (f"{APP},{OTHER}", (APP, OTHER)),
        (f" {APP} , http://[::1]:3000", (APP, "http://[::1]:3000")),
        ("chrome-extension://abcdef,http://my_host", ("chrome-extension://abcdef", "http://my_host")),
    ],
)
def test_origins_are_separated_by_commas(text: str, expected: tuple[str, ...]) -> None:
    assert origins(text) == expected


@pytest.mark.parametrize(
    ("text", "value", "remedy"),
    [
        ("app.example.com", "app.example.com", "write SCHEME://HOST"),
        ("null", "null", "write SCHEME://HOST"),
        (f"{APP},", "", "write SCHEME://HOST"),
        (f"{APP} {OTHER}", f"{APP} {OTHER}", "write SCHEME://HOST"),
        (f"{APP}/chat", f"{APP}/chat", "write SCHEME://HOST"),
        ("http://x:0", "http://x:0", "write SCHEME://HOST"),
        ("http://x:65536", "http://x:65536", "write SCHEME://HOST"),
        ("http://*.example.com", "http://*.example.com", "write SCHEME://HOST"),
        ("http://ünicode", "http://ünicode", "write SCHEME://HOST"),
        (f"{APP}/", f"{APP}/", f"write {APP}"),
        ("HTTPS://App.example.com", "HTTPS://App.example.com", f"write {APP}"),
        (f"{APP}:443", f"{APP}:443", f"write {APP}"),
        ("http://localhost:03000", "http://localhost:03000", f"write {OTHER}"),
        (f"*,{APP}", f"*,{APP}", "write * alone"),
    ],
)
def test_malformed_origin_is_refused_with_a_remedy(text: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        origins(text)
    assert (caught.value.field, caught.value.value) == ("http.cors_origins", value)
    assert caught.value.remedy.startswith(remedy)
    if remedy.startswith("write http"):
        assert origins(caught.value.remedy.removeprefix("write ")) == (caught.value.remedy.removeprefix("write "),)
