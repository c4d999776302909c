"""What holds in every process of the suite. `make test` runs it in several at once: the files of a test lie under
tmp_path, its ports are those that the kernel gives it, and it computes on one core.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from protocol.logs import ROOT as ROOT_LOGGER
from tests.support import history, tier
from tests.support.order import in_order

if TYPE_CHECKING:
    from tests.support.standing import Standing


#: Of torch, here and in child processes: more threads would take the cores from the tests beside this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in `make test &` of a script; child processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that takes long, or is slow to draw, says something of the machine alone.
settings.register_profile("hisparse", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hisparse")
# Hypothesis also draws constants of all modules that are imported, however few a test is about. What a test draws would
# depend on the tests beside it, and each process would parse the sources of the whole product.
providers._get_local_constants = lambda: providers._local_constants

#: New objects between two passes of Python's collector.
GC_YOUNG: Final = 20_000
#: Kinds of test that take seconds to minutes.
LONG: Final = ("sim", "mutation", "process", "compile")
#: There with a driver.
NVIDIA: Final = Path("/dev/nvidiactl")
GPU_LOCK: Final = Path(tempfile.gettempdir()) / f"hisparse-tests-gpu-{os.getuid()}.lock"


def pytest_addoption(parser: pytest.Parser) -> None:
    tier.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Count commits in the first process, before it starts the others, which take its answer."""
    history.first_parent_commits()
    tier.store_durations(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [history.header(history.first_parent_commits()), tier.header(config)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the processes of a whole run, beside seeds that a test awaits. Those of single rooms may need no model, and
    CUDA outlives no fork."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    if not config.option.keyword:
        from tests.sim import commit_seeds

        run_dir = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        seeds = commit_seeds.begin(run_dir, *range(commit_seeds.PARTS))
        config.add_cleanup(lambda: commit_seeds.end(seeds))
    if not NVIDIA.exists():
        from tests.support.xdist_process import fork_processes

        fork_processes()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without Python's collector, and leave what was collected out of its passes: all of it lives on. From here
    on passes are rare, since tests make many objects and leave few."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GC_YOUNG)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the deep tests of other parts, and order the rest if several processes share them."""
    tier.deselect_other_parts(config, items)
    if hasattr(config, "workerinput"):
        items[:] = in_order(
            items,
            lambda item: item.get_closest_marker("process") is not None,
            lambda item: any(map(item.get_closest_marker, LONG)),
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """One test on the GPU at a time, among all processes of this user: a second one would spoil its timing.

    pytest-xdist 3.8 would group tests by a suffix of their ids, which pytest 9.2 does not let it change.
    """
    if not item.get_closest_marker("gpu"):
        return (yield)
    with GPU_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test reaches each refusal that its marks name (tests/support/refusals.py)."""
    words = [text for mark in item.iter_markers("refuses") for text in mark.args]
    if not words:
        return (yield)
    from tests.support.refusals import named, reached

    with reached() as found:
        result = yield
    missed = [text for text in words if not named(text) or named(text) - found]
    assert missed == [], "a mark says that this test reaches every refusal with these words"
    return result


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs in the test's own process sends logs elsewhere: the next test finds them where they were."""
    root = logging.getLogger(ROOT_LOGGER)
    handlers, level, propagate = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    root.propagate = propagate


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this run, the same one in each of its processes."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def chat_cluster(run_dir: Path) -> Iterator[Standing]:
    from tests.support.standing import CHAT, standing

    with standing(run_dir, CHAT) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def agents_cluster(run_dir: Path) -> Iterator[Standing]:
    from tests.support.standing import AGENTS, standing

    with standing(run_dir, AGENTS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def published_cluster(run_dir: Path) -> Iterator[Standing]:
    from tests.support.standing import PUBLISHED, standing

    with standing(run_dir, PUBLISHED) as cluster:
        yield cluster
