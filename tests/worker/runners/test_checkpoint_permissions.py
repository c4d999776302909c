"""A checkpoint that the worker's user may not read is refused by the name of the file, its owner and its mode."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from worker.runners.checkpoint import read_config
from worker.runners.tiny import write_tiny_checkpoint

#: A user that owns nothing here.
OTHER_USER = 65_534


@contextmanager
def unprivileged() -> Iterator[int]:
    """Root reads every file; as another user it does not. Yields the user."""
    if os.geteuid() != 0:
        yield os.geteuid()
        return
    os.seteuid(OTHER_USER)
    try:
        yield OTHER_USER
    finally:
        os.seteuid(0)


@pytest.fixture
def checkpoint() -> Iterator[Path]:
    """Not below tmp_path, which other users may not enter."""
    path = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    path.chmod(0o755)
    write_tiny_checkpoint(path, index_topk=64)
    for file in path.iterdir():
        file.chmod(0o644)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_file_without_permission_is_named(checkpoint: Path, name: str) -> None:
    with unprivileged():
        assert read_config(checkpoint)["model_type"] == "deepseek_v32"
    (checkpoint / name).chmod(0o000)
    owner = (checkpoint / name).stat().st_uid
    with unprivileged() as user, pytest.raises(ConfigError) as caught:
        read_config(checkpoint)
    assert caught.value.message == (
        f"user {user} has no permission to read {checkpoint / name} (owner {owner}, mode 0000)"
    )
    assert f"chmod -R a+rX {checkpoint}" in caught.value.remedy


def test_directory_without_permission_is_named(checkpoint: Path) -> None:
    checkpoint.chmod(0o000)
    with (
        unprivileged(),
        pytest.raises(ConfigError, match=rf"no permission to read {checkpoint} \(owner \d+, mode 0000\)"),
    ):
        read_config(checkpoint)


def test_missing_checkpoint_is_not_taken_for_a_permission(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable checkpoint: it has no config\.json"):
        read_config(tmp_path / "absent")


def test_weights_of_a_tiny_checkpoint_are_as_readable_as_its_configuration(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_tiny_checkpoint(tmp_path, index_topk=64, context_max_tokens=2_048)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "config.json": 0o644,
        "generation_config.json": 0o644,
        "model.safetensors": 0o644,
        "tokenizer_config.json": 0o644,
    }
