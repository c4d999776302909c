"""The files of a journal: whose they are, whether they are still there, and the mark beside them.

    NAME            SQLite's, with NAME-wal while it is open or after a crash
    NAME.head       the mark: the head of the last commit that was acknowledged
    NAME.reserve    room for running work on a full disk (coordinator.journal.store)

The mark. SQLite stops reading its log at the first frame that is not whole, and takes what comes before for all there
is: an end that was cut off looks like a commit that a crash interrupted. So each commit, once SQLite says that it is
durable, is marked before it is acknowledged. A journal behind its mark has lost commits; one ahead of it has commits
that were not acknowledged, and keeps them.

A mark goes into one of two slots in turn, each in a sector of its own, so that a torn write leaves the mark before. It
is written at once and synced every MARK_SYNC_S: a mark that only a power cut can lose costs no fsync. Until then a
power cut *and* a damaged end of the log, of commits of that time, are not told from a power cut alone.

The mark's file is also the lock of the process that has the journal open.

Rejected: an fsync for each mark (commits took 1.7 to 2 times as long on a disk); the mark ahead of its commit, synced
together with it (a crash between the two would look like damage); frames of SQLite's log read by code of our own (what
follows the last whole commit may be an interrupted one all the same).
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from coordinator.journal.chain import HEAD_BYTES, Head, unpack
from coordinator.journal.journal import JournalError
from protocol.errors import ConfigError

#: A mark is synced this often; between, the kernel has it.
MARK_SYNC_S: Final = 1.0
#: Where each of the two marks is; sectors of disks have 512 or 4,096 bytes.
SLOT_BYTES: Final = 4_096
#: A lock held by another process is waited for this long: it may be one that is just ending.
LOCK_WAIT_S: Final = 5.0
LOCK_POLL_S: Final = 0.05

assert HEAD_BYTES <= 512  # a mark is written by one sector


def head_path(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def log_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def index_path(path: Path) -> Path:
    return path.with_name(path.name + "-shm")


def reserve_path(path: Path) -> Path:
    return path.with_name(path.name + ".reserve")


def files_of(path: Path) -> tuple[Path, ...]:
    return path, log_path(path), head_path(path), reserve_path(path)


def unusable(path: Path, reason: str, remedy: str = "") -> ConfigError:
    return ConfigError(
        f"cannot keep the journal: {reason}",
        field="coordinator.journal",
        value=path,
        remedy=remedy or "name a file on a disk with room that no other coordinator keeps, or none",
    )


def check_private(path: Path) -> None:
    """Raise ConfigError unless each file of the journal that exists is a regular one that only its owner may open: it
    has the prompts and outputs of all users, and its records are believed."""
    for file in files_of(path):
        with suppress(FileNotFoundError):
            status = os.lstat(file)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode):
                kind = "a symlink" if stat.S_ISLNK(status.st_mode) else "no regular file"
                raise unusable(
                    file, f"it is {kind}", "name the file itself, in a directory that only its user may write"
                )
            if status.st_uid not in (0, os.geteuid()) or mode & 0o077:
                raise unusable(
                    file,
                    f"owner {status.st_uid}, mode {mode:04o}: others could read or change it",
                    f"chown it to user {os.geteuid()} and chmod 600, once it is certain that none did",
                )


class Mark:
    """The mark of one journal, and the lock on both. `head` is the newest that is whole, None if there is none;
    `is_blank`: there never was one.

    Raises OSError, and BlockingIOError when another process holds the journal.
    """

    def __init__(self, path: Path, *, is_kept: bool = True) -> None:
        """`is_kept`: to write it, made if it is not there; else to read it."""
        flags = os.O_RDWR | os.O_CREAT if is_kept else os.O_RDONLY
        self._file = os.open(head_path(path), flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        self._synced_at = 0.0
        try:
            self._lock()
            request_indices = [os.pread(self._file, SLOT_BYTES, at) for at in (0, SLOT_BYTES)]
        except BaseException:
            os.close(self._file)
            raise
        self.is_blank = not any(map(any, request_indices))
        heads = map(unpack, request_indices)
        self.head = max((it for it in heads if it is not None), key=lambda head: head.commits, default=None)

    def _lock(self) -> None:
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
            time.sleep(LOCK_POLL_S)

    def reset(self, head: Head) -> None:
        """Both slots, synced: what is there besides is not needed, or is damaged."""
        os.posix_fallocate(self._file, 0, 2 * SLOT_BYTES)
        os.ftruncate(self._file, 2 * SLOT_BYTES)
        for at in (0, SLOT_BYTES):
            os.pwrite(self._file, head.pack().ljust(SLOT_BYTES, b"\0"), at)
        os.fsync(self._file)
        self.head = head

    def write(self, head: Head) -> None:
        """`head` is durable, and will be acknowledged."""
        os.pwrite(self._file, head.pack(), head.commits % 2 * SLOT_BYTES)
        self.head = head
        if time.monotonic() - self._synced_at > MARK_SYNC_S:
            self.sync()

    def sync(self) -> None:
        os.fdatasync(self._file)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Let go of the lock."""
        with suppress(OSError):
            os.fdatasync(self._file)
        os.close(self._file)


class Identity:
    """Files that must stay what they are while the journal is open: a deleted one could be written for ever, and be
    gone with the process. Files are known from the first time that they are seen.

    By name, never by a descriptor: closing one of a file that SQLite has open gives up SQLite's lock on it.
    """

    def __init__(self, path: Path) -> None:
        self._known: dict[Path, tuple[int, int] | None] = dict.fromkeys((path, log_path(path), head_path(path)))

    def check(self) -> None:
        """Raise JournalError when one of the files was deleted or replaced."""
        for file, known in self._known.items():
            try:
                status = os.lstat(file)
            except FileNotFoundError as error:
                raise JournalError(f"{file}: deleted while it was in use; put it back, or start on a backup") from error
            except OSError as error:
                raise JournalError(f"{file}: {error.strerror}") from error
            if known is None:
                self._known[file] = status.st_dev, status.st_ino
            elif known != (status.st_dev, status.st_ino):
                raise JournalError(f"{file}: replaced while it was in use; put it back, or start on a backup")


def sync_directory(path: Path) -> None:
    """Names in the directory of `path` are durable."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
