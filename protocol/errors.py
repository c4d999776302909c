"""Errors that say whose fault it is, what was wrong and what to do.

    HiSparseError                      every error that may reach a user
    ├── BadInput                       the caller's: a value that can never work
    │   ├── ConfigError                a setting; refused at start
    │   └── NotFound                   an id that nobody here has
    ├── WrongState                     the caller's: right command, wrong moment (retract a finished request)
    ├── NotAllowed                     the caller's: its key or role does not permit it
    ├── CapacityError                  nobody's: it does not fit, now (`retry`) or ever
    ├── ProtocolError                  the peer's: unreadable, out of order, wrong version or role
    ├── Unavailable                    ours or the network's: gone, draining, closed; try again later
    └── InternalError                  ours: an invariant does not hold

`code` is stable and crosses the wire in Failure; the exit codes of the CLI derive from it (hisparse.cli).
"""

from __future__ import annotations

from typing import ClassVar


class HiSparseError(Exception):
    """`message` says what happened; `field` and `value` where; `remedy` what to do about it."""

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
    """It does not fit, now or ever; the message says which."""

    code = "capacity"


class ProtocolError(HiSparseError):
    """The peer sent what cannot be read, out of order, or in another version."""

    code = "protocol"


class Unavailable(HiSparseError):
    """The peer is gone, draining or closed; later it may work."""

    code = "unavailable"


class InternalError(HiSparseError):
    """A defect of ours: an invariant does not hold."""

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
