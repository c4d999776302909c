"""Files of a checkpoint's tokenizer: read as they are, refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.tokenizer_files import read_tokenizer
from tests.support.limits import HANG_LIMIT_S

TOKENIZER = b"{}"


def test_checkpoint_without_tokenizer_uses_bytes(tmp_path: Path) -> None:
    file = read_tokenizer(tmp_path)
    assert (file.kind, file.data, file.hash) == ("bytes", b"", "")


def test_a_checkpoint_names_its_tokenizer_and_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    file = read_tokenizer(tmp_path)
    assert (file.kind, file.data, file.chat_template) == ("json", TOKENIZER, "{{ x }}")
    assert len(file.hash) == 64
    (tmp_path / "chat_template.jinja").write_text("{{ y }}")
    assert read_tokenizer(tmp_path).chat_template == "{{ y }}"


def test_a_broken_tokenizer_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    file = tmp_path / "tokenizer_config.json"
    for text, message in (
        ("{", "is not JSON"),
        ('{"chat_template": ' + "[" * 100_000, "is nested deeper"),
        ('{"chat_template": [3]}', "chat_template or a special token has a form that is not known"),
        ('{"chat_template": "x", "eos_token": {"text": "y"}}', "has a form that is not known"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            read_tokenizer(tmp_path)
        assert caught.value.value == str(file)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pointer_of_git_lfs_as_a_tokenizer_file_is_called_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 131\n")
    with pytest.raises(ConfigError, match="is a Git LFS pointer") as caught:
        read_tokenizer(tmp_path)
    assert caught.value.value == str(tmp_path / name)


@pytest.mark.timeout(HANG_LIMIT_S)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_as_a_tokenizer_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is no regular file") as caught:
        read_tokenizer(tmp_path)
    assert caught.value.value == str(tmp_path / name)


def test_chat_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not text"):
        read_tokenizer(tmp_path)
