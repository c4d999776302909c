"""Unfinished requests that a start finds in the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from hisparse.client.client import open_client
from hisparse.cluster.leftovers import ABORT_LIMIT_S, check_leftovers, left_text
from protocol import messages
from protocol.config import HostFacts, build
from protocol.errors import ConfigError, Unavailable
from protocol.settings import Config
from tests.hisparse.cli.test_cli import MODEL, REQUEST
from tests.support.fakes.gateway import FakeGateway, tag_of

ENDED = replace(REQUEST, request_id="old", state="FINISHED")


def config_of(runtime_dir: Path, **flags: str) -> Config:
    flags = {name.replace("__", "."): value for name, value in flags.items()}
    own = {"cluster.runtime_dir": str(runtime_dir), "worker.model": "/models/b"}
    return build({}, {}, own | flags, HostFacts.read())


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    with FakeGateway(tmp_path, MODEL) as fake:
        yield fake


def serve_rows(gateway: FakeGateway, *rows: Sequence[messages.RequestRow]) -> None:
    """Requests as listed by and by; the last list stays."""
    left = list(rows)

    def answer(message: messages.AdminMessage) -> list[messages.GatewayMessage]:
        return [messages.RequestRows(tag_of(message), tuple(left.pop(0) if len(left) > 1 else left[0]))]

    gateway.on(messages.ListRequests, answer)


async def check(gateway: FakeGateway, config: Config, fingerprint: str, *, abort: bool = False) -> str:
    async with open_client(gateway.admin_endpoint, role="admin") as client:
        return await check_leftovers(client, config, fingerprint, abort=abort)


@pytest.mark.refuses("{} of another model, {}, {} in the journal {}")
async def test_requests_of_another_model_refuse_the_start_with_all_choices(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    serve_rows(gateway, [*(replace(REQUEST, request_id=f"r{number}") for number in range(7)), ENDED])
    with pytest.raises(ConfigError) as refused:
        await check(gateway, config_of(tmp_path), "another")
    assert str(refused.value) == (
        "worker.model=/models/b: 7 unfinished requests (r0, r1, r2, r3, r4, …) of another model, tiny, are in the "
        f"journal {tmp_path}/journal.sqlite (to serve them: --model with the checkpoint of tiny; to abort them: the "
        "same command with --abort-unfinished; to keep them for later: the same command with another --runtime-dir)"
    )


async def test_a_journal_of_its_own_is_what_to_change(gateway: FakeGateway, tmp_path: Path) -> None:
    """With another runtime directory the same journal would be opened."""
    serve_rows(gateway, [REQUEST])
    with pytest.raises(ConfigError, match=r"1 unfinished request \(r1\) .* is in .* with another --journal\)"):
        await check(gateway, config_of(tmp_path, coordinator__journal=str(tmp_path / "j")), "another")


@pytest.mark.parametrize("abort", [False, True])
async def test_requests_of_this_model_go_on(gateway: FakeGateway, tmp_path: Path, abort: bool) -> None:
    serve_rows(gateway, [REQUEST])
    same = config_of(tmp_path, worker__served_model_name=MODEL.name)
    assert await check(gateway, same, MODEL.fingerprint, abort=abort) == ""
    serve_rows(gateway, [ENDED])
    assert await check(gateway, config_of(tmp_path), "another", abort=abort) == ""
    assert not any(isinstance(it, messages.AbortRequests) for it in gateway.received)


async def test_requests_of_this_model_under_another_name_name_that(gateway: FakeGateway, tmp_path: Path) -> None:
    serve_rows(gateway, [REQUEST])
    with pytest.raises(ConfigError, match="to serve them: --served-model-name tiny;"):
        await check(gateway, config_of(tmp_path), MODEL.fingerprint)


async def test_requests_of_another_model_are_aborted_on_demand(gateway: FakeGateway, tmp_path: Path) -> None:
    """Workers may join once they have ended."""
    aborted = replace(REQUEST, state="ABORTED")
    serve_rows(gateway, [REQUEST, ENDED], [replace(REQUEST, state="RELEASING"), ENDED], [aborted, ENDED])
    gateway.on(messages.AbortRequests, lambda m: [messages.Done(tag_of(m), ("r1: aborted",))])
    said = await check(gateway, config_of(tmp_path), "another", abort=True)
    assert said == "aborted 1 unfinished request (r1) of model tiny"
    assert [it.request_ids for it in gateway.received if isinstance(it, messages.AbortRequests)] == [("r1",)]
    assert sum(isinstance(it, messages.ListRequests) for it in gateway.received) == 3


@pytest.mark.refuses("have not ended {} s after they were aborted")
async def test_the_wait_for_aborted_requests_is_bounded(tmp_path: Path, autojump_clock: MockClock) -> None:
    with pytest.raises(Unavailable, match="model tiny have not ended 30 s after they were aborted"):
        await check_leftovers(FakeStuck(), config_of(tmp_path), "another", abort=True)  # type: ignore[arg-type]
    assert trio.current_time() == pytest.approx(ABORT_LIMIT_S)


class FakeStuck:
    """A client of a coordinator at which one request never ends."""

    async def welcome(self) -> messages.Welcome:
        return messages.Welcome(1, 1, "test", MODEL)

    async def requests(self, limit: int) -> messages.RequestRows:
        return messages.RequestRows(1, (REQUEST,))

    async def abort(self, names: Sequence[str]) -> tuple[str, ...]:
        return ()


def test_what_becomes_of_unfinished_requests_names_the_journal(tmp_path: Path) -> None:
    expected = f"requests that have not ended are in the journal {tmp_path}/journal.sqlite and resume at the next start"
    assert left_text(config_of(tmp_path)) == expected
    lost = left_text(config_of(tmp_path, coordinator__journal="none"))
    assert lost == "requests that have not ended are lost: there is no journal"
