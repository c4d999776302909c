"""200 requests of 20 conversations and 3 API keys through the HTTP front of `hisparse up`, while workers and the
coordinator are killed, drained, and requests taken off their workers: each answer is the one without reuse, and
`cached_tokens` is what a naive model of the cache computes.

Deterministic, so that answers are equal bit for bit; and with a pool that evicts nothing. All conversations of a round
are under way at once. The first pages of all prompts are the same, of all owners. A bias keeps answers to letters, so
that each token is seen in the text.
"""

from __future__ import annotations

import json
import os
import signal
import string
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final, TypeVar

import openai
import pytest
import trio

from hisparse.client.client import Client, run_client
from protocol.errors import HiSparseError
from protocol.units import PAGE_TOKENS
from tests.processes.test_up import Up, running
from tests.support.cluster_rig import PATIENCE_S, assert_nothing_leaked, write_model

pytestmark = [pytest.mark.process, pytest.mark.deep, pytest.mark.timeout(900)]

CONVERSATIONS: Final = 20
TURNS: Final = 10
KEYS: Final = {name: f"a-key-of-thirty-two-characters-{name}" for name in ("ann", "bob", "cy")}
OWNERS: Final = tuple(KEYS)
SYSTEM: Final = [(5 * place) % 250 for place in range(2 * PAGE_TOKENS)]
SAID_TOKENS: Final = 45
NEW_TOKENS: Final = 16
MODEL: Final = "model"
LETTERS: Final = {str(ord(letter)): 100 for letter in string.ascii_letters}
#: Of one answer, on a machine whose cores are busy.
LIMIT_S: Final = 300.0
#: Turn in which the coordinator is killed: what was cached before is gone, and what lives on is cached when it ends.
KILLED: Final = 6

SETTINGS: Final = {
    "COORDINATOR_AUDIT_INTERVAL_S": "0.3",
    "COORDINATOR_HEARTBEAT_LIMIT_S": str(PATIENCE_S),
    "HTTP_WORKER_WAIT_S": str(LIMIT_S),
    "WORKER_DTYPE": "float32",
    "WORKER_DETERMINISTIC": "true",
    "WORKER_STREAM_BACKEND": "simulated",
    "WORKER_STREAM_SEED": "7",
    "WORKER_SEATS": "16",
    "WORKER_CONTEXT_MAX_TOKENS": "1024",
    "WORKER_HOT_CHUNKS_MAX": "60",
    "WORKER_TAIL_SLOTS": "2",
    "WORKER_PASS_TOKENS": str(PAGE_TOKENS),
    "WORKER_LAYER_GROUP": "8KiB",
}


T = TypeVar("T")


@dataclass
class Site:
    up: Up

    @cached_property
    def clients(self) -> dict[str, openai.OpenAI]:
        url = f"{self.up.ready['http']['url']}/v1"
        return {
            name: openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=LIMIT_S) for name, key in KEYS.items()
        }

    def ask(self, name: str, owner: str, prompt: list[int], seed: int) -> tuple[list[int], int]:
        """What is answered, and how many tokens of the prompt were reused."""
        answer = self.clients[owner].completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0.8,
            seed=seed,
            logit_bias=LETTERS,
            extra_headers={"Idempotency-Key": name},
            extra_body={"ignore_eos": True},
        )
        assert answer.id == name
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.prompt_tokens_details is not None
        output = list(answer.choices[0].text.encode())
        assert len(output) == NEW_TOKENS
        return output, int(answer.usage.prompt_tokens_details.cached_tokens or 0)

    def command(self, action: Callable[[Client], Awaitable[T]]) -> T:
        return run_client(self.up.ready["admin_endpoint"], action, role="admin")

    def pids(self, kind: str) -> list[int]:
        """Of the processes that run now."""
        ready = json.loads((self.up.runtime_dir / "ready.json").read_text())
        return [ready[kind]["pid"]] if isinstance(ready[kind], dict) else [it["pid"] for it in ready[kind]]


Churn = Callable[[Site, Sequence[str]], None]


@contextmanager
def site_of(model: Path, place: Path, mode: str) -> Iterator[Site]:
    place.mkdir(mode=0o700)
    keys = place / "keys"
    keys.write_text("".join(f"{key} name={name}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    flags = ("-n", "2", "--http", "127.0.0.1:0", "--api-keys", str(keys), "--log-level", "warning")
    sizes = ("--device-mem", "64MiB", "--hot-size-classes", "64,128,256")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**SETTINGS, "COORDINATOR_PREFIX_REUSE": mode}.items():
            patched.setenv(f"HISPARSE_{name}", value)
        with running(model, place, *flags, *sizes) as up:
            yield Site(up)


def owner_of(conversation: int) -> str:
    return OWNERS[conversation % len(OWNERS)]


def said(conversation: int, turn: int) -> list[int]:
    return [(7 * turn + 3 * place + 31 * conversation + 1) % 250 for place in range(SAID_TOKENS)]


class NaiveModel:
    """What is cached, by owner: every page of every prompt that was computed since the coordinator started."""

    def __init__(self) -> None:
        self.pages: dict[str, set[tuple[int, ...]]] = defaultdict(set)

    def expected(self, owner: str, prompt: list[int]) -> int:
        pages = 0
        while (pages + 1) * PAGE_TOKENS < len(prompt) and tuple(prompt[: (pages + 1) * PAGE_TOKENS]) in self.pages[
            owner
        ]:
            pages += 1
        return pages * PAGE_TOKENS

    def add(self, texts: Sequence[list[int]]) -> None:
        for conversation, text in enumerate(texts):
            for stop in range(PAGE_TOKENS, len(text) + 1, PAGE_TOKENS):
                self.pages[owner_of(conversation)].add(tuple(text[:stop]))


def hold_round(site: Site, texts: list[list[int]], turn: int, churn: Churn | None) -> list[tuple[list[int], int]]:
    """One turn of every conversation at once, and what disturbs it."""
    names = [f"c{conversation}-{turn}" for conversation in range(CONVERSATIONS)]
    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        owners = [owner_of(conversation) for conversation in range(CONVERSATIONS)]
        answers = pool.map(site.ask, names, owners, texts, range(CONVERSATIONS))
        if churn is not None:
            churn(site, site.command(partial(known, names)))
        return list(answers)


# ---------------------------------------------------------------- churn


async def known(names: Sequence[str], client: Client) -> list[str]:
    """Ids of the requests of the round, once all were accepted: the front appends something of the key's owner."""
    with trio.fail_after(LIMIT_S):
        while True:
            ids = {row.request_id.partition(".")[0]: row.request_id for row in (await client.requests()).rows}
            if ids.keys() >= set(names):
                return [ids[name] for name in names]
            await trio.sleep(0.02)


def retract_some(site: Site, request_ids: Sequence[str], *, keep: bool = True) -> None:
    async def retract(client: Client) -> None:
        for request_id in request_ids[::2]:
            with suppress(HiSparseError):  # it has ended
                await client.retract([request_id], keep=keep, hold=False)

    site.command(retract)


def drain_one(site: Site, _: Sequence[str]) -> None:
    async def drain(client: Client) -> None:
        worker = site.up.ready["workers"][0]["name"]
        await client.drain([worker], handover=True, deadline_s=0.2)
        await trio.sleep(0.5)
        await client.undrain([worker])

    site.command(drain)


def kill(kind: str, site: Site, _: Sequence[str]) -> None:
    for pid in site.pids(kind):
        os.kill(pid, signal.SIGKILL)


CHURN: dict[int, Churn] = {
    1: retract_some,
    2: partial(retract_some, keep=False),
    3: drain_one,
    4: partial(kill, "workers"),
    KILLED: partial(kill, "coordinator"),
    8: retract_some,
}


# ---------------------------------------------------------------- the rounds


def next_texts(texts: list[list[int]], answers: list[tuple[list[int], int]], turn: int) -> list[list[int]]:
    return [
        [*text, *output, *said(conversation, turn + 1)]
        for conversation, (text, (output, _)) in enumerate(zip(texts, answers, strict=True))
    ]


def check_reuse(naive: NaiveModel, texts: list[list[int]], answers: list[tuple[list[int], int]], turn: int) -> None:
    reuses = [reused for _, reused in answers]
    expected = [naive.expected(owner_of(conversation), text) for conversation, text in enumerate(texts)]
    for conversation, (reused, whole) in enumerate(zip(reuses, expected, strict=True)):
        where = conversation, turn, reused, whole
        if turn in (KILLED, KILLED + 1):  # what ended before the kill: its reuse is not known, its pages are gone
            assert reused in (0, len(SYSTEM), whole), where
        elif whole < len(SYSTEM):  # those of an owner that come together: one computes what they share
            assert reused in (0, len(SYSTEM)), where
        else:
            assert reused == whole, where
    if turn == KILLED + 1:
        assert any(map(int.__eq__, reuses, expected)), "requests that lived on were cached"
    for owner in OWNERS if not naive.pages else ():
        mine = [reused for conversation, reused in enumerate(reuses) if owner_of(conversation) == owner]
        assert 0 in mine, "pages of other owners are not reused"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("checkpoint") / MODEL)


def converse(site: Site, *, reuses: bool) -> list[list[list[int]]]:
    """Outputs of all conversations, by turn."""
    texts, naive, outputs = [[*SYSTEM, *said(it, 0)] for it in range(CONVERSATIONS)], NaiveModel(), []
    for turn in range(TURNS):
        answers = hold_round(site, texts, turn, CHURN.get(turn) if reuses else None)
        outputs.append([output for output, _ in answers])
        if reuses:
            check_reuse(naive, texts, answers, turn)
            naive = NaiveModel() if turn == KILLED else naive
            naive.add(texts)
        else:
            assert not any(reused for _, reused in answers)
        texts = next_texts(texts, answers, turn)
    return outputs


def test_conversations_answer_the_same_with_reuse_and_reuse_what_a_naive_model_says(
    model: Path, tmp_path: Path
) -> None:
    with site_of(model, tmp_path / "off", "off") as site:
        expected = converse(site, reuses=False)
    with site_of(model, tmp_path / "own", "own") as site:
        assert converse(site, reuses=True) == expected
        check_owners_apart(site)
        site.command(check_accounts)


def check_owners_apart(site: Site) -> None:
    """The same prompt under two keys."""
    prompt = [(11 * place + 3) % 249 for place in range(4 * PAGE_TOKENS + 9)]
    first, reused = site.ask("apart-0", "ann", prompt, 1)
    assert reused == 0
    assert site.ask("apart-1", "bob", prompt, 1) == (first, 0)
    assert site.ask("apart-2", "ann", prompt, 1) == (first, 4 * PAGE_TOKENS)


async def check_accounts(client: Client) -> None:
    await assert_nothing_leaked(client)
    assert (await client.audit()).differences == ()
