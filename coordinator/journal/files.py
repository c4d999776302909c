"""The files of a journal: their owner and access, checks that they are not deleted or replaced, and the mark.

    NAME            SQLite's file, with NAME-wal while it is open or after a crash
    NAME.head       the mark: the head of the last acknowledged commit
    NAME.reserve    disk space for running requests on a full disk (coordinator.journal.store)

The mark. SQLite reads its log up to the first frame that is not whole, so a log whose end was cut off looks like one
whose last commit a crash interrupted. So each commit, once SQLite reports it durable, is marked before it is
acknowledged. A journal behind its mark has lost commits. A journal ahead of its mark has commits that were not
acknowledged, and keeps them.

Marks go to two slots in turn, each in its own sector, so a torn write leaves the previous mark. A mark is written at
once and synced every MARK_SYNC_S: only a power cut can lose it until then, and it costs no fsync per commit. If a power
cut coincides with a damaged end of the log, the loss of commits since the last sync is not detected.

The lock on the mark's file is held by the process that has the journal open.

Rejected: an fsync for each mark (commits took 1.7 to 2 times as long on a disk); the mark ahead of its commit, synced
together with it (a crash between the two would look like damage); own code that reads frames of SQLite's log (frames
behind the last whole commit may still belong to an interrupted one).
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

#: A mark is synced this often; until then it is in the kernel's page cache.
MARK_SYNC_S: Final = 1.0
#: Distance of the two marks in the file; sectors of disks have 512 or 4,096 bytes.
SLOT_BYTES: Final = 4_096
#: Wait for a lock that another process holds, which may be about to exit.
LOCK_WAIT_S: Final = 5.0
LOCK_POLL_S: Final = 0.05

assert HEAD_BYTES <= 512  # a mark fits one sector


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
        remedy=remedy or "name a file on a disk with room that no other coordinator uses, or none",
    )


def check_private(path: Path) -> None:
    """Raise ConfigError unless each existing file of the journal is a regular one that only its owner may open.

    The journal holds the prompts and outputs of all users, and the coordinator trusts its records.
    """
    for file in files_of(path):
        with suppress(FileNotFoundError):
            status = os.lstat(file)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode):
                kind = "a symlink" if stat.S_ISLNK(status.st_mode) else "not a regular file"
                raise unusable(
                    file, f"it is {kind}", "name the file itself, in a directory that only its user may write"
                )
            if status.st_uid not in (0, os.geteuid()) or mode & 0o077:
                raise unusable(
                    file,
                    f"owner {status.st_uid}, mode {mode:04o}: others could read or change it",
                    f"make sure that no other user did, then chown it to user {os.geteuid()} and chmod 600",
                )


class Mark:
    """The mark of one journal, and the lock on mark and journal.

    `head` is the newest whole mark, None if there is none. `is_blank`: no mark was ever written.

    Raises OSError, and BlockingIOError when another process holds the journal.
    """

    def __init__(self, path: Path, *, is_kept: bool = True) -> None:
        """`is_kept`: open for writing, and make the file if it does not exist; otherwise open for reading."""
        flags = os.O_RDWR | os.O_CREAT if is_kept else os.O_RDONLY
        self._file = os.open(head_path(path), flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        self._synced_at = 0.0
        try:
            self._lock()
            slots = [os.pread(self._file, SLOT_BYTES, at) for at in (0, SLOT_BYTES)]
        except BaseException:
            os.close(self._file)
            raise
        self.is_blank = not any(map(any, slots))
        heads = map(unpack, slots)
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
        """Write `head` into both slots and sync; call when the earlier content is damaged or not needed."""
        os.posix_fallocate(self._file, 0, 2 * SLOT_BYTES)
        os.ftruncate(self._file, 2 * SLOT_BYTES)
        for at in (0, SLOT_BYTES):
            os.pwrite(self._file, head.pack().ljust(SLOT_BYTES, b"\0"), at)
        os.fsync(self._file)
        self.head = head

    def write(self, head: Head) -> None:
        """Write the mark of `head`, which is durable and about to be acknowledged."""
        os.pwrite(self._file, head.pack(), head.commits % 2 * SLOT_BYTES)
        self.head = head
        if time.monotonic() - self._synced_at > MARK_SYNC_S:
            self.sync()

    def sync(self) -> None:
        os.fdatasync(self._file)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            os.fdatasync(self._file)
        os.close(self._file)


class Identity:
    """Checks that the journal's files are not deleted or replaced while it is open.

    Writes to a deleted file succeed and are lost with the process. A file is identified when it is first seen, by name:
    closing a descriptor of a file that SQLite has open would release SQLite's lock on it.
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
    """Make the names in the directory of `path` durable."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
