"""What bodies say of the form of an output: OpenAI's response_format, vLLM's structured_outputs. Pure."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from hisparse.http.apis.decoding import decoded
from hisparse.http.apis.fields import Repeat, unread
from hisparse.http.models.output_form import OutputForm
from protocol.errors import BadInput
from protocol.messages import GRAMMAR_CHARS_MAX

#: JSON of a field that holds a schema or a grammar.
STRUCTURE_BYTES_MAX: Final = 4 * GRAMMAR_CHARS_MAX
#: Of structured_outputs.choice.
CHOICES_MAX: Final = 4_096

#: vLLM's names of old, and what took their place.
GUIDED: Final = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_decoding_backend": "",
    "guided_whitespace_pattern": "",
}


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text", tag_field="type"):
    pass


class ObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_object", tag_field="type"):
    pass


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`schema` binds, `strict` or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: Repeat = unread()
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema", tag_field="type"):
    json_schema: NamedSchema


#: Of completions and chats.
ResponseFormat: TypeAlias = TextFormat | ObjectFormat | SchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of them."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


OBJECT: Final = {"type": "object"}


def of_response_format(said: ResponseFormat | None, field: str = "response_format") -> OutputForm | None:
    """Raises BadInput."""
    if isinstance(said, ObjectFormat):
        return OutputForm("json", OBJECT, field)
    if isinstance(said, SchemaFormat):
        where = f"{field}.json_schema.schema"
        return OutputForm("json", schema_in(said.json_schema.schema, where), where)
    return None


def of_structured_outputs(said: StructuredOutputs | None) -> OutputForm | None:
    """Raises BadInput."""
    if said is None:
        return None
    given = [name for name in said.__struct_fields__ if getattr(said, name) not in (None, False)]
    field = "structured_outputs"
    if len(given) != 1:
        text = "holds nothing" if not given else f"holds {' and '.join(given)}"
        raise BadInput(text, field=field, remedy="give one of json, json_object, regex, choice, grammar")
    name = given[0]
    where, value = f"{field}.{name}", getattr(said, name)
    if name == "json_object":
        return OutputForm("json", OBJECT, where)
    if name == "json":
        return OutputForm("json", schema_in(value, where), where)
    if name == "choice" and not 0 < len(value) <= CHOICES_MAX:
        text = f"has 1 to {CHOICES_MAX} texts"
        raise BadInput(text, field=where, value=f"{len(value)} texts", remedy="change their number")
    if not value or (name == "choice" and not all(value)):
        raise BadInput("is empty, or has an empty text", field=where, remedy="give a text")
    return OutputForm(name, value, where)  # type: ignore[arg-type]


def schema_in(said: dict[str, Any] | str | None, field: str) -> dict[str, Any]:
    """A schema, or the JSON of one. Raises BadInput."""
    if said is None:
        raise BadInput("is missing", field=field, remedy="add it")
    if isinstance(said, dict):
        return said
    schema: dict[str, Any] = decoded(said.encode(errors="surrogatepass"), dict[str, Any], field)
    return schema


def one_of(*said: OutputForm | None) -> OutputForm | None:
    """The one that was given. Raises BadInput for two."""
    given = [it for it in said if it is not None]
    if len(given) > 1:
        text = f"comes beside {given[0].field.partition('.')[0]}"
        raise BadInput(text, field=given[1].field.partition(".")[0], remedy="give one of the two")
    return given[0] if given else None
