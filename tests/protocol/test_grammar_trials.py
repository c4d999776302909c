"""Trials of grammars in processes with limits: what they refuse, and what is known again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from protocol.children import Children
from protocol.errors import BadInput
from protocol.grammar_trials import KNOWN_MAX, MEMORY_BYTES_MAX, PassedGrammars, Trials
from protocol.grammars import Matcher, Vocabulary, check_grammar
from protocol.text import ByteTokenizer, JsonTokenizer
from tests.support.hostile_schemas import CHAIN
from tests.support.http_rig import byte_tokenizer_json
from tests.support.limits import HANG_LIMIT_S
from tests.support.walks import BYTES

LETTERS = "start: /[a-z]{3}/"
#: Added tokens that are not special, as published checkpoints have them, and the ids behind those of the bytes.
ADDED = {"<think>": 259, "[INST]": 260, "<>": 261}


class SpecialTokens(ByteTokenizer):
    @property
    def grammar_tokens(self) -> dict[str, int]:
        return {"<|call|>": 258}


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials(SpecialTokens(), 259, (257,), limit_s=HANG_LIMIT_S)
    yield made
    made.close()


@pytest.mark.parametrize("grammar", ["start: x", "start: /(a/", "start: <[9999]>"])
def test_trial_refuses_what_a_build_refuses_in_its_words(trials: Trials, grammar: str) -> None:
    with pytest.raises(BadInput) as built:
        check_grammar(BYTES, grammar)
    for _ in range(2):
        with pytest.raises(BadInput) as tried:
            trials.check(grammar)
        assert str(tried.value) == str(built.value)


@pytest.mark.parametrize(
    "way",
    ["/[a-c]{4}/", "/[a-c]*[d-f]/", '("a" | "b") ("c" | "d")', '%json {"type": "object", "maxProperties": 0} /[a-z]/'],
)
def test_grammar_that_opens_wide_behind_some_output_is_refused(trials: Trials, way: str) -> None:
    """Nothing of that shows in its first mask."""
    rules = [f'r{number}: "x" r{number} "y" | "z"' for number in range(1_000)]
    names = " | ".join(f"r{number}" for number in range(1_000))
    grammar = "\n".join([f"start: {way} wide", f"wide: {names}", *rules])
    Matcher(BYTES, grammar).mask()
    with pytest.raises(
        BadInput, match=r"Current row has 300\d items; max is 2000.*left-recursive if it's right-recursive \("
    ):
        trials.check(grammar)


def test_special_tokens_of_the_tokenizer_are_known(trials: Trials) -> None:
    trials.check("start: <|call|> /[a-z]/")


def test_token_that_the_model_lacks_cannot_be_named() -> None:
    trials = Trials(JsonTokenizer(byte_tokenizer_json()), 257, (ord("!"),), limit_s=HANG_LIMIT_S)
    trials.check("start: <bos> /[a-z]/")
    for grammar in ("start: <eos>", "start: <[257]>"):
        with pytest.raises(BadInput, match=r"unknown special token|Token range end too large"):
            trials.check(grammar)
    trials.close()


def test_grammars_name_the_same_tokens_in_a_trial_and_in_a_build() -> None:
    """llguidance takes added tokens in angle brackets for special."""
    library = json.loads(byte_tokenizer_json())
    words = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    library["added_tokens"] += [{"id": number, "content": text, **words} for text, number in ADDED.items()]
    tokenizer = JsonTokenizer(json.dumps(library).encode())
    built = Vocabulary(tokenizer, 262, (257,))
    assert not ADDED.keys() & tokenizer.special_ids.keys()
    named = {
        text for text in tokenizer.grammar_tokens if built.library.is_special_token(tokenizer.grammar_tokens[text])
    }
    assert named == {"<bos>", "<eos>", "<pad>", "<think>", "<>"}
    assert not built.library.is_special_token(ADDED["[INST]"])
    trials = Trials(tokenizer, 262, (257,), limit_s=HANG_LIMIT_S)
    for grammar in ("start: <think> /[a-z]{3}/", "start: <bos> /[a-z]/"):
        check_grammar(built, grammar)
        trials.check(grammar)
    trials.close()


def test_grammar_that_passed_is_not_tried_again(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    trials.check(LETTERS)
    with monkeypatch.context() as patched:
        patched.setattr(trials._children, "ask", lambda *_: pytest.fail("tried again"))
        trials.check(LETTERS)


def test_known_grammars_are_those_of_late() -> None:
    known = PassedGrammars()
    for number in range(KNOWN_MAX):
        known.remember(bytes((number,)), "")
    assert known.recall(b"\x00") == ""
    known.remember(b"another", "")
    assert (known.recall(b"\x00"), known.recall(b"\x01"), known.recall(b"another")) == ("", None, "")


def test_trial_without_end_is_refused_and_the_next_has_a_new_process() -> None:
    trials = Trials(ByteTokenizer(), 259, (257,), limit_s=HANG_LIMIT_S)
    trials._children._command[-1] = str(MEMORY_BYTES_MAX // 4)  # which it reaches soon on any machine
    with pytest.raises(BadInput, match="to build"):
        trials.check(CHAIN)
    trials.check(LETTERS)
    trials.close()


def test_processes_take_no_address_space_for_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of OpenBLAS takes 41 MiB of it."""
    started = list[dict[str, str]]()
    popen = subprocess.Popen

    def record(command: list[str], **said: object) -> subprocess.Popen[bytes]:
        started.append(said["env"])  # type: ignore[arg-type]
        return popen([sys.executable, "-c", ""], **said)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", record)
    assert Children("none", HANG_LIMIT_S, MEMORY_BYTES_MAX, 0).ask(b"") is None
    assert started[0]["OPENBLAS_NUM_THREADS"] == "1"


class Echoes(Children):
    """Processes that reply with what they are sent."""

    def __init__(self) -> None:
        super().__init__("none", HANG_LIMIT_S, MEMORY_BYTES_MAX, 1024)
        self._command[1:3] = ["-c", "from protocol.children import serve; serve(lambda data: data, frames=1)"]
        self.started = 0

    def _start(self) -> subprocess.Popen[bytes]:
        self.started += 1
        return super()._start()


@pytest.fixture
def echoes() -> Iterator[Echoes]:
    made = Echoes()
    yield made
    made.close()


def test_process_that_ended_while_idle_is_replaced(echoes: Echoes) -> None:
    assert echoes.ask(b"one") == echoes.ask(b"one") == b"one"
    assert echoes.started == 1
    (idle,) = echoes._idle
    idle.kill()
    idle.wait()
    assert echoes.ask(b"other") == b"other"
    assert echoes.started == 2


def test_threads_never_share_a_process(echoes: Echoes) -> None:
    """Another thread takes the idle process between a look at the list and the pop."""

    class Filled(list[subprocess.Popen[bytes]]):
        def __bool__(self) -> bool:
            return True

        def __len__(self) -> int:
            return 1

    echoes._idle = Filled()
    assert echoes.ask(b"one") == b"one"
    assert echoes.started == 1
