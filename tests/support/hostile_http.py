"""Hostile bytes for the HTTP front: requests by grammar with something wrong in them, other protocols, and mutations.

`attack(dice, key)` is what one connection sends, and how many requests it counts as. Everything is drawn from `dice`:
the same seed sends the same bytes.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from hisparse.http.apis.known import APIS
from hisparse.http.apis.tokens import TOKEN_APIS
from hisparse.http.server.wire import HEADER_BYTES_MAX

METHODS: Final = (b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"get", b"G\xff", b"")
GETS: Final = (
    *(b"/health", b"/metrics", b"/v1/models", b"/v1/models/fake", b"/v1/requests/id1", b"/openapi.json"),
    *(b"/", b"/page.js", b"/v1/parameters"),
)
POSTS: Final = (
    *(b"/v1/completions", b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"),
    *(b"/tokenize", b"/detokenize", b"/v1/messages/count_tokens"),
)
PATHS: Final = GETS + POSTS
TARGETS: Final = (*PATHS, b"*", b"host:1", b"http://h/health?q", b"/%ff%00", b"/\xff", b"//", b"", b"/" + b"a" * 9_000)
VERSIONS: Final = (b"HTTP/1.1",) * 12 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/11", b"http/1.1", b"")
EOLS: Final = (b"\r\n",) * 12 + (b"\n", b"\r", b"\r\r\n", b"")
VALUES: Final[tuple[bytes, ...]] = (
    *(b"", b" ", b"0", b"1", b"-1", b"5, 6", b"9" * 30, b"9" * 5_000, b"chunked", b"gzip, chunked", b"\xff", b"\x00"),
    *(b"close", b"keep-alive", b"Upgrade", b"Upgrade, HTTP2-Settings", b"Upgrade, \xff", b"h2c", b"websocket"),
    *(b"100-continue", b"AAMAAABkAAQAAP__", b"\xff!", b"permessage-deflate; \xff", b"a b", b"a" * 3_000, b"\r\n x"),
)
NAMES: Final = (
    *(b"Host", b"Connection", b"Upgrade", b"HTTP2-Settings", b"Content-Length", b"Transfer-Encoding", b"Expect", b"TE"),
    *(b"Sec-WebSocket-Key", b"Sec-WebSocket-Version", b"Sec-WebSocket-Protocol", b"Sec-WebSocket-Extensions"),
    *(b"X-Request-Id", b"Idempotency-Key", b"Authorization", b"Trailer", b"Cookie", b"bad name", b"\xff", b":path"),
    b"",
)
ODD: Final[tuple[Any, ...]] = (
    *(None, True, 0, 1, -1, 2**31, 2**63, 2**70, 1e308, "", "x", "x" * 300, "\ud800", "\0", [], {}, [[]], [""], [None]),
    *([1, "a"], [[1], 2], [1] * 500, [[1]] * 200, ["a"] * 200, [1] * 5_000, "a" * 5_000, {"a": {"b": [1]}}),
)
FIELDS: Final = (
    "nothing",
    *sorted({name for api in (*APIS, *TOKEN_APIS) for name in api.body.__struct_fields__}),
)
#: Outputs of models, as turns of an assistant, in texts and in parts; and what should be tools.
MARKUP: Final = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>"),
    *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "{{ x }}", "{% if %}"),
)
TOOLS: Final[tuple[Any, ...]] = (
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": [[1]]}}}],
    [{"type": "function", "name": "f", "parameters": {"$ref": "#"}}],
    [{"name": "f", "input_schema": {"anyOf": [{}] * 50}}],
    *([{"type": "function", "function": {"name": "a b"}}], [{"name": "f"}], [{}], {}, "f", [None], [[]]),
)
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
PARTS: Final[tuple[Any, ...]] = (
    *({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}, {"type": "input_audio"}, {"type": "x"}),
    *({"type": "tool_use", "id": "c1", "name": "f", "input": {}}, {"type": "tool_use", "id": 1, "input": []}),
    *({"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image"}]}, {"type": "thinking"}),
    *({"type": "input_text", "text": "x"}, {"type": "output_text"}, {}, [], None, 5, "x"),
)
ITEMS: Final[tuple[Any, ...]] = (
    *({"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{"}, {"type": "item_reference"}),
    *({"type": "function_call_output", "call_id": "c1", "output": "x"}, {"type": "reasoning", "summary": []}),
    *({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL] * 9, "content": None}),
    *({"role": "tool", "content": "x", "tool_call_id": "c1"}, {"role": "tool", "content": "x"}, {}, [], None),
)
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: One in so many bodies is large.
LARGE_ONE_IN: Final = 2_000
LARGE_BYTES: Final = 2 << 20


def attack(dice: random.Random, key: str) -> tuple[bytes, int]:
    """The bytes of one connection, and the requests in them."""
    kind = dice.choices(_KINDS, _WEIGHTS)[0]
    count = dice.choice((1, 1, 1, 2, 4, 8)) if kind in (_good, _odd) else 1
    data = b"".join(kind(dice, key) for _ in range(count))
    if dice.random() < 0.3:
        data = mutated(dice, data)
    return data, count


def body(dice: random.Random) -> bytes:
    """A body of one of the kinds, with up to three fields replaced or added."""
    if dice.randrange(LARGE_ONE_IN) == 0:
        return json.dumps({"prompt": dice.choice(("x" * LARGE_BYTES, [1] * (LARGE_BYTES // 3)))}).encode()
    said: dict[str, Any] = {"max_tokens": dice.randrange(1, 9), "stream": dice.random() < 0.3}
    kind = dice.randrange(5)
    if kind < 2:
        said["prompt"] = dice.choice(("abc", [1, 2, 3], ["a", "b"], [[1], [2, 3]]))
    elif kind < 4:
        said["messages"] = [_message(dice) for _ in range(dice.choice((1, 1, 2, 5)))]
    else:
        said |= {"input": [_message(dice), *dice.choices(ITEMS, k=dice.randrange(3))], "max_output_tokens": 5}
        del said["max_tokens"]
    if dice.random() < 0.3:
        said["tools"] = dice.choice(TOOLS)
    if dice.random() < 0.05:
        said = {"tokens": dice.choice(([1, 2], [999], "x"))}
    if dice.random() < 0.6:
        for _ in range(dice.randrange(1, 4)):
            said[dice.choice(FIELDS)] = dice.choice(ODD)
    data = json.dumps(said).encode()
    return mutated(dice, data) if dice.random() < 0.2 else data


def _message(dice: random.Random) -> Any:
    """A turn, mostly of a user."""
    if dice.random() < 0.2:
        return dice.choice(ITEMS)
    text = "".join(dice.choices(MARKUP, k=dice.randrange(6))) or "hé"
    content = text if dice.random() < 0.7 else dice.choices(PARTS, k=dice.randrange(4))
    return {"role": dice.choice(("user", "user", "assistant", "system", "tool")), "content": content}


def mutated(dice: random.Random, data: bytes) -> bytes:
    """With a few bytes flipped, cut out, repeated, or put in."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(len(changed) + 1)
        span = dice.choice((1, 1, 2, 8, 64))
        match dice.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << dice.randrange(8)
            case 1:
                del changed[at : at + span]
            case 2:
                changed[at:at] = changed[at : at + span]
            case _:
                changed[at:at] = dice.choice((b"\xff", b"\x00", b"\r\n", b"\n", b" ", b"\r\n\r\n", b"0", b"{", b"["))
    return bytes(changed)


# ---------------------------------------------------------------- kinds


def _good(dice: random.Random, key: str) -> bytes:
    """As ordinary clients ask."""
    path = dice.choice(GETS + POSTS * 2)
    if path in GETS:
        return _request(b"GET", path, [(b"Authorization", f"Bearer {key}".encode())], b"")
    headers = [(b"Authorization", f"Bearer {key}".encode())]
    if dice.random() < 0.3:
        name = dice.choice((b"Idempotency-Key", b"X-Request-Id"))
        headers.append((name, b"id%d" % dice.randrange(50)))
    if dice.random() < 0.3:
        data = body(dice)
        cut = dice.randrange(len(data) + 1)
        return _request(b"POST", path, [*headers, (b"Transfer-Encoding", b"chunked")], _chunked(data[:cut], data[cut:]))
    data = body(dice)
    return _request(b"POST", path, [*headers, (b"Content-Length", b"%d" % len(data))], data)


def _odd(dice: random.Random, key: str) -> bytes:
    """Each part of a request drawn from what is right and what is not."""
    headers = [(b"Host", b"x"), (b"Authorization", f"Bearer {key}".encode())]
    data = body(dice) if dice.random() < 0.4 else b""
    if data:
        headers.append((b"Content-Length", b"%d" % (len(data) + dice.choice((0, 0, 0, 1, -1, 10_000)))))
    for _ in range(dice.randrange(5)):
        headers.append((dice.choice(NAMES), dice.choice(VALUES)))
    if dice.random() < 0.02:
        headers.append((b"Padding", b"p" * (HEADER_BYTES_MAX + dice.randrange(-400, 2_000))))
    dice.shuffle(headers)
    eol = dice.choice(EOLS)
    first = b" ".join((dice.choice(METHODS[:2] + METHODS), dice.choice(PATHS + TARGETS), dice.choice(VERSIONS)))
    lines = [first, *(name + dice.choice((b": ", b":", b" : ")) + value for name, value in headers)]
    return eol.join(lines) + eol + dice.choice((eol, b"\r\n", b"")) + data


def _websocket(dice: random.Random, key: str) -> bytes:
    headers = [
        (b"Upgrade", b"websocket"),
        (b"Connection", dice.choice((b"Upgrade", b"Upgrade, \xff", b"keep-alive"))),
        (b"Sec-WebSocket-Key", dice.choice((b"AAAAAAAAAAAAAAAAAAAAAA==", b"\xff", b""))),
        (b"Sec-WebSocket-Version", dice.choice((b"13", b"8", b"\xff"))),
        (b"Sec-WebSocket-Protocol", dice.choice((b"chat", b"\xff"))),
        (b"Sec-WebSocket-Extensions", dice.choice((b"permessage-deflate", b"\xff", b";;="))),
    ]
    frames = b"".join(
        bytes((dice.randrange(256), dice.randrange(256))) + dice.randbytes(dice.randrange(40))
        for _ in range(dice.randrange(8))
    )
    return _request(b"GET", dice.choice(PATHS), headers, frames)


def _h2c(dice: random.Random, key: str) -> bytes:
    settings = dice.choice((b"AAMAAABkAAQAAP__", b"\xff!", b"", b"A", b"a" * 500))
    connection = dice.choice((b"Upgrade, HTTP2-Settings", b"Upgrade", b"HTTP2-Settings"))
    headers = [(b"Upgrade", b"h2c"), (b"Connection", connection), (b"HTTP2-Settings", settings)]
    return _request(b"GET", dice.choice(PATHS), headers, PREFACE + _frames(dice))


def _h2(dice: random.Random, key: str) -> bytes:
    preface = PREFACE if dice.random() < 0.8 else mutated(dice, PREFACE)
    return preface + _frames(dice)


def _noise(dice: random.Random, key: str) -> bytes:
    return dice.choice((b"", b"\x16\x03\x01", b"\x80", b"GET ")) + dice.randbytes(dice.randrange(1, 200))


def _frames(dice: random.Random) -> bytes:
    """Frames of HTTP/2 of every type: DATA, HEADERS, PRIORITY, ..."""
    frames = []
    for _ in range(dice.randrange(12)):
        content = dice.randbytes(dice.choice((0, 4, 5, 8, 30)))
        size = len(content) if dice.random() < 0.9 else dice.randrange(1 << 24)
        head = struct.pack(">I", size)[1:] + bytes((dice.randrange(12), dice.randrange(256)))
        frames.append(head + struct.pack(">I", dice.randrange(8)) + content)
    return b"".join(frames)


def _request(method: bytes, path: bytes, headers: Sequence[tuple[bytes, bytes]], data: bytes) -> bytes:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return method + b" " + path + b" HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n" + data


def _chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


_KINDS: Final[tuple[Callable[[random.Random, str], bytes], ...]] = (_good, _odd, _websocket, _h2c, _h2, _noise)
_WEIGHTS: Final = (25, 50, 8, 6, 6, 5)
