"""`hisparse up --ray` and `hisparse down`: start or find a cluster's actors, and follow them.

The cluster does not need this process: once the actors run, it may end and be started again. A cluster that runs is
found by its name, and joined if the same was asked for.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import trio

from hisparse.client.client import Client
from hisparse.cluster.children import exit_text
from hisparse.cluster.supervision import CONNECTED, open_admin
from hisparse.cluster.up import EXIT_CHILD_LOST
from hisparse.console.options import EXIT_CODES
from hisparse.http.server.api_keys import read_keys
from hisparse.http.server.tls import tls_of
from hisparse.ray.host import NodeReport
from hisparse.ray.plan import NodeFacts, NodePlan, RayOptions, pool_bytes
from hisparse.ray.ray_cluster import Host, RayApi
from hisparse.ray.settings import digest_of, make_plans
from protocol.errors import ConfigError, HiSparseError, NotFound, Unavailable, WrongState
from protocol.logs import configure, logger
from protocol.settings import NO_JOURNAL, Config
from protocol.transport.keys import ALLOWED_FILE, SERVER_FILE, add_peer, make_keys
from protocol.transport.private_dir import make_private_dir
from worker.runners.checkpoint import read_config

FOLLOW_INTERVAL_S: Final = 1.0
#: Time for an admin of this machine to reach the coordinator.
ASK_LIMIT_S: Final = 5.0
FRONT_KEY: Final = "client.http.key"

log = logger("up")


def run_ray_up(
    config: Config,
    options: RayOptions,
    cluster: RayApi,
    ready_file: Path | None,
    *,
    replaces: bool = False,
    is_sure: bool = False,
) -> int:
    """Start the cluster, or join it; report until a signal, which leaves it running. Returns the exit code.

    `replaces`: what runs of that name is stopped first; `is_sure`: as in `make_way`. Raises HiSparseError when it
    cannot be started, or another one of that name runs.
    """
    configure(config.cluster.log_level, config.cluster.log_format)
    log.setLevel(logging.INFO)
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    before = make_way(config, options, cluster, is_sure=is_sure) if replaces else None
    hosts = start_or_join(config, options, cluster, before or ())
    return follow(config, cluster, hosts, asked, ready_file, vouches=before is not None)


def run_ray_down(config: Config, cluster: RayApi, deadline_s: float, *, is_sure: bool = False) -> int:
    """Drain and stop the cluster; 0 when all of its processes have ended. Raises NotFound when none runs.

    Where a node does not answer, nothing is known of its processes: the actors stay, and the exit code is 6, unless
    the operator `is_sure` that they have ended.
    """
    configure(config.cluster.log_level, config.cluster.log_format)
    log.setLevel(logging.INFO)
    hosts = cluster.hosts(config.cluster.name)
    if not hosts:
        raise NotFound("no such cluster runs there", field="cluster.name", value=config.cluster.name)
    reports = {address: _reported(host) for address, host in hosts.items()}
    running = _stop_all(hosts, reports, deadline_s)
    if running and not is_sure:
        return EXIT_CODES[Unavailable.code]
    cluster.remove(config.cluster.name)
    log.info("given back what Ray reserved" if running else "all processes have ended")
    return 0


def _stop_all(
    hosts: Mapping[str, Host], reports: Mapping[str, NodeReport | None], deadline_s: float, *, keeps_pools: bool = False
) -> list[str]:
    """Addresses of nodes whose processes have not all ended. The coordinator's node is the first."""
    home_first = sorted(hosts, key=lambda it: not (reports[it] and reports[it].is_home))  # type: ignore[union-attr]
    return [it for it in home_first if not _stopped(it, hosts[it], deadline_s, keeps_pools)]


def make_way(config: Config, options: RayOptions, cluster: RayApi, *, is_sure: bool = False) -> tuple[str, ...] | None:
    """Stop the cluster that runs but for its host pools, and give back what Ray reserves for it, so that another start
    goes on with its journal. Returns names of workers of the nodes that answered; None: no cluster runs.

    `is_sure`: the operator's word that nodes which do not answer are off, or their processes gone. Without it raises
    Unavailable for these nodes; raises it for nodes that answered and did not stop, whatever the word. Refusals of the
    next start come before anything is stopped, ConfigError among them when its node has no such journal.
    """
    journal = config.coordinator.journal
    if journal == NO_JOURNAL:
        raise ConfigError(
            "another start goes on with a journal, and none is asked for",
            field="coordinator.journal",
            value=journal,
            remedy="name the journal of the running cluster, or without --replace: hisparse down, hisparse up",
        )
    hosts = cluster.hosts(config.cluster.name)
    if not hosts:
        return None
    reports = {address: _reported(host) for address, host in hosts.items()}
    answering = {address: host for address, host in hosts.items() if reports[address] is not None}
    if len(answering) < len(hosts) and not is_sure:
        raise _may_run_on(sorted(hosts.keys() - answering.keys()))
    workers = tuple(worker for report in reports.values() if report is not None for worker in report.workers)
    plans, nodes = _plans(config, options, cluster, workers)
    if not next(it for it in nodes if it.address == plans[0].address).has_journal:
        raise ConfigError(
            f"there is no such file on {plans[0].address}, where the coordinator is to run",
            field="coordinator.journal",
            value=journal,
            remedy="put it on storage that both nodes mount, or: hisparse down, copy all of it, hisparse up",
        )
    if running := _stop_all(answering, reports, 0.0, keeps_pools=True):
        raise Unavailable(
            f"processes of the running cluster did not stop there: {', '.join(sorted(running))}",
            field="--replace",
            value=len(running),
            remedy="make sure that they are gone, then: hisparse down --ray ADDRESS --i-am-sure, and start it again",
        )
    cluster.remove(config.cluster.name)
    return workers


def start_or_join(
    config: Config, options: RayOptions, cluster: RayApi, before: Sequence[str] = ()
) -> Mapping[str, Host]:
    """The actors by address. Raises WrongState when one of that name runs with other settings, or in part.

    `before`: names of workers that it follows on their nodes, of `make_way`.
    """
    name, asked = config.cluster.name, digest_of(config, options)
    if hosts := cluster.hosts(name):
        reports = [report for host in hosts.values() if (report := _reported(host)) is not None]
        if any(report.asked != asked for report in reports):
            raise WrongState(
                "a cluster of that name runs with other settings",
                field="cluster.name",
                value=name,
                remedy="--replace, or hisparse down --ray ADDRESS, or another name: --set cluster.name=NAME",
            )
        if any(report.nodes > len(hosts) for report in reports):
            raise WrongState(
                "only some of its nodes have an actor: its start was cut short",
                field="cluster.name",
                value=name,
                remedy="hisparse down --ray ADDRESS, then start it again",
            )
        log.info(f"joined the running cluster {name}")
        return hosts
    plans, nodes = _plans(config, options, cluster, before)
    return cluster.start(name, [with_files(plan, config) for plan in plans], nodes)


def _plans(
    config: Config, options: RayOptions, cluster: RayApi, before: Sequence[str]
) -> tuple[tuple[NodePlan, ...], list[NodeFacts]]:
    """Plans of a start, and the nodes that they were made for. Pools of nodes that had workers `before` are there."""
    experts = read_config(config.worker.model).get("n_routed_experts") or 0
    nodes = [
        msgspec.structs.replace(it, pool_free_bytes=max(it.pool_free_bytes, pool_bytes(config.worker)))
        if any(worker.endswith(it.name_of("")) for worker in before)
        else it
        for it in cluster.nodes(config.cluster.name, config.worker.pool_dir, config.coordinator.journal)
    ]
    return make_plans(config, options, nodes, experts, before), nodes


def _may_run_on(addresses: Sequence[str]) -> Unavailable:
    return Unavailable(
        f"processes of the running cluster may still write there: {', '.join(addresses)}",
        field="--replace",
        value=len(addresses),
        remedy="make sure that these nodes are off, or their processes gone, then pass --i-am-sure",
    )


def keys_dir_of(config: Config) -> Path:
    """Where the keys of a cluster lie on the operator's machine."""
    cluster = config.cluster
    return Path(cluster.keys_dir or f"{cluster.runtime_dir}/{cluster.name}-keys")


def with_files(plan: NodePlan, config: Config) -> NodePlan:
    """`plan` with the keys that its processes need and files of the front. Keys are made unless they are there."""
    directory = keys_dir_of(config)
    if not config.cluster.keys_dir:
        make_private_dir(str(directory.parent))
    if not (directory / SERVER_FILE).exists():
        make_keys(directory)
    if not (directory / FRONT_KEY).exists():
        add_peer(directory, "client", "http", directory / FRONT_KEY, is_front=True)
    wanted = {"admin.key": "admin.key"}
    if plan.coordinator:
        wanted |= {SERVER_FILE: SERVER_FILE, ALLOWED_FILE: ALLOWED_FILE}
    if plan.http:
        wanted["client.key"] = FRONT_KEY
    if plan.workers:
        wanted["worker.key"] = "worker.key"
    files = {f"keys/{name}": (directory / file).read_text() for name, file in wanted.items()}
    if not plan.http:
        return msgspec.structs.replace(plan, files=files)
    front = plan.config.http
    tls_of(front)
    read_keys(front.api_keys_file)
    for field in ("api_keys_file", "tls_cert_file", "tls_key_file"):
        if path := getattr(front, field):
            files[field] = Path(path).read_text()
            front = msgspec.structs.replace(front, **{field: f"{plan.runtime_dir}/{field}"})
    return msgspec.structs.replace(plan, files=files, config=msgspec.structs.replace(plan.config, http=front))


# ---------------------------------------------------------------- following


def follow(
    config: Config,
    cluster: RayApi,
    hosts: Mapping[str, Host],
    asked: threading.Event,
    ready_file: Path | None,
    *,
    vouches: bool = False,
) -> int:
    """Report what happens until `asked`, or until the cluster is over; returns the exit code.

    `vouches`: all processes that ran before the cluster are gone, so that the coordinator forgets workers that it has
    from then and that are not started again. It is asked again each FOLLOW_INTERVAL_S until it has.
    """
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)  # of a command that was killed
    said: dict[str, list[str]] = {address: [] for address in hosts}
    ended: set[str] = set()
    is_up = False
    try:
        while not asked.is_set():
            reports = [report for host in hosts.values() if (report := _reported(host)) is not None]
            for report in reports:
                _tell_new(report, said[report.address])
                _tell_end(report, ended)
            if (code := _over(reports)) is not None:
                log.info("the cluster is over: hisparse down --ray ADDRESS gives back what Ray reserves for it")
                return code
            if not reports and _is_removed(cluster, config.cluster.name):
                log.info("the cluster was stopped")
                return 0
            is_asked = vouches or not is_up
            if is_asked and len(reports) == len(hosts) and _all_connected(config, reports):
                if vouches:
                    vouches = not trio.run(_forget_others, _access(config, reports), _names(reports))
                if not is_up:
                    is_up = True
                    _tell_up(reports, ready_file)
            asked.wait(FOLLOW_INTERVAL_S)
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
    log.info("the cluster runs on: the same command joins it again, hisparse down --ray ADDRESS stops it")
    return 0


def _is_removed(cluster: RayApi, name: str) -> bool:
    """Whether Ray answers, and has no actor of the cluster."""
    try:
        return not cluster.hosts(name)
    except Unavailable:
        return False


def _over(reports: list[NodeReport]) -> int | None:
    """The exit code when the coordinator's supervisor has ended for good, or another refused a setting."""
    refused = [it.exit_code for it in reports if it.exit_code == EXIT_CODES[ConfigError.code]]
    ended = [it.exit_code for it in reports if it.is_home and it.exit_code is not None]
    found = [*refused, *ended]
    return None if not found else found[0] if found[0] >= 0 else EXIT_CHILD_LOST


def _tell_new(report: NodeReport, said: list[str]) -> None:
    """Log the lines of a node that were not logged yet. A supervisor keeps its last lines, oldest first."""
    lines = list(report.status.said)
    known = next((n for n in range(min(len(said), len(lines)), 0, -1) if said[-n:] == lines[:n]), 0)
    for line in lines[known:]:
        log.info(f"{report.address}: {line}")
    said[:] = lines


def _tell_end(report: NodeReport, told: set[str]) -> None:
    """Log once that a node's supervisor is not started again."""
    if report.exit_code is not None and report.address not in told:
        told.add(report.address)
        log.info(f"{report.address}: its supervisor {exit_text(report.exit_code)}, and is not started again")


def _tell_up(reports: list[NodeReport], ready_file: Path | None) -> None:
    home = next(it for it in reports if it.is_home)
    for report in reports:
        log.info(f"{report.address}: {', '.join(report.status.processes)}")
    log.info(f"clients at {home.client_endpoint}, operators at {home.admin_endpoint}")
    log.info("Ctrl-C leaves the cluster running")
    if ready_file is not None:
        nodes = {it.address: {"supervisor": it.supervisor, "processes": it.status.processes} for it in reports}
        ends = {"client_endpoint": home.client_endpoint, "admin_endpoint": home.admin_endpoint}
        partial = ready_file.with_name(ready_file.name + ".partial")
        partial.write_text(json.dumps({**ends, "nodes": nodes}))
        partial.replace(ready_file)


def _all_connected(config: Config, reports: list[NodeReport]) -> bool:
    """Whether each node is up, and the coordinator has all workers that run there: one may have been given up."""
    home = next((it for it in reports if it.is_home), None)
    if home is None or any(it.status.state != "up" for it in reports):
        return False
    running = {name for it in reports for name in it.workers if name in it.status.processes}
    return running <= trio.run(_connected, _access(config, reports))


def _names(reports: list[NodeReport]) -> set[str]:
    """Workers of the nodes, also those that are about to be started again."""
    return {name for it in reports for name in it.workers}


def _access(config: Config, reports: list[NodeReport]) -> Config:
    """`config` with the way to the coordinator of `reports`."""
    home = next(it for it in reports if it.is_home)
    cluster = msgspec.structs.replace(
        config.cluster, admin_endpoint=home.admin_endpoint, keys_dir=str(keys_dir_of(config))
    )
    return msgspec.structs.replace(config, cluster=cluster)


async def _forget_others(config: Config, names: set[str]) -> bool:
    """Free what other workers than `names` have in quarantine, and list them no longer; whether all of it was done
    within ASK_LIMIT_S. Workers that are connected are not vouched for: their processes run."""
    is_done = False
    with trio.move_on_after(ASK_LIMIT_S):
        try:
            async with open_admin(config, "hisparse up") as client:
                others = [it for it in await client.workers() if it.worker not in names and it.state not in CONNECTED]
                told = [await _is_forgotten(client, it.worker) for it in others]
                is_done = all(told)
        except HiSparseError as error:
            log.warning(f"workers from before are not forgotten yet: {error}")
    return is_done


async def _is_forgotten(client: Client, worker: str) -> bool:
    with suppress(NotFound):  # it has nothing there
        log.info((await client.release_quarantine([worker]))[0])
    try:
        await client.forget([worker])
    except NotFound:
        return True
    except WrongState:  # awaited still, after the coordinator's restart
        return False
    return True


async def _connected(config: Config) -> set[str]:
    with trio.move_on_after(ASK_LIMIT_S):
        try:
            async with open_admin(config, "hisparse up") as client:
                return {it.worker for it in await client.workers() if it.state in CONNECTED}
        except HiSparseError:
            pass
    return set()


def _reported(host: Host) -> NodeReport | None:
    try:
        return host.report()
    except Unavailable as error:
        log.warning(str(error))
        return None


def _stopped(address: str, host: Host, deadline_s: float, keeps_pool: bool) -> bool:
    try:
        is_stopped = host.stop(deadline_s, keeps_pool=keeps_pool)
    except Unavailable as error:
        log.warning(f"{address}: {error}")
        return False
    log.info(f"{address}: {'stopped' if is_stopped else 'processes still run'}")
    return is_stopped
