"""Headers of safetensors files: what the library wrote is read, and what describes the file wrongly is refused."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from protocol.errors import ConfigError
from worker.weights.safetensors_header import (
    ELEMENT_BYTES,
    HEADER_BYTES_MAX,
    PREFIX_BYTES,
    StoredTensor,
    header_length,
    parse_header,
)

FILE = "/models/m/model.safetensors"
TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.ones(5, dtype=torch.bfloat16),
    "c.scale": torch.tensor(3, dtype=torch.int64),
    "d.empty": torch.empty(0, 7, dtype=torch.float16),
    "e.fp8": torch.zeros(2, 2).to(torch.float8_e4m3fn),
}


def parsed(data: bytes) -> dict[str, StoredTensor]:
    length = header_length(FILE, data[:PREFIX_BYTES], len(data))
    return parse_header(FILE, data[PREFIX_BYTES : PREFIX_BYTES + length], len(data))


def refusal(data: bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(data)
    assert (caught.value.field, caught.value.value) == ("worker.model", FILE)
    assert caught.value.remedy
    assert caught.value.message.startswith("malformed safetensors file: ")
    assert len(str(caught.value)) < 800
    return caught.value.message


def file_of(header: object, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_written_file_is_read(tmp_path: object) -> None:
    data = save(TENSORS, metadata={"format": "pt"})
    found = parsed(data)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        stored = found[name]
        assert stored.shape == tuple(tensor.shape)
        assert stored.end - stored.begin == tensor.numel() * tensor.element_size()
        assert data[stored.begin : stored.end] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert found["b.weight"].dtype == "BF16"
    assert parsed(file_of({}, 0)) == {}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\x01" * 7, "has 7 bytes"),
        (bytes(8), "the header is not a JSON object"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "header length 1048576 is beyond the end of the file, which has 10"),
        (b"\xff" * 8 + b"{}", f"header length {2**64 - 1} is more than {HEADER_BYTES_MAX} bytes"),
        (file_of(b"{", 0), "the header is not a JSON object"),
        (file_of(b"\xff\xfe", 0), "the header is not a JSON object"),
        (file_of([1], 0), "the header is not a JSON object"),
        (file_of(b'{"a": ' + b"[" * 200_000, 0), "the header is nested too deeply"),
        (file_of({"w": 3}, 0), "tensor w: Expected `object`, got `int`"),
        (file_of({"w": {"dtype": "U8", "shape": [1]}}, 1), "missing required field `data_offsets`"),
        (file_of({"w": entry(0, 1) | {"more": 1}}, 1), "unknown field `more`"),
        (file_of({"w": entry(0, 4, shape=[-4])}, 4), "`int` >= 0"),
        (file_of({"w": entry(0, 4, shape=["4"])}, 4), "Expected `int`, got `str`"),
        (file_of({"w": entry(0, 1, shape=[1] * 17)}, 1), "length <= 16"),
        (file_of({"w": entry(0, 1) | {"data_offsets": [0]}}, 1), "data_offsets"),
        (file_of({"w": entry(-1, 1, shape=[2])}, 1), "`int` >= 0"),
        (file_of({"w": entry(0, 2, "F7", [2])}, 2), "tensor w: dtype F7 is not known"),
        (file_of({"w": entry(4, 2, shape=[0])}, 4), "[4, 2] end before they begin"),
        (file_of({"w": entry(0, 4, "F32", [2])}, 4), "hold 4 bytes, and F32 [2] takes 8"),
        (file_of({"w": entry(0, 8, "F32", [1 << 40, 1 << 40])}, 8), "hold 8 bytes, and F32"),
        (file_of({"w": entry(0, 4)}, 3), "tensor w: data_offsets [0, 4] are beyond the data, which has 3 bytes"),
        (file_of({"w": entry(0, 4), "v": entry(2, 6)}, 6), "tensor v: data_offsets begin at 2: it overlaps tensor w"),
        (file_of({"w": entry(0, 4), "v": entry(0, 4)}, 4), "it overlaps tensor w, which ends at 4"),
        (file_of({"w": entry(0, 4), "v": entry(5, 6)}, 6), "it leaves a gap behind tensor w, which ends at 4"),
        (file_of({"w": entry(1, 4)}, 4), "it leaves a gap behind the start of the data"),
        (file_of({"w": entry(0, 4)}, 5), "1 bytes at the end belong to no tensor"),
        (file_of({"n" * 10_000: entry(0, 4, "F" * 10_000)}, 4), "nnn...: dtype FFF"),
    ],
)
def test_malformed_file_is_refused(data: bytes, message: str) -> None:
    found = refusal(data)
    assert message in found.replace("n" * 117, "").replace("F" * 117, "")


def test_pointer_of_git_lfs_is_called_one() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4967252832\n"
    with pytest.raises(ConfigError, match="is a Git LFS pointer") as caught:
        parsed(pointer)
    assert (caught.value.field, caught.value.value) == ("worker.model", FILE)
    assert "git lfs pull" in caught.value.remedy


@given(st.data())
def test_a_changed_file_is_refused_or_described_within_its_bytes(draw: st.DataObject) -> None:
    """Truncated or with changed bytes: no other error, and no range that the library would not read as well."""
    data = bytearray(save(TENSORS))
    for _ in range(draw.draw(st.integers(0, 3))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    whole = bytes(data[: draw.draw(st.integers(0, len(data)))])
    try:
        found = parsed(whole)
    except ConfigError:
        return
    for tensor in found.values():
        assert 0 <= tensor.begin <= tensor.end <= len(whole)
        assert math.prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype] == tensor.end - tensor.begin
    with suppress(SafetensorError, KeyError):  # for metadata, which this reader does not look at
        assert load(whole).keys() == found.keys()
