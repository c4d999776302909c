"""The only module that imports Ray: nodes, actors and placement groups of a running Ray cluster.

Names in Ray's namespace `hisparse`: an actor CLUSTER@ADDRESS on each node, the placement group CLUSTER. All of them
outlive the driver.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from hisparse.ray.host import STOP_LIMIT_S, NodeHost, NodeReport
from hisparse.ray.plan import PORTS, NodeFacts, NodePlan, bundle
from protocol.errors import CapacityError, ConfigError, Unavailable
from protocol.logs import logger

NAMESPACE: Final = "hisparse"
#: Longest wait for an answer of a node, for a place, and for an actor to begin.
ANSWER_LIMIT_S: Final = 20.0
PLACE_LIMIT_S: Final = 60.0
#: Above those of Ray's workers, below those that kernels give to connections: a free one stays free until it is used.
PORT_CHOICE: Final = range(20_000, 32_000)

log = logger("up")


class Host(Protocol):
    """The actor of a node. Raises Unavailable when it does not answer: that proves nothing of the node's processes."""

    def report(self) -> NodeReport: ...
    def stop(self, deadline_s: float, *, keeps_pool: bool = False) -> bool: ...


class RayApi(Protocol):
    """What `hisparse up --ray` needs of Ray."""

    def nodes(self, name: str, pool_dir: str, journal: str) -> list[NodeFacts]: ...
    def hosts(self, name: str) -> dict[str, Host]: ...
    def start(self, name: str, plans: Sequence[NodePlan], nodes: Sequence[NodeFacts]) -> dict[str, Host]: ...
    def remove(self, name: str) -> None: ...


class RayHost:
    """An actor's handle as Host."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def report(self) -> NodeReport:
        return msgspec.json.decode(_get(self._handle.report.remote(), ANSWER_LIMIT_S), type=NodeReport)

    def stop(self, deadline_s: float, *, keeps_pool: bool = False) -> bool:
        limit_s = deadline_s + STOP_LIMIT_S + ANSWER_LIMIT_S
        more = (True,) if keeps_pool else ()  # an actor of an older version has no such argument
        return bool(_get(self._handle.stop.remote(deadline_s, *more), limit_s))


class RayCluster:
    """A running Ray cluster, which this process joins as a driver."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError without the package, Unavailable when no Ray cluster answers at `address`."""
        ray = _ray()
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Unavailable(
                f"no Ray cluster answers: {error}",
                field="--ray",
                value=address,
                remedy="run this on a node of the cluster, with the address that `ray start --head` printed, or auto",
            ) from error

    def nodes(self, name: str, pool_dir: str, journal: str) -> list[NodeFacts]:
        """Nodes that answer, the head first, then by address. `name`: of the cluster that is to run there.

        Raises Unavailable when a node answers that it cannot be looked at.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = _ray()
        alive = [it for it in ray.nodes() if it["Alive"]]
        ask = ray.remote(num_cpus=0)(look_around)
        asked = [
            ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(it["NodeID"], soft=False)).remote(
                name, pool_dir, it["NodeManagerAddress"], journal
            )
            for it in alive
        ]
        found = []
        for node, reply in zip(alive, asked, strict=True):
            address = node["NodeManagerAddress"]
            try:
                free, ports, has_journal = _get(reply, ANSWER_LIMIT_S)
            except Unavailable as error:
                if isinstance(error.__cause__, ray.exceptions.RayTaskError):
                    raise Unavailable(
                        f"the node cannot be looked at: {str(error.__cause__).strip().splitlines()[-1]}",
                        field="--ray",
                        value=address,
                        remedy="install the same HiSparse there, under a user who may read worker.pool_dir",
                    ) from error
                log.warning(f"{address} is left out: {error}")  # Ray has not seen yet that it is dead
                continue
            resources = {name: float(amount) for name, amount in node["Resources"].items()}
            is_head = "node:__internal_head__" in resources
            found.append(NodeFacts(address, resources, is_head, free, tuple(ports), has_journal))
        return sorted(found, key=lambda it: (not it.is_head, it.address))

    def hosts(self, name: str) -> dict[str, Host]:
        """Actors of the cluster `name`, by address. Raises Unavailable when Ray does not answer."""
        return {address: RayHost(handle) for address, handle in _handles(name).items()}

    def start(self, name: str, plans: Sequence[NodePlan], nodes: Sequence[NodeFacts]) -> dict[str, Host]:
        """Reserve a bundle for each plan and start its actor. Raises CapacityError when Ray has no place by then."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = _ray()
        resources: Mapping[str, Mapping[str, float]] = {it.address: it.resources for it in nodes}
        bundles = [bundle(plan, resources[plan.address]) for plan in plans]
        self._remove_group(name)
        group = placement_group(bundles, strategy="PACK", name=name, lifetime="detached")
        if not group.wait(PLACE_LIMIT_S):
            self._remove_group(name)
            raise CapacityError(
                f"Ray has not reserved {bundles} within {PLACE_LIMIT_S:g} s",
                field="--groups",
                value=len(plans),
                remedy="see what else runs there: ray status",
            )
        hosts: dict[str, Host] = {}
        for number, plan in enumerate(plans):
            options = {
                "name": f"{name}@{plan.address}",
                "lifetime": "detached",
                "max_restarts": -1,
                "num_cpus": 0,
                "num_gpus": bundles[number].get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            }
            handle = ray.remote(NodeHost).options(**options).remote(msgspec.json.encode(plan))
            hosts[plan.address] = RayHost(handle)
        return hosts

    def remove(self, name: str) -> None:
        """End the actors of the cluster `name`, and give back what is reserved for them."""
        for handle in _handles(name).values():
            _ray().kill(handle, no_restart=True)
        self._remove_group(name)
        give_up_at = time.monotonic() + ANSWER_LIMIT_S
        while _handles(name) and time.monotonic() < give_up_at:  # until names are free for another start
            time.sleep(0.1)

    def _remove_group(self, name: str) -> None:
        from ray.util.placement_group import get_placement_group, remove_placement_group

        try:
            group = get_placement_group(name)
        except ValueError:  # there is none
            return
        remove_placement_group(group)


def look_around(name: str, pool_dir: str, address: str, journal: str) -> tuple[int, list[int], bool]:
    """On a node: free bytes of the file system of `pool_dir`, free ports of `address`, whether `journal` is a file.

    Ports of a cluster `name` on a node are the same at each start, unless another process has taken one: clients that
    know an address of the coordinator reconnect there.
    """
    path = Path(pool_dir)
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    drawn = int.from_bytes(hashlib.sha256(f"{name}@{address}".encode()).digest()[:8])
    with ExitStack() as held:
        ports: list[int] = []
        for step in range(len(PORT_CHOICE)):
            with suppress(OSError):
                port = PORT_CHOICE[(drawn + step) % len(PORT_CHOICE)]
                held.enter_context(socket.create_server((address, port)))
                ports.append(port)
            if len(ports) == PORTS:
                break
        return status.f_bavail * status.f_frsize, ports, os.path.isfile(journal)


def _handles(name: str) -> dict[str, Any]:
    """Handles of the actors of the cluster `name`, by address; without those that go meanwhile."""
    ray = _ray()
    found = {}
    try:
        for it in ray.util.list_named_actors():
            if it.startswith(f"{name}@"):
                with suppress(ValueError):
                    found[it.partition("@")[2]] = ray.get_actor(it)
    except ray.exceptions.RayError as error:
        raise Unavailable(
            f"Ray does not answer: {error}", field="--ray", value=name, remedy="check that its head runs: ray status"
        ) from error
    return found


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--ray needs the package {error.name}",
            field="--ray",
            value=error.name,
            remedy="pip install 'hisparse[ray]', in the version of the cluster",
        ) from error
    return ray


def _get(reply: Any, limit_s: float) -> Any:
    ray = _ray()
    try:
        return ray.get(reply, timeout=limit_s)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
        raise Unavailable(
            f"an actor does not answer: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            field="--ray",
            value="actor",
            remedy="see: ray list actors. Its processes may still run",
        ) from error
