"""Checks of single settings and of relations between settings; a failure refuses the start. Pure.

Each check is a row: whether it holds, the field, its value, what is wrong, what to do. Rows are evaluated in order and
the first failure is raised, so each start names one thing to change. Checks that need the model or the node's memory
are part of the worker's sizing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

from protocol.byte_sizes import AUTO, parse_size
from protocol.errors import ConfigError
from protocol.messages import DRAFT_TOKENS_MAX, GROUP_SIZE_MAX, NAME_CHARS_MAX, ROLES
from protocol.settings import (
    ANY_ORIGIN,
    AUTO_FLOOR,
    ClusterSettings,
    Config,
    CoordinatorSettings,
    HttpSettings,
    WorkerSettings,
)
from protocol.units import (
    CONTEXT_MAX_TOKENS,
    PAGE_TOKENS,
    PASS_TOKENS_MAX,
    SEAT_ROWS_MAX,
    SLOTS_MAX,
    TAIL_SLOTS_MAX,
)

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("logfmt", "json")
SPEAKERS: Final = ("client", "admin")
STREAM_BACKENDS: Final = ("inline", "simulated", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16")
TRANSFER_ENGINES: Final = ("", "shared", "nixl", "mooncake")
FP4: Final = "fp4"
KV_DTYPES: Final = (*DTYPES, "fp8", FP4)
PREFIX_REUSE: Final = ("off", "own", "all")
HOT_FLOORS: Final = (AUTO_FLOOR, "smallest")
KV_EVENT_ARRAYS: Final = "array"
KV_EVENT_FORMATS: Final = ("map", KV_EVENT_ARRAYS)
WEIGHT_ONLY: Final = "weight_only"
W8A8: Final = "w8a8"
AUTO_MATMUL: Final = "auto"
MATMULS: Final = (AUTO_MATMUL, WEIGHT_ONLY, W8A8)
#: sun_path of a Unix socket holds 108 bytes, its terminating zero included (unix(7)).
SOCKET_PATH_BYTES_MAX: Final = 107
PORT_MAX: Final = 65_535
assert DRAFT_TOKENS_MAX == SEAT_ROWS_MAX - 1  # a step takes the last token and its drafts
SEATS_MAX: Final = 1_024
#: Characters of a group's name, which is part of a socket's path.
GROUP_NAME_CHARS_MAX: Final = 64
#: Of a web page: ASCII, as a browser sends it. A host is a name, an IPv4 address, or an IPv6 address in brackets.
_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?",
    re.ASCII,
)
#: Of an OTLP receiver: the whole address. A host is a name, an IPv4 address, or an IPv6 address in brackets.
_TRACES_URL: Final = re.compile(
    r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[!-~]*)?", re.ASCII
)
#: Ports that browsers leave out.
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
#: heartbeat_limit_s must span at least this many heartbeats: one that is late or lost ends no connection.
HEARTBEATS_PER_LIMIT_MIN: Final = 3


class SettingCheck(NamedTuple):
    holds: bool
    field: str
    value: object
    message: str
    remedy: str


def check(config: Config) -> None:
    """Raise ConfigError for the first relation of `config` (resolved) that does not hold."""
    for row in _all_checks(config):
        if not row.holds:
            raise ConfigError(row.message, field=row.field, value=row.value, remedy=row.remedy)


def _all_checks(config: Config) -> Iterator[SettingCheck]:
    yield from _cluster(config.cluster)
    yield from _coordinator(config.coordinator)
    yield from _kv_events(config)
    yield from _worker(config.worker)
    yield from _worker_memory(config.worker)
    yield from _group(config.worker, is_insecure=config.cluster.insecure)
    yield from _http(config)


def _cluster(cluster: ClusterSettings) -> Iterator[SettingCheck]:
    yield _one_of("cluster.log_level", cluster.log_level, LOG_LEVELS)
    yield _one_of("cluster.log_format", cluster.log_format, LOG_FORMATS)
    yield _one_of("cluster.speak_as", cluster.speak_as, SPEAKERS)
    yield _name("cluster.name", cluster.name)
    endpoints = {
        "cluster.client_endpoint": cluster.client_endpoint,
        "cluster.admin_endpoint": cluster.admin_endpoint,
        "cluster.worker_endpoint": cluster.worker_endpoint,
    }
    for field, endpoint in endpoints.items():
        yield from _endpoint(field, endpoint, is_guarded=bool(cluster.insecure or cluster.keys_dir))
    yield SettingCheck(
        not (cluster.insecure and cluster.keys_dir),
        "cluster.insecure",
        cluster.insecure,
        f"cluster.keys_dir is set, too, to {cluster.keys_dir}",
        "set only one of cluster.insecure and cluster.keys_dir",
    )
    yield from _traces(cluster)
    distinct = len(set(endpoints.values())) == len(endpoints)
    yield SettingCheck(
        distinct,
        "cluster.admin_endpoint",
        cluster.admin_endpoint,
        "two endpoints are the same",
        "give client, admin and worker endpoint different addresses",
    )


def _traces(cluster: ClusterSettings) -> Iterator[SettingCheck]:
    field, endpoint = "cluster.traces_endpoint", cluster.traces_endpoint
    found = _TRACES_URL.fullmatch(endpoint)
    is_url = not endpoint or (found is not None and _is_port(found["port"]))
    yield SettingCheck(is_url, field, endpoint, "not an address over HTTP", "write http://HOST:4318/v1/traces")
    ratio = cluster.trace_ratio
    yield SettingCheck(0.0 <= ratio <= 1.0, "cluster.trace_ratio", ratio, "not a share", "use 0 to 1")


def _kv_events(config: Config) -> Iterator[SettingCheck]:
    coordinator, cluster = config.coordinator, config.cluster
    field, replay = "coordinator.kv_events_endpoint", "coordinator.kv_events_replay_endpoint"
    taken = {cluster.client_endpoint, cluster.admin_endpoint, cluster.worker_endpoint}
    for name, endpoint in ((field, coordinator.kv_events_endpoint), (replay, coordinator.kv_events_replay_endpoint)):
        if endpoint:
            yield from _endpoint(name, endpoint, is_guarded=bool(cluster.insecure or cluster.keys_dir))
            is_free = endpoint not in taken
            yield SettingCheck(is_free, name, endpoint, "another endpoint is the same", "give it an address of its own")
            taken.add(endpoint)
    yield SettingCheck(
        bool(coordinator.kv_events_endpoint) or not coordinator.kv_events_replay_endpoint,
        replay,
        coordinator.kv_events_replay_endpoint,
        "there is nothing to replay",
        f"set {field}, or leave it empty",
    )
    yield SettingCheck(
        not coordinator.kv_events_endpoint or coordinator.prefix_reuse != PREFIX_REUSE[0],
        field,
        coordinator.kv_events_endpoint,
        "nothing is cached, so there are no events",
        "set coordinator.prefix_reuse to own or all, or leave it empty",
    )
    yield _one_of("coordinator.kv_events_format", coordinator.kv_events_format, KV_EVENT_FORMATS)
    topic = coordinator.kv_events_topic
    fits = len(topic) <= NAME_CHARS_MAX
    yield SettingCheck(fits, "coordinator.kv_events_topic", topic, f"over {NAME_CHARS_MAX} characters", "shorten it")


def _endpoint(field: str, endpoint: str, *, is_guarded: bool) -> Iterator[SettingCheck]:
    scheme, _, address = endpoint.partition("://")
    known = scheme in ("ipc", "tcp") and bool(address)
    yield SettingCheck(known, field, endpoint, "not an endpoint", "write ipc:///path/to.sock or tcp://host:port")
    yield SettingCheck(
        scheme != "tcp" or is_guarded,
        field,
        endpoint,
        "tcp is neither encrypted nor authenticated without keys",
        "set cluster.keys_dir (`hisparse keys init` makes keys), use ipc://, or pass --insecure on a network you trust",
    )
    port = address.rpartition(":")[2]
    has_port = scheme != "tcp" or port == "*" or (port.isdecimal() and int(port) <= PORT_MAX)
    yield SettingCheck(
        has_port, field, endpoint, f"{port or 'nothing'} is not a port", f"write tcp://host:port, 0 to {PORT_MAX}"
    )
    fits = scheme != "ipc" or len(address.encode()) <= SOCKET_PATH_BYTES_MAX
    yield SettingCheck(
        fits,
        field,
        endpoint,
        f"the path has {len(address.encode())} bytes, a Unix socket takes {SOCKET_PATH_BYTES_MAX}",
        "choose a shorter cluster.runtime_dir",
    )


def _coordinator(coordinator: CoordinatorSettings) -> Iterator[SettingCheck]:
    yield _one_of("coordinator.prefix_reuse", coordinator.prefix_reuse, PREFIX_REUSE)
    yield _one_of("coordinator.hot_floor", coordinator.hot_floor, HOT_FLOORS)
    for field in (
        *("live_requests_max", "queue_max", "connections_max", "connections_per_key_max"),
        *("messages_burst", "grant_ahead_tokens"),
    ):
        yield _at_least(f"coordinator.{field}", getattr(coordinator, field), 1)
    for field in ("ended_keep_s", "ended_keep_max", "flush_interval_ms", "audit_interval_s", "stop_deadline_s"):
        yield _at_least(f"coordinator.{field}", getattr(coordinator, field), 0)
    for field in ("heartbeat_interval_s", "heartbeat_limit_s", "command_ack_limit_s", "messages_per_s"):
        yield _positive(f"coordinator.{field}", getattr(coordinator, field))
    yield SettingCheck(
        coordinator.queue_max <= coordinator.live_requests_max,
        "coordinator.queue_max",
        coordinator.queue_max,
        f"above live_requests_max={coordinator.live_requests_max}, so the queue could never fill",
        "lower queue_max or raise live_requests_max",
    )
    yield SettingCheck(
        coordinator.heartbeat_limit_s >= HEARTBEATS_PER_LIMIT_MIN * coordinator.heartbeat_interval_s,
        "coordinator.heartbeat_limit_s",
        coordinator.heartbeat_limit_s,
        f"below {HEARTBEATS_PER_LIMIT_MIN} heartbeats of {coordinator.heartbeat_interval_s} s",
        "raise the limit or lower heartbeat_interval_s",
    )
    yield _port("coordinator.metrics_port", coordinator.metrics_port)


def _worker(worker: WorkerSettings) -> Iterator[SettingCheck]:
    yield _name("worker.name", worker.name)
    if worker.served_model_name:
        yield _name("worker.served_model_name", worker.served_model_name)
    yield _name("worker.node", worker.node)
    yield _one_of("worker.role", worker.role, ROLES)
    yield _one_of("worker.transfer", worker.transfer, TRANSFER_ENGINES)
    yield SettingCheck(
        worker.transfer in ("", "shared") or worker.transfer_address.startswith("tcp://"),
        "worker.transfer_address",
        worker.transfer_address,
        f"transfer engine {worker.transfer} receives pages through a network and needs an address",
        "set an address of this node, as in tcp://10.0.0.2:0",
    )
    yield _one_of("worker.dtype", worker.dtype, DTYPES)
    for name in ("kv_dtype", "row_dtype", "index_dtype"):
        kind = getattr(worker, name)
        yield _one_of(f"worker.{name}", kind, KV_DTYPES)
        yield SettingCheck(
            kind != FP4 or worker.device == "cpu" or worker.dtype != "float32",
            f"worker.{name}",
            kind,
            "no kernel of a GPU reads rows or index keys of 4 bits for a model in float32",
            "use fp8, or worker.dtype = bfloat16",
        )
    yield _one_of("worker.matmul", worker.matmul, MATMULS)
    yield SettingCheck(
        worker.matmul != W8A8 or worker.device != "cpu",
        "worker.matmul",
        worker.matmul,
        "a CPU decodes FP8 weights at load, and quantizes nothing",
        f"use {AUTO_MATMUL}, {WEIGHT_ONLY}, or a GPU",
    )
    yield _one_of("worker.stream_backend", worker.stream_backend, STREAM_BACKENDS)
    kind, colon, index = worker.device.partition(":")
    device_known = worker.device == "cpu" or (kind == "cuda" and index.isdecimal() == bool(colon))
    yield SettingCheck(device_known, "worker.device", worker.device, "unknown device", "use cpu, cuda or cuda:N")
    yield SettingCheck(
        (worker.stream_backend == "cuda") == (worker.device != "cpu"),
        "worker.stream_backend",
        worker.stream_backend,
        f"does not order operations on {worker.device}",
        "leave it empty: cuda on a CUDA device, inline on the CPU",
    )
    yield _between("worker.seats", worker.seats, 1, SEATS_MAX)
    yield _between("worker.tail_slots", worker.tail_slots, 1, TAIL_SLOTS_MAX)
    yield _between("worker.lookahead_steps", worker.lookahead_steps, 0, 1)
    yield from _drafts(worker)
    yield _between("worker.context_max_tokens", worker.context_max_tokens, 0, CONTEXT_MAX_TOKENS)
    yield _between("worker.context_target_tokens", worker.context_target_tokens, 0, CONTEXT_MAX_TOKENS)
    yield _between("worker.pass_tokens", worker.pass_tokens, PAGE_TOKENS, PASS_TOKENS_MAX)
    yield _between("worker.split_tokens", worker.split_tokens, 0, PASS_TOKENS_MAX)
    yield from _gap_target(worker)
    yield _at_least("worker.layer_group", parse_size(worker.layer_group, "worker.layer_group"), 0)
    yield _at_least("worker.hot_chunks_max", worker.hot_chunks_max, 0)
    yield _at_least("worker.threads", worker.threads, 0)
    yield _between("worker.standby", worker.standbys, 0, 1)
    yield _positive("worker.report_interval_ms", worker.report_interval_ms)
    yield _port("worker.metrics_port", worker.metrics_port)


def _gap_target(worker: WorkerSettings) -> Iterator[SettingCheck]:
    target = worker.gap_target_ms
    yield SettingCheck(
        target == AUTO or 0 <= float(target) < inf,
        "worker.gap_target_ms",
        target,
        "not a time",
        f"set milliseconds, 0 for unbounded gaps, or {AUTO}",
    )


def _drafts(worker: WorkerSettings) -> Iterator[SettingCheck]:
    said, count, field = worker.draft_tokens, worker.draft_tokens_max, "worker.draft_tokens"
    yield _between(field, count, 0, DRAFT_TOKENS_MAX)
    yield SettingCheck(
        not count or worker.tail_slots >= 2 * (1 + count),
        "worker.tail_slots",
        worker.tail_slots,
        f"a tail holds the rows of two steps, of {1 + count} rows each",
        f"set it to {2 * (1 + count)} or more",
    )
    yield SettingCheck(
        not 0 < count <= DRAFT_TOKENS_MAX or worker.seats * (1 + count) <= SEATS_MAX,
        "worker.seats",
        worker.seats,
        f"a step takes {SEATS_MAX} rows at most, {1 + count} of each seat",
        f"set it to {SEATS_MAX // (1 + max(0, count))} or less",
    )
    yield SettingCheck(
        not count or not worker.record_selections,
        field,
        said,
        "selections of steps that draft are not recorded yet",
        "set 0",
    )
    for refused, why in (
        (worker.deterministic, "in deterministic mode all steps have one shape"),
        (worker.group_size > 1, "the ranks of a group draft equally many tokens in all steps"),
    ):
        yield SettingCheck(said != AUTO or not refused, field, said, why, f"set a number, 0 to {DRAFT_TOKENS_MAX}")


def _worker_memory(worker: WorkerSettings) -> Iterator[SettingCheck]:
    for field, is_measured in (("device_mem", worker.device != "cpu"), ("host_mem", True)):
        text = getattr(worker, field)
        yield SettingCheck(
            is_measured or text != AUTO,
            f"worker.{field}",
            text,
            "only a GPU's memory has a size",
            "set one, as in 4GiB",
        )
        sized = text == AUTO or parse_size(text, f"worker.{field}", takes_auto=is_measured) > 0
        yield SettingCheck(sized, f"worker.{field}", text, "no memory at all", "give it a size")
    classes = worker.hot_size_classes
    yield SettingCheck(bool(classes), "worker.hot_size_classes", classes, "no size class", "name at least one")
    for slots in classes:
        yield SettingCheck(
            0 < slots <= SLOTS_MAX - PAGE_TOKENS and slots % PAGE_TOKENS == 0,
            "worker.hot_size_classes",
            slots,
            f"not a multiple of {PAGE_TOKENS} from {PAGE_TOKENS} to {SLOTS_MAX - PAGE_TOKENS}",
            f"choose multiples of {PAGE_TOKENS}",
        )
    yield SettingCheck(
        all(smaller < larger for smaller, larger in pairwise(classes)),
        "worker.hot_size_classes",
        classes,
        "not in ascending order",
        "sort the classes and drop repeats",
    )


def _group(worker: WorkerSettings, *, is_insecure: bool) -> Iterator[SettingCheck]:
    size = worker.group_size
    yield _between("worker.group_size", size, 1, GROUP_SIZE_MAX)
    yield SettingCheck(
        0 <= worker.group_rank < size,
        "worker.group_rank",
        worker.group_rank,
        f"not a rank of a group of {size}",
        f"use 0 to {size - 1}, or raise worker.group_size",
    )
    yield SettingCheck(
        size == 1 or bool(worker.group),
        "worker.group",
        worker.group,
        f"worker.group_size is {size}, and the group has no name",
        "name the group, the same for all of its ranks",
    )
    name = worker.group
    yield SettingCheck(
        len(name) <= GROUP_NAME_CHARS_MAX and name.isprintable() and not any(c.isspace() or c == "/" for c in name),
        "worker.group",
        name,
        f"not a name of 1 to {GROUP_NAME_CHARS_MAX} visible characters without /",
        "choose another",
    )
    if worker.group_endpoint:
        yield from _group_endpoint(worker, is_insecure=is_insecure)


def _group_endpoint(worker: WorkerSettings, *, is_insecure: bool) -> Iterator[SettingCheck]:
    field, endpoint = "worker.group_endpoint", worker.group_endpoint
    scheme, _, address = endpoint.partition("://")
    known = scheme in ("ipc", "tcp") and bool(address)
    yield SettingCheck(known, field, endpoint, "not an endpoint", "write ipc:///path/to.sock or tcp://HOST:PORT")
    host, _, port = address.rpartition(":")
    has_port = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) <= PORT_MAX
    yield SettingCheck(
        scheme != "tcp" or has_port,
        field,
        endpoint,
        "all ranks need one host and one port to meet at",
        f"write tcp://HOST:PORT, with a port from 1 to {PORT_MAX}",
    )
    yield SettingCheck(
        scheme != "tcp" or bool(worker.group_secret_file) or is_insecure,
        "worker.group_secret_file",
        worker.group_secret_file,
        f"any peer that reaches {endpoint} could join the group",
        "name a file with the secret of all ranks, use ipc://, or pass --insecure on a network you trust",
    )
    fits = scheme != "ipc" or len(address.encode()) <= SOCKET_PATH_BYTES_MAX
    yield SettingCheck(
        fits,
        field,
        endpoint,
        f"the path has {len(address.encode())} bytes, a Unix socket takes {SOCKET_PATH_BYTES_MAX}",
        "choose a shorter cluster.runtime_dir, or a shorter worker.group",
    )


def _http(config: Config) -> Iterator[SettingCheck]:
    http = config.http
    yield SettingCheck(
        bool(http.api_keys_file) or config.cluster.insecure or http.host in LOOPBACK,
        "http.host",
        http.host,
        "without API keys any client that reaches this address could use the service",
        f"set http.api_keys_file, listen on {LOOPBACK[0]}, or set cluster.insecure = true on a network that you trust",
    )
    yield SettingCheck(
        bool(http.tls_cert_file) == bool(http.tls_key_file),
        "http.tls_key_file" if http.tls_cert_file else "http.tls_cert_file",
        "",
        "a certificate needs its key, and a key its certificate",
        "set both http.tls_cert_file and http.tls_key_file",
    )
    yield from _cors(http)
    yield _between("http.port", http.port, 0, PORT_MAX)
    yield _at_least("http.requests_max", http.requests_max, 1)
    yield _positive("http.idle_s", http.idle_s)
    yield _at_least("http.worker_wait_s", http.worker_wait_s, 0)
    yield _at_least("http.reattach_grace_s", http.reattach_grace_s, 0)
    yield _port("http.metrics_port", http.metrics_port)


def _cors(http: HttpSettings) -> Iterator[SettingCheck]:
    field = "http.cors_origins"
    origins = http.origins
    for origin in origins:
        if origin != ANY_ORIGIN:
            yield _origin(field, origin)
    yield SettingCheck(
        origins == (ANY_ORIGIN,) or ANY_ORIGIN not in origins,
        field,
        http.cors_origins,
        f"{ANY_ORIGIN} allows all origins, so the others say nothing",
        f"write {ANY_ORIGIN} alone, or leave it out",
    )


def _origin(field: str, origin: str) -> SettingCheck:
    """Browsers send an origin in one form, and it is compared letter by letter."""
    found = _ORIGIN.fullmatch(origin.lower())
    if found is None or not _is_port(found["port"]):
        form = "write SCHEME://HOST or SCHEME://HOST:PORT without a path, such as https://app.example.com"
        return SettingCheck(False, field, origin, "not an origin", form)
    scheme, host, port = found["scheme"], found["host"], found["port"]
    sent = f"{scheme}://{host}" + (f":{int(port)}" if port and int(port) != DEFAULT_PORTS.get(scheme) else "")
    return SettingCheck(origin == sent, field, origin, "browsers send this origin in another form", f"write {sent}")


def _is_port(text: str | None) -> bool:
    return text is None or 0 < int(text) <= PORT_MAX


def _one_of(field: str, value: str, known: tuple[str, ...]) -> SettingCheck:
    return SettingCheck(value in known, field, value, "unknown value", f"use one of {', '.join(known)}")


def _name(field: str, value: str) -> SettingCheck:
    fine = 0 < len(value) <= NAME_CHARS_MAX and value.isprintable() and not any(c.isspace() for c in value)
    return SettingCheck(fine, field, value, f"not a name of 1 to {NAME_CHARS_MAX} visible characters", "choose another")


def _at_least(field: str, value: float, low: float) -> SettingCheck:
    return SettingCheck(low <= value < inf, field, value, f"not a number from {low} on", f"use {low} or more")


def _positive(field: str, value: float) -> SettingCheck:
    return SettingCheck(0 < value < inf, field, value, "not a number above 0", "use a positive number")


def _between(field: str, value: int, low: int, high: int) -> SettingCheck:
    return SettingCheck(low <= value <= high, field, value, f"not from {low} to {high}", f"use {low} to {high}")


def _port(field: str, value: int) -> SettingCheck:
    return SettingCheck(-1 <= value <= PORT_MAX, field, value, "not a port", "use 0 for any free port, -1 for none")
