"""What runs on which node of a Ray cluster: groups to nodes, the settings of each process, what Ray reserves. Pure.

    coordinator, front   on one node: the one that was named, else Ray's head
    group                all of its ranks on one node, which share that node's host pool with its other groups. Nodes
                         with fewer groups come first
    apart                no node has both a group that prefills and one that decodes
    reserved             one bundle a node, which names the node: a CPU a process, a GPU a rank, `memory` of the size of
                         the host pool, and as much of the resource `shm` where the node declares one

Names contain the node: what the supervisor of a node says of its workers is never said of another node's. A node's
endpoints, directories and keys are the same after each restart.

Rejected: a bundle a rank, placed by Ray (a host pool belongs to a node, so a group that moves loses its rows).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from hisparse.cluster.placement import CUDA, place
from protocol.byte_sizes import AUTO, parse_size
from protocol.config import HostFacts, default_journal, resolve
from protocol.config_checks import check
from protocol.errors import CapacityError, ConfigError, NotFound
from protocol.messages import DECODE, PREFILL
from protocol.settings import NO_JOURNAL, Config, WorkerSettings

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
    system that is to hold the host pool. `ports`: free ones."""

    address: str
    resources: dict[str, float]
    is_head: bool = False
    pool_free_bytes: int = 0
    ports: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "".join(it if it.isalnum() else "-" for it in self.address)


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
    workers of other nodes. `files`: text by path below the runtime directory, secrets among them."""

    address: str
    config: Config
    workers: tuple[WorkerSettings, ...] = ()
    elsewhere: tuple[str, ...] = ()
    coordinator: bool = False
    http: bool = False
    files: dict[str, str] = {}
    asked: str = ""

    @property
    def runtime_dir(self) -> str:
        return self.config.cluster.runtime_dir

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Names of the ranks of each group, in order of rank."""
        names = dict.fromkeys(it.group for it in self.workers if it.group)
        return {group: tuple(it.name for it in self.workers if it.group == group) for group in names}


def check_asked(config: Config) -> None:
    """Raise ConfigError for settings that only one machine can have."""
    journal = config.coordinator.journal
    if journal == default_journal(config.cluster.runtime_dir):
        raise ConfigError(
            "the journal of a cluster needs a path that outlives the node's temporary files",
            field="coordinator.journal",
            value=journal,
            remedy="name one with --journal, on a disk of the coordinator's node",
        )
    if journal != NO_JOURNAL and not journal.startswith("/"):
        raise ConfigError(
            "processes on other machines have another working directory",
            field="coordinator.journal",
            value=journal,
            remedy="name an absolute path",
        )
    if config.worker.host_mem == AUTO:
        raise ConfigError(
            "Ray has to know how much memory a node's host pool takes",
            field="worker.host_mem",
            value=AUTO,
            remedy="name a size, as in 900GiB",
        )


def digest_of(config: Config, options: RayOptions) -> str:
    """What was asked for. The same for each start of the command with the same settings, on any machine."""
    worker = msgspec.structs.replace(config.worker, name="", node="")
    cluster = msgspec.structs.replace(config.cluster, keys_dir="")
    same = msgspec.structs.replace(config, worker=worker, cluster=cluster)
    return hashlib.sha256(msgspec.json.encode([same, options])).hexdigest()


def make_plans(config: Config, options: RayOptions, nodes: Sequence[NodeFacts], experts: int) -> tuple[NodePlan, ...]:
    """What each node runs, without files; nodes that run nothing are left out. The coordinator's is the first.

    `config` is that of the command, resolved. `experts`: routed ones of the model. Raises ConfigError, NotFound or
    CapacityError.
    """
    check_asked(config)
    home = _home(options, nodes)
    count = options.groups * options.group_size
    ranks = place(config.worker, count, roles=options.roles, group_size=options.group_size, experts=experts)
    groups = [ranks[i : i + options.group_size] for i in range(0, count, options.group_size)]
    chosen = _choose(groups, config, options, nodes, home)
    _require_transfer(config, groups, chosen)
    configs = {it.address: _node_config(config, it, home) for it in nodes}
    workers = {it.address: _workers(groups, chosen, configs[it.address], it) for it in nodes}
    names = {worker.name for here in workers.values() for worker in here}
    used = [home, *(it for it in nodes if it != home and workers[it.address])]
    return tuple(
        NodePlan(
            it.address,
            configs[it.address],
            workers[it.address],
            tuple(sorted(names - {worker.name for worker in workers[it.address]})),
            coordinator=it == home,
            http=it == home and options.http,
            asked=digest_of(config, options),
        )
        for it in used
    )


def bundle(plan: NodePlan, resources: Mapping[str, float]) -> dict[str, float]:
    """What Ray reserves on the node of `plan`, which has `resources`."""
    pool = float(_pool_bytes(plan.config.worker)) if plan.workers else 0.0
    wanted = {
        "CPU": float(len(plan.workers) + plan.coordinator + plan.http),
        "GPU": float(len(plan.workers) if plan.config.worker.device.startswith(CUDA) else 0),
        "memory": pool,
        SHM: pool if SHM in resources else 0.0,
        f"node:{plan.address}": PIN,
    }
    return {name: amount for name, amount in wanted.items() if amount}


# ---------------------------------------------------------------- nodes


def _home(options: RayOptions, nodes: Sequence[NodeFacts]) -> NodeFacts:
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


def _choose(
    groups: Sequence[Sequence[WorkerSettings]],
    config: Config,
    options: RayOptions,
    nodes: Sequence[NodeFacts],
    home: NodeFacts,
) -> list[str]:
    """The address of each group's node."""
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
        best = min(fitting, key=lambda it: (len(taken[it.address]), it == home, nodes.index(it)))
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
    pool = _pool_bytes(config.worker)
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


def _require_transfer(config: Config, groups: Sequence[Sequence[WorkerSettings]], chosen: Sequence[str]) -> None:
    """Prompts of a node where none decodes leave it by a transfer engine."""
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


# ---------------------------------------------------------------- settings


def _pool_bytes(worker: WorkerSettings) -> int:
    return parse_size(worker.host_mem, "worker.host_mem")


def _facts(node: NodeFacts) -> HostFacts:
    return HostFacts(node.name, 0, 0)


def _node_config(config: Config, node: NodeFacts, home: NodeFacts) -> Config:
    replace = msgspec.structs.replace
    base = config.cluster.runtime_dir
    runtime_dir = f"{base}/{node.name}"
    client, admin, worker, http = (f"tcp://{home.address}:{port}" for port in home.ports)
    cluster = replace(
        config.cluster,
        runtime_dir=runtime_dir,
        client_endpoint=client,
        admin_endpoint=admin,
        worker_endpoint=worker,
        keys_dir=f"{runtime_dir}/keys",
        insecure=False,
    )
    given = config.worker
    own = replace(
        given,
        name="",
        node=node.name,
        pool_dir="" if given.pool_dir == base else given.pool_dir,
        group_endpoint="",
        transfer_address=f"tcp://{node.address}:0" if given.transfer in ENGINES else "",
    )
    port = config.http.port or int(http.rpartition(":")[2])
    front = replace(config.http, port=port)
    return resolve(replace(config, cluster=cluster, worker=own, http=front), _facts(node))


def _workers(
    groups: Sequence[Sequence[WorkerSettings]], chosen: Sequence[str], config: Config, node: NodeFacts
) -> tuple[WorkerSettings, ...]:
    """The settings of the workers of `node`, with defaults filled in. Raises ConfigError."""
    here = [rank for ranks, address in zip(groups, chosen, strict=True) if address == node.address for rank in ranks]
    found = []
    for number, rank in enumerate(here):
        own = msgspec.structs.replace(
            config.worker,
            name=f"{rank.name}-{node.name}",
            role=rank.role,
            device=f"{CUDA}:{number}" if rank.device == CUDA else rank.device,
            metrics_port=rank.metrics_port,
            group=f"{rank.group}-{node.name}" if rank.group else "",
            group_rank=rank.group_rank,
            group_size=rank.group_size,
        )
        resolved = resolve(msgspec.structs.replace(config, worker=own), _facts(node))
        check(resolved)
        found.append(resolved.worker)
    return tuple(found)
