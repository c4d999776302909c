"""A conversation as the prompt that the model was trained on: its own Jinja template, as transformers renders it. Pure.

The template comes with the model (ModelInfo.chat_template); the reader of the checkpoint bound the names of its special
tokens in its first line. Messages come from untrusted clients, so the template runs in Jinja's sandbox. Whatever it
raises is the messages' fault: templates refuse what they cannot render by raising. One that cannot be compiled is the
server's: workers refuse it at start.

The sandbox bounds what a template may touch, not how long it runs nor what it allocates: `tojson(indent=n)`, `x * n`
and a loop over the messages in a loop over the messages take what a client says. So the front renders in processes that
have limits (hisparse.http.models.renderers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hisparse.http.errors import ContextExceeded
from protocol.chat_templates import TemplateRefusal, compiled
from protocol.errors import BadInput


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    bytes_max: int,
    strftime_now: Callable[[str], str],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt, up to where the assistant speaks. `messages` and `tools` are as formats.conversation makes them.
    Raises BadInput, also for more than `bytes_max` characters; ConfigError for a template that cannot be compiled."""
    program = compiled(template)
    own: dict[str, Any] = {"messages": messages, "add_generation_prompt": True, "tools": tools, "documents": None}
    pieces: list[str] = []
    left = bytes_max
    try:
        for piece in program.generate(**dict(variables) | own | {"strftime_now": strftime_now}):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                break
    except TemplateRefusal as error:
        raise refused(f"the model's chat template refuses them: {error}", len(messages)) from error
    except Exception as error:  # a template may do anything with messages that it did not expect
        raise refused("the model's chat template cannot render them", len(messages)) from error
    if left < 0:
        text = f"become more than {bytes_max} characters, and no more fit the context"
        raise ContextExceeded(text, field="messages", value=_count(len(messages)), remedy="send fewer or shorter ones")
    return "".join(pieces)


def refused(why: str, messages: int) -> BadInput:
    remedy = "order roles as the template wants them, send fewer or shorter ones, or use /v1/completions"
    return BadInput(why, field="messages", value=_count(messages), remedy=remedy)


def _count(messages: int) -> str:
    return f"{messages} message{'' if messages == 1 else 's'}"
