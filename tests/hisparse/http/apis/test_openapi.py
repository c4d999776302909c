"""/openapi.json: the paths that are served, bodies as the types that read them, and requests that are drawn from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest

from hisparse.http.apis.body import read_body
from hisparse.http.apis.known import APIS
from hisparse.http.apis.openapi import document
from hisparse.http.apis.tokens import TOKEN_APIS
from protocol.errors import BadInput
from tests.support.hostile_http import GETS, POSTS
from tests.support.http_rig import front_rig
from tools.fuzz.http import CLIENT_KEY, site

DOCUMENT: Final[dict[str, Any]] = json.loads(document())
SCHEMATHESIS: Final = Path(sys.executable).with_name("schemathesis")
#: Drawn requests of each path.
EXAMPLES: Final = 4

USER: Final = {"role": "user", "content": "x"}
GOOD: Final[dict[str, list[dict[str, Any]]]] = {
    "/v1/completions": [
        {"prompt": "x"},
        {"prompt": [[1], [2]], "stop": ["a"], "n": 2},
        {"prompt": ["a"], "echo": True},
    ],
    "/v1/chat/completions": [
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"messages": [USER], "logprobs": False, "top_k": -1, "chat_template_kwargs": {"a": 1}},
    ],
    "/v1/messages": [{"max_tokens": 5, "messages": [USER], "system": [{"type": "text", "text": "x"}]}],
    "/v1/responses": [{"input": "x"}, {"input": [USER], "metadata": {"a": "b"}, "include": []}],
    "/tokenize": [{"prompt": "x"}, {"messages": [USER]}],
    "/detokenize": [{"tokens": [1]}],
    "/v1/messages/count_tokens": [{"messages": [USER]}],
}
BAD: Final[list[dict[str, Any]]] = [{"nothing": 1}, {"model": 5}, {"messages": "x"}, {"top_k": 7}, {"max_tokens": "x"}]


def validator(path: str) -> Any:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


async def test_document_has_the_served_paths(tmp_path: Path) -> None:
    async with front_rig(tmp_path) as rig:
        told = await rig.open("GET", "/openapi.json").answer()
        served = {path for path in rig.front._routes if path not in rig.front._pages}
    assert told == DOCUMENT
    assert {re.sub(r"\{id\}$", "", path) for path in DOCUMENT["paths"]} == served
    assert {api.path for api in (*APIS, *TOKEN_APIS)} == GOOD.keys() == {path.decode() for path in POSTS}
    fuzzed = {path.decode() for path in GETS + POSTS}
    assert {path for path in DOCUMENT["paths"] if "{" not in path} <= fuzzed | {"/version"}


@pytest.mark.parametrize("api", [*APIS, *TOKEN_APIS], ids=lambda api: api.path)
def test_schema_and_reader_accept_the_same(api: Any) -> None:
    known = validator(api.path)
    for body in GOOD[api.path]:
        known.validate(body)
        read_body(json.dumps(body).encode(), api.body)
    for change in BAD:
        body = GOOD[api.path][0] | change
        refused_by_schema = not known.is_valid(body)
        try:
            read_body(json.dumps(body).encode(), api.body)
        except BadInput:
            assert refused_by_schema, change
        else:
            assert not refused_by_schema, change


def test_references_lead_somewhere() -> None:
    names = set(re.findall(r'"#/components/schemas/(\w+)"', document().decode()))
    assert names <= DOCUMENT["components"]["schemas"].keys()
    assert names


@pytest.mark.process
@pytest.mark.fuzz
@pytest.mark.deep
@pytest.mark.timeout(1_200)
@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="needs the package schemathesis")
def test_drawn_requests_are_answered_as_the_document_says(tmp_path: Path) -> None:
    """All checks but one: a body of the right form may still be too long for the context, or contradict itself."""
    place = tmp_path / "site"
    place.mkdir()
    with site(place) as at:
        url = f"http://127.0.0.1:{at.plain.port}/openapi.json"
        command = [str(SCHEMATHESIS), "run", url, "-H", f"Authorization: Bearer {CLIENT_KEY}", "--no-color"]
        options = ["--max-examples", str(EXAMPLES), "--exclude-checks", "positive_data_acceptance"]
        run = subprocess.run(
            [*command, *options, "--generation-deterministic", "--request-timeout", "60"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-4_000:]
    assert " defect " not in (place / "plain.log").read_text()
