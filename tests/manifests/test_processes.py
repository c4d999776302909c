"""Commands, environments, ports, paths and deadlines of the manifests are those of the product."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import click
import pytest
import yaml

from coordinator.service import STOP_MARGIN_S
from hisparse.cli import main
from hisparse.console.session import WAIT_MARGIN_S
from hisparse.http.server.listener import STOP_DEADLINE_S
from hisparse.manifests import processes
from hisparse.manifests.groups import script
from hisparse.manifests.monitoring import ADAPTER_RULES, WAITING
from metrics.coordinator import LOOP_LIMIT_S
from metrics.names import BY_NAME
from protocol.config import HostFacts, build
from protocol.settings import Config
from protocol.transport.keys import ALLOWED_FILE, SERVER_FILE
from tests import ROOT
from tests.manifests.examples import NAMES, environ, objects, of_kind, templates, values_of

#: What LeaderWorkerSet adds to the environment of the second pod of a group.
SECOND_POD = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "long-prefill-0.long-prefill.llm"}


def config_of(container: dict[str, Any]) -> Config:
    """By the very code that reads the environment in the pod."""
    return build({}, _hisparse(environ(container)), {}, HostFacts("host", 1, 10001))


def _hisparse(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith("HISPARSE_")}


def pods(name: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, spec and container of each kind of pod."""
    for made_by, template in templates(objects(name)):
        yield made_by, template["spec"], template["spec"]["containers"][0]


def commands_of(container: dict[str, Any]) -> Iterator[list[str]]:
    """Each command line of hisparse that runs in the container, variables as they are written."""
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    for command in (container["command"], hook):
        if command[:1] == ["hisparse"]:
            yield command
        elif command[:1] == ["sh"]:
            yield from (shlex.split(it) for it in re.findall(r"\bhisparse [a-z].*", command[-1]))


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse_and_settings_are_accepted(name: str) -> None:
    for made_by, _, container in pods(name):
        commands = list(commands_of(container))
        assert commands, made_by
        for _, *words in commands:
            command = main.commands[words[0]]
            command.make_context(words[0], words[1:])  # raises click.UsageError for what is no option
        config = config_of(container)
        assert not config.cluster.insecure


def test_unknown_option_does_not_parse() -> None:
    with pytest.raises(click.UsageError):
        main.commands["drain"].make_context("drain", ["w", "--until"])


@pytest.mark.parametrize("name", NAMES)
def test_paths_lie_on_volumes_that_may_be_written(name: str) -> None:
    for made_by, spec, container in pods(name):
        config = config_of(container)
        mounts = {it["mountPath"]: it.get("readOnly", False) for it in container["volumeMounts"]}
        written = [config.cluster.runtime_dir]
        written += [config.coordinator.journal] if made_by.endswith("-coordinator") else []
        written += [config.worker.pool_dir] if container["name"] == "worker" else []
        for path in written:
            mounted = [it for it in PurePosixPath(path).parents if str(it) in mounts]
            assert mounted, f"{made_by}: {path} is on no volume"
            assert not mounts[str(mounted[0])]
            assert path not in mounts, f"{made_by}: {path} would be root's, mode 0777"
        assert {it["name"] for it in container["volumeMounts"]} <= {it["name"] for it in spec["volumes"]} | {"journal"}
        for path in (config.cluster.keys_dir, config.http.api_keys_file, config.worker.group_secret_file):
            assert not path or path.startswith("/keys")


@pytest.mark.parametrize("name", NAMES)
def test_endpoints_are_ports_of_services_that_policies_allow(name: str) -> None:
    values = values_of(name)
    services = {it["metadata"]["name"]: it["spec"] for it in of_kind(name, "Service")}
    coordinator = f"{values.name}-coordinator"
    assert services[coordinator]["publishNotReadyAddresses"], "it is ready only when workers have found it"
    bound = next(config_of(container).cluster for made_by, _, container in pods(name) if made_by == coordinator)
    policies = {it["metadata"]["name"]: it["spec"] for it in of_kind(name, "NetworkPolicy")}
    for made_by, _, container in pods(name):
        declared = {it["containerPort"] for it in container["ports"]}
        cluster = config_of(container).cluster
        if made_by == coordinator:
            assert declared == {it["port"] for it in services[coordinator]["ports"]}
            continue
        used = {"client_endpoint"} if container["name"] == "http" else {"worker_endpoint", "admin_endpoint"}
        ports = {int(getattr(cluster, it).rpartition(":")[2]) for it in used}
        for it in used:
            assert getattr(cluster, it).startswith(f"tcp://{coordinator}:")
            assert getattr(cluster, it).rpartition(":")[2] == getattr(bound, it).rpartition(":")[2]
        assert ports == _allowed(policies[made_by]["egress"], coordinator, values.name, "to")
        assert ports == _allowed(policies[coordinator]["ingress"], made_by, values.name, "from")
        served = services[f"{made_by}-metrics"]["ports"]
        assert {it["port"] for it in served} <= declared
        probes = {container[it]["httpGet"]["port"] for it in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert probes <= {it["port"] for it in served}


def _allowed(rules: list[dict[str, Any]], peer: str, cluster: str, side: str) -> set[int]:
    """Ports of `rules` for pods of `peer`."""
    found = set()
    for rule in rules:
        for it in rule.get(side, ()):
            if f"{cluster}-{it.get('podSelector', {}).get('matchLabels', {}).get('component')}" == peer:
                found |= {port["port"] for port in rule.get("ports", ())}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_grace_is_longer_than_what_it_waits_for(name: str) -> None:
    workers = {f"{values_of(name).name}-{it.name}": it for it in values_of(name).workers}
    for made_by, spec, container in pods(name):
        grace_s = spec["terminationGracePeriodSeconds"]
        if made_by.endswith("-coordinator"):
            assert grace_s > config_of(container).coordinator.stop_deadline_s + STOP_MARGIN_S
        elif container["name"] == "http":
            assert grace_s > processes.LEAVE_S + STOP_DEADLINE_S
        else:
            hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
            limit_s, deadline_s = map(int, re.findall(r"timeout (\d+) .*--deadline (\d+)", hook)[0])
            assert deadline_s == workers[made_by].drain_s
            assert limit_s > deadline_s + WAIT_MARGIN_S
            assert grace_s >= limit_s + workers[made_by].stop_s
        assert container["readinessProbe"]["timeoutSeconds"] > LOOP_LIMIT_S


@pytest.mark.parametrize("name", NAMES)
def test_pool_fits_its_volume_and_the_limit(name: str) -> None:
    for made_by, spec, container in pods(name):
        if container["name"] != "worker":
            continue
        workers = next(it for it in values_of(name).workers if made_by.endswith(f"-{it.name}"))
        pool = int(workers.host_mem.removesuffix("GiB"))
        shm = next(it["emptyDir"] for it in spec["volumes"] if it["name"] == "shm")
        limits = container["resources"]["limits"]
        assert shm["medium"] == "Memory"
        assert pool < int(shm["sizeLimit"].removesuffix("Gi")) < int(limits["memory"].removesuffix("Gi"))
        assert limits["nvidia.com/gpu"] == str(workers.gpus)
        assert limits.get("hugepages-2Mi", "") == workers.hugepages.removesuffix("B")
        assert container["resources"]["requests"] == limits


def test_keys_are_the_files_that_processes_read() -> None:
    guide = (ROOT / "docs" / "kubernetes.md").read_text()
    for secret, files in {
        "coordinator": (SERVER_FILE, ALLOWED_FILE, "admin.key"),
        "http": ("client.key", "api.keys"),
        "worker": ("worker.key", "admin.key", "group.secret"),
    }.items():
        row = next(line for line in guide.splitlines() if line.startswith(f"| `NAME-{secret}` |"))
        assert row.split("|")[2].strip(" `").split(", ") == list(files)
    used = {it["secret"]["secretName"] for _, spec, _ in pods("one-gpu") for it in spec["volumes"] if "secret" in it}
    assert used == {"hisparse-coordinator", "hisparse-http", "hisparse-worker"}


# ---------------------------------------------------------------- the script of a group's pod

#: In place of hisparse: writes its environment down, and lives until a file says otherwise.
FAKE = """\
#!/bin/sh
env > "$OUT/$HISPARSE_WORKER_NAME.new"
mv "$OUT/$HISPARSE_WORKER_NAME.new" "$OUT/$HISPARSE_WORKER_NAME"
until [ -e "$OUT/end" ]; do sleep 0.05; done
"""


def started(tmp_path: Path, name: str, kind: str, **more: str) -> tuple[subprocess.Popen[bytes], list[Config]]:
    """The script of the pods of `kind`, run by sh with a fake hisparse, and the settings of its ranks."""
    workers = next(it for it in values_of(name).workers if it.name == kind)
    container = next(c for made_by, _, c in pods(name) if made_by.endswith(f"-{kind}"))
    assert container["command"][:2] == ["sh", "-uc"]
    assert container["command"][2] == script(workers)
    (tmp_path / "bin").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "bin" / "hisparse").write_text(FAKE)
    (tmp_path / "bin" / "hisparse").chmod(0o755)
    variables = environ(container, POD_IP="10.0.0.7", GROUP_INDEX="3", POD_NAME=f"{kind}-3")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    process = subprocess.Popen(
        container["command"],
        env=variables | {"PATH": path, "OUT": str(tmp_path / "out")} | more,
        start_new_session=True,  # the script signals its process group
        stdout=subprocess.DEVNULL,
    )
    give_up_at = time.monotonic() + 60
    while len(files := [it for it in (tmp_path / "out").iterdir() if it.suffix != ".new"]) < workers.gpus:
        assert time.monotonic() < give_up_at, "not all ranks were started"
        time.sleep(0.05)
    ranks = [dict(line.split("=", 1) for line in it.read_text().splitlines() if "=" in line) for it in files]
    facts = HostFacts("host", 1, 10001)
    configs = [build({}, _hisparse(it), {}, facts) for it in ranks]
    return process, sorted(configs, key=lambda it: it.worker.group_rank)


def end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; what is left of its process group is killed."""
    try:
        return process.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_ranks_of_a_machine_are_a_group_and_end_with_one(tmp_path: Path) -> None:
    process, ranks = started(tmp_path, "group-of-8", "worker", LWS_WORKER_INDEX="0")
    (tmp_path / "out" / "end").touch()
    assert end(process) == 71
    assert [it.worker.group_rank for it in ranks] == list(range(8))
    assert [it.worker.device for it in ranks] == [f"cuda:{rank}" for rank in range(8)]
    assert {(it.worker.group, it.worker.group_size) for it in ranks} == {("hisparse-worker-3", 8)}
    assert {it.worker.group_endpoint for it in ranks} == {"ipc:///run/hisparse/private/group-hisparse-worker-3.sock"}
    assert len({it.worker.name for it in ranks}) == len({it.worker.metrics_port for it in ranks}) == 8
    assert len({it.worker.node for it in ranks}) == 1, "ranks of a pod share its pool"
    container = next(c for made_by, _, c in pods("group-of-8") if made_by == "hisparse-worker")
    assert {it["containerPort"] for it in container["ports"]} == {it.worker.metrics_port for it in ranks}


def test_ranks_of_the_second_machine_go_to_the_leader_and_stop_at_sigterm(tmp_path: Path) -> None:
    process, ranks = started(tmp_path, "prefill-decode", "prefill", **SECOND_POD)
    process.send_signal(signal.SIGTERM)
    assert end(process) == 0
    assert [it.worker.group_rank for it in ranks] == [4, 5, 6, 7]
    assert {it.worker.group_endpoint for it in ranks} == {f"tcp://{SECOND_POD['LWS_LEADER_ADDRESS']}:7500"}
    assert {it.worker.transfer_address for it in ranks} == {"tcp://10.0.0.7:0"}
    assert {it.worker.group_secret_file for it in ranks} == {"/keys/group.secret"}


# ---------------------------------------------------------------- metrics, alerts, scaling


@pytest.mark.parametrize("name", NAMES)
def test_each_process_is_scraped_under_the_job_of_the_alerts(name: str) -> None:
    services = of_kind(name, "Service")
    jobs = set()
    for it in of_kind(name, "ServiceMonitor"):
        wanted = it["spec"]["selector"]["matchLabels"]
        found = [
            s
            for s in services
            if wanted.items() <= s["metadata"]["labels"].items() and "prometheus-job" in s["metadata"]["labels"]
        ]
        assert len(found) == 1
        assert {e["port"] for e in it["spec"]["endpoints"]} <= {p["name"] for p in found[0]["spec"]["ports"]}
        jobs.add(found[0]["metadata"]["labels"][it["spec"]["jobLabel"]])
    rules = (ROOT / "metrics" / "rules" / "hisparse.yml").read_text()
    assert jobs == set(re.findall(r'job="([a-z-]+)"', rules))
    (alerts,) = of_kind(name, "PrometheusRule")
    assert alerts["spec"] == yaml.safe_load(rules)


def test_dashboards_are_those_of_the_repository() -> None:
    shown = {}
    for it in of_kind("one-gpu", "ConfigMap"):
        shown |= it["data"]
    files = (ROOT / "metrics" / "dashboards").glob("*.json")
    assert shown == {it.name: it.read_text() for it in files}


def test_groups_are_added_by_a_metric_that_the_adapter_computes() -> None:
    (scaler,) = of_kind("group-of-8", "HorizontalPodAutoscaler")
    (target,) = of_kind("group-of-8", "LeaderWorkerSet")
    assert scaler["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert "replicas" not in target["spec"], "kubectl apply would undo what the autoscaler did"
    (rule,) = yaml.safe_load(ADAPTER_RULES)["externalRules"]
    metric = scaler["spec"]["metrics"][0]["external"]["metric"]
    assert rule["name"]["as"] == metric["name"] == WAITING
    assert metric["selector"]["matchLabels"]["service"] in {
        it["metadata"]["name"] for it in of_kind("group-of-8", "Service")
    }
    series, label = re.findall(r'([\w:]+)\{(\w+)!=""\}', rule["seriesQuery"])[0]
    assert BY_NAME[series].labels == (label,)
    assert f"sum({series}{{" in rule["metricsQuery"]
