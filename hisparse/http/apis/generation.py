"""What a body asks for, whichever API it is of. Pure.

Each API's bodies become one of these, which hisparse.http.apis.asks makes into requests of the coordinator. `names` are
those that the API has for our fields, so that a refusal speaks of what the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hisparse.http.models.formats.conversation import Conversation
from hisparse.http.models.output_form import OutputForm


@dataclass(frozen=True, kw_only=True)
class Generation:
    """`conversation`, or else `prompt` as apis.prompts reads it; with `echo` a prompt is part of its answer. None: the
    default of docs/http.md. `adjustments` are further fields of Sampling, `structure` is what the output is held to,
    `settings` what the answer repeats of the body."""

    model: str | None = None
    conversation: Conversation | None = None
    prompt: bytes = b""
    echo: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    adjustments: Mapping[str, Any] = field(default_factory=dict)
    structure: OutputForm | None = None
    priority: int = 0
    cache_salt: str = ""
    draft_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, name: str) -> str:
        """What the client calls a field of ours: `max_tokens`, `stop`, `prompt`."""
        return self.names.get(name, name)
