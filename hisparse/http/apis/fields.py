"""Fields of bodies that are not served: ignored for one of three reasons, or refused by a rule. Pure.

A type of a body says both of itself: an ignored field is of a type below, whose description is the reason; `refused` of
the type has the rules. So GET /v1/parameters, the OpenAPI document and refusals tell the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias, get_args, get_origin

import msgspec

NULL: Final = msgspec.Raw(b"null")

ACCOUNT: Final = "says who asks, or how a provider stores, caches, bills and watches requests"
REPEAT: Final = "repeats or describes what the conversation holds in other fields"
HINT: Final = "asks for a way of working that makes no difference here"

#: Fields of these types are taken at any value, and never decoded.
Account: TypeAlias = Annotated[msgspec.Raw, msgspec.Meta(description=ACCOUNT)]
Repeat: TypeAlias = Annotated[msgspec.Raw, msgspec.Meta(description=REPEAT)]
Hint: TypeAlias = Annotated[msgspec.Raw, msgspec.Meta(description=HINT)]


@dataclass(frozen=True)
class Rule:
    """The reason why a field of the reference is not supported, and the remedy."""

    why: str
    remedy: str = "leave it out"


Rules: TypeAlias = Mapping[str, Rule]


def unread(name: str | None = None) -> Any:
    """The default of an ignored field. `name` is that in JSON, where Python has it as a keyword."""
    return msgspec.field(default_factory=lambda: NULL, name=name)


def is_raw(kind: Any) -> bool:
    """Return whether a field of this type is kept as JSON."""
    return kind is msgspec.Raw or (get_origin(kind) is Annotated and get_args(kind)[0] is msgspec.Raw)


def ignored(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The ignored fields of a type of bodies, by their names in JSON, and the reason of each."""
    reasons = {}
    for field in msgspec.structs.fields(kind):
        for meta in get_args(field.type)[1:] if get_origin(field.type) is Annotated else ():
            if isinstance(meta, msgspec.Meta) and meta.description in (ACCOUNT, REPEAT, HINT):
                reasons[field.encode_name] = meta.description
    return reasons


def rules_of(kind: type[msgspec.Struct]) -> Rules:
    rules: Rules = getattr(kind, "refused", {})
    return rules
