"""Bodies that ask for outputs of a form, with something odd in most of them, and what is wrong with their answers.

`draw(dice)` is one body with its path: schemas in each place that takes one, texts of other grammars, and both broken.
`fault(...)` judges its answer: a refusal names a field and says why in clear words, and an output that has ended is
valid under its schema, as jsonschema sees it. Everything is drawn from `dice`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jsonschema

from tests.support.hostile_http import ODD

#: Tokens of an output. Of those that end, most are shorter.
OUTPUT_TOKENS_MAX: Final = 300
DEPTH_MAX: Final = 4
NAMES: Final = ("a", "b", "name", "é", "$ref", "x y", "0", "properties", "")
PATTERNS: Final = (
    *("^[a-z]+$", "^\\d{3}$", "^(a|bc)*$", "^[^x]{2,5}$", "b", "^$"),
    *(
        "(",
        "[z-a]",
        "a{9999999}",
        "(a{99}){99}",
        "(?=x)y",
        "(?<n>a)\\k<n>",
        "\\p{L}+",
        "\\u00e9",
        "^(a?){40}a{40}$",
        "*",
    ),
)
FORMATS: Final = ("date-time", "uuid", "ipv4", "email", "uri", "regex", "hostname", "no-format", "", "duration")
BOUNDS: Final = (0, 1, 2, 3, 7, -1, 0.5, 1e3, 10**6, 2**53, 2**70, 1e308, -(2**64))
VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    1.5,
    -7,
    "x",
    "é😀",
    'a"b\\',
    "\n",
    [],
    [1, ["x"]],
    {},
    {"a": {"b": None}},
)
REFS: Final = (
    "#",
    "#/$defs/a",
    "#/$defs/b",
    "#/properties/a",
    "#/none",
    "http://localhost:9/a.json",
    "file:///etc/passwd",
)
TYPES: Final = ("object", "array", "string", "integer", "number", "boolean", "null")
LARK: Final = (
    *('start: "a" | "b"', "start: /[a-c]{1,9}/", 'start: x\nx: "a" x | "b"', "start: start", "start: x", "start:"),
    *('start: %json {"type": "object"}', 'start: "a', "start: <[300]>", "start: /(/", "%llguidance {}\nstart: /x/"),
    *('root ::= "a" b\nb ::= "x" | "y"', "root ::= [a-z]+", "root ::=", 'start: "a"{1000000}', "start: @other"),
    *("start: /a/ /b/ /c/", "start: %regex {", 'start: ("a"?)*', "start: x*\nx: y*\ny: /a*/", "\0", "é"),
)
#: Minutes to build: repeated terminals of repeated terminals.
CHAIN: Final = "start: A0\n" + "".join(f"A{it}: A{it + 1}*\n" for it in range(4_000)) + 'A4000: "a"\n'
#: Each takes minutes or gigabytes to build.
BOMBS: Final[tuple[dict[str, Any], ...]] = (
    {"grammar": CHAIN},
    {"regex": "(a{999}){999}"},
    {"json": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{it}}}"} for it in range(9, 30)]}},
)
BOMB_ONE_IN: Final = 1_000
LONG_NUMBER: Final = re.compile(r"\d{17}")
#: Expressions on which Python's module, which jsonschema uses, tries every way.
BACKTRACKS: Final = re.compile(r"\?\)\{|\)\?\(|\*a\(")
#: What no client should read: words of a library about its own code.
RAW: Final = re.compile(r"panick|unwrap|non-verbose|Traceback|\.rs\b|coerce_one_of|retriever", re.IGNORECASE)
#: A place in a grammar: of use where the grammar is the client's.
AT: Final = re.compile(r"\bat \d+\(\d+\)")


@dataclass(frozen=True)
class Drawn:
    path: str
    body: bytes
    #: Where its output is JSON by a schema: that schema.
    schema: Any = None


# ---------------------------------------------------------------- schemas


def schema(dice: random.Random, depth: int = 0) -> Any:
    """A schema that is well formed in most cases, and supported in fewer."""
    if depth >= DEPTH_MAX or dice.random() < 0.1:
        return dice.choice(
            ({}, {"type": "integer"}, {"type": "string", "maxLength": 5}, {"enum": ["a", 1]}, True, False)
        )
    made: dict[str, Any] = {}
    kind = dice.choice(("object", "object", "array", "string", "number", "any", "refs", "values"))
    inner = partial(schema, dice, depth + 1)
    if kind in TYPES and dice.random() < 0.9:
        made["type"] = kind
    {
        "object": _object,
        "array": _array,
        "string": _string,
        "number": _number,
        "any": _any,
        "refs": _refs,
        "values": _values,
    }[kind](dice, made, inner)
    if depth == 0 and dice.random() < 0.5:
        made["$defs"] = {name: inner() for name in ("a", "b")}
    if dice.random() < 0.05:
        made[dice.choice(ODD_WORDS)] = dice.choice((*ODD, inner()))
    return made


def _object(dice: random.Random, made: dict[str, Any], inner: Callable[[], Any]) -> None:
    names = dice.sample(NAMES, dice.randrange(4))
    made["properties"] = {name: inner() for name in names}
    if names and dice.random() < 0.6:
        made["required"] = dice.sample(names, dice.randrange(len(names) + 1)) + dice.choice(([], [], ["other"]))
    if dice.random() < 0.6:
        made["additionalProperties"] = dice.choice((False, False, True, inner()))
    if dice.random() < 0.1:
        made[dice.choice(("minProperties", "maxProperties"))] = dice.choice(BOUNDS)
    if dice.random() < 0.1:
        made["patternProperties"] = {dice.choice(PATTERNS): inner()}


def _array(dice: random.Random, made: dict[str, Any], inner: Callable[[], Any]) -> None:
    if dice.random() < 0.8:
        made["items"] = inner()
    if dice.random() < 0.3:
        made["prefixItems"] = [inner() for _ in range(dice.randrange(3))]
    if dice.random() < 0.4:
        made[dice.choice(("minItems", "maxItems"))] = dice.choice(BOUNDS)
    if dice.random() < 0.1:
        made["uniqueItems"] = dice.choice((True, False))


def _string(dice: random.Random, made: dict[str, Any], _: Callable[[], Any]) -> None:
    match dice.randrange(4):
        case 0:
            made["pattern"] = dice.choice(PATTERNS)
        case 1:
            made["format"] = dice.choice(FORMATS)
        case 2:
            made[dice.choice(("minLength", "maxLength"))] = dice.choice(BOUNDS)
        case _:
            made |= {"minLength": dice.randrange(4), "maxLength": dice.randrange(9)}


def _number(dice: random.Random, made: dict[str, Any], _: Callable[[], Any]) -> None:
    made["type"] = dice.choice(("integer", "number"))
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if dice.random() < 0.3:
            made[word] = dice.choice(BOUNDS)
    if dice.random() < 0.2:
        made["multipleOf"] = dice.choice((2, 7, 0.5, 0, -3, 10**30, "x"))


def _any(dice: random.Random, made: dict[str, Any], inner: Callable[[], Any]) -> None:
    word = dice.choice(("anyOf", "oneOf", "allOf", "not", "if"))
    made[word] = inner() if word in ("not", "if") else [inner() for _ in range(dice.randrange(4))]


def _refs(dice: random.Random, made: dict[str, Any], inner: Callable[[], Any]) -> None:
    made["$ref"] = dice.choice(REFS)
    if dice.random() < 0.2:
        made["properties"] = {"a": inner()}


def _values(dice: random.Random, made: dict[str, Any], _: Callable[[], Any]) -> None:
    if dice.random() < 0.5:
        made["const"] = dice.choice(VALUES)
    else:
        made["enum"] = dice.choices(VALUES, k=dice.randrange(5))


ODD_WORDS: Final = (
    *("type", "properties", "required", "items", "enum", "anyOf", "$ref", "$defs", "pattern", "minLength", "maxItems"),
    *("dependentRequired", "contains", "unevaluatedProperties", "$id", "$schema", "$anchor", "x-guidance", "nothing"),
)


def broken(dice: random.Random, value: Any) -> Any:
    """`value` with one part, at any depth, replaced by what is odd there."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        name = dice.choice(list(value))
        return {**value, name: broken(dice, value[name])}
    if isinstance(value, list) and value and dice.random() < 0.85:
        at = dice.randrange(len(value))
        return [*value[:at], broken(dice, value[at]), *value[at + 1 :]]
    return dice.choice(ODD)


def nested(dice: random.Random) -> Any:
    """Deep, wide or long."""
    size = dice.choice((10, 100, 400))
    made: Any = {"type": "integer"}
    match dice.randrange(5):
        case 0:
            for _ in range(size):
                made = {"type": "array", "items": made}
        case 1:
            made = {"anyOf": [{"const": str(number)} for number in range(size)]}
        case 2:
            made = {"properties": {f"p{number}": {"type": "string"} for number in range(size)}, "required": ["p1"]}
        case 3:
            made = {"allOf": [{"type": "string", "pattern": f"a{{{number}}}"} for number in range(1, size)]}
        case _:
            made = {"type": "string", "pattern": "^" + "(a|b)?" * size + "$"}
    return made


# ---------------------------------------------------------------- bodies


def draw(dice: random.Random) -> Drawn:
    """One body."""
    if dice.randrange(BOMB_ONE_IN) == 0:
        return Drawn("/v1/completions", bomb(dice))
    kind = dice.random()
    said = nested(dice) if kind < 0.04 else schema(dice)
    said = broken(dice, said) if kind > 0.9 else said
    path, body, is_text = dice.choice(_PLACES)(dice, said)
    if dice.random() < 0.08:
        body = broken(dice, body)
        is_text = False
    data = json.dumps(body).encode()
    return Drawn(path, data, said if is_text and isinstance(said, dict) else None)


def bomb(dice: random.Random) -> bytes:
    """A body with a grammar that no build may finish: each is another one."""
    form = dice.choice(BOMBS)
    if "grammar" in form:
        form = {"grammar": form["grammar"] + f"// {dice.random()}\n"}
    return json.dumps({"prompt": "x", "max_tokens": 5, "structured_outputs": form}).encode()


def _completion(dice: random.Random, said: Any) -> tuple[str, dict[str, Any], bool]:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": said, "strict": True}}
    json_of: Any = said if dice.random() < 0.7 else json.dumps(said)
    asked = dice.choice(({"response_format": form}, {"structured_outputs": {"json": json_of}}))
    return (
        "/v1/completions",
        {"prompt": "x", "max_tokens": OUTPUT_TOKENS_MAX, "seed": dice.randrange(99), **asked},
        True,
    )


def _chat(dice: random.Random, said: Any) -> tuple[str, dict[str, Any], bool]:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": said}}
    return "/v1/chat/completions", _messages(dice) | {"reasoning_effort": "none", "response_format": form}, True


def _calls(dice: random.Random, said: Any) -> tuple[str, dict[str, Any], bool]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": said}}]
    choice = dice.choice(("required", {"type": "function", "function": {"name": "f"}}))
    asked = {"reasoning_effort": "none", "tools": tools, "tool_choice": choice}
    return "/v1/chat/completions", _messages(dice) | asked, False


def _responses(dice: random.Random, said: Any) -> tuple[str, dict[str, Any], bool]:
    form = {"format": {"type": "json_schema", "name": "n", "schema": said}}
    return (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 50, "reasoning": {"effort": "none"}, "text": form},
        False,
    )


def _anthropic(dice: random.Random, said: Any) -> tuple[str, dict[str, Any], bool]:
    asked: dict[str, Any] = dice.choice(
        (
            {"output_config": {"format": {"type": "json_schema", "schema": said}}},
            {"tools": [{"name": "f", "input_schema": said}], "tool_choice": {"type": "any"}},
        )
    )
    return "/v1/messages", _messages(dice) | {"thinking": {"type": "disabled"}, **asked}, False


def _texts(dice: random.Random, _: Any) -> tuple[str, dict[str, Any], bool]:
    asked = dice.choice(
        (
            {"regex": dice.choice(PATTERNS)},
            {"grammar": dice.choice(LARK)},
            {"choice": dice.choices(("a", "b", "é", "", "a\nb", '"'), k=dice.randrange(4))},
            {"grammar": "".join(dice.choices(LARK, k=2))},
        )
    )
    return "/v1/completions", {"prompt": "x", "max_tokens": 50, "structured_outputs": asked}, False


def _messages(dice: random.Random) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": OUTPUT_TOKENS_MAX,
        "seed": dice.randrange(99),
    }


_PLACES: Final = (_completion, _completion, _chat, _calls, _responses, _anthropic, _texts)


# ---------------------------------------------------------------- answers


def fault(drawn: Drawn, status: int, answer: bytes) -> str:
    """What is wrong with an answer; empty: nothing."""
    if status not in (200, 400, 404):
        return f"status {status}: {answer[:300]!r}"
    told = json.loads(answer)
    if status != 200:
        return _clumsy(told["error"])
    if drawn.schema is None:
        return ""
    choice = told["choices"][0]
    if choice["finish_reason"] != "stop":
        return ""
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return _invalid(text, drawn.schema)


def _clumsy(error: dict[str, Any]) -> str:
    message = error["message"]
    if not message or RAW.search(message) or len(message) > 1_500:
        return f"unclear: {error}"
    if not error["param"]:
        return f"names no field: {error}"
    if AT.search(message) and not error["param"].endswith("grammar"):
        return f"names a place in a grammar of ours: {error}"
    return ""


def _invalid(text: str, by: Any) -> str:
    if LONG_NUMBER.search(text) or BACKTRACKS.search(json.dumps(by)):
        return ""  # the library has numbers of 64 bits; Python's expressions take for ever
    try:
        jsonschema.Draft202012Validator(by).validate(json.loads(text))
    except jsonschema.ValidationError as error:
        if str(error.validator).startswith("exclusive") and isinstance(error.validator_value, bool):
            return ""  # of draft 4, as the library takes it: jsonschema, which has draft 2020-12, compares with 1 or 0
        return f"invalid: {text[:200]} under {json.dumps(by)[:600]}: {error.message[:200]}"
    except ValueError as error:
        return f"no JSON: {text[:200]}: {error}"
    except Exception:  # a schema that jsonschema cannot use: another kind of regular expression, a reference
        return ""
    return ""
