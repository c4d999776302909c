"""Draws that requests adjust or hold to grammars, as real processes that are disturbed: every token is that of a plain
reference over the model library's logits."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from hisparse.client.client import Client
from protocol.grammars import Matcher, Vocabulary
from protocol.messages import Sampling
from protocol.text import ByteTokenizer
from tests.processes.test_main_job import disturb, release_held
from tests.support.cluster_rig import assert_nothing_leaked, cluster_of_two, crash_config, prompts_of, write_model
from tests.worker.runners.test_adjust import expected
from worker.runners.sampling import sample

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 24
NEW_TOKENS = 24
#: A token may differ from the reference's where their adjusted logits are closer than this.
TIE_BOUND = 1e-3


#: One that goes on to the end, one that may end early, and one of each kind that bodies ask for.
GRAMMARS = (
    "start: /([a-m][n-z]){40}/",
    "start: /[0-9]{2,9}(-[a-z]{1,4}){1,2}/",
    'start: "yes" | "no" | "maybe, after a while"',
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
)


def samplings(seed: int) -> list[Sampling]:
    """Of every kind, alone and together; every fourth adjusts nothing, every second has a grammar."""
    dice, found = random.Random(seed), []
    for number in range(REQUESTS):
        drawn = {
            "frequency_penalty": dice.choice((0.0, 0.8, -0.5)),
            "presence_penalty": dice.choice((0.0, 0.6)),
            "repetition_penalty": dice.choice((1.0, 1.4)),
            "logit_bias": tuple((dice.randrange(256), dice.choice((-50.0, 3.0))) for _ in range(1))
            if dice.random() < 0.5
            else (),
            "min_tokens": dice.choice((0, 8)),
            "stop_token_ids": tuple(dice.sample(range(256), 3)),
            "top_k": dice.choice((0, 5, 40)),
            "min_p": dice.choice((0.0, 0.1)),
        }
        chosen = {} if number % 4 == 0 else drawn
        if number % 2:
            chosen |= {"grammar": GRAMMARS[number // 2 % len(GRAMMARS)], "min_tokens": 0}
        temperature = dice.choice((0.0, 0.9))
        found.append(Sampling(NEW_TOKENS, temperature=temperature, top_p=0.9, seed=number, **chosen))  # type: ignore[arg-type]
    return found


async def collect(
    client: Client, name: str, prompt: Sequence[int], sampling: Sampling, outputs: dict[str, list[int]]
) -> None:
    outputs[name] = []
    async for tokens in await client.submit(prompt, sampling, request_id=name):
        outputs[name] += tokens.tolist()


def allowed_after(output: list[int], grammar: str, vocab: int, eos: int) -> Iterator[set[int] | None]:
    """What `grammar` allows before each token of `output`; None: it has none."""
    matcher = Matcher(Vocabulary(ByteTokenizer(), vocab, (eos,)), grammar) if grammar else None
    for token in output:
        if matcher is None:
            yield None
            continue
        yield set(np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")).tolist())
        if token != eos:
            matcher.push((token,))


def wrong_from(logits: torch.Tensor, prompt: list[int], output: list[int], sampling: Sampling, eos: int) -> int:
    """The first place of `output` that the reference does not give, up to ties; -1: none."""
    masks = allowed_after(output, sampling.grammar, logits.shape[1], eos)
    wanted = [
        expected(row.tolist(), prompt, output[:place], sampling, (eos,), mask)
        for place, (row, mask) in enumerate(zip(logits, masks, strict=True))
    ]
    rows, count = torch.tensor(wanted).float(), len(output)
    drawn = sample(
        rows,
        torch.full((count,), sampling.temperature),
        torch.full((count,), sampling.top_p),
        torch.full((count,), sampling.seed),
        torch.arange(len(prompt), len(prompt) + count),
    )
    for place, (ours, its) in enumerate(zip(output, drawn.tolist(), strict=True)):
        if ours != its and (rows[place, ours] - rows[place, its]).abs() > TIE_BOUND:
            return place
    return -1


async def test_adjusted_draws_survive_moves_and_the_death_of_a_worker(model: Path, tmp_path: Path) -> None:
    prompts, asked, moves = prompts_of(7, REQUESTS), samplings(8), {}
    outputs: dict[str, list[int]] = {}
    async with cluster_of_two(crash_config(model, tmp_path), tmp_path, kept=True) as (cluster, client, _):
        async with trio.open_nursery() as disturbance:
            disturbance.start_soon(disturb, client, 2, moves)
            disturbance.start_soon(release_held, client, moves)
            async with trio.open_nursery() as nursery:
                for number, (prompt, sampling) in enumerate(zip(prompts, asked, strict=True)):
                    nursery.start_soon(collect, client, f"churned-{number}", prompt, sampling, outputs)
                await trio.sleep(2)
                cluster.workers["w0"].signal(signal.SIGKILL)
            disturbance.cancel_scope.cancel()
        await client.undrain()
        await assert_nothing_leaked(client)
    assert moves["keep"] + moves["drop"] > 0
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    eos = judge.generation_config.eos_token_id
    for number, (prompt, sampling) in enumerate(zip(prompts, asked, strict=True)):
        output = outputs[f"churned-{number}"]
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        at = wrong_from(logits, prompt, output, sampling, eos)
        assert at < 0, f"request {number} differs at {at}: {sampling}, {bytes(it for it in output if it < 256)}"
        ended = output[-1] in (eos, *sampling.stop_token_ids)
        assert ended or len(output) == NEW_TOKENS
        assert not {eos, *sampling.stop_token_ids} & set(output[: max(sampling.min_tokens, len(output) - 1)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))
