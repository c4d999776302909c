"""The file of a host pool: its header, which processes use it, and what becomes of it unused. No torch in here.

    0                 header: magic, version, tokens and bytes per page, pages, hash of geometry and model, pool id
    OWNER_AT          owner, JSON: cluster, endpoint of its coordinator, process that created it
    HEADER_BYTES      page 0      (layout of a page: kernels/layout.py)
    + page_bytes      page 1 ...

Use is a lock: a process that maps the pool, or keeps it for processes that will, holds a shared `flock` on the file
until it is done or dead; a process that creates it holds an exclusive one. So the locks alone tell three states apart:

    exclusive lock not to be had, nor a shared one    a process is creating it: wait
    shared only                                       in use: attach, or be refused
    exclusive                                         unused: attach to what fits, create anew what does not

The header is written last, so a creator that dies leaves a file that the next one creates anew. `pool_id` is drawn at
creation: a coordinator knows by it whether the rows it remembers are still there.

A file that was damaged (cut, or its header overwritten) is created anew while it is unused, under a new id, and
requests are prefilled again. In use it is refused: those that use it would read rows that are gone. So the process that
started the workers, which holds the pool for them (`PoolHold`), ends all of them and lets it go.

A pool that outlived its cluster is reclaimed by the next start in the same directory (`reclaim_stale`): no process
holds its lock, and the coordinator that its owner record names does not hold the lock of its endpoint. Files go in
steps of TRUNCATE_BYTES: one call over a terabyte could not be interrupted for minutes.

Rejected: a lock held during creation only, with the coordinator as judge of use (a file could not be told from that of
a cluster that died); pid files (they are reused, and lie across containers).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kernels.layout import Geometry
from protocol.byte_sizes import AUTO
from protocol.errors import ConfigError, Unavailable
from protocol.start_and_end import tell_step
from protocol.units import PAGE_TOKENS

MAGIC: Final = b"HISPARSE"
VERSION: Final = 2
HEADER_BYTES: Final = 4_096  # one page of the mapping, so that host pages start aligned
OWNER_AT: Final = 512
FILE_MODE: Final = 0o600
#: Longest wait for another process that creates the same pool: touching a terabyte takes minutes.
CREATION_LIMIT_S: Final = 1_800.0
CREATION_POLL_S: Final = 0.05
#: A pool in use without a whole header is damaged when it stays so: a moment ago it may have been unused, and locked by
#: another process that looked at it.
DAMAGED_AFTER_S: Final = 3.0
#: Unit of stat's st_blocks.
BLOCK_BYTES: Final = 512
#: An unused file is given back to the file system in steps of this size.
TRUNCATE_BYTES: Final = 8 << 30
#: Pools of one directory, and directories, that are looked at in search of stale ones.
POOLS_MAX: Final = 1_024
DIRECTORIES_MAX: Final = 256
#: How directories begin that belong to one cluster each (protocol.config): others lie beside it.
CLUSTER_PREFIX: Final = "hisparse-"
SUFFIX: Final = ".pool"

_HEADER: Final = struct.Struct("<8sIIQQ64sQ")

assert _HEADER.size <= OWNER_AT < HEADER_BYTES


@dataclass(frozen=True)
class Header:
    """What a pool is. `pool_id` and `owner` are its own; the rest must agree with what an attaching worker wants."""

    page_bytes: int
    pages: int
    digest: str
    pool_id: int = 0
    owner: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, geometry: Geometry, pages: int, model_fingerprint: str, owner: Mapping[str, object]) -> Header:
        """The header of a new pool; its id is drawn at random."""
        digest = hashlib.sha256(f"{geometry!r} {model_fingerprint}".encode()).hexdigest()
        return cls(geometry.page_bytes, pages, digest, secrets.randbits(62) + 1, owner)

    @classmethod
    def read(cls, descriptor: int) -> Header | None:
        """The header of an open file; None for none, half a one, or one of another version."""
        raw = os.pread(descriptor, HEADER_BYTES, 0)
        if len(raw) < HEADER_BYTES:
            return None
        magic, version, tokens, page_bytes, pages, digest, pool_id = _HEADER.unpack_from(raw)
        if magic != MAGIC or version != VERSION or tokens != PAGE_TOKENS:
            return None
        with suppress(ValueError):
            return cls(page_bytes, pages, digest.decode(), pool_id, json.loads(raw[OWNER_AT:].rstrip(b"\0")))
        return None

    def write(self, descriptor: int) -> None:
        owner = json.dumps(dict(self.owner)).encode()[: HEADER_BYTES - OWNER_AT]
        head = _HEADER.pack(
            MAGIC, VERSION, PAGE_TOKENS, self.page_bytes, self.pages, self.digest.encode(), self.pool_id
        )
        os.pwrite(descriptor, head.ljust(OWNER_AT, b"\0") + owner.ljust(HEADER_BYTES - OWNER_AT, b"\0"), 0)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.pages * self.page_bytes

    def is_same_shape(self, other: Header) -> bool:
        return (self.page_bytes, self.pages, self.digest) == (other.page_bytes, other.pages, other.digest)

    def is_of_another_cluster(self, other: Header) -> bool:
        """Whether both are known to belong to a coordinator, and not to the same: then their page ids mean nothing to
        each other."""
        ours, theirs = (header.owner.get("worker_endpoint") for header in (self, other))
        return bool(ours and theirs and ours != theirs)

    def is_same_model(self, other: Header) -> bool:
        """Whether a pool of `other` size would hold the same rows."""
        return (self.page_bytes, self.digest) == (other.page_bytes, other.digest)


def damage_in(descriptor: int) -> str:
    """Describe the damage of a pool in use; empty: it is whole."""
    header, size = Header.read(descriptor), os.fstat(descriptor).st_size
    if header is None:
        return "it has no header"
    return "" if size >= header.file_bytes else f"it has {size} of its {header.file_bytes} bytes"


@dataclass(frozen=True)
class OpenPool:
    """An open, locked file. `found` is None when it is to be created: then the lock is exclusive."""

    descriptor: int
    found: Header | None


def open_pool_file(path: Path, wanted: Header, halted: threading.Event) -> OpenPool:
    """Open and lock the pool at `path`, waiting for a process that is creating it.

    Raises ConfigError when the path cannot be opened, locked or read, or a pool of another shape or a damaged one is in
    use there, Unavailable past CREATION_LIMIT_S or once `halted`.
    """
    give_up_at = time.monotonic() + CREATION_LIMIT_S
    whole_at = time.monotonic()
    while True:
        descriptor = _open(path)
        try:
            opened = _try(descriptor, path, wanted)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise _unusable(path, str(error.strerror)) from error
            raise
        if isinstance(opened, OpenPool):
            return opened
        tell_step("pool wait", os.fstat(descriptor).st_blocks * BLOCK_BYTES / wanted.file_bytes)
        os.close(descriptor)
        if not opened:
            whole_at = time.monotonic()
        elif time.monotonic() > whole_at + DAMAGED_AFTER_S:
            raise _damaged(path, opened)
        if time.monotonic() > give_up_at:
            raise Unavailable(
                f"another process has been creating it for {CREATION_LIMIT_S:g} s", field="worker.pool_dir", value=path
            )
        if halted.wait(CREATION_POLL_S):
            raise Unavailable("stopped while it waited for its creator", field="worker.pool_dir", value=path)


def _try(descriptor: int, path: Path, wanted: Header) -> OpenPool | str:
    """One attempt; empty: the pool is being created, or was removed meanwhile; else how it is damaged."""
    if lock(descriptor, fcntl.LOCK_EX):
        if not _is_at(descriptor, path):
            return ""
        found = Header.read(descriptor)
        if found is not None and found.is_of_another_cluster(wanted) and _is_served(found.owner):
            raise _foreign(path, found)
        fits = found is not None and found.is_same_shape(wanted) and not found.is_of_another_cluster(wanted)
        if not fits or damage_in(descriptor):
            return OpenPool(descriptor, None)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return OpenPool(descriptor, found)
    if not lock(descriptor, fcntl.LOCK_SH) or not _is_at(descriptor, path):
        return ""
    found, damage = Header.read(descriptor), damage_in(descriptor)
    if found is None or damage:
        return damage
    if found.is_of_another_cluster(wanted):
        raise _foreign(path, found)
    _check(path, found, wanted)
    return OpenPool(descriptor, found)


def find_pool(path: Path, like: Header) -> Header | None:
    """The header of a whole pool at `path` with rows as of `like`, whatever its size; None when there is none yet, or
    none that can be read: `open_pool_file` says why."""
    descriptor = _open_existing(path, os.O_RDONLY)
    if descriptor is None:
        return None
    try:
        give_up_at = time.monotonic() + CREATION_LIMIT_S
        while not lock(descriptor, fcntl.LOCK_SH) and time.monotonic() < give_up_at:
            status = os.fstat(descriptor)
            tell_step("pool wait", status.st_blocks * BLOCK_BYTES / max(status.st_size, 1))
            time.sleep(CREATION_POLL_S)
        found = Header.read(descriptor) if not damage_in(descriptor) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return found if found is not None and found.is_same_model(like) else None


def empty_unused(path: Path) -> None:
    """Give back the memory of a pool that is unused and will not be used as it is. The file stays."""
    descriptor = _open_existing(path, os.O_RDWR)
    if descriptor is None:
        return
    try:
        with suppress(OSError):
            if lock(descriptor, fcntl.LOCK_EX):
                truncate(descriptor)
    finally:
        os.close(descriptor)


class PoolHold:
    """Holds the pool at `path` for processes to come: no start of another cluster takes it for an abandoned one.

    The lock goes with `let_go`, or with this process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Hold a whole pool that is there, unless one is held. Never waits: one that is being created is not held."""
        if self._descriptor is not None:
            return
        descriptor = _open_existing(self.path, os.O_RDONLY)
        if descriptor is None:
            return
        with suppress(OSError):  # as good as none: workers say what is wrong with it
            if lock(descriptor, fcntl.LOCK_SH) and not damage_in(descriptor):
                self._descriptor = descriptor
                return
        os.close(descriptor)

    def damage(self) -> str:
        """Describe the damage of the pool that is held; empty: it is whole, or none is held."""
        if self._descriptor is None:
            return ""
        try:
            if not _is_at(self._descriptor, self.path):
                return "its file was removed or replaced"
            return damage_in(self._descriptor)
        except OSError as error:
            return f"it cannot be read: {error.strerror}"

    def let_go(self) -> None:
        """Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def pass_on_pool(path: Path, worker_endpoint: str) -> None:
    """Have the pool at `path` belong to the coordinator at `worker_endpoint`, which has the journal of the one before.

    Nothing is done where there is none, or a process uses it.
    """
    descriptor = _open_existing(path, os.O_RDWR)
    if descriptor is None:
        return
    try:
        header = Header.read(descriptor) if lock(descriptor, fcntl.LOCK_EX) else None
        if header is not None:
            replace(header, owner={**header.owner, "worker_endpoint": worker_endpoint}).write(descriptor)
    finally:
        os.close(descriptor)


def remove_pool(path: Path, worker_endpoint: str = "") -> None:
    """Unlink the pool and give its memory back in steps, unless a process still uses it.

    What the workers have refused stays: no regular file, one that cannot be opened, and, with the `worker_endpoint` of
    their coordinator, the pool of another.
    """
    descriptor = _open_existing(path, os.O_RDWR)
    if descriptor is None:
        return
    try:
        found, ours = Header.read(descriptor), Header(0, 0, "", owner={"worker_endpoint": worker_endpoint})
        if found is not None and found.is_of_another_cluster(ours):
            return
        path.unlink(missing_ok=True)
        if lock(descriptor, fcntl.LOCK_EX):
            truncate(descriptor)
    finally:
        os.close(descriptor)


def truncate(descriptor: int) -> None:
    """Empty the file, TRUNCATE_BYTES at a time."""
    size = os.fstat(descriptor).st_size
    while size > 0:
        size = max(0, size - TRUNCATE_BYTES)
        os.ftruncate(descriptor, size)


# ---------------------------------------------------------------- stale pools


@dataclass(frozen=True)
class Reclaimed:
    path: Path
    file_bytes: int
    owner: Mapping[str, object]


def reclaim_stale(directory: Path, keep: Path) -> list[Reclaimed]:
    """Remove the pools in `directory`, all but `keep`, whose cluster is dead; beside a directory that belongs to one
    cluster, those in the directories of others too. Files that are not pools stay."""
    directories = [directory]
    if directory.name.startswith(CLUSTER_PREFIX):
        directories = sorted(directory.parent.glob(f"{CLUSTER_PREFIX}*"))[:DIRECTORIES_MAX]
    found = (_reclaim(path) for each in directories for path in _pools_in(each) if path != keep)
    return [reclaimed for reclaimed in found if reclaimed is not None]


def _pools_in(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)[:POOLS_MAX]
    except OSError:  # another user's, or gone
        return []


def _reclaim(path: Path) -> Reclaimed | None:
    descriptor = _open_existing(path, os.O_RDWR)
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not lock(descriptor, fcntl.LOCK_EX) or not _is_at(descriptor, path):
            return None
        header = Header.read(descriptor)
        if header is None or _is_served(header.owner):
            return None
        path.unlink()
        truncate(descriptor)
        return Reclaimed(path, status.st_size, header.owner)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_served(owner: Mapping[str, object]) -> bool:
    """Whether the coordinator that the owner record names is alive: it holds the lock beside its ipc path
    (coordinator.listener.endpoint_lock). Of any other transport nothing can be told, so it counts as alive."""
    scheme, _, address = str(owner.get("worker_endpoint", "")).partition("://")
    if scheme != "ipc":
        return True
    try:
        descriptor = os.open(f"{address}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- parts


def lock(descriptor: int, kind: int) -> bool:
    """Whether the `flock` was to be had at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_existing(path: Path, access: int) -> int | None:
    """A descriptor of the regular file at `path`; None where there is none that this process may open."""
    try:
        descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _unusable(path, "it is no regular file")
    if status.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigError(
            f"the file there is user {status.st_uid}'s",
            field="worker.pool_dir",
            value=path,
            remedy="name a directory that only this user may write",
        )
    return descriptor


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot open the host pool: {reason}",
        field="worker.pool_dir",
        value=path,
        remedy="name a directory this user may write",
    )


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the one that lies at `path`. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _damaged(path: Path, damage: str) -> ConfigError:
    return ConfigError(
        f"the host pool there is damaged, and processes use it: {damage}",
        field="worker.pool_dir",
        value=path,
        remedy="end all workers of this node, then start them: a new pool is made, and rows are computed again",
    )


def _foreign(path: Path, found: Header) -> ConfigError:
    return ConfigError(
        f"the pool there belongs to the cluster at {found.owner['worker_endpoint']}",
        field="worker.pool_dir",
        value=path,
        remedy="choose another pool_dir or node name, or stop that cluster",
    )


def _check(path: Path, found: Header, wanted: Header) -> None:
    """ConfigError naming the first field in which the pool found differs from the one wanted."""
    rows = (
        ("bytes per page", found.page_bytes, wanted.page_bytes),
        ("pages", found.pages, wanted.pages),
        ("geometry and model", found.digest[:16], wanted.digest[:16]),
    )
    for name, theirs, ours in rows:
        if ours != theirs and name == "pages":
            raise ConfigError(
                f"the pool at {path} is in use and has {found.pages * found.page_bytes} bytes",
                field="worker.host_mem",
                value=wanted.pages * wanted.page_bytes,
                remedy=f"set it to {found.pages * found.page_bytes}, or to {AUTO}: workers of a node share a pool",
            )
        if ours != theirs:
            raise ConfigError(
                f"the pool {path.name} is in use and has {name} {theirs}, this worker {ours}",
                field="worker.pool_dir",
                value=path.parent,
                remedy="start every worker of a node with the same model and kv_dtype, or set another worker.node",
            )
