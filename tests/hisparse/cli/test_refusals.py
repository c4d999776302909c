"""Each refusal of a command: its text, and that the values which it names are accepted. One table."""

from __future__ import annotations

import atexit
import shlex
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import click
import msgspec
import pytest
import trio
import zmq
from click.testing import CliRunner, Result

import hisparse
from basics.request_checks import check_salt
from coordinator.gateway.gateway import ASKS_MAX, Gateway
from coordinator.scheduler.api import _digest_of
from coordinator.scheduler.validation import check_fits, check_submit
from coordinator.scheduler.worker_registry import WorkerRegistry
from coordinator.turn.commands import check_size, release_quarantine
from hisparse.cli import main
from hisparse.cli.submit import _prompt_text
from hisparse.cluster.children import die_with_parent
from hisparse.cluster.placement import place
from hisparse.console.options import EXIT_CODES
from hisparse.console.session import _until_drained
from hisparse.demo.oracles import consult
from hisparse.demo.plan import DemoOptions, DemoRequest, memory_for
from hisparse.demo.setup import write_checkpoint
from hisparse.http.apis.anthropic.bodies import MessagesBody
from hisparse.http.apis.asks import chat_prompt
from hisparse.http.apis.body import read_body
from hisparse.http.apis.prompts import text_ids
from hisparse.http.apis.structured import StructuredOutputs, of_structured_outputs, one_of, schema_in
from hisparse.http.models.formats.call_grammars import members_of
from hisparse.http.models.formats.conversation import Tool
from hisparse.http.models.grammar_checks import GrammarChecks, _lark
from hisparse.http.models.grammars import GrammarPlan
from hisparse.http.models.output_form import OutputForm
from hisparse.http.models.templates import render
from hisparse.manifests.environments import check_settings
from hisparse.manifests.values import read_values, size_bytes
from protocol import messages
from protocol.children import Children
from protocol.errors import (
    BY_CODE,
    BadInput,
    CapacityError,
    ConfigError,
    HiSparseError,
    NotAllowed,
    NotFound,
    Unavailable,
    WrongState,
)
from protocol.grammar_trials import Trials
from protocol.grammars import Matcher, Vocabulary
from protocol.rereading import state_of
from protocol.settings import WorkerSettings
from protocol.sizing import Length
from protocol.text import ByteTokenizer, JsonTokenizer, make_tokenizer
from protocol.tokenizer_files import read_tokenizer
from protocol.transport.keys import add_peer, make_keys, read_allowed, read_peer_key
from tests.hisparse.cli.test_cli import CAPACITY, MODEL, WORKER
from tests.hisparse.http.test_errors import CASES as HTTP_CASES
from tests.hisparse.http.test_errors import WIRE_CASES, check_http_case, check_wire_case
from tests.manifests.test_values import SMALL
from tests.support.fakes.gateway import FakeGateway
from tests.support.http_rig import byte_tokenizer_json
from tests.support.refusals import Site, declared, named, reached_in, sites
from tests.support.walks import BYTES
from worker.runners.tiny import write_tiny_checkpoint

DONE = 0
NO_TOKENIZER: Final = ByteTokenizer()
BY_EXIT: Final = {exit_code: BY_CODE[code] for code, exit_code in EXIT_CODES.items()}


def run(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command), prog_name="hisparse")


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
        fake.on(messages.Submit, lambda _: [])
        fake.on(messages.ReleaseQuarantine, lambda ask: [messages.Done(ask.tag, ("w0: released",))])
        yield fake


SIZES = "write a number and a unit: KiB, MiB, GiB, TiB, or KB, MB, GB, TB of 1000"
UNITS = ("60KiB", "60MiB", "60GiB", "60TiB", "60KB", "60MB", "60GB", "60TB", "60Gib")
SHOW = "config show --set"
SIZE = "size --config {tmp}/tiny --context 1k"


class Case(NamedTuple):
    """`command` is refused with exit code `code` and `text`; each of `remedies`, which the text names, is then done.

    {tmp} is the directory of the test, in which `given` has put what the command needs.
    """

    command: str
    code: int
    text: str
    remedies: Sequence[str] = ()
    given: Callable[[Path], object] = lambda _: None


def keys_in(directory: Path) -> None:
    make_keys(directory / "keys")


def damaged(name: str, text: str, mode: int = 0o600) -> Callable[[Path], None]:
    """Keys, of which file `name` has another text or mode."""

    def give(directory: Path) -> None:
        keys_in(directory)
        file = directory / "keys" / name
        file.write_text(text or file.read_text())
        file.chmod(mode)

    return give


def written(name: str, text: str | bytes) -> Callable[[Path], None]:
    def give(directory: Path) -> None:
        (directory / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        (directory / name).chmod(0o600)

    return give


@cache
def made_once() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="refusals-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_tiny_checkpoint(directory / "tiny", "deepseek-v3.2")
    return directory / "tiny"


def tiny(directory: Path) -> None:
    shutil.copytree(made_once(), directory / "tiny")


#: What the CLI refuses, by what is wrong.
CASES: Final[dict[str, Case]] = {
    "no such command": Case("frobnicate", 2, "No such command 'frobnicate'"),
    "no hot size": Case(
        "resize r1 --hot-slots 0",
        2,
        "'0' is not a number of slots, resident or auto",
        ["resize r1 --hot-slots resident", "resize r1 --hot-slots auto", "resize r1 --hot-slots 192"],
    ),
    "hot size of no worker": Case(
        "resize r1 --hot-slots 100",
        2,
        "hot_slots=100: no such hot size (choose resident, auto, or a size of the workers: 192)",
        ["resize r1 --hot-slots resident", "resize r1 --hot-slots auto", "resize r1 --hot-slots 192"],
    ),
    "no size, on a GPU": Case(
        f"{SHOW} worker.device_mem=lots --set worker.device=cuda",
        8,
        f"worker.device_mem=lots: not a size ({SIZES}; or auto)",
        [f"{SHOW} worker.device_mem={it} --set worker.device=cuda" for it in (*UNITS, "auto")],
    ),
    "no size, on a CPU": Case(
        f"{SHOW} worker.device_mem=lots --set worker.device=cpu",
        8,
        f"worker.device_mem=lots: not a size ({SIZES})",
        [f"{SHOW} worker.device_mem={it} --set worker.device=cpu" for it in UNITS],
    ),
    "auto on a CPU": Case(
        f"{SHOW} worker.device_mem=auto --set worker.device=cpu",
        8,
        "set one, as in 4GiB",
        [f"{SHOW} worker.device_mem=4GiB --set worker.device=cpu"],
    ),
    "no such setting": Case(f"{SHOW} worker.seets=1", 8, "did you mean seats?", [f"{SHOW} worker.seats=1"]),
    "a setting that is gone": Case(
        f"{SHOW} worker.prefill_chunk_tokens=2048",
        8,
        "(remove it; worker.gap_target_ms bounds the gaps that prompts make)",
        [f"{SHOW} worker.gap_target_ms=0"],
    ),
    "no size of the pool": Case(
        f"{SHOW} worker.host_mem=lots", 8, f"({SIZES}; or auto)", [f"{SHOW} worker.host_mem=auto"]
    ),
    "setting without its section": Case(
        f"{SHOW} seats=1",
        8,
        "seats=1: unknown setting in the command line (did you mean worker.seats?)",
        [f"{SHOW} worker.seats=1"],
    ),
    "no whole number": Case("submit a --max-tokens 1.5", 2, "'--max-tokens': '1.5' is not a whole number. (see"),
    "no number of seconds": Case("stop --deadline soon", 2, "'--deadline': 'soon' is not a number. (see"),
    "no number": Case(f"{SHOW} worker.seats=many", 8, "worker.seats=many: expected a whole number"),
    "no list": Case(
        f"{SHOW} worker.hot_size_classes=[256]",
        8,
        "worker.hot_size_classes=[256]: expected a list of whole numbers (write it as 256,512 in the command line)",
        [f"{SHOW} worker.hot_size_classes=256,512"],
    ),
    "common option before a command that takes none": Case(
        "--runtime-dir {tmp} size --context 1k", 2, "size takes no --runtime-dir (see hisparse --help)"
    ),
    "no assignment": Case("workers --set nonsense", 2, "is not SECTION.FIELD=VALUE"),
    "no settings file": Case("workers --config {tmp}/none.toml", 8, "No such file"),
    "no TOML": Case("workers --config {tmp}/x.toml", 8, "not TOML", given=written("x.toml", "[worker\n")),
    "no section": Case(
        "config show --config {tmp}/x.toml",
        8,
        "worker=3: not a table (write [worker] in",
        given=written("x.toml", "worker = 3\n"),
    ),
    "no worker named": Case("drain", 2, "name workers, or pass --all", ["drain w0", "drain --all"]),
    "replacement with settings": Case(
        "up --replace-workers --seats 3", 2, "--replace-workers takes --deadline alone: settings stay as they are"
    ),
    "not sure": Case("release-quarantine w0", 2, "pass --i-am-sure", ["release-quarantine w0 --i-am-sure"]),
    "no such state": Case(
        "requests --state runing",
        2,
        "'runing' is none of queued",
        ["requests --state queued", "requests --state running", "requests --state held"],
    ),
    "live and ended": Case(
        "requests --live --state finished",
        2,
        "--live lists no finished request: leave out one of --live and --state",
        ["requests --live", "requests --state finished"],
    ),
    "no MIN:MAX": Case("demo --prompt-tokens 5", 2, "'5' is not MIN:MAX"),
    "few new tokens": Case("demo --new-tokens 1", 2, "new-tokens=1: the demo needs at least"),
    "no group of workers": Case("demo --workers 3 --group-size 2", 2, "(use a divisor of --workers)"),
    "no text of a prompt": Case(
        "demo --prompts {tmp}/x.bin", 2, "not readable as text", given=written("x.bin", b"\xff\xfe\xff")
    ),
    "no key directory": Case("keys list", 2, "give --keys-dir DIRECTORY", ["keys list --keys-dir {tmp}/keys"], keys_in),
    "unmakeable key directory": Case(
        "keys init --keys-dir /proc/none", 8, "cluster.keys_dir=/proc/none: No such file or directory"
    ),
    "keys are there": Case(
        "keys init --keys-dir {tmp}/keys", 8, "move it away first: replacing it would lock out its peer", given=keys_in
    ),
    "bad name of a key": Case(
        "keys add client a/b --keys-dir {tmp}/keys", 2, "letters, digits, dots, dashes and underscores", given=keys_in
    ),
    "right of an admin": Case(
        "keys add admin a --front --keys-dir {tmp}/keys",
        2,
        "only clients have rights (leave out --priority and --front)",
        ["keys add admin a --keys-dir {tmp}/keys"],
        keys_in,
    ),
    "right out of range": Case(
        "keys add client a --priority 1001 --keys-dir {tmp}/keys",
        2,
        "priority=1001: out of range (choose -1000 to 1000)",
        ["keys add client a --priority 1000 --keys-dir {tmp}/keys"],
        keys_in,
    ),
    "no key of that name": Case(
        "keys revoke client nemo --keys-dir {tmp}/keys",
        3,
        "has no allowed key (see: hisparse keys list)",
        ["keys list --keys-dir {tmp}/keys"],
        keys_in,
    ),
    "no line of keys": Case(
        "keys list --keys-dir {tmp}/keys",
        8,
        "not a role, a name, a public key and a right",
        given=damaged("allowed.keys", "client alice\n"),
    ),
    "no right of a key": Case(
        "keys list --keys-dir {tmp}/keys",
        8,
        "write priority=N behind the key, N being -1000 to 1000",
        given=damaged("allowed.keys", f"client alice {'a' * 40} speed=9\n"),
    ),
    "list that others change": Case(
        "keys list --keys-dir {tmp}/keys", 8, "others could change it", given=damaged("allowed.keys", "", 0o666)
    ),
    "endless list of keys": Case(
        "keys list --keys-dir {tmp}/keys", 8, "larger than", given=damaged("allowed.keys", "#" * (1 << 21))
    ),
    "list of keys that is no text": Case(
        "keys list --keys-dir {tmp}/keys",
        8,
        "not text",
        given=lambda tmp: (keys_in(tmp), (tmp / "keys" / "allowed.keys").write_bytes(b"\xff\xfe")),
    ),
    "no key file": Case(
        "workers --keys-dir {tmp}/keys --set cluster.client_endpoint=tcp://127.0.0.1:1",
        8,
        "not a key file",
        given=damaged("client.key", "nothing"),
    ),
    "key file of another role": Case(
        "workers --keys-dir {tmp}/keys --set cluster.client_endpoint=tcp://127.0.0.1:1",
        8,
        "role=admin: not a key of role client",
        given=lambda tmp: (keys_in(tmp), (tmp / "keys" / "admin.key").rename(tmp / "keys" / "client.key")),
    ),
    "key file without a key": Case(
        "workers --keys-dir {tmp}/keys --set cluster.client_endpoint=tcp://127.0.0.1:1",
        8,
        "has no server key",
        given=damaged("client.key", 'role = "client"\nname = "a"\n'),
    ),
    "a checkpoint is there": Case(
        "model tiny {tmp}/tiny",
        2,
        "a checkpoint exists (name another directory, or pass --force)",
        ["model tiny {tmp}/other", "model tiny {tmp}/tiny --force"],
        tiny,
    ),
    "unmakeable checkpoint": Case("model tiny /proc/none", 2, "path=/proc/none: No such file or directory"),
    "no address": Case(
        "up --model {tmp}/tiny --http 8000", 2, "'8000' is not HOST:PORT, as in 127.0.0.1:8000", given=tiny
    ),
    "no directory of the ready file": Case(
        "up --model {tmp}/tiny --ready-file {tmp}/none/ready", 2, "no directory {tmp}/none", given=tiny
    ),
    "no role": Case("up --model {tmp}/tiny --roles prefil", 2, "'prefil' is none of prefill, decode, both", given=tiny),
    "roles that serve nothing": Case(
        "up --model {tmp}/tiny --roles prefill", 8, "give one of them the role decode or both", given=tiny
    ),
    "roles for some workers": Case(
        "up --model {tmp}/tiny -n 3 --roles prefill,decode",
        8,
        "2 for 3 workers (name one for each of them)",
        given=tiny,
    ),
    "groups for some workers": Case(
        "up --model {tmp}/tiny -n 3 --group-size 2", 8, "(use one of 1, 3, or another number of workers)", given=tiny
    ),
    "group named for up": Case(
        "up --model {tmp}/tiny --set worker.group=g7 --set worker.group_rank=0", 8, "and pass --group-size", given=tiny
    ),
    "two standbys": Case("up --model {tmp}/tiny --set worker.standby=2", 8, "not from 0 to 1 (use 0 to 1)", given=tiny),
    "group on one GPU": Case(
        "up --model {tmp}/tiny -n 2 --group-size 2 --device cuda:0 --set worker.stream_backend=cuda "
        "--set worker.pool_dir={tmp}",
        8,
        "ranks of a group need a GPU each (set it to cuda)",
        given=tiny,
    ),
    "ports past the last": Case("up --model {tmp}/tiny --metrics-port 65535", 8, "choose one up to 65533", given=tiny),
    "cluster is there": Case(
        "up --model {tmp}/tiny", 4, "is already running there (stop it, or choose another --runtime-dir)", given=tiny
    ),
    "no answer": Case("submit x --timeout 0.2", 6, "no answer after 0.2 s (see: hisparse requests)"),
    "file that is no journal": Case(
        "journal check {tmp}/j.sqlite", 8, "it is not a journal", given=written("j.sqlite", "x" * 999)
    ),
    "prompt and file": Case("submit a --file LICENSE", 2, "give a prompt or --file, not both"),
    "prompt that is no text": Case(
        "submit --file {tmp}/x.bin", 2, "not UTF-8 text", given=written("x.bin", b"\xff\xfe")
    ),
    "empty prompt": Case("submit ''", 2, "empty prompt (give it at least one token)"),
    "no token id": Case("submit --tokens '1 x 3'", 2, "'x' is not a token id"),
    "token id beyond int32": Case("submit --tokens '1 2147483648'", 2, "a token id does not fit int32"),
    "token id beyond int64": Case(f"submit --tokens '1 {10**30}'", 2, "expected a list of int32 token ids"),
    "log-probabilities in a text": Case("submit a --logprobs 1", 2, "--logprobs needs -o json or -o jsonl"),
    "too many log-probabilities": Case("submit a --logprobs 21 -o json", 2, "21 is not in the range"),
    "too many drafts": Case("submit a --draft-tokens 5", 2, "5 is not in the range"),
    "seed out of range": Case("submit a --seed -1", 2, "-1 is not in the range"),
    "not a terminal": Case("top", 2, "not a terminal that can draw (use: hisparse requests --watch)"),
    "two kinds of GPU memory": Case(
        f"{SIZE} --host-mem 1GB",
        2,
        "give --gpu-mem, the whole memory of a GPU, or --device-mem, its KV budget",
        [f"{SIZE} --host-mem 1GB --gpu-mem 2GB", f"{SIZE} --host-mem 1GB --device-mem 1GB"],
        tiny,
    ),
    "no GPU, the budget": Case(
        f"{SIZE} --host-mem 1GB --device-mem auto",
        8,
        "--device-mem=auto: no GPU is here (give a size, as in 30GB)",
        [f"{SIZE} --host-mem 1GB --device-mem 30GB"],
        tiny,
    ),
    "no GPU": Case(f"{SIZE} --host-mem 1GB --gpu-mem auto", 8, "no GPU is here (give a size, as in 141GB)", given=tiny),
    "uneven GPUs": Case(
        f"{SIZE} --host-mem 1GB --gpu-mem 2GB --workers 3 --group-size 2", 2, "neither whole groups of 2", given=tiny
    ),
    "auto drafts in a group": Case(
        f"{SIZE} --host-mem 1GB --gpu-mem 2GB --group-size 2 --draft-tokens auto",
        2,
        "draft equally many tokens in all steps: use 0 to 4",
        given=tiny,
    ),
    "context of another model": Case(
        f"{SIZE.replace('1k', '128k')} --host-mem 1GB --gpu-mem 2GB",
        8,
        "(use 16384 or less)",
        [f"{SIZE.replace('1k', '16384')} --host-mem 1GB --gpu-mem 2GB"],
        tiny,
    ),
    "no count of tokens": Case(
        f"{SIZE.replace('1k', '1x')} --host-mem 1GB --gpu-mem 1GB", 2, "as in 131072 or 128k", given=tiny
    ),
    "no journal": Case("journal check {tmp}/none", 8, "cannot keep"),
    "unmakeable runtime directory": Case(
        "coordinator --runtime-dir /proc/none", 8, "cluster.runtime_dir=/proc/none: No such file or directory"
    ),
    "runtime directory of others": Case(
        "workers --runtime-dir {tmp}/open",
        8,
        "others could reach the sockets in it",
        given=lambda tmp: ((tmp / "open").mkdir(), (tmp / "open").chmod(0o755)),
    ),
    "no coordinator": Case(
        "workers --runtime-dir {tmp}/empty", 6, "no coordinator listens there (start the coordinator, or wait until"
    ),
    "no front": Case("reload http", 6, "run this where the front runs, with the same --runtime-dir"),
    "API key with two rights": Case(
        "http --api-keys {tmp}/api.keys",
        8,
        "said twice of one key (write priority=N and name=NAME once each behind a key)",
        given=written("api.keys", f"{'k' * 32} priority=1 priority=2\n"),
    ),
    "API key of no owner": Case(
        "http --api-keys {tmp}/api.keys", 8, "no name of an owner", given=written("api.keys", f"{'k' * 32} name=a/b\n")
    ),
    "no prefix named": Case("prefix drop", 2, "name prefixes, pass --owner, or pass --all"),
    "nested settings": Case(
        "workers --config {tmp}/x.toml", 8, "is nested too deeply", given=written("x.toml", "x = " + "[" * 99_999)
    ),
    "no API keys": Case("http --api-keys {tmp}/none", 8, "No such file or directory"),
    "API keys that others read": Case(
        "http --api-keys {tmp}/api.keys",
        8,
        "others may read it (chmod 600",
        given=lambda tmp: ((tmp / "api.keys").write_text("k" * 32), (tmp / "api.keys").chmod(0o644)),
    ),
    "API keys that are short": Case(
        "http --api-keys {tmp}/api.keys",
        8,
        "make keys with: openssl rand -hex 32",
        given=lambda tmp: ((tmp / "api.keys").write_text("short"), (tmp / "api.keys").chmod(0o600)),
    ),
    "file without API keys": Case(
        "http --api-keys {tmp}/api.keys",
        8,
        "0 keys, not 1 to",
        given=lambda tmp: ((tmp / "api.keys").write_text("# none"), (tmp / "api.keys").chmod(0o600)),
    ),
    "API keys that are no text": Case(
        "http --api-keys {tmp}/api.keys",
        8,
        "cannot be read: not text",
        given=lambda tmp: ((tmp / "api.keys").write_bytes(b"\xff\xfe"), (tmp / "api.keys").chmod(0o600)),
    ),
    "certificate without a key": Case(
        "http --tls-cert {tmp}/none.pem --tls-key {tmp}/none.key", 8, "http.tls_cert_file={tmp}/none.pem"
    ),
    "certificate that is none": Case(
        "http --tls-cert {tmp}/cert.pem --tls-key {tmp}/cert.pem",
        8,
        "holds no certificate in PEM form (name the chain, leaf first)",
        given=written("cert.pem", "x"),
    ),
    "address of another machine": Case(
        "http --host 203.0.113.1 --insecure", 8, "choose another http.host or http.port, 0 for any free port"
    ),
}


def check_case(directory: Path, case: Case) -> None:
    case.given(directory)
    refused = run(case.command.replace("{tmp}", str(directory)))
    shown = " ".join(refused.stderr.split())
    assert (refused.exit_code, case.text.replace("{tmp}", str(directory)) in shown) == (case.code, True), refused.output
    assert shown.startswith("hisparse: ")
    assert refused.stderr.count("\n") == 1, refused.stderr
    for remedy in case.remedies:
        done = run(remedy.replace("{tmp}", str(directory)))
        assert done.exit_code == DONE, f"{remedy}: {done.output}"


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("name", CASES)
def test_refusal_is_one_line_and_the_values_that_it_names_are_accepted(
    tmp_path: Path, run_dir: Path, name: str
) -> None:
    reached_in(run_dir, "commands", name, partial(check_case, tmp_path, CASES[name]))


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


# ---------------------------------------------------------------- what takes more than a command line


class Call(NamedTuple):
    """`raises` (directory, monkeypatch) gives an error of `kind` with `text`."""

    kind: type[HiSparseError]
    text: str
    raises: Callable[[Path, pytest.MonkeyPatch], object]


def failing(result: Result) -> None:
    """Raise the error that a command showed, as its text."""
    raise BY_EXIT[result.exit_code](result.stderr)


def without(module: str, command: str) -> Callable[[Path, pytest.MonkeyPatch], object]:
    """`command` where a module is not installed."""

    def raises(directory: Path, patched: pytest.MonkeyPatch) -> None:
        patched.setitem(sys.modules, module, None)
        failing(run(command.replace("{tmp}", str(directory))))

    return raises


def at_a_terminal(_: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("hisparse.cli.submit.sys.stdin", SimpleNamespace(isatty=lambda: True))
    with click.Context(main.commands["submit"]):
        _prompt_text(None, None)


def deaf_coordinator(directory: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("hisparse.client.connection.WELCOME_LIMIT_S", 0.2)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(f"ipc://{directory}/deaf.sock")
        hisparse.run_client(f"ipc://{directory}/deaf.sock", lambda client: client.workers())


def orphan(_: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    die_with_parent(-1)


def endless_drain(_: Path, __: pytest.MonkeyPatch) -> None:
    async def workers() -> list[messages.WorkerRow]:
        return [msgspec.structs.replace(WORKER, state="draining")]

    trio.run(_until_drained, SimpleNamespace(workers=workers), ("w0",), -1.0)


def endless_oracle(directory: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("hisparse.demo.oracles.ORACLE_LIMIT_S", 0.0)
    asked(directory)


def silent_oracle(directory: Path, patched: pytest.MonkeyPatch) -> None:
    (directory / "oracle.py").write_text("raise SystemExit('no memory')")
    patched.setattr("hisparse.demo.oracles.oracle_file", lambda: str(directory / "oracle.py"))
    asked(directory)


def asked(directory: Path) -> None:
    request = DemoRequest("demo-00", "x", (1, 2))
    trio.run(consult, directory, [request], DemoOptions(), directory, lambda *_: None)


def port_in_use(directory: Path, _: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        tiny(directory)
        port = server.getsockname()[1]
        failing(run(f"up --model {directory}/tiny --runtime-dir {directory}/free --http 127.0.0.1:{port}"))


def other_address(directory: Path, _: pytest.MonkeyPatch) -> None:
    tiny(directory)
    failing(run(f"up --model {directory}/tiny --runtime-dir {directory}/free --http 203.0.113.1:0 --insecure"))


def gone_worker(_: Path, __: pytest.MonkeyPatch) -> None:
    registry = SimpleNamespace(_placement_table=SimpleNamespace(workers={}), _gone={"w0": None})
    WorkerRegistry.find(cast(Any, registry), ("w0",))


def busy_gateway(_: Path, __: pytest.MonkeyPatch) -> None:
    busy, peer = SimpleNamespace(_asks=Counter(other=ASKS_MAX)), SimpleNamespace(user="a")
    Gateway._start(cast(Any, busy), *cast(Any, (peer, None, 1, None)))


def submission(prompt: bytes = b"\1\0\0\0", prefill_mode: str = "auto", **sampling: Any) -> messages.Submit:
    return messages.Submit(1, prompt, messages.Sampling(**({"max_tokens": 1} | sampling)), prefill_mode=prefill_mode)


def too_many_logprobs(*_: object) -> None:
    model = msgspec.structs.replace(MODEL, context_max_tokens=2**20)
    check_submit(submission(logprobs=20, max_tokens=12_483), model)
    check_submit(submission(logprobs=20, max_tokens=12_484), model)


def endless_chat(*_: object) -> None:
    conversation = SimpleNamespace(turns=[None] * (MODEL.context_max_tokens + 1))
    served = SimpleNamespace(model=msgspec.structs.replace(MODEL, chat_template="x"), tokenizer=None)
    chat_prompt(cast(Any, conversation), cast(Any, served), cast(Any, None), "messages")


def endless_grammar(_: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Children, "ask", lambda *_: None)
    GrammarChecks().check(GrammarPlan("start: x", "f"), MODEL, NO_TOKENIZER)


def endless_trial(_: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Children, "ask", lambda *_: None)
    Trials(ByteTokenizer(), 259, (257,)).check("start: x")


def refused_trial(_: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Children, "ask", lambda *_: b"unknown name")
    Trials(ByteTokenizer(), 259, (257,)).check("start: x")


def nameless_tool(*_: object) -> None:
    said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tool_choice": {"type": "tool"}}
    read_body(msgspec.json.encode(said), MessagesBody).conversation()


def damaged_template(directory: Path, _: pytest.MonkeyPatch) -> None:
    for name, text in (("tokenizer.json", b"{}"), ("chat_template.jinja", b"\xff")):
        written(name, text)(directory)
    read_tokenizer(directory)


def two_halves(directory: Path, _: pytest.MonkeyPatch) -> None:
    keys_in(directory)
    own, other = ((directory / "keys" / f"{role}.key").read_text() for role in ("client", "admin"))
    secret = next(line for line in other.splitlines() if line.startswith("secret"))
    text = "\n".join(secret if line.startswith("secret") else line for line in own.splitlines())
    (directory / "keys" / "client.key").write_text(text)
    read_peer_key(directory / "keys", "client")


def asking(ask: Callable[[hisparse.Client], Any]) -> Callable[[Path, pytest.MonkeyPatch], object]:
    """A call on a connection of a client."""

    def raises(*_: object) -> None:
        hisparse.run_client(None, ask)

    return raises


def unserved(directory: Path, patched: pytest.MonkeyPatch) -> None:
    (directory / "unserved").mkdir(mode=0o700)
    with FakeGateway(directory / "unserved"):
        failing(run(f"submit x --runtime-dir {directory}/unserved"))


def nested(*_: object) -> None:
    async def inside() -> None:
        hisparse.run_client(None, lambda client: client.workers())

    trio.run(inside)


#: By what is wrong.
CALLS: Final[dict[str, Call]] = {
    "worker without its packages": Call(
        ConfigError, "(pip install 'hisparse[worker]')", without("worker.process", "worker --model x")
    ),
    "front without its packages": Call(
        ConfigError, "(pip install 'hisparse[http]')", without("hisparse.http.service", "http")
    ),
    "checkpoint without packages": Call(
        ConfigError, "(pip install 'hisparse[worker]')", without("worker.runners.tiny", "model tiny {tmp}/new")
    ),
    "no prompt at a terminal": Call(HiSparseError, "give an argument, --file or stdin", at_a_terminal),
    "coordinator that does not answer": Call(Unavailable, "and its /healthz", deaf_coordinator),
    "parent that has ended": Call(Unavailable, "the parent process has ended", orphan),
    "drain without an end": Call(Unavailable, "not drained after -1 s (see: hisparse requests)", endless_drain),
    "oracle without an end": Call(Unavailable, "did not finish (lower --requests)", endless_oracle),
    "oracle that ends early": Call(Unavailable, "answered 0 of 1 prompts and exited with 1 (no memory)", silent_oracle),
    "hot buffer below the top-k": Call(
        BadInput,
        "(raise --prompt-tokens)",
        lambda *_: memory_for(DemoOptions(topk=32, prompt_tokens_min=512)),
    ),
    "checkpoint of the demo": Call(
        Unavailable,
        "writing it exited with 2",
        lambda directory, _: trio.run(write_checkpoint, Path("/proc/none/x"), DemoOptions(), directory),
    ),
    "port in use": Call(WrongState, "another process listens there (choose another port)", port_in_use),
    "address of another machine": Call(ConfigError, "an address of this machine, or another port)", other_address),
    "too few GPUs": Call(
        ConfigError,
        "(start at most 1, or name one GPU for all of them, as in cuda:0)",
        lambda *_: place(WorkerSettings(device="cuda"), 2, gpus=1),
    ),
    "template that writes on": Call(
        BadInput, "(send fewer or shorter ones)", lambda *_: render("{{ 'x' * 99 }}", [], {}, 9, str)
    ),
    "half of a surrogate pair": Call(
        BadInput,
        "(send whole characters)",
        lambda *_: text_ids("\ud800", make_tokenizer("bytes", b""), MODEL),
    ),
    "no tokenizers": Call(
        ConfigError,
        "(pip install tokenizers, or send token ids)",
        lambda _, patched: (patched.setitem(sys.modules, "tokenizers", None), make_tokenizer("json", b"{}")),
    ),
    "damaged tokenizer": Call(ConfigError, "(replace the file)", lambda *_: make_tokenizer("json", b"{}")),
    "kind of tokenizer": Call(ConfigError, "(upgrade the client)", lambda *_: make_tokenizer("x", b"")),
    "worker without quarantine": Call(
        NotFound, "(see: hisparse pool)", lambda *_: release_quarantine(("w9",), {}, cast(Any, None))
    ),
    "worker that is gone": Call(WrongState, "is disconnected (wait until it is back)", gone_worker),
    "too many commands": Call(CapacityError, f"{ASKS_MAX} commands in progress already (retry when", busy_gateway),
    "long salt": Call(BadInput, "(shorten it, or send a digest of it)", lambda *_: check_salt("x" * 999)),
    "prefill mode": Call(
        BadInput,
        "(use one of auto, staged, direct)",
        lambda *_: check_submit(submission(prefill_mode="x"), MODEL),
    ),
    "span of zeros": Call(
        BadInput,
        "trace=00: an id of zeros is none (leave it out)",
        lambda *_: check_submit(
            msgspec.structs.replace(submission(), trace=messages.TraceContext(bytes(16), b"x" * 8, True)), MODEL
        ),
    ),
    "more alternatives than tokens": Call(
        BadInput,
        "logprobs=20: tiny has 9 tokens (ask for 9 or less)",
        lambda *_: check_submit(submission(logprobs=20), msgspec.structs.replace(MODEL, vocab_size=9)),
    ),
    "too many log-probabilities of a request": Call(
        BadInput,
        "logprobs=20: 12484 tokens with 21 log-probabilities each make 262164, and 262144 are accepted "
        "(set max_tokens to 12483 or less)",
        too_many_logprobs,
    ),
    "empty prompt": Call(BadInput, "(give at least one token)", lambda *_: check_submit(submission(prompt=b""), MODEL)),
    "bias of a token twice": Call(
        BadInput,
        "(give each token one bias)",
        lambda *_: check_submit(submission(logit_bias=((1, 1.0), (1, 2.0))), MODEL),
    ),
    "too many tokens that stop": Call(
        BadInput, "(give fewer)", lambda *_: check_submit(submission(stop_token_ids=(1,) * 9_999), MODEL)
    ),
    "long grammar": Call(BadInput, "(shorten it)", lambda *_: check_submit(submission(grammar="x" * 99_999), MODEL)),
    "grammar of a model without an end": Call(
        BadInput,
        "has no end-of-sequence token",
        lambda *_: check_submit(submission(grammar="x"), msgspec.structs.replace(MODEL, eos_token_ids=())),
    ),
    "grammar that is none": Call(BadInput, "(correct or simplify it)", lambda *_: Matcher(BYTES, "start: x")),
    "tokenizer that no grammar can use": Call(
        ConfigError,
        "(replace the file)",
        lambda *_: Vocabulary(cast(Any, JsonTokenizer(byte_tokenizer_json())), 9, (999,)),
    ),
    "neither Lark nor GBNF": Call(
        BadInput, "is neither Lark (no rule start) nor GBNF", lambda *_: _lark(GrammarPlan("", "grammar", "?", True))
    ),
    "grammar of a large schema": Call(BadInput, "(shorten it)", lambda *_: GrammarPlan("x" * 99_999, "f").check_size()),
    "grammar beyond limits": Call(BadInput, "(simplify it)", endless_grammar),
    "grammar beyond limits of a trial": Call(BadInput, "(simplify it)", endless_trial),
    "grammar that a trial refuses": Call(BadInput, "(correct or simplify it)", refused_trial),
    "choices of nothing": Call(
        BadInput, "(change their number)", lambda *_: of_structured_outputs(StructuredOutputs(choice=[]))
    ),
    "structure of nothing": Call(
        BadInput, "(give one of json, json_object,", lambda *_: of_structured_outputs(StructuredOutputs())
    ),
    "empty expression": Call(BadInput, "(give a text)", lambda *_: of_structured_outputs(StructuredOutputs(regex=""))),
    "two structures": Call(BadInput, "(give one of the two)", lambda *_: one_of(*[OutputForm("regex", "a", "f")] * 2)),
    "no schema": Call(BadInput, "(add it)", lambda *_: schema_in(None, "f")),
    "schema that is no JSON": Call(BadInput, "(send one JSON object in UTF-8)", lambda *_: schema_in("{", "f")),
    "arguments as a whole": Call(
        BadInput,
        "(use tool_choice auto, or types, enum, and anyOf of these)",
        lambda *_: list(members_of(Tool("f", parameters={"not": {}}), "f")),
    ),
    "parameters that are no schema": Call(
        BadInput, "(correct it)", lambda *_: list(members_of(Tool("f", parameters={"properties": 5}), "f"))
    ),
    "tool without a name": Call(BadInput, "tool_choice.name=: is missing (add it)", nameless_tool),
    "prompt beyond the context": Call(
        BadInput, "the context of tiny holds 8192", lambda *_: check_submit(submission(max_tokens=9_000), MODEL)
    ),
    "prompt beyond all workers": Call(
        CapacityError,
        "(shorten it, or change worker.device_mem)",
        lambda *_: check_fits(Length(100_000, 0, 100_064), [("w0", CAPACITY)]),
    ),
    "no worker of the role": Call(
        Unavailable,
        "(ask for another prefill mode, or retry when workers of these roles are there)",
        lambda *_: check_fits(
            Length(100, 0, 164), [("w0", msgspec.structs.replace(CAPACITY, role="prefill"))], messages.STAGED
        ),
    ),
    "chat of too many messages": Call(BadInput, "(send fewer)", endless_chat),
    "file that is gone": Call(ConfigError, "(name a file that this user may read)", lambda *_: state_of("/nowhere")),
    "damaged chat template": Call(ConfigError, "(repair or remove the tokenizer files)", damaged_template),
    "role of no key": Call(
        BadInput, "(one of client, admin, worker)", lambda directory, _: add_peer(directory, "king", "a", None)
    ),
    "halves of two keys": Call(ConfigError, "public and secret key do not belong together", two_halves),
    "value of another type": Call(
        BadInput,
        "must be of the type int (give a value of that type)",
        asking(lambda client: client.submit([1], hisparse.Sampling(max_tokens=cast(Any, "5")))),
    ),
    "operator's call of a client": Call(
        NotAllowed,
        '(connect to the admin endpoint with role="admin")',
        asking(lambda client: client.drain(["w0"])),
    ),
    "too many names": Call(
        BadInput,
        "(send several commands)",
        asking(lambda client: client.acknowledge(["r"] * (messages.NAMES_MAX + 1))),
    ),
    "no id of a prefix": Call(BadInput, "(take an ID from `hisparse prefix`)", lambda *_: _digest_of("xyz")),
    "text for ids": Call(BadInput, "(give ['r1'])", asking(lambda client: client.abort("r1"))),
    "no worker yet": Call(Unavailable, "(start one with: hisparse worker --model PATH)", unserved),
    "values that are no TOML": Call(ConfigError, "(correct the file)", lambda *_: read_values("x =", "values.toml")),
    "values in a thousand lists": Call(
        ConfigError, "is nested too deeply", lambda *_: read_values(f"x = {'[' * 9_999}", "values.toml")
    ),
    "values without a model": Call(ConfigError, "model", lambda *_: read_values('name = "a"', "values.toml")),
    "values of no namespace": Call(
        ConfigError, "namespace=a b", lambda *_: read_values(f'namespace = "a b"\n{SMALL}', "values.toml")
    ),
    "size of nothing": Call(ConfigError, "(give it a size, as in 4GiB)", lambda *_: size_bytes("0", "memory")),
    "setting of the manifests": Call(
        ConfigError,
        "(leave it out of settings)",
        lambda *_: check_settings("worker", {"seats": 1}, {"HISPARSE_WORKER_SEATS": "2"}, "workers[0]"),
    ),
    "run_client inside trio": Call(WrongState, "(async with hisparse.open_client(ENDPOINT)", nested),
    "client outside of loops": Call(
        WrongState, "call hisparse.run_client", lambda *_: hisparse.open_client().__aenter__().send(None)
    ),
}


def check_call(directory: Path, call: Call) -> None:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(BaseException) as caught:  # noqa: PT011
        call.raises(directory, patched)
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, (call.kind, click.UsageError)), error
    assert call.text in " ".join(str(error).split())


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("name", CALLS)
def test_refusal_that_takes_more_than_a_command_line(tmp_path: Path, run_dir: Path, name: str) -> None:
    reached_in(run_dir, "calls", name, partial(check_call, tmp_path, CALLS[name]))


# ---------------------------------------------------------------- that nothing is missing


def test_each_refusal_of_the_code_is_reached_by_the_tables_or_by_a_test_whose_mark_names_it(
    service: FakeGateway, tmp_path_factory: pytest.TempPathFactory, run_dir: Path
) -> None:
    """A refusal that is added to the code needs a row, or a test with the mark `refuses`.

    A mark of a refusal that is gone, or that a row now reaches, has to go. Rows that tests of this run have passed do
    not run again.
    """
    found: set[Site] = set()
    for name, case in CASES.items():
        found |= reached_in(run_dir, "commands", name, partial(check_case, tmp_path_factory.mktemp("cli"), case))
    for name, call in CALLS.items():
        found |= reached_in(run_dir, "calls", name, partial(check_call, tmp_path_factory.mktemp("call"), call))
    for name, http_case in HTTP_CASES.items():
        directory = tmp_path_factory.mktemp("http")
        found |= reached_in(run_dir, "http", name, partial(trio.run, check_http_case, directory, http_case))
    for name, wire_case in WIRE_CASES.items():
        found |= reached_in(run_dir, "wire", name, partial(check_wire_case, wire_case))
    marked = {words: named(words) for words in declared()}
    missing = set(sites()) - found - frozenset().union(*marked.values())
    assert not missing, "no table and no test reaches\n" + "\n".join(map(str, sorted(missing)))
    needless = {words: declared()[words] for words, of in marked.items() if of <= found}
    assert needless == {}, "marks of refusals that are gone, or that the tables reach"


def test_refusal_has_a_text_wherever_it_stands() -> None:
    """With a word for what is filled in, of which a mark may be a part."""
    assert {site.text for site in named("name 1 to {} requests")} == {
        "BadInput request_ids={}: name 1 to {} requests (split the call)"
    }
    assert named("no refusal has these words") == frozenset()


def test_row_of_a_table_runs_until_it_has_passed_once(tmp_path: Path) -> None:
    ran: list[int] = []

    def check() -> None:
        ran.append(1)
        assert len(ran) > 1

    with pytest.raises(AssertionError):
        reached_in(tmp_path, "table", "row", check)
    assert [reached_in(tmp_path, "table", "row", check) for _ in range(2)] == [frozenset()] * 2
    assert len(ran) == 2
