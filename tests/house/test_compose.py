"""docker-compose.yml and Dockerfile: valid, hardened, and in step with the settings and files of the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pytest
import yaml

from protocol.config import HostFacts, build, load
from protocol.settings import Config
from protocol.transport.keys import ALLOWED_FILE, SERVER_FILE
from tests import ROOT

COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text()
DEFAULTS: Final = dict(
    line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#")
)
OURS: Final = {name for name, service in SERVICES.items() if service["image"].startswith("hisparse-")}
WORKERS: Final = {name for name in OURS if name.startswith("worker-")}
#: Those that make something and end, and those that work until they are stopped.
MAKERS: Final = {"keys", "model"}
LASTING: Final = sorted(SERVICES.keys() - MAKERS)
#: Where the container runtime puts secrets.
SECRETS_DIR: Final = "/run/secrets"


def filled(value: object) -> str:
    """`value` with ${NAME:-default} replaced by what .env says."""
    return re.sub(r"\$\{(\w+)(?::-[^}]*)?\}", lambda found: DEFAULTS[found[1]], str(value))


def test_compose_file_is_valid_by_the_published_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_defaults_do_not_depend_on_the_env_file() -> None:
    used = re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / "docker-compose.yml").read_text())
    assert {(name, default) for name, default in used} == set(DEFAULTS.items())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].split(":")[0] not in ("0", "root")
    assert "privileged" not in service
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", LASTING)
def test_lasting_service_is_watched_bounded_and_restarted(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["deploy"]["resources"]["limits"].keys() >= {"cpus", "memory"}


def settings(name: str) -> Config:
    """By the very code that will read them, with the defaults of .env."""
    environ = {key: filled(value) for key, value in SERVICES[name]["environment"].items()}
    return build({}, environ, {}, HostFacts("host", 1, 10001))


@pytest.mark.parametrize("name", sorted(OURS - MAKERS))
def test_settings_of_a_process_are_accepted(name: str) -> None:
    config = settings(name)
    assert not config.cluster.insecure
    if name == "coordinator":
        assert config.cluster.runtime_dir in _mounts(name)
        assert str(PurePosixPath(config.coordinator.journal).parent) in _mounts(name)
        port = config.coordinator.metrics_port
    elif name == "http":
        assert PurePosixPath(config.http.api_keys_file).parent == PurePosixPath(SECRETS_DIR)
        assert SERVICES[name]["ports"] == [f"127.0.0.1:{config.http.port}:{config.http.port}"]
        port = config.http.metrics_port
    else:
        assert config.cluster.runtime_dir in _mounts(name)
        assert config.worker.name == name
        assert {config.worker.pool_dir, config.worker.model} <= _mounts(name).keys()
        assert config.worker.device == ("cuda" if SERVICES[name]["profiles"] == ["gpu"] else "cpu")
        port = config.worker.metrics_port
    assert f":{port}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]


def _mounts(name: str) -> dict[str, str]:
    """Volume by mount point."""
    return {target: source for source, target, *_ in (filled(it).split(":") for it in SERVICES[name]["volumes"])}


def test_workers_share_node_sockets_and_pool() -> None:
    environments = [SERVICES[name]["environment"] for name in WORKERS]
    assert len({it["HISPARSE_WORKER_NODE"] for it in environments}) == 1
    assert {_mounts(name)["/run/hisparse"] for name in {"coordinator", *WORKERS}} == {"run"}
    assert {_mounts(name)["/var/pool"] for name in WORKERS} == {"pool"}
    assert COMPOSE["volumes"]["pool"]["driver_opts"]["type"] == "tmpfs"


def test_the_pool_fits_its_tmpfs() -> None:
    assert _bytes(DEFAULTS["HOST_MEM"]) < _bytes(DEFAULTS["POOL_BYTES"].removesuffix("m") + "MiB")
    assert "size=${POOL_BYTES:-320m}" in COMPOSE["volumes"]["pool"]["driver_opts"]["o"]


def _bytes(text: str) -> int:
    from protocol.byte_sizes import parse_size

    return parse_size(text, "size")


def _secrets(name: str) -> dict[str, str]:
    """Secret by the name of its file in the container."""
    given = SERVICES[name].get("secrets", ())
    return {it: it if isinstance(it, str) else it["source"] for it in given if isinstance(it, str)} | {
        it["target"]: it["source"] for it in given if not isinstance(it, str)
    }


def test_each_process_is_given_only_its_keys() -> None:
    assert _secrets("coordinator").keys() == {SERVER_FILE, ALLOWED_FILE}
    assert settings("coordinator").cluster.speak_as == "admin", "and so needs no key of a client"
    assert _secrets("http") == {"client.key": "client.http.key", "api.keys": "api.keys"}
    assert all(not _secrets(name) for name in {*WORKERS, "prometheus", "grafana"})
    for name in ("coordinator", "http"):
        cluster = settings(name).cluster
        assert cluster.keys_dir == SECRETS_DIR
        assert cluster.client_endpoint.startswith("tcp://")
        assert cluster.admin_endpoint.startswith("ipc://")
        assert cluster.worker_endpoint.startswith("ipc://")


def test_every_secret_is_made_by_the_key_service(tmp_path: Path) -> None:
    (script,) = SERVICES["keys"]["command"]
    python = f'#!/bin/sh\nexec {sys.executable} -m hisparse.cli "$@"\n'
    (tmp_path / "hisparse").write_text(python)
    (tmp_path / "hisparse").chmod(0o755)
    directory = tmp_path / "keys"
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environ["HISPARSE_CLUSTER_KEYS_DIR"] = str(directory)
    subprocess.run(["sh", "-euc", script.replace("/keys/", f"{directory}/")], env=environ, check=True)
    made = {path.name for path in directory.iterdir()}
    wanted = {PurePosixPath(secret["file"]).name for secret in COMPOSE["secrets"].values()}
    assert wanted <= made
    assert {(directory / name).stat().st_mode & 0o777 for name in made} == {0o600}
    assert {source for name in SERVICES for source in _secrets(name).values()} == COMPOSE["secrets"].keys()


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_prometheus_scrapes_exactly_the_profiles_processes(profile: str) -> None:
    started = {name for name in WORKERS if profile in SERVICES[name]["profiles"]}
    groups = yaml.safe_load((ROOT / "metrics" / "targets" / f"{profile}.yml").read_text())
    assert {target for group in groups for target in group["targets"]} == {f"{name}:9400" for name in started}
    scraped = yaml.safe_load((ROOT / "metrics" / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": ["coordinator:9400"]}]
    assert scraped[1]["static_configs"] == [{"targets": ["http:9400"]}]
    assert [it["job_name"] for it in scraped] == ["hisparse-coordinator", "hisparse-http", "hisparse-worker"]


def test_a_gpu_worker_may_pin_memory_and_has_a_device() -> None:
    worker = SERVICES["worker-gpu-0"]
    assert worker["ulimits"]["memlock"] == -1
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert worker["profiles"] == ["gpu"]


def test_files_that_are_mounted_or_built_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = filled(volume).split(":")[0]
            assert source == "./keys" or (
                (ROOT / source).exists() if source[0] == "." else source in COMPOSE["volumes"]
            )
        if "build" in service:
            assert f" AS {service['build']['target']}\n" in DOCKERFILE


def test_images_run_as_the_user_that_owns_their_volumes() -> None:
    """A named volume takes owner and mode from the directory of the image that it covers."""
    made = DOCKERFILE.split("--mode=0700", 1)[1].split("\n\n")[0].split("ENV")[0]
    targets = {target for name in OURS for target in _mounts(name)}
    assert targets <= set(re.findall(r"/[\w/]+", made))
    assert {SERVICES[name]["user"] for name in OURS} == set(re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE))


def _stage(name: str) -> str:
    return DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0]


def test_coordinator_and_front_images_install_no_torch() -> None:
    assert "--requirement coordinator.txt" in _stage("requirements")
    assert "--requirement http.txt" in _stage("requirements-http")
    for name, requirements in (("coordinator", "requirements"), ("http", "requirements-http")):
        assert _stage(name).startswith(f"COPY --from={requirements} ")
        assert "worker" not in _stage(requirements).replace("'worker', 'cuda'", "")


def test_code_change_reinstalls_only_that_code() -> None:
    """Only one stage sees the code, and only the last layer of an image what it makes."""
    assert [name for name in re.findall(r" AS ([\w-]+)\n", DOCKERFILE) if "COPY . ." in _stage(name)] == ["package"]
    assert "--no-deps --root /package ." in _stage("package")
    for name in {service["build"]["target"] for service in SERVICES.values() if "build" in service}:
        copied = re.findall(r"^COPY --from=(\S+) ", _stage(name), re.MULTILINE)
        assert copied[-1] == "package"
        assert len(copied) == 2
        assert copied[0].startswith("requirements")
        assert "pip" not in _stage(name)


def test_dockerignore_passes_build_inputs() -> None:
    passing = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert passing == {*packages, "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_unread_setting_is_refused() -> None:
    """The check above can fail: an unknown variable of our prefix is refused."""
    with pytest.raises(Exception, match="HISPARSE_WORKER_SEATZ"):
        load(environ={"HISPARSE_WORKER_SEATZ": "8"})
