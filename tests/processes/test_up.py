"""`hisparse up`: real processes that start together, stop together and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.request import Request, urlopen

import psutil
import pytest

from hisparse.client.client import run_client
from tests.hisparse.http.server.test_tls import ask, certificate_of
from tests.support import zygote
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster_rig import HEARTBEAT_LIMIT_S, PATIENCE_S
from tests.support.ports import free_ports
from tests.support.standing import Standing, guest
from tests.support.tls_pair import write_pair
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

HISPARSE = [sys.executable, "-m", "hisparse.cli"]
#: Of whatever a process is to do: workers import torch, on busy cores.
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, index_topk=64, context_max_tokens=4_096, layers=2)


class Up:
    """A running `hisparse up`, what it said of itself in its ready file, and all that it and its children log."""

    def __init__(self, process: subprocess.Popen[str], runtime_dir: Path, ready: dict[str, Any], said: TextIO) -> None:
        self.process = process
        self._said = said
        self.runtime_dir = runtime_dir
        self.ready = ready
        self.pids = [ready["coordinator"]["pid"], *(worker["pid"] for worker in ready["workers"])]

    def hisparse(self, *args: str) -> subprocess.CompletedProcess[str]:
        return zygote.run([*HISPARSE, *args, "--runtime-dir", str(self.runtime_dir)], LIMIT_S)

    def until(self, text: str) -> str:
        """What it has said since the last time, up to the line with `text`."""
        said = ""
        while text not in said or not said.endswith("\n"):
            has_ended = self.process.poll() is not None
            line = self._said.readline()
            assert line or not has_ended, f"it never said {text!r} but {said}"
            said += line
            if not line:
                time.sleep(0.01)
        return said

    def rest(self) -> str:
        """What it has said since the last time, up to its end, which this waits for."""
        self.process.wait(LIMIT_S)
        return self._said.read()

    def submit_endless(self, max_tokens: int = 4_000) -> str:
        """A request that takes much longer than the test; its id once it decodes."""
        how = ("--max-tokens", str(max_tokens), "--temperature", "0", "--ignore-eos", "--detach")
        name = self.hisparse("submit", "go on and on", *how).stdout.strip()
        eventually(lambda: self.generated(name))
        return name

    def generated(self, name: str) -> int:
        """Tokens of a request so far."""
        detail = run_client(self.ready["client_endpoint"], lambda client: client.request(name))
        return detail.row.generated_tokens

    def left_behind(self) -> list[str]:
        """Processes and files that should be gone."""
        return [str(pid) for pid in self.pids if psutil.pid_exists(pid)] + left_files(self.runtime_dir)


def left_files(runtime_dir: Path) -> list[str]:
    return sorted(path.name for path in runtime_dir.iterdir() if path.suffix in (".pool", ".json", ".sock"))


def eventually(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    give_up_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def command_for(model: Path, runtime_dir: Path, *args: str) -> list[str]:
    sizes = ("--host-mem", "64MiB", "--device-mem", "32MiB", "--hot-size-classes", "64,128", "--threads", "1")
    return [*HISPARSE, "up", "--model", str(model), "--runtime-dir", str(runtime_dir), *sizes, *args]


@contextmanager
def running(
    model: Path, runtime_dir: Path, *args: str, start: Callable[..., subprocess.Popen[str]] = zygote.start
) -> Iterator[Up]:
    """`start` is subprocess.Popen where the command and all that it starts are to be executed.

    Its log goes to a file: a pipe that is not read fills, and its processes stand still in their next line.
    """
    ready_file = runtime_dir / "ready.json"
    command = command_for(model, runtime_dir, "--ready-file", str(ready_file), *args)
    with (runtime_dir / "up.log").open("a+") as log, (runtime_dir / "up.log").open() as said:
        said.seek(0, os.SEEK_END)  # behind what an earlier one has said there
        process = start(command, stderr=log, text=True)
        try:
            eventually(lambda: ready_file.exists() or process.poll() is not None)
            assert process.poll() is None, said.read()
            yield Up(process, runtime_dir, json.loads(ready_file.read_text()), said)
        finally:
            process.kill()
            process.wait()
            print(said.read(), file=sys.stderr)  # what the test has not read, shown when it has failed


def test_metrics_are_at_the_ports_that_follow_the_given_one(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "--metrics-port", str(port := free_ports(2))) as up:
        names = {"coordinator": "hisparse_requests", up.ready["workers"][0]["name"]: "hisparse_worker_steps_total"}
        assert up.ready["metrics"] == {
            name: f"http://127.0.0.1:{port + place}/metrics" for place, name in enumerate(names)
        }
        for name, metric in names.items():
            with urlopen(up.ready["metrics"][name], timeout=LIMIT_S) as page:
                assert metric in page.read().decode()
        assert f"metrics of coordinator at {up.ready['metrics']['coordinator']}" in up.until("metrics of coordinator")


def test_up_serves_until_ctrl_c_and_drains(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "--deadline", "90", start=subprocess.Popen) as up:
        assert Path(up.ready["pool"]).stat().st_mode & 0o777 == 0o600
        outputs = [
            json.loads(up.hisparse("submit", "hello", "--max-tokens", "12", "--temperature", "0", "-o", "json").stdout)
            for _ in range(2)
        ]
        assert outputs[0]["tokens"] == outputs[1]["tokens"]
        assert outputs[0]["generated_tokens"] == 12
        second = zygote.run(command_for(model, tmp_path, "--ready-file", str(tmp_path / "ready.json")), LIMIT_S)
        assert second.returncode == 4
        assert "already running there" in second.stderr
        assert json.loads((tmp_path / "ready.json").read_text()) == up.ready, "the ready file is that of the first"
        command = [*HISPARSE, "submit", "to be finished", "--max-tokens", "120", "--ignore-eos", "-o", "jsonl"]
        follower = subprocess.Popen(
            [*command, "--runtime-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert follower.stdout is not None
        follower.stdout.readline()
        up.process.send_signal(signal.SIGINT)
        last = follower.communicate(timeout=LIMIT_S)[0].splitlines()[-1]
        assert json.loads(last)["generated_tokens"] == 120  # drained, not dropped
        assert up.process.wait(LIMIT_S) == 0
        assert up.left_behind() == []


def test_second_ctrl_c_exits_at_once(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as up:
        up.submit_endless()
        up.process.send_signal(signal.SIGINT)
        up.until("draining for up to 30 s")
        assert up.process.poll() is None  # the request may go on until the deadline
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(LIMIT_S) == 130
        left = f"requests that have not ended are in the journal {tmp_path}/journal.sqlite and resume at the next start"
        assert f"stopped at once; {left}" in up.until("stopped at once")
        assert up.left_behind() == []


def test_unfinished_requests_of_another_model_refuse_the_start_until_aborted(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "--deadline", "0") as up:
        name = up.submit_endless()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(LIMIT_S) == 0
    write_tiny_checkpoint(tmp_path / "other", index_topk=64, context_max_tokens=2048, layers=2)
    command = command_for(tmp_path / "other", tmp_path)
    refused = zygote.run(command, LIMIT_S)
    assert refused.returncode == 8
    last = refused.stderr.splitlines()[-1]
    assert f"1 unfinished request ({name}) of another model, {model.name}, is in the journal" in last
    assert "--abort-unfinished" in last
    with running(tmp_path / "other", tmp_path, "--abort-unfinished") as up:
        assert f"aborted 1 unfinished request ({name})" in up.until("are up")
        assert up.hisparse("submit", "hello", "--max-tokens", "3").returncode == 0
        assert json.loads(up.hisparse("request", name, "-o", "json").stdout)["request"]["state"] == "ABORTED"


def test_stop_deadline_ends_unfinished_requests(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "--deadline", "1") as up:
        up.submit_endless()
        up.process.send_signal(signal.SIGTERM)
        assert "resume at the next start requests=1" in up.until("unfinished requests resume")
        assert up.process.wait(LIMIT_S) == 0
        assert up.left_behind() == []


def test_stop_command_ends_up_cleanly_after_a_worker_restart(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "-n", "2") as up:
        assert [worker["name"] for worker in up.ready["workers"]] == ["w0", "w1"]
        psutil.Process(up.ready["workers"][0]["pid"]).kill()
        output = json.loads(up.hisparse("submit", "hello", "--max-tokens", "4", "-o", "json").stdout)
        assert output["outcome"] == "FINISHED"
        assert up.hisparse("stop").returncode == 0
        stderr = up.rest()
        assert up.process.returncode == 0
        assert "w0 killed by SIGKILL; restarted in 0.5 s" in stderr
        assert up.left_behind() == []


def pid_of(up: Up, role: str) -> int:
    """As the ready file has it now."""
    ready = json.loads((up.runtime_dir / "ready.json").read_text())
    pid = int((ready["coordinator"] if role == "coordinator" else ready["workers"][0])["pid"])
    if pid not in up.pids:
        up.pids.append(pid)
    return pid


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)])
def test_lost_worker_is_replaced_and_its_request_continues(
    model: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2, I5: a stopped worker is declared down, killed, and its exit proved; either way nothing is prefilled again."""
    limit_s = HEARTBEAT_LIMIT_S if number is signal.SIGSTOP else PATIENCE_S
    monkeypatch.setenv("HISPARSE_COORDINATOR_HEARTBEAT_LIMIT_S", str(limit_s))
    with running(model, tmp_path) as up:
        name, first = up.submit_endless(), pid_of(up, "worker")
        eventually(lambda: up.generated(name) > 100)  # of less than a full page nothing is kept without a proved exit
        before = up.generated(name)
        psutil.Process(first).send_signal(number)
        eventually(lambda: pid_of(up, "worker") != first)
        eventually(lambda: up.generated(name) > before + 40)
        history = json.loads(up.hisparse("request", name, "-o", "json").stdout)["history"]
        assert [line["event"] for line in history].count("staged") == 1, history
        up.process.send_signal(signal.SIGINT)
        stderr = up.until("draining for up to")
        up.process.send_signal(signal.SIGINT)
        stderr += up.rest()
        assert ("w0 hangs; killed" in stderr) == (number is signal.SIGSTOP)
        assert "w0 killed by SIGKILL; restarted in 0.5 s" in stderr
        assert up.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)])
def test_group_is_restarted_whole_and_says_which_rank_ended_it(
    model: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = HEARTBEAT_LIMIT_S if number is signal.SIGSTOP else PATIENCE_S
    monkeypatch.setenv("HISPARSE_COORDINATOR_HEARTBEAT_LIMIT_S", str(limit_s))

    def pids() -> dict[str, int]:
        ready = json.loads((tmp_path / "ready.json").read_text())
        found = {worker["name"]: worker["pid"] for worker in ready["workers"]}
        up.pids += [pid for pid in found.values() if pid not in up.pids]
        return found

    with running(model, tmp_path, "-n", "2", "--group-size", "2") as up:
        assert up.ready["groups"] == [{"name": "g0", "workers": ["w0", "w1"]}]
        up.until("coordinator and group g0 (w0, w1) are up")
        before = json.loads(
            up.hisparse("submit", "hello", "--max-tokens", "12", "--temperature", "0", "-o", "json").stdout
        )
        first = pids()
        psutil.Process(first["w1"]).send_signal(number)
        said = up.until("all of its ranks are restarted in 0.5 s")
        assert "group g0 ended: w1 killed by SIGKILL" in said
        assert number is signal.SIGSTOP or "killed;" not in said
        eventually(lambda: not set(pids().values()) & set(first.values()))
        after = json.loads(
            up.hisparse("submit", "hello", "--max-tokens", "12", "--temperature", "0", "-o", "json").stdout
        )
        assert before["tokens"] == after["tokens"]
        assert up.hisparse("stop").returncode == 0
        assert up.process.wait(LIMIT_S) == 0
        assert up.left_behind() == []


def test_killed_coordinator_restarts_and_resumes_requests(model: Path, tmp_path: Path) -> None:
    """I4, I5: from the journal; the worker goes on meanwhile, and nothing is prefilled again."""
    with running(model, tmp_path) as up:
        name, first = up.submit_endless(), pid_of(up, "coordinator")
        eventually(lambda: up.generated(name) > 40)
        before = up.generated(name)
        psutil.Process(first).kill()
        eventually(lambda: pid_of(up, "coordinator") != first)
        eventually(lambda: up.hisparse("workers").returncode == 0)
        eventually(lambda: up.generated(name) > before + 40)
        assert up.hisparse("audit").returncode == 0
        assert up.hisparse("abort", name).returncode == 0
        assert up.hisparse("stop").returncode == 0
        stderr = up.rest()
        assert up.process.returncode == 0
        assert "coordinator killed by SIGKILL; restarted in 0.5 s" in stderr
        assert "w0 killed" not in stderr
        assert up.left_behind() == []


def test_children_do_not_outlive_a_killed_parent(model: Path, tmp_path: Path) -> None:
    """They stop as they do when they are told to, each once, however many threads the parent had."""
    with running(model, tmp_path, "--http", "127.0.0.1:0", start=subprocess.Popen) as up:
        pids = [*up.pids, up.ready["http"]["pid"]]
        up.process.kill()
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        said = up.rest()
        assert said.count("stopping signal=SIGTERM") == 3
        assert "second signal" not in said
        left = [name for name in left_files(tmp_path) if name.endswith(".sock")]
        assert left == ["up.sock"], "they ended by themselves; the next start removes that of the killed one"


def test_what_a_killed_cluster_has_left_is_removed_by_the_next_start_even_one_that_fails(
    model: Path, tmp_path: Path
) -> None:
    with running(model, tmp_path, "-n", "2", "--group-size", "2", "--http", "127.0.0.1:0") as up:
        processes = [psutil.Process(pid) for pid in (up.process.pid, *up.pids, up.ready["http"]["pid"])]
        for process in processes:
            process.suspend()  # so that none tidies up behind its parent
        for process in processes:
            process.kill()
        up.process.wait(LIMIT_S)
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in (*up.pids, up.ready["http"]["pid"])))
    left = {f"{name}.sock" for name in ("admin", "client", "worker", "group-g0", f"http-{up.ready['http']['pid']}")}
    assert set(left_files(tmp_path)) >= left | {"ready.json"}
    with socket.socket(socket.AF_UNIX) as other:  # of a worker of a group that was started by hand
        other.bind(str(tmp_path / "group-hand.sock"))
        other.listen()
        (tmp_path / "group-file.sock").touch()
        refused = zygote.run(
            command_for(model, tmp_path, "--host-mem", "1KiB", "--ready-file", str(tmp_path / "ready.json")), LIMIT_S
        )
    assert refused.returncode == 8
    assert left_files(tmp_path) == ["group-file.sock", "group-hand.sock"]


def test_failed_start_names_the_process_and_cleans_up(model: Path, tmp_path: Path) -> None:
    command = command_for(model, tmp_path, "--host-mem", "1KiB")
    done = zygote.run(command, LIMIT_S)
    assert done.returncode == 8
    assert "worker.host_mem=1024: one host page needs" in done.stderr
    assert "process=w0: exited with 8 during start" in done.stderr
    assert "Loading weights" not in done.stderr
    assert "restarted in" not in done.stderr
    assert left_files(tmp_path) == []


def test_front_serves_https_with_its_certificate(model: Path, tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path)
    front = ("--http", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key)
    with running(model, tmp_path, *front) as up:
        address, _, port = up.ready["http"]["url"].rpartition(":")
        assert address == "https://127.0.0.1"
        assert ask(int(port), cert, "/v1/models") == (200, certificate_of(Path(cert).read_text()))


def test_front_on_any_port_prints_it(chat_cluster: Standing) -> None:
    with guest(chat_cluster) as site:
        assert int(site.url.rpartition(":")[2]) > 0
        asked = Request(f"{site.url}/v1/models", headers={"Authorization": f"Bearer {site.key}"})
        with urlopen(asked, timeout=LIMIT_S) as answer:
            assert json.load(answer)["object"] == "list"
        assert f"OpenAI's API at {site.url}/v1; Anthropic's, and a chat page, at {site.url}" in chat_cluster.log


def test_impossible_settings_are_refused_before_any_start(model: Path, tmp_path: Path) -> None:
    cert, other_key = write_pair(tmp_path)[0], write_pair(tmp_path, "other")[1]
    front = ("--http", "127.0.0.1:0", "--tls-cert", cert)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for path, args, code, complaint in (
            (tmp_path / "none", (), 8, "no readable checkpoint"),
            (model, ("--http", f"127.0.0.1:{port}"), 4, f"http.port={port}: another process listens there"),
            (model, front, 8, "http.tls_key_file=: a certificate needs its key, and a key its certificate"),
            (model, (*front, "--tls-key", "none"), 8, "http.tls_key_file=none: cannot be read: No such file"),
            (model, (*front, "--tls-key", other_key), 8, f"http.tls_key_file={other_key}: is not the key of {cert}"),
            (model, (*front[:2], "--api-keys", "none"), 8, "http.api_keys_file=none: cannot be read: No such file"),
            (model, ("--http", "127.0.0.1"), 2, "'127.0.0.1' is not HOST:PORT"),
            (model, ("-n", "4", "--group-size", "3"), 8, "group-size=3: 4 workers cannot be divided into groups"),
            (model, ("-n", "3", "--group-size", "3"), 8, "worker.group_size=3: 32 experts cannot be divided evenly"),
            (model, ("--set", "worker.group=g7"), 8, "worker.group=g7: groups that are started here are named here"),
            (model, ("--http", "203.0.113.1:0", "--set", "cluster.insecure=true"), 8, "http.host=203.0.113.1: cannot"),
            (model, ("--roles", "prefill,decode"), 8, "roles=prefill,decode: 2 for 1 workers"),
            (model, ("--ready-file", str(tmp_path / "none" / "ready")), 2, "no directory"),
        ):
            command = command_for(path, tmp_path / "run", *args)
            done = zygote.run(command, LIMIT_S)
            assert (done.returncode, complaint in done.stderr) == (code, True), done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()
