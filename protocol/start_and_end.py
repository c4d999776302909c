"""The step of a start and the reason of an end, told to the process that started this one.

The reason is one line:

    process                                      `hisparse up`
    leave_reason(error)  ─►  a file without a name, which both have open  ─►  Child.reason, in the line about its end

Rejected: the end of its output (that goes to a terminal, and libraries write there, too); its exit code (few causes
have one of their own).

The step is one word and a share, in the name that the kernel keeps for a process:

    process                                     `hisparse up`
    tell_step("weights", 0.374)  ─► /proc/PID/comm "weights 37.4%" ─►  step_of(PID)

A start may take as long as its weights are large; a start that comes no further hangs. So what starts a process waits
for as long as the step changes. `ps` and `top` show it, too.

Rejected: a pipe (each way in which a process is started would pass it on); files (a killed process leaves them).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from protocol.errors import HiSparseError

#: Of a name: the kernel cuts what is longer.
NAME_BYTES_MAX: Final = 15
#: The step of a process that waits for the order to start as a worker.
STANDBY: Final = "standby"
#: The step of a worker that was asked to exit.
LEAVING: Final = "leaving"
SELF: Final = Path("/proc/self/comm")


def tell_step(step: str, share: float | None = None) -> None:
    """Write the step that this process has come to, and which `share` of that is done. Called from any thread."""
    text = step if share is None else f"{step} {100 * min(share, 1.0):.1f}%"
    with suppress(OSError):  # no /proc: told to no process
        SELF.write_text(text[:NAME_BYTES_MAX])


def step_of(pid: int) -> str:
    """The step that process `pid` told last, or the name of its program; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


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
