"""Every setting of every process with its default, as typed structs: the tables of the TOML file.

How they are read, and in which order sources count, is protocol/config.py; which values go together,
protocol/config_checks.py. No torch here: the worker's structs are plain numbers too.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: `journal` of a coordinator that keeps none.
NO_JOURNAL: Final = "none"


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
    speak_as: str = "client"  # door of commands that both have; an admin sees everybody's requests
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
    host_mem: str = "1GiB"  # host pool of the node; auto: what its memory limit allows (worker/pool/host_memory.py)
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
