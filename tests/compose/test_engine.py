"""docker-compose.yml on a real engine: restarts, keys, stop, backup and upgrade as docs/operations.md has them.

The tests share one project and run in the order of this file; each leaves all processes running. Outputs under every
fault are held against those of the undisturbed project.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests import ROOT
from tests.support.compose_rig import (
    CONTAINER_USER,
    LIMIT_S,
    MODEL_NAME,
    SERVICES,
    WORKERS,
    ComposeRig,
    Done,
    Load,
    ask,
    missing,
    until,
    versions,
)
from tests.support.prometheus_rig import program

ABSENT: Final = missing()
pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(2400),
    pytest.mark.xdist_group("compose"),
    pytest.mark.skipif(bool(ABSENT), reason=f"compose: {ABSENT}"),
]

PROMPTS: Final = ("Once upon a time", "The cat sat on the mat", "In a hole in the ground")
#: A stop that is undone is undone within 4 s.
UNDONE_WITHIN_S: Final = 15.0
MANUAL: Final = (ROOT / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module")
def rig() -> Iterator[ComposeRig]:
    """Built as a user who is not root, with keys made, and up. Not below tmp_path, which other users may not enter."""
    it = ComposeRig(Path(tempfile.mkdtemp(prefix="hisparse-compose-")))
    print(versions())
    it.build_base()
    it.prepare()
    try:
        it.build()
        written(it, "docker compose run --rm keys")
        it.compose("up", "--detach", *SERVICES)
        it.connected(*WORKERS)
        it.healthy(*SERVICES)
        yield it
    finally:
        it.down()
        shutil.rmtree(it.place)


@pytest.fixture(scope="module")
def load(rig: ComposeRig) -> Load:
    """Clients, with the outputs of the undisturbed project."""
    return Load(rig.api_key(), PROMPTS)


def written(rig: ComposeRig, command: str, *, worker: str = "worker-0") -> Done:
    """Run a command that docs/operations.md has, word for word, without a terminal; `worker` takes worker-0's place."""
    assert command in MANUAL, command
    docker, compose, command, *rest = shlex.split(command.replace("worker-0", worker))
    assert (docker, compose) == ("docker", "compose")
    no_terminal = ["-T"] if command in ("run", "exec") and "-T" not in rest else []
    return rig.compose(command, *no_terminal, *rest)


def restarts(rig: ComposeRig, service: str) -> int:
    return int(rig.container(service)["RestartCount"])


def pools(rig: ComposeRig) -> set[int]:
    """The id drawn when the host pool was created, as each worker has it."""
    return {int(row["capacity"]["pool_id"]) for row in rig.rows("workers") if row["state"] == "connected"}


# ---------------------------------------------------------------- what is there


def test_keys_are_private_and_apart(rig: ComposeRig) -> None:
    made = {str(path.relative_to(rig.keys)): path.stat() for path in rig.keys.rglob("*") if path.is_file()}
    assert made.keys() == {
        *("coordinator/server.key", "coordinator/allowed.keys", "http/client.key", "http/api.keys"),
        *("peers/client.key", "peers/admin.key", "peers/worker.key"),
    }
    assert {(it.st_uid, it.st_mode & 0o777) for it in made.values()} == {(CONTAINER_USER, 0o600)}


def test_api_has_the_name_that_the_model_was_given(rig: ComposeRig) -> None:
    status, models = ask("/v1/models", rig.api_key())
    assert (status, [it["id"] for it in models["data"]]) == (200, [MODEL_NAME])
    assert ask("/v1/models", "no-key-of-this-api-at-all")[0] == 401
    assert ask(f"/v1/models/{MODEL_NAME}", rig.api_key())[0] == 200


def test_client_on_the_host_needs_a_key(rig: ComposeRig) -> None:
    assert on_host(rig, rig.client_keys("client.key"), "submit", "Once", "--max-tokens", "8").returncode == 0
    without = on_host(rig, None, "submit", "Once", "--insecure")
    assert (without.returncode, "it may require a key" in without.stderr) == (6, True)


def on_host(rig: ComposeRig, keys: Path | None, *command: str) -> subprocess.CompletedProcess[str]:
    options = ["--set", "cluster.client_endpoint=tcp://127.0.0.1:7400", "--runtime-dir", str(rig.place / "none")]
    options += [] if keys is None else ["--keys-dir", str(keys)]
    program = [sys.executable, "-m", "hisparse.cli", *command, *options]
    return subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT)


@pytest.mark.parametrize("service", SERVICES)
def test_container_has_the_rights_and_limits_of_the_file(rig: ComposeRig, service: str) -> None:
    script = "touch /x; id -u; id -g; grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status"
    done = rig.compose("exec", "-T", service, "sh", "-c", script)
    assert "Read-only file system" in done.out + done.err
    assert done.out.split()[-6:] == ["10001", "10001", "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    limits = rig.container(service)["HostConfig"]
    assert limits["PidsLimit"] == 1024
    assert min(limits["Memory"], limits["NanoCpus"]) > 0


def test_worker_reaches_nothing_outside_the_machine(rig: ComposeRig) -> None:
    """What the HTTP front reaches, over its other network, a worker does not. The target is this machine's resolver."""
    (address, *_) = re.findall(r"^nameserver ([\d.]+)", Path("/etc/resolv.conf").read_text(), re.MULTILINE)
    script = f"import socket; socket.create_connection(('{address}', 53), timeout=10)"
    codes = {
        service: rig.compose("exec", "-T", service, "python3", "-c", script, check=False).code
        for service in ("http", *WORKERS)
    }
    if codes["http"] != 0:
        pytest.skip(f"the resolver at {address} is reached by no container")
    assert all(codes[worker] != 0 for worker in WORKERS)


def test_no_image_has_pip(rig: ComposeRig) -> None:
    for service in SERVICES:
        done = rig.compose("exec", "-T", service, "sh", "-c", "command -v pip || python3 -m pip --version", check=False)
        assert done.code != 0
        assert "No module named pip" in done.out + done.err


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "cpu,gpu"])
def test_this_compose_reads_the_file(rig: ComposeRig, profiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rig.environ, "COMPOSE_PROFILES", profiles)
    read = yaml.safe_load(rig.compose("config").out)
    mounts = " ".join(map(str, read["services"]["prometheus"]["volumes"]))
    assert f"/metrics/targets/{profiles}.yml" in mounts
    assert {"worker-0", "coordinator"} <= read["services"].keys()


# ---------------------------------------------------------------- deaths


def test_worker_that_is_killed_comes_back(rig: ComposeRig, load: Load) -> None:
    before = restarts(rig, "worker-0")
    with load:
        load.some_more()
        rig.kill("worker-0")
        until(lambda: restarts(rig, "worker-0") == before + 1, "a restart")
        rig.connected(*WORKERS)
        load.some_more()
    (pool,) = rig.rows("pool")
    assert pool["quarantined"] == 0


def test_coordinator_that_is_killed_comes_back_after_a_reload(rig: ComposeRig, load: Load) -> None:
    """A reload by `docker compose kill -s HUP` would count as a stop by hand, and the restart would not come."""
    before = restarts(rig, "coordinator")
    with load:
        said = written(rig, "docker compose exec coordinator hisparse reload coordinator").out
        assert said.startswith("allowed keys: unchanged: the same file")
        load.some_more()
        rig.kill("coordinator")
        until(lambda: restarts(rig, "coordinator") == before + 1, "a restart")
        rig.connected(*WORKERS)
        load.some_more()


def test_rows_outlive_the_only_worker(rig: ComposeRig, load: Load) -> None:
    """As the gpu profile has one. Where workers alone mount the pool, the engine unmounts it here; with two workers
    that are killed one after the other, the first is often back in time."""
    rig.compose("stop", "worker-1")
    submitted = on_host(rig, rig.client_keys("client.key"), "submit", PROMPTS[0], *DETACHED)
    assert submitted.returncode == 0, submitted.stderr

    def row() -> dict[str, Any]:
        return dict(rig.request("kept")["request"])

    until(lambda: row()["generated_tokens"] > 64, "tokens")
    rig.hisparse("retract", "kept")
    until(lambda: row()["state"] == "RETRACTED", "held")
    kept, before = row()["durable_tokens"], pools(rig)
    assert kept >= 64
    restarted = restarts(rig, "worker-0") + 1
    rig.kill("worker-0")
    until(lambda: restarts(rig, "worker-0") == restarted, "a restart")
    rig.connected("worker-0")
    assert pools(rig) == before, "the host pool is the one of before"
    assert row()["durable_tokens"] == kept, "and its rows count"
    rig.hisparse("resume", "kept")
    until(lambda: row()["state"] == "FINISHED", "the rest of it")
    events = [it["event"] for it in rig.request("kept")["history"]]
    assert (events.count("staged"), events.count("admitted")) == (1, 2), "prefilled once, placed twice"
    rig.compose("start", "worker-1")
    rig.connected(*WORKERS)
    with load:
        load.some_more()


DETACHED: Final = ("--id", "kept", "--max-tokens", "1500", "--temperature", "0", "--ignore-eos", "--detach")


# ---------------------------------------------------------------- keys


def test_keys_service_runs_its_arguments(rig: ComposeRig) -> None:
    add = "docker compose run --rm keys hisparse keys add client alice --output /keys/peers/client.alice.key"
    assert written(rig, add).out.split()[-1] == "/keys/peers/client.alice.key"
    listed = written(rig, "docker compose run --rm keys hisparse keys list").out
    assert "alice" in listed


def test_key_is_let_in_and_revoked_without_a_restart(rig: ComposeRig) -> None:
    alice = rig.client_keys("client.alice.key")
    assert on_host(rig, alice, "workers").returncode == 9, "not read yet"
    reload = "docker compose exec coordinator hisparse reload coordinator"
    assert written(rig, reload).out.startswith("allowed keys: changed; 5 keys allowed")
    assert on_host(rig, alice, "workers").returncode == 0
    written(rig, "docker compose run --rm keys hisparse keys revoke client alice")
    assert "keys lost of client:alice" in written(rig, reload).out
    refused = on_host(rig, alice, "workers")
    assert (refused.returncode, "may not use this endpoint" in refused.stderr) == (9, True)
    replace(rig.keys / "coordinator" / "allowed.keys", (rig.keys / "coordinator" / "allowed.keys").read_text())
    assert "the same content in another file" in written(rig, reload).out


def test_api_key_that_is_replaced_by_rename_is_read(rig: ComposeRig, load: Load) -> None:
    reload = "docker compose exec http hisparse reload http"
    path, old = rig.keys / "http" / "api.keys", rig.api_key()
    assert "API keys: unchanged: the same file" in written(rig, reload).out
    new = "a-second-key-of-the-same-front"
    replace(path, f"{new}\n")
    assert "API keys: changed; 1 keys" in written(rig, reload).out
    assert [ask("/v1/models", key)[0] for key in (old, new)] == [401, 200]
    replace(path, f"{old}\n")
    written(rig, reload)
    assert [ask("/v1/models", key)[0] for key in (old, new)] == [200, 401]


def replace(path: Path, text: str) -> None:
    """As an editor or `install` does: another file takes the place of `path`."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.chmod(0o600)
    os.chown(other, CONTAINER_USER, CONTAINER_USER)
    other.replace(path)


# ---------------------------------------------------------------- stops


def test_stop_holds_and_the_journal_is_backed_up(rig: ComposeRig, load: Load) -> None:
    before = restarts(rig, "coordinator")
    with load:
        load.some_more()
        written(rig, "docker compose stop coordinator")
        stopped = rig.container("coordinator")["State"]
        assert (stopped["Status"], stopped["ExitCode"]) == ("exited", 0)
        assert not stopped["OOMKilled"]
        archive = rig.place / "journal.tar"
        backup = "docker compose run --rm -T --no-deps --entrypoint tar coordinator -C /var/lib/hisparse -cf - ."
        assert f"{backup} > journal.tar" in MANUAL
        with archive.open("wb") as file:
            file.write(raw_output(rig, backup))
        names = subprocess.run(["tar", "-tf", str(archive)], capture_output=True, text=True, check=True).stdout.split()
        assert {"./journal.sqlite", "./journal.sqlite.head"} <= set(names)
        time.sleep(UNDONE_WITHIN_S)
        assert rig.container("coordinator")["State"]["Status"] == "exited", "the stop is undone"
        assert restarts(rig, "coordinator") == before
        written(rig, "docker compose start coordinator")
        load.some_more()
    rig.connected(*WORKERS)


def raw_output(rig: ComposeRig, command: str) -> bytes:
    program = rig.command(*shlex.split(command)[2:])
    done = subprocess.run(
        program, cwd=rig.tree, env=os.environ | rig.environ, capture_output=True, timeout=LIMIT_S, check=True
    )
    return done.stdout


def test_backup_is_restored(rig: ComposeRig, load: Load) -> None:
    written(rig, "docker compose stop coordinator")
    restore = "docker compose run --rm -T --no-deps --entrypoint sh coordinator -c"
    script = "rm -rf /var/lib/hisparse/* && tar -C /var/lib/hisparse -xf -"
    assert f"{restore} '{script}' < journal.tar" in MANUAL
    rig.compose(*shlex.split(restore)[2:], script, stdin=(rig.place / "journal.tar").read_bytes())
    check = "docker compose run --rm -T --no-deps coordinator journal check /var/lib/hisparse/journal.sqlite"
    written(rig, check)
    written(rig, "docker compose start coordinator")
    rig.connected(*WORKERS)
    with load:
        load.some_more()


def test_hisparse_stop_is_a_restart(rig: ComposeRig, load: Load) -> None:
    """The policy starts what exits by itself; the manual says so.

    Detached: `exec` of docker-compose 1.29 waits for ever for a command that ended with its container.
    """
    before = rig.container("coordinator")["State"]["StartedAt"]
    with load:
        rig.compose("exec", "-d", "coordinator", "hisparse", "stop", "--deadline", "0")
        until(lambda: rig.container("coordinator")["State"]["StartedAt"] != before, "a start")
        rig.connected(*WORKERS)
        load.some_more()


# ---------------------------------------------------------------- upgrade


def test_all_processes_are_upgraded_under_load(rig: ComposeRig, load: Load) -> None:
    before = {service: rig.container(service)["Image"] for service in SERVICES}
    code = rig.tree / "hisparse" / "__init__.py"
    code.write_text(code.read_text() + "\n# another version\n")
    installed = set(re.findall(r"Successfully installed (\S+)", rig.build()))
    assert all(it.startswith("hisparse-") for it in installed), "a change of code installs nothing else"
    with load:
        written(rig, "docker compose up --detach --no-deps coordinator")
        rig.connected(*WORKERS)
        load.some_more()
        for worker in WORKERS:
            written(rig, "docker compose exec coordinator hisparse drain worker-0 --handover --wait", worker=worker)
            written(rig, "docker compose up --detach --no-deps worker-0", worker=worker)
            rig.connected(*WORKERS)
            load.some_more()
    written(rig, "docker compose up --detach --no-deps http")
    rig.healthy(*SERVICES)
    with load:
        load.some_more()
    after = {service: rig.container(service)["Image"] for service in SERVICES}
    assert all(after[service] != before[service] for service in SERVICES)


def test_settings_installs_nothing(rig: ComposeRig) -> None:
    """Settings of linters live in pyproject.toml, from which nothing is installed but hisparse."""
    project = rig.tree / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 119"))
    installed = set(re.findall(r"Successfully installed (\S+)", rig.build()))
    assert all(it.startswith("hisparse-") for it in installed)


# ---------------------------------------------------------------- checkpoints


def test_tiny_checkpoint_is_readable_by_others(rig: ComposeRig) -> None:
    modes = rig.compose("exec", "-T", "worker-0", "sh", "-c", "stat -c %a /model/*").out.split()
    assert set(modes) == {"644"}


def test_unreadable_checkpoint_is_named(rig: ComposeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = rig.place / "checkpoint"
    make = [sys.executable, "-m", "hisparse.cli", "model", "tiny", str(checkpoint)]
    subprocess.run(make, check=True, capture_output=True, cwd=ROOT)
    (checkpoint / "model.safetensors").chmod(0o600)
    monkeypatch.setitem(rig.environ, "MODEL_DIR", str(checkpoint))
    done = rig.compose("run", "--rm", "-T", "--no-deps", "worker-0", check=False)
    assert done.code == 8
    assert (
        "user 10001 has no permission to read /model/model.safetensors (owner 0, mode 0600) "
        "(chmod -R a+rX /model" in done.out + done.err
    )


# ---------------------------------------------------------------- metrics


def test_prometheus_scrapes_every_process(rig: ComposeRig) -> None:
    rig.build_prometheus(program("prometheus"))
    rig.compose("up", "--detach", "--no-deps", "prometheus")
    until(lambda: set(scraped().values()) == {"up"}, f"all targets up, not {rig.logs('prometheus')[-2000:]}")
    assert scraped().keys() == {f"{service}:9400" for service in SERVICES}


def scraped() -> dict[str, str]:
    """Health of each target."""
    try:
        with urllib.request.urlopen("http://127.0.0.1:9090/api/v1/targets", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
    except OSError:
        return {}
    return {it["labels"]["instance"]: it["health"] for it in found["data"]["activeTargets"]}


# ---------------------------------------------------------------- all at once


def test_everything_is_killed_at_once(rig: ComposeRig, load: Load) -> None:
    """The pool goes with its last container, and requests are prefilled again: a pause, no other output."""
    with load:
        load.some_more()
        rig.kill("coordinator", *WORKERS)
        rig.connected(*WORKERS)
        load.some_more()


def test_containers_and_volumes_go_with_the_project(rig: ComposeRig) -> None:
    written(rig, "docker compose down")
    assert rig.compose("ps", "-q").out.split() == []
