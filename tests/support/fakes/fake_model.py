"""FakeModel: answers the prompts that a FakeScheduler is given with texts that a test prescribes, as byte tokens.

A random checkpoint writes no calls; this does. It is a fake of coordinator and worker together, at the level of tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import trio

from protocol import messages
from protocol.errors import BadInput
from tests.support.gateway_rig import GatewayRig
from tests.support.walks import walk
from worker.runners.tiny import EOS

#: Between two looks for prompts, and between two pieces of an output.
POLL_S = 0.002
#: Ended requests that are listed: half of what the rig's token log has room for.
ENDED_MAX = 32


@dataclass(frozen=True)
class Said:
    """An output: `reason` is eos, stop or length; `outcome` other than FINISHED fails it after its text. `end_token` is
    its last token where the reason is eos."""

    text: str
    reason: str = "eos"
    outcome: str = "FINISHED"
    prefix_tokens: int = 0
    end_token: int = EOS


class Walk:
    """An output that the request's grammar allows, by chance; none that would be too long."""


#: Of a prompt, as text, the output.
Script: TypeAlias = Callable[[str], Said | Walk | str]


class FakeModel:
    """`prompts` are those that came, as texts. Outputs come in pieces of a few bytes, drawn from `seed`. `special` are
    the texts of tokens from id 256 on; an output is written in bytes alone."""

    def __init__(self, gateway: GatewayRig, script: Script, seed: int = 0, special: Sequence[str] = ()) -> None:
        self.prompts: list[str] = []
        self._gateway = gateway
        self._script = script
        self._bytes = [*(bytes((byte,)) for byte in range(256)), *(text.encode() for text in special)]
        self._dice = random.Random(seed)
        self._ended: deque[str] = deque()

    async def run(self) -> None:
        """Until cancelled."""
        seen = 0
        commands = self._gateway.scheduler.commands
        async with trio.open_nursery() as nursery:
            while True:
                while seen < len(commands):
                    command, *arguments = commands[seen]
                    seen += 1
                    if command == "submit" and isinstance(arguments[0], messages.Submit):
                        nursery.start_soon(self._answer, arguments[0])
                await trio.sleep(POLL_S)

    async def _answer(self, submit: messages.Submit) -> None:
        ids = np.frombuffer(submit.prompt, np.int32)
        prompt = b"".join(self._bytes[token] for token in ids if token < len(self._bytes)).decode(errors="replace")
        self.prompts.append(prompt)
        said = self._script(prompt)
        if isinstance(said, Walk):
            said = _walked(submit.sampling)
        said = Said(said) if isinstance(said, str) else said
        data = [*said.text.encode(), *([said.end_token] if said.reason == "eos" else [])][: submit.sampling.max_tokens]
        while data:
            size = self._dice.choice((1, 2, 3, 7, 40))
            self._gateway.speak(submit.request_id, data[:size])
            data = data[size:]
            await trio.sleep(POLL_S)
        self._gateway.scheduler.finish(
            submit.request_id, said.outcome, reason=said.reason, prefix_tokens=said.prefix_tokens
        )
        self._ended.append(submit.request_id)
        if len(self._ended) > ENDED_MAX:
            self._gateway.scheduler.forget(self._ended.popleft())


def _walked(sampling: messages.Sampling) -> Said:
    try:
        text = walk(sampling.grammar, sampling.seed, ends_after=20, most=sampling.max_tokens)
    except BadInput as error:
        return Said("", str(error), "FAILED")
    return Said(text, "eos" if text else "length")
