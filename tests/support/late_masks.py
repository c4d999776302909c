"""Masks of grammars that come late, by choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from protocol.grammars import Mask, Matcher, Vocabulary
from worker.loop.grammars import Grammar

Wait: TypeAlias = Callable[[Grammar, float], Mask | None]


def late_once(wait: Wait = Grammar.wait) -> Wait:
    """In place of `Grammar.wait`: every mask is late once, so that every step that draws is launched twice."""
    calls = Counter[Grammar]()

    def late(grammar: Grammar, until_s: float) -> Mask | None:
        if not until_s:  # of a prompt's first token, which is drawn once
            return wait(grammar, until_s)
        calls[grammar] += 1
        return None if calls[grammar] % 2 else wait(grammar, until_s + 60)

    return late


def held_build(goes_on: Callable[[], object], end: str) -> Callable[[Matcher, Vocabulary, str], None]:
    """In place of `Matcher.__init__`: a grammar that ends with `end` is built once `goes_on` has returned."""
    build = Matcher.__init__

    def held(matcher: Matcher, vocabulary: Vocabulary, grammar: str) -> None:
        if grammar.endswith(end):
            goes_on()
        build(matcher, vocabulary, grammar)

    return held


def held_until(goes_on: Callable[[], object]) -> Callable[[Matcher, tuple[int, ...]], None]:
    """In place of `Matcher.push`: a mask behind a token is computed once `goes_on` has returned."""
    push = Matcher.push

    def held(matcher: Matcher, tokens: tuple[int, ...]) -> None:
        if tokens:
            goes_on()
        push(matcher, tokens)

    return held
