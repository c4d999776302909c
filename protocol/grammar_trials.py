"""Trials: a grammar is built in a process with limits (protocol.children) before another process builds it for good.

    build thread ── vocabulary, grammar ──► process: 1 GiB, a limit of time ── why it is refused, or nothing ──► thread

A grammar of some kilobytes may take gigabytes or minutes, and a build can be neither bounded nor stopped where it runs.
What passes a trial takes about as much again where it is built for good, with the same tokens that a grammar may name
(nameable_tokens) and within the same limits of the library. Vocabularies differ in nothing else that could
refuse a grammar at its start: here all other tokens are bytes. Behind a few bytes of output it is tried along one way
alone (WALK_BYTES); what exceeds limits on another way ends its request (outgrown). Grammars that passed lately are
known again, by their digest.

Rejected: to build there alone (a matcher cannot be sent), and a word of the front that it has built a grammar (clients
that speak to the coordinator would give it, too).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from protocol.children import Children, serve
from protocol.errors import BadInput
from protocol.grammars import Vocabulary, check_grammar, nameable_tokens, refusal
from protocol.text import ByteTokenizer, Tokenizer

#: For one grammar. Twice the limit of the front (hisparse/http/models/grammar_checks.py), so that a grammar that passed
#: there passes on a busier machine too.
TRIAL_LIMIT_S: Final = 10.0
#: Address space for one grammar, also of the front's checks.
MEMORY_BYTES_MAX: Final = 1024 * 1024 * 1024
#: Of a request and its reply, after which a process is used again.
KEPT_BYTES_MAX: Final = 256 * 1024
#: Twice what the longest chain of rules needs (protocol.grammars).
STACK_BYTES: Final = 64 * 1024 * 1024
#: Grammars that are known again.
KNOWN_MAX: Final = 256
#: Of scheduling by the kernel: the loop of the process that asks comes first.
NICENESS: Final = 5


class PassedGrammars:
    """Those of late, by digests of what was asked, with what was answered. Thread-safe."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def recall(self, digest: bytes) -> str | None:
        with self._lock:
            if digest in self._answers:
                self._answers.move_to_end(digest)
            return self._answers.get(digest)

    def remember(self, digest: bytes, answer: str) -> None:
        with self._lock:
            self._answers[digest] = answer
            if len(self._answers) > KNOWN_MAX:
                self._answers.popitem(last=False)


class Trials:
    """Those of one vocabulary. Any number of threads may ask at once; each has a process for itself meanwhile."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], limit_s: float = TRIAL_LIMIT_S
    ) -> None:
        about = (vocab_size, tuple(eos_token_ids), nameable_tokens(tokenizer, vocab_size))
        self._vocabulary = msgspec.msgpack.encode(about)
        self._children = Children(__name__, limit_s, MEMORY_BYTES_MAX, KEPT_BYTES_MAX)
        self._known = PassedGrammars()

    @property
    def known(self) -> int:
        """Return how many grammars are known again, KNOWN_MAX at most."""
        return len(self._known)

    def check(self, grammar: str) -> None:
        """Blocks until `grammar` is built, unless it is known. Raises BadInput for one that is none, exceeds the limits
        of the library, or takes more than a process has."""
        data = grammar.encode()
        digest = hashlib.sha256(data).digest()
        if self._known.recall(digest) is not None:
            return
        reply = self._children.ask(self._vocabulary, data)
        if reply is None:
            raise too_large(self._children, "grammar")
        if reply:
            raise refusal(reply.decode())
        self._known.remember(digest, "")

    def close(self) -> None:
        """End the processes that are idle."""
        self._children.close()


def too_large(children: Children, field: str) -> BadInput:
    """Of a grammar whose build has ended its process."""
    return BadInput(f"takes more than {children.limits} to build", field=field, remedy="simplify it")


# ---------------------------------------------------------------- the process


def bytes_vocabulary(size: int, ends: Sequence[int], special: Mapping[str, int]) -> Vocabulary:
    """Of a model whose tokens are bytes, but for the special ones."""
    return Vocabulary(_Bytes(special), size, ends)


class _Bytes(ByteTokenizer):
    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    @property
    def grammar_tokens(self) -> Mapping[str, int]:
        return self._special


def _tried(about: bytes, grammar: bytes) -> bytes:
    """Why `grammar` is refused, in the library's words; empty: it is not."""
    try:
        check_grammar(_vocabulary(about), grammar.decode())
    except BadInput as error:
        return error.message.encode()
    return b""


@lru_cache(1)
def _vocabulary(about: bytes) -> Vocabulary:
    return bytes_vocabulary(*msgspec.msgpack.decode(about, type=tuple[int, tuple[int, ...], dict[str, int]]))


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(_tried, frames=2, stack_bytes=STACK_BYTES)
