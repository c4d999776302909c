"""Bodies in common to all APIs: types, and what is refused. Pure.

Three kinds of fields, so that nothing is dropped in silence:

    served       typed below
    ignored      says nothing about the output (`user`, `metadata`): taken and forgotten (hisparse.http.apis.fields)
    unsupported  taken at the value that changes nothing (`best_of` 1), refused at any other

and a field that is in none of them is taken where it is empty (hisparse.http.apis.tolerance), and else refused by name.

Fields of any form are kept as the JSON that came: 16 MiB of it become 350 MB of objects. What is ignored is never
decoded; the rest only when it is small. Prompts are decoded by hisparse.http.apis.prompts, which knows how long they
may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from hisparse.http.apis.decoding import decoded
from hisparse.http.apis.fields import NULL, Account, Hint, Rule, Rules, ignored, unread
from hisparse.http.apis.generation import Generation
from hisparse.http.apis.structured import (
    GUIDED,
    STRUCTURE_BYTES_MAX,
    ResponseFormat,
    StructuredOutputs,
    of_response_format,
    of_structured_outputs,
    one_of,
)
from hisparse.http.errors import VALUE_CHARS_MAX
from hisparse.http.models.output_form import OutputForm
from protocol.errors import BadInput
from protocol.messages import LOGPROBS_MAX

#: Samples of one prompt; prompts of one body; samples of all its prompts together.
N_MAX: Final = 16
PROMPTS_MAX: Final = 128
CHOICES_MAX: Final = 128

#: JSON of a field that is no prompt and no message.
FIELD_BYTES_MAX: Final = 64 * 1024

#: The values of unsupported fields that change nothing, beside empty ones.
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}

PROMPT_LOGPROBS: Final = "of a prompt, only the logits of its last token are computed"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Hint = unread()
    continuous_usage_stats: bool | None = None  # of vLLM: usage in every chunk


class ApiBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of one of the APIs. Raw fields are read by `read`, as `raw_types` has them."""

    refused: ClassVar[Rules] = {}
    neutral: ClassVar[Mapping[str, Sequence[object]]] = NEUTRAL
    raw_types: ClassVar[dict[str, Any]] = {}

    model: str | None = None

    def check(self) -> None:
        """Beyond types. Raises BadInput."""

    def read(self, field: str, bytes_max: int = FIELD_BYTES_MAX) -> Any:
        """What a field holds that was kept as JSON; None where it is null or absent. Raises BadInput."""
        return read_raw(getattr(self, field), field, self.raw_types[field] | None, bytes_max)

    def read_each(self, field: str, bytes_max: int = FIELD_BYTES_MAX) -> list[msgspec.Raw]:
        """The elements of such a field that is an array. Raises BadInput."""
        raw = sized(getattr(self, field), field, bytes_max)
        return decoded(raw, list[msgspec.Raw] | None, field, is_free=False) or []


class Body(ApiBody, frozen=True, kw_only=True):
    """What both have in common. None, or absent, is the default of docs/http.md."""

    refused: ClassVar[Rules] = {
        "prompt_logprobs": Rule(PROMPT_LOGPROBS),
        **{old: Rule("vLLM's name of old", f"use {new}" if new else "leave it out") for old, new in GUIDED.items()},
    }
    raw_types: ClassVar[dict[str, Any]] = {
        "stop": str | list[str],
        "logit_bias": dict[int, float],
        "stop_token_ids": list[int],
        "response_format": ResponseFormat,
        "structured_outputs": StructuredOutputs,
    }

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: msgspec.Raw = NULL
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: msgspec.Raw = NULL
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Not of OpenAI; those of draws have vLLM's names.
    top_k: int | None = None  # -1: all
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: msgspec.Raw = NULL
    response_format: msgspec.Raw = NULL
    structured_outputs: msgspec.Raw = NULL
    priority: int = 0
    cache_salt: str = ""
    draft_tokens: int | None = None
    ignore_eos: bool = False

    user: Account = unread()
    metadata: Account = unread()
    store: Account = unread()
    service_tier: Account = unread()
    safety_identifier: Account = unread()
    prompt_cache_key: Account = unread()
    prompt_cache_options: Account = unread()
    prompt_cache_retention: Account = unread()
    moderation: Account = unread()

    def check(self) -> None:
        if self.n is not None and not 1 <= self.n <= N_MAX:
            raise BadInput(f"must be 1 to {N_MAX}", field="n", value=self.n, remedy="choose a value in that range")
        if self.stream_options is not None and not self.stream:
            raise BadInput("is for streams", field="stream_options", remedy="set stream to true, or leave it out")

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.read("stop")
        return (stop,) if isinstance(stop, str) else tuple(stop or ())

    @property
    def adjustments(self) -> dict[str, Any]:
        """What the body asks of its draws beside temperature and top_p, as fields of Sampling; the given ones."""
        bias, ends = self.read("logit_bias"), self.read("stop_token_ids")
        said = {
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": tuple(bias.items()) if bias else None,
            "min_tokens": self.min_tokens,
            "stop_token_ids": tuple(ends) if ends else None,
            "logprobs": self.alternatives,
        }
        return {name: value for name, value in said.items() if value is not None}

    @property
    def alternatives(self) -> int | None:
        """To each token, with log-probabilities; None: without."""
        raise NotImplementedError

    @property
    def structure(self) -> OutputForm | None:
        """What the output is held to. Raises BadInput."""
        return one_of(
            of_response_format(self.read("response_format", STRUCTURE_BYTES_MAX)),
            of_structured_outputs(self.read("structured_outputs", STRUCTURE_BYTES_MAX)),
        )

    def wanted(self, **further: Any) -> Generation:
        """What both ask for, and `further`."""
        options = self.stream_options or StreamOptions()
        return Generation(
            model=self.model,
            temperature=self.temperature,
            top_p=self.top_p,
            n=self.n,
            seed=self.seed,
            stop=self.stops,
            ignore_eos=self.ignore_eos,
            adjustments=self.adjustments,
            structure=self.structure,
            priority=self.priority,
            cache_salt=self.cache_salt,
            draft_tokens=self.draft_tokens,
            stream=bool(self.stream),
            include_usage=bool(options.include_usage),
            usage_in_every_chunk=bool(options.continuous_usage_stats),
            **further,
        )


def check_alternatives(field: str, count: int | None) -> None:
    """Raises BadInput for more than this server tells, or less than none."""
    if count is not None and not 0 <= count <= LOGPROBS_MAX:
        text, remedy = f"must be 0 to {LOGPROBS_MAX}", "choose a value in that range"
        raise BadInput(text, field=field, value=count, remedy=remedy)


B = TypeVar("B", bound=ApiBody)


def read_body(data: bytes | bytearray, kind: type[B]) -> B:
    """Decode and check. Raises BadInput naming the field."""
    body: B = decoded(data, kind)
    for field, neutral in body.neutral.items():
        if field in kind.__struct_fields__:
            refuse_unless(neutral, field, read_raw(getattr(body, field), field, Any))
    body.check()
    return body


def prepare(kinds: Iterable[type[ApiBody]]) -> None:
    """Let msgspec read the fields of these bodies, before threads decode to them. msgspec 0.22 shows a type to all
    threads before it has read the type's fields, and a thread that decodes to it then ends the process: the first
    bodies of a front may come together."""
    for kind in kinds:
        for it in (kind, *kind.raw_types.values()):
            msgspec.json.Decoder(it)


def refuse_unless(neutral: Sequence[object], field: str, value: object) -> None:
    """Raises BadInput for a value that would change the output, which this server cannot do."""
    if value not in (None, [], {}, "") and not any(value == it and type(value) is type(it) for it in neutral):
        told = msgspec.json.encode(value).decode()[:VALUE_CHARS_MAX]
        raise BadInput("is not supported", field=field, value=told, remedy=f"leave {field} out")


def parameters(kind: type[ApiBody]) -> dict[str, Any]:
    """The names of all fields: with the reason of those that are ignored, with the values of the unsupported ones that
    are accepted beside empty ones, and with the rules that refuse others of the references."""
    fields, neutral, reasons = kind.__struct_fields__, kind.neutral, ignored(kind)
    return {
        "served": [it for it in fields if it not in neutral and it not in reasons],
        "ignored": reasons,
        "accepted_at_these_values_only": {it: list(neutral[it]) for it in fields if it in neutral},
        "refused": {name: rule.why for name, rule in kind.refused.items()},
    }


def read_raw(raw: msgspec.Raw, field: str, kind: Any, bytes_max: int = FIELD_BYTES_MAX) -> Any:
    """A value of `kind`. Raises BadInput, also for JSON longer than `bytes_max`."""
    return decoded(sized(raw, field, bytes_max), kind, field)


def sized(raw: msgspec.Raw, field: str, bytes_max: int) -> msgspec.Raw:
    """Return `raw`. Raises BadInput for JSON longer than `bytes_max`."""
    size = memoryview(raw).nbytes
    if size > bytes_max:
        text = f"longer than {bytes_max} bytes"
        raise BadInput(text, field=field, value=f"{size} bytes", remedy=f"shorten {field}, or leave it out")
    return raw
