"""The `hisparse` command against a scripted gateway over real sockets: what it asks, prints and exits with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest
import trio
from click.testing import CliRunner, Result

from basics.request_checks import SEED_MAX
from hisparse.cli import main, streaming
from hisparse.cli.streaming import Follow, attach_and_follow
from hisparse.client.client import Client
from hisparse.console.meanings import meanings
from hisparse.console.options import COMMON_HINT, EXIT_CODES, EXIT_MEANINGS, Setting, common_option_lines, with_config
from hisparse.console.output import duration_text, hot_text, share_text, size_text
from protocol import messages
from protocol.arrays import pack_int32, unpack_int32
from protocol.config import SECTIONS
from protocol.errors import BY_CODE, Unavailable
from protocol.messages import PRIORITY_MAX
from protocol.settings import Config
from tests.support.fakes.gateway import FakeGateway, tag_of
from tests.support.limits import HANG_LIMIT_S

MODEL = messages.ModelInfo(
    fingerprint="f", name="tiny", context_max_tokens=8192, vocab_size=264, layers=4, topk=128,
    eos_token_ids=(257,), tokenizer_kind="bytes", tokenizer_hash="",
)  # fmt: skip
CAPACITY = messages.WorkerCapacity(
    seats=8, hot_chunks=32, index_pages=512, prompt_max_tokens=8_192, host_pages=1024, page_bytes=98_304,
    hot_size_classes=(192,), tail_slots=8, overshoot_tokens=1, pool_path="/tmp/p",
)  # fmt: skip
REQUEST = messages.RequestRow(
    request_id="r1", state="RUNNING", priority=0, worker="w0", prompt_tokens=100, generated_tokens=5, max_tokens=64,
    durable_tokens=104, host_pages=2, hot_slots=192, hot_chunks=4, hits=30, misses=10, retractions=1, age_s=75.0,
    held=False, reason="",
)  # fmt: skip
WORKER = messages.WorkerRow(
    worker="w0", node="n", state="connected", epoch=1, running=1, capacity=CAPACITY, hot_chunks_free=28,
    index_pages_free=500, seats_free=7, steps=10, step_us=2500.0, hits=30, misses=10,
    link_age_s=0.1, command_ack_ms=1.5,
)  # fmt: skip
UNSEEN = msgspec.structs.replace(WORKER, state="disconnected", link_age_s=messages.NOT_SEEN)
POOL = messages.PoolRow("n", 1024, 1000, 24, 0, 0, 98_304, 1, ("w0",))


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    monkeypatch.setenv("HISPARSE_CLUSTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with FakeGateway(tmp_path, MODEL) as fake:
        yield fake


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, args, input=stdin)


def row(base: msgspec.Struct, **changes: Any) -> Any:
    return msgspec.structs.replace(base, **changes)


# ---------------------------------------------------------------- the command itself


def test_help_imports_nothing_heavy() -> None:
    """The commands import click and the standard library at their top, nothing else."""
    heavy = ["torch", "rich", "zmq", "trio", "numpy", "msgspec", "transformers"]
    code = f"import sys; import hisparse.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_worker_and_model_import_torch() -> None:
    rooms = "hisparse.cli.streaming, hisparse.console.session, hisparse.cluster.up, hisparse.demo.run"
    code = f"import sys; import {rooms}; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_of_the_executed_command_lists_exit_codes() -> None:
    done = subprocess.run([sys.executable, "-m", "hisparse.cli", "--help"], capture_output=True, text=True, check=True)
    assert "Exit codes:" in done.stdout


def test_every_command_has_help_and_every_error_an_exit_code() -> None:
    for name in main.commands:
        assert run(name, "--help").exit_code == 0
    assert set(EXIT_CODES) == set(BY_CODE)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert set(EXIT_CODES.values()) <= set(EXIT_MEANINGS)


def groups(command: click.Command) -> Iterator[click.Group]:
    """A group, and those in it."""
    if isinstance(command, click.Group):
        yield command
        for inner in command.commands.values():
            yield from groups(inner)


def test_no_line_of_a_list_of_commands_is_cut_at_80_columns() -> None:
    for group in groups(main):
        room = 78 - len("    ") - 2 - max(map(len, group.commands))
        cut = [name for name, it in group.commands.items() if it.get_short_help_str(room).endswith("...")]
        assert cut == []


COMMON = [option.split()[0] for option, _ in common_option_lines()]


def test_common_options_are_in_the_help_of_hisparse_alone() -> None:
    """A command's own options are not buried among them, and it still takes them."""
    root = run("--help").stdout
    for flag in COMMON:
        assert root.count(f"  {flag} ") == 1, flag
    for args in (["drain"], ["up"], ["keys", "add"]):
        text = run(*args, "--help").stdout
        assert not [flag for flag in COMMON if f"  {flag} " in text]
        assert COMMON_HINT in " ".join(text.split())
    assert "--deadline" in run("drain", "--help").stdout
    assert COMMON_HINT not in run("size", "--help").stdout, "it takes none of them"


def test_help_of_an_option_is_the_meaning_of_its_setting() -> None:
    """One sentence for help and docs; every setting has one."""
    assert "Requests in one decode batch at most." in " ".join(run("worker", "--help").stdout.split())
    names = {f"{section}.{field}" for section, kind in SECTIONS.items() for field in kind.__struct_fields__}
    assert meanings().keys() == names
    assert [name for name in names if len(meanings()[name]) < 10] == []


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["frobnicate"], 2, "frobnicate"),
        (["drain"], 2, "name workers, or pass --all"),
        (["drain", "w0", "--all"], 2, "name workers, or pass --all"),
        (["retract"], 2, "Missing argument"),
        (["resize", "r1", "--hot-slots", "many"], 2, "'many' is not a number of slots, resident or auto"),
        (["workers", "--set", "nonsense"], 2, "SECTION.FIELD=VALUE"),
        (["workers", "--set", "worker.seets=1"], 8, "did you mean seats?"),
        (["workers", "--config", "/nowhere.toml"], 8, "No such file"),
        (["submit", "--tokens", "1 x 3"], 2, "'x' is not a token id"),
        (["submit", "a", "--file", __file__], 2, "not both"),
        (["submit", "--file", "/bin/sh"], 2, "prompt=/bin/sh: not UTF-8 text"),
        (["submit", "a\udcff"], 2, "prompt=argument: not UTF-8 text"),
        (["requests", "--state", "runing"], 2, "'runing' is none of queued"),
        (["keys", "init", "--keys-dir", "/proc/none"], 8, "cluster.keys_dir=/proc/none: No such file"),
        (["journal", "check", "/nowhere/journal"], 8, "coordinator.journal=/nowhere/journal: cannot keep"),
        (["coordinator", "--runtime-dir", "/proc/none"], 8, "cluster.runtime_dir=/proc/none: No such file"),
        (["coordinator", "--set", "coordinator.metrics_port=65536"], 8, "coordinator.metrics_port=65536: not a port"),
    ],
)
def test_bad_usage_is_one_line_on_stderr(args: list[str], code: int, text: str) -> None:
    result = run(*args)
    assert result.exit_code == code
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_dedicated_flag_overrides_set() -> None:
    """And one that is not given takes nothing back."""
    seen = []

    @click.command()
    @with_config(Setting("worker.seats"))
    def command(config: Config) -> None:
        seen.append(config.worker.seats)

    for args in (["--set", "worker.seats=3"], ["--set", "worker.seats=3", "--seats", "4"], ["--seats", "4"]):
        assert CliRunner().invoke(command, args).exit_code == 0
    assert seen == [3, 4, 4]


@pytest.mark.parametrize("args", [("requests",), ("prefix", "drop", "p1")])
def test_common_options_stand_before_the_name_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.delenv("HISPARSE_CLUSTER_RUNTIME_DIR", raising=False)
    for common in (["--runtime-dir", str(tmp_path)], ["--set", f"cluster.runtime_dir={tmp_path}"]):
        before, behind = run(*common, *args), run(*args, *common)
        assert str(tmp_path) in before.stderr, "no coordinator is there"
        assert (before.exit_code, before.stderr) == (behind.exit_code, behind.stderr)


def test_common_option_behind_the_name_goes_before_one_in_front(tmp_path: Path) -> None:
    file = tmp_path / "hisparse.toml"
    file.write_text("[worker]\nseats = 3\nthreads = 3\n")
    in_front = ["--config", str(file), "--insecure", "--set", "worker.seats=4", "--set", "http.port=1"]
    shown = run(*in_front, "config", "show", "--set", "worker.seats=5", "-o", "json")
    rows = {row["setting"]: row["value"] for row in json.loads(shown.stdout)}
    assert (rows["worker.seats"], rows["worker.threads"], rows["http.port"]) == (5, 3, 1)
    assert rows["cluster.insecure"] is True


def test_checkpoint_is_overwritten_only_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr("worker.runners.tiny.write_tiny_checkpoint", lambda path, **how: written.append(path))
    place = tmp_path / "new" / "model"
    assert run("model", "tiny", str(place)).exit_code == 0
    (place / "config.json").write_text("{}")
    refused = run("model", "tiny", str(place))
    assert (refused.exit_code, written) == (2, [place])
    assert refused.stderr.startswith(f"hisparse: path={place}: a checkpoint exists")
    assert run("model", "tiny", str(place), "--force").exit_code == 0
    assert written == [place, place]
    assert "path=/proc/none: No such file" in run("model", "tiny", "/proc/none").stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--tokens", "1 2147483648"], "prompt=2147483648: a token id does not fit int32"),
        (["--tokens", f"1 {10**30}"], "prompt=2 values: expected a list of int32 token ids"),
        (["a", "--seed", str(10**30)], f"'--seed': {10**30} is not in the range 0<=x<={SEED_MAX}"),
        (["a", "--priority", "-1001"], f"'--priority': -1001 is not in the range -{PRIORITY_MAX}<=x<={PRIORITY_MAX}"),
        (["a", "--max-tokens", str(2**31)], f"'--max-tokens': {2**31} is not in the range 1<=x<={2**31 - 1}"),
        (["a", "--stop", "x\udcff"], r"stop=('x\udcff',): holds half of a surrogate pair"),
        (["a", "--id", "x\udcff"], r"request_id='x\udcff': holds half of a surrogate pair"),
    ],
)
def test_unencodable_message_is_refused_before_sending(gateway: FakeGateway, args: list[str], text: str) -> None:
    result = run("submit", *args)
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr
    assert not any(isinstance(message, messages.Submit) for message in gateway.received)


def test_missing_coordinator_is_unavailable(tmp_path: Path) -> None:
    result = run("requests", "--runtime-dir", str(tmp_path))
    assert result.exit_code == EXIT_CODES["unavailable"]
    assert result.stderr.startswith("hisparse: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_refusal_exits_with_its_code_and_remedy(gateway: FakeGateway, code: str) -> None:
    gateway.refuse(
        messages.RetractRequests, code, "it is FINISHED", field="request_id", value="r1", remedy="nothing to do"
    )
    result = run("retract", "r1")
    assert result.exit_code == EXIT_CODES[code]
    assert result.stderr == "hisparse: request_id=r1: it is FINISHED (nothing to do)\n"


def test_a_defect_shows_its_traceback_and_exits_with_70(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hisparse.console.session.call", broken)
    result = run("pool")
    assert result.exit_code == 70
    assert "ZeroDivisionError" in result.stderr


# ---------------------------------------------------------------- looking


def test_requests_in_every_format(gateway: FakeGateway) -> None:
    queued = row(REQUEST, request_id="r2", state="QUEUED", worker="", hot_slots=-1, hits=0, misses=0)
    rows = (REQUEST, queued, row(REQUEST, request_id="r3", state="RETRACTED", held=True))
    gateway.on(messages.ListRequests, lambda m: [messages.RequestRows(tag_of(m), rows)])
    table = run("requests", "--limit", "3")
    assert gateway.received == [messages.ListRequests(1, 3)]
    header, first, second, third = table.stdout.splitlines()
    assert header.split()[:3] == ["ID", "STATE", "PRIO"]
    assert first.split()[:7] == ["r1", "RUNNING", "0", "w0", "100", "0", "5/64"]
    assert "75.0%" in first
    assert "1m15s" in first
    assert second.split()[:4] == ["r2", "QUEUED", "0", "-"]
    assert third.split()[:3] == ["r3", "HELD", "0"]
    as_json = json.loads(run("requests", "-o", "json").stdout)
    assert as_json[0] == msgspec.structs.asdict(REQUEST)
    lines = run("requests", "-o", "jsonl", "--state", "queued").stdout.splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == ["r2"]
    lines = run("requests", "-o", "jsonl", "--state", "held").stdout.splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == ["r3"]


def serve_many(gateway: FakeGateway, live: int, ended: int) -> None:
    """As the coordinator does: live requests, then ended ones, as many as were asked for."""
    rows = [row(REQUEST, request_id=f"r{number}") for number in range(live)]
    rows += [row(REQUEST, request_id=f"e{number}", state="FINISHED") for number in range(ended)]

    def answer(m: Any) -> list[messages.GatewayMessage]:
        return [messages.RequestRows(tag_of(m), tuple(rows[: m.limit]), truncated=len(rows) > m.limit)]

    gateway.on(messages.ListRequests, answer)


FEW_ENDED = "only the latest 10 ended requests; -o json has more\n"


@pytest.mark.parametrize(
    ("args", "live", "ended", "shown", "stderr"),
    [
        ([], 3, 10, 13, ""),
        ([], 3, 11, 13, FEW_ENDED),
        ([], 3, 2_000, 13, FEW_ENDED),
        (["--live"], 3, 2_000, 3, ""),
        (["--live", "--limit", "2"], 3, 4, 2, "only the first 2 requests; raise --limit\n"),
        (["--limit", "2"], 3, 4, 2, "only the first 2 requests; raise --limit\n"),
        (["--limit", "5"], 3, 4, 5, "only the first 5 requests; raise --limit\n"),
        (["--state", "finished", "--limit", "4"], 9, 4, 4, ""),
        (["--state", "finished", "--limit", "4"], 9, 5, 4, "only the first 4 requests; raise --limit\n"),
        (["--state", "running"], 5, 40, 5, ""),
        (["-o", "jsonl"], 3, 40, 43, ""),
        (["-o", "jsonl", "--limit", "10"], 3, 40, 10, "only the first 10 requests; raise --limit\n"),
        (["-o", "jsonl", "--live"], 3, 40, 3, ""),
    ],
)
def test_ended_requests_do_not_bury_live_ones(
    gateway: FakeGateway, args: list[str], live: int, ended: int, shown: int, stderr: str
) -> None:
    serve_many(gateway, live, ended)
    result = run("requests", *args)
    lines = result.stdout.splitlines()
    assert (len(lines) - (0 if "jsonl" in args else 1), result.stderr) == (shown, stderr)


def test_live_and_an_ended_state_exclude_each_other() -> None:
    result = run("requests", "--live", "--state", "failed")
    assert result.exit_code == EXIT_CODES["bad_input"]
    assert "--live lists no failed request: leave out one of --live and --state" in result.stderr


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (size_text(1023), "1023 B"),
        (size_text(1024), "1.0 KiB"),
        (size_text(1536 * 1024**2), "1.5 GiB"),
        (size_text(3 * 1024**5), "3072.0 TiB"),
        (duration_text(59.94), "59.9s"),
        (duration_text(60), "1m00s"),
        (duration_text(3_599.9), "59m59s"),
        (duration_text(90_061), "25h01m"),
        (share_text(1, 3), "33.3%"),
        (share_text(0, 0), "-"),
        (hot_text(0), "resident"),
        (hot_text(-1), "-"),
    ],
)
def test_cells_change_unit_at_its_limit(cell: str, text: str) -> None:
    assert cell == text


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()]), click.Abort()]
)
def test_interrupt_exits_with_130(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr("hisparse.console.session.call", interrupted)
    assert run("pool").exit_code == 130


def test_status_shows_the_history_of_a_request(gateway: FakeGateway) -> None:
    history = (
        messages.HistoryLine(1.5, "submit", "QUEUED", ""),
        messages.HistoryLine(2.5, "admit", "PREFILLING", "to w0"),
    )
    gateway.on(messages.DescribeRequest, lambda m: [messages.RequestDetail(tag_of(m), REQUEST, history)])
    text = run("request", "r1").stdout
    assert "r1  RUNNING" in text
    assert "75.0% hits (30 hits, 10 misses)" in text
    assert text.splitlines()[-1].endswith("admit        PREFILLING  to w0")
    detail = json.loads(run("request", "r1", "-o", "json").stdout)
    assert detail["request"]["hits"] == 30
    assert detail["history"][1] == {"at_s": 2.5, "event": "admit", "state": "PREFILLING", "reason": "to w0"}


def audited(*differences: messages.DifferenceRow, answered: bool = True) -> messages.AuditRows:
    rows = (
        messages.AuditedRow("w0", 7, answered, 3, 120, len(differences)),
        messages.AuditedRow("n", 0, True, 4, 130, 0),
    )
    return messages.AuditRows(0, rows, differences)


@pytest.mark.parametrize("output", ["table", "json"])
def test_audit_exit_code_tells_differences(gateway: FakeGateway, output: str) -> None:
    lost = messages.DifferenceRow("w0", "unreleased", 41, "r1", "holds it", "nothing", repaired=True)
    for answer, code, shown in (
        (audited(), 0, "130"),
        (audited(lost), 1, "unreleased"),
        (audited(answered=False), 1, "w0"),
    ):
        gateway.on(messages.AuditWorkers, lambda m, answer=answer: [row(answer, tag=tag_of(m))])
        result = run("audit", "-o", output)
        assert result.exit_code == code, result.output
        assert shown in result.stdout
        if output == "json":
            assert json.loads(result.stdout)["audited"][0]["host_pages"] == 120
    assert gateway.roles[-1] == "admin"


def test_workers_and_pools(gateway: FakeGateway) -> None:
    gateway.on(messages.ListWorkers, lambda m: [messages.WorkerRows(tag_of(m), (WORKER,))])
    gateway.on(messages.ListPools, lambda m: [messages.PoolRows(tag_of(m), (POOL,))])
    line = run("workers").stdout.strip().splitlines()[-1].split()
    assert line[:10] == ["w0", "-", "n", "both", "connected", "1", "7/8", "28/32", "500/512", "10"]
    assert json.loads(run("workers", "-o", "json").stdout)[0]["capacity"]["page_bytes"] == 98_304
    gateway.on(messages.ListWorkers, lambda m: [messages.WorkerRows(tag_of(m), (UNSEEN,))])
    assert run("workers").stdout.split()[-1] == "-"
    line = run("pool").stdout.strip().splitlines()[-1].split()
    assert line[:7] == ["n", "1024", "1000", "24", "0", "0", "0"]
    assert line[-5:] == ["96.0", "KiB", "96.0", "MiB", "w0"]


# ---------------------------------------------------------------- telling


@pytest.mark.parametrize(
    ("args", "message", "role"),
    [
        (["abort", "r1", "r2"], messages.AbortRequests(1, ("r1", "r2")), "client"),
        (["retract", "r1"], messages.RetractRequests(1, ("r1",), True, True), "admin"),
        (["retract", "r1", "--drop", "--no-hold"], messages.RetractRequests(1, ("r1",), False, False), "admin"),
        (["resume", "r1"], messages.ResumeRequests(1, ("r1",)), "admin"),
        (["resize", "r1", "--hot-slots", "4096"], messages.ResizeRequests(1, ("r1",), 4096), "admin"),
        (["resize", "r1", "--hot-slots", "resident"], messages.ResizeRequests(1, ("r1",), 0), "admin"),
        (["resize", "r1", "--hot-slots", "auto"], messages.ResizeRequests(1, ("r1",), -1), "admin"),
        (["drain", "w0", "--handover"], messages.DrainWorkers(1, ("w0",), True, 300.0), "admin"),
        (["drain", "--all", "--deadline", "5"], messages.DrainWorkers(1, (), False, 5.0), "admin"),
        (["undrain", "w0"], messages.UndrainWorkers(1, ("w0",)), "admin"),
        (["forget", "w0", "g1"], messages.ForgetWorkers(1, ("w0", "g1")), "admin"),
        (["stop", "--deadline", "7"], messages.StopCoordinator(1, 7.0), "admin"),
    ],
)
def test_each_command_sends_its_message_on_its_socket(
    gateway: FakeGateway, args: list[str], message: messages.AdminMessage, role: str
) -> None:
    gateway.on(type(message), lambda m: [messages.Done(tag_of(m), ("first line", "second line"))])
    result = run(*args)
    assert (result.exit_code, result.stdout) == (0, "first line\nsecond line\n")
    assert gateway.received == [message]
    assert gateway.roles == [role]
    assert json.loads(run(*args, "-o", "json").stdout) == {"detail": ["first line", "second line"]}
    assert json.loads(run(*args, "-o", "jsonl").stdout.splitlines()[1]) == {"detail": "second line"}


def test_workers_name_group_rank_and_what_a_rank_waits_for(gateway: FakeGateway) -> None:
    rank = {"group": "g0", "rank": 1}
    rows = (
        row(WORKER, **rank, ranks_missing=(0,)),
        row(WORKER, **rank, ranks_missing=(0, 2, 3, 4, 5)),
        row(WORKER, **rank, awaits="w3"),
    )
    gateway.on(messages.ListWorkers, lambda m: [messages.WorkerRows(tag_of(m), rows)])
    lines = run("workers").stdout.strip().splitlines()[-3:]
    assert [line.split()[1] for line in lines] == ["g0/1"] * 3
    shown = ("connected, rank 0 missing", "connected, ranks 0, 2, 3, 4, … missing", "connected, awaits w3")
    for line, text in zip(lines, shown, strict=True):
        assert f" {text} " in line


def test_drain_of_a_group_waits_for_all_of_its_ranks(gateway: FakeGateway) -> None:
    states = iter(["draining", "drained"])
    gateway.on(messages.DrainWorkers, lambda m: [messages.Done(tag_of(m))])

    def rows(m: Any) -> list[messages.GatewayMessage]:
        first = row(WORKER, group="g0", state="drained")
        second = row(WORKER, worker="w1", group="g0", rank=1, state=next(states))
        return [messages.WorkerRows(tag_of(m), (first, second, row(WORKER, worker="w2")))]

    gateway.on(messages.ListWorkers, rows)
    assert run("drain", "g0", "--wait").exit_code == 0
    assert [type(message) for message in gateway.received[1:]] == [messages.ListWorkers] * 2


@pytest.mark.refuses("no such worker")
def test_drain_waits_until_the_workers_are_drained(gateway: FakeGateway) -> None:
    states = iter(["draining", "disconnected", "drained"])  # one that is away has not said that it is empty
    gateway.on(messages.DrainWorkers, lambda m: [messages.Done(tag_of(m))])
    gateway.on(
        messages.ListWorkers,
        lambda m: [messages.WorkerRows(tag_of(m), (row(WORKER, state=next(states)), row(WORKER, worker="w1")))],
    )
    result = run("drain", "w0", "--wait")
    assert (result.exit_code, result.stderr) == (0, "drained\n")
    assert [type(message) for message in gateway.received[1:]] == [messages.ListWorkers] * 3
    states = iter(["drained"])
    assert run("drain", "w7", "--wait").exit_code == EXIT_CODES["not_found"]


# ---------------------------------------------------------------- streams


def serve_output(
    gateway: FakeGateway, kind: type, chunks: list[str], outcome: str = "FINISHED", tail: str = "", start: int = 0
) -> None:
    """Accept, deliver each of `chunks` separately, end."""

    def answer(message: Any) -> Iterator[messages.GatewayMessage]:
        yield messages.Accepted(message.tag, "r1", 3)
        position = start
        for chunk in chunks:
            tokens = np.frombuffer(chunk.encode("latin-1"), np.uint8).astype(np.int32)
            yield messages.Delivery(
                pack_int32([3]), pack_int32([position]), pack_int32([len(tokens)]), pack_int32(tokens)
            )
            position += len(tokens)
        yield messages.Ended(3, "r1", outcome, "stop", position, tail)

    gateway.on(kind, lambda m: list(answer(m)))


def test_submit_streams_text_and_sends_its_options(gateway: FakeGateway) -> None:
    serve_output(gateway, messages.Submit, ["caf\xc3", "\xa9 no", "ir"], tail=" fin")
    options = ["--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--seed", "4", "--stop", "END"]
    result = run("submit", "hé", "--ignore-eos", "--priority", "2", "--id", "mine", *options)
    assert (result.exit_code, result.stdout) == (0, "café noir fin\n")
    (submit,) = gateway.received
    assert isinstance(submit, messages.Submit)
    assert unpack_int32(submit.prompt, "prompt").tolist() == list("hé".encode())
    assert submit.sampling == messages.Sampling(9, 0.5, 0.9, 4, ("END",), True)
    assert (submit.request_id, submit.priority, submit.subscribe) == ("mine", 2, True)
    assert submit.draft_tokens == messages.DRAFT_TOKENS_MAX
    assert gateway.roles == ["client"]


@pytest.mark.parametrize("rest", [(), ("--detach",)])
def test_submit_limits_drafts(gateway: FakeGateway, rest: tuple[str, ...]) -> None:
    serve_output(gateway, messages.Submit, ["x"])
    assert run("submit", "a", "--draft-tokens", "1", *rest).exit_code == 0
    (submit,) = gateway.received
    assert isinstance(submit, messages.Submit)
    assert (submit.draft_tokens, submit.subscribe) == (1, not rest)


def test_a_prompt_comes_from_a_file_or_stdin(gateway: FakeGateway, tmp_path: Path) -> None:
    serve_output(gateway, messages.Submit, ["x"])
    (tmp_path / "prompt.txt").write_text("from a file")
    run("submit", "--file", str(tmp_path / "prompt.txt"))
    run("submit", stdin="from stdin")
    run("submit", "-", stdin="from a dash")
    prompts = [bytes(unpack_int32(m.prompt, "p").tolist()) for m in gateway.received if isinstance(m, messages.Submit)]
    assert prompts == [b"from a file", b"from stdin", b"from a dash"]


def test_raw_ids_are_sent_and_printed(gateway: FakeGateway) -> None:
    serve_output(gateway, messages.Submit, ["AB", "C"])
    result = run("submit", "--tokens", "1,2 300")
    assert result.stdout == "65 66 67 \n"
    (submit,) = gateway.received
    assert isinstance(submit, messages.Submit)
    assert unpack_int32(submit.prompt, "prompt").tolist() == [1, 2, 300]


def test_output_on_an_ascii_terminal_is_replaced(gateway: FakeGateway) -> None:
    serve_output(gateway, messages.Submit, ["caf\xc3", "\xa9"], tail=" 京")
    ascii_only = CliRunner(charset="ascii")
    assert ascii_only.invoke(main, ["submit", "x"]).stdout == "caf? ?\n"
    as_json = ascii_only.invoke(main, ["submit", "x", "-o", "json"]).stdout
    assert json.loads(as_json)["text"] == "café 京", "nothing of it is lost"
    command = [sys.executable, "-m", "hisparse.cli", "submit", "x"]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environ, check=True, timeout=HANG_LIMIT_S)
    assert (done.stdout, done.stderr) == (b"caf? ?\n", b"")


def test_an_output_as_json(gateway: FakeGateway) -> None:
    serve_output(gateway, messages.Submit, ["ab", "c"], tail="!")
    result = json.loads(run("submit", "x", "-o", "json").stdout)
    assert result == {
        "request_id": "r1", "outcome": "FINISHED", "reason": "stop", "generated_tokens": 3, "tokens": [97, 98, 99],
        "text": "abc!",
    }  # fmt: skip
    lines = [json.loads(line) for line in run("submit", "x", "-o", "jsonl").stdout.splitlines()]
    assert [token for line in lines[:-1] for token in line["tokens"]] == [97, 98, 99]
    assert "".join(line["text"] for line in lines) == "abc!"
    assert lines[-1]["outcome"] == "FINISHED"


@pytest.mark.parametrize("outcome", ["ABORTED", "FAILED"])
def test_an_output_that_does_not_finish_exits_with_1(gateway: FakeGateway, outcome: str) -> None:
    serve_output(gateway, messages.Submit, ["ab"], outcome=outcome)
    result = run("submit", "x")
    assert (result.exit_code, result.stdout) == (1, "ab\n")
    assert result.stderr == f"r1 {outcome}: stop\n"


def test_detach_prints_the_id_and_does_not_subscribe(gateway: FakeGateway) -> None:
    gateway.on(messages.Submit, lambda m: [messages.Accepted(tag_of(m), "r9", -1)])
    assert run("submit", "x", "--detach").stdout == "r9\n"
    assert json.loads(run("submit", "x", "--detach", "-o", "json").stdout) == {"request_id": "r9"}
    assert [m.subscribe for m in gateway.received if isinstance(m, messages.Submit)] == [False, False]


def test_attach_starts_at_the_given_offset(gateway: FakeGateway) -> None:
    serve_output(gateway, messages.Attach, ["later"], start=40)
    result = run("attach", "r1", "--from", "40")
    assert (result.exit_code, result.stdout) == (0, "later\n")
    assert gateway.received == [messages.Attach(1, "r1", 40)]


def test_empty_prompt_is_refused_before_sending(gateway: FakeGateway) -> None:
    result = run("submit", "")
    assert result.exit_code == EXIT_CODES["bad_input"]
    assert "empty prompt" in result.stderr
    assert gateway.received == []


def test_a_tokenizer_is_fetched_once_and_kept(gateway: FakeGateway) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"hello": 7, "world": 8, "?": 0}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    data = library.to_str().encode()
    from protocol.tokenizer_files import TokenizerFile

    kept = TokenizerFile("json", data)
    gateway.model = row(MODEL, tokenizer_kind="json", tokenizer_hash=kept.hash)
    gateway.on(messages.FetchTokenizer, lambda m: [messages.TokenizerData(tag_of(m), "json", kept.hash, data)])
    serve_output(gateway, messages.Submit, ["\x08", "\x07"])
    for _ in range(2):
        assert run("submit", "hello world").stdout.split() == ["world", "hello"]
    kinds = [type(message).__name__ for message in gateway.received]
    assert kinds == ["FetchTokenizer", "Submit", "Submit"]


# ---------------------------------------------------------------- waiting

WAITS = row(REQUEST, state="QUEUED", waits_for="no_worker", reason="no worker is connected")


def serve_waiting(gateway: FakeGateway, kind: type, *rows: messages.RequestRow) -> None:
    """Accept; the request is described by `rows` in turn, and by the last one from then on."""
    left = list(rows)
    gateway.on(kind, lambda m: [messages.Accepted(tag_of(m), "r1", 3)])
    details = (
        messages.RequestDetail(0, it, ()) for it in iter(lambda: left.pop(0) if len(left) > 1 else left[0], None)
    )
    gateway.on(messages.DescribeRequest, lambda m: [row(next(details), tag=tag_of(m))])


def follow_waiting(gateway: FakeGateway, **options: Any) -> Follow:
    return Follow(gateway.client_endpoint, "table", raw=True, tells_waits=True, **options)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.refuses("request_id={}: not ended {}{}")
def test_what_a_request_waits_for_is_told_once_for_each_kind(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    seats = row(WAITS, waits_for="seats", reason="needs 1 seat, w0 has 0 of 1 free")
    running = row(REQUEST, reason="on w0")
    serve_waiting(gateway, messages.Attach, WAITS, WAITS, seats, seats, running, WAITS)
    with pytest.raises(Unavailable):
        attach_and_follow(follow_waiting(gateway, timeout_s=1.0), "r1", 0)
    assert capsys.readouterr().err.splitlines() == [
        "r1 waits: no worker is connected",
        "r1 waits: needs 1 seat, w0 has 0 of 1 free",
        "r1 waits: no worker is connected",
    ]


@pytest.mark.usefixtures("impatient")
def test_what_a_request_waits_for_is_not_told_to_a_pipe(gateway: FakeGateway) -> None:
    serve_waiting(gateway, messages.Submit, WAITS)
    result = run("submit", "x", "--timeout", "0.3")
    assert "r1 waits" not in result.stderr.replace("it waits", "")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "kind"), [(["submit", "x"], messages.Submit), (["attach", "r1", "--from", "4"], messages.Attach)]
)
@pytest.mark.usefixtures("impatient")
def test_timeout_leaves_the_request_and_says_how_to_attach(gateway: FakeGateway, args: list[str], kind: type) -> None:
    serve_waiting(gateway, kind, WAITS)
    result = run(*args, "--timeout", "0.2")
    offset = 4 if "attach" in args else 0
    assert result.exit_code == EXIT_CODES["unavailable"]
    assert result.stderr == (
        "hisparse: request_id=r1: not ended after 0.2 s, it waits: no worker is connected "
        f"(it goes on: hisparse attach r1 --from {offset}, or hisparse abort r1)\n"
    )
    assert not any(isinstance(it, messages.AbortRequests) for it in gateway.received)


def test_timeout_tells_the_state_of_a_request_that_does_not_wait(gateway: FakeGateway) -> None:
    serve_waiting(gateway, messages.Submit, REQUEST)
    assert "not ended after 0.2 s, it is RUNNING" in run("submit", "x", "--timeout", "0.2").stderr


# ---------------------------------------------------------------- the end of an output


@pytest.mark.parametrize(
    ("change", "swaps"),
    [
        ({"hits": 30, "misses": 10, "hot_slots": 64}, "swap-in: 75.0% hits (30 hits, 10 misses)"),
        ({"hits": 30, "misses": 0, "hot_slots": -1}, "swap-in: none needed (all rows were on the device)"),
    ],
)
def test_terminal_is_told_id_tokens_and_hit_rate_at_the_end(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], change: dict[str, int], swaps: str
) -> None:
    serve_output(gateway, messages.Attach, ["ab", "c"])
    ended = row(REQUEST, state="FINISHED", **change)
    gateway.on(messages.DescribeRequest, lambda m: [messages.RequestDetail(tag_of(m), ended, ())])
    assert attach_and_follow(Follow(gateway.client_endpoint, "table", tells_end=True), "r1", 0) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("abc\n", f"r1 FINISHED: stop, 3 tokens, {swaps}\n")


def test_pipe_is_told_nothing_at_the_end(gateway: FakeGateway) -> None:
    serve_output(gateway, messages.Submit, ["ab", "c"])
    result = run("submit", "x")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not any(isinstance(message, messages.DescribeRequest) for message in gateway.received)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("piece", "args", "shown"),
    [("hi", [], "hi\n"), ("hi\n", [], "hi\n"), ("", [], ""), ("hi", ["--tokens"], "104 105 \n")],
)
def test_error_after_streamed_text_begins_on_its_own_line(
    gateway: FakeGateway, piece: str, args: list[str], shown: str
) -> None:
    tokens = list(piece.encode())
    delivery = messages.Delivery(pack_int32([3]), pack_int32([0]), pack_int32([len(tokens)]), pack_int32(tokens))
    gateway.on(messages.Attach, lambda m: [messages.Accepted(tag_of(m), "r1", 3), *([delivery] if tokens else [])])
    gateway.on(messages.DescribeRequest, lambda m: [messages.RequestDetail(tag_of(m), REQUEST, ())])
    result = run("attach", "r1", *args, "--timeout", "0.3")
    assert (result.exit_code, result.stdout) == (6, shown)
    assert result.stderr.startswith("hisparse: request_id=r1: not ended after 0.3 s")


def test_sampling_defaults_of_command_and_http_are_the_same() -> None:
    """As OpenAI's; a seed that is not given is another one each time."""
    from hisparse.cli.submit import SEED_BITS, submit
    from hisparse.http.apis import asks

    defaults = {option.name: option.default for option in submit.params}
    assert defaults["temperature"] == asks.TEMPERATURE_DEFAULT == 1.0
    assert defaults["top_p"] == 1.0
    assert SEED_BITS == asks.SEED_BITS


def test_seed_is_drawn_for_each_submission(gateway: FakeGateway) -> None:
    serve_output(gateway, messages.Submit, ["x"])
    for _ in range(2):
        run("submit", "x")
    one, other = (m.sampling for m in gateway.received if isinstance(m, messages.Submit))
    assert one.temperature == other.temperature == 1.0
    assert 0 <= one.seed != other.seed < 2**63


@pytest.mark.parametrize("output", ["json", "jsonl"])
def test_log_probabilities_are_fields_of_json(gateway: FakeGateway, output: str) -> None:
    rows = np.array([[0, 104, 0], [0, 120, 0]], np.int32)
    rows.view(np.float32)[:, 0::2] = [[-0.25, -0.25], [-2.0, -0.5]]
    logprobs = messages.Logprobs(pack_int32([3]), rows.tobytes())
    tokens = pack_int32([104, 105])
    delivery = messages.Delivery(pack_int32([3]), pack_int32([0]), pack_int32([2]), tokens, logprobs)
    end = messages.Ended(3, "r1", "FINISHED", "length", 2)
    gateway.on(messages.Submit, lambda m: [messages.Accepted(tag_of(m), "r1", 3), delivery, end])
    told = json.loads(run("submit", "x", "--logprobs", "1", "-o", output).stdout.splitlines()[0])
    assert told["logprobs"] == [
        {"logprob": -0.25, "top": [{"token": 104, "logprob": -0.25}]},
        {"logprob": -2.0, "top": [{"token": 120, "logprob": -0.5}]},
    ]
    (submit,) = gateway.received
    assert isinstance(submit, messages.Submit)
    assert submit.sampling.logprobs == 1
    assert "--logprobs needs -o json" in run("submit", "x", "--logprobs", "1").stderr


# ---------------------------------------------------------------- interruption


def test_ctrl_c_ends_an_action_at_a_checkpoint(gateway: FakeGateway) -> None:
    import signal

    passed: list[str] = []

    async def interrupted(client: Client) -> int:
        signal.raise_signal(signal.SIGINT)
        passed.append("the instruction behind")
        try:
            await trio.sleep_forever()
        finally:
            passed.append("cleanup")

    before = signal.getsignal(signal.SIGINT)
    assert Follow(gateway.client_endpoint, "table").run(interrupted) == 130
    assert passed == ["the instruction behind", "cleanup"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.process
def test_ctrl_c_names_the_attach_command(gateway: FakeGateway) -> None:
    gateway.on(
        messages.Submit,
        lambda m: [
            messages.Accepted(tag_of(m), "r1", 3),
            messages.Delivery(pack_int32([3]), pack_int32([0]), pack_int32([2]), pack_int32([104, 105])),
        ],
    )
    import signal

    child = subprocess.Popen(
        [sys.executable, "-m", "hisparse.cli", "submit", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.read(2) == b"hi"
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=HANG_LIMIT_S)
    assert child.returncode == 130
    assert stdout == b"\n"
    assert stderr == b"r1 goes on; hisparse attach r1 --from 2, or hisparse abort r1\n"


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({"hot_slots": 64, "hits": 3, "misses": 1}, ("swap-in   75.0% hits (3 hits, 1 miss)", "retracted twice")),
        (
            {"hot_slots": 0, "hits": 4, "misses": 0, "retractions": 1},
            ("swap-in   none needed (all rows are on the device)", "retracted once"),
        ),
        ({"hits": 0, "misses": 0, "retractions": 0}, ("swap-in   none yet", "retracted never")),
        ({"retractions": 5}, ("retracted 5 times", "age       1m15s")),
        ({"drafted_tokens": 8, "accepted_tokens": 6}, ("drafts    8 verified, 6 accepted (75.0%)",)),
        (
            {"host_pages": 1, "durable_tokens": 1, "hot_chunks": 1},
            ("memory    1 host page, 1 row durable, 1 hot chunk",),
        ),
        ({"state": "RETRACTED", "held": True}, ("r1  HELD",)),
        ({"state": "RETRACTING", "held": True}, ("r1  RETRACTING",)),
        ({"state": "FINISHED", "hot_slots": -1}, ("r1  FINISHED", "took      1m15s")),
        (
            {"state": "FINISHED", "hot_slots": -1, "hits": 9, "misses": 0},
            ("swap-in   none needed (all rows were on the device)",),
        ),
        ({"state": "HELD", "hot_slots": -1, "hits": 9, "misses": 3}, ("75.0% hits (9 hits, 3 misses)",)),
    ],
)
def test_a_request_is_described_in_words(changed: dict[str, object], lines: tuple[str, ...]) -> None:
    from hisparse.cli.requests import _history_lines

    row = msgspec.structs.replace(REQUEST, **({"retractions": 2} | changed))
    text = "\n".join(_history_lines(messages.RequestDetail(1, row, ())))
    assert all(line in text for line in lines), text


# ---------------------------------------------------------------- settings and completion


def test_config_show_names_the_origin_of_each_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads no file of keys."""
    file = tmp_path / "hisparse.toml"
    file.write_text('[worker]\nseats = 3\nhot_size_classes = [64, 128]\n[http]\napi_keys_file = "/nowhere/keys"\n')
    monkeypatch.setenv("HISPARSE_WORKER_THREADS", "5")
    args = ["config", "show", "--config", str(file), "--set", "http.port=1", "--insecure"]
    shown = run(*args, "-o", "json")
    assert shown.exit_code == 0, shown.stderr
    rows = {row["setting"]: (row["value"], row["origin"]) for row in json.loads(shown.stdout)}
    known = {f"{section}.{field}" for section, kind in SECTIONS.items() for field in kind.__struct_fields__}
    assert rows.keys() == known
    assert rows["worker.seats"] == (3, str(file))
    assert rows["worker.threads"] == (5, "HISPARSE_WORKER_THREADS")
    assert rows["http.port"] == (1, "the command line")
    assert rows["cluster.insecure"] == (True, "the command line")
    assert rows["worker.dtype"] == ("auto", "default")
    assert rows["http.api_keys_file"] == ("/nowhere/keys", str(file))
    table = run(*args).stdout
    assert re.search(r"worker\.hot_size_classes +64,128 +" + re.escape(str(file)), table)
    assert re.search(r"cluster\.insecure +true +the command line", table)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_asks_the_command_that_it_completes(shell: str) -> None:
    script = run("completion", shell).stdout
    assert f"_HISPARSE_COMPLETE={shell}_complete" in script


def test_completion_lists_commands_and_options() -> None:
    def completed(words: str, at: int) -> list[str]:
        environ = {"_HISPARSE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        found = CliRunner().invoke(main, [], prog_name="hisparse", env=environ, standalone_mode=True)
        return [line.partition(",")[2] for line in found.stdout.splitlines()]

    assert completed("hisparse comp", 1) == ["completion"]
    assert completed("hisparse completion ", 2) == ["bash", "zsh", "fish"]
    assert "--max-tokens" in completed("hisparse submit --max", 2)


def test_short_options_mean_the_same_everywhere() -> None:
    meanings: dict[str, set[str]] = {}

    def collect(command: click.Command, context: click.Context) -> None:
        for param in command.params:
            longest = max(param.opts, key=len, default="")
            for short in (option for option in param.opts if len(option) == 2):
                meanings.setdefault(short, set()).add(longest)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                collect(found, click.Context(found, parent=context))

    root = main
    collect(root, click.Context(root))
    assert "-o" in meanings
    assert {short: found for short, found in meanings.items() if len(found) > 1} == {}
