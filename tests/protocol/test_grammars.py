"""Vocabularies and masks: the same for each kind of tokenizer."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from hisparse.http.apis.structured import StructuredOutputs, of_structured_outputs
from hisparse.http.models.grammars import plan_of
from protocol.errors import BadInput
from protocol.grammars import Mask, Matcher, SlowPushes, Vocabulary, kind_of, mask_bytes, nameable_tokens
from protocol.text import ByteTokenizer, JsonTokenizer
from tests.support.http_rig import EOS, byte_tokenizer_json

SIZE = 259


def allowed(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def test_masks_of_a_tokenizer_json_are_those_of_its_bytes() -> None:
    plain = Vocabulary(ByteTokenizer(), SIZE, (EOS, 258))
    read = Vocabulary(JsonTokenizer(byte_tokenizer_json()), SIZE, (EOS, 258))
    text = '{"é": [1]}'
    one, other = (Matcher(it, 'start: %json {"type": "object"}') for it in (plain, read))
    for byte in text.encode():
        assert allowed(one.mask()) == allowed(other.mask())
        assert byte in allowed(one.mask())
        for matcher in (one, other):
            matcher.push((byte,))
    assert allowed(one.mask()) == allowed(other.mask()) == [EOS, 258]


@pytest.mark.parametrize("size", [257, 256])
def test_tokens_that_the_model_lacks_are_in_no_mask(size: int) -> None:
    """A tokenizer.json with <bos>, <eos> and <pad> behind its bytes; with the size of 256 the mask ends at a word."""
    ends, tokenizer = (ord("!"),), JsonTokenizer(byte_tokenizer_json())
    plain, read = Vocabulary(ByteTokenizer(), size, ends), Vocabulary(tokenizer, size, ends)
    one, other = (Matcher(it, "start: /(.|\\n)*/").mask() for it in (plain, read))
    assert len(one) == len(other) == mask_bytes(size)
    assert allowed(one)[:256] == [it for it in allowed(other) if it < size] == allowed(other)
    assert nameable_tokens(tokenizer, size) == {text: it for text, it in (("<bos>", 256),) if it < size}


def test_slow_push_lets_other_threads_run() -> None:
    """The interpreter takes none from this thread here, which gives it away in pushes alone."""
    vocabulary = Vocabulary(ByteTokenizer(), SIZE, (EOS,))
    matcher, pushes = Matcher(vocabulary, 'start: a\na: a a | "x"'), SlowPushes(vocabulary)
    begun, seen, ended = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        begun.set()
        while not ended.is_set():
            time.sleep(0.0001)
            seen.set()

    matcher.push(b"x" * 150)
    watcher, before_s = threading.Thread(target=watch), sys.getswitchinterval()
    watcher.start()
    begun.wait()
    sys.setswitchinterval(3600.0)
    try:
        seen.clear()
        tokens = 0
        while tokens < 100 and not seen.is_set():
            matcher.push_slow(ord("x"), pushes)
            tokens += 1
        assert seen.is_set()
    finally:
        sys.setswitchinterval(before_s)
        ended.set()
        watcher.join()


def test_slow_pushes_are_those_of_push() -> None:
    vocabulary = Vocabulary(ByteTokenizer(), SIZE, (EOS,))
    one, other, pushes = (*(Matcher(vocabulary, "start: /a[bc]+d/") for _ in range(2)), SlowPushes(vocabulary))
    for byte in b"abcbd":
        one.push((byte,))
        other.push_slow(byte, pushes)
        assert allowed(one.mask()) == allowed(other.mask())
    with pytest.raises(BadInput, match="doesn't satisfy the grammar"):
        Matcher(vocabulary, "start: /a[bc]+d/").push_slow(ord("d"), pushes)


def test_mask_has_whole_words() -> None:
    """Also where the library's has one more: for a vocabulary of whole words."""
    for size, ends in ((288, 287), (289, 288)):
        mask = Matcher(Vocabulary(ByteTokenizer(), size, (ends,)), "start: /[^a]/").mask()
        assert len(mask) == mask_bytes(size) == 4 * -(-size // 32)


def test_special_token_is_none_of_its_letters() -> None:
    vocabulary = Vocabulary(JsonTokenizer(byte_tokenizer_json()), SIZE, (EOS,))
    matcher = Matcher(vocabulary, "start: /(.|\\n)*/ <[258]>")
    assert 258 in allowed(matcher.mask())
    assert 256 not in allowed(matcher.mask())


def test_copy_goes_on_by_itself() -> None:
    one = Matcher(Vocabulary(ByteTokenizer(), SIZE, (EOS,)), 'start: "a" ("b" | "c" "d")')
    one.push((ord("a"),))
    other = one.copy()
    one.push((ord("c"),))
    assert allowed(other.mask()) == [ord("b"), ord("c")]
    other.push((ord("b"),))
    assert (allowed(one.mask()), allowed(other.mask())) == ([ord("d")], [EOS])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a JSON schema", {"json": {"properties": {"a /\n(b)": {}}}}),
        ("a JSON schema", {"json_object": True}),
        ("a regular expression", {"regex": r"(a|/|\n|b)+\.c"}),
        ("a choice", {"choice": ["yes", 'no "|" (not) /yet/', "\n"]}),
        ("a grammar", {"grammar": 'start: "a" b\nb: /c/'}),
    ],
)
def test_kind_of_a_grammar_is_that_of_the_body_it_was_made_from(kind: str, said: dict[str, object]) -> None:
    plan = plan_of(of_structured_outputs(StructuredOutputs(**said)), {})  # type: ignore[arg-type]
    assert plan is not None
    assert kind_of(plan.source(plan.inner)) == kind


@pytest.mark.parametrize("grammar", ['start: /a/ "b" /c/', 'start: "a" b | "c"\nb: "d"', '{"grammars": []}', "", "x"])
def test_grammar_of_several_parts_is_of_no_simpler_kind(grammar: str) -> None:
    assert kind_of(grammar) == "a grammar"
