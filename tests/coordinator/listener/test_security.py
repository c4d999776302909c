"""Listeners over real tcp sockets with real keys: which clients are let in, what a key permits, and isolation."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

from coordinator.listener import connection_tracker, rate_limiter
from coordinator.listener import router as router_module
from coordinator.listener.router import CurveGuard
from coordinator.scheduler.api import SchedulerApi
from hisparse.client.client import open_client
from protocol import messages
from protocol.errors import (
    BadInput,
    CapacityError,
    ConfigError,
    HiSparseError,
    NotAllowed,
    NotFound,
    Unavailable,
    WrongState,
)
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, Sampling
from protocol.transport import dealer as dealer_module
from protocol.transport import keys as key_files
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import Insecure
from tests import ROOT
from tests.support.gateway_rig import hear, say
from tests.support.guarded_rig import Guarded, guarded, new_keys, next_command
from tests.support.limits import HANG_LIMIT_S

LONG = Sampling(max_tokens=100, ignore_eos=True)


async def refusal(it: Guarded, role: str, key: key_files.PeerKey | Insecure | None) -> HiSparseError:
    with trio.fail_after(HANG_LIMIT_S), pytest.raises(HiSparseError) as caught:
        async with open_client(it.endpoint(role), role=role, key=key):
            pass
    return caught.value


# ---------------------------------------------------------------- who gets in


async def test_key_is_accepted_only_by_the_listener_of_its_role(tmp_path: Path) -> None:
    async with guarded(tmp_path) as it:
        await it.worker()
        async with it.client() as client, it.client("alice") as alice, it.admin() as admin:
            assert (await client.model()).name == "fake"
            assert (await alice.workers())[0].worker == "w0"
            assert await admin.drain() == ("w0: draining, and no request is on it",)
        for listener, role in (("admin", "client"), ("worker", "client"), ("client", "worker"), ("client", "admin")):
            error = await refusal(it, listener, it.key(role))
            assert isinstance(error, NotAllowed)
            assert f"the key of {role} {role}" in error.message
            assert it.endpoint(listener) == error.value
        assert it.dropped("admin") == it.dropped("worker") == {"denied": 1}
        assert it.dropped("client") == {"denied": 2}


async def test_bad_keys_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with guarded(tmp_path) as it:
        unknown = await refusal(it, "client", it.stranger("client", tmp_path / "other"))
        assert isinstance(unknown, NotAllowed)
        assert "hisparse keys add" in unknown.remedy
        elsewhere = await refusal(it, "client", key_files.read_peer_key(tmp_path / "other", "client"))
        assert isinstance(elsewhere, Unavailable)
        assert "may not be this coordinator's" in elsewhere.message
        assert "other/client.key" in elsewhere.message
        without = await refusal(it, "client", Insecure())
        assert isinstance(without, Unavailable)
        assert "may require a key" in without.message
        silent = await refusal(it, "client", None)
        assert isinstance(silent, ConfigError)
        assert "--insecure" in silent.remedy
        async with it.client() as client:
            assert (await client.welcome()).protocol == PROTOCOL_VERSION


async def test_connection_without_zmq_handshake_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open: connected, and never a word."""
    monkeypatch.setattr(router_module, "HANDSHAKE_LIMIT_MS", 300)
    async with guarded(tmp_path) as it:
        host, port = it.endpoint("client").removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as mute, socket.create_connection((host, int(port))) as noisy:
            noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            for each in (mute, noisy):
                each.settimeout(HANG_LIMIT_S)
                await trio.to_thread.run_sync(read_to_end, each)
        assert await pools_in_the_end(it) == ()


async def pools_in_the_end(it: Guarded) -> tuple[messages.PoolRow, ...]:
    """What a client is told whose handshake may take longer than the limit, too, so that it begins again."""
    with trio.fail_after(HANG_LIMIT_S):
        while True:
            with suppress(Unavailable):
                async with it.client() as client:
                    return await client.pools()


def read_to_end(connection: socket.socket) -> None:
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


async def test_connection_without_hello_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path) as it, it.client() as client:
        silent, loud = await it.dealer("client", "bob"), await it.dealer("client", "bob")
        with trio.fail_after(HANG_LIMIT_S):
            await say(loud, messages.ListRequests(1))  # said without a hello: answered, and no introduction
            assert isinstance((await hear(loud))[0], messages.Failure)
            monkeypatch.setattr(connection_tracker, "INTRODUCE_LIMIT_S", 0.3)
            for dealer in (silent, loud):
                with pytest.raises(Unavailable):
                    await dealer.recv_batch()
        assert it.dropped("client")["no hello"] == 2
        assert await client.workers() == ()
        silent.close()
        loud.close()


async def test_connections_per_key_are_bounded(tmp_path: Path) -> None:
    async with guarded(tmp_path, connections_per_key_max=2) as it, it.client("bob") as first, it.client("bob"):
        with pytest.raises(CapacityError, match="client:bob"):
            async with it.client("bob"):
                pass
        async with it.client("alice") as alice:
            assert await alice.workers() == ()
        assert await first.workers() == ()


async def test_reconnect_to_a_full_listener_waits_for_room(tmp_path: Path) -> None:
    """Connections that were lost may still be counted when their clients return."""
    async with guarded(tmp_path) as it, it.client("bob", reconnect_limit_s=HANG_LIMIT_S) as client:
        tracker_of = it.sockets["client"].connection_tracker
        tracker_of.per_user_max = 0
        assert it.sockets["client"].connection_events.cut_users({"client:bob"}) == 1
        await trio.sleep(0.5)
        assert client.reconnects == 0
        tracker_of.per_user_max = 1
        with trio.fail_after(HANG_LIMIT_S):
            assert (await client.welcome()).protocol == PROTOCOL_VERSION
        assert client.reconnects == 1


# ---------------------------------------------------------------- what a user may do


async def test_requests_belong_to_the_user_of_the_key(tmp_path: Path) -> None:
    keys = new_keys(tmp_path)
    async with guarded(tmp_path, keys) as it:
        await it.worker()
        async with it.client("alice") as alice, it.client("bob") as bob, it.admin() as admin:
            await alice.submit_detached([1, 2, 3], LONG, request_id="alices")
            await bob.submit_detached([1, 2, 3], LONG, request_id="bobs")
            for attempt in (bob.attach("alices"), bob.abort(["bobs", "alices"]), bob.request("alices")):
                with pytest.raises(NotFound) as others:
                    await attempt
                with pytest.raises(NotFound) as unknown:
                    await bob.request("unused")
                assert str(others.value) == str(unknown.value).replace("unused", "alices"), "the answer reveals nothing"
            with pytest.raises(WrongState):
                await bob.submit([1, 2, 3], LONG, request_id="alices")
            assert [row.request_id for row in (await bob.requests()).rows] == ["bobs"]
            assert [row.request_id for row in (await alice.requests()).rows] == ["alices"]
            assert {row.request_id for row in (await admin.requests()).rows} == {"alices", "bobs"}
            assert (await alice.attach("alices")).request_id == "alices"
            assert await admin.abort(["bobs"]) != ()
    patience = {"heartbeat_interval_s": 0.1, "heartbeat_limit_s": 0.4}  # for a worker that does not come back
    async with (  # the next life, from the journal
        guarded(tmp_path, keys, **patience) as it,
        it.client("alice") as alice,
        it.client("bob") as bob,
        it.admin() as admin,
    ):
        with pytest.raises(NotFound):
            await bob.abort(["alices"])
        await admin.abort(["alices"])
        with trio.fail_after(HANG_LIMIT_S):
            while (await alice.request("alices")).row.state != "ABORTED":  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert await bob.acknowledge(["unused"]) != ()
        with pytest.raises(NotFound):
            await bob.acknowledge(["alices"])
        await alice.acknowledge(["alices"])


async def test_client_may_not_send_operator_commands(tmp_path: Path) -> None:
    async with guarded(tmp_path) as it, it.client("bob") as bob:
        for command in (
            bob.retract(["x"]),
            bob.drain(),
            bob.stop(),
            bob.release_quarantine(["w0"]),
            bob.forget(["w0"]),
            bob.audit(),
        ):
            with trio.fail_after(HANG_LIMIT_S), pytest.raises(HiSparseError):
                await command


# ---------------------------------------------------------------- too much of it


async def test_oversized_message_is_answered_or_cut_off(tmp_path: Path) -> None:
    async with guarded(tmp_path) as it, it.client("alice") as alice:
        dealer = await it.dealer("client", "bob")
        await say(dealer, messages.Hello(PROTOCOL_VERSION, "client", "large"))
        await hear(dealer)
        await dealer.send(bytes(CLIENT_MESSAGE_BYTES_MAX + 1))
        (failure,) = await hear(dealer)
        assert isinstance(failure, messages.Failure)
        assert "at most" in failure.message
        await dealer.send(bytes(CLIENT_MESSAGE_BYTES_MAX * router_module.HARD_LIMIT_FACTOR + 1))
        with trio.fail_after(HANG_LIMIT_S), pytest.raises(Unavailable):
            await dealer.recv_batch()
        assert await alice.workers() == ()
        assert it.dropped("client")["protocol"] == 1
        dealer.close()


async def test_flood_is_warned_then_cut_and_others_are_unaffected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limiter, "CUT_AFTER", 200)
    async with guarded(tmp_path, messages_per_s=1e-6, messages_burst=50) as it, it.client("alice") as alice:
        dealer = await it.dealer("client", "bob")
        await say(dealer, messages.Hello(PROTOCOL_VERSION, "client", "flood"))
        await say(dealer, *[messages.ListPools(1)] * 100)
        heard: list[messages.GatewayMessage] = []
        with trio.fail_after(HANG_LIMIT_S):
            while len(heard) - 1 + it.dropped("client").get("rate", 0) < 101:  # each is answered or dropped
                with trio.move_on_after(0.05):
                    heard += await hear(dealer, at_least=True)
        (refused,) = [it for it in heard if isinstance(it, messages.Failure)]  # answering a flood would feed it
        assert (refused.code, refused.field) == ("capacity", "messages_per_s")
        assert len(heard) == 50, "a welcome, what the bucket held, and one refusal"
        await flood_until_cut(dealer)
        assert it.dropped("client")["rate"] >= 200
        assert it.dropped("client")["cut"] >= 1
        with trio.fail_after(HANG_LIMIT_S):
            assert await alice.workers() == (), "each user has a bucket"
        again = await refusal(it, "client", it.key("client", "bob"))
        assert isinstance(again, CapacityError), "all connections of a user share one bucket"


async def flood_until_cut(dealer: DealerSocket) -> None:
    with trio.fail_after(HANG_LIMIT_S), suppress(Unavailable):
        while True:
            await say(dealer, *[messages.ListPools(1)] * 20)
    dealer.close()


async def test_rapid_reconnects_are_delayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.listener.zap.HANDSHAKES_BURST", 3)
    monkeypatch.setattr("coordinator.listener.zap.HANDSHAKES_PER_S", 0.01)
    async with guarded(tmp_path) as it:
        for _ in range(3):
            (await it.dealer("client", "bob")).close()
        with monkeypatch.context() as patch:
            patch.setattr(dealer_module, "CONNECT_LIMIT_S", 0.5)
            while not it.dropped("client"):  # it may give up before it is judged
                with pytest.raises(Unavailable, match=r"no answer|ended the handshake"):
                    await it.dealer("client", "bob")
        assert it.dropped("client") == {"rate": 1}
        async with it.client("alice") as alice:
            assert await alice.workers() == ()


# ---------------------------------------------------------------- other keys, while it runs


async def test_keys_are_replaced_and_revoked_during_requests(tmp_path: Path) -> None:
    async with guarded(tmp_path) as it:
        worker = await it.worker()
        async with it.client("alice") as old, it.client("bob") as bob:
            stream = await old.submit([1, 2, 3], LONG, request_id="alices")
            assert isinstance(await next_command(worker), messages.Admit)
            (it.keys / "client.alice.key").unlink()
            key_files.add_peer(it.keys, "client", "alice")
            assert isinstance(await refusal(it, "client", it.key("client", "alice")), NotAllowed), "not read yet"
            await hang_up(it)
            async with it.client("alice") as new:
                assert key_files.revoke(it.keys, "client", "alice", keep_newest=True) == 1
                assert key_files.revoke(it.keys, "client", "bob", keep_newest=False) == 1
                await hang_up(it)
                with trio.fail_after(HANG_LIMIT_S), pytest.raises(NotAllowed):  # reconnects with the old key
                    await stream.collect()
                assert stream.received == 0
            async with it.client("alice") as new:
                assert (await new.request("alices")).row.state != "ABORTED"
            with trio.fail_after(HANG_LIMIT_S):
                await bob.lost()
            assert isinstance(await refusal(it, "client", it.key("client", "bob")), NotAllowed)
        with (it.keys / "allowed.keys").open("a") as file:
            file.write("client mallory\n")
        await hang_up(it)  # not a list: the old one holds
        async with it.client("alice") as new:
            assert (await new.workers())[0].state == "connected"


async def test_priority_above_the_limit_of_a_client_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit of its own it is 0. The front's users have theirs at the front; admins have none."""
    keys = new_keys(tmp_path)
    key_files.add_peer(keys, "client", "http", is_front=True)
    submit, taken = SchedulerApi.submit, []
    tenants: list[str] = []

    async def note(self: SchedulerApi, asked: messages.Submit, *who: str, prefix_tenant: str) -> Any:
        taken.append((asked.priority, asked.tenant))
        tenants.append(prefix_tenant)
        return await submit(self, asked, *who, prefix_tenant=prefix_tenant)

    monkeypatch.setattr(SchedulerApi, "submit", note)
    async with guarded(tmp_path, keys) as it:
        await it.worker()
        async with it.client("alice") as alice, it.client("http") as front, it.admin() as admin:
            with pytest.raises(BadInput, match=r"priority=1: the limit of this key is 0 .*allowed\.keys"):
                await alice.submit([1], LONG, priority=1)
            for client, priority in ((alice, -1), (front, 1_000), (admin, 1_000)):
                await client.submit([1], LONG, priority=priority, tenant="whose")
            assert taken == [(-1, ""), (1_000, "whose"), (1_000, "whose")], "a client without the right asks for itself"
            assert tenants == ["whose"] * 3, "and reuses only what it has computed for that tenant"
            key_files.add_peer(it.keys, "client", "alice", it.keys / "more", priority_max=5)
            await hang_up(it)
            await alice.submit([1], LONG, priority=5)
            with pytest.raises(BadInput, match="limit of this key is 5"):
                await alice.submit([1], LONG, priority=6)


async def test_reload_command_says_what_the_list_of_keys_was(tmp_path: Path) -> None:
    """An admin's command does what SIGHUP does, and tells a list that is the very one of before."""
    async with guarded(tmp_path) as it, it.admin() as admin:
        allowed = it.keys / "allowed.keys"
        count, inode = len(key_files.read_allowed(it.keys)), allowed.stat().st_ino
        (line,) = await admin.reload_keys()
        assert line == (
            f"allowed keys: unchanged: the same file (inode {inode}) and content as before; "
            f"{count} keys allowed, keys lost: none, 0 connections ended"
        )
        async with it.client("bob") as bob:
            await bob.welcome()
            key_files.revoke(it.keys, "client", "bob", keep_newest=False)
            (line,) = await admin.reload_keys()
            assert (
                line == f"allowed keys: changed; {count - 1} keys allowed, keys lost of client:bob, 1 connections ended"
            )
        copy = allowed.with_suffix(".new")
        copy.write_bytes(allowed.read_bytes())
        copy.chmod(0o600)
        copy.replace(allowed)
        (line,) = await admin.reload_keys()
        assert line.startswith(f"allowed keys: the same content in another file (inode {allowed.stat().st_ino});")
        allowed.write_text("client mallory\n")
        with pytest.raises(ConfigError, match=r"allowed\.keys:1"):
            await admin.reload_keys()
        assert isinstance(await refusal(it, "client", it.key("client", "bob")), NotAllowed), "the old list holds"
        async with it.client("alice") as alice:
            await alice.welcome()


async def hang_up(it: Guarded) -> None:
    """SIGHUP, and what it leads to."""
    done, reload_keys = trio.Event(), it.coordinator._reload_keys

    def note() -> str:
        done.set()
        return reload_keys()

    with pytest.MonkeyPatch.context() as patch, trio.fail_after(HANG_LIMIT_S):
        patch.setattr(it.coordinator, "_reload_keys", note)
        os.kill(os.getpid(), signal.SIGHUP)
        await done.wait()


# ---------------------------------------------------------------- workers


async def test_operator_releases_pages_of_an_unreachable_worker(tmp_path: Path) -> None:
    """I1, I2: over tcp no exit is ever proved; an operator's word is journalled like a proof."""
    keys = new_keys(tmp_path)
    async with guarded(tmp_path, keys, heartbeat_interval_s=0.1) as it:
        worker = await it.worker()
        async with it.client() as client, it.admin() as admin:
            await client.submit_detached([1, 2, 3], LONG)
            assert isinstance(await next_command(worker), messages.Admit)
            with pytest.raises(NotFound, match="nothing in quarantine"):
                await admin.release_quarantine(["w0"])
            worker.close()
            it.lose_patience(0.4)
            with trio.fail_after(HANG_LIMIT_S):
                while not (pool := (await client.pools())[0]).quarantined:  # noqa: ASYNC110
                    await trio.sleep(0.02)
            assert pool.owned == 0
            (line,) = await admin.release_quarantine(["w0"])
            assert line == "w0: released what its lost epochs [1] had"
            assert (await client.pools())[0].free == pool.host_pages
            with pytest.raises(NotFound):
                await admin.release_quarantine(["w0"])
    async with guarded(tmp_path, keys) as it, it.client() as client:
        assert [(pool.free, pool.quarantined) for pool in await client.pools()] == [(pool.host_pages, 0)]


async def test_worker_with_a_key_of_another_role_ends_with_reason(tmp_path: Path) -> None:
    async with guarded(tmp_path) as it:
        with pytest.raises(NotAllowed, match="client alice"):
            await DealerSocket.connect(it.endpoint("worker"), message_bytes_max=1, key=it.key("client", "alice"))


def test_listener_without_zap_handler_refuses_all(tmp_path: Path) -> None:
    """Without this, libzmq accepts every client that speaks CURVE."""
    keys = new_keys(tmp_path)
    listener = CurveGuard(key_files.read_server_key(keys), "client")
    router = router_module.RouterSocket("tcp://127.0.0.1:*", message_bytes_max=100, guard=listener)

    async def attempt() -> None:
        with trio.fail_after(HANG_LIMIT_S), pytest.raises(Unavailable):
            await DealerSocket.connect(
                router.endpoint, message_bytes_max=100, key=key_files.read_peer_key(keys, "client")
            )

    trio.run(attempt)
    router.close()


def test_zmq_has_required_features() -> None:
    assert zmq.has("curve")


# ---------------------------------------------------------------- refused at start


def start_coordinator(directory: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HISPARSE_")}
    environ |= {f"HISPARSE_CLUSTER_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "hisparse.cli", "coordinator"],
        cwd=ROOT,
        env=environ | {"HISPARSE_CLUSTER_RUNTIME_DIR": f"{directory}/run"},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize("role", ["client", "admin", "worker"])
def test_tcp_without_keys_is_refused_at_start(tmp_path: Path, role: str) -> None:
    done = start_coordinator(tmp_path, **{f"{role}_endpoint": "tcp://127.0.0.1:0"})
    assert done.returncode == 8
    assert f"cluster.{role}_endpoint=tcp://127.0.0.1:0" in done.stderr
    assert "hisparse keys init" in done.stderr
    assert "--insecure" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("name", ["server.key", "allowed.keys"])
def test_shared_key_files_are_refused_at_start(tmp_path: Path, name: str) -> None:
    keys = new_keys(tmp_path)
    (keys / name).chmod(0o666)
    done = start_coordinator(tmp_path, client_endpoint="tcp://127.0.0.1:0", keys_dir=str(keys))
    assert done.returncode == 8
    assert f"{keys}/{name}" in done.stderr
    assert "mode 0666" in done.stderr


@pytest.mark.process
def test_shared_runtime_directory_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o755)
    done = start_coordinator(tmp_path)
    assert done.returncode == 8
    assert "others could reach the sockets" in done.stderr


async def test_client_refuses_a_shared_runtime_directory(tmp_path: Path) -> None:
    """Another user may have made the directory, and listen there."""
    shared = tmp_path / "shared"
    shared.mkdir(0o777)
    shared.chmod(0o777)
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path / "mine")
    (tmp_path / "mine").mkdir(0o700)
    for directory in (shared, linked):
        with trio.fail_after(HANG_LIMIT_S), pytest.raises(ConfigError) as caught:
            await DealerSocket.connect(f"ipc://{directory}/client.sock", message_bytes_max=1)
        assert caught.value.value == str(directory)
