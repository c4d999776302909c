"""What a worker's hello leads to. Pure: the hello, the attested process behind it and what is known of its name.

    hello                                        the name is    leads to
    the epoch that is known                      up             CONTINUE: fresh connection, go on from the numbers
                                                 awaited        ADOPT: it ran on while the coordinator was away; its
                                                                inventory says how far, its numbers go on
                                                 down           WrongState: declared down stays down
                                                 another's      Unavailable: a second process under that name
    another epoch, with a past                   any            SEND_AWAY under our higher incarnation: it empties
                                                                itself and returns; else WrongState, to the same end
    another epoch, fresh                         unknown, down  JOIN
                                                 same process   SUCCEED: JOIN, and proof that the one before is
                                                                quiesced, since only an empty worker begins anew
                                                 another's      Unavailable

A process of 0 is not attested: it is nobody's, and proves nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from protocol.errors import BadInput, ProtocolError, Unavailable, WrongState
from protocol.messages import NAME_CHARS_MAX, PROTOCOL_VERSION, WorkerHello


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
    """Raises what the worker is refused with: ProtocolError, BadInput (for good), Unavailable (for now), WrongState."""
    _check(hello, incarnation)
    if known is not None and known.epoch == hello.epoch:
        if known.is_down:
            raise WrongState("this epoch was declared down", field="epoch", value=hello.epoch, remedy="begin a new one")
        if known.process != process:
            raise _taken(hello, known)
        return Course.ADOPT if known.is_awaited else Course.CONTINUE
    if hello.command_ack or hello.report_next > 1 or hello.inventory:
        if hello.incarnation_seen == incarnation:
            raise WrongState("this epoch is not known here", field="epoch", value=hello.epoch, remedy="begin a new one")
        return Course.SEND_AWAY
    if known is not None and known.process == process != 0:
        return Course.SUCCEED
    if known is not None and not known.is_down:
        raise _taken(hello, known)
    return Course.JOIN


def _check(hello: WorkerHello, incarnation: int) -> None:
    if hello.protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"this coordinator speaks protocol {PROTOCOL_VERSION}",
            field="protocol",
            value=hello.protocol,
            remedy="install the same hisparse everywhere",
        )
    for field, name in (("worker", hello.worker), ("node", hello.node)):
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise BadInput(f"not 1 to {NAME_CHARS_MAX} characters", field=field, value=name[:NAME_CHARS_MAX])
    if hello.incarnation_seen > incarnation:
        raise Unavailable(
            f"this worker obeys a later coordinator, {hello.incarnation_seen}", field="incarnation", value=incarnation
        )


def _taken(hello: WorkerHello, known: KnownWorker) -> Unavailable:
    holder = f"process {known.process}" if known.process else "another process"
    return Unavailable(
        f"{holder} has that name",
        field="worker",
        value=hello.worker,
        remedy="stop it, or choose another worker.name",
    )
