"""Bodies that the strict decoder refuses and that are taken all the same: what is changed in them, and at what cost."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any, Literal

import msgspec
import pytest

from hisparse.http.apis import decoding
from hisparse.http.apis.body import read_body
from hisparse.http.apis.decoding import decoded
from hisparse.http.apis.openai.chat_bodies import ChatBody
from hisparse.http.apis.tolerance import tolerated
from protocol.errors import BadInput


class Pear(msgspec.Struct, forbid_unknown_fields=True, tag="pear", tag_field="type"):
    count: int | None = None
    free: dict[str, Any] | None = None
    runs_async: bool = msgspec.field(default=False, name="async")


class Plum(msgspec.Struct, forbid_unknown_fields=True, tag="plum", tag_field="type"):
    text: str | list[Pear] = ""


class Basket(msgspec.Struct, forbid_unknown_fields=True):
    fruits: list[Pear | Plum] | None = None
    counts: list[int] | None = None
    share: int | bool | None = None
    size: int | Literal["all"] = 0
    weight: float = 0


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ('{"size": 8.0}', '{"size":8}'),
        ('{"counts": [1, 2.0]}', '{"counts":[1,2]}'),
        ('{"share": 5.0}', '{"share":5}'),
        ('{"size": -8.00, "weight": 8.0}', '{"size":-8,"weight":8.0}'),
        ('{"a": null, "b": [ ], "c": {\n}, "d": "", "size": 1}', '{"size":1}'),
        (' {"fruits": [{"type": "pear", "async": true, "x": null}]} ', '{"fruits":[{"type":"pear","async":true}]}'),
        (
            '{"fruits": [{"type": "plum", "text": [{"type": "pear", "y": [], "count": 2.0}]}, {"type": "pear"}]}',
            '{"fruits":[{"type":"plum","text":[{"type":"pear","count":2}]},{"type": "pear"}]}',
        ),
    ],
)
def test_empty_fields_and_whole_numbers_are_taken(said: str, taken: str) -> None:
    assert tolerated(said.encode(), Basket) == taken.encode()
    assert decoded(said.encode(), Basket) == msgspec.json.decode(taken, type=Basket)


@pytest.mark.parametrize(
    "said",
    [
        '{"size": 8.5}',
        '{"size": "8.0"}',
        '{"a": 0}',
        '{"a": false}',
        '{"a": [null]}',
        '{"a": {"b": null}}',
        '{"a": " "}',
        '{"fruits": [{"type": "fig", "x": null}]}',
        '{"fruits": [{"type": "pear", "free": {"x": null, "y": 8.0}, "z": 1}]}',
    ],
)
def test_anything_else_is_refused_as_it_came(said: str) -> None:
    assert tolerated(said.encode(), Basket) is None
    with pytest.raises(BadInput):
        decoded(said.encode(), Basket)


def test_field_that_holds_something_is_named_among_empty_ones() -> None:
    said = {"fruits": [{"type": "pear", "x": None}, {"type": "pear", "y": {}, "z": {"a": 1}}]}
    with pytest.raises(BadInput) as caught:
        decoded(json.dumps(said).encode(), Basket)
    assert (caught.value.field, caught.value.message) == ("fruits[1].z", "is no known parameter")


@pytest.mark.parametrize("data", [b'{"a": null, "size": ', b'{"a": null, "size": 1}}', b'{"a": null, "b": \xff}'])
def test_body_that_is_no_json_is_refused_as_such(data: bytes) -> None:
    with pytest.raises(BadInput) as caught:
        decoded(data, Basket)
    assert (caught.value.field, caught.value.remedy) == ("body", "send one JSON object in UTF-8")


def test_ordinary_body_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError

    monkeypatch.setattr(decoding, "tolerated", refuse)
    said = {"messages": [{"role": "user", "content": "x", "refusal": None}], "temperature": 1, "user": {"a": None}}
    assert read_body(json.dumps(said).encode(), ChatBody).messages[0].content == "x"


def test_memory_is_bounded_by_the_body() -> None:
    """Its decoded form takes more."""
    said = {"messages": [{"role": "user", "content": "x" * 100, "reasoning_details": []}] * 50_000}
    data = json.dumps(said).encode()
    tracemalloc.start()
    changed = tolerated(data, ChatBody)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert changed is not None
    assert len(changed) < len(data)
    assert peak < 6 * len(data)
