"""Vocabularies and masks: the same for each kind of tokenizer."""

from __future__ import annotations

import numpy as np

from protocol.grammars import Mask, Matcher, Vocabulary, mask_bytes
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
