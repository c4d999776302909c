"""Sources of the settings (protocol/settings.py): each is parsed once, and an error in any refuses the start.

Sources in rising precedence: defaults, one TOML file (tables as their structs), `HISPARSE_*` environment variables
(`HISPARSE_WORKER_SEATS=16`), command-line flags. Unknown keys and impossible relations raise ConfigError naming the
field, the value and the remedy.

`load` reads files and environment. `build` is pure: the same table, environment, flags and host facts give the same
Config. A built Config is *resolved*: empty endpoints, directories and names are filled in, and every check that needs
no model has passed (`protocol.config_checks`). Checks that need the model (row size, hot buffer against top-k) run
when a worker sizes its memory.
"""

from __future__ import annotations

import difflib
import os
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol.config_checks import PORT_MAX, check
from protocol.errors import ConfigError
from protocol.settings import (
    ClusterSettings,
    Config,
    CoordinatorSettings,
    DraftTokens,
    GapTarget,
    HttpSettings,
    Settings,
    WorkerSettings,
)
from protocol.small_files import read_small_file

ENVIRONMENT_PREFIX: Final = "HISPARSE_"
#: The path of the TOML file.
CONFIG_VARIABLE: Final = "HISPARSE_CONFIG"
#: Variables that are not settings. The second names the directory of compiled kernels (kernels/cuda/jit.py).
KERNEL_CACHE_VARIABLE: Final = "HISPARSE_KERNEL_CACHE"
OTHER_VARIABLES: Final = (CONFIG_VARIABLE, KERNEL_CACHE_VARIABLE)


@dataclass(frozen=True)
class HostFacts:
    """The facts of the machine that `build` uses, for defaults only."""

    hostname: str
    pid: int
    uid: int
    xdg_runtime_dir: str = ""

    @classmethod
    def read(cls) -> HostFacts:
        return cls(socket.gethostname(), os.getpid(), os.getuid(), os.environ.get("XDG_RUNTIME_DIR", ""))


SECTIONS: Final[dict[str, type[Settings]]] = {
    "cluster": ClusterSettings,
    "coordinator": CoordinatorSettings,
    "worker": WorkerSettings,
    "http": HttpSettings,
}


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The resolved Config of this process.

    `path` defaults to `$HISPARSE_CONFIG`; without either, no file is read. `flags` maps "section.field" to a value;
    None means that the flag was not given. Raises ConfigError.
    """
    return load_with_origins(path, flags=flags, environ=environ)[0]


def load_with_origins(
    path: str | os.PathLike[str] | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Config, dict[str, str]]:
    """As `load`, with `origins`."""
    environ = os.environ if environ is None else environ
    path = path or environ.get(CONFIG_VARIABLE) or None
    table = read_table(Path(path)) if path else {}
    config = build(table, environ, flags or {}, HostFacts.read(), file_name=str(path))
    return config, origins(table, environ, flags or {}, file_name=str(path))


def read_table(path: Path) -> dict[str, Any]:
    """The TOML file as a dict. Raises ConfigError when it is no regular file, or cannot be read or parsed."""
    data, _ = read_small_file(path, "config", remedy="check --config and HISPARSE_CONFIG")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", field="config", value=path, remedy="correct the file") from error
    except RecursionError as error:
        raise ConfigError("is nested too deeply", field="config", value=path, remedy="correct the file") from error


def origins(
    table: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    file_name: str = "",
) -> dict[str, str]:
    """Where each setting that any source sets comes from, by "section.field". Pure. Raises ConfigError."""
    return {f"{section}.{field}": origin for section, field, _, origin in _all_values(table, environ, flags, file_name)}


def build(
    table: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    facts: HostFacts,
    *,
    file_name: str = "",
) -> Config:
    """Merge the three sources over the defaults, resolve and check. Pure. Raises ConfigError."""
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, field, value, origin in _all_values(table, environ, flags, file_name):
        values[section][field] = _convert(section, field, value, origin)
    config = resolve(
        Config(
            cluster=ClusterSettings(**values["cluster"]),
            coordinator=CoordinatorSettings(**values["coordinator"]),
            worker=WorkerSettings(**values["worker"]),
            http=HttpSettings(**values["http"]),
        ),
        facts,
    )
    check(config)
    return config


def resolve(config: Config, facts: HostFacts) -> Config:
    """`config` with every default that depends on the machine filled in. Idempotent."""
    cluster, worker = config.cluster, config.worker
    runtime_dir = cluster.runtime_dir or _default_runtime_dir(facts)
    node = worker.node or facts.hostname
    return msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(
            cluster,
            runtime_dir=runtime_dir,
            client_endpoint=cluster.client_endpoint or f"ipc://{runtime_dir}/client.sock",
            admin_endpoint=cluster.admin_endpoint or f"ipc://{runtime_dir}/admin.sock",
            worker_endpoint=cluster.worker_endpoint or f"ipc://{runtime_dir}/worker.sock",
        ),
        coordinator=msgspec.structs.replace(
            config.coordinator, journal=config.coordinator.journal or default_journal(runtime_dir)
        ),
        worker=msgspec.structs.replace(
            worker,
            node=node,
            name=worker.name or f"{node}-{facts.pid}",
            pool_dir=worker.pool_dir or (runtime_dir if worker.device == "cpu" else tmpfs_dir(runtime_dir)),
            stream_backend=worker.stream_backend or ("inline" if worker.device == "cpu" else "cuda"),
            group_endpoint=worker.group_endpoint or _group_endpoint(worker.group, runtime_dir),
        ),
    )


def default_journal(runtime_dir: str) -> str:
    return f"{runtime_dir}/journal.sqlite"


def tmpfs_dir(runtime_dir: str) -> str:
    """A tmpfs directory that only the cluster of `runtime_dir` uses."""
    return f"/dev/shm/hisparse-{runtime_dir.strip('/').replace('/', '-')}"


def _group_endpoint(group: str, runtime_dir: str) -> str:
    """Where the ranks of a group on one node meet; empty without a group."""
    return f"ipc://{runtime_dir}/group-{group}.sock" if group else ""


def _default_runtime_dir(facts: HostFacts) -> str:
    return f"{facts.xdg_runtime_dir}/hisparse" if facts.xdg_runtime_dir else f"/tmp/hisparse-{facts.uid}"


def with_metrics_ports(config: Config, port: int, workers: int) -> Config:
    """`config` of a cluster whose processes serve metrics from `port` on: coordinator, workers in order, front.

    `hisparse.cluster.placement` counts on from the port of the first worker. Raises ConfigError past the last port.
    """
    last = port + workers + 1
    if last > PORT_MAX:
        raise ConfigError(
            f"{workers + 2} ports from there on end at {last}",
            field="--metrics-port",
            value=port,
            remedy=f"choose one up to {PORT_MAX - workers - 1}",
        )
    replace = msgspec.structs.replace
    return replace(
        config,
        coordinator=replace(config.coordinator, metrics_port=port),
        worker=replace(config.worker, metrics_port=port + 1),
        http=replace(config.http, metrics_port=last),
    )


def listening_at(config: Config, host: str, port: int) -> Config:
    """`config` with the HTTP front at `host` and `port`. Raises ConfigError."""
    changed = msgspec.structs.replace(config, http=msgspec.structs.replace(config.http, host=host, port=port))
    check(changed)
    return changed


def to_environ(config: Config) -> dict[str, str]:
    """Every setting of `config` as environment variables, for child processes."""
    variables = {}
    for section in SECTIONS:
        for field, value in msgspec.structs.asdict(getattr(config, section)).items():
            variables[f"{ENVIRONMENT_PREFIX}{section}_{field}".upper()] = setting_text(value)
    return variables


def setting_text(value: object) -> str:
    """A value as the environment and `--set` take it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def pool_path(pool_dir: str, node: str) -> Path:
    """The file of the host pool of `node`."""
    return Path(pool_dir) / f"{node}.pool"


def keeper_path(config: Config) -> Path:
    """The socket of the keeper of weights of the worker of `config`."""
    return Path(config.cluster.runtime_dir) / f"weights-{config.worker.name}.sock"


# ---------------------------------------------------------------- sources

_Value = tuple[str, str, object, str]  # section, field, value, origin


def _all_values(
    table: Mapping[str, Any], environ: Mapping[str, str], flags: Mapping[str, object], file_name: str
) -> Iterable[_Value]:
    yield from _file_values(table, file_name)
    yield from _environment_values(environ)
    yield from _flag_values(flags)


def _file_values(table: Mapping[str, Any], file_name: str) -> Iterable[_Value]:
    for section, fields in table.items():
        _require_known(section, SECTIONS, section, fields, file_name)
        if not isinstance(fields, dict):
            raise ConfigError("not a table", field=section, value=fields, remedy=f"write [{section}] in {file_name}")
        for field, value in fields.items():
            _require_known(field, _field_types(section), f"{section}.{field}", value, file_name)
            yield section, field, value, file_name


def _environment_values(environ: Mapping[str, str]) -> Iterable[_Value]:
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        section, _, field = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        _require_known(section, SECTIONS, variable, text, "the environment")
        _require_known(field, _field_types(section), variable, text, "the environment")
        yield section, field, text, variable


def _flag_values(flags: Mapping[str, object]) -> Iterable[_Value]:
    for name, value in flags.items():
        if value is None:
            continue
        section, _, field = name.partition(".")
        _require_known(section, SECTIONS, name, value, "the command line")
        _require_known(field, _field_types(section), name, value, "the command line")
        yield section, field, value, "the command line"


@cache  # msgspec resolves all annotations anew: 0.1 s of a process that reads its settings from the environment
def _field_types(section: str) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(SECTIONS[section])}


#: Settings that are no more, and what to do instead.
_GONE: Final = {
    "prefill_chunk_tokens": "remove it; worker.gap_target_ms bounds the gaps that prompts make",
    "group_prompt_rounds_max": "remove it; worker.gap_target_ms bounds the gaps that prompts make",
    "slab_tokens": "remove it; the longest prompt (worker.context_max_tokens) sizes the slab, within worker.device_mem",
}


def _require_known(name: str, known: Iterable[str], field: str, value: object, origin: str) -> None:
    if name in known:
        return
    if name in _GONE:
        raise ConfigError(f"{origin} names a setting that is gone", field=field, value=value, remedy=_GONE[name])
    has_no_section = known is SECTIONS and field == name
    places = [f"{it}.{name}" for it in SECTIONS if has_no_section and name in _field_types(it)]
    close = places or difflib.get_close_matches(name, list(known), n=1)
    remedy = f"did you mean {' or '.join(close)}?" if close else f"known here: {', '.join(sorted(known))}"
    raise ConfigError(f"unknown setting in {origin}", field=field, value=value, remedy=remedy)


#: The name of a setting's type in an error.
_TYPE_NAMES: Final = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    DraftTokens: "a whole number, or auto",
    GapTarget: "a number, or auto",
}


def _convert(section: str, field: str, value: object, origin: str) -> object:
    """`value` as the type of the field; text from the environment or a flag is parsed, a list splits at commas."""
    kind = _field_types(section)[field]
    parsed = value.replace(",", " ").split() if isinstance(value, str) and kind == tuple[int, ...] else value
    try:
        return msgspec.convert(parsed, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        expected, remedy = _TYPE_NAMES.get(kind, "a list of whole numbers"), f"correct it in {origin}"
        if kind not in _TYPE_NAMES:
            remedy = f"write it as {'256,512' if isinstance(value, str) else '[256, 512]'} in {origin}"
        raise ConfigError(f"expected {expected}", field=f"{section}.{field}", value=value, remedy=remedy) from error
