"""The tokenizer cache gives back what was kept and nothing else."""

from __future__ import annotations

from pathlib import Path

from hisparse.client.tokenizer_cache import cache_dir, read_cached, write_cached
from protocol.tokenizer_files import TokenizerFile

DATA = b'{"version": "1.0"}'
HASH = TokenizerFile("json", DATA).hash


def test_stored_tokenizer_is_returned(tmp_path: Path) -> None:
    assert read_cached(tmp_path, HASH) is None
    write_cached(tmp_path / "new", HASH, DATA)
    assert read_cached(tmp_path / "new", HASH) == DATA


def test_bytes_with_another_hash_are_not_served(tmp_path: Path) -> None:
    write_cached(tmp_path, HASH, b"tampered")
    assert read_cached(tmp_path, HASH) is None


def test_hash_from_the_wire_cannot_leave_the_cache(tmp_path: Path) -> None:
    write_cached(tmp_path / "cache", "../../evil", b"x")
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "cache"]


def test_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_cached(tmp_path / "file" / "below", HASH, DATA)


def test_cache_lies_in_the_users_cache_directory() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/hisparse/tokenizers")
    assert cache_dir({"HOME": "/home/me"}) == Path("/home/me/.cache/hisparse/tokenizers")
