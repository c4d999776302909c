"""From a body to requests of the coordinator: one for each sample of each prompt. Pure.

Ids are the client's (header Idempotency-Key) or made by the front. One sample has the id itself, several have `ID-0`,
`ID-1`, ... A repeated body under the client's own id makes the same requests, to the last field, so that the
coordinator knows them again; that is why a missing seed is drawn from the id and not from a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import numpy as np

from basics.request_checks import check_draft_tokens, check_orders, check_priority, check_salt, check_token_ids
from hisparse.http.apis.body import CHOICES_MAX
from hisparse.http.apis.generation import Generation
from hisparse.http.apis.prompts import prompts_of, text_bytes_max, text_ids
from hisparse.http.errors import ContextExceeded
from hisparse.http.models.formats.conversation import Conversation, template_messages, template_tools
from hisparse.http.models.formats.known import ChatFormat, format_of
from hisparse.http.models.formats.replies import PLAIN, ReplyPlan
from hisparse.http.models.grammars import GrammarPlan, plan_of
from hisparse.http.server.identities import scoped_id
from protocol.arrays import Int32Array
from protocol.errors import BadInput, ConfigError, NotFound
from protocol.grammars import nameable_tokens
from protocol.messages import (
    DRAFT_TOKENS_MAX,
    LOGPROBS_OF_ANSWER_MAX,
    NO_LOGPROBS,
    PRIORITY_MAX,
    ModelInfo,
    Sampling,
)
from protocol.text import Tokenizer

#: As OpenAI has it for /v1/completions.
COMPLETION_TOKENS_DEFAULT: Final = 16
#: Of a chat, unless the context leaves less. The whole context, as OpenAI has it, would reserve memory for it.
CHAT_TOKENS_DEFAULT: Final = 4_096
TEMPERATURE_DEFAULT: Final = 1.0
SEED_BITS: Final = 63
#: Of all prompts of a body that are sent back before their outputs: they are kept until then.
ECHO_CHARS_MAX: Final = 1024 * 1024
#: Template, messages, variables, the most characters, and tools, as in hisparse.http.models.templates.
Render = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any], int, Sequence[Mapping[str, Any]] | None], str]


NO_PROMPT: Final[Int32Array] = np.empty(0, np.int32)


@dataclass(frozen=True)
class SampleAsk:
    """One request of the coordinator. Samples of one prompt share its array, whose digest is in the fingerprint."""

    request_id: str
    prompt: Int32Array
    sampling: Sampling
    priority: int
    prompt_digest: bytes
    cache_salt: str = ""
    draft_tokens: int = DRAFT_TOKENS_MAX

    @property
    def fingerprint(self) -> tuple[bytes, Sampling, int, str]:
        return self.prompt_digest, self.sampling, self.priority, self.cache_salt

    def same_as(self, other: SampleAsk) -> bool:
        return self.fingerprint == other.fingerprint

    def without_prompt(self) -> SampleAsk:
        """Enough to compare it with others: the prompt may be megabytes, and the coordinator has it."""
        return replace(self, prompt=NO_PROMPT)


@dataclass(frozen=True)
class Ask:
    """A body, checked and tokenized. `id` is what its client calls it. `prompt_tokens` counts each prompt once, however
    many samples it has. `plan` says what the outputs are read as, `shown` which special tokens have text in them.
    `echoes`, of each choice, go before its text; none: nothing does. `stops` are the stop strings, `settings` what the
    answer repeats of the body. `form` is what the outputs are held to, until its grammar is built."""

    id: str
    model: str
    choices: tuple[SampleAsk, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool
    plan: ReplyPlan = PLAIN
    shown: tuple[str, ...] = ()
    echoes: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    form: GrammarPlan | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.choices[0].sampling.logprobs != NO_LOGPROBS

    def held_to(self, grammar: str) -> Ask:
        """With the grammar that was built of its `form`."""
        choices = (replace(it, sampling=msgspec.structs.replace(it.sampling, grammar=grammar)) for it in self.choices)
        return replace(self, choices=tuple(choices), form=None)

    def without_prompts(self) -> Ask:
        return replace(self, choices=tuple(choice.without_prompt() for choice in self.choices))


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as token ids, and how to read the reply."""

    ids: Int32Array
    plan: ReplyPlan
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Served:
    """What the front knows of the served model."""

    model: ModelInfo
    tokenizer: Tokenizer


def ask_of(
    wanted: Generation,
    served: Served,
    ask_id: str,
    render: Render,
    scope: str = "",
    priority_max: int = PRIORITY_MAX,
) -> Ask:
    """Raises BadInput, or NotFound for another model. Takes as long as tokenizing the prompts does. The grammar of the
    Ask's `form` is yet to be built: see `Ask.held_to`.

    `scope` keeps an id that a client chose apart from those of other owners at the coordinator. `priority_max` is the
    limit of the client's key.
    """
    check_priority(wanted.priority, priority_max, "the file of API keys")
    check_salt(wanted.cache_salt)
    check_draft_tokens(_first(wanted.draft_tokens, DRAFT_TOKENS_MAX))
    check_model(wanted.model, served.model)
    plan: ReplyPlan = PLAIN
    shown: tuple[str, ...] = ()
    if wanted.conversation is not None:
        chat = chat_prompt(wanted.conversation, served, render, wanted.name_of("prompt"))
        prompts, plan, shown = [chat.ids], chat.plan, chat.shown
        room = max(1, served.model.context_max_tokens - chat.ids.size)
        limit = _first(wanted.max_tokens, min(CHAT_TOKENS_DEFAULT, room))
        form = chat_plan(wanted, wanted.conversation, served, plan)
    else:
        prompts = list(prompts_of(wanted.prompt, served.tokenizer, served.model))
        limit = _first(wanted.max_tokens, COMPLETION_TOKENS_DEFAULT)
        form = plan_of(wanted.structure, nameable_tokens(served.tokenizer, served.model.vocab_size))
    echoes = echoes_of(prompts, wanted.prompt, served.tokenizer) if wanted.echo else []
    samples = _first(wanted.n, 1)
    if form is not None:
        form.check_size()
    grammar = "" if form is None else form.lark
    return Ask(
        id=ask_id,
        model=served.model.name,
        choices=tuple(_choices(wanted, prompts, limit, (ask_id, scope), served.model, grammar)),
        prompt_tokens=sum(prompt.size for prompt in prompts),
        stream=wanted.stream,
        include_usage=wanted.include_usage,
        usage_in_every_chunk=wanted.usage_in_every_chunk,
        plan=plan,
        shown=shown,
        echoes=tuple(echo for echo in echoes for _ in range(samples)),
        stops=wanted.stop,
        settings=wanted.settings,
        form=form,
    )


def check_model(name: str | None, model: ModelInfo) -> None:
    """Raises NotFound for another model than the served one."""
    if name not in (None, model.name):
        raise NotFound("is not served here", field="model", value=name, remedy=f"use {model.name}")


def _choices(
    wanted: Generation,
    prompts: Sequence[Int32Array],
    limit: int,
    named: tuple[str, str],
    model: ModelInfo,
    grammar: str,
) -> Iterator[SampleAsk]:
    """Checked as the coordinator does: what it would refuse is not sent to it. `named`: id and scope."""
    ask_id, scope = named
    samples = _first(wanted.n, 1)
    total = samples * len(prompts)
    if total > CHOICES_MAX:
        text = f"{samples} samples of {len(prompts)} prompts make {total}, and {CHOICES_MAX} are accepted"
        raise BadInput(text, field="n", value=samples, remedy=f"use {CHOICES_MAX // len(prompts)} or less")
    digests = [hashlib.sha256(prompt.tobytes()).digest() for prompt in prompts]
    for index in range(total):
        request_id = scoped_id(ask_id if total == 1 else f"{ask_id}-{index}", scope)
        which = index // samples
        sampling = Sampling(
            max_tokens=limit,
            temperature=_first(wanted.temperature, TEMPERATURE_DEFAULT),
            top_p=_first(wanted.top_p, 1.0),
            seed=_seed(wanted.seed, index % samples, request_id),
            stop=wanted.stop,
            ignore_eos=wanted.ignore_eos,
            grammar=grammar,
            **wanted.adjustments,
        )
        _check_orders(sampling, wanted)
        _check_logprobs(sampling, total, wanted)
        check_token_ids(sampling, model)
        _check_length(prompts[which].size, sampling.max_tokens, wanted, model)
        yield SampleAsk(
            *(request_id, prompts[which], sampling, wanted.priority, digests[which], wanted.cache_salt),
            _first(wanted.draft_tokens, DRAFT_TOKENS_MAX),
        )


def _check_orders(sampling: Sampling, wanted: Generation) -> None:
    """By the coordinator's rules, named as the client named its fields."""
    try:
        check_orders(sampling, wanted.priority)
    except BadInput as error:
        field = wanted.name_of(error.field)
        raise BadInput(error.message, field=field, value=error.value, remedy=error.remedy) from error


def _check_logprobs(sampling: Sampling, samples: int, wanted: Generation) -> None:
    """Raises BadInput for more than an answer may hold."""
    entries = samples * sampling.max_tokens * (1 + sampling.logprobs)
    if entries > LOGPROBS_OF_ANSWER_MAX:
        limit, field = wanted.name_of("max_tokens"), wanted.name_of("logprobs")
        text = (
            f"{samples} x {sampling.max_tokens} tokens with {1 + sampling.logprobs} log-probabilities each make "
            f"{entries}, and {LOGPROBS_OF_ANSWER_MAX} are accepted"
        )
        most = LOGPROBS_OF_ANSWER_MAX // (samples * (1 + sampling.logprobs))
        raise BadInput(text, field=field, value=sampling.logprobs, remedy=f"set {limit} to {most} or less")


def _check_length(prompt_tokens: int, max_tokens: int, wanted: Generation, model: ModelInfo) -> None:
    """Raises ContextExceeded with a remedy that works."""
    room = model.context_max_tokens - prompt_tokens
    if max_tokens <= room:
        return
    limit, prompt = wanted.name_of("max_tokens"), wanted.name_of("prompt")
    text = f"the context of {model.name} holds {model.context_max_tokens} tokens, the prompt has {prompt_tokens}"
    if room < 1:
        raise ContextExceeded(text, field=prompt, remedy="shorten it")
    remedy = f"lower {limit} to {room}, or shorten {prompt}"
    raise ContextExceeded(f"{text}, and {limit} is {max_tokens}", field=prompt, remedy=remedy)


def _seed(seed: int | None, sample: int, request_id: str) -> int:
    """Samples of one prompt differ; so do requests that name no seed."""
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")
    return (seed + sample) % (1 << SEED_BITS)


def chat_prompt(conversation: Conversation, served: Served, render: Render, field: str) -> ChatPrompt:
    """`field` is where its turns are. The format writes the special tokens itself. Raises BadInput or ConfigError."""
    model, tokenizer = served.model, served.tokenizer
    known = format_of(model.chat_template, tokenizer)
    count = f"{len(conversation.turns)} messages"
    if known is None:
        remedy = "use POST /v1/completions"
        raise BadInput("the served model has no chat template", field=field, value=count, remedy=remedy)
    if len(conversation.turns) > model.context_max_tokens:
        text = f"more than the {model.context_max_tokens} tokens of the context"
        raise ContextExceeded(text, field=field, value=count, remedy="send fewer")
    if conversation.tools and known.syntax is None:
        text = "the served model's chat template has no tool calls that can be read"
        raise BadInput(text, field="tools", value=f"{len(conversation.tools)} tools", remedy="leave tools out")
    try:
        text = _encoded(known, conversation, served, render)
    except ConfigError:
        raise
    except BadInput as error:
        raise type(error)(error.message, field=field, value=error.value, remedy=error.remedy) from error
    ids = text_ids(text, tokenizer, model, special=False, field=field)
    return ChatPrompt(ids, known.plan(conversation, text), known.markers)


def chat_plan(wanted: Generation, conversation: Conversation, served: Served, reply: ReplyPlan) -> GrammarPlan | None:
    """What the reply is held to; None: to nothing. Raises BadInput."""
    if wanted.structure is None and not conversation.must_call:
        return None
    known = format_of(served.model.chat_template, served.tokenizer)
    special = nameable_tokens(served.tokenizer, served.model.vocab_size)
    return plan_of(wanted.structure, special, conversation, known, reply, conversation.parameters)


def _encoded(known: ChatFormat, conversation: Conversation, served: Served, render: Render) -> str:
    """Raises BadInput."""
    if known.encode is not None:
        return known.encode(conversation)
    template = served.model.chat_template
    turns, tools = template_messages(conversation.turns, template), template_tools(conversation.tools)
    bytes_max = text_bytes_max(served.tokenizer, served.model)
    return render(template, turns, conversation.all_variables, bytes_max, tools)


def echoes_of(prompts: Sequence[Int32Array], said: bytes, tokenizer: Tokenizer) -> list[str]:
    """The text of each prompt: as it was sent, or what its token ids stand for. Raises BadInput past ECHO_CHARS_MAX."""
    data = said.lstrip()
    inner = data[1:].lstrip()[:1] if data.startswith(b"[") else b""
    if data.startswith(b'"'):
        texts: list[str] = [msgspec.json.decode(data)]
    elif inner == b'"':
        texts = msgspec.json.decode(data)
    else:
        texts = [text_of(prompt.tolist(), tokenizer) for prompt in prompts]
    chars = sum(map(len, texts))
    if chars > ECHO_CHARS_MAX:
        text = f"prompts of more than {ECHO_CHARS_MAX} characters are not sent back"
        raise BadInput(text, field="echo", value=f"{chars} characters", remedy="leave echo out")
    return texts


def text_of(ids: Sequence[int], tokenizer: Tokenizer, shown: Collection[str] = ()) -> str:
    """Special tokens have none, except `shown`."""
    detokenizer = tokenizer.detokenizer(shown)
    return detokenizer.push(ids) + detokenizer.finish()


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
