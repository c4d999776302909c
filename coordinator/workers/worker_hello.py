"""Decides what a worker's hello leads to, from the hello, its attested process, and the known worker of its name. Pure.

    epoch of the hello           known worker        leads to
    the known epoch              up                  CONTINUE: new connection, the numbers continue
                                 awaited             ADOPT: the worker ran on while the coordinator was down; its
                                                     inventory gives its progress, the numbers continue
                                 down                WrongState: an epoch that was declared down stays down
                                 another process     NameTaken: a second process uses the name
    another, which has applied   any                 SEND_AWAY under a higher incarnation: the worker withdraws all
    commands or sent reports                         requests and returns; otherwise WrongState, with the same result
    another, new                 none, down          JOIN
                                 the same process    SUCCEED: JOIN, and proof that the earlier epoch is quiesced, since
                                                     a worker begins a new epoch only without requests
                                 another process     NameTaken

Process 0 is not attested: it equals no process. Over tcp a process is known by the numbers of its epochs: the first is
the time of its start, later ones count on, and the hello says which was the first. So an earlier epoch between the two
was its own.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from protocol.errors import BadInput, NameTaken, Unavailable, WrongState
from protocol.messages import NAME_CHARS_MAX, WorkerHello
from protocol.skew import check_version


class Course(Enum):
    CONTINUE = "continue"
    ADOPT = "adopt"
    SEND_AWAY = "send away"
    JOIN = "join"
    SUCCEED = "succeed"


class KnownWorker(NamedTuple):
    """The latest epoch under a name. `is_awaited`: from the journal, not seen by this coordinator."""

    epoch: int
    process: int
    is_down: bool
    is_awaited: bool = False


def judge(hello: WorkerHello, process: int, known: KnownWorker | None, incarnation: int) -> Course:
    """The course of `hello`. Raises the refusal: ProtocolError, BadInput (final), Unavailable, NameTaken (for now),
    WrongState."""
    _check(hello, incarnation)
    if known is not None and known.epoch == hello.epoch:
        if known.is_down:
            raise WrongState("this epoch was declared down", field="epoch", value=hello.epoch, remedy="begin a new one")
        if known.process != process:
            raise _taken(hello, known)
        return Course.ADOPT if known.is_awaited else Course.CONTINUE
    if hello.command_ack or hello.report_next > 1 or hello.inventory:
        if hello.incarnation_seen == incarnation:
            raise WrongState("this epoch is not known", field="epoch", value=hello.epoch, remedy="begin a new one")
        return Course.SEND_AWAY
    if known is not None and _is_same(hello, process, known):
        return Course.SUCCEED
    if known is not None and not known.is_down:
        raise _taken(hello, known)
    return Course.JOIN


def _is_same(hello: WorkerHello, process: int, known: KnownWorker) -> bool:
    """Return whether the process of a new epoch is that of the known one."""
    if process or known.process:
        return process == known.process
    return 0 < hello.first_epoch <= known.epoch < hello.epoch


def _check(hello: WorkerHello, incarnation: int) -> None:
    check_version(hello.protocol)
    for field, name in (("worker", hello.worker), ("node", hello.node)):
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise BadInput(f"not 1 to {NAME_CHARS_MAX} characters", field=field, value=name[:NAME_CHARS_MAX])
    if hello.incarnation_seen > incarnation:
        raise Unavailable(
            f"this worker has seen a later coordinator, incarnation {hello.incarnation_seen}",
            field="incarnation",
            value=incarnation,
        )


def _taken(hello: WorkerHello, known: KnownWorker) -> NameTaken:
    holder = f"process {known.process}" if known.process else "another process"
    return NameTaken(
        f"{holder} has this name",
        field="worker",
        value=hello.worker,
        remedy="stop it, or choose another worker.name",
    )
