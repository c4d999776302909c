"""Threads of the front decode bodies at the same time, its first ones too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import ROOT

#: Prints the types whose fields msgspec reads for the first time when bodies are decoded, as JSON, behind how many
#: types were decoded to. `Fresh`, which is decoded to before all others, must be the first of them.
PROGRAM = """
import json, sys
from contextlib import suppress
import msgspec
from hisparse.http import service as server
from hisparse.http.apis.known import APIS
from hisparse.http.apis.body import read_body, read_raw
from hisparse.http.apis.fields import NULL
from hisparse.http.apis.tokens import TOKEN_APIS
from protocol.errors import BadInput

late, decoded = [], 0

def watch(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        late.append(frame.f_locals["obj"].__name__)

class Fresh(msgspec.Struct):
    a: int

sys.setprofile(watch)
msgspec.json.decode(b'{"a": 1}', type=Fresh)
for api in (*APIS, *TOKEN_APIS):
    with suppress(BadInput):
        read_body(b"{}", api.body)
    for field, kind in api.body.raw_types.items():
        read_raw(NULL, field, kind | None)
    decoded += 1 + len(api.body.raw_types)
used = [{"type": "web_search"}]
flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}
said = {"input": [{"role": "user", "content": "x"}, *used], "tools": used, "tool_choice": flat}
with suppress(BadInput):
    read_body(json.dumps(said).encode(), APIS[-1].body).generation()
sys.setprofile(None)
print(json.dumps([decoded, late]))
"""


@pytest.mark.process
def test_fields_of_bodies_are_read_before_threads_decode_bodies() -> None:
    """A thread that decodes to a type whose fields msgspec 0.22 still reads in another one ends the process (SIGSEGV):
    a front closed its first connections without an answer."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    decoded, late = json.loads(done.stdout)
    assert decoded > 20
    assert late == ["Fresh"]
