"""Every setting of every process, as typed structs, parsed once and refused loudly.

Sources in rising precedence: defaults, one TOML file (tables as the structs below), `HISPARSE_*` environment variables
(`HISPARSE_WORKER_SEATS=16`), command-line flags. Unknown keys and impossible relations raise ConfigError naming the
field, the value and the remedy. No torch here: the worker's structs are plain numbers too.

`load` reads and `build` is pure: the same table, environment, flags and host facts give the same Config. A Config that
was built is *resolved*: empty endpoints, directories and names are filled in, every check that needs no model has
passed (`coordinator.config_checks`). What needs the model (row size, hot buffer against top-k) is checked when a worker
sizes itself.
"""

from __future__ import annotations

import difflib
import os
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.config_checks import check
from coordinator.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "HISPARSE_"
#: `journal` of a coordinator that keeps none.
NO_JOURNAL: Final = "none"
#: The path of the TOML file.
CONFIG_VARIABLE: Final = "HISPARSE_CONFIG"
#: Variables that are no settings; the second is where compiled kernels are kept (kernels/cuda/jit.py).
OTHER_VARIABLES: Final = (CONFIG_VARIABLE, "HISPARSE_KERNEL_CACHE")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: immutable, keyword-only, unknown keys refused."""


class ClusterSettings(Settings, frozen=True):
    """What all processes of a cluster share. Empty endpoints become `ipc://<runtime_dir>/{client,admin,worker}.sock`."""

    name: str = "hisparse"
    runtime_dir: str = ""  # default: $XDG_RUNTIME_DIR/hisparse, else /tmp/hisparse-<uid>; mode 0700
    client_endpoint: str = ""
    admin_endpoint: str = ""
    worker_endpoint: str = ""
    keys_dir: str = ""  # key files (`hisparse keys`); tcp:// endpoints want them
    insecure: bool = False  # tcp:// without keys: whoever reaches the port may do anything, and read what others send
    speak_as: str = "client"  # door of verbs that both have; an admin sees everybody's requests
    log_level: str = "info"
    log_format: str = "logfmt"  # or json


class CoordinatorSettings(Settings, frozen=True):
    journal: str = ""  # default: <runtime_dir>/journal.sqlite; none: a crash of the coordinator loses every request
    live_requests_max: int = 16_384
    queue_max: int = 8_192
    ended_keep_s: float = 600.0  # finished outputs stay attachable this long
    ended_keep_max: int = 4_096
    connections_max: int = 1_024
    connections_per_key_max: int = 256
    messages_per_s: float = 2_000.0  # of one key, or one connection where there are no keys; 64 KiB count as one more
    messages_burst: int = 20_000  # at once, after a while of silence
    flush_interval_ms: float = 5.0  # tokens reach a client connection at most this often
    heartbeat_interval_s: float = 0.5
    heartbeat_limit_s: float = 5.0
    command_ack_limit_s: float = 2.0  # past it, commands are replayed
    grant_ahead_tokens: int = 128
    audit_interval_s: float = 10.0  # each worker's memory is compared with the ledger this often; 0: only when asked
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: any free port, printed at start; -1: off


class WorkerSettings(Settings, frozen=True):
    name: str = ""  # default: <node>-<pid>
    node: str = ""  # default: the host name
    role: str = "both"  # prefill, decode or both
    transfer: str = ""  # engine by which host pages go to and come from other nodes: shared, nixl, mooncake; none
    transfer_address: str = ""  # where it takes them in: tcp://HOST:PORT; for shared by default a socket of runtime_dir
    transfer_transports: str = "tcp"  # UCX_TLS of nixl, the protocol of mooncake
    transfer_devices: str = ""  # network devices, comma-separated; default: the engine's choice
    model: str = ""
    device: str = "cpu"
    dtype: str = "auto"  # auto: the checkpoint's; float32, bfloat16
    kv_dtype: str = "auto"  # of KV rows and index keys. auto: as dtype; float32, bfloat16, fp8
    stream_backend: str = ""  # default: inline on cpu; simulated; cuda
    stream_seed: int = 0  # of the simulated backend
    graphs: bool = True  # replay decode steps from CUDA graphs; without effect on other stream backends
    seats: int = 8  # most requests in one decode batch
    device_mem: str = "256MiB"  # KV budget on the device: hot chunks, slab, index pages, bookkeeping; auto: on a GPU
    host_mem: str = "1GiB"  # host pool of the node; auto: what its memory limit allows (worker/host_memory.py)
    pool_dir: str = ""  # default: runtime_dir; with CUDA, which registers no file on a disk, a directory in /dev/shm
    context_max_tokens: int = 0  # default: the model's
    context_target_tokens: int = 0  # length to balance index pages and hot chunks for; 0: half of the memory for each
    slab_tokens: int = 0  # prefill slab; default: room for one longest prompt, within device_mem
    prefill_chunk_tokens: int = 512
    layer_group: str = "1MiB"  # of a page: prompts are staged, and sent, in groups of so many layers; 0: all at once
    hot_size_classes: tuple[int, ...] = (4096, 8192, 16384, 32768)
    hot_chunks_max: int = 0  # caps the hot arena; 0: whatever device_mem leaves
    tail_slots: int = 8
    lookahead_steps: int = 1  # steps launched before the previous one's tokens are read: 0 or 1
    deterministic: bool = False
    threads: int = 0  # torch threads; 0: torch's default
    report_interval_ms: float = 20.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0


class HttpSettings(Settings, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8_000  # 0: any free port, printed at start
    api_keys_file: str = ""  # one key a line; without it whoever reaches the port may ask
    tls_cert_file: str = ""  # certificate chain, PEM; with its key, HTTPS is spoken instead of HTTP
    tls_key_file: str = ""  # which others may not read
    requests_max: int = 256  # answered at the same time; further ones get 429
    reattach_grace_s: float = 10.0  # a request of the client's own id outlives its connection this long
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: any free port, printed at start; -1: off

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert_file else 'http'}://{host}:{self.port}"


class Config(Settings, frozen=True):
    cluster: ClusterSettings = ClusterSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    worker: WorkerSettings = WorkerSettings()
    http: HttpSettings = HttpSettings()


@dataclass(frozen=True)
class HostFacts:
    """What `build` may know of the machine: it names defaults, nothing else."""

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

    `path` defaults to `$HISPARSE_CONFIG`, and to no file. `flags` maps "section.field" to a value; None values mean
    that the flag was not given. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(CONFIG_VARIABLE) or None
    table = read_table(Path(path)) if path else {}
    return build(table, environ, flags or {}, HostFacts.read(), file_name=str(path))


def read_table(path: Path) -> dict[str, Any]:
    """The TOML file as a dict. Raises ConfigError when it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            error.strerror or "cannot be read", field="config", value=path, remedy="check --config and HISPARSE_CONFIG"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", field="config", value=path, remedy="correct the file") from error


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
            config.coordinator, journal=config.coordinator.journal or f"{runtime_dir}/journal.sqlite"
        ),
        worker=msgspec.structs.replace(
            worker,
            node=node,
            name=worker.name or f"{node}-{facts.pid}",
            pool_dir=worker.pool_dir or (runtime_dir if worker.device == "cpu" else _tmpfs_dir(runtime_dir)),
            stream_backend=worker.stream_backend or ("inline" if worker.device == "cpu" else "cuda"),
        ),
    )


def _tmpfs_dir(runtime_dir: str) -> str:
    """A directory in memory for the cluster of `runtime_dir` alone."""
    return f"/dev/shm/hisparse-{runtime_dir.strip('/').replace('/', '-')}"


def _default_runtime_dir(facts: HostFacts) -> str:
    return f"{facts.xdg_runtime_dir}/hisparse" if facts.xdg_runtime_dir else f"/tmp/hisparse-{facts.uid}"


def listening_at(config: Config, host: str, port: int) -> Config:
    """`config` with the HTTP front there. Raises ConfigError."""
    changed = msgspec.structs.replace(config, http=msgspec.structs.replace(config.http, host=host, port=port))
    check(changed)
    return changed


def to_environ(config: Config) -> dict[str, str]:
    """Every setting of `config` as environment variables: how a parent hands it to its children, whole."""
    variables = {}
    for section in SECTIONS:
        for field, value in msgspec.structs.asdict(getattr(config, section)).items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            variables[f"{ENVIRONMENT_PREFIX}{section}_{field}".upper()] = text
    return variables


def pool_path(pool_dir: str, node: str) -> Path:
    """Where the host pool of `node` lies."""
    return Path(pool_dir) / f"{node}.pool"


# ---------------------------------------------------------------- sources

_Value = tuple[str, str, object, str]  # section, field, value, where it came from


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


def _field_types(section: str) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(SECTIONS[section])}


def _require_known(name: str, known: Iterable[str], field: str, value: object, origin: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, list(known), n=1)
    remedy = f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(known))}"
    raise ConfigError(f"unknown setting in {origin}", field=field, value=value, remedy=remedy)


#: How a type of setting is called in an error.
_TYPE_NAMES: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert(section: str, field: str, value: object, origin: str) -> object:
    """`value` as the type of the field; text from the environment or a flag is parsed, a list splits at commas."""
    kind = _field_types(section)[field]
    parsed = value.replace(",", " ").split() if isinstance(value, str) and kind == tuple[int, ...] else value
    try:
        return msgspec.convert(parsed, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"expected {_TYPE_NAMES.get(kind, 'a list of whole numbers')}",
            field=f"{section}.{field}",
            value=value,
            remedy=f"correct it in {origin}",
        ) from error
