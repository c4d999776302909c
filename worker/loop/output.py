"""One request's output: which tokens are known, which may be published, and when it ends. Pure.

Tokens come from earlier placements (delivered then, forced now) and from steps. Those that may be part of a stop string
are held back; a new placement draws them again, but for the first one, which only prefill can draw: it is handed on. A
request ends with an end-of-sequence token (part of the output), with a stop string (not part of it, but for what is
among the first `min_tokens` tokens) or with its last allowed token. Where a request asks for log-probabilities, each
token comes and goes with its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol.messages import NO_TOKEN, FirstToken, HeldToken, Sampling
from protocol.text import Detokenizer, StopMatcher


def end_token_ids(sampling: Sampling, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that end an output and are part of it."""
    return (*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids)


def held_back(first_token: FirstToken) -> tuple[HeldToken, ...]:
    """The first token, if it was drawn in an earlier placement and not published; without a row where none is asked
    for."""
    if isinstance(first_token, HeldToken):
        return (first_token,)
    return () if first_token == NO_TOKEN else (HeldToken(first_token, b""),)


class Output:
    """`tokens` are all known generated tokens, `published` of them have been given to `take_publishable`'s caller."""

    def __init__(
        self,
        generated: Sequence[int],
        sampling: Sampling,
        eos_token_ids: Sequence[int],
        detokenizer: Callable[[], Detokenizer],
        first_token: FirstToken = NO_TOKEN,
    ) -> None:
        """`generated` were delivered in earlier placements; `first_token` was drawn in one and not published."""
        held = held_back(first_token)
        self.tokens: list[int] = []
        self.forced = len(generated) + len(held)
        self.published = len(generated)
        self.reason = ""
        self.tail_text = ""
        self.max_tokens = sampling.max_tokens
        self._publishable = 0
        self._eos = frozenset(end_token_ids(sampling, eos_token_ids))
        stops = sampling.stop
        self._matcher = StopMatcher(stops, detokenizer(), sampling.min_tokens) if stops else None
        self._rows: list[bytes] = []  # of tokens that are not published
        for token in generated:
            self.push(token)
        for it in held:
            self.push(it.token, it.logprobs)

    @property
    def finished(self) -> bool:
        return bool(self.reason)

    @property
    def generated_tokens(self) -> int:
        """Length of the output once finished: tokens of a stop string do not count."""
        return self._publishable

    def push(self, token: int, row: bytes = b"") -> None:
        """Take the next token in, with its row of log-probabilities if they are asked for. Nothing may follow once
        finished."""
        tokens = self.tokens
        tokens.append(token)
        if row:
            self._rows.append(row)
        self._publishable = count = len(tokens)
        if self._matcher is not None:
            state = self._matcher.push((token,))
            self._publishable = max(state.publishable, self.published)
            if state.finished:
                self.reason, self.tail_text = "stop", state.tail_text
                return
        if token in self._eos:
            self.reason = "eos"
        elif count >= self.max_tokens:
            self.reason = "length"
        if self.reason:
            self._publishable = count

    def extend(self, place: int, tokens: Sequence[int], rows: Sequence[bytes] = ()) -> int:
        """Take in what a step drew: `tokens` for the places from `place` on, each with its row of log-probabilities if
        they are asked for. Places that were known are passed over, and so is what lies past the end. Returns how many
        tokens were new."""
        taken, known = 0, self.forced - place
        if known > 0:
            tokens, rows = tokens[known:], rows[known:]
        for token in tokens:
            if self.reason:
                break
            self.push(token, rows[taken] if rows else b"")
            taken += 1
        return taken

    def take_publishable(self) -> tuple[int, list[int]]:
        """Start and ids of the tokens that may go out now; they count as published from here on."""
        start = self.published
        self.published = max(start, self._publishable)
        return start, self.tokens[start : self.published]

    def take_rows(self, count: int) -> list[bytes]:
        """Rows of the next `count` tokens that `take_publishable` has returned; none where they are not asked for."""
        rows, self._rows = self._rows[:count], self._rows[count:]
        return rows

    @property
    def first_held(self) -> HeldToken:
        """The first token, while nothing was published."""
        return HeldToken(self.tokens[0], self._rows[0] if self._rows else b"")
