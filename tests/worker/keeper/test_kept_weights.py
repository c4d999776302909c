"""Weights outlive the process that loaded them, in their final form; whatever differs is loaded anew, by name."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from protocol.errors import HiSparseError, Unavailable
from protocol.settings import WorkerSettings
from tests import ROOT
from tests.support.keeper_rig import IDENTITY, keeping
from worker.keeper import credentials
from worker.keeper import memory as kept_memory
from worker.keeper.memory import KeeperLink, KeptMemory, TableDiffersError, find_memory
from worker.keeper.messages import FillWeights, KeeperRefuses, SegmentGiven, WeightsSealed, encode
from worker.keeper.watch import KeeperWatch
from worker.runners import held_weights, transformers_dsa
from worker.runners.checkpoint import weights_digest
from worker.runners.load import load_runner
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights import model as weights_model

CPU = torch.device("cpu")
#: Tensors that a model computes from its configuration, in any process.
COMPUTED = {(8,), (32, 32)}  # frequencies of positions; the rotation of index keys


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("kept") / name for name in ("plain", "fp8")}
    for name, path in paths.items():
        write_tiny_checkpoint(path, "glm-5", fp8=name == "fp8", whole_blocks=True)
    return paths


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Path]:
    with keeping(tmp_path / "weights.sock") as path:
        yield path


@pytest.fixture
def propagated(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("hisparse"), "propagate", True)
    caplog.set_level(logging.INFO)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it lets no weight be read from a file any more."""

    def refuse(*_: object) -> None:
        raise AssertionError("weights are read")

    def end() -> None:
        monkeypatch.setattr(weights_model, "read_all", refuse)
        monkeypatch.setattr(weights_model.Shards, "open", refuse)

    return end


def tensors_of(root: object) -> list[Tensor]:
    """All tensors that can be reached from `root` without passing a module of code or a class."""
    seen, found, left = set[int](), list[Tensor](), [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | type(sys) | type(lambda: 0)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        left += gc.get_referents(one)
    return found


def same(ours: TransformersRunner, theirs: TransformersRunner) -> bool:
    pairs = list(zip(held(ours), held(theirs), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def held(runner: TransformersRunner) -> list[Tensor]:
    """The weights of `runner`, as they are held."""
    layers = runner._layers
    found = [*layers.model.state_dict().values(), *weights_model._block_tensors(layers.model)]
    return found + [half for layer in layers._held for half in (layer.absorbed.key, layer.absorbed.value)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("plain", {"draft_tokens": 2, "dtype": "bfloat16"}),
        ("fp8", {"keeps_fp8": True, "draft_tokens": 1}),
        ("fp8", {"keeps_fp8": False}),
    ],
    ids=["plain", "drafts", "fp8", "decoded"],
)
def test_the_next_runner_maps_what_one_has_loaded(
    checkpoints: dict[str, Path], keeper: Path, unread: Callable[[], None], name: str, options: dict[str, Any]
) -> None:
    plain = TransformersRunner.load(checkpoints[name], **options)
    first = TransformersRunner.load(checkpoints[name], keeper=keeper, **options)
    unread()
    second = TransformersRunner.load(checkpoints[name], keeper=keeper, **options)
    assert [[*it.weights_seconds] for it in (plain, first, second)] == [["checkpoint"], ["checkpoint"], ["keeper"]]
    assert same(first, plain)
    assert same(second, plain)
    assert second.weights_bytes() == plain.weights_bytes()


@pytest.mark.parametrize(("name", "options"), [("plain", {}), ("fp8", {"keeps_fp8": True, "kv_dtype": "fp8"})])
def test_every_tensor_that_outlives_loading_is_kept(
    checkpoints: dict[str, Path], keeper: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """One that a module made for itself would be lost with its process, and made again at each start."""
    memories: list[KeptMemory] = []
    finish = KeptMemory.finish
    monkeypatch.setattr(KeptMemory, "finish", lambda it, digest: (memories.append(it), finish(it, digest))[1])
    for _ in range(2):
        runner = TransformersRunner.load(checkpoints[name], keeper=keeper, draft_tokens=1, **options)
        whole = memories[-1]._mapping.whole
        begin, end = whole.data_ptr(), whole.data_ptr() + memories[-1]._used_bytes
        own = [it for it in tensors_of(runner) if not begin <= it.data_ptr() < end]
        assert len(tensors_of(runner)) > len(own) + 60
        assert {tuple(it.shape) for it in own} <= COMPUTED


def test_where_kv_b_proj_is_given_up_its_halves_alone_are_kept(
    checkpoints: dict[str, Path], keeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts gather their rows, as on a GPU."""
    load_model = transformers_dsa.load_model
    monkeypatch.setattr(
        transformers_dsa, "load_model", lambda *args, **options: load_model(*args, **options | {"keeps_kv_b": False})
    )
    whole = TransformersRunner.load(checkpoints["plain"])
    monkeypatch.setattr(TransformersRunner, "release_unused", lambda it: it._layers.release_expanded())
    first, second = (TransformersRunner.load(checkpoints["plain"], keeper=keeper) for _ in range(2))
    assert [*second.weights_seconds] == ["keeper"]
    assert same(first, second)
    assert sum(second.weights_bytes().values()) < sum(whole.weights_bytes().values())
    for ours, theirs in zip(second._layers._held, whole._layers._held, strict=True):
        assert torch.equal(ours.absorbed.key, theirs.absorbed.key)
        assert torch.equal(ours.absorbed.value, theirs.absorbed.value)


def test_other_weights_are_refused_by_name_and_replaced(
    checkpoints: dict[str, Path], keeper: Path, caplog: pytest.LogCaptureFixture, propagated: None
) -> None:
    TransformersRunner.load(checkpoints["plain"], keeper=keeper)
    for dtype, source in (("bfloat16", "checkpoint"), ("bfloat16", "keeper"), ("float32", "checkpoint")):
        caplog.clear()
        found = TransformersRunner.load(checkpoints["plain"], keeper=keeper, dtype=dtype)
        assert [*found.weights_seconds] == [source]
        differ = [it.fields["differ"] for it in caplog.records if "are replaced" in it.message]  # type: ignore[attr-defined]
        assert differ == (["dtype"] if source == "checkpoint" else [])
        assert same(found, TransformersRunner.load(checkpoints["plain"], dtype=dtype))


def test_a_changed_byte_of_a_checkpoint_is_seen_whatever_its_times(
    checkpoints: dict[str, Path], keeper: Path, tmp_path: Path
) -> None:
    """In the middle of a file, where its fingerprint does not look, with its size and time as before."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoints["plain"].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    TransformersRunner.load(copy, keeper=keeper)
    file = copy / "model.safetensors"
    status, before = file.stat(), weights_digest(copy)
    with file.open("r+b") as data:
        data.seek(status.st_size // 2)
        data.write(b"\x01\x02\x03")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_digest(copy) != before
    found = TransformersRunner.load(copy, keeper=keeper)
    assert [*found.weights_seconds] == ["checkpoint"]
    assert same(found, TransformersRunner.load(copy))


def test_files_that_change_while_they_are_read_are_not_kept(
    checkpoints: dict[str, Path], keeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(["before", "after", "after", "after", "after", "after"])
    monkeypatch.setattr(held_weights, "weights_digest", lambda _: next(digests))
    sources = [[*TransformersRunner.load(checkpoints["plain"], keeper=keeper).weights_seconds] for _ in range(3)]
    assert sources == [["checkpoint"], ["checkpoint"], ["keeper"]]


@pytest.mark.parametrize("kept", ["another shape", "one more"])
def test_a_table_of_other_code_is_loaded_anew(checkpoints: dict[str, Path], keeper: Path, kept: str) -> None:
    settings = WorkerSettings(model=str(checkpoints["plain"]))
    changes: dict[str, Callable[[KeptMemory], object]] = {
        "another shape": lambda it: it._rows.update(
            {"lm_head.weight": type(it._rows["lm_head.weight"])("lm_head.weight", "float32", (1,), 0)}
        ),
        "one more": lambda it: it.empty("x", (1,), torch.float32),
    }
    with pytest.MonkeyPatch.context() as patch:
        finish = KeptMemory.finish

        def finished(it: KeptMemory, digest: Callable[[], str]) -> None:
            changes[kept](it)
            finish(it, digest)

        patch.setattr(KeptMemory, "finish", finished)
        load_runner(settings, keeper=keeper)
    with pytest.raises(TableDiffersError):
        TransformersRunner.load(checkpoints["plain"], keeper=keeper)
    assert [*load_runner(settings, keeper=keeper).weights_seconds] == ["checkpoint"]
    assert [*load_runner(settings, keeper=keeper).weights_seconds] == ["keeper"]


def test_names_of_other_code_are_loaded_anew(checkpoints: dict[str, Path], keeper: Path) -> None:
    settings = WorkerSettings(model=str(checkpoints["plain"]))
    with pytest.MonkeyPatch.context() as patch:
        names = kept_memory.KeptTensor
        patch.setattr(kept_memory, "KeptTensor", lambda name, *rest: names(f"{name}.old", *rest))
        load_runner(settings, keeper=keeper)
    found = load_runner(settings, keeper=keeper)
    assert [*found.weights_seconds] == ["checkpoint"]
    assert same(found, load_runner(settings))


def test_who_only_attaches_has_nothing_replaced(checkpoints: dict[str, Path], keeper: Path) -> None:
    """A standby: weights of a living worker stay, whatever it would load itself."""
    settings = WorkerSettings(model=str(checkpoints["plain"]))
    with pytest.raises(Unavailable, match="no weights that can be mapped"):
        load_runner(settings, keeper=keeper, only_attach=True)
    with pytest.MonkeyPatch.context() as patch:
        names = kept_memory.KeptTensor
        patch.setattr(kept_memory, "KeptTensor", lambda name, *rest: names(f"{name}.old", *rest))
        load_runner(settings, keeper=keeper)
    for _ in range(2):
        with pytest.raises(TableDiffersError):
            load_runner(settings, keeper=keeper, only_attach=True)
    assert [*load_runner(settings, keeper=keeper).weights_seconds] == ["checkpoint"]
    assert [*load_runner(settings, keeper=keeper, only_attach=True).weights_seconds] == ["keeper"]
    with pytest.raises(Unavailable, match="no weights that can be mapped"):
        load_runner(msgspec.structs.replace(settings, dtype="bfloat16"), keeper=keeper, only_attach=True)
    assert [*load_runner(settings, keeper=keeper).weights_seconds] == ["keeper"]


def test_a_write_to_mapped_weights_ends_the_process(keeper: Path) -> None:
    """And to those that this process has loaded itself, once they are sealed."""
    for found in range(2):
        code = (
            "import sys, torch; from pathlib import Path; from tests.support.keeper_rig import IDENTITY;"
            "from worker.keeper.memory import find_memory;"
            "it = find_memory(Path(sys.argv[1]), IDENTITY, torch.device('cpu'));"
            f"assert it.is_filled == {bool(found)};"
            "one = it.empty('x', (5,), torch.float32); it.is_filled or one.fill_(3.0); it.finish(lambda: '0123');"
            "assert one.sum() == 15; print('mapped', flush=True); one[0] = 1.0; print('written')"
        )
        done = subprocess.run([sys.executable, "-c", code, str(keeper)], cwd=ROOT, capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"mapped\n"), done.stderr.decode()


def test_a_keeper_that_is_lost_while_it_is_filled_costs_its_memory_alone(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = KeptMemory._has_room
    with keeping(tmp_path / "weights.sock") as path:
        calls = iter(range(10_000))

        def room(it: KeptMemory, end: int) -> bool:
            if next(calls) == 20:
                it._link.close()
                it._mapping.bytes = 0  # so that more is asked for
            return grown(it, end)

        monkeypatch.setattr(KeptMemory, "_has_room", room)
        found = TransformersRunner.load(checkpoints["plain"], keeper=path)
        assert same(found, TransformersRunner.load(checkpoints["plain"]))


@pytest.mark.parametrize("what", ["no socket", "no process", "no socket at all"])
def test_without_a_keeper_weights_are_loaded_with_one_line(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, propagated: None, what: str
) -> None:
    path = tmp_path / "weights.sock"
    if what == "no process":
        with keeping(path):
            pass
    elif what == "no socket at all":
        path.write_text("")
    assert find_memory(path, IDENTITY, CPU) is None
    assert [it.message for it in caplog.records] == ["no keeper of weights"]
    assert [*TransformersRunner.load(checkpoints["plain"], keeper=path).weights_seconds] == ["checkpoint"]


def test_weights_of_another_users_keeper_are_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, propagated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has made the runtime directory first, in a directory such as /tmp."""
    with keeping(tmp_path / "weights.sock") as path:
        uid = os.geteuid()
        monkeypatch.setattr(credentials.os, "geteuid", lambda: uid + 1)
        assert find_memory(path, IDENTITY, CPU) is None
    assert "another user" in str(caplog.records[0].fields["cause"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", [None, b"\xc1", b"", b"\x81\xa4type\xa4grow"], ids=["none", "bytes", "end", "other"])
def test_a_keeper_that_does_not_answer_as_this_one_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    """One that is stopped, or of another release."""
    monkeypatch.setattr(kept_memory, "ANSWER_LIMIT_S", 0.3)
    path = tmp_path / "weights.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def reply() -> None:
            with listener.accept()[0] as connection:
                connection.recv(9_999)
                if answer:
                    connection.send(answer)

        other = threading.Thread(target=reply if answer is not None else lambda: None)
        other.start()
        assert find_memory(path, IDENTITY, CPU) is None
        other.join()


@pytest.mark.parametrize(
    "answer", [b"\xc1", encode(KeeperRefuses("no")), encode(FillWeights()), encode(SegmentGiven())]
)
def test_no_descriptor_of_a_refused_message_stays_open(tmp_path: Path, answer: bytes) -> None:
    """Nor of one that was not asked for: a keeper may be of another release."""
    path = tmp_path / "weights.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        link = KeeperLink(path)
        with listener.accept()[0] as connection, open(os.devnull) as given:
            for take in (link.receive_segment, partial(link.receive, WeightsSealed)):
                before = len(os.listdir("/proc/self/fd"))
                socket.send_fds(connection, [answer], [given.fileno()])
                if take == link.receive_segment and answer == encode(SegmentGiven()):
                    os.close(link.receive_segment())
                else:
                    with pytest.raises(HiSparseError) as refused:
                        take()
                    assert refused.value.remedy
                assert len(os.listdir("/proc/self/fd")) == before
        link.close()


def test_a_worker_sees_whether_its_weights_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    assert KeeperWatch(None, is_kept=False).samples() == {}
    assert KeeperWatch(path, is_kept=False).samples() == {}, "there never was a keeper"
    with keeping(path):
        watch = KeeperWatch(path, is_kept=True)
        assert watch.samples() == 1
        assert KeeperWatch(path, is_kept=False).samples() == 0, "of a keeper that refused"
    assert watch.samples() == 0, "its socket is there, and no process"
    path.unlink()
    with keeping(path):
        assert watch.samples() == 0, "another keeper has none of its weights"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ExitStack() as crowd:
        path.unlink()
        listener.bind(str(path))
        listener.listen(0)
        watch = KeeperWatch(path, is_kept=True)
        for _ in range(2):
            asked = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
            with suppress(BlockingIOError):
                asked.connect(str(path))
        assert watch.samples() == 1, "one that accepts no more for now is not waited for"


def test_settings_that_shape_weights_are_their_identity() -> None:
    assert IDENTITY.differences(IDENTITY) == []
    other = replace_all()
    assert IDENTITY.differences(other) == [*IDENTITY.__struct_fields__]


def replace_all() -> Any:
    values = {name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__}
    return type(IDENTITY)(**{name: value + 1 if name == "table" else value + "." for name, value in values.items()})
