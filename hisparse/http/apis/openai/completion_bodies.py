"""Bodies of POST /v1/completions, as OpenAI has them. Pure."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

import msgspec

from hisparse.http.apis.body import PROMPT_LOGPROBS, Body, check_alternatives
from hisparse.http.apis.fields import NULL, Rule, Rules
from hisparse.http.apis.generation import Generation
from protocol.errors import BadInput

_IDS: Final = {"type": "array", "items": {"type": "integer"}}
#: Several kinds of arrays, which no type of the decoder is.
PROMPT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
    ]
}


class CompletionBody(Body, frozen=True, kw_only=True):
    """`prompt` is a text, a list of texts, token ids, or a list of lists of token ids."""

    refused: ClassVar[Rules] = {**Body.refused, "suffix": Rule("the model writes on, and fills no gaps")}
    raw_types: ClassVar[dict[str, Any]] = Body.raw_types | {
        "prompt": Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=PROMPT_SCHEMA)],
    }

    prompt: msgspec.Raw
    echo: bool | None = None
    logprobs: int | bool | None = None  # false: none

    best_of: msgspec.Raw = NULL

    def check(self) -> None:
        super().check()
        if self.logprobs is True:
            text, remedy = "expected an integer, not a boolean", "say how many of the likeliest tokens"
            raise BadInput(text, field="logprobs", value="true", remedy=remedy)
        check_alternatives("logprobs", self.alternatives)
        if self.echo and self.alternatives is not None:
            text = f"is not supported: {PROMPT_LOGPROBS}; an echo would come without log-probabilities"
            raise BadInput(text, field="logprobs", value=self.logprobs, remedy="leave echo out, or logprobs")

    @property
    def alternatives(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    def generation(self) -> Generation:
        return self.wanted(prompt=bytes(self.prompt), echo=bool(self.echo), max_tokens=self.max_tokens)
