"""The step of a process that starts: one word and a share, in the name that the kernel keeps for it.

    process                                     `hisparse up`
    tell_step("weights", 0.374)  ─► /proc/PID/comm "weights 37.4%" ─►  step_of(PID)

A start may take as long as its weights are large; a start that comes no further hangs. So what starts a process waits
for as long as the step changes. `ps` and `top` show it, too.

Rejected: a pipe (each way in which a process is started would pass it on); files (a killed process leaves them).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

#: Of a name: the kernel cuts what is longer.
NAME_BYTES_MAX: Final = 15
#: The step of a process that waits for the order to start as a worker.
STANDBY: Final = "standby"
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
