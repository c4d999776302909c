"""Text as it comes, and stop strings, against a search of the full text. No cut into tokens may matter."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.text import (
    PENDING_TOKENS_MAX,
    ByteTokenizer,
    JsonTokenizer,
    StopMatcher,
    StopState,
    Tokenizer,
    make_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer_json() -> bytes:
    """A byte-level BPE tokenizer without merges: each byte is one token, so any character may be split."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    return library.to_str().encode()


class FakePieces:
    """A tokenizer whose token i is the i-th piece of one output: any cut of any bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(self._pieces[token] for token in tokens))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def decoded(pieces: Sequence[bytes], tokens: int) -> str:
    """What a client makes of the first `tokens` tokens when no more come."""
    detokenizer = FakePieces(pieces)
    return detokenizer.push(range(tokens)) + detokenizer.finish()


def longest_open(pieces: Sequence[bytes]) -> int:
    """The most tokens in a row after each of which a character is incomplete."""
    detokenizer, longest, here = FakePieces(pieces), 0, 0
    for token in range(len(pieces)):
        detokenizer.push((token,))
        here = here + 1 if detokenizer.pending else 0
        longest = max(longest, here)
    return longest


def naive_cut(text: str, stops: Sequence[str], kept: int = 0) -> int | None:
    """Return where the output ends: before the stop string completed first behind `kept` characters, the longest of
    those that end together."""
    for end in range(kept + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found))
    return None


pieces_of = st.lists(
    st.one_of(
        st.text("abé€🦀", min_size=1, max_size=3).map(str.encode),
        st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\xa6\x80", b"\xff", b"a", b"b", b""]),
    ),
    max_size=24,
)
stops_of = st.lists(st.text("abé€🦀", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces_of, stops_of, st.integers(1, 4))
@settings(max_examples=400)
def test_stops_are_those_of_the_full_text(pieces: list[bytes], stops: list[str], step: int) -> None:
    assume(longest_open(pieces) < PENDING_TOKENS_MAX)  # a character that stays open is published as it is
    matcher, before = StopMatcher(stops, FakePieces(pieces)), StopState(0)
    text = FakePieces(pieces).push(range(len(pieces)))  # decided text; an open end is not part of it
    cut = naive_cut(text, stops)
    for start in range(0, len(pieces), step):
        state = matcher.push(range(start, min(start + step, len(pieces))))
        assert before.publishable <= state.publishable <= start + step
        if not before.finished:
            before = state
        assert state == before  # nothing changes once finished
    assert before.finished == (cut is not None)
    if cut is None:
        assert text.startswith(decoded(pieces, before.publishable))
        assert before.tail_text == ""
    else:
        assert decoded(pieces, before.publishable) + before.tail_text == text[:cut]


@given(pieces_of, stops_of)
@example([b"\xe2"] * PENDING_TOKENS_MAX, ["a"])  # a character that stays open is published as it is
@settings(max_examples=200)
def test_text_is_held_only_for_a_possible_stop_string(pieces: list[bytes], stops: list[str]) -> None:
    matcher, detokenizer = StopMatcher(stops, FakePieces(pieces)), FakePieces(pieces)
    text, borders = "", [(0, 0)]
    for token in range(len(pieces)):
        text += detokenizer.push([token])
        if not detokenizer.pending or token + 1 - borders[-1][1] >= PENDING_TOKENS_MAX:
            borders.append((len(text), token + 1))
        state = matcher.push([token])
        if state.finished:
            return
        held = max((n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in stops)), default=0)
        assert state.publishable == max(token for length, token in borders if length <= len(text) - held)


@given(st.text("abé€🦀", max_size=20), stops_of)
@settings(max_examples=100)
def test_single_byte_tokens_stop_at_the_same_text(text: str, stops: list[str]) -> None:
    ids = ByteTokenizer().encode(text)
    state = StopMatcher(stops, ByteTokenizer().detokenizer()).push(ids)
    cut = naive_cut(text, stops)
    assert state.finished == (cut is not None)
    if cut is not None:
        assert bytes(ids[: state.publishable]).decode() + state.tail_text == text[:cut]


@given(pieces_of, stops_of, st.integers(1, 12))
@settings(max_examples=400)
def test_stops_count_behind_the_first_tokens(pieces: list[bytes], stops: list[str], least: int) -> None:
    """From the first border at or behind `least` tokens on. Its text is kept, and nothing before it is held."""
    assume(longest_open(pieces) < PENDING_TOKENS_MAX)
    detokenizer, text, borders = FakePieces(pieces), "", [(0, 0)]
    for token in range(len(pieces)):
        text += detokenizer.push([token])
        if not detokenizer.pending:
            borders.append((token + 1, len(text)))
    tokens, kept = next((border for border in borders if border[0] >= least), (len(pieces) + 1, len(text)))
    cut = naive_cut(text, stops, kept)
    matcher, published = StopMatcher(stops, FakePieces(pieces), least), 0
    for token in range(len(pieces)):
        state = matcher.push([token])
        assert published <= state.publishable
        published = state.publishable
        if not state.finished and token < tokens:
            assert published == max(count for count, _ in borders if count <= token + 1)
    state = matcher.push([])
    assert state.finished == (cut is not None)
    if cut is not None:
        assert state.publishable >= least
        assert decoded(pieces, state.publishable) + state.tail_text == text[: max(cut, kept)]


@pytest.mark.parametrize(
    ("text", "least", "left"),
    [
        ("A" * 40, 20, "A" * 20),
        ("A" * 40, 0, ""),
        ("AAAbAAAb", 3, "AAAb"),  # completed by the last of them: it does not count
        ("AAAbAAAb", 2, "AA"),  # begun among them: cut behind them
        ("bbAAAb", 2, "bb"),
        ("bbAAAb", 6, None),
        ("€AAA", 1, "€"),  # a character of three tokens is whole
    ],
)
def test_first_tokens_are_kept_before_a_stop_text(text: str, least: int, left: str | None) -> None:
    ids = text.encode()
    state = StopMatcher(["AAA"], ByteTokenizer().detokenizer(), least).push(ids)
    assert state.finished == (left is not None)
    assert ids[: state.publishable].decode() + state.tail_text == (text if left is None else left)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher((), ByteTokenizer().detokenizer()).push(b"a\xe2") == StopState(2)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""], ByteTokenizer().detokenizer())


def test_tokens_without_text_are_held_for_bounded_time() -> None:
    """I8: a tokenizer that never decides must not hold an output for ever."""

    class FakeSilent:
        pending = True

        def push(self, tokens: Sequence[int]) -> str:
            return ""

        def finish(self) -> str:
            return ""

    published = [
        matcher.push([token]).publishable for matcher in [StopMatcher(["x"], FakeSilent())] for token in range(40)
    ]
    assert all(token + 1 - count < PENDING_TOKENS_MAX for token, count in enumerate(published))


def test_memory_is_bounded_by_the_stop_strings() -> None:
    for least in (0, 5_000):
        matcher = StopMatcher(["abcd"], ByteTokenizer().detokenizer(), least)
        for _ in range(2_000):
            matcher.push(b"xyzabc")
            assert len(matcher._window) <= 4
            assert len(matcher._borders) <= 5


# ---------------------------------------------------------------- tokenizers


def streamed(tokenizer: Tokenizer, ids: list[int], step: int) -> str:
    stream = tokenizer.detokenizer()
    return "".join(stream.push(ids[i : i + step]) for i in range(0, len(ids), step)) + stream.finish()


@given(st.text(), st.integers(1, 7))
def test_bytes_decode_alike_under_any_split(text: str, step: int) -> None:
    assert streamed(ByteTokenizer(), ByteTokenizer().encode(text), step) == text


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_a_json_tokenizer_streams_whole_characters(tokenizer_json: bytes, step: int) -> None:
    text = "naïve café – 東京 🦀 done"
    tokenizer = make_tokenizer("json", tokenizer_json)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert streamed(tokenizer, ids, step) == text


def test_a_json_tokenizer_stops_inside_a_character_run(tokenizer_json: bytes) -> None:
    tokenizer = JsonTokenizer(tokenizer_json)
    ids = tokenizer.encode("ab 東京 🦀 done")
    state = StopMatcher(["京 🦀"], tokenizer.detokenizer()).push(ids)
    assert state.finished
    assert streamed(tokenizer, ids[: state.publishable], 1) + state.tail_text == "ab 東"


def test_no_partial_character_is_shown(tokenizer_json: bytes) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(tokenizer_json)):
        stream = tokenizer.detokenizer()
        shown = [(stream.push([token]), stream.pending) for token in tokenizer.encode("é")]
        assert shown == [("", True), ("é", False)]


def test_partial_character_is_shown_at_the_end(tokenizer_json: bytes) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(tokenizer_json)):
        assert streamed(tokenizer, tokenizer.encode("aé")[:-1], 1) == "a\ufffd"


def test_special_ids_have_no_text(tokenizer_json: bytes) -> None:
    assert streamed(ByteTokenizer(), [104, 256, 105, 999], 1) == "hi"
    library = JsonTokenizer(tokenizer_json)
    assert streamed(library, [*library.encode("hi"), 256], 1) == "hi"


def test_unreadable_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kind"):
        make_tokenizer("sentencepiece")
    with pytest.raises(ConfigError, match="unreadable"):
        make_tokenizer("json", b"{}")


@given(st.text())
def test_bytes_of_tokens_are_the_text_that_they_are_cut_from(tokenizer_json: bytes, text: str) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(tokenizer_json)):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_special_tokens_have_their_own_text_and_unknown_ids_none(tokenizer_json: bytes) -> None:
    library = JsonTokenizer(tokenizer_json)
    assert (library.token_bytes(256), library.token_bytes(9_999)) == (b"<eos>", b"")
    assert (ByteTokenizer().token_bytes(255), ByteTokenizer().token_bytes(256)) == (b"\xff", b"")


def test_bytes_of_sentencepiece_tokens_and_of_words() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models

    def tokenizer(decoder: object, *words: str) -> JsonTokenizer:
        library = Library(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
        if decoder is not None:
            library.decoder = decoder
        return JsonTokenizer(library.to_str().encode())

    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces = tokenizer(decoders.Sequence(steps), "\u2581so", "so", "<0xF0>")
    assert [pieces.token_bytes(it) for it in range(3)] == [b" so", b"so", b"\xf0"]
    assert tokenizer(decoders.Metaspace(), "\u2581so").token_bytes(0) == b" so"
    assert tokenizer(decoders.WordPiece(), "##so").token_bytes(0) == b"##so", "as the library has it"
    assert tokenizer(None, "so").token_bytes(0) == b"so"
