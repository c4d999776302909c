"""The settings of each process of a cluster on Ray, and what may be asked for.

Names contain the node: what the supervisor of a node says of its workers is never said of another node's. A node's
endpoints, directories and keys are the same after each restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hisparse.cluster.placement import CUDA, place
from hisparse.ray.plan import ENGINES, NodeFacts, NodePlan, RayOptions, choose, home_of, require_transfer
from protocol.byte_sizes import AUTO
from protocol.config import HostFacts, default_journal, resolve, tmpfs_dir
from protocol.config_checks import check
from protocol.errors import CapacityError, ConfigError
from protocol.settings import NO_JOURNAL, Config, WorkerSettings

#: Directories of logins, which the system removes at logout.
LOGINS_DIR: Final = "/run/user"


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
    if Path(config.cluster.runtime_dir).is_relative_to(LOGINS_DIR):
        raise ConfigError(
            "it ends with the login, and other nodes may not have it",
            field="cluster.runtime_dir",
            value=config.cluster.runtime_dir,
            remedy="name one with --runtime-dir, as in /tmp/hisparse",
        )
    if "/" in config.cluster.name or "@" in config.cluster.name:
        raise ConfigError(
            "on Ray the name is part of directories and of names of actors, without / and @",
            field="cluster.name",
            value=config.cluster.name,
            remedy="give it another name with --set cluster.name=NAME",
        )
    if config.worker.standbys:
        raise ConfigError(
            "the nodes of a Ray cluster have no standbys: a worker that dies is started again",
            field="worker.standby",
            value=config.worker.standby,
            remedy=f"set it to 0 or {AUTO}",
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


def make_plans(
    config: Config, options: RayOptions, nodes: Sequence[NodeFacts], experts: int, before: Collection[str] = ()
) -> tuple[NodePlan, ...]:
    """What each node runs, without files; nodes that run nothing are left out. The coordinator's is the first.

    `config` is that of the command, resolved. `experts`: routed ones of the model. `before`: as in `choose`. Raises
    ConfigError, NotFound or CapacityError.
    """
    check_asked(config)
    home = home_of(options, nodes)
    count = options.groups * options.group_size
    ranks = place(config.worker, count, roles=options.roles, group_size=options.group_size, experts=experts)
    groups = [ranks[i : i + options.group_size] for i in range(0, count, options.group_size)]
    chosen = choose(groups, config, options, nodes, home, before)
    if home.address not in chosen:
        _require_room(home, options)
    require_transfer(config, groups, chosen)
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
            nodes=len(used),
        )
        for it in used
    )


# ---------------------------------------------------------------- processes


def _require_room(home: NodeFacts, options: RayOptions) -> None:
    """Raise CapacityError when a node without groups lacks CPUs for the coordinator and the front."""
    wanted, has = 1 + options.http, home.resources.get("CPU", 0.0)
    if wanted > has:
        raise CapacityError(
            f"the coordinator's node would need {wanted} of CPU, and it has {has:g}",
            field="--coordinator-node",
            value=home.address,
            remedy="name another node, or start Ray there with more: ray start --num-cpus",
        )


def _facts(node: NodeFacts) -> HostFacts:
    return HostFacts(node.name, 0, 0)


def _node_config(config: Config, node: NodeFacts, home: NodeFacts) -> Config:
    replace = msgspec.structs.replace
    base = config.cluster.runtime_dir
    runtime_dir = f"{base}/{config.cluster.name}-{node.name}"
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
        pool_dir="" if given.pool_dir in (base, tmpfs_dir(base)) else given.pool_dir,
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
            name=node.name_of(rank.name),
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
