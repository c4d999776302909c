"""Touching and registering in pieces, and whose pool file is whose: stale ones go, used ones never."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.listener.endpoint_lock import EndpointLock
from kernels.layout import Geometry
from protocol.config import HostFacts, build
from protocol.errors import CapacityError, ConfigError, Unavailable
from protocol.settings import Config
from tests import ROOT
from worker.pool import file, host_pool, registration
from worker.pool.file import Header, PoolHold, find_pool, open_pool_file, pass_on_pool, reclaim_stale, remove_pool
from worker.pool.host_pool import MappedPool
from worker.pool.registration import (
    OS_PAGE_BYTES,
    CudaRegistrar,
    FirstTouch,
    Piece,
    cut,
    in_threads,
    registration_bytes,
)
from worker.pool.start import open_pool, size_pool

GEOMETRY = Geometry(layers=2, row_bytes=24, group_of_layer=(0, 1), index_row_bytes=8, topk=16)
PAGES = 40


@dataclass
class FakeRegistrar(CudaRegistrar):
    """Registrations by address; `fail_at` refuses the n-th."""

    fail_at: int = -1
    calls: int = 0
    held: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def register(self, address: int, length: int) -> None:
        with self.lock:
            self.calls += 1
            if self.calls == self.fail_at:
                raise ConfigError("refused")
            assert not any(at < address + length and address < at + size for at, size in self.held.items())
            self.held[address] = length

    def unregister(self, address: int) -> None:
        with self.lock:
            del self.held[address]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces as small as they get, so that a pool of a few pages has many."""
    monkeypatch.setattr("worker.pool.host_pool.registration_bytes", lambda total, threads: 1)
    monkeypatch.setattr("worker.pool.host_pool.TOUCH_BYTES", 1)


# ---------------------------------------------------------------- pieces


@given(pages=st.integers(1, 3_000), page_bytes=st.integers(1, 20_000), piece_bytes=st.integers(1, 50_000_000))
def test_pieces_cover_all_pages_and_end_at_page_borders(pages: int, page_bytes: int, piece_bytes: int) -> None:
    """No copy of whole pages crosses two registrations. SGLang #36798."""
    pieces = cut(pages, page_bytes, piece_bytes)
    unit = lcm(page_bytes, OS_PAGE_BYTES)
    assert sum(piece.length for piece in pieces) == pages * page_bytes
    assert [piece.offset for piece in pieces[1:]] == [piece.offset + piece.length for piece in pieces[:-1]]
    assert pieces[0].offset == 0
    assert all(piece.offset % unit == 0 for piece in pieces)
    assert all(piece.length <= max(piece_bytes, unit) for piece in pieces)


def test_registrations_stay_below_the_size_that_fails() -> None:
    """SGLang #36798: at 512 GiB."""
    assert registration_bytes(4 << 40, 16) == 1 << 30
    assert registration_bytes(8 << 30, 16) == 512 << 20
    assert registration_bytes(1 << 20, 16) == 256 << 20


def test_first_failure_ends_registration_without_a_thread() -> None:
    done: list[int] = []

    def action(piece: Piece) -> None:
        if piece.offset == 3:
            raise CapacityError("full")
        time.sleep(0.01)
        done.append(piece.offset)

    before = set(threading.enumerate())
    with pytest.raises(CapacityError, match="full"):
        in_threads([Piece(i, 1) for i in range(1_000)], action, threading.Event(), threads=4)
    assert len(done) < 999, "all but the one that failed"
    assert set(threading.enumerate()) <= before


def test_halt_stops_at_the_next_piece() -> None:
    halted, done, lock = threading.Event(), [], threading.Lock()

    def action(piece: Piece) -> None:
        with lock:
            done.append(piece)
            if len(done) == 5:
                halted.set()

    with pytest.raises(Unavailable, match="stopped"):
        in_threads([Piece(i, 1) for i in range(1_000)], action, halted, threads=2)
    assert 5 <= len(done) <= 7


@pytest.mark.usefixtures("small_pieces")
def test_registration_covers_every_byte_and_close_releases_it(tmp_path: Path) -> None:
    """SGLang #36798: pinned and let go in pieces."""
    pool, registrar = MappedPool.open(tmp_path / "n.pool", GEOMETRY, PAGES), FakeRegistrar()
    pool.register(registrar, threading.Event())
    begin, end = pool.pages.data_ptr(), pool.pages.data_ptr() + pool.pages.numel()
    assert len(registrar.held) > 3
    assert min(registrar.held) == begin
    assert sum(registrar.held.values()) >= end - begin
    pool.pages[PAGES - 1, 5] = 7
    pool.close()
    assert not registrar.held
    assert MappedPool.open(tmp_path / "n.pool", GEOMETRY, PAGES).pages[PAGES - 1, 5] == 7


@pytest.mark.usefixtures("small_pieces")
def test_refused_registration_undoes_the_others(tmp_path: Path) -> None:
    pool, registrar = MappedPool.open(tmp_path / "n.pool", GEOMETRY, PAGES), FakeRegistrar(fail_at=4)
    with pytest.raises(ConfigError, match="refused"):
        pool.register(registrar, threading.Event())
    assert registrar.calls >= 4
    assert not registrar.held


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("row_bytes", [24, 7])
@pytest.mark.parametrize("old_kernel", [False, True])
def test_every_byte_is_allocated_at_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_kernel: bool, row_bytes: int
) -> None:
    if old_kernel:
        monkeypatch.setattr(registration, "MADV_POPULATE_WRITE", 9_999)
    geometry = replace(GEOMETRY, row_bytes=row_bytes)
    pool = MappedPool.open(tmp_path / "n.pool", geometry, PAGES)
    assert pool.pages.shape == (PAGES, geometry.page_bytes)
    assert pool.path.stat().st_blocks * 512 >= PAGES * geometry.page_bytes


def test_missing_room_empties_the_file_and_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FirstTouch, piece: Piece) -> None:
        raise registration._no_room(28)

    path = tmp_path / "n.pool"
    with monkeypatch.context() as patch:
        patch.setattr(FirstTouch, "__call__", full)
        with pytest.raises(CapacityError, match=r"no room left.*\(ENOSPC\) \(lower worker\.host_mem"):
            MappedPool.open(path, GEOMETRY, PAGES)
    assert path.stat().st_size == 0
    assert MappedPool.open(path, GEOMETRY, PAGES).created


@pytest.fixture
def huge_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs mounted with huge=always, for one test."""
    place = tmp_path / "huge"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,huge=always", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root, and a kernel with transparent huge pages")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


HUGE_PAGES = 1 + (32 << 20) // GEOMETRY.page_bytes


def test_pool_on_a_tmpfs_with_huge_pages_lies_in_them(
    huge_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_pool, "SMALL_PAGES_TOLD_BYTES", 1 << 20)
    caplog.set_level("INFO")
    pool = MappedPool.open(huge_tmpfs / "n.pool", GEOMETRY, HUGE_PAGES)
    told = next(record for record in caplog.records if record.message == "host pool created")
    assert told.__dict__["fields"]["huge_page_bytes"] >= 30 << 20
    assert not [record for record in caplog.records if "small pages" in record.message]
    pool.close()


def test_large_pool_in_small_pages_says_what_to_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_pool, "SMALL_PAGES_TOLD_BYTES", 1 << 20)
    monkeypatch.setattr(host_pool, "huge_shared_bytes", lambda: 0)
    MappedPool.open(tmp_path / "small.pool", GEOMETRY, 4).close()
    assert not [record for record in caplog.records if "small pages" in record.message]
    MappedPool.open(tmp_path / "n.pool", GEOMETRY, HUGE_PAGES).close()
    (told,) = [record for record in caplog.records if "small pages" in record.message]
    assert "huge=always" in told.__dict__["fields"]["remedy"]


# ---------------------------------------------------------------- whose file it is


def config_for(pool_dir: Path, node: str = "n0", host_mem: str = "1MiB", runtime: str = "run") -> Config:
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(pool_dir / runtime),
        "worker.pool_dir": str(pool_dir),
        "worker.node": node,
        "worker.host_mem": host_mem,
    }
    return build({}, {}, flags, HostFacts("host", 1, os.getuid()))


def start(config: Config) -> MappedPool:
    sized = size_pool(config, GEOMETRY, "m")
    pages = int(sized.worker.host_mem) // GEOMETRY.page_bytes
    return open_pool(sized, GEOMETRY, pages, "m", threading.Event())


def leave_stale_pool(pool_dir: Path, node: str) -> Path:
    start(config_for(pool_dir, node, runtime=f"run-{node}")).close()
    return pool_dir / f"{node}.pool"


def test_pool_of_a_dead_cluster_is_removed_at_the_next_start(tmp_path: Path) -> None:
    stale = leave_stale_pool(tmp_path, "dead")
    (tmp_path / "notes.pool").write_text("not one of ours")
    pool = start(config_for(tmp_path))
    assert not stale.exists()
    assert (tmp_path / "notes.pool").exists()
    assert (tmp_path / "n0.pool").stat().st_mode & 0o777 == 0o600
    pool.close()


def test_a_pool_in_use_is_never_removed(tmp_path: Path) -> None:
    used, kept, served = (start(config_for(tmp_path, name, runtime=name)) for name in ("used", "kept", "served"))
    hold = PoolHold(kept.path)
    hold.take()
    kept.close()
    served.close()
    lock = EndpointLock(f"ipc://{tmp_path}/served/worker.sock")  # its coordinator lives; its workers do not
    assert reclaim_stale(tmp_path, keep=tmp_path / "n0.pool") == []
    hold.let_go()
    lock.release()
    used.close()
    assert {it.path.stem for it in reclaim_stale(tmp_path, keep=used.path)} == {"kept", "served"}
    assert used.path.exists()


def test_stale_pools_of_dead_clusters_are_found(tmp_path: Path) -> None:
    mine, dead, alive, other = (tmp_path / name for name in ("hisparse-a", "hisparse-b", "hisparse-c", "elsewhere"))
    for directory in (dead, alive, other):
        leave_stale_pool(directory, "n")
    lock = EndpointLock(f"ipc://{alive}/run-n/worker.sock")
    pool = start(config_for(mine))
    assert not (dead / "n.pool").exists()
    assert (alive / "n.pool").exists()
    assert (other / "n.pool").exists()
    lock.release()
    pool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "n0.pool").touch()
    os.chown(tmp_path / "n0.pool", 4_711, -1)
    with pytest.raises(ConfigError, match=r"pool_dir=.*the file there is user 4711's"):
        start(config_for(tmp_path))


@contextmanager
def unreachable(directory: Path) -> Iterator[None]:
    """This user may not look into `directory`."""
    user, mode = os.geteuid(), directory.stat().st_mode
    directory.chmod(0)
    os.seteuid(user or 4_711)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(mode)


def test_directory_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    for pool_dir in (tmp_path / "closed", tmp_path / "closed" / "below"):
        config, path = config_for(pool_dir), pool_dir / "n0.pool"
        with unreachable(tmp_path / "closed"):
            refused = rf"pool_dir={path}: cannot open the host pool: Permission denied \(name a directory"
            with pytest.raises(ConfigError, match=refused):
                start(config)
            pass_on_pool(path, "ipc://elsewhere")
            remove_pool(path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "it is no regular file"),
        (lambda path: path.symlink_to(path.with_name("target")), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    path = tmp_path / "n0.pool"
    make(path)
    (tmp_path / "target").write_text("of another program")
    for host_mem in ("1MiB", "auto"):
        with pytest.raises(
            ConfigError, match=f"pool_dir={path}: cannot open the host pool: {reason} .name a directory"
        ):
            start(config_for(tmp_path, host_mem=host_mem))
    pass_on_pool(path, "ipc://elsewhere")
    remove_pool(path)
    assert os.path.lexists(path)
    assert (tmp_path / "target").read_text() == "of another program"


def test_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file.fcntl, "flock", refuse)
    (tmp_path / "n0.pool").touch()
    with pytest.raises(ConfigError, match=r"pool_dir=.*cannot open the host pool: No locks available"):
        start(config_for(tmp_path))


def test_the_owner_is_recorded(tmp_path: Path) -> None:
    stale = leave_stale_pool(tmp_path, "dead")
    (found,) = reclaim_stale(tmp_path, keep=tmp_path / "n0.pool")
    assert found.path == stale
    assert found.owner == {
        "cluster": "hisparse",
        "node": "dead",
        "worker_endpoint": f"ipc://{tmp_path}/run-dead/worker.sock",
        "pid": os.getpid(),
    }


@pytest.mark.process
def test_pool_of_a_killed_user_is_stale(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.worker.pool.test_start import config_for, start\n"
        "pool = start(config_for(Path(sys.argv[1]), 'killed', runtime='gone'))\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    assert reclaim_stale(tmp_path, keep=tmp_path / "n0.pool") == []
    child.kill()
    child.communicate()
    assert [it.path.stem for it in reclaim_stale(tmp_path, keep=tmp_path / "n0.pool")] == ["killed"]


def test_unused_misfit_pool_is_recreated_with_a_new_id(tmp_path: Path) -> None:
    first = start(config_for(tmp_path))
    first.pages[0, 0] = 9
    first.close()
    again = start(config_for(tmp_path))
    assert (again.created, again.pool_id, int(again.pages[0, 0])) == (False, first.pool_id, 9)
    again.close()
    larger = start(config_for(tmp_path, host_mem="2MiB"))
    assert larger.created
    assert larger.pool_id != first.pool_id
    assert not larger.pages.any()


def test_two_clusters_never_share_a_pool(tmp_path: Path) -> None:
    """I1: page ids of one ledger mean nothing to another. While it is used or its coordinator lives, it is refused;
    then it is created anew."""
    first = start(config_for(tmp_path, runtime="one"))
    with pytest.raises(ConfigError, match=r"pool_dir=.*belongs to the cluster at ipc://.*one/worker\.sock"):
        start(config_for(tmp_path, runtime="two"))
    first.close()
    lock = EndpointLock(f"ipc://{tmp_path}/one/worker.sock")
    with pytest.raises(ConfigError, match="belongs to the cluster at"):
        start(config_for(tmp_path, runtime="two"))
    lock.release()
    second = start(config_for(tmp_path, runtime="two"))
    assert second.created
    assert second.pool_id != first.pool_id


def test_pool_of_another_cluster_is_not_removed(tmp_path: Path) -> None:
    """I1: a start that was refused for it removes what it has made alone."""
    pool = start(config_for(tmp_path, runtime="one"))
    remove_pool(pool.path, f"ipc://{tmp_path}/two/worker.sock")
    assert pool.path.exists()
    pool.close()
    remove_pool(pool.path, f"ipc://{tmp_path}/one/worker.sock")
    assert not pool.path.exists()


def test_pool_is_passed_on_with_its_rows_to_a_coordinator_that_has_moved(tmp_path: Path) -> None:
    first = start(config_for(tmp_path, runtime="one"))
    path, endpoint = first.path, f"ipc://{tmp_path}/two/worker.sock"
    pass_on_pool(path, endpoint)  # in use: nothing is done
    with pytest.raises(ConfigError, match="belongs to the cluster at"):
        start(config_for(tmp_path, runtime="two"))
    first.close()
    pass_on_pool(path, endpoint)
    second = start(config_for(tmp_path, runtime="two"))
    assert not second.created
    assert second.pool_id == first.pool_id
    pass_on_pool(tmp_path / "none.pool", endpoint)


def test_auto_takes_the_size_of_an_existing_pool(tmp_path: Path) -> None:
    first = start(config_for(tmp_path))
    second = start(config_for(tmp_path, host_mem="auto"))
    assert second.pages.shape == first.pages.shape
    assert not second.created


def test_pool_of_a_dead_creator_is_created_by_the_waiter(tmp_path: Path) -> None:
    path, wanted = tmp_path / "n.pool", Header.of(GEOMETRY, PAGES, "m", {})
    creator = open_pool_file(path, wanted, threading.Event())
    assert creator.found is None
    dead = threading.Event()

    def die() -> None:
        dead.set()
        os.close(creator.descriptor)

    threading.Timer(0.2, die).start()
    assert MappedPool.open(path, GEOMETRY, PAGES, "m").created
    assert dead.is_set()


def test_wait_for_a_creator_ends_when_halted(tmp_path: Path) -> None:
    path, wanted, halted = tmp_path / "n.pool", Header.of(GEOMETRY, PAGES, "m", {}), threading.Event()
    creator = open_pool_file(path, wanted, halted)
    threading.Timer(0.1, halted.set).start()
    with pytest.raises(Unavailable, match="stopped while it waited"):
        open_pool_file(path, wanted, halted)
    os.close(creator.descriptor)


def test_removal_frees_memory_in_steps_unless_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "TRUNCATE_BYTES", 100_000)
    sizes: list[int] = []
    real = os.ftruncate

    def note(descriptor: int, size: int) -> None:
        sizes.append(size)
        real(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", note)
    pool = MappedPool.open(tmp_path / "n.pool", GEOMETRY, PAGES)
    pool.pages[0, 0] = 3
    sizes.clear()
    remove_pool(pool.path)
    assert not pool.path.exists()
    assert sizes == []
    assert pool.pages[0, 0] == 3
    other = MappedPool.open(tmp_path / "m.pool", GEOMETRY, PAGES)
    other.close()
    sizes.clear()
    remove_pool(other.path)
    assert sizes[-1] == 0
    steps = [4096 + PAGES * GEOMETRY.page_bytes, *sizes]
    assert len(sizes) > 1
    assert all(0 < before - after <= 100_000 for before, after in pairwise(steps))
    remove_pool(other.path)  # nothing to do


def test_torn_header_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "n.pool"
    header = Header.of(GEOMETRY, PAGES, "m", {"pid": 1})
    with path.open("w+b") as pool:
        header.write(pool.fileno())
        assert Header.read(pool.fileno()) == header
        assert find_pool(path, header) is None, "its pages are not there"
        os.ftruncate(pool.fileno(), header.file_bytes)
        assert find_pool(path, header) == header
        os.pwrite(pool.fileno(), b"\xff", file.OWNER_AT)
        assert Header.read(pool.fileno()) is None


# ---------------------------------------------------------------- damaged pools


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def overwrite(path: Path) -> None:
    with path.open("r+b") as pool:
        pool.write(b"x" * file.HEADER_BYTES)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def overwrite_and_cut(path: Path) -> None:
    overwrite(path)
    os.truncate(path, 64)


DAMAGES = [
    (cut_off, r"it has \d+ of its \d+ bytes"),
    (overwrite, "it has no header"),
    (cut_to_nothing, "it has no header"),
    (overwrite_and_cut, "it has no header"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
@pytest.mark.parametrize("host_mem", ["1MiB", "auto"])
def test_damaged_pool_that_is_not_used_is_created_anew_with_a_new_id(
    tmp_path: Path, damage: Callable[[Path], None], reason: str, host_mem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.pool.host_memory.AUTO_SHARE", 1e-4)
    first = start(config_for(tmp_path))
    first.close()
    damage(first.path)
    again = start(config_for(tmp_path, host_mem=host_mem))
    assert again.created
    assert again.pool_id != first.pool_id
    assert not again.pages.any()
    again.close()


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_damaged_pool_in_use_is_refused_soon_in_one_line(
    tmp_path: Path, damage: Callable[[Path], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that uses it maps it, as a worker does; the rows are those of a pool that was."""
    monkeypatch.setattr(file, "DAMAGED_AFTER_S", 0.2)
    used = start(config_for(tmp_path))
    damage(used.path)
    with pytest.raises(
        ConfigError, match=rf"pool_dir={used.path}: .*damaged, and processes use it: {reason} \(end all"
    ):
        start(config_for(tmp_path))


def test_look_at_a_held_pool_ends_nothing_where_its_directory_is_a_file(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path = place / "host.pool"
    path.write_bytes(b"x")
    hold = PoolHold(path)
    hold._descriptor = os.open(path, os.O_RDONLY)
    path.unlink()
    place.rmdir()
    place.write_bytes(b"")
    assert hold.damage() == "its file was removed or replaced"
    hold.let_go()


@pytest.mark.parametrize(("damage", "reason"), [*DAMAGES, (Path.unlink, "its file was removed or replaced")])
def test_pool_that_is_held_is_let_go_once_it_is_damaged(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    first = start(config_for(tmp_path))
    first.close()
    hold = PoolHold(first.path)
    hold.take()
    assert hold.damage() == ""
    damage(first.path)
    assert re.fullmatch(reason, hold.damage())
    hold.let_go()
    hold.take()
    assert hold.damage() == "", "one that is damaged is not taken"
    second = start(config_for(tmp_path))
    assert second.created
    hold.take()
    assert hold.damage() == ""
    remove_pool(second.path)
    assert hold.damage() == "its file was removed or replaced"
    second.close()
    hold.let_go()


def test_pool_that_is_created_is_neither_held_nor_damaged(tmp_path: Path) -> None:
    path, wanted = tmp_path / "n.pool", Header.of(GEOMETRY, PAGES, "m", {})
    creator, hold = open_pool_file(path, wanted, threading.Event()), PoolHold(path)
    hold.take()
    assert hold.damage() == ""
    os.ftruncate(creator.descriptor, wanted.file_bytes)
    wanted.write(creator.descriptor)
    hold.take()
    os.close(creator.descriptor)
    assert open_pool_file(path, wanted, threading.Event()).found == wanted, "nothing held the lock but its creator"
