"""The run's standing clusters: what a test leaves behind is its own failure, and a run that is killed leaves none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hisparse.client.client import Client, run_client
from protocol.messages import Sampling
from tests import ROOT
from tests.processes.test_up import eventually
from tests.support import standing
from tests.support.standing import CHAT, Standing, guest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

#: A process of a run, which has a cluster and goes on.
RUN = """
import sys, time
from pathlib import Path
from tests.support.standing import CHAT, standing
with standing(Path(sys.argv[1]), CHAT) as cluster:
    print(cluster.ready["pid"], *(it["pid"] for it in cluster.ready["workers"]), flush=True)
    time.sleep(3_600)
"""


def test_request_that_a_test_leaves_behind_fails_it(chat_cluster: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is aborted."""

    async def leave(client: Client) -> str:
        name = await client.submit_detached([1, 2, 3], Sampling(1_800, ignore_eos=True))
        await client.retract([name], hold=True)
        return name

    async def state(client: Client) -> str:
        return (await client.request(found.ids[0])).row.state

    monkeypatch.setattr(standing, "LIMIT_S", 0.1)
    with pytest.raises(AssertionError, match="left behind by the test"), guest(chat_cluster) as found:
        found.ids.append(run_client(chat_cluster.ready["admin_endpoint"], leave, role="admin"))
    eventually(lambda: chat_cluster.ask(state) == "ABORTED")


@pytest.mark.deep
def test_cluster_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        pids = [int(it) for it in run.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        run.kill()
        run.communicate()
    eventually(lambda: not any(map(psutil.pid_exists, pids)))
    assert not (tmp_path / CHAT.name / standing.READY).exists()
