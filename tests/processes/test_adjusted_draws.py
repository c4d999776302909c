"""Draws that requests adjust or hold to grammars, as real processes that are disturbed: every token is that of a plain
reference over the model library's logits, and so are the log-probabilities of requests that ask for them."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from hisparse.client.client import Client
from hisparse.client.token_stream import TokenStream
from protocol.grammars import Matcher, Vocabulary
from protocol.logprobs import TokenLogprobs
from protocol.messages import NO_LOGPROBS, Sampling
from protocol.text import ByteTokenizer
from tests.processes.test_main_job import disturb, release_held
from tests.support.cluster_rig import assert_nothing_leaked, cluster_of_two, crash_config, prompts_of, write_model
from tests.worker.runners.test_adjust import expected
from worker.runners.sampling import sample

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 24
NEW_TOKENS = 24
#: Between a log-probability and the reference's: of nine in ten tokens, and of those where a near-tie at the edge of
#: the indexer's top-k falls the other way.
LOGPROB_BOUND = 1e-4
LOGPROB_BOUND_OF_TIES = 1e-2
#: A token may differ from the reference's where their adjusted logits are closer than this.
TIE_BOUND = 1e-3
#: Of the request during which the coordinator dies.
LATE = Sampling(200, ignore_eos=True, logprobs=20)


#: One that goes on to the end, one that may end early, and one of each kind that bodies ask for.
GRAMMARS = (
    "start: /([a-m][n-z]){40}/",
    "start: /[0-9]{2,9}(-[a-z]{1,4}){1,2}/",
    'start: "yes" | "no" | "maybe, after a while"',
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
)


def samplings(seed: int) -> list[Sampling]:
    """Of every kind, alone and together; every fourth adjusts nothing, every second has a grammar. Two of three ask for
    log-probabilities."""
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
        chosen["logprobs"] = (NO_LOGPROBS, 0, 5)[number % 3]
        found.append(Sampling(NEW_TOKENS, temperature=temperature, top_p=0.9, seed=number, **chosen))  # type: ignore[arg-type]
    return found


@dataclass
class Received:
    """By a client that follows a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    async def follow(self, stream: TokenStream) -> None:
        async for tokens in stream:
            self.tokens += tokens.tolist()
            self.logprobs += stream.logprobs


async def collect(client: Client, name: str, prompt: Sequence[int], sampling: Sampling, received: Received) -> None:
    await received.follow(await client.submit(prompt, sampling, request_id=name))


async def replayed(client: Client, name: str) -> Received:
    received = Received()
    await received.follow(await client.attach(name))
    return received


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


def logprob_errors(logits: torch.Tensor, received: Received, sampling: Sampling) -> list[float]:
    """Of each token, where they are asked for: the largest difference of a value from the reference's, whose `logits`
    are float32[tokens, vocab]. The ids are those of the reference up to ties."""
    if sampling.logprobs == NO_LOGPROBS:
        assert received.logprobs == []
        return []
    errors = []
    for right, token, told in zip(logits.log_softmax(-1), received.tokens, received.logprobs, strict=True):
        best = right.topk(sampling.logprobs).values.tolist() if told.top else []
        assert len({it for it, _ in told.top}) == len(told.top) == sampling.logprobs
        pairs = [(told.logprob, float(right[token]))]
        pairs += [(value, float(right[other])) for other, value in told.top]
        pairs += [(value, likeliest) for (_, value), likeliest in zip(told.top, best, strict=True)]
        errors.append(max(abs(ours - its) for ours, its in pairs))
    return errors


async def test_adjusted_draws_and_log_probabilities_survive_moves_and_deaths(model: Path, tmp_path: Path) -> None:
    prompts, asked, moves = prompts_of(7, REQUESTS), samplings(8), {}
    outputs = [Received() for _ in prompts]
    async with cluster_of_two(crash_config(model, tmp_path), tmp_path, kept=True) as (cluster, client, _):
        async with trio.open_nursery() as disturbance:
            disturbance.start_soon(disturb, client, 2, moves)
            disturbance.start_soon(release_held, client, moves)
            async with trio.open_nursery() as nursery:
                for number, (prompt, sampling) in enumerate(zip(prompts, asked, strict=True)):
                    nursery.start_soon(collect, client, f"churned-{number}", prompt, sampling, outputs[number])
                await trio.sleep(2)
                cluster.workers["w0"].signal(signal.SIGKILL)
            disturbance.cancel_scope.cancel()
        await client.undrain()
        late = Received()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, client, "late", prompts[0], LATE, late)
            while not late.tokens:  # noqa: ASYNC110
                await trio.sleep(0.01)
            cluster.coordinator.signal(signal.SIGKILL)
        await assert_nothing_leaked(client)
        assert client.reconnects > 0
        again = [await replayed(client, f"churned-{number}") for number in range(REQUESTS)]
        assert (again, await replayed(client, "late")) == (outputs, late), "the journal has what was delivered"
    assert moves["keep"] + moves["drop"] > 0
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    eos = judge.generation_config.eos_token_id
    errors: list[float] = []
    cases = zip([*prompts, prompts[0]], [*asked, LATE], [*outputs, late], strict=True)
    for number, (prompt, sampling, received) in enumerate(cases):
        output = received.tokens
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        errors += logprob_errors(logits, received, sampling)
        at = wrong_from(logits, prompt, output, sampling, eos)
        assert at < 0, f"request {number} differs at {at}: {sampling}, {bytes(it for it in output if it < 256)}"
        ends = {*sampling.stop_token_ids} if sampling.ignore_eos else {eos, *sampling.stop_token_ids}
        assert output[-1] in ends or len(output) == sampling.max_tokens
        assert not ends & set(output[: max(sampling.min_tokens, len(output) - 1)])
    assert max(errors) < LOGPROB_BOUND_OF_TIES
    assert sum(error < LOGPROB_BOUND for error in errors) > 0.9 * len(errors)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))
