"""The process's limit of descriptors, raised above the number of connections that the listeners admit.

libzmq accepts connections until the process has no descriptor left, and then retries without a pause; the journal could
not open files then. So the limit is raised above the bounds of connection_tracker.py, as far as the system permits.
"""

from __future__ import annotations

import resource
from typing import Final

from protocol.logs import fields, logger

#: Descriptors for other uses: sockets of libzmq, journal files, exporter, epoll sets, watched processes.
OTHER_DESCRIPTORS: Final = 1_536

log = logger("coordinator.listener.descriptors")


def make_room(connections: int) -> None:
    """Raise the soft limit so that `connections` fit; log a warning when the hard limit is too low. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, granted), hard))
    if granted < needed:
        log.warning("too few descriptors for all connections; raise ulimit -n", extra=fields(has=granted, needs=needed))
