"""Conversations of agents by the official packages, drawn from a seed: what is sent is of their types, and sent back.

A conversation has one of four APIs and one to five turns. Each turn draws what the client asks (tools, choice,
thinking, whole or streamed, system messages in any place, results that are missing), what the model writes (reasoning,
text, calls, calls without an end of reasoning), and the form in which the answer is sent back: the package's object, a
dump of that, or a dictionary as routers write it. The last turn may hold one fault, which must be refused by the rule
of REFUSALS that declares it. Any other refusal, and any difference between what the model wrote and what the client
reads, is a finding.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import anthropic
import openai
from pydantic import BaseModel

from tests.support.agents_rig import PUBLISHED
from tests.support.fakes.fake_model import Said

MODEL: Final = "fake"
APIS: Final = ("chat", "messages", "beta", "responses")
FAMILIES: Final = ("glm-5", PUBLISHED)
ANTHROPIC_APIS: Final = ("messages", "beta")
TURNS_MAX: Final = 5
#: Chance of one fault in the last turn.
SPOILED: Final = 0.2
#: The place in every message of the client by which the model finds the turn that it answers.
MARK: Final = re.compile(r"\[\[(\d+):(\d+)]]")

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {}},
}
VALUES: Final[Sequence[dict[str, Any]]] = (
    {"city": "Paris", "days": 2},
    {"city": "", "days": -1},
    {"city": 'é 😀 "quoted" \\ and\nlines', "days": 10**25},
    {"city": "<b>", "more": json.loads("[" * 101 + "]" * 101)},
    {"more": {"a": [None, True, 1.5, {"b": ""}]}},
    {},
)
TEXTS: Final = ("Well.", "I look, é 😀.", "", "No:\n\n- one\n- two", "a < b > c & d")
NAMES: Final = ("look", "go_to")


class LookTool(BaseModel):
    """Arguments of a tool of `parse`."""

    city: str
    days: int


@dataclass(frozen=True)
class WrittenTurn:
    """A turn that the model writes. `closed` is whether its reasoning is ended by a tag."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    closed: bool
    reason: str

    @property
    def calls_count(self) -> bool:
        """True where its calls are calls: those within reasoning are, if the output ended by itself."""
        return bool(self.calls) and (self.closed or self.reason == "eos")


def draw_turn(dice: random.Random, tools: bool, plain: bool) -> WrittenTurn:
    """`plain`: arguments are those of LookTool."""
    reasoning = dice.choice(("", "They want it.", "Hm: é 😀\nand so on."))
    count = dice.choice((0, 0, 1, 1, 2, 3)) if tools else 0
    names = ("look",) if plain else NAMES
    values = VALUES[:1] if plain else VALUES
    calls = tuple((dice.choice(names), dice.choice(values)) for _ in range(count))
    closed = not (reasoning and calls and dice.random() < 0.4)
    reason = "eos" if plain or dice.random() < 0.85 else "length"
    return WrittenTurn(reasoning, dice.choice(TEXTS) if closed else "", calls, closed, reason)


def text_of(turn: WrittenTurn, family: str, prompt: str) -> str:
    """`turn` as a model of `family` writes it behind `prompt`."""
    calls = "".join(_tagged(call) for call in turn.calls) if family == "glm-5" else _dsml(turn.calls)
    said = f"{turn.text}{calls}"
    if not thinks(family, prompt):
        return said
    opening = "" if prompt.endswith("<think>") else "<think>"
    return f"{opening}{turn.reasoning}{'</think>' if turn.closed else ''}{said}"


def thinks(family: str, prompt: str) -> bool:
    """Return whether the model is to reason behind `prompt`."""
    return prompt.endswith("<think>") or (family == "glm-5" and not prompt.rstrip().endswith("</think>"))


def _tagged(call: tuple[str, dict[str, Any]]) -> str:
    name, arguments = call
    members = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else _json(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"\n<tool_call>{name}{members}</tool_call>"


def _dsml(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    if not calls:
        return ""
    lines = []
    for name, arguments in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            kind, text = ("true", value) if is_text else ("false", _json(value))
            lines.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return "\n\n<｜DSML｜function_calls>\n" + "\n".join(lines) + "\n</｜DSML｜function_calls>"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- what is refused


Spoil: TypeAlias = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Refusal:
    """A fault of a request, by the rule that refuses it. `words` are in the error's text."""

    rule: str
    apis: tuple[str, ...]
    words: str
    spoil: Spoil


def _add_message(message: dict[str, Any]) -> Spoil:
    return lambda ask: ask.setdefault("messages" if "messages" in ask else "input", []).append(message)


def _set(**fields: Any) -> Spoil:
    return lambda ask: ask.update(fields)


def _extra(**fields: Any) -> Spoil:
    return lambda ask: ask.setdefault("extra_body", {}).update(fields)


_URL: Final = {"url": "https://example.org/a.png"}
_IMAGE: Final = {"type": "image", "source": {"type": "url", **_URL}}
_RESULT: Final = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "x"}
REFUSALS: Final = (
    Refusal(
        "media are not read",
        ("chat",),
        "images are",
        _add_message({"role": "user", "content": [{"type": "image_url", "image_url": _URL}]}),
    ),
    Refusal("media are not read", ANTHROPIC_APIS, "images are", _add_message({"role": "user", "content": [_IMAGE]})),
    Refusal(
        "a turn of the assistant is not continued",
        ANTHROPIC_APIS,
        "cannot be continued",
        _add_message({"role": "assistant", "content": "So"}),
    ),
    Refusal("a field is known, or empty", APIS, "frobnicate", _extra(frobnicate=1)),
    Refusal(
        "a choice names a tool of the request",
        ("chat",),
        "is the name of no tool",
        _set(tool_choice={"type": "function", "function": {"name": "of_nobody"}}),
    ),
    Refusal("samples have a limit", ("chat",), "must be 1 to", _set(n=17)),
    Refusal("nothing is stored", ("responses",), "previous_response_id", _set(previous_response_id="resp_1")),
    Refusal(
        "a result follows its call",
        ("chat",),
        "result of no call",
        _add_message({"role": "tool", "tool_call_id": "call_of_nobody", "content": "x"}),
    ),
    Refusal("a result follows its call", ("responses",), "result of no call", _add_message(_RESULT)),
    Refusal(
        "tool uses are not cleared",
        ("beta",),
        "clear_tool_uses",
        _extra(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ),
    Refusal("numbers have a range", APIS, "temperature", _extra(temperature=-1.0)),
)


# ---------------------------------------------------------------- a conversation


@dataclass
class Findings:
    """Counts of what was tried, and findings. Threads share both."""

    wrong: list[str] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self._lock:
            self.tried[what] += 1


class DrawnModel:
    """The script of a FakeModel: it writes the turn that the marks in its prompt name."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._turns: dict[tuple[int, int], WrittenTurn] = {}
        self._needed: dict[tuple[int, int], tuple[str, ...]] = {}
        self.prompts: dict[tuple[int, int], str] = {}
        self.missing: list[str] = []

    def expect(self, place: tuple[int, int], turn: WrittenTurn, needed: Sequence[str]) -> None:
        """Write `turn` at `place`, behind a prompt that holds the texts `needed`."""
        self._turns[place] = turn
        self._needed[place] = tuple(needed)

    def __call__(self, prompt: str) -> Said:
        place = max((int(one), int(two)) for one, two in MARK.findall(prompt))
        self.prompts[place] = prompt[-40:]
        self.missing += [f"{place}: the prompt lacks {text!r}" for text in self._needed[place] if text not in prompt]
        turn = self._turns[place]
        return Said(text_of(turn, self._family, prompt), turn.reason)


@dataclass(frozen=True)
class Read:
    """An answer as its client reads it."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, Any], ...]
    ids: tuple[str, ...]
    ended: str
    sent_back: tuple[Any, ...]


@dataclass(frozen=True)
class Site:
    """A family's model, and both packages' clients of the front before it."""

    family: str
    model: DrawnModel
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


class DrawnConversation:
    """One conversation, from its first turn to its last. `run` blocks."""

    def __init__(self, number: int, seed: int, site: Site, found: Findings) -> None:
        self._number = number
        self._dice = random.Random(f"{seed}/{number}")
        self._site = site
        self._found = found
        self._plain = self._cut = False
        self._api = self._dice.choice(APIS)
        self._items: list[Any] = []
        self._needed: list[str] = []
        self._has_tools = self._dice.random() < 0.8

    def run(self) -> None:
        last = self._dice.randint(0, TURNS_MAX - 1)
        for turn in range(last + 1):
            fault = self._drawn_fault() if turn == last else None
            if not self._turn(turn, fault):
                return

    def _drawn_fault(self) -> Refusal | None:
        known = [it for it in REFUSALS if self._api in it.apis]
        if "is the name of no tool" in [it.words for it in known] and not self._has_tools:
            known = [it for it in known if it.words != "is the name of no tool"]
        return self._dice.choice(known) if self._dice.random() < SPOILED else None

    def _turn(self, number: int, fault: Refusal | None) -> bool:
        """Return whether the conversation goes on."""
        dice = self._dice
        place = (self._number, number)
        self._items += self._instructions(f"before {place}")
        self._items.append({"role": "user", "content": self._said(f"[[{place[0]}:{place[1]}]] ask {place}")})
        self._items += self._instructions(f"behind {place}")
        self._plain = self._api == "chat" and dice.random() < 0.2
        written = draw_turn(dice, self._has_tools, self._plain)
        self._cut = written.reason == "length"
        ask = self._ask()
        if fault is not None:
            fault.spoil(ask)
        self._site.model.expect(place, written, self._needed)
        self._found.count(f"{self._api} turns")
        try:
            read = getattr(self, f"_{self._api}")(ask)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            self._judge_refusal(place, fault, error)
            return False
        if fault is not None:
            self._wrong(place, f"was served, against the rule: {fault.rule}")
            return False
        self._judge(place, written, read)
        self._items += read.sent_back
        if read.text:
            self._needed.append(read.text)
        self._items += self._results(read, place)
        return True

    def _judge_refusal(self, place: tuple[int, int], fault: Refusal | None, error: Any) -> None:
        if fault is None or error.status_code != 400 or fault.words not in str(error):
            self._wrong(place, f"{error.status_code} {error} (fault: {fault.rule if fault else 'none'})")
        else:
            self._found.count(f"refused: {fault.rule}")

    def _judge(self, place: tuple[int, int], written: WrittenTurn, read: Read) -> None:
        reasons = thinks(self._site.family, self._site.model.prompts[place])
        calls = written.calls if written.calls_count or not reasons else ()
        if read.calls != tuple(calls):
            self._wrong(place, f"calls {read.calls} of {written}")
        if reasons and written.closed and read.reasoning.strip() != written.reasoning.strip():
            self._wrong(place, f"reasoning {read.reasoning!r} of {written}")
        if (written.closed or not reasons) and read.text.strip() != written.text.strip():
            self._wrong(place, f"text {read.text!r} of {written}")
        ends = "length" if written.reason == "length" else "calls" if calls else "stop"
        if read.ended != ends:
            self._wrong(place, f"ended by {read.ended}, not {ends}, of {written}")

    def _wrong(self, place: tuple[int, int], why: str) -> None:
        self._found.wrong.append(f"{self._site.family} {self._api} {place}: {why}"[:1_000])

    # ------------------------------------------------------------ what the client says

    def _said(self, text: str) -> Any:
        """`text` as a string, or as parts."""
        self._needed.append(text.rpartition("]] ")[2])
        kind = "input_text" if self._api == "responses" else "text"
        if self._dice.random() < 0.5:
            return text
        part: dict[str, Any] = {"type": kind, "text": text}
        if self._api in ANTHROPIC_APIS and self._dice.random() < 0.3:
            part["cache_control"] = {"type": "ephemeral"}
        return [part]

    def _instructions(self, text: str) -> Iterator[dict[str, Any]]:
        """A system message, now and then."""
        if self._dice.random() < 0.15:
            role = "system" if self._api in ANTHROPIC_APIS else self._dice.choice(("system", "developer"))
            yield {"role": role, "content": self._said(f"rule {text}")}

    def _results(self, read: Read, place: tuple[int, int]) -> list[Any]:
        """Results in any order; of some calls none, and with a system message between them."""
        known = [(name, call) for (name, _), call in zip(read.calls, read.ids, strict=True)]
        self._dice.shuffle(known)
        given = [call for _, call in known if self._dice.random() < 0.85]
        items: list[Any] = []
        for call in given:
            text = f"result of {call}"
            if self._api == "chat":
                items.append({"role": "tool", "tool_call_id": call, "content": self._said(text)})
            elif self._api == "responses":
                items.append({"type": "function_call_output", "call_id": call, "output": self._said(text)})
            else:
                items.append({"type": "tool_result", "tool_use_id": call, "content": self._said(text)})
        if self._api in ANTHROPIC_APIS and items:
            items = [{"role": "user", "content": items}]
        if items and self._dice.random() < 0.2:
            at = self._dice.randrange(len(items) + 1)
            items[at:at] = list(self._instructions(f"between {place}"))
        return items

    # ------------------------------------------------------------ what is asked

    def _ask(self) -> dict[str, Any]:
        dice = self._dice
        ask: dict[str, Any] = {"model": MODEL, "input" if self._api == "responses" else "messages": list(self._items)}
        if self._api in ANTHROPIC_APIS:
            ask["max_tokens"] = 2_000
            if dice.random() < 0.3:
                ask["system"] = "Be brief."
        if self._has_tools:
            ask["tools"] = self._tools()
            if dice.random() < 0.3:
                ask["tool_choice"] = {"type": "auto"} if self._api in ANTHROPIC_APIS else "auto"
        self._ask_to_think(ask)
        return ask

    def _ask_to_think(self, ask: dict[str, Any]) -> None:
        dice = self._dice
        if self._api == "chat" and dice.random() < 0.6:
            ask["reasoning_effort"] = dice.choice(("none", "low", "high"))
        elif self._api == "responses" and dice.random() < 0.6:
            ask["reasoning"] = {"effort": dice.choice(("none", "medium"))}
        elif self._api in ANTHROPIC_APIS and dice.random() < 0.6:
            kinds = {"type": "enabled", "budget_tokens": 1_024}, {"type": "disabled"}, {"type": "adaptive"}
            ask["thinking"] = dict(dice.choice(kinds))
        if self._api == "beta" and dice.random() < 0.5:
            keep = dice.choice(("all", {"type": "thinking_turns", "value": 1}))
            ask["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}

    def _tools(self) -> list[Any]:
        """Tools, in some requests with one that is no function."""
        others = self._dice.random() < 0.25
        if self._api in ANTHROPIC_APIS:
            tools: list[Any] = [{"name": name, "description": "Tells it.", "input_schema": SCHEMA} for name in NAMES]
            return tools + ([{"type": "web_search_20250305", "name": "web_search"}] if others else [])
        if self._api == "responses":
            flat = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES]
            return flat + ([{"type": "web_search"}, {"type": "custom", "name": "patch"}] if others else [])
        if self._plain:
            return [openai.pydantic_function_tool(LookTool, name="look")]
        made: list[Any] = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
        return made + ([{"type": "custom", "custom": {"name": "patch"}}] if others else [])

    # ------------------------------------------------------------ how each API is asked and read

    def _chat(self, ask: dict[str, Any]) -> Read:
        completions = self._site.openai.chat.completions
        if self._plain:
            choice: Any = completions.parse(**ask).choices[0]
        elif not self._has_tools and not self._cut:  # the package's stream takes strict tools alone, and no cut
            with completions.stream(**ask) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = completions.create(**ask).choices[0]
        message = choice.message
        calls = message.tool_calls or ()
        ended = {"tool_calls": "calls", "stop": "stop", "length": "length"}[choice.finish_reason]
        return Read(
            getattr(message, "reasoning_content", None) or "",
            message.content or "",
            tuple((call.function.name, json.loads(call.function.arguments)) for call in calls),
            tuple(call.id for call in calls),
            ended,
            (self._chat_again(message),),
        )

    def _chat_again(self, message: Any) -> Any:
        form = self._dice.choice(("object", "dump", "json", "router"))
        self._found.count(f"chat sent back: {form}")
        if form == "object":
            return message
        if form == "dump":
            return message.model_dump()
        if form == "json":
            return message.model_dump(mode="json", exclude_none=True)
        empty: dict[str, Any] = {
            "reasoning": None,
            "reasoning_details": [],
            "thinking_blocks": [],
            "provider_specific_fields": {},
        }
        told = message.model_dump(exclude={"parsed"}) | empty
        for call in told.get("tool_calls") or ():
            if self._dice.random() < 0.3:
                call["function"]["arguments"] = self._dice.choice(('{"city": "Par', "null", "", "[1]"))
        return told

    def _messages(self, ask: dict[str, Any]) -> Read:
        return self._asked_of(self._site.anthropic.messages, ask)

    def _beta(self, ask: dict[str, Any]) -> Read:
        return self._asked_of(self._site.anthropic.beta.messages, ask)

    def _asked_of(self, messages: Any, ask: dict[str, Any]) -> Read:
        if self._dice.random() < 0.4:
            with messages.stream(**ask) as stream:
                answer = stream.get_final_message()
        else:
            answer = messages.create(**ask)
        calls = [block for block in answer.content if block.type == "tool_use"]
        ended = {"tool_use": "calls", "end_turn": "stop", "max_tokens": "length"}[answer.stop_reason]
        form = self._dice.choice(("objects", "dumps"))
        self._found.count(f"{self._api} sent back: {form}")
        content = answer.content if form == "objects" else [block.model_dump() for block in answer.content]
        return Read(
            "".join(block.thinking for block in answer.content if block.type == "thinking"),
            "".join(block.text for block in answer.content if block.type == "text"),
            tuple((block.name, block.input) for block in calls),
            tuple(block.id for block in calls),
            ended,
            ({"role": "assistant", "content": content},) if content else (),
        )

    def _responses(self, ask: dict[str, Any]) -> Read:
        responses = self._site.openai.responses
        if not self._cut and self._dice.random() < 0.4:  # the package's stream raises for a cut
            with responses.stream(**ask) as stream:
                answer: Any = stream.get_final_response()
        else:
            answer = responses.create(**ask)
        calls = [item for item in answer.output if item.type == "function_call"]
        form = self._dice.choice(("objects", "dumps", "json"))
        self._found.count(f"responses sent back: {form}")
        forms: dict[str, Callable[[Any], Any]] = {
            "objects": lambda item: item,
            "dumps": lambda item: item.model_dump(),
            "json": lambda item: item.model_dump(mode="json", exclude_none=True),
        }
        cut = answer.status == "incomplete"
        return Read(
            "".join(part.text for item in answer.output if item.type == "reasoning" for part in item.content or ()),
            answer.output_text,
            tuple((item.name, json.loads(item.arguments)) for item in calls),
            tuple(item.call_id for item in calls),
            "length" if cut else "calls" if calls else "stop",
            tuple(forms[form](item) for item in answer.output),
        )
