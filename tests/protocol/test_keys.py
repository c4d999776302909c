"""Key files and `hisparse keys`: who may read them, what is refused, and how keys are replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from hisparse.cli import main
from hisparse.console.session import endpoint_for
from protocol.config import HostFacts, build
from protocol.errors import BadInput, ConfigError, NotFound
from protocol.settings import ClusterSettings
from protocol.transport import keys as key_files
from protocol.transport.keys import (
    AllowedKey,
    Insecure,
    access,
    add_peer,
    make_keys,
    read_allowed,
    read_peer_key,
    read_server_key,
    revoke,
)
from tests.support.limits import HANG_LIMIT_S


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def hisparse(*arguments: str) -> None:
    main([*arguments], standalone_mode=False)


def test_each_role_gets_a_private_key_file(keys: Path) -> None:
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {path.name for path in keys.iterdir()} == {
        *("server.key", "allowed.keys"),
        *("client.key", "admin.key", "worker.key"),
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    server = read_server_key(keys)
    for role, allowed in zip(key_files.ROLES, read_allowed(keys), strict=True):
        key = read_peer_key(keys, role)
        assert allowed == AllowedKey(role, role, key.public)
        assert key.server == server.public
        assert zmq.curve_public(key.secret.encode()).decode() == key.public
    assert len({server.secret, *(read_peer_key(keys, role).secret for role in key_files.ROLES)}) == 4
    assert server.secret not in repr(server)
    assert key.secret not in repr(key)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
@pytest.mark.parametrize("name", ["server.key", "client.key"])
def test_shared_secret_is_refused(keys: Path, name: str, mode: int) -> None:
    (keys / name).chmod(mode)
    with pytest.raises(ConfigError, match="others could read it") as caught:
        read_server_key(keys) if name == "server.key" else read_peer_key(keys, "client")
    assert caught.value.value == str(keys / name)
    assert "chmod 600" in caught.value.remedy


def test_key_list_may_be_read_but_not_written_by_others(keys: Path) -> None:
    (keys / "allowed.keys").chmod(0o644)
    assert len(read_allowed(keys)) == 3
    (keys / "allowed.keys").chmod(0o664)
    with pytest.raises(ConfigError, match="others could change it"):
        read_allowed(keys)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(keys: Path) -> None:
    os.chown(keys / "client.key", 12345, 12345)
    with pytest.raises(ConfigError, match="owner 12345"):
        read_peer_key(keys, "client")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a key of role client"),
        ("public = = 1", "not a key file"),
        ('role = "worker"\n', "not a key of role client"),
        ('role = "client"\nname = "x"\nserver = "short"\n', "has no server key"),
        (f'role = "client"\nname = "x"\nserver = "{"0" * 40}"\npublic = "{"0" * 40}"\n', "has no secret key"),
        (
            f'role = "client"\nname = "x"\nserver = "{"0" * 40}"\npublic = "{"0" * 40}"\nsecret = "{"1" * 40}"\n',
            "do not belong together",
        ),
    ],
)
def test_invalid_key_is_refused_by_name(keys: Path, text: str, complaint: str) -> None:
    (keys / "client.key").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_peer_key(keys, "client")


@pytest.mark.timeout(HANG_LIMIT_S)
def test_missing_binary_or_endless_files_are_refused(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        read_server_key(keys / "nowhere")
    assert "hisparse keys init" in caught.value.remedy
    (keys / "client.key").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        read_peer_key(keys, "client")
    (keys / "client.key").unlink()
    os.mkfifo(keys / "client.key", 0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        read_peer_key(keys, "client")
    monkeypatch.setattr(key_files, "FILE_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        read_allowed(keys)


@pytest.mark.parametrize("line", ["client x", "boss x " + "0" * 40, "client x " + "0" * 39, "client x~ " + "0" * 40])
def test_invalid_list_line_is_named(keys: Path, line: str) -> None:
    with (keys / "allowed.keys").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_allowed(keys)
    assert caught.value.field.endswith("allowed.keys:6")


def test_key_files_are_never_overwritten(keys: Path) -> None:
    before = {path: path.read_text() for path in keys.iterdir()}
    with pytest.raises(ConfigError, match="File exists"):
        make_keys(keys)
    with pytest.raises(ConfigError, match="File exists"):
        add_peer(keys, "worker", "worker")
    for role, name in (("client", "no blanks"), ("client", ""), ("boss", "alice")):
        with pytest.raises(BadInput):
            add_peer(keys, role, name)
    assert {path: path.read_text() for path in keys.iterdir()} == before


def test_rotated_name_has_two_keys_until_the_old_is_revoked(keys: Path) -> None:
    old = add_peer(keys, "client", "alice")
    new = add_peer(keys, "client", "alice", keys / "new")
    inode = (keys / "allowed.keys").stat().st_ino
    publics = [key.public for key in read_allowed(keys) if key.name == "alice"]
    assert [public in path.read_text() for public, path in zip(publics, (old, new), strict=True)] == [True, True]
    assert revoke(keys, "client", "alice", keep_newest=True) == 1
    assert [key.public for key in read_allowed(keys) if key.name == "alice"] == publics[1:]
    assert revoke(keys, "client", "alice", keep_newest=False) == 1
    assert len(read_allowed(keys)) == 3
    assert (keys / "allowed.keys").stat().st_ino == inode, "a container sees the file that it was given"
    with pytest.raises(NotFound):
        revoke(keys, "client", "alice", keep_newest=False)


def rights(keys: Path, name: str) -> tuple[int, bool]:
    """Of the newest key of `name`, as the coordinator reads them."""
    key = next(key for key in reversed(read_allowed(keys)) if key.name == name)
    return key.priority_max, key.is_front


def test_key_has_the_rights_that_it_was_made_with(keys: Path) -> None:
    for name, given in {"plain": {}, "high": {"priority_max": 7}, "low": {"priority_max": -7}}.items():
        add_peer(keys, "client", name, **given)
    add_peer(keys, "client", "http", is_front=True)
    found = [rights(keys, name) for name in ("client", "plain", "high", "low", "http")]
    assert found == [(0, False), (0, False), (7, False), (-7, False), (1_000, True)]


def test_second_key_of_a_name_keeps_its_rights(keys: Path) -> None:
    add_peer(keys, "client", "alice", priority_max=7)
    add_peer(keys, "client", "alice", keys / "new")
    assert rights(keys, "alice") == (7, False)
    add_peer(keys, "client", "alice", keys / "front", is_front=True)
    assert rights(keys, "alice") == (1_000, True)
    add_peer(keys, "client", "alice", keys / "less", priority_max=1)
    assert rights(keys, "alice") == (1, False)


def test_rights_that_no_key_has_are_refused(keys: Path) -> None:
    before = (keys / "allowed.keys").read_text()
    for role, name, given in (
        ("worker", "w", {"priority_max": 1}),
        ("admin", "a", {"is_front": True}),
        ("client", "c", {"priority_max": 1_001}),
    ):
        with pytest.raises(BadInput):
            add_peer(keys, role, name, **given)  # type: ignore[arg-type]
    assert (keys / "allowed.keys").read_text() == before
    public = read_allowed(keys)[0].public
    for line in (f"client x {public} priority=1001", f"client x {public} fast", f"worker x {public} front"):
        (keys / "allowed.keys").write_text(f"{before}{line}\n")
        with pytest.raises(ConfigError) as caught:
            read_allowed(keys)
        assert caught.value.field.endswith("allowed.keys:5")


def test_only_tcp_requires_keys(keys: Path) -> None:
    settings = ClusterSettings(keys_dir=str(keys))
    assert access(settings, "client", "ipc:///x") is None
    assert access(settings, "client", "tcp://x:1") == read_peer_key(keys, "client")
    assert access(ClusterSettings(insecure=True), "client", "tcp://x:1") == Insecure()
    assert access(ClusterSettings(), "client", "tcp://x:1") is None


@pytest.mark.parametrize(
    ("speaks_as", "asked", "socket_role"), [("client", "client", "client"), ("admin", "client", "admin")]
)
def test_shared_commands_use_the_chosen_socket(keys: Path, speaks_as: str, asked: str, socket_role: str) -> None:
    flags = {f"cluster.{role}_endpoint": f"tcp://{role}:1" for role in ("client", "admin")}
    flags |= {"cluster.keys_dir": str(keys), "cluster.speak_as": speaks_as}
    config = build({}, {}, flags, HostFacts("host", 1, 0))
    assert endpoint_for(config, asked) == (socket_role, f"tcp://{socket_role}:1", read_peer_key(keys, socket_role))
    assert endpoint_for(config, "admin")[0] == "admin", "an operator's command goes there under any setting"


def test_keys_command_makes_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "keys")
    hisparse("keys", "init", "--keys-dir", directory)
    assert capsys.readouterr().out.splitlines()[0] == f"{directory}/server.key"
    hisparse("keys", "add", "client", "alice", "--keys-dir", directory)
    shown = capsys.readouterr()
    assert shown.out == f"{directory}/client.alice.key\n"
    assert "hisparse reload coordinator" in shown.err
    hisparse("keys", "list", "--keys-dir", directory, "-o", "json")
    listed = capsys.readouterr().out
    assert '"name": "alice"' in listed
    assert read_server_key(tmp_path / "keys").secret not in listed
    hisparse("keys", "add", "client", "http", "--front", "--keys-dir", directory)
    hisparse("keys", "add", "client", "bob", "--priority", "7", "--keys-dir", directory)
    assert [rights(tmp_path / "keys", name) for name in ("http", "bob")] == [(1_000, True), (7, False)]
    capsys.readouterr()
    hisparse("keys", "revoke", "client", "alice", "--keys-dir", directory)
    assert capsys.readouterr().out == "1 revoked\n"
