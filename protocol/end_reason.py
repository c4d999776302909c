"""The reason for which a process ends, as one line for the process that started it.

    process                                      `hisparse up`
    leave_reason(error)  ─►  a file without a name, which both have open  ─►  Child.reason, in the line about its end

Rejected: the end of its output (that goes to a terminal, and libraries write there, too); its exit code (few causes
have one of their own).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from protocol.errors import HiSparseError

REASON_CHARS_MAX: Final = 300
_NONE: Final = -1
_descriptor = _NONE


def leave_reasons_at(descriptor: int) -> None:
    """Have `leave_reason` write to `descriptor`, which no process that this one starts gets."""
    global _descriptor  # noqa: PLW0603 - a process has one end
    os.set_inheritable(descriptor, False)
    _descriptor = descriptor


def leave_reason(error: BaseException | str) -> None:
    """Write why this process ends, in place of an earlier reason; nothing where no process asked. From any thread."""
    if _descriptor == _NONE:
        return
    with suppress(OSError):
        os.ftruncate(_descriptor, 0)
        os.pwrite(_descriptor, reason_text(error).encode(errors="replace"), 0)


def read_reason(descriptor: int) -> str:
    """Return the reason that a process has left; empty where it left none."""
    with suppress(OSError):
        return os.pread(descriptor, 4 * REASON_CHARS_MAX, 0).decode(errors="replace")
    return ""


def reason_text(error: BaseException | str) -> str:
    """Return what `error` says, with its notes, in one line of REASON_CHARS_MAX characters at most."""
    said = str(error)
    if isinstance(error, BaseException):
        said = said if isinstance(error, HiSparseError) else f"{type(error).__name__}: {said}"
        said = "; ".join([said, *getattr(error, "__notes__", ())])
    return " ".join(said.split())[:REASON_CHARS_MAX]
