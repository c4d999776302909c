"""A Ray cluster that is none: its nodes are loopback addresses of this machine, its actors objects of this process.

What they run are real supervisors with real processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from hisparse.ray.host import NodeHost, NodeReport
from hisparse.ray.plan import NodeFacts, NodePlan
from hisparse.ray.ray_cluster import Host, look_around
from protocol.errors import Unavailable


@dataclass
class FakeHost:
    """An actor. One that is `lost` does not answer, and its processes run on."""

    inner: NodeHost
    lost: bool = False

    def report(self) -> NodeReport:
        self._require_found()
        return msgspec.json.decode(self.inner.report(), type=NodeReport)

    def stop(self, deadline_s: float, *, keeps_pool: bool = False) -> bool:
        self._require_found()
        return self.inner.stop(deadline_s, keeps_pool)

    def _require_found(self) -> None:
        if self.lost:
            raise Unavailable("an actor does not answer", field="--ray", value="actor")


@dataclass
class FakeRay:
    """As hisparse.ray.ray_cluster.RayApi. `started`: plans of the last start."""

    addresses: Sequence[str]
    actors: dict[str, FakeHost] = field(default_factory=dict)
    started: list[NodePlan] = field(default_factory=list)

    def nodes(self, name: str, pool_dir: str, journal: str) -> list[NodeFacts]:
        found = []
        for number, address in enumerate(self.addresses):
            own = f"{name} {os.getpid()}"  # beside other runs of the test
            free, ports, has_journal = look_around(own, pool_dir, address, journal)
            resources = {"CPU": 8.0, "memory": float(8 << 30), f"node:{address}": 1.0}
            found.append(NodeFacts(address, resources, number == 0, free, tuple(ports), has_journal))
        return found

    def hosts(self, name: str) -> dict[str, Host]:
        return dict(self.actors)

    def start(self, name: str, plans: Sequence[NodePlan], nodes: Sequence[NodeFacts]) -> dict[str, Host]:
        self.started = list(plans)
        self.actors = {it.address: FakeHost(NodeHost(msgspec.json.encode(it))) for it in plans}
        return dict(self.actors)

    def remove(self, name: str) -> None:
        self.actors = {}

    def make_again(self, address: str) -> None:
        """As Ray does where an actor has outlived its raylet: its supervisor runs on, and is asked to stop by the next
        one."""
        plan = next(it for it in self.started if it.address == address)
        self.actors[address] = FakeHost(NodeHost(msgspec.json.encode(plan)))

    def lose_node(self, address: str) -> None:
        """The node is off: all of its processes end at once, and its actor does not answer."""
        host = self.actors[address]
        report = host.report()
        host.inner._stopping.set()
        for pid in (report.supervisor, *report.status.processes.values()):
            os.kill(pid, signal.SIGKILL)
        host.lost = True
        self.addresses = [it for it in self.addresses if it != address]

    def are_up(self) -> bool:
        return all(it.report().status.state == "up" for it in self.actors.values())

    def end(self) -> None:
        for actor in self.actors.values():
            actor.inner.stop(0.0)
