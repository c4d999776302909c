"""Settings: precedence of the sources, resolution of defaults, and refusals that name field, value and remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.byte_sizes import parse_size
from protocol.config import HostFacts, build, load, resolve, to_environ, with_metrics_ports
from protocol.errors import ConfigError
from protocol.settings import Config
from tests.support.limits import HANG_LIMIT_S

FACTS = HostFacts(hostname="node7", pid=42, uid=1000)


def built(
    table: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> Config:
    return build(table or {}, environ or {}, flags or {}, FACTS, file_name="hisparse.toml")


def refusal(**sources: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        built(**sources)
    return caught.value


def test_later_sources_override_earlier_ones() -> None:
    table = {"worker": {"seats": 3, "tail_slots": 4, "lookahead_steps": 0}}
    config = built(
        table,
        {"HISPARSE_WORKER_SEATS": "5", "HISPARSE_WORKER_TAIL_SLOTS": "6"},
        {"worker.seats": 7, "worker.tail_slots": None},
    )
    assert (config.worker.seats, config.worker.tail_slots, config.worker.lookahead_steps) == (7, 6, 0)


def test_text_is_parsed_to_the_type_of_the_field() -> None:
    config = built(
        environ={
            "HISPARSE_WORKER_DETERMINISTIC": "true",
            "HISPARSE_WORKER_HOT_SIZE_CLASSES": "128,256 512",
            "HISPARSE_COORDINATOR_FLUSH_INTERVAL_MS": "2.5",
            "OTHER_WORKER_SEATS": "not ours",
        }
    )
    assert config.worker.deterministic is True
    assert config.worker.hot_size_classes == (128, 256, 512)
    assert config.coordinator.flush_interval_ms == 2.5


def test_a_gap_target_is_a_number_of_milliseconds_or_automatic() -> None:
    assert built().worker.gap_target_ms == "auto"
    for text, found in (("auto", "auto"), ("2.5", 2.5), ("0", 0.0), (60, 60.0)):
        worker = built(flags={"worker.gap_target_ms": text}).worker
        assert worker.gap_target_ms == found
        assert built(environ=to_environ(Config(worker=worker))).worker.gap_target_ms == found


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("prefill_chunk_tokens", "worker.gap_target_ms"),
        ("group_prompt_rounds_max", "worker.gap_target_ms"),
        ("slab_tokens", "the longest prompt (worker.context_max_tokens)"),
    ],
)
def test_settings_that_are_gone_are_refused_with_what_took_their_place(name: str, successor: str) -> None:
    variable = f"HISPARSE_WORKER_{name.upper()}"
    sources = ("hisparse.toml", f"worker.{name}"), ("the environment", variable), ("the command line", f"worker.{name}")
    refusals = [
        refusal(table={"worker": {name: 2}}),
        refusal(environ={variable: "2"}),
        refusal(flags={f"worker.{name}": 2}),
    ]
    for refused, (origin, field) in zip(refusals, sources, strict=True):
        assert (refused.field, refused.value) == (field, "2")
        assert refused.message == f"{origin} names a setting that is gone"
        assert refused.remedy.startswith(f"remove it; {successor}")


def test_machine_dependent_defaults_are_filled_once() -> None:
    config = built()
    assert config.cluster.runtime_dir == "/tmp/hisparse-1000"
    assert config.cluster.client_endpoint == "ipc:///tmp/hisparse-1000/client.sock"
    assert config.worker.name == "node7-42"
    assert config.worker.pool_dir == config.cluster.runtime_dir
    assert config.worker.stream_backend == "inline"
    assert resolve(config, HostFacts("elsewhere", 1, 2)) == config


def test_a_group_meets_in_the_runtime_directory() -> None:
    """Its endpoint is resolved once, so that a rank that is told of another directory keeps it."""
    flags: dict[str, object] = {"worker.group": "g0", "worker.group_rank": 1, "worker.group_size": 2}
    assert built(flags=flags).worker.group_endpoint == "ipc:///tmp/hisparse-1000/group-g0.sock"
    named = flags | {"worker.group_endpoint": "tcp://10.0.0.2:7500", "worker.group_secret_file": "/etc/secret"}
    assert built(flags=named).worker.group_endpoint == "tcp://10.0.0.2:7500"
    assert built().worker.group_endpoint == ""


def _grouped(**settings: object) -> dict[str, dict[str, object]]:
    values = {"group": "g0", "group_size": 2} | settings
    return {"flags": {f"worker.{field}": value for field, value in values.items()}}


@pytest.mark.parametrize(
    ("sources", "field", "value", "remedy"),
    [
        (_grouped(group_size=0), "worker.group_size", "0", "1 to 1024"),
        (_grouped(group_size=1025), "worker.group_size", "1025", "1 to 1024"),
        (_grouped(group_rank=2), "worker.group_rank", "2", "use 0 to 1"),
        (_grouped(group_rank=-1), "worker.group_rank", "-1", "use 0 to 1"),
        (_grouped(group=""), "worker.group", "", "name the group"),
        (_grouped(group="g" * 65), "worker.group", "g" * 65, "choose another"),
        (_grouped(group="a b"), "worker.group", "a b", "choose another"),
        (_grouped(group="../g"), "worker.group", "../g", "choose another"),
        (_grouped(group_endpoint="udp://x:1"), "worker.group_endpoint", "udp://x:1", "tcp://HOST:PORT"),
        (_grouped(group_endpoint="tcp://h"), "worker.group_endpoint", "tcp://h", "tcp://HOST:PORT"),
        (_grouped(group_endpoint="tcp://h:0"), "worker.group_endpoint", "tcp://h:0", "1 to 65535"),
        (_grouped(group_endpoint="tcp://:7500"), "worker.group_endpoint", "tcp://:7500", "tcp://HOST:PORT"),
        (_grouped(group_endpoint="tcp://h:7500"), "worker.group_secret_file", "", "--insecure"),
        (_grouped(group_endpoint="ipc:///" + "x" * 107), "worker.group_endpoint", None, "shorter"),
    ],
)
def test_unfit_settings_of_a_group_are_refused(
    sources: dict[str, Any], field: str, value: str | None, remedy: str
) -> None:
    refused = refusal(**sources)
    assert (refused.field, remedy in refused.remedy) == (field, True)
    assert value is None or refused.value == value


def test_strangers_are_a_choice_on_a_network_that_is_trusted() -> None:
    sources = _grouped(group_endpoint="tcp://h:7500")
    assert built(flags=sources["flags"] | {"cluster.insecure": True}).worker.group_endpoint == "tcp://h:7500"
    assert built(flags=sources["flags"] | {"worker.group_secret_file": "s"}).worker.group_secret_file == "s"


def test_the_runtime_directory_prefers_xdg() -> None:
    facts = HostFacts("node7", 42, 1000, xdg_runtime_dir="/run/user/1000")
    assert build({}, {}, {}, facts).cluster.runtime_dir == "/run/user/1000/hisparse"


def test_cuda_device_defaults_to_cuda_streams_and_memory_pool() -> None:
    """One directory per cluster, and none for a user who named one."""
    flags = {"worker.device": "cuda:1", "cluster.runtime_dir": "/run/user/1/hisparse"}
    worker = built(flags=flags).worker
    assert (worker.stream_backend, worker.pool_dir) == ("cuda", "/dev/shm/hisparse-run-user-1-hisparse")
    assert built(flags=flags | {"cluster.runtime_dir": "/tmp/b"}).worker.pool_dir == "/dev/shm/hisparse-tmp-b"
    assert built(flags=flags | {"worker.pool_dir": "/data"}).worker.pool_dir == "/data"


@pytest.mark.parametrize(
    ("sources", "field", "value", "remedy"),
    [
        ({"table": {"wroker": {}}}, "wroker", "{}", "did you mean worker?"),
        ({"table": {"worker": {"seets": 1}}}, "worker.seets", "1", "did you mean seats?"),
        ({"table": {"worker": 3}}, "worker", "3", "write [worker] in hisparse.toml"),
        ({"environ": {"HISPARSE_WORKER_SEETS": "1"}}, "HISPARSE_WORKER_SEETS", "1", "did you mean seats?"),
        ({"environ": {"HISPARSE_DEBUG": "1"}}, "HISPARSE_DEBUG", "1", "known here"),
        ({"environ": {"HISPARSE_WORKER_SEATS": "many"}}, "worker.seats", "many", "HISPARSE_WORKER_SEATS"),
        ({"table": {"worker": {"seats": 1.5}}}, "worker.seats", "1.5", "hisparse.toml"),
        ({"flags": {"worker.seets": 1}}, "worker.seets", "1", "did you mean seats?"),
        ({"table": {"seats": 1}}, "seats", "1", "did you mean worker.seats?"),
        (
            {"flags": {"metrics_port": 1}},
            *("metrics_port", "1"),
            "did you mean coordinator.metrics_port or worker.metrics_port or http.metrics_port?",
        ),
        ({"environ": {"HISPARSE_SEATS": "1"}}, "HISPARSE_SEATS", "1", "known here: cluster"),
        ({"flags": {"worker.device_mem": "lots"}}, "worker.device_mem", "lots", "GiB"),
        ({"flags": {"worker.host_mem": "0"}}, "worker.host_mem", "0", "size"),
        ({"flags": {"worker.row_dtype": "int8"}}, "worker.row_dtype", "int8", "fp8"),
        (
            {"flags": {"worker.kv_dtype": "fp4", "worker.device": "cuda", "worker.dtype": "float32"}},
            *("worker.kv_dtype", "fp4", "use fp8"),
        ),
        (
            {"flags": {"worker.index_dtype": "fp4", "worker.device": "cuda", "worker.dtype": "float32"}},
            *("worker.index_dtype", "fp4", "worker.dtype = bfloat16"),
        ),
        ({"flags": {"worker.hot_size_classes": (256, 128)}}, "worker.hot_size_classes", "(256, 128)", "sort"),
        ({"flags": {"worker.hot_size_classes": (100,)}}, "worker.hot_size_classes", "100", "multiples of 64"),
        ({"flags": {"worker.hot_size_classes": ()}}, "worker.hot_size_classes", "()", "at least one"),
        ({"flags": {"worker.hot_size_classes": "[256]"}}, "worker.hot_size_classes", "[256]", "write it as 256,512 in"),
        ({"table": {"worker": {"hot_size_classes": 256}}}, "worker.hot_size_classes", "256", "as [256, 512] in"),
        ({"flags": {"http.idle_s": 0}}, "http.idle_s", "0.0", "use a positive number"),
        ({"flags": {"http.idle_s": float("inf")}}, "http.idle_s", "inf", "use a positive number"),
        ({"flags": {"worker.tail_slots": 17}}, "worker.tail_slots", "17", "1 to 16"),
        ({"flags": {"worker.lookahead_steps": 2}}, "worker.lookahead_steps", "2", "0 to 1"),
        ({"flags": {"worker.pass_tokens": 63}}, "worker.pass_tokens", "63", "64 to 65536"),
        ({"flags": {"worker.pass_tokens": 65_537}}, "worker.pass_tokens", "65537", "64 to 65536"),
        ({"flags": {"worker.gap_target_ms": -1}}, "worker.gap_target_ms", "-1.0", "0 for unbounded gaps, or auto"),
        ({"environ": {"HISPARSE_WORKER_GAP_TARGET_MS": "inf"}}, "worker.gap_target_ms", "inf", "set milliseconds"),
        ({"flags": {"worker.gap_target_ms": float("nan")}}, "worker.gap_target_ms", "nan", "set milliseconds"),
        ({"flags": {"worker.gap_target_ms": "long"}}, "worker.gap_target_ms", "long", "correct it in the command line"),
        ({"flags": {"worker.draft_tokens": 5}}, "worker.draft_tokens", "5", "0 to 4"),
        ({"flags": {"worker.draft_tokens": 4}}, "worker.tail_slots", "8", "10 or more"),
        ({"flags": {"worker.draft_tokens": "auto"}}, "worker.tail_slots", "8", "10 or more"),
        ({"flags": {"worker.draft_tokens": "many"}}, "worker.draft_tokens", "many", "correct it in the command line"),
        (
            {"flags": {"worker.draft_tokens": "auto", "worker.tail_slots": 10, "worker.deterministic": True}},
            *("worker.draft_tokens", "auto", "set a number, 0 to 4"),
        ),
        (
            {"flags": {"worker.draft_tokens": "auto", "worker.tail_slots": 10, "worker.group_size": 2}},
            *("worker.draft_tokens", "auto", "set a number, 0 to 4"),
        ),
        ({"flags": {"worker.draft_tokens": 2, "worker.seats": 400}}, "worker.seats", "400", "341 or less"),
        ({"flags": {"worker.draft_tokens": 2, "worker.record_selections": "t"}}, "worker.draft_tokens", "2", "set 0"),
        ({"flags": {"worker.stream_backend": "cuda"}}, "worker.stream_backend", "cuda", "inline"),
        (
            {"flags": {"worker.device": "cuda", "worker.stream_backend": "simulated"}},
            "worker.stream_backend",
            "simulated",
            "empty",
        ),
        ({"flags": {"worker.device_mem": "auto"}}, "worker.device_mem", "auto", "GiB"),
        ({"flags": {"worker.device": "tpu"}}, "worker.device", "tpu", "cuda"),
        ({"flags": {"worker.device": "cuda:x"}}, "worker.device", "cuda:x", "cuda:N"),
        ({"flags": {"worker.device": "cuda:"}}, "worker.device", "cuda:", "cuda:N"),
        ({"flags": {"worker.report_interval_ms": float("inf")}}, "worker.report_interval_ms", "inf", "positive"),
        ({"flags": {"worker.report_interval_ms": float("nan")}}, "worker.report_interval_ms", "nan", "positive"),
        ({"flags": {"http.reattach_grace_s": float("inf")}}, "http.reattach_grace_s", "inf", "0 or more"),
        ({"flags": {"http.tls_cert_file": "c.pem"}}, "http.tls_key_file", "", "http.tls_cert_file"),
        ({"flags": {"worker.name": "a b"}}, "worker.name", "a b", "another"),
        ({"flags": {"worker.metrics_port": 65_536}}, "worker.metrics_port", "65536", "-1 for none"),
        ({"flags": {"cluster.log_level": "loud"}}, "cluster.log_level", "loud", "warning"),
        ({"flags": {"cluster.client_endpoint": "udp://x"}}, "cluster.client_endpoint", "udp://x", "tcp://"),
        ({"flags": {"cluster.worker_endpoint": "tcp://h:1"}}, "cluster.worker_endpoint", "tcp://h:1", "insecure"),
        (
            {"flags": {"cluster.worker_endpoint": "tcp://h:65536", "cluster.insecure": True}},
            "cluster.worker_endpoint",
            "tcp://h:65536",
            "0 to 65535",
        ),
        (
            {"flags": {"cluster.worker_endpoint": "tcp://h", "cluster.insecure": True}},
            "cluster.worker_endpoint",
            "tcp://h",
            "tcp://host:port",
        ),
        ({"flags": {"cluster.runtime_dir": "/" + "x" * 100}}, "cluster.client_endpoint", None, "shorter"),
        (
            {"flags": {f"cluster.{name}_endpoint": "ipc:///same" for name in ("client", "admin")}},
            "cluster.admin_endpoint",
            "ipc:///same",
            "different addresses",
        ),
        ({"flags": {"cluster.insecure": True, "cluster.keys_dir": "/k"}}, "cluster.insecure", "True", "set only one"),
        ({"flags": {"worker.transfer": "pigeon"}}, "worker.transfer", "pigeon", "nixl"),
        ({"flags": {"worker.transfer": "nixl"}}, "worker.transfer_address", "", "tcp://"),
        ({"flags": {"worker.role": "encode"}}, "worker.role", "encode", "prefill"),
        ({"flags": {"cluster.speak_as": "worker"}}, "cluster.speak_as", "worker", "admin"),
        ({"flags": {"coordinator.queue_max": 20_000}}, "coordinator.queue_max", "20000", "live_requests_max"),
        ({"flags": {"coordinator.heartbeat_limit_s": 1.0}}, "coordinator.heartbeat_limit_s", "1.0", "heartbeat"),
    ],
)
def test_a_refusal_names_field_value_and_remedy(
    sources: dict[str, Any], field: str, value: str | None, remedy: str
) -> None:
    error = refusal(**sources)
    assert error.field == field
    assert value is None or error.value == value
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("flags", "field", "remedy"),
    [
        ({"prefix_reuse": "some"}, "prefix_reuse", "use one of off, own, all"),
        ({"hot_floor": "largest"}, "hot_floor", "use one of auto, smallest"),
        ({"kv_events_endpoint": "tcp://0.0.0.0:5557"}, "kv_events_endpoint", "hisparse keys init"),
        ({"kv_events_endpoint": "nonsense"}, "kv_events_endpoint", "ipc:///path"),
        ({"kv_events_replay_endpoint": "ipc:///r"}, "kv_events_replay_endpoint", "set coordinator.kv_events_endpoint"),
        (
            {"kv_events_endpoint": "ipc:///e", "kv_events_replay_endpoint": "ipc:///e"},
            "kv_events_replay_endpoint",
            "an address of its own",
        ),
        ({"kv_events_endpoint": "ipc:///e", "prefix_reuse": "off"}, "kv_events_endpoint", "own or all"),
        ({"kv_events_endpoint": "ipc:///e", "kv_events_format": "json"}, "kv_events_format", "map, array"),
        ({"kv_events_endpoint": "ipc:///e", "kv_events_topic": "x" * 129}, "kv_events_topic", "shorten it"),
    ],
)
def test_settings_of_prefix_reuse_are_checked(flags: dict[str, object], field: str, remedy: str) -> None:
    error = refusal(flags={f"coordinator.{name}": value for name, value in flags.items()})
    assert error.field == f"coordinator.{field}"
    assert remedy in error.remedy


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent.toml", environ={})
    bad = tmp_path / "bad.toml"
    bad.write_text("seats = = 3")
    with pytest.raises(ConfigError, match="not TOML"):
        load(bad, environ={})
    bad.write_text("seats = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"config=.*bad.toml: is nested too deeply"):
        load(bad, environ={})


@pytest.mark.timeout(HANG_LIMIT_S)
def test_pipe_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    """It would hold a start until something writes to it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"config=.*pipe: is no regular file \(check --config and HISPARSE_CONFIG\)"):
        load(tmp_path / "pipe", environ={})


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hisparse.toml"
    path.write_text("[worker]\nseats = 11\n")
    assert load(environ={"HISPARSE_CONFIG": str(path)}).worker.seats == 11


def test_kernel_cache_path_is_no_setting() -> None:
    assert load(environ={"HISPARSE_KERNEL_CACHE": "/var/cache/kernels"}) == load(environ={})


def test_children_receive_every_setting_unchanged() -> None:
    config = built(
        flags={"worker.deterministic": True, "worker.hot_size_classes": (192,), "coordinator.flush_interval_ms": 0.1}
    )
    elsewhere = HostFacts("other", 1, 2, xdg_runtime_dir="/run/user/2")
    assert build({}, to_environ(config), {}, elsewhere) == config


@given(st.integers(0, 2**50))
def test_a_plain_number_is_bytes(count: int) -> None:
    assert parse_size(str(count), "f") == count


@pytest.mark.parametrize(
    ("text", "size"),
    [("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2GB", 2_000_000_000), ("3M", 3 << 20), ("7b", 7), ("6Gib", 6 << 30)],
)
def test_sizes_with_units(text: str, size: int) -> None:
    assert parse_size(text, "f") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XiB", "1e9", "0x10"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "worker.host_mem")
    assert caught.value.field == "worker.host_mem"
    assert "GB, TB" in caught.value.remedy
    assert "auto" not in caught.value.remedy


@pytest.mark.parametrize(("field", "takes_auto"), [("host_mem", True), ("device_mem", False), ("layer_group", False)])
def test_auto_is_named_where_it_is_taken(field: str, takes_auto: bool) -> None:
    with pytest.raises(ConfigError, match="not a size") as caught:
        built(flags={f"worker.{field}": "lots"})
    assert ("or auto" in caught.value.remedy) is takes_auto


def test_metrics_ports_of_a_cluster_follow_each_other() -> None:
    config = with_metrics_ports(build({}, {}, {}, FACTS), 9400, 2)
    assert (config.coordinator.metrics_port, config.worker.metrics_port, config.http.metrics_port) == (9400, 9401, 9403)
    last = with_metrics_ports(config, 65_532, 2)
    assert last.http.metrics_port == 65_535
    with pytest.raises(ConfigError, match=r"--metrics-port=65533: 4 ports from there on .* \(choose one up to 65532\)"):
        with_metrics_ports(config, 65_533, 2)
