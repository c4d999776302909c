"""One request's output: what is published, what is held, and which token ends it."""

from __future__ import annotations

import pytest

from protocol.messages import Sampling
from protocol.text import ByteTokenizer
from worker.loop.output import Output

EOS = 256


def output(generated: str = "", **sampling: object) -> Output:
    values: dict[str, object] = {"max_tokens": 10, **sampling}
    return Output(list(generated.encode()), Sampling(**values), (EOS,), ByteTokenizer().detokenizer)  # type: ignore[arg-type]


def push(out: Output, text: str) -> str:
    """Push until the end; the text of what may be published."""
    for token in text.encode():
        if not out.finished:
            out.push(token)
    return bytes(out.take_publishable()[1]).decode()


def test_tokens_are_published_once_and_in_order() -> None:
    out = output()
    assert push(out, "ab") == "ab"
    assert out.take_publishable() == (2, [])
    assert push(out, "c") == "c"
    assert not out.finished


@pytest.mark.parametrize(("generated", "pushed"), [("", "abcdefghijk"), ("abcd", "efghijk")])
def test_last_allowed_token_ends_the_output(generated: str, pushed: str) -> None:
    out = output(generated)
    assert push(out, pushed) == "abcdefghij"[len(generated) :]
    assert (out.reason, out.generated_tokens) == ("length", 10)


def test_an_end_token_is_part_of_the_output() -> None:
    out = output()
    out.push(97)
    out.push(EOS)
    assert out.take_publishable() == (0, [97, EOS])
    assert (out.reason, out.generated_tokens) == ("eos", 2)
    ignoring = output(ignore_eos=True)
    ignoring.push(EOS)
    assert not ignoring.finished


def test_possible_stop_string_is_held_until_decided() -> None:
    out = output(stop=("xyz",), max_tokens=20)
    assert push(out, "abxy") == "ab"
    assert push(out, "w") == "xyw"
    assert push(out, "cxyzd") == "c"
    assert (out.reason, out.generated_tokens, out.tail_text) == ("stop", 8 - 2, "")


def test_end_releases_held_text() -> None:
    out = output(stop=("xyz",), max_tokens=4)
    assert push(out, "abxy") == "abxy"
    assert (out.reason, out.generated_tokens) == ("length", 4)


def test_earlier_tokens_count_for_stops_but_are_not_repeated() -> None:
    out = output("abxy", stop=("xyz",))
    assert out.take_publishable() == (4, [])
    assert push(out, "z") == ""
    assert out.reason == "stop"


@pytest.mark.parametrize("text", ["xyzxyzwxyz", "axyzxxyzab", "abcdexyzab"])
def test_stop_string_behind_min_tokens_does_not_depend_on_placements(text: str) -> None:
    """Whatever was delivered before the request was retracted, its output is the same."""

    def ends(generated: str) -> tuple[str, int, str]:
        out = output(generated, stop=("xyz",), min_tokens=4, max_tokens=len(text))
        rest = text[len(generated) :]
        return generated + push(out, rest) + out.tail_text, out.generated_tokens, out.reason

    whole = ends("")
    assert whole[1] >= 4
    assert [ends(text[:count]) for count in range(whole[1] + 1)] == [whole] * (whole[1] + 1)


@pytest.mark.parametrize("generated", ["abcdefghij", "ab"])
def test_output_may_be_complete_from_the_start(generated: str) -> None:
    out = output(generated, max_tokens=len(generated))
    assert out.finished
    assert out.reason == "length"
    assert out.generated_tokens == len(generated)


def test_rows_go_with_their_tokens_when_some_are_held() -> None:
    output = Output([], Sampling(9, stop=("aab",)), (EOS,), ByteTokenizer().detokenizer)
    for row in (b"1", b"2", b"3"):
        output.push(ord("a"), row)
    start, tokens = output.take_publishable()
    assert (start, tokens, output.take_rows(len(tokens))) == (0, [97], [b"1"])
    output.push(ord("c"), b"4")
    start, tokens = output.take_publishable()
    assert (start, tokens, output.take_rows(len(tokens))) == (1, [97, 97, 99], [b"2", b"3", b"4"])
