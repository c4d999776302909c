"""Commands that run processes: coordinator, worker, HTTP front, and `up`, which runs them on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from hisparse.console.options import COMMON, Setting, deadline_option, read_words, with_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.settings import Config

#: As messages.ROLES, without importing the protocol.
ROLES: Final = ("prefill", "decode", "both")
#: Where workers of nodes that Ray knows receive pages, until their node is chosen.
ANY_NODE: Final = "tcp://0.0.0.0:0"
LOG_SETTINGS: Final = (
    Setting("cluster.log_level"),
    Setting("cluster.log_format"),
)
COORDINATOR_SETTINGS: Final = (Setting("coordinator.journal"),)
WORKER_SETTINGS: Final = (
    Setting("worker.model"),
    Setting("worker.served_model_name"),
    Setting("worker.device"),
    Setting("worker.dtype"),
    Setting("worker.kv_dtype"),
    Setting("worker.seats"),
    Setting("worker.device_mem"),
    Setting("worker.host_mem"),
    Setting("worker.pool_dir"),
    Setting("worker.context_max_tokens"),
    Setting("worker.context_target_tokens"),
    Setting("worker.hot_size_classes"),
    Setting("worker.matmul"),
    Setting("worker.stream_backend"),
    Setting("worker.graphs"),
    Setting("worker.deterministic", is_flag=True),
    Setting("worker.threads"),
)

#: Settings of the HTTP front in both `http` and `up`.
FRONT_SETTINGS: Final = (
    Setting("http.api_keys_file", "--api-keys"),
    Setting("http.tls_cert_file", "--tls-cert"),
    Setting("http.tls_key_file", "--tls-key"),
)
HTTP_SETTINGS: Final = (
    Setting("http.host"),
    Setting("http.port"),
    *FRONT_SETTINGS,
    Setting("http.requests_max"),
)

die_with_option = click.option("--die-with", type=int, metavar="PID", hidden=True)


@click.command(short_help="Run the coordinator: no GPU, no torch.")
@with_config(
    *COORDINATOR_SETTINGS,
    *LOG_SETTINGS,
    Setting("coordinator.metrics_port"),
)
@die_with_option
def coordinator(config: Config, die_with: int | None) -> int:
    """Run the coordinator. It needs no GPU and no torch.

    SIGINT or SIGTERM drains it; a second one exits at once.
    """
    _die_with(die_with)
    from coordinator.service import run_coordinator

    return run_coordinator(config)


@click.command(short_help="Run one worker.")
@with_config(
    *WORKER_SETTINGS,
    Setting("worker.name"),
    Setting("worker.node"),
    Setting("worker.role"),
    Setting("worker.transfer"),
    Setting("worker.transfer_address"),
    Setting("cluster.worker_endpoint", "--coordinator"),
    Setting("worker.metrics_port"),
    *LOG_SETTINGS,
)
@die_with_option
@click.option("--as-standby", is_flag=True, hidden=True)
@click.option("--reason-fd", type=int, metavar="FD", hidden=True)
def worker(config: Config, die_with: int | None, as_standby: bool, reason_fd: int | None) -> int:
    """Run one worker: the decode loop of one GPU, or of the CPU.

    SIGINT or SIGTERM withdraws its requests and exits; a second one exits at once.
    """
    _die_with(die_with)
    if reason_fd is not None:
        from protocol.start_and_end import leave_reasons_at

        leave_reasons_at(reason_fd)
    return _worker_process()(config, as_standby=as_standby)


@click.command("http", short_help="Serve the APIs of OpenAI and Anthropic.")
@with_config(
    *HTTP_SETTINGS,
    Setting("cluster.client_endpoint", "--coordinator"),
    Setting("http.metrics_port"),
    *LOG_SETTINGS,
)
@die_with_option
@click.option("--ready-fd", type=int, metavar="FD", hidden=True)
def http(config: Config, die_with: int | None, ready_fd: int | None) -> int:
    """Serve the APIs of OpenAI (chat, completions, responses) and Anthropic (messages), and a chat page.

    A client of the coordinator; it needs no GPU and no torch.

    After SIGINT or SIGTERM running answers may finish, within a time limit; a second signal exits at once.
    """
    _die_with(die_with)
    from protocol.errors import ConfigError

    try:
        from hisparse.http.service import run_http
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the HTTP front needs the package {error.name}",
            field="http",
            value=error.name,
            remedy="pip install 'hisparse[http]'",
        ) from error
    return run_http(config, ready_fd)


def _address(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not (host and port.isdecimal()):
        raise click.BadParameter(f"{value!r} is not HOST:PORT, as in 127.0.0.1:8000", ctx=context, param=parameter)
    return host.strip("[]"), int(port)


@click.command(short_help="Run a coordinator and N workers here.")
@click.option("-n", "--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Workers to start.")
@click.option(
    "--group-size",
    type=click.IntRange(1),
    help="Workers that share one copy of the model; default: on GPUs as few as it fits, else 1.",
)
@click.option(
    "--roles",
    default="",
    metavar="ROLE,...",
    help="Role of each worker, or group, in order: prefill, decode or both.",
    callback=lambda context, parameter, value: _roles(value),
)
@deadline_option(30.0, "How long requests may run on after Ctrl-C.")
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File for endpoints, pids and the pool's path, as JSON, once all workers have registered.",
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    callback=_address,
    help="Serve the APIs of OpenAI and Anthropic there, and a chat page; port 0: any free port, printed at start.",
)
@click.option(
    "--abort-unfinished", is_flag=True, help="Abort unfinished requests of another model that are in the journal."
)
@click.option("--ray", metavar="ADDRESS", help="Run on the nodes of a Ray cluster; auto: the one of this machine.")
@click.option("--groups", type=click.IntRange(1, 1024), help="With --ray: groups of workers to start.")
@click.option("--apart", is_flag=True, help="With --ray: no node has groups that prefill and groups that decode.")
@click.option("--coordinator-node", metavar="ADDRESS", help="With --ray: node of the coordinator; default: Ray's head.")
@click.option("--replace", is_flag=True, help="With --ray: stop what runs of that name, keep its rows, start as asked.")
@click.option(
    "--replace-workers",
    is_flag=True,
    help="Have the `up` that runs there replace its workers by this command's code, one by one.",
)
@click.option("--i-am-sure", "is_sure", is_flag=True, help="With --replace: nodes that do not answer are off.")
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve metrics at PORT (coordinator), PORT+1 on (workers), then the front; default: any free ports.",
)
@with_config(
    *COORDINATOR_SETTINGS,
    *WORKER_SETTINGS,
    *FRONT_SETTINGS,
    *LOG_SETTINGS,
    implied={"ray": {"worker.transfer_address": ANY_NODE}},
)
def up(
    config: Config,
    workers: int,
    group_size: int | None,
    roles: tuple[str, ...],
    deadline: float,
    ready_file: Path | None,
    http: tuple[str, int] | None,
    abort_unfinished: bool,
    ray: str | None,
    groups: int | None,
    apart: bool,
    coordinator_node: str | None,
    replace: bool,
    replace_workers: bool,
    is_sure: bool,
    metrics_port: int | None,
) -> int:
    """Run a coordinator and N workers on this machine, sharing one host pool.

    A process that exits is restarted, until it has exited too often within a short time; a hung one is killed first.
    Ctrl-C drains, then stops; a second Ctrl-C exits at once. Requests that have not ended are in the journal and resume
    at the next start. The host pool is removed at the end. With --group-size
    each so many workers form a group, which holds one copy of the model and is restarted whole.

    With --ray coordinator, front and --groups groups of --group-size run on several machines: docs/ray.md.

    With --replace-workers it starts nothing, but has the `up` of the same runtime directory replace each worker by a
    process of this command's code, with the settings that it has. Requests move to other workers, or resume; --deadline
    is for those that fit no other.
    """
    if replace_workers:
        return _replace_workers(config, deadline)
    from hisparse.cluster.up import UpOptions, run_up
    from protocol.config import listening_at, with_metrics_ports

    if ready_file is not None and not ready_file.parent.is_dir():
        raise click.BadParameter(f"no directory {ready_file.parent}", param_hint="--ready-file")
    if http is not None:
        config = listening_at(config, *http)
    if metrics_port is not None:
        count = workers if ray is None else (groups or 1) * (group_size or 1)
        config = with_metrics_ports(config, metrics_port, count)
    if is_sure and not replace:
        raise click.UsageError("--i-am-sure needs --replace", click.get_current_context())
    if ray is not None:
        shape = groups or 1, group_size or 1, roles, apart
        return _up_on_ray(config, ray, shape, http, coordinator_node, ready_file, replace, is_sure)
    if groups is not None or apart or coordinator_node is not None or replace:
        flags = "--groups, --apart, --coordinator-node and --replace"
        raise click.UsageError(f"{flags} need --ray", click.get_current_context())
    options = UpOptions(workers, roles, group_size, http is not None, abort_unfinished, deadline, ready_file)
    return run_up(config, options)


def _replace_workers(config: Config, deadline_s: float) -> int:
    from hisparse.cluster.children import Code
    from hisparse.cluster.replacing import ReplaceOrder, ask_replacement
    from hisparse.console.output import note
    from hisparse.console.session import call

    context = click.get_current_context()
    for name in context.params:
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_given and name not in (*COMMON, "replace_workers", "deadline"):
            raise click.UsageError("--replace-workers takes --deadline alone: settings stay as they are", context)
    call(config, "admin", lambda client: client.workers())  # refuses code that is newer than the coordinator
    return ask_replacement(config.cluster.runtime_dir, ReplaceOrder(Code(), deadline_s), note)


def _up_on_ray(
    config: Config,
    address: str,
    asked: tuple[int, int, tuple[str, ...], bool],
    http: tuple[str, int] | None,
    coordinator_node: str | None,
    ready_file: Path | None,
    replaces: bool,
    is_sure: bool,
) -> int:
    from hisparse.ray.plan import RayOptions
    from hisparse.ray.ray_cluster import RayCluster
    from hisparse.ray.settings import check_asked
    from hisparse.ray.up import run_ray_up

    context = click.get_current_context()
    for name, remedy in (("workers", "use --groups"), ("abort_unfinished", ""), ("deadline", "pass it to down")):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} cannot be used with --ray{': ' * bool(remedy)}{remedy}", context)
    check_asked(config)
    options = RayOptions(*asked, http is not None, coordinator_node or "")
    return run_ray_up(config, options, RayCluster(address), ready_file, replaces=replaces, is_sure=is_sure)


@click.command(short_help="Stop what `up --ray` runs.")
@click.option("--ray", "address", required=True, metavar="ADDRESS", help="The Ray cluster; auto: that of this machine.")
@deadline_option(30.0, "How long requests may run on.")
@click.option("--i-am-sure", "is_sure", is_flag=True, help="Nodes that do not answer are off, or their processes gone.")
@with_config(*LOG_SETTINGS)
def down(config: Config, address: str, deadline: float, is_sure: bool) -> int:
    """Drain and stop the cluster that `up --ray` started there, and give back what Ray reserves for it.

    Requests that have not ended are in the journal and resume at the next start with it. With cluster.name another
    cluster than `hisparse` is meant. Exit code 6: a node does not answer, and its processes may still run; check it,
    then pass --i-am-sure.
    """
    from hisparse.ray.ray_cluster import RayCluster
    from hisparse.ray.up import run_ray_down

    return run_ray_down(config, RayCluster(address), deadline, is_sure=is_sure)


def _roles(value: str) -> tuple[str, ...]:
    roles = tuple(read_words([value]))
    for role in roles:
        if role not in ROLES:
            raise click.BadParameter(f"{role!r} is none of {', '.join(ROLES)}", param_hint="--roles")
    return roles


def _die_with(parent_pid: int | None) -> None:
    if parent_pid is not None:
        from hisparse.cluster.children import stop_with_parent

        stop_with_parent(parent_pid)


def _worker_process() -> Callable[..., int]:
    """`worker.process.run_worker`. Raises ConfigError that names a missing package."""
    from protocol.errors import ConfigError

    try:
        from worker.process import run_worker
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a worker needs the package {error.name}",
            field="worker",
            value=error.name,
            remedy="pip install 'hisparse[worker]'",
        ) from error
    return run_worker
