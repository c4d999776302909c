"""`hisparse up --ray` on a real Ray cluster of four nodes: `make cluster-test`.

A group of two ranks prefills, one on another node decodes, the coordinator is on a third. Each test loads them with the
64 mixed requests and disturbs them meanwhile: no token changes, none comes twice, and no page stays in quarantine.
Tests share the cluster, which each leaves whole; each runs alone, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from protocol.config import HostFacts, build
from tests.support.cluster_rig import cluster_of_two, write_model
from tests.support.netns_rig import plug, unplug
from tests.support.once import made_once
from tests.support.ray_client import REQUESTS, decode_all, sampling_of
from tests.support.ray_rig import RayNode, run_on, wait_for, why_not
from tests.support.ray_site import SETTINGS, Site, kill, ray_site, start_ray

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(900)]
RANK, COORDINATOR = "hisparse.cli worker", "hisparse.cli coordinator"
SUPERVISOR, RAYLET = "hisparse.ray.supervisor", "raylet/raylet"
#: Of a partition: several heartbeat limits, and shorter than Ray's health check takes.
PARTED_S = 10.0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> list[list[int]]:
    """What one group that prefills and decodes gives, on this machine and without Ray."""
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("alone")
    flags: dict[str, object] = {**SETTINGS, "cluster.runtime_dir": str(directory)}
    flags["worker.model"] = str(write_model(directory / "model"))
    config = build({}, {}, flags, HostFacts.read())

    async def run() -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in range(REQUESTS)]
        async with cluster_of_two(config, directory, group_size=2) as (_, client, _):
            await decode_all(client, "alone-", outputs)
        return outputs

    found: list[list[int]] = made_once(run_dir, "ray_alone", lambda: trio.run(run))
    assert [len(it) for it in found] == [sampling_of(i).max_tokens for i in range(REQUESTS)]
    return found


@pytest.fixture(scope="module")
def running(expected: list[list[int]]) -> Iterator[Site]:
    with ray_site() as site:
        yield site


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    """Whole, as the test before has to leave it."""
    running.until_whole()
    yield running
    assert running.differences() == ""


def test_prompts_that_cross_nodes_give_the_tokens_of_one_group(site: Site, expected: list[list[int]]) -> None:
    assert site.outputs() == expected


KILLED: dict[str, Callable[[Site], None]] = {
    "rank that prefills": lambda site: kill(site.prefilling, RANK),
    "rank that decodes": lambda site: kill(site.decoding, RANK),
    "coordinator": lambda site: kill(site.home, COORDINATOR),
    "supervisor": lambda site: kill(site.decoding, SUPERVISOR),
}


@pytest.mark.parametrize("name", KILLED)
def test_process_that_is_killed_comes_back(site: Site, expected: list[list[int]], name: str) -> None:
    assert site.outputs(lambda: KILLED[name](site)) == expected
    print(f"  {name}: whole {site.until_whole():.1f} s after the last token")


def test_cluster_does_not_need_its_driver(site: Site, expected: list[list[int]]) -> None:
    before = site.pids()
    assert site.outputs(lambda: kill(site.head, "hisparse up")) == expected
    assert site.pids() == before
    print(f"  driver: another one joins after {site.up():.1f} s")


@pytest.mark.parametrize("name", ["node that decodes", "node that prefills", "node of the coordinator"])
def test_sides_of_a_partition_live_on_and_meet_again(site: Site, expected: list[list[int]], name: str) -> None:
    """I2: what the node that is cut off goes on writing is given to no other request. Ray does not notice."""
    node = {"node that decodes": site.decoding, "node that prefills": site.prefilling}.get(name, site.home)
    before = site.pids()

    def part() -> None:
        unplug(node.place)
        try:
            time.sleep(PARTED_S)
            if node is not site.home:
                assert site.quarantined() > 0
            assert site.pids() == before
        finally:
            plug(node.place)

    assert site.outputs(part) == expected
    print(f"  {name}, cut off for {PARTED_S:g} s: whole {site.until_whole():.1f} s after the last token")
    assert site.pids() == before


def test_raylet_that_is_killed_is_started_again_by_an_operator(site: Site, expected: list[list[int]]) -> None:
    assert site.outputs(lambda: kill(site.prefilling, RAYLET)) == expected
    site.start_ray_again(site.prefilling)
    print(f"  raylet: whole {site.until_whole():.1f} s after Ray is back")


def test_node_that_ray_has_given_up_runs_on(site: Site, expected: list[list[int]]) -> None:
    """Ray's word that a node is dead proves nothing: its processes live, and their pages stay in quarantine."""
    node, before = site.decoding, site.pids()

    def part() -> None:
        unplug(node.place)
        try:
            print(f"  Ray gives the node up after {wait_for('Ray', lambda: node.address in site.dead(), 240):.1f} s")
            assert site.quarantined() > 0
            assert site.pids() == before
        finally:
            plug(node.place)
        print(f"  raylet ends {wait_for('its end', lambda: not node.pid_of(RAYLET), 240):.1f} s after the partition")
        site.start_ray_again(node)

    assert site.outputs(part) == expected
    print(f"  given up: whole {site.until_whole():.1f} s after the last token")


def test_requests_outlive_the_control_service_of_ray(site: Site, expected: list[list[int]]) -> None:
    """Raylets end without it, and with them all processes. The same command on a new Ray cluster resumes requests."""

    def lose_ray() -> None:
        kill(site.head, "gcs_server")
        took = wait_for("the end of all", lambda: not any(map(has_any, site.nodes)), 300)
        print(f"  all processes have ended {took:.1f} s after the control service")
        for node in site.nodes:
            start_ray(node, site.head)
        print(f"  up on the new Ray after {site.up():.1f} s")

    def has_any(node: RayNode) -> bool:
        return any(map(node.pid_of, (RAYLET, SUPERVISOR, "hisparse.cli")))

    assert site.outputs(lose_ray) == expected
    print(f"  control service: whole {site.until_whole():.1f} s after the last token")


def test_down_ends_all_processes(site: Site) -> None:
    site.down()
    assert not any(node.pid_of(part) for node in site.nodes for part in ("hisparse.cli", SUPERVISOR))
    site.up()


def test_coordinator_moves_when_its_node_is_gone(site: Site, expected: list[list[int]]) -> None:
    """By an operator's command and word. Ranks start anew, on the rows that are there."""

    def move() -> None:
        site.home.end()
        site.nodes.remove(site.home)
        site.home = site.head
        refused = run_on(site.head, site.command("--replace"))
        assert refused.returncode == 6, refused.stderr
        assert "--i-am-sure" in refused.stderr
        print(f"  up with the coordinator on another node after {site.up('--replace', '--i-am-sure'):.1f} s")

    assert site.outputs(move) == expected
    print(f"  moved: whole {site.until_whole():.1f} s after the last token")
