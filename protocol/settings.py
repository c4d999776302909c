"""Every setting of every process with its default, as typed structs: the tables of the TOML file.

protocol/config.py reads them from the sources in their order; protocol/config_checks.py checks values and relations.
This module imports no torch. The comment of a setting is its documentation: the help of its option, and its line in
docs/settings.md (`make docs`).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from protocol.byte_sizes import AUTO
from protocol.messages import DRAFT_TOKENS_MAX

#: Value of `journal` for a coordinator without a journal.
NO_JOURNAL: Final = "none"
#: Value of `hot_floor` that lets measured throughput choose it.
AUTO_FLOOR: Final = "auto"
#: Of `draft_tokens`. AUTO: the worker chooses a number for each step.
DraftTokens: TypeAlias = int | Literal["auto"]
#: Of `standby`. AUTO: one on a GPU, under `hisparse up`.
Standby: TypeAlias = int | Literal["auto"]
#: Of `gap_target_ms`. AUTO: a multiple of a plain step, which the worker measures.
GapTarget: TypeAlias = float | Literal["auto"]
#: Value of `cors_origins` that stands for all origins.
ANY_ORIGIN: Final = "*"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: immutable, keyword-only, unknown keys refused."""


class ClusterSettings(Settings, frozen=True):
    """Settings of all processes of a cluster. Empty endpoints become `ipc://<runtime_dir>/{client,admin,worker}.sock`."""

    name: str = "hisparse"  # name of the cluster, in logs and metrics
    runtime_dir: str = (
        ""  # directory of sockets, journal, host pool; default: $XDG_RUNTIME_DIR/hisparse, or /tmp/hisparse-UID
    )
    client_endpoint: str = ""  # where the coordinator listens for clients; default: client.sock in runtime_dir
    admin_endpoint: str = ""  # where the coordinator listens for admins; default: admin.sock in runtime_dir
    worker_endpoint: str = ""  # where the coordinator listens for workers; default: worker.sock in runtime_dir
    keys_dir: str = ""  # directory of key files (`hisparse keys`), for tcp:// endpoints
    insecure: bool = False  # tcp:// without keys: any peer that reaches the port has all rights; traffic is readable
    speak_as: str = "client"  # client, or admin, who sees the requests of all users
    log_level: str = "info"  # debug, info, warning or error
    log_format: str = "logfmt"  # form of log lines: logfmt or json
    traces_endpoint: str = ""  # OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; empty: no traces are made
    trace_ratio: float = 1.0  # share of requests that are traced, where the caller's traceparent does not say


class CoordinatorSettings(Settings, frozen=True):
    journal: str = ""  # file of the journal; default: journal.sqlite in runtime_dir; none: a crash loses every request
    live_requests_max: int = 16_384  # requests that have not ended; further ones are refused, of one owner beyond 7/8
    queue_max: int = 8_192  # requests that wait; further ones are refused, of one owner beyond 7/8
    ended_keep_s: float = 600.0  # finished outputs stay attachable this long
    ended_keep_max: int = (
        4_096  # finished outputs that stay attachable at most; the oldest of the owner with most goes first
    )
    connections_max: int = 1_024  # connections at the same time; further ones are refused
    connections_per_key_max: int = 256  # connections with one key; further ones are refused
    messages_per_s: float = (
        2_000.0  # messages a second of a key, or of a connection without; each 64 KiB count as one more
    )
    messages_burst: int = 20_000  # messages that an idle peer may send at once
    flush_interval_ms: float = 5.0  # tokens reach a client connection at most this often
    heartbeat_interval_s: float = 0.5  # a worker says this often that it lives
    heartbeat_limit_s: float = 5.0  # a worker that is silent for this long is disconnected
    command_ack_limit_s: float = 2.0  # commands not acknowledged in this time are replayed
    grant_ahead_tokens: int = 128  # tokens for which a running request has host pages ahead of need
    stop_deadline_s: float = 30.0  # after SIGTERM or SIGINT, running requests may go on this long
    prefix_reuse: str = "own"  # prompts begin with cached pages of requests of their owner (own) or any (all); or off
    hot_floor: str = (
        AUTO_FLOOR  # smallest hot size that is given: as throughput asks for (auto), or held still (smallest)
    )
    kv_events_endpoint: str = ""  # where events of the prefix cache are published, with token ids; empty: nowhere
    kv_events_replay_endpoint: str = ""  # where subscribers ask for batches that they missed; empty: nowhere
    kv_events_topic: str = ""  # first frame of each batch
    kv_events_format: str = "map"  # how events are written: map, as vLLM 0.24 does; array, as vLLM 0.10.2 to 0.23
    audit_interval_s: float = 10.0  # each worker's memory is compared with the ledger this often; 0: on command only
    metrics_host: str = "127.0.0.1"  # address of the metrics page
    metrics_port: int = 0  # port of the metrics page; 0: any free port, printed at start; -1: off


class WorkerSettings(Settings, frozen=True):
    name: str = ""  # unique in the cluster; default: NODE-PID
    node: str = ""  # workers of a node share its host pool; default: the host name
    role: str = "both"  # prefill, decode or both
    transfer: str = ""  # engine that sends and receives host pages between nodes: shared, nixl, mooncake; empty: none
    transfer_address: str = (
        ""  # where host pages are received: tcp://HOST:PORT; default for shared: a socket in runtime_dir
    )
    transfer_transports: str = "tcp"  # UCX_TLS of nixl, the protocol of mooncake
    transfer_devices: str = ""  # network devices, comma-separated; default: the engine's choice
    model: str = ""  # checkpoint directory: config.json and safetensors
    served_model_name: str = ""  # model id for clients; default: the name of its directory
    device: str = "cpu"  # cpu, cuda or cuda:N
    dtype: str = "auto"  # type of the model: auto (the checkpoint's), float32 or bfloat16
    kv_dtype: str = "auto"  # type of KV rows and index keys: auto (as dtype), float32, bfloat16, fp8, fp4
    row_dtype: str = "auto"  # type of KV rows alone; auto: as kv_dtype
    index_dtype: str = "auto"  # type of index keys alone; auto: as kv_dtype
    matmul: str = (
        "auto"  # FP8 products on a GPU: weight_only (exact), w8a8 (activations in FP8 too), auto (w8a8 if it can)
    )
    stream_backend: str = ""  # streams: inline or simulated on the CPU, cuda on a GPU; default: inline, cuda
    stream_seed: int = 0  # seed of the simulated backend
    graphs: bool = True  # replay decode steps from CUDA graphs; no effect with other stream backends
    seats: int = 8  # requests in one decode batch at most
    device_mem: str = "256MiB"  # KV budget on the device, as in 60GiB; auto: by the free memory of the GPU
    host_mem: str = "1GiB"  # host pool of the node, as in 900GiB; auto: by its memory limit
    pool_dir: str = (
        ""  # directory of the host pool; default: runtime_dir, or one in /dev/shm with CUDA, which cannot use disks
    )
    context_max_tokens: int = 0  # longest context; 0: the model's
    context_target_tokens: int = 0  # context length that index pages and hot chunks are balanced for; 0: half each
    pass_tokens: int = 8_192  # prompt tokens, of one or several prompts, that go through the layers together
    split_tokens: int = 1_024  # ranks without prompts take a share of a pass with so many tokens; 0: of none
    gap_target_ms: GapTarget = (
        AUTO  # milliseconds between two tokens of a request beside prompts; auto: 2.2 plain steps; 0: unbounded
    )
    layer_group: str = "1MiB"  # bytes of a page that are sent together, as whole layers; 0: all layers
    hot_size_classes: tuple[int, ...] = (4096, 8192, 16384, 32768)  # sizes of managed hot buffers, in slots
    hot_chunks_max: int = 0  # caps the hot arena; 0: what device_mem leaves
    tail_slots: int = 8  # slots for the newest rows of a request
    lookahead_steps: int = 1  # steps launched before the previous one's tokens are read: 0 or 1
    draft_tokens: DraftTokens = 0  # tokens drafted for a step by the model's draft layer: 0 to 4; auto: as many as pay
    deterministic: bool = False  # outputs do not depend on the batch
    threads: int = 0  # torch threads; 0: torch's default
    standby: Standby = AUTO  # processes of `hisparse up` that take over from this worker: 0, 1, or auto: 1 on a GPU
    group: str = ""  # name of the group that this worker is a rank of; empty: this worker holds the whole model
    group_rank: int = 0  # number of this worker in its group, from 0 on
    group_size: int = 1  # ranks that share the experts of one model
    group_endpoint: str = ""  # where rank 0 listens; default: a socket in runtime_dir; tcp://HOST:PORT across nodes
    group_secret_file: str = ""  # secret of all ranks, which a tcp:// group_endpoint needs
    keeper: bool = True  # weights stay when a worker dies, where `hisparse up` runs a process that keeps them
    report_interval_ms: float = 20.0  # tokens are reported to the coordinator at most this often
    record_selections: str = ""  # trace of selections, in FILE.WORKER.PID; makes steps longer; empty: off
    metrics_host: str = "127.0.0.1"  # address of the metrics page
    metrics_port: int = 0  # port of the metrics page; 0: any free port, printed at start; -1: off

    @property
    def standbys(self) -> int:
        """Processes that wait to take over from this worker; AUTO is none, until `hisparse up` has resolved it."""
        return 0 if self.standby == AUTO else int(self.standby)

    @property
    def draft_tokens_max(self) -> int:
        """Tokens that a step drafts at most: what memory is made for."""
        return DRAFT_TOKENS_MAX if self.draft_tokens == AUTO else int(self.draft_tokens)


class HttpSettings(Settings, frozen=True):
    host: str = "127.0.0.1"  # address to listen on; other than loopback needs api_keys_file
    port: int = 8_000  # port to listen on; 0: any free port, printed at start
    api_keys_file: str = ""  # file of API keys, one a line; without it, any client that reaches the port is served
    tls_cert_file: str = ""  # certificate chain, PEM; with tls_key_file, the port speaks HTTPS instead of HTTP
    tls_key_file: str = ""  # private key of the certificate, PEM, without access for other users
    cors_origins: str = ""  # origins of web pages that may read answers, comma-separated, or *; empty: none
    page: bool = True  # a chat page for people at /; its requests take an API key as others do
    requests_max: int = 256  # requests served at the same time; further ones get 429
    idle_s: float = 120.0  # a connection is closed after this long without a request; longer than proxies keep theirs
    worker_wait_s: float = 30.0  # while no worker can take it, a request waits this long; then it gets 503
    reattach_grace_s: float = 10.0  # a request of the client's own id outlives its connection this long
    metrics_host: str = "127.0.0.1"  # address of the metrics page
    metrics_port: int = 0  # port of the metrics page; 0: any free port, printed at start; -1: off

    @property
    def origins(self) -> tuple[str, ...]:
        """Of `cors_origins`."""
        return tuple(it.strip() for it in self.cors_origins.split(",")) if self.cors_origins.strip() else ()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert_file else 'http'}://{host}:{self.port}"


class Config(Settings, frozen=True):
    cluster: ClusterSettings = ClusterSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    worker: WorkerSettings = WorkerSettings()
    http: HttpSettings = HttpSettings()
