"""Which format a served model has, by what comes with its checkpoint. Pure.

A chat template makes the prompts, and the first format in FORMATS whose `named` it names reads the replies. Without a
template a format with a program of its own makes them, where the tokenizer knows its `spoken`; else there are no chats.
A model family names its format by a row (worker/families/base.py: `chat`).

A checkpoint's program is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hisparse.http.models.formats import deepseek, glm, hermes, minimax
from hisparse.http.models.formats.conversation import Conversation, Tool
from hisparse.http.models.formats.lark import Rules
from hisparse.http.models.formats.replies import THINK, THINK_END, CallSyntax, ReplyPlan
from protocol.text import Tokenizer


@dataclass(frozen=True)
class ChatFormat:
    """`encode` makes a prompt, where no template does. `call_grammar` holds to calls of tools. `markers` are the texts
    that stand for structure, shown even where the tokenizer has them as special tokens. `named` are texts of a chat
    template, and `spoken` tokens of a repository without one, that show the format. `thinking` are the markers of
    reasoning; a reply without any may begin with the second (`may_begin_with_end`)."""

    syntax: CallSyntax | None
    reasons: bool
    markers: tuple[str, ...] = ()
    encode: Callable[[Conversation], str] | None = None
    call_grammar: Callable[[Rules, Sequence[tuple[Tool, str]], bool], str] | None = None
    named: tuple[str, ...] = ()
    spoken: tuple[str, ...] = ()
    thinking: tuple[str, str] = (THINK, THINK_END)
    may_begin_with_end: bool = False

    def plan(self, conversation: Conversation, prompt: str) -> ReplyPlan:
        """How to read the reply to `prompt`."""
        end, (think, think_end) = prompt.rstrip(), self.thinking
        return ReplyPlan(
            reasons=self.reasons,
            is_within=end.endswith(think),
            may_reason=self.reasons and not end.endswith(think_end) and not conversation.answers_at_once,
            syntax=self.syntax if conversation.tools else None,
            many=conversation.many,
            schemas={tool.name: tool.parameters for tool in conversation.tools},
            think=think,
            think_end=think_end,
            may_begin_with_end=self.may_begin_with_end and not end.endswith(think_end),
        )


_THINKING: Final = (THINK, THINK_END)
GLM: Final = ChatFormat(
    CallSyntax(glm.START, glm.read_call),
    True,
    (*_THINKING, *glm.MARKERS),
    call_grammar=glm.call_grammar,
    named=(glm.START, glm.KEY),
)
DSML: Final = ChatFormat(
    deepseek.SYNTAX,
    True,
    (*_THINKING, deepseek.DSML),
    deepseek.encode,
    deepseek.call_grammar,
    named=(deepseek.DSML,),
    spoken=(deepseek.USER, deepseek.ASSISTANT),
)
HERMES: Final = ChatFormat(
    CallSyntax(hermes.START, hermes.read_call),
    True,
    (*_THINKING, hermes.START, hermes.END),
    call_grammar=hermes.call_grammar,
    named=(hermes.START, hermes.ARGUMENTS),
)
MINIMAX: Final = ChatFormat(
    minimax.SYNTAX,
    True,
    (*minimax.THINKING, minimax.NAMESPACE, "<tool_call>", "</tool_call>"),
    call_grammar=minimax.call_grammar,
    named=(minimax.NAMESPACE,),
    thinking=minimax.THINKING,
    may_begin_with_end=True,
)
REASONING: Final = ChatFormat(None, True, _THINKING, named=(THINK_END,))
PLAIN: Final = ChatFormat(None, False)
#: By name, in the order in which templates are tried.
FORMATS: Final = {
    **{"minimax": MINIMAX, "glm": GLM, "dsml": DSML, "hermes": HERMES},
    **{"reasoning": REASONING, "plain": PLAIN},
}


def format_of(template: str, tokenizer: Tokenizer) -> ChatFormat | None:
    """None: the model has no chats."""
    if template:
        found = next(known for known in FORMATS.values() if all(text in template for text in known.named))
        return found if found.encode is None else replace(found, encode=None)
    return next((known for known in FORMATS.values() if known.spoken and all(map(tokenizer.knows, known.spoken))), None)
