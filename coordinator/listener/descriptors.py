"""Room for as many descriptors as the listeners let connections in.

libzmq takes connections until the process has no descriptor left, and then tries again without a pause; the journal
could not open a file either. So the limit of the process lies above what the listeners let in (connection_tracker.py),
as far as the system permits."""

from __future__ import annotations

import resource
from typing import Final

from protocol.logs import fields, logger

#: Sockets of libzmq, files of the journal, exporter, epoll sets, descriptors of watched processes.
BESIDES: Final = 1_536

log = logger("coordinator.listener.descriptors")


def make_room(connections: int) -> None:
    """Raise the soft limit so that `connections` fit; say so when the hard one is too low. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + BESIDES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, granted), hard))
    if granted < needed:
        log.warning("too few descriptors for all connections; raise ulimit -n", extra=fields(has=granted, needs=needed))
