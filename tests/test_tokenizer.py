"""Text and ids on the client's side: characters stream whole, the cache never serves other bytes than asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import BadInput, ProtocolError
from coordinator.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    build_tokenizer,
    cache_dir,
    hash_of,
    read_cached,
    write_cached,
)


@pytest.fixture(scope="module")
def tokenizer_json() -> bytes:
    """A byte-level BPE tokenizer without merges: each byte is one token, so any character may be split."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    return library.to_str().encode()


def streamed(tokenizer: Tokenizer, ids: list[int], step: int) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(ids[i : i + step]) for i in range(0, len(ids), step)) + stream.finish()


@given(st.text(), st.integers(1, 7))
def test_bytes_come_back_as_text_however_they_are_cut(text: str, step: int) -> None:
    tokenizer = ByteTokenizer()
    assert streamed(tokenizer, tokenizer.encode(text), step) == text


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_a_json_tokenizer_streams_whole_characters(tokenizer_json: bytes, step: int) -> None:
    text = "naïve café – 東京 🦀 done"
    tokenizer = build_tokenizer("json", tokenizer_json)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert streamed(tokenizer, ids, step) == text


def test_no_half_character_is_shown_before_its_other_half(tokenizer_json: bytes) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(tokenizer_json)):
        stream = tokenizer.stream()
        pieces = [stream.push([token]) for token in tokenizer.encode("é")]
        assert pieces == ["", "é"]


def test_an_output_that_ends_inside_a_character_shows_it(tokenizer_json: bytes) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(tokenizer_json)):
        assert streamed(tokenizer, tokenizer.encode("aé")[:-1], 1) == "a\ufffd"


def test_special_ids_have_no_text(tokenizer_json: bytes) -> None:
    assert streamed(ByteTokenizer(), [104, 256, 105, 999], 1) == "hi"
    library = JsonTokenizer(tokenizer_json)
    assert streamed(library, [*library.encode("hi"), 256], 1) == "hi"


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        build_tokenizer("sentencepiece", b"")
    with pytest.raises(BadInput, match="unreadable"):
        build_tokenizer("json", b"{}")


def test_the_cache_gives_back_what_was_kept_and_nothing_else(tmp_path: Path) -> None:
    data = b'{"version": "1.0"}'
    content_hash = hash_of(data)
    assert read_cached(tmp_path, content_hash) is None
    write_cached(tmp_path / "new", content_hash, data)
    assert read_cached(tmp_path / "new", content_hash) == data
    (tmp_path / "new" / f"{content_hash}.json").write_bytes(b"tampered")
    assert read_cached(tmp_path / "new", content_hash) is None


def test_a_hash_from_the_wire_cannot_leave_the_cache(tmp_path: Path) -> None:
    write_cached(tmp_path / "cache", "../../evil", b"x")
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "cache"]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_cached(tmp_path / "file" / "below", hash_of(b"x"), b"x")


def test_the_cache_lies_where_the_user_keeps_caches() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/hisparse/tokenizers")
    assert cache_dir({"HOME": "/home/me"}) == Path("/home/me/.cache/hisparse/tokenizers")
