"""Chat templates compiled as the transformers library compiles them: its extensions, its filter, its sandbox. Pure.

Workers compile the template of their checkpoint at start, so that a faulty one is refused there. The HTTP front
renders. It needs jinja2, which the extras `worker` and `http` bring.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import ConfigError

#: Compiled templates kept: one model is served at a time.
TEMPLATES_MAX: Final = 2
REMEDY: Final = "correct it in the checkpoint, and start the workers again"


class TemplateRefusal(jinja2.TemplateError):
    """A template says in its author's words why it takes no such messages."""


class GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks, for training, what the assistant says. Renders what is in
    it, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(TEMPLATES_MAX)
def compiled(template: str) -> jinja2.Template:
    """The template as a program. Raises ConfigError, which names the line where Jinja does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise _uncompiled(f"line {error.lineno}: {error.message}") from error
    except Exception as error:  # of Python, for what Jinja made of it
        raise _uncompiled(str(error)) from error


def _uncompiled(why: str) -> ConfigError:
    return ConfigError(f"the chat template cannot be compiled: {why}", remedy=REMEDY)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does, without the HTML escapes of Jinja's own, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)
