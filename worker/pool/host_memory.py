"""How much host memory there is for the pool, and whether a wish for some can come true. Pure but for reading /proc.

Which figure decides, in this order:

    cgroup limit      v2 `memory.max` and v1 `memory.limit_in_bytes`, of this process's group and all above it. Firm:
                      beyond it the kernel kills, so what does not fit is refused
    MemAvailable      without a limit. Not firm: some machines start with a small MemTotal that grows as it is used, so
                      an explicit `host_mem` beyond it is obeyed, with a warning that has the arithmetic
    file system       of the pool directory: what is not free there cannot be allocated there. Firm

`host_mem = auto` takes AUTO_SHARE of the memory that decides, or what the file system has, whichever is less. The rest
is for the processes themselves: weights on their way to the device, and the coordinator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.byte_sizes import AUTO, parse_size
from protocol.errors import ConfigError
from protocol.logs import fields, logger
from protocol.settings import WorkerSettings

#: Share of the memory that decides which `auto` takes.
AUTO_SHARE: Final = 0.75
#: cgroup v1 writes "no limit" as the largest multiple of a page below 2^63.
NO_LIMIT_BYTES: Final = 1 << 62
MIB: Final = 1 << 20

log = logger("worker.pool.host_memory")


@dataclass(frozen=True)
class Room:
    """Memory that may still be taken, and how that was found. `firm`: more than that is impossible."""

    free_bytes: int
    arithmetic: str
    firm: bool


def memory_room(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Room:
    """What this process and its like may still take."""
    limits = [room for group in _groups(proc, cgroup) if (room := _group_room(group)) is not None]
    if limits:
        return min(limits, key=lambda room: room.free_bytes)
    available = _meminfo_bytes(proc, "MemAvailable")
    text = f"MemAvailable {available // MIB} MiB of MemTotal {_meminfo_bytes(proc, 'MemTotal') // MIB} MiB"
    return Room(available, text, firm=False)


def file_system_room(directory: Path) -> Room:
    """What the file system of `directory`, or of the first directory above it that can be reached, has free."""
    while not os.path.exists(directory):  # False, too, where this user may not look
        directory = directory.parent
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    return Room(free, f"the file system of {directory} has {free // MIB} MiB free", firm=True)


def resolve_host_mem(settings: WorkerSettings, memory: Room, file_system: Room, *, have_bytes: int = 0) -> int:
    """Bytes for the pool: the figure given, or what `auto` comes to. Raises ConfigError, with the arithmetic, for what
    cannot fit. A pool that is there already has `have_bytes`, which need not be free."""
    if settings.host_mem == AUTO:
        wanted = int(memory.free_bytes * AUTO_SHARE)
        log.info(
            "host_mem auto",
            extra=fields(bytes=min(wanted, file_system.free_bytes), share=AUTO_SHARE, of=memory.arithmetic),
        )
        return min(wanted, file_system.free_bytes)
    wanted = parse_size(settings.host_mem, "worker.host_mem")
    for room in (memory, file_system):
        most = room.free_bytes + have_bytes
        if wanted <= most:
            continue
        what = f"the host pool would take {wanted // MIB} MiB, {room.arithmetic}"
        if room.firm:
            raise ConfigError(
                what,
                field="worker.host_mem",
                value=settings.host_mem,
                remedy=(f"set it to {most // MIB}MiB or less, or " if most >= MIB else "") + "raise that limit",
            )
        log.warning(
            "host_mem may not fit; that figure may still grow", extra=fields(host_mem=settings.host_mem, reason=what)
        )
    return wanted


# ---------------------------------------------------------------- where the figures are


def _groups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Directories of this process's memory groups, each with those above it, as far as they are visible."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [cgroup, cgroup / "unified"]
        elif "memory" in controllers.split(","):
            roots = [cgroup / "memory"]
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            while group != root:
                yield group
                group = group.parent
            yield root


def _group_room(group: Path) -> Room | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit_text = (group / limit_name).read_text().strip()
            used = int((group / used_name).read_text())
        except (OSError, ValueError):
            continue
        if limit_text == "max" or int(limit_text) >= NO_LIMIT_BYTES:
            return None
        used = max(0, used - _stat_bytes(group, cache_name))
        limit = int(limit_text)
        text = f"the limit of {group} is {limit // MIB} MiB, {used // MIB} MiB of it in use"
        return Room(max(0, limit - used), text, firm=True)
    return None


def _stat_bytes(group: Path, name: str) -> int:
    """Cache that the kernel gives up on demand; 0 when the group does not say."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _meminfo_bytes(proc: Path, name: str) -> int:
    lines = (proc / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
