"""CURVE keys and their files. CURVE is the encryption and authentication of ZMQ over tcp.

    server.key      the coordinator's key pair
    ROLE.key        of one peer: its role (client, admin, worker), name and key pair, and the coordinator's public key
    allowed.keys    keys that the coordinator accepts, one a line: role, name, public key, and a client's rights; a
                    name's newest key is last

Rights of a client: `priority=N`, the highest priority that it may ask for (KEY_PRIORITY_DEFAULT without it), or
`front`, for HTTP fronts: any priority, and tenants, who take turns (coordinator.state.owner_turns). A front holds its
users to the limits of their API keys. A client with that right takes as many turns as it names tenants.

cluster.keys_dir names the directory of these files. A process reads only its file, so a peer needs one. Requests belong
to the name in a key, not to the key, so a key can be replaced while requests of that name run: allow a second key
under the name, distribute it, revoke the first one.

Files with secrets must belong to the user of the process (or root), without access for other users. Others may read
allowed.keys but not write it. allowed.keys is changed in place: a container that mounts this one file would otherwise
keep the old one. Better mount its directory.

Rejected: certificates and chains (ZMQ has none, and an operator of one cluster can check a list of keys by eye); a
shared secret per role (peers could not be told apart, nor revoked one by one).
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from protocol.errors import BadInput, ConfigError, NotFound
from protocol.messages import KEY_PRIORITY_DEFAULT, PRIORITY_MAX
from protocol.settings import ClusterSettings
from protocol.small_files import open_regular

ROLES: Final = ("client", "admin", "worker")
SERVER_FILE: Final = "server.key"
ALLOWED_FILE: Final = "allowed.keys"
KEYS_DIR_MODE: Final = 0o700
KEY_MODE: Final = 0o600
#: A key of 32 bytes in Z85.
KEY_CHARS: Final = 40
#: Longest name in a key.
NAME_CHARS_MAX: Final = 64
#: Largest file read: some 8,000 allowed keys.
FILE_BYTES_MAX: Final = 1024 * 1024

_MAKE: Final = "make keys with: hisparse keys init --keys-dir DIRECTORY"


@dataclass(frozen=True)
class ServerKey:
    """The coordinator's key pair, in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class PeerKey:
    """A peer's key pair and the coordinator's public key (`server`); `path` is its file, for errors."""

    role: str
    name: str
    public: str
    secret: str = field(repr=False)
    server: str
    path: str = ""


@dataclass(frozen=True)
class Insecure:
    """In place of a key: tcp that is neither encrypted nor authenticated, because the operator set `insecure`."""


class AllowedKey(NamedTuple):
    role: str
    name: str
    public: str
    priority_max: int = KEY_PRIORITY_DEFAULT
    is_front: bool = False

    @property
    def user(self) -> str:
        """The user that requests of this key belong to."""
        return f"{self.role}:{self.name}"

    @property
    def line(self) -> str:
        """Of allowed.keys."""
        limit = f" priority={self.priority_max}" if self.priority_max != KEY_PRIORITY_DEFAULT else ""
        return f"{self.role} {self.name} {self.public}" + (" front" if self.is_front else limit)


def access(settings: ClusterSettings, role: str, endpoint: str) -> PeerKey | Insecure | None:
    """The key of a peer of `role` for `endpoint`; None for ipc. Raises as `read_peer_key` does."""
    if endpoint.startswith("ipc://"):
        return None
    if settings.keys_dir:
        return read_peer_key(Path(settings.keys_dir), role)
    return Insecure() if settings.insecure else None


# ---------------------------------------------------------------- reading


def read_server_key(directory: Path) -> ServerKey:
    """The key in `directory`/server.key. Raises ConfigError when it is missing, open to others, or no server key."""
    path = directory / SERVER_FILE
    table = _read_table(path)
    return ServerKey(*_pair(table, path))


def read_peer_key(directory: Path, role: str) -> PeerKey:
    """The key in `directory`/ROLE.key. Raises ConfigError when it is missing, open to others, or of another role."""
    path = directory / f"{role}.key"
    table = _read_table(path, remedy=_ask_for(role, path))
    if table.get("role") != role:
        raise ConfigError(
            f"not a key of role {role}",
            field="role",
            value=str(table.get("role"))[:NAME_CHARS_MAX],
            remedy=f"put the right key in {path}",
        )
    server = _key(table, "server", path)
    return PeerKey(role, _checked_name(str(table.get("name"))), *_pair(table, path), server, str(path))


def read_allowed(directory: Path) -> tuple[AllowedKey, ...]:
    """The allowed keys, oldest first. Raises ConfigError that names the first wrong line."""
    path = directory / ALLOWED_FILE
    allowed: list[AllowedKey] = []
    for number, line in enumerate(_read(path, secret=False).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match line.split():
            case [role, name, public] if role in ROLES and _is_name(name) and _is_key(public):
                allowed.append(AllowedKey(role, name, public))
            case ["client", name, public, "front"] if _is_name(name) and _is_key(public):
                allowed.append(AllowedKey("client", name, public, PRIORITY_MAX, is_front=True))
            case ["client", name, public, right] if _is_name(name) and _is_key(public):
                allowed.append(AllowedKey("client", name, public, read_limit(right, f"{path}:{number}")))
            case _:
                raise ConfigError(
                    "not a role, a name, a public key and a right",
                    field=f"{path}:{number}",
                    value=line[:NAME_CHARS_MAX],
                    remedy="write e.g. `client alice KEY`; `hisparse keys add` does",
                )
    return tuple(allowed)


def read_limit(right: str, where: str) -> int:
    """The N of `priority=N` behind a key. Raises ConfigError, which shows `right` and `where` it is written."""
    found = re.fullmatch(r"priority=(-?[0-9]{1,4})", right)
    if found is None or abs(int(found[1])) > PRIORITY_MAX:
        raise ConfigError(
            "no right of a key",
            field=where,
            value=right[:NAME_CHARS_MAX],
            remedy=f"write priority=N behind the key, N being -{PRIORITY_MAX} to {PRIORITY_MAX}",
        )
    return int(found[1])


def _ask_for(role: str, path: Path) -> str:
    """How a peer gets a key that a running coordinator accepts: new keys of a server would not be."""
    return (
        f"where the keys of the coordinator are, run: hisparse keys add {role} NAME --keys-dir DIRECTORY; "
        f"copy the file to {path}, then run there: hisparse reload coordinator"
    )


def _read_table(path: Path, *, remedy: str = _MAKE) -> dict[str, object]:
    try:
        return tomllib.loads(_read(path, secret=True, remedy=remedy))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not a key file: {error}", field="key file", value=path, remedy=remedy) from error


def _read(path: Path, *, secret: bool, remedy: str = _MAKE) -> str:
    """Check and read one open file, so that no other process can exchange it between check and read."""
    with open_regular(path, "key file", remedy=remedy) as file:
        _check_private(os.fstat(file.fileno()), path, secret=secret)
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"larger than {FILE_BYTES_MAX} bytes", field="key file", value=path, remedy=_MAKE)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("not text", field="key file", value=path, remedy=_MAKE) from error


def _check_private(status: os.stat_result, path: Path, *, secret: bool) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()) or mode & (0o077 if secret else 0o022):
        raise ConfigError(
            f"owner {status.st_uid}, mode {mode:04o}: others could {'read' if secret else 'change'} it",
            field="key file",
            value=path,
            remedy=f"chown it to user {os.geteuid()} and chmod {'600' if secret else '644'}; if others may have "
            f"{'read' if secret else 'changed'} it, make new keys",
        )


def _pair(table: dict[str, object], path: Path) -> tuple[str, str]:
    public, secret = _key(table, "public", path), _key(table, "secret", path)
    if zmq.curve_public(secret.encode()).decode() != public:
        raise ConfigError("public and secret key do not belong together", field="key file", value=path, remedy=_MAKE)
    return public, secret


def _key(table: dict[str, object], name: str, path: Path) -> str:
    value = table.get(name)
    if not isinstance(value, str) or not _is_key(value):
        raise ConfigError(f"has no {name} key", field="key file", value=path, remedy=_MAKE)
    return value


def _is_key(text: str) -> bool:
    if len(text) != KEY_CHARS or not text.isascii():
        return False
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError):
        return False


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARS_MAX and all(it.isalnum() or it in "._-" for it in name) and name.isascii()


def _checked_name(name: str) -> str:
    if not _is_name(name):
        raise BadInput(
            f"must be 1 to {NAME_CHARS_MAX} letters, digits, dots, dashes and underscores",
            field="name",
            value=repr(name[:NAME_CHARS_MAX]),
            remedy="choose another name",
        )
    return name


# ---------------------------------------------------------------- making


def make_keys(directory: Path) -> list[Path]:
    """A server key, and one key per role under the name of the role, allowed. Returns the files.

    Raises ConfigError when a key file exists already: replacing it would lock out its peers.
    """
    try:
        directory.mkdir(mode=KEYS_DIR_MODE, parents=True, exist_ok=True)
    except OSError as error:
        reason, remedy = error.strerror or "cannot be made", "name a directory that this user may make and write"
        raise ConfigError(reason, field="cluster.keys_dir", value=directory, remedy=remedy) from error
    public, secret = _new_pair()
    server = directory / SERVER_FILE
    _create(server, f'public = "{public}"\nsecret = "{secret}"\n')
    _write_allowed(directory, ())
    return [server, directory / ALLOWED_FILE, *(add_peer(directory, role, role) for role in ROLES)]


def add_peer(
    directory: Path,
    role: str,
    name: str,
    output: Path | None = None,
    *,
    priority_max: int | None = None,
    is_front: bool = False,
) -> Path:
    """Make a further allowed key of `name` and write it to `output`; returns the file.

    `output` defaults to ROLE.key when the name is that of the role, else to ROLE.NAME.key. Rights that are not given
    are those of the newest key of the name. Raises BadInput (role, name or limit), or ConfigError when the file exists.
    """
    if role not in ROLES:
        raise BadInput("no such role", field="role", value=role, remedy=f"one of {', '.join(ROLES)}")
    _checked_name(name)
    if role != "client" and (priority_max is not None or is_front):
        raise BadInput("only clients have rights", field="role", value=role, remedy="leave out --priority and --front")
    if priority_max is not None and abs(priority_max) > PRIORITY_MAX:
        remedy = f"choose -{PRIORITY_MAX} to {PRIORITY_MAX}"
        raise BadInput("out of range", field="priority", value=priority_max, remedy=remedy)
    server = read_server_key(directory)
    allowed = read_allowed(directory)
    public, secret = _new_pair()
    key = AllowedKey(role, name, public)
    for before in allowed:
        if (before.role, before.name) == (role, name):
            key = before._replace(public=public)
    if is_front:
        key = key._replace(priority_max=PRIORITY_MAX, is_front=True)
    elif priority_max is not None:
        key = key._replace(priority_max=priority_max, is_front=False)
    path = output or directory / (f"{role}.key" if name == role else f"{role}.{name}.key")
    lines = (f'role = "{role}"', f'name = "{name}"', f'public = "{public}"', f'secret = "{secret}"')
    _create(path, "\n".join((*lines, f'server = "{server.public}"', "")))
    _write_allowed(directory, (*allowed, key))
    return path


def revoke(directory: Path, role: str, name: str, *, keep_newest: bool) -> int:
    """Remove keys of `name` from the allowed ones, all or all but the newest; returns how many.

    Raises NotFound when it has none.
    """
    allowed = read_allowed(directory)
    its = [key for key in allowed if (key.role, key.name) == (role, name)]
    if not its:
        raise NotFound("has no allowed key", field="key", value=f"{role} {name}", remedy="see: hisparse keys list")
    gone = set(its[:-1] if keep_newest else its)
    _write_allowed(directory, (key for key in allowed if key not in gone))
    return len(gone)


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _create(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, KEY_MODE)
    except OSError as error:
        remedy = "name a file in a directory that this user may write"
        if isinstance(error, FileExistsError):
            remedy = "move it away first: replacing it would lock out its peer"
        raise ConfigError(error.strerror or "cannot be made", field="key file", value=path, remedy=remedy) from error
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, KEY_MODE)
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def _write_allowed(directory: Path, keys: Iterable[AllowedKey]) -> None:
    text = "# Keys that may connect: role, name, public key, rights. `hisparse reload coordinator` after a change.\n"
    text += "".join(f"{key.line}\n" for key in keys)
    with suppress(FileExistsError):
        os.close(os.open(directory / ALLOWED_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, KEY_MODE))
    with open(directory / ALLOWED_FILE, "r+") as file:
        file.write(text)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
