"""A conversation as the prompt that the model was trained on: its own Jinja template, as transformers renders it. Pure.

The template comes with the model (ModelInfo.chat_template); names of its special tokens are bound in its first line by
whoever read the checkpoint. Messages come from anybody, so it runs in Jinja's sandbox, and whatever it raises is the
messages' fault: templates refuse what they cannot render by raising.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.errors import BadInput
from coordinator.http.bodies import ChatMessage

#: Compiled templates kept: one model is served at a time.
TEMPLATES_MAX: Final = 2


def render(
    template: str,
    messages: Sequence[ChatMessage],
    variables: Mapping[str, Any],
    strftime_now: Callable[[str], str],
    bytes_max: int,
) -> str:
    """The prompt, up to where the assistant speaks, `bytes_max` long at most. Raises BadInput, also when the model has
    no template."""
    if not template:
        raise BadInput(
            "the served model has no chat template",
            field="messages",
            value=f"{len(messages)} messages",
            remedy="use /v1/completions, or add chat_template.jinja to the checkpoint",
        )
    spoken = [{"role": message.role, "content": message.text} for message in messages]
    own: dict[str, Any] = {"messages": spoken, "add_generation_prompt": True, "tools": None, "documents": None}
    pieces: list[str] = []
    left = bytes_max
    try:
        for piece in _compiled(template).generate(**dict(variables) | own | {"strftime_now": strftime_now}):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                break
    except Exception as error:  # a template may do anything with messages that it did not expect
        raise BadInput(
            f"the model's chat template refuses them: {error}",
            field="messages",
            value=f"{len(messages)} messages",
            remedy="order roles as it wants them, or use /v1/completions",
        ) from error
    if left < 0:
        raise BadInput(
            f"become more than {bytes_max} characters, the most that the context could hold",
            field="messages",
            value=f"{len(messages)} messages",
            remedy="send fewer, or shorter ones",
        )
    return "".join(pieces)


@lru_cache(TEMPLATES_MAX)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _to_json(value: object, indent: int | None = None) -> str:
    """Without the HTML escapes of Jinja's own, which models have not seen."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
