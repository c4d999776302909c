"""Every setting of every process with its default, as typed structs: the tables of the TOML file.

protocol/config.py reads them from the sources in their order; protocol/config_checks.py checks values and relations.
This module imports no torch.
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
#: Value of `cors_origins` that stands for all origins.
ANY_ORIGIN: Final = "*"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: immutable, keyword-only, unknown keys refused."""


class ClusterSettings(Settings, frozen=True):
    """Settings of all processes of a cluster. Empty endpoints become `ipc://<runtime_dir>/{client,admin,worker}.sock`."""

    name: str = "hisparse"
    runtime_dir: str = ""  # default: $XDG_RUNTIME_DIR/hisparse, else /tmp/hisparse-<uid>; mode 0700
    client_endpoint: str = ""
    admin_endpoint: str = ""
    worker_endpoint: str = ""
    keys_dir: str = ""  # directory of key files (`hisparse keys`), which tcp:// endpoints need
    insecure: bool = False  # tcp:// without keys: any peer that reaches the port has all rights; traffic is readable
    speak_as: str = "client"  # endpoint of commands that both roles have; an admin sees the requests of all users
    log_level: str = "info"
    log_format: str = "logfmt"  # or json
    traces_endpoint: str = ""  # OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; empty: no traces are made
    trace_ratio: float = 1.0  # share of requests that are traced, where the caller's traceparent does not say


class CoordinatorSettings(Settings, frozen=True):
    journal: str = ""  # default: <runtime_dir>/journal.sqlite; none: a crash of the coordinator loses every request
    live_requests_max: int = 16_384
    queue_max: int = 8_192
    ended_keep_s: float = 600.0  # finished outputs stay attachable this long
    ended_keep_max: int = 4_096
    connections_max: int = 1_024
    connections_per_key_max: int = 256
    messages_per_s: float = 2_000.0  # per key, or per connection without keys; each 64 KiB count as one more message
    messages_burst: int = 20_000  # messages that an idle peer may send at once
    flush_interval_ms: float = 5.0  # tokens reach a client connection at most this often
    heartbeat_interval_s: float = 0.5
    heartbeat_limit_s: float = 5.0
    command_ack_limit_s: float = 2.0  # commands not acknowledged in this time are replayed
    grant_ahead_tokens: int = 128
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
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: any free port, printed at start; -1: off


class WorkerSettings(Settings, frozen=True):
    name: str = ""  # default: <node>-<pid>
    node: str = ""  # default: the host name
    role: str = "both"  # prefill, decode or both
    transfer: str = ""  # engine that sends and receives host pages between nodes: shared, nixl, mooncake; empty: none
    transfer_address: str = ""  # address it receives at: tcp://HOST:PORT; default for shared: a socket in runtime_dir
    transfer_transports: str = "tcp"  # UCX_TLS of nixl, the protocol of mooncake
    transfer_devices: str = ""  # network devices, comma-separated; default: the engine's choice
    model: str = ""
    served_model_name: str = ""  # what clients call the model; default: the name of its directory
    device: str = "cpu"
    dtype: str = "auto"  # auto: the checkpoint's; float32, bfloat16
    kv_dtype: str = "auto"  # type of KV rows and index keys. auto: as dtype; float32, bfloat16, fp8
    matmul: str = "weight_only"  # products with FP8 weights on a GPU: weight_only; w8a8: activations in FP8 too
    stream_backend: str = ""  # default: inline on cpu; simulated; cuda
    stream_seed: int = 0  # of the simulated backend
    graphs: bool = True  # replay decode steps from CUDA graphs; no effect with other stream backends
    seats: int = 8  # requests in one decode batch at most
    device_mem: str = "256MiB"  # KV budget on the device: hot chunks, slab, index pages, bookkeeping; auto: on a GPU
    host_mem: str = "1GiB"  # host pool of the node; auto: what its memory limit allows (worker/pool/host_memory.py)
    pool_dir: str = ""  # default: runtime_dir; with CUDA, which cannot register files on disk, a directory in /dev/shm
    context_max_tokens: int = 0  # default: the model's
    context_target_tokens: int = 0  # context length that index pages and hot chunks are balanced for; 0: half for each
    slab_tokens: int = 0  # prefill slab; default: room for one longest prompt, within device_mem
    prefill_chunk_tokens: int = 512
    layer_group: str = (
        "1MiB"  # part of a page: prompts are staged and sent in groups of that many layers; 0: all at once
    )
    hot_size_classes: tuple[int, ...] = (4096, 8192, 16384, 32768)
    hot_chunks_max: int = 0  # caps the hot arena; 0: whatever device_mem leaves
    tail_slots: int = 8
    lookahead_steps: int = 1  # steps launched before the previous one's tokens are read: 0 or 1
    draft_tokens: DraftTokens = 0  # drafted for a step by the model's own draft layer: 0 to 4; auto: as many as pay
    deterministic: bool = False
    threads: int = 0  # torch threads; 0: torch's default
    group: str = ""  # name of the group that this worker is a rank of; empty: this worker holds the whole model
    group_rank: int = 0
    group_size: int = 1  # ranks that share the experts of one model
    group_endpoint: str = ""  # where rank 0 listens; default: a socket in runtime_dir; tcp://HOST:PORT across nodes
    group_secret_file: str = ""  # secret of all ranks, which a tcp:// group_endpoint needs
    group_prompt_rounds_max: int = 1  # prompt rounds of a group between two of its decode steps
    report_interval_ms: float = 20.0
    record_selections: str = ""  # trace of selections, in FILE.<worker name>.<pid>; makes steps longer; empty: off
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0

    @property
    def draft_tokens_max(self) -> int:
        """Tokens that a step drafts at most: what memory is made for."""
        return DRAFT_TOKENS_MAX if self.draft_tokens == AUTO else int(self.draft_tokens)


class HttpSettings(Settings, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8_000  # 0: any free port, printed at start
    api_keys_file: str = ""  # one key a line; without the file, any client that reaches the port is served
    tls_cert_file: str = ""  # certificate chain, PEM; with tls_key_file, the port speaks HTTPS instead of HTTP
    tls_key_file: str = ""  # private key, PEM; other users may not have access to the file
    cors_origins: str = ""  # origins of web pages that may read answers, comma-separated, or *; empty: none
    page: bool = True  # a chat page for people at /; its requests take an API key as others do
    requests_max: int = 256  # requests served at the same time; further ones get 429
    worker_wait_s: float = 30.0  # while no worker can take it, a request waits this long; then it gets 503
    reattach_grace_s: float = 10.0  # a request of the client's own id outlives its connection this long
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: any free port, printed at start; -1: off

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
