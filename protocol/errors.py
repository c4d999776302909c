"""Errors, one class for each cause, with what was wrong and what to do. Pure.

    class                              cause
    HiSparseError                      any; every error that may reach a user
    ├── BadInput                       caller: a value that can never work
    │   ├── ConfigError                caller: a setting; refused at start
    │   └── NotFound                   caller: an id that the coordinator does not know
    ├── WrongState                     caller: the right command at the wrong moment (retract a finished request)
    ├── NotAllowed                     caller: the role of the key may not use the endpoint
    ├── CapacityError                  load: it does not fit, now (`retry`) or ever
    ├── ProtocolError                  peer: a message that is unreadable, out of order, of a wrong version or role
    ├── Unavailable                    service or network: gone, draining, closed; try again later
    │   └── NameTaken                  to a worker: another process has its name, or had it until a moment ago
    └── InternalError                  a defect of HiSparse: an invariant does not hold

`code` is stable and crosses the wire in Failure. The exit codes of the CLI derive from it (hisparse.cli).
"""

from __future__ import annotations

from typing import ClassVar, Final

#: Exit codes of a worker: its thread failed or did not release what it held (EX_SOFTWARE); its group lost another rank.
EXIT_DEFECT: Final = 70
EXIT_PEER_LOST: Final = 71


class HiSparseError(Exception):
    """`message`: what happened; `field` and `value`: where; `remedy`: what to do."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, field: str = "", value: object = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = str(value)
        self.remedy = remedy

    def __str__(self) -> str:
        where = f"{self.field}={self.value}: " if self.field else ""
        hint = f" ({self.remedy})" if self.remedy else ""
        return f"{where}{self.message}{hint}"


class BadInput(HiSparseError):
    """A value that can never work."""

    code = "bad_input"


class ConfigError(BadInput):
    """A setting, a key file or an installation that can never work."""

    code = "config"


class NotFound(BadInput):
    """An id that the coordinator does not know."""

    code = "not_found"


class WrongState(HiSparseError):
    """The right call at the wrong moment: retracting a finished request."""

    code = "wrong_state"


class NotAllowed(HiSparseError):
    """A call that the key or the role does not allow."""

    code = "not_allowed"


class CapacityError(HiSparseError):
    """The request does not fit, now or ever; the message says which."""

    code = "capacity"


class ProtocolError(HiSparseError):
    """The peer sent a message that is unreadable, out of order, or of another version."""

    code = "protocol"


class Unavailable(HiSparseError):
    """The peer is gone, draining or closed; the same call may succeed later."""

    code = "unavailable"


class NameTaken(Unavailable):
    """Another process has this worker's name. It passes when that process is found to be gone."""

    code = "name_taken"


class InternalError(HiSparseError):
    """A defect of HiSparse: an invariant does not hold."""

    code = "internal"


BY_CODE: dict[str, type[HiSparseError]] = {
    kind.code: kind
    for kind in (
        BadInput,
        ConfigError,
        NotFound,
        WrongState,
        NotAllowed,
        CapacityError,
        ProtocolError,
        Unavailable,
        InternalError,
    )
}
