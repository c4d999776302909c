"""Every setting of every process, as typed structs, parsed once and refused loudly.

Sources in rising precedence: defaults, one TOML file (tables as the structs below), `HISPARSE_*` environment variables
(`HISPARSE_WORKER_SEATS=16`), command-line flags. Unknown keys and impossible relations raise ConfigError naming the
field, the value and the remedy. No torch here: the worker's structs are plain numbers too.
"""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: immutable, keyword-only, unknown keys refused."""


class ClusterSettings(Settings):
    """What all processes of a cluster share. Empty endpoints become `ipc://<runtime_dir>/{client,admin,worker}.sock`."""

    name: str = "hisparse"
    runtime_dir: str = ""  # default: $XDG_RUNTIME_DIR/hisparse, else /tmp/hisparse-<uid>; mode 0700
    client_endpoint: str = ""
    admin_endpoint: str = ""
    worker_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "logfmt"  # or json


class CoordinatorSettings(Settings):
    live_requests_max: int = 16_384
    queue_max: int = 8_192
    ended_keep_s: float = 600.0  # finished outputs stay attachable this long
    ended_keep_max: int = 4_096
    connections_max: int = 1_024
    flush_interval_ms: float = 5.0  # tokens reach a client connection at most this often
    heartbeat_interval_s: float = 0.5
    heartbeat_limit_s: float = 5.0
    command_ack_limit_s: float = 2.0  # past it, commands are replayed
    grant_ahead_tokens: int = 128
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: any free port, printed at start; -1: off


class WorkerSettings(Settings):
    name: str = ""  # default: <node>-<pid>
    node: str = ""  # default: the host name
    model: str = ""
    device: str = "cpu"
    dtype: str = "auto"  # auto: the checkpoint's; float32, bfloat16
    stream_backend: str = ""  # default: inline on cpu; simulated; cuda
    stream_seed: int = 0  # of the simulated backend
    seats: int = 8  # most requests in one decode batch
    device_mem: str = "256MiB"  # KV budget on the device: hot chunks, slab, index pages, bookkeeping
    host_mem: str = "1GiB"  # host pool of the node
    pool_dir: str = ""  # default: runtime_dir
    context_max_tokens: int = 0  # default: the model's
    slab_tokens: int = 0  # prefill slab; default: room for one longest prompt, within device_mem
    prefill_chunk_tokens: int = 512
    hot_size_classes: tuple[int, ...] = (4096, 8192, 16384, 32768)
    hot_chunks_max: int = 0  # caps the hot arena; 0: whatever device_mem leaves
    tail_slots: int = 8
    lookahead_steps: int = 1  # steps launched before the previous one's tokens are read: 0 or 1
    deterministic: bool = False
    threads: int = 0  # torch threads; 0: torch's default
    report_interval_ms: float = 20.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0


class Config(Settings):
    cluster: ClusterSettings = ClusterSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    worker: WorkerSettings = WorkerSettings()
