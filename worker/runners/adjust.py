"""What requests ask of the logits of a step, together: `messages.Sampling` says what, logits.py does it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.messages import Sampling


@dataclass(frozen=True)
class Adjust:
    """What some rows of a step ask for: `top_k` is the largest of them, 0 for none. `grammar`: some are held to one.
    `biases`: some have tokens with a bias, or ends that are barred at first."""

    top_k: int = 0
    min_p: bool = False
    penalties: bool = False
    grammar: bool = False
    biases: bool = False

    @classmethod
    def of(cls, sampling: Sampling) -> Adjust | None:
        """What a request asks for; None where its logits stay as they are."""
        penalties = sampling.repetition_penalty != 1 or bool(sampling.frequency_penalty or sampling.presence_penalty)
        biases = bool(sampling.logit_bias or sampling.min_tokens)
        asks = cls(sampling.top_k, sampling.min_p > 0, penalties, bool(sampling.grammar), biases)
        return None if asks == cls() else asks

    @classmethod
    def together(cls, asks: Iterable[Adjust | None]) -> Adjust | None:
        """Of the rows of one step; None where no row adjusts."""
        present = [it for it in asks if it is not None]
        if not present:
            return None
        return cls(
            max(it.top_k for it in present),
            any(it.min_p for it in present),
            any(it.penalties for it in present),
            any(it.grammar for it in present),
            any(it.biases for it in present),
        )
