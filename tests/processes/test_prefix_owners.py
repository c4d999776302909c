"""Owners of prefixes behind the HTTP front, what operators see of them, and what routers hear: on real processes.

`hisparse up` with a front whose file of keys gives one owner two keys. Prompts are token ids, so that their pages are
known.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import openai
import pytest
import zmq

from hisparse.client.client import run_client
from protocol.errors import HiSparseError
from tests.coordinator.gateway.test_kv_publisher import BlockRemoved, BlockStored, MapBatch
from tests.processes.test_up import Up, running
from tests.support import zygote
from tests.support.http_rig import write_chat_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

LIMIT_S = 240.0
SETTLED_LIMIT_S = 240.0
OLD, NEW, OTHER = "old-key-of-the-shop", "new-key-of-the-shop", "key-of-another-owner"
PROMPT = [(7 * place + 3) % 250 for place in range(200)]
FULL = 192


@dataclass
class Site:
    up: Up
    subscriber: zmq.Socket[bytes]

    def ask(self, key: str, prompt: list[int], **extra: Any) -> int:
        """Cached tokens of a completion."""
        client = openai.OpenAI(
            base_url=f"{self.up.ready['http']['url']}/v1", api_key=key, max_retries=0, timeout=LIMIT_S
        )
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, temperature=0, extra_body={"ignore_eos": True, **extra}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return int(answer.usage.prompt_tokens_details.cached_tokens or 0)

    def command(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "hisparse.cli", *arguments, "-o", "json"]
        command += ["--runtime-dir", str(self.up.runtime_dir)]
        done = zygote.run(command, LIMIT_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def heard(self, is_all: Callable[[list[Any]], bool]) -> list[Any]:
        """Events since the last call, in order, once they are all."""
        events: list[Any] = []
        while not is_all(events):
            assert self.subscriber.poll(1_000 * SETTLED_LIMIT_S), events
            topic, _, payload = self.subscriber.recv_multipart()
            assert topic == b"kv-events"
            events += msgspec.msgpack.decode(payload, type=MapBatch).events
        return events


MODEL = "model"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    model = tmp_path_factory.mktemp("checkpoint") / MODEL
    model.mkdir()
    write_chat_model(model)
    place = tmp_path_factory.mktemp("up")
    place.chmod(0o700)
    keys = place / "keys"
    keys.write_text(f"{OLD} name=shop\n{NEW} name=shop priority=1\n{OTHER}\n")
    keys.chmod(0o600)
    context = zmq.Context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPARSE_COORDINATOR_KV_EVENTS_ENDPOINT", f"ipc://{place}/events")
        patch.setenv("HISPARSE_COORDINATOR_KV_EVENTS_TOPIC", "kv-events")
        flags = ("--http", "127.0.0.1:0", "--api-keys", str(keys), "--host-mem", "4MiB")
        with running(model, place, *flags) as up:
            subscriber = context.socket(zmq.SUB)
            subscriber.connect(f"ipc://{place}/events")
            subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
            yield Site(up, subscriber)
    context.destroy(0)


def test_prefixes_belong_to_the_name_of_an_owner_and_not_to_its_keys(site: Site) -> None:
    assert site.ask(OLD, PROMPT) == 0
    assert site.ask(NEW, [*PROMPT, 1, 2, 3]) == FULL, "a new key of the same name"
    assert site.ask(OTHER, PROMPT) == 0, "another owner"
    assert site.ask(OTHER, PROMPT) == FULL, "which has its own now"
    assert site.ask(OLD, PROMPT, cache_salt="another") == 0


@pytest.mark.parametrize(
    ("extra", "param"),
    [({"tenant": "shop"}, "tenant"), ({"owner": "shop"}, "owner"), ({"cache_salt": "x" * 129}, "cache_salt")],
)
def test_body_cannot_set_the_owner_nor_a_long_salt(site: Site, extra: dict[str, str], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        site.ask(OTHER, PROMPT, **extra)
    assert caught.value.param == param


def idle_prefixes(site: Site) -> list[dict[str, Any]]:
    """All cached prefixes, once no request holds one: a worker lets go of memory a little after the answer."""
    ends_at = time.monotonic() + SETTLED_LIMIT_S
    while True:
        rows: list[dict[str, Any]] = site.command("prefix", "--limit", "100")
        if not any(row["in_use"] for row in rows) or time.monotonic() > ends_at:
            return rows
        time.sleep(0.05)


def test_operators_see_prefixes_and_drop_those_of_an_owner(site: Site) -> None:
    prompt = [(11 * place + 5) % 250 for place in range(200)]
    site.ask(OLD, prompt)
    site.ask(OTHER, prompt)
    rows = idle_prefixes(site)
    owners = {row["owner"] for row in rows}
    assert "shop" in owners
    assert len(owners) == 2
    assert {(row["tokens"], row["pages"], row["in_use"]) for row in rows} == {(FULL, FULL // 64, False)}
    (request, *_) = site.command("requests")
    assert site.command("request", request["request_id"])["request"]["prefix_tokens"] == request["prefix_tokens"]
    (pool,) = site.command("pool")
    assert pool["cached"] == sum(row["own_pages"] for row in rows)
    site.command("prefix", "drop", "--owner", "shop")
    assert {row["owner"] for row in site.command("prefix")} == owners - {"shop"}
    assert site.ask(OLD, prompt) == 0
    assert site.ask(OTHER, prompt) == FULL
    (pool,) = site.command("pool")
    assert FULL <= pool["prefix_reused_tokens"] < pool["prefix_asked_tokens"]
    (mine,) = [row for row in idle_prefixes(site) if row["owner"] == "shop"]
    site.command("prefix", "drop", mine["prefix_id"])
    assert site.ask(NEW, prompt) == 0
    idle_prefixes(site)
    site.command("prefix", "drop", "--all")
    assert site.command("prefix") == []
    (pool,) = site.command("pool")
    assert (pool["cached"], pool["free"]) == (0, pool["host_pages"])


def test_clients_see_no_prefixes(site: Site) -> None:
    with pytest.raises(HiSparseError):
        run_client(site.up.ready["client_endpoint"], lambda client: client.prefixes())


def test_routers_hear_what_is_cached_and_dropped(site: Site) -> None:
    prompt = [(13 * place + 1) % 250 for place in range(150)]
    site.command("prefix", "drop", "--all")

    def of_the_prompt(events: list[Any]) -> list[BlockStored]:
        """What was cached for earlier tests is heard, too."""
        found = [event for event in events if isinstance(event, BlockStored)]
        return [event for event in found if any("pepper" in (keys or ()) for keys in event.extra_keys or ())]

    site.ask(NEW, prompt, cache_salt="pepper")
    idle_prefixes(site)
    stored = of_the_prompt(site.heard(lambda events: sum(len(it.token_ids) for it in of_the_prompt(events)) >= 128))
    assert [token for event in stored for token in event.token_ids] == prompt[:128]
    assert stored[0].parent_block_hash is None
    assert stored[0].extra_keys is not None
    assert stored[0].extra_keys[0] == ("shop", "pepper")
    hashes = [it for event in stored for it in event.block_hashes]
    assert all(event.parent_block_hash in hashes for event in stored[1:])
    site.command("prefix", "drop", "--owner", "shop")

    def removed(events: list[Any]) -> list[Any]:
        return [it for event in events if isinstance(event, BlockRemoved) for it in event.block_hashes]

    assert sorted(removed(site.heard(lambda events: len(removed(events)) >= len(hashes)))) == sorted(hashes)


def test_flood_of_one_key_leaves_another_its_prefix(site: Site) -> None:
    """Twice as many new pages as the pool has, by one request after the other."""
    known = [(13 * place + 1) % 250 for place in range(200)]
    site.ask(OLD, known)
    (pool,) = site.command("pool")
    for flood in range(pool["host_pages"] // 7):
        assert site.ask(OTHER, [flood, 251 - flood] * 450) == 0
    (after,) = site.command("pool")
    assert after["prefix_pages_evicted"] > pool["prefix_pages_evicted"] + pool["host_pages"] // 2
    assert site.ask(OLD, known) == FULL
