"""JSON Schema's own suite, draft 2020-12, before the front's grammars: tests/support/json_schema_suite.

What llguidance claims is built, and held to the suite's instances and to another maker's validator; what it does not
claim is refused with the place. A grammar may be narrower than its schema as NARROWER says, and wider as WIDER says.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Final, TypeAlias

import jsonschema
import msgspec
import pytest

from hisparse.http.apis.openai.completion_bodies import CompletionBody
from hisparse.http.models.formats.lark import schema_of
from hisparse.http.models.grammar_checks import _parts
from protocol.errors import BadInput
from protocol.grammars import Matcher
from tests import ROOT
from tests.hisparse.http.models.asker import Asker, asker
from tests.support.walks import BYTES, walk

SUITE: Final = ROOT / "tests" / "support" / "json_schema_suite" / "draft2020-12.jsonl"
FIELD: Final = "structured_outputs.json"
SEEDS: Final = range(4)
#: Tokens of a walk. Some schemas allow nothing but an object without end.
TOKENS_MAX: Final = 400


class Instance(msgspec.Struct, frozen=True):
    description: str
    data: Any
    valid: bool


class Case(msgspec.Struct, frozen=True):
    file: str
    description: str
    schema: dict[str, Any] | bool
    tests: list[Instance]


@cache
def cases() -> tuple[Case, ...]:
    return tuple(msgspec.json.decode(line, type=Case) for line in SUITE.read_bytes().splitlines())


Rule: TypeAlias = Callable[[Case, Instance], bool]

#: Why a valid instance may be refused.
NARROWER: Final[dict[str, Rule]] = {
    "members come in the order of the schema": lambda case, it: (
        (case.file, case.description) in (("allOf", "allOf"), ("allOf", "allOf with base schema"))
        or "property order" in it.description
    ),
    "integers are written without a fraction": lambda case, it: (
        case.file in ("const", "enum", "type") and re.search(r"\.0\b", json.dumps(it.data)) is not None
    ),
    "format binds": lambda case, _: case.file == "format",
    "e-mail addresses have no quoted part, IPv6 ones no part of IPv4": lambda case, _: (
        case.file in ("format/email", "format/ipv6")
    ),
}
#: Why an invalid instance may be accepted: a calendar is no regular language of a size that is used.
WIDER: Final[dict[str, Rule]] = {
    "February has 29 days": lambda case, it: case.file == "format/date" and it.data == "2021-02-29",
    "any minute may have a leap second": lambda case, it: (
        case.file in ("format/date-time", "format/time") and ":60" in it.data
    ),
}
FORMATS: Final = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))
#: Keywords that llguidance has not.
MISSING: Final = {
    *("$dynamicAnchor", "$dynamicRef", "contains", "dependentRequired", "dependentSchemas", "else", "if"),
    *("maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    "uniqueItems",
}


#: What else is said of schemas that are refused.
REFUSED: Final = {
    "a format that is unknown": "Unknown format",
    "no value is valid": "Unsatisfiable schema",
    "a reference that leads out": "nothing is fetched",
    "oneOf that is not decided": "schemas of oneOf may allow the same value",
    "a length with a fraction": "Expected positive integer",
    "overlapping patterns of names": "are not disjoint",
    "a number of many digits": "has too many digits",
    "no object": "expected a string or an object",
}


@pytest.fixture(scope="module")
def ask() -> Iterator[Asker]:
    with asker() as made:
        yield made


def grammar_of(ask: Asker, case: Case) -> str:
    """Raises BadInput."""
    made = ask(CompletionBody, prompt="x", structured_outputs={"json": case.schema})
    return made.choices[0].sampling.grammar


@cache
def built() -> tuple[tuple[Case, str, Matcher], ...]:
    """Those that the library builds, with grammar and matcher."""
    found = []
    for case in cases():
        if isinstance(case.schema, dict):
            grammar = f"start: {schema_of(case.schema)}\n"
            with suppress(BadInput):
                found.append((case, grammar, Matcher(BYTES, grammar)))
    return tuple(found)


def accepts(matcher: Matcher, text: str) -> bool:
    matcher, data = matcher.copy(), text.encode()
    if matcher._library.validate_tokens(list(data)) < len(data):
        return False
    matcher.push(data)
    return bool(matcher._library.is_accepting())


def test_instances_are_accepted_where_they_are_valid() -> None:
    counts: Counter[str] = Counter()
    for case, _, matcher in built():
        for it in case.tests:
            accepted = accepts(matcher, json.dumps(it.data, ensure_ascii=False))
            reasons = NARROWER if it.valid else WIDER
            if accepted == it.valid:
                counts["as the suite says"] += 1
                continue
            why = next((why for why, rule in reasons.items() if rule(case, it)), None)
            assert why, (case.file, case.description, it)
            counts[why] += 1
    print(counts)
    assert len(built()) >= 170
    assert counts["as the suite says"] >= 800


def test_outputs_are_valid() -> None:
    """Those that have not ended are none: a worker reports `length` for them."""
    walks = ended = 0
    for case, grammar, _ in built():
        validator = jsonschema.Draft202012Validator(case.schema, format_checker=FORMATS)
        for seed in SEEDS:
            text = walk(grammar, seed, ends_after=12, most=TOKENS_MAX)
            walks += 1
            if text:
                ended += 1
                validator.validate(json.loads(text))
    print(walks, ended)
    assert ended >= 0.95 * walks


def schemas_in(schema: Any, place: str = FIELD) -> Iterator[tuple[str, Any]]:
    """It, and those within, by their places."""
    yield place, schema
    if isinstance(schema, dict):
        for part, inner in _parts(schema):
            yield from schemas_in(inner, f"{place}.{part}")


def test_refusal_names_the_schema_to_blame(ask: Asker) -> None:
    counts: Counter[str] = Counter()
    claimed = {id(case) for case, _, _ in built()}
    for case in cases():
        if id(case) in claimed:
            assert grammar_of(ask, case)
            continue
        with pytest.raises(BadInput) as caught:
            grammar_of(ask, case)
        error = caught.value
        blamed = dict(schemas_in(case.schema))
        assert error.field in blamed, (case.description, str(error))
        keys = re.search(r"Unimplemented keys: (\[.*\])", error.message)
        if keys:
            missing = set(json.loads(keys[1]))
            assert missing <= MISSING
            schema = blamed[error.field]
            is_reference = any(word in schema for word in ("$ref", "$dynamicRef"))
            assert missing <= set(schema) or is_reference, (case.description, str(error))
            counts["keywords"] += 1
        else:
            counts[next(why for why, words in REFUSED.items() if words in error.message)] += 1
    print(counts)
    assert counts.keys() == {"keywords", *REFUSED}
