"""Which format a served model has, by what comes with its checkpoint. Pure.

| chat template                    | format                                                          |
|----------------------------------|-----------------------------------------------------------------|
| names <tool_call> and <arg_key>  | GLM: prompts by the template, calls as glm.py reads them         |
| names ｜DSML｜                    | DeepSeek-V3.2's calls, prompts by the template                   |
| names none of these              | no calls; reasoning where it names </think>                     |
| none, but DeepSeek's tokens      | DeepSeek-V3.2: prompts by deepseek.py                            |
| none, and no such tokens         | no chats                                                        |

A checkpoint's program is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hisparse.http.models.formats import deepseek, glm
from hisparse.http.models.formats.conversation import Conversation, Tool
from hisparse.http.models.formats.lark import Rules
from hisparse.http.models.formats.replies import THINK, THINK_END, CallSyntax, ReplyPlan
from protocol.text import Tokenizer


@dataclass(frozen=True)
class ChatFormat:
    """`encode` makes a prompt, where no template does. `call_grammar` holds to calls of tools. `markers` are the texts
    that stand for structure, shown even where the tokenizer has them as special tokens."""

    syntax: CallSyntax | None
    reasons: bool
    markers: tuple[str, ...] = ()
    encode: Callable[[Conversation], str] | None = None
    call_grammar: Callable[[Rules, Sequence[tuple[Tool, str]], bool], str] | None = None

    def plan(self, conversation: Conversation, prompt: str) -> ReplyPlan:
        """How to read the reply to `prompt`."""
        end = prompt.rstrip()
        return ReplyPlan(
            reasons=self.reasons,
            is_within=end.endswith(THINK),
            may_reason=self.reasons and not end.endswith(THINK_END) and not conversation.answers_at_once,
            syntax=self.syntax if conversation.tools else None,
            many=conversation.many,
            schemas={tool.name: tool.parameters for tool in conversation.tools},
        )


_THINKING: Final = (THINK, THINK_END)
GLM: Final = ChatFormat(CallSyntax(glm.START, glm.read_call), True, (*_THINKING, *glm.MARKERS), None, glm.call_grammar)
DEEPSEEK_CALLS: Final = ChatFormat(deepseek.SYNTAX, True, (*_THINKING, deepseek.DSML), None, deepseek.call_grammar)
DEEPSEEK: Final = ChatFormat(deepseek.SYNTAX, True, (*_THINKING, deepseek.DSML), deepseek.encode, deepseek.call_grammar)
REASONING: Final = ChatFormat(None, True, _THINKING)
PLAIN: Final = ChatFormat(None, False)


def format_of(template: str, tokenizer: Tokenizer) -> ChatFormat | None:
    """None: the model has no chats."""
    if not template:
        return DEEPSEEK if all(map(tokenizer.knows, (deepseek.USER, deepseek.ASSISTANT))) else None
    if glm.START in template and glm.KEY in template:
        return GLM
    if deepseek.DSML in template:
        return DEEPSEEK_CALLS
    return REASONING if THINK_END in template else PLAIN
