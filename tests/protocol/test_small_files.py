"""Small files: read without waiting, of bounded size and depth; each refusal names field, file and remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.small_files import JSON_BYTES_MAX, JSON_DEPTH_MAX, depth_of, read_json_object, read_small_file
from tests.support.limits import HANG_LIMIT_S

pytestmark = pytest.mark.timeout(HANG_LIMIT_S)


def refusal(path: Path, *, follows_links: bool = True, bytes_max: int = 100) -> str:
    with pytest.raises(ConfigError) as caught:
        read_small_file(path, "a.field", bytes_max=bytes_max, follows_links=follows_links)
    assert (caught.value.field, caught.value.value) == ("a.field", str(path))
    assert caught.value.remedy
    return caught.value.message


def test_only_a_regular_file_within_its_bound_is_read(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"x" * 100)
    link.symlink_to(file)
    assert read_small_file(link, "a.field", bytes_max=100)[0] == b"x" * 100
    assert refusal(link, follows_links=False).startswith("is a symlink")
    assert refusal(file, bytes_max=99) == "more than 99 bytes"
    assert refusal(tmp_path) == "cannot be read: Is a directory"
    assert refusal(tmp_path / "none") == "cannot be read: No such file or directory"
    assert refusal(Path("/dev/zero")) == "is no regular file"
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert refusal(tmp_path / "pipe") == "is no regular file"


@pytest.mark.refuses("is a Git LFS pointer")
def test_pointer_of_git_lfs_is_called_one(tmp_path: Path) -> None:
    """Also as JSON, which it would be none of."""
    file = tmp_path / "config.json"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 131\n")
    assert refusal(file).startswith("is a Git LFS pointer")
    with pytest.raises(ConfigError, match="is a Git LFS pointer") as caught:
        read_json_object(file, "a.field")
    assert caught.value.remedy == "fetch the file: git lfs pull"


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested(JSON_DEPTH_MAX + 1), "is nested deeper than 32 levels"),
        (nested(200_000), "is nested deeper than 32 levels"),
        ("[" * 200_000, "is nested deeper than 32 levels"),
        ('{"a": [1, 2', "is not JSON"),
        ('{"a": ' + "9" * 5_000 + "}", "is not JSON"),
        ("", "is not JSON"),
        ("3", "no object"),
        (" " * (JSON_BYTES_MAX + 1), "more than 16777216 bytes"),
    ],
)
def test_json_that_is_no_plain_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_json_object(file, "a.field")
    assert (caught.value.field, caught.value.value) == ("a.field", str(file))
    assert len(str(caught.value)) < 500


def test_json_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="is not JSON"):
        read_json_object(tmp_path / "f", "a.field")


def test_json_objects_are_read_to_their_bound(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(nested(JSON_DEPTH_MAX))
    assert read_json_object(file, "a.field") == json.loads(nested(JSON_DEPTH_MAX))
    assert [depth_of(value) for value in (1, [], {"a": 1, "b": [[2]]})] == [0, 1, 3]
