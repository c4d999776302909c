"""Each refusal of a command that names values to use instead: its text, and that the values are accepted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.scheduling.commands import check_size
from hisparse.cli import main
from protocol import messages
from protocol.errors import HiSparseError
from protocol.sizing import Length
from protocol.transport.keys import make_keys, read_allowed, read_peer_key
from tests.hisparse.test_cli import CAPACITY, MODEL
from tests.support.fakes.gateway import FakeGateway

DONE = 0


def run(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command))


def answer_resize(ask: messages.AdminMessage) -> Sequence[messages.GatewayMessage]:
    """As the coordinator does: its rule, over one worker."""
    assert isinstance(ask, messages.ResizeRequests)
    try:
        check_size(ask.hot_slots, "r1", Length(100, 0, 64), [("w0", CAPACITY)])
    except HiSparseError as error:
        return [messages.Failure(ask.tag, error.code, error.message, error.field, error.value, error.remedy)]
    return [messages.Done(ask.tag, ("r1: resized",))]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    monkeypatch.setenv("HISPARSE_CLUSTER_RUNTIME_DIR", str(tmp_path))
    with FakeGateway(tmp_path, MODEL) as fake:
        fake.on(messages.ResizeRequests, answer_resize)
        fake.on(messages.DrainWorkers, lambda ask: [messages.Done(ask.tag, ("w0: draining",))])
        fake.on(messages.ListRequests, lambda ask: [messages.RequestRows(ask.tag, ())])
        fake.on(messages.ReleaseQuarantine, lambda ask: [messages.Done(ask.tag, ("w0: released",))])
        yield fake


SIZES = "write a number and a unit: KiB, MiB, GiB, TiB, or KB, MB, GB, TB of 1000"
UNITS = ("60KiB", "60MiB", "60GiB", "60TiB", "60KB", "60MB", "60GB", "60TB", "60Gib")
SHOW = "config show --set"


@pytest.mark.parametrize(
    ("command", "code", "text", "remedies"),
    [
        (
            "resize r1 --hot-slots 0",
            2,
            "'0' is not a number of slots, resident or auto",
            ["resize r1 --hot-slots resident", "resize r1 --hot-slots auto", "resize r1 --hot-slots 192"],
        ),
        (
            "resize r1 --hot-slots 100",
            2,
            "hot_slots=100: no such hot size (choose resident, auto, or a size of the workers: 192)",
            ["resize r1 --hot-slots resident", "resize r1 --hot-slots auto", "resize r1 --hot-slots 192"],
        ),
        (
            f"{SHOW} worker.device_mem=lots --set worker.device=cuda",
            8,
            f"worker.device_mem=lots: not a size ({SIZES}; or auto)",
            [f"{SHOW} worker.device_mem={it} --set worker.device=cuda" for it in (*UNITS, "auto")],
        ),
        (
            f"{SHOW} worker.device_mem=lots --set worker.device=cpu",
            8,
            f"worker.device_mem=lots: not a size ({SIZES})",
            [f"{SHOW} worker.device_mem={it} --set worker.device=cpu" for it in UNITS],
        ),
        (
            f"{SHOW} worker.device_mem=auto --set worker.device=cpu",
            8,
            "set one, as in 4GiB",
            [f"{SHOW} worker.device_mem=4GiB --set worker.device=cpu"],
        ),
        (f"{SHOW} worker.seets=1", 8, "did you mean seats?", [f"{SHOW} worker.seats=1"]),
        (f"{SHOW} worker.host_mem=lots", 8, f"({SIZES}; or auto)", [f"{SHOW} worker.host_mem=auto"]),
        ("drain", 2, "name workers, or pass --all", ["drain w0", "drain --all"]),
        ("release-quarantine w0", 2, "pass --i-am-sure", ["release-quarantine w0 --i-am-sure"]),
        (
            "requests --state runing",
            2,
            "'runing' is none of queued",
            ["requests --state queued", "requests --state running", "requests --state held"],
        ),
    ],
)
def test_the_values_that_a_refusal_names_are_accepted(
    service: FakeGateway, command: str, code: int, text: str, remedies: list[str]
) -> None:
    refused = run(command)
    assert (refused.exit_code, text in refused.stderr) == (code, True), refused.stderr
    for remedy in remedies:
        done = run(remedy)
        assert done.exit_code == DONE, f"{remedy}: {done.stderr}"


def test_a_missing_admin_key_is_made_with_the_keys_of_the_coordinator(tmp_path: Path) -> None:
    """`keys init` beside the client's keys would make those of another server, which the coordinator refuses."""
    server, mine = tmp_path / "server", tmp_path / "mine"
    make_keys(server)
    mine.mkdir(mode=0o700)
    (server / "client.key").rename(mine / "client.key")
    refused = run(f"drain --all --keys-dir {mine} --set cluster.admin_endpoint=tcp://127.0.0.1:1")
    assert refused.exit_code == 8
    assert "keys init" not in refused.stderr
    assert f"hisparse keys add admin NAME --keys-dir DIRECTORY; copy the file to {mine}/admin.key" in refused.stderr
    made = run(f"keys add admin ops --keys-dir {server}")
    assert made.exit_code == DONE, made.stderr
    Path(made.stdout.strip()).rename(mine / "admin.key")
    key = read_peer_key(mine, "admin")
    assert ("admin", "ops", key.public) in [(it.role, it.name, it.public) for it in read_allowed(server)]
    assert key.server == read_peer_key(mine, "client").server
