"""What runs on which node of a Ray cluster: groups to nodes, and what Ray reserves. Pure.

    coordinator, front   on one node: the one that was named, else Ray's head
    group                all of its ranks on one node, which share that node's host pool with its other groups. Nodes
                         with fewer groups come first
    apart                no node has both a group that prefills and one that decodes
    reserved             one bundle a node, which names the node: a CPU a process, a GPU a rank, `memory` of the size of
                         the host pool, and as much of the resource `shm` where the node declares one

Rejected: a bundle a rank, placed by Ray (a host pool belongs to a node, so a group that moves loses its rows).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from hisparse.cluster.placement import CUDA
from protocol.byte_sizes import parse_size
from protocol.errors import CapacityError, ConfigError, NotFound
from protocol.messages import DECODE, PREFILL
from protocol.settings import Config, WorkerSettings

#: Ports that the coordinator takes: clients, admins, workers. A fourth is for the front, if asked for.
PORTS: Final = 4
#: Engines that move pages between nodes.
ENGINES: Final = ("nixl", "mooncake")
#: Resource by which a node may say how much of /dev/shm is to be shared out, in bytes.
SHM: Final = "shm"
#: Part of the resource `node:ADDRESS`, of which each node has 1, that pins a bundle to the node.
PIN: Final = 0.001


class NodeFacts(msgspec.Struct, frozen=True):
    """A node as Ray and a look at it tell. `resources`: whole amounts by Ray's names. `pool_free_bytes`: of the file
    system that is to hold the host pool. `ports`: free ones. `has_journal`: a file is there under the path of the
    journal that was asked for."""

    address: str
    resources: dict[str, float]
    is_head: bool = False
    pool_free_bytes: int = 0
    ports: tuple[int, ...] = ()
    has_journal: bool = False

    @property
    def name(self) -> str:
        return "".join(it if it.isalnum() else "-" for it in self.address)

    def name_of(self, worker: str) -> str:
        """What `worker`, of a group's place in the cluster, is called on this node."""
        return f"{worker}-{self.name}"


class RayOptions(msgspec.Struct, frozen=True):
    """What `hisparse up --ray` is asked for beside settings. `coordinator_node`: an address; empty: Ray's head."""

    groups: int = 1
    group_size: int = 1
    roles: tuple[str, ...] = ()
    apart: bool = False
    http: bool = False
    coordinator_node: str = ""


class NodePlan(msgspec.Struct, frozen=True):
    """What a supervisor runs. `config`: of all processes but for `workers`, which are settings of each. `elsewhere`:
    workers of other nodes. `files`: text by path below the runtime directory, secrets among them. `nodes`: of the
    cluster."""

    address: str
    config: Config
    workers: tuple[WorkerSettings, ...] = ()
    elsewhere: tuple[str, ...] = ()
    coordinator: bool = False
    http: bool = False
    files: dict[str, str] = {}
    asked: str = ""
    nodes: int = 1

    @property
    def runtime_dir(self) -> str:
        return self.config.cluster.runtime_dir

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Names of the ranks of each group, in order of rank."""
        names = dict.fromkeys(it.group for it in self.workers if it.group)
        return {group: tuple(it.name for it in self.workers if it.group == group) for group in names}


def bundle(plan: NodePlan, resources: Mapping[str, float]) -> dict[str, float]:
    """What Ray reserves on the node of `plan`, which has `resources`."""
    pool = float(pool_bytes(plan.config.worker)) if plan.workers else 0.0
    wanted = {
        "CPU": float(len(plan.workers) + plan.coordinator + plan.http),
        "GPU": float(len(plan.workers) if plan.config.worker.device.startswith(CUDA) else 0),
        "memory": pool,
        SHM: pool if SHM in resources else 0.0,
        f"node:{plan.address}": PIN,
    }
    return {name: amount for name, amount in wanted.items() if amount}


# ---------------------------------------------------------------- nodes


def home_of(options: RayOptions, nodes: Sequence[NodeFacts]) -> NodeFacts:
    """The coordinator's node. Raises NotFound."""
    wanted = options.coordinator_node
    found = next((it for it in nodes if (it.address == wanted if wanted else it.is_head)), None)
    if found is None:
        raise NotFound(
            "Ray has no such node" if wanted else "Ray names no head node",
            field="--coordinator-node",
            value=wanted,
            remedy=f"name one of {', '.join(it.address for it in nodes)}",
        )
    return found


def choose(
    groups: Sequence[Sequence[WorkerSettings]],
    config: Config,
    options: RayOptions,
    nodes: Sequence[NodeFacts],
    home: NodeFacts,
    before: Collection[str] = (),
) -> list[str]:
    """The address of each group's node. Raises CapacityError.

    `before`: names of workers of an earlier start, whose groups stay on their nodes where they fit.
    """
    taken: dict[str, list[int]] = {it.address: [] for it in nodes}
    chosen: list[str] = []
    for number, ranks in enumerate(groups):
        fitting = [
            it
            for it in nodes
            if _why_not(it, [groups[other] for other in taken[it.address]], ranks, config, options, is_home=it == home)
            == ""
        ]
        if not fitting:
            raise _does_not_fit(number, ranks, groups, taken, config, options, nodes, home)
        first = ranks[0].name
        best = min(
            fitting,
            key=lambda it: (it.name_of(first) not in before, len(taken[it.address]), it == home, nodes.index(it)),
        )
        taken[best.address].append(number)
        chosen.append(best.address)
    return chosen


def _why_not(
    node: NodeFacts,
    others: Sequence[Sequence[WorkerSettings]],
    ranks: Sequence[WorkerSettings],
    config: Config,
    options: RayOptions,
    *,
    is_home: bool,
) -> str:
    """Why a group has no place on `node` beside `others`; empty: it has."""
    workers = sum(len(it) for it in others) + len(ranks)
    pool = pool_bytes(config.worker)
    wanted = {
        "CPU": workers + (1 + options.http if is_home else 0),
        "GPU": workers if config.worker.device.startswith(CUDA) else 0,
        "memory": pool,
        SHM: pool if SHM in node.resources else 0,
    }
    for name, amount in wanted.items():
        if amount > node.resources.get(name, 0.0):
            return f"{amount} of {name}, and it has {node.resources.get(name, 0.0):g}"
    if pool > node.pool_free_bytes:
        return f"{pool} bytes for the host pool, and its directory has {node.pool_free_bytes} free"
    roles = {it[0].role for it in others} | {ranks[0].role}
    return "a node apart: prefill and decode are there" if options.apart and {PREFILL, DECODE} <= roles else ""


def _does_not_fit(
    number: int,
    ranks: Sequence[WorkerSettings],
    groups: Sequence[Sequence[WorkerSettings]],
    taken: Mapping[str, Sequence[int]],
    config: Config,
    options: RayOptions,
    nodes: Sequence[NodeFacts],
    home: NodeFacts,
) -> CapacityError:
    reasons = (
        f"{it.address} would need "
        + _why_not(it, [groups[other] for other in taken[it.address]], ranks, config, options, is_home=it == home)
        for it in nodes
    )
    return CapacityError(
        f"no node has room for group {number} of {len(ranks)}: {'; '.join(reasons)}",
        field="--groups",
        value=len(groups),
        remedy="add nodes, start Ray with more of what is missing, or ask for fewer groups",
    )


def require_transfer(config: Config, groups: Sequence[Sequence[WorkerSettings]], chosen: Sequence[str]) -> None:
    """Prompts of a node where none decodes leave it by a transfer engine. Raises ConfigError without one."""
    roles: dict[str, set[str]] = {}
    for ranks, address in zip(groups, chosen, strict=True):
        roles.setdefault(address, set()).add(ranks[0].role)
    alone = next((it for it, found in roles.items() if len(found) == 1 and found != {"both"}), None)
    if alone is not None and config.worker.transfer not in ENGINES:
        raise ConfigError(
            f"all groups on {alone} have one role, so pages have to cross nodes",
            field="worker.transfer",
            value=config.worker.transfer,
            remedy=f"--set worker.transfer={ENGINES[0]}",
        )


def pool_bytes(worker: WorkerSettings) -> int:
    """Size of a node's host pool."""
    return parse_size(worker.host_mem, "worker.host_mem")
