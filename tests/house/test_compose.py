"""docker-compose.yml and Dockerfile: valid, hardened, and in step with the settings and files of the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pytest
import yaml

from coordinator.service import STOP_MARGIN_S
from hisparse.cluster.placement import place
from hisparse.http.server.listener import STOP_DEADLINE_S
from protocol.config import HostFacts, build, load, with_metrics_ports
from protocol.settings import Config
from protocol.transport.keys import ALLOWED_FILE, ROLES, SERVER_FILE, read_allowed, read_peer_key
from tests import ROOT
from tests.support.limits import HANG_LIMIT_S

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
#: Where processes that speak tcp mount the directory of their keys.
KEYS_DIR: Final = "/keys"


def filled(value: object) -> str:
    """`value` with ${NAME:-default} replaced by what .env says, and $$ by $."""
    return re.sub(r"\$\{(\w+)(?::-[^}]*)?\}", lambda found: DEFAULTS[found[1]], str(value)).replace("$$", "$")


def test_compose_file_is_valid_by_the_published_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_defaults_do_not_depend_on_the_env_file() -> None:
    used = re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / "docker-compose.yml").read_text())
    assert {(name, default) for name, default in used} == DEFAULTS.items() - {("COMPOSE_PROJECT_NAME", "hisparse")}


def test_file_is_one_that_compose_1_reads_too() -> None:
    """docker-compose 1.29 refuses `name`, and knows no default inside another."""
    assert COMPOSE.keys() - {key for key in COMPOSE if key.startswith("x-")} == {"services", "networks", "volumes"}
    assert not re.findall(r"\$\{[^}]*\$\{", (ROOT / "docker-compose.yml").read_text())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] == 1024
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
        grace_s = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace_s > config.coordinator.stop_deadline_s + STOP_MARGIN_S
    elif name == "http":
        assert PurePosixPath(config.http.api_keys_file).parent == PurePosixPath(KEYS_DIR)
        assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) > STOP_DEADLINE_S
        writable = {mount.split(":")[0] for mount in SERVICES[name]["tmpfs"]}
        assert str(PurePosixPath(config.cluster.runtime_dir).parent) in writable, "for its control socket"
        assert SERVICES[name]["ports"] == [f"127.0.0.1:{config.http.port}:{config.http.port}"]
        port = config.http.metrics_port
    else:
        assert config.cluster.runtime_dir in _mounts(name)
        assert config.worker.name == name
        assert config.worker.served_model_name == DEFAULTS["MODEL_NAME"]
        assert {config.worker.pool_dir, config.worker.model} <= _mounts(name).keys()
        assert config.worker.device == ("cpu" if SERVICES[name]["profiles"] == ["cpu"] else "cuda")
        port = config.worker.metrics_port
    assert f":{port}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]


def _mounts(name: str) -> dict[str, str]:
    """Volume or directory by mount point."""
    return {target: source for source, target, *_ in (filled(it).split(":") for it in SERVICES[name]["volumes"])}


def _modes(name: str) -> dict[str, str]:
    """Mode by mount point."""
    mounts = (filled(it).split(":") for it in SERVICES[name]["volumes"])
    return {target: mode[0] if mode else "rw" for _, target, *mode in mounts}


def test_workers_share_node_sockets_and_pool() -> None:
    environments = [SERVICES[name]["environment"] for name in WORKERS]
    assert len({it["HISPARSE_WORKER_NODE"] for it in environments}) == 1
    assert {_mounts(name)["/run/hisparse"] for name in {"coordinator", *WORKERS}} == {"run"}
    assert {_mounts(name)["/var/pool"] for name in WORKERS} == {"pool"}
    assert COMPOSE["volumes"]["pool"]["driver_opts"]["type"] == "tmpfs"


def test_the_pool_outlives_its_workers() -> None:
    """An engine unmounts a tmpfs volume with its last container, and the gpu profile has one worker."""
    assert (_mounts("coordinator")["/var/pool"], _modes("coordinator")["/var/pool"]) == ("pool", "ro")
    assert "/var/pool" not in _mounts("http")


def test_the_pool_fits_its_tmpfs() -> None:
    assert _bytes(DEFAULTS["HOST_MEM"]) < _bytes(DEFAULTS["POOL_BYTES"].removesuffix("m") + "MiB")
    assert "size=${POOL_BYTES:-320m}" in COMPOSE["volumes"]["pool"]["driver_opts"]["o"]


def _bytes(text: str) -> int:
    from protocol.byte_sizes import parse_size

    return parse_size(text, "size")


def test_each_process_is_given_only_its_keys() -> None:
    """A directory, not files: an engine mounts the file that a path names at the start, whatever replaces it."""
    directory = DEFAULTS["KEYS_DIR"]
    given = {name: source for name in SERVICES for source in _mounts_from(name, directory)}
    assert given == {"keys": "", "coordinator": "/coordinator", "http": "/http"}
    assert _modes("coordinator")[KEYS_DIR] == _modes("http")[KEYS_DIR] == "ro"
    assert "secrets" not in COMPOSE
    assert not any("secrets" in service for service in SERVICES.values())
    assert settings("coordinator").cluster.speak_as == "admin", "and so needs no key of a client"
    for name in ("coordinator", "http"):
        cluster = settings(name).cluster
        assert cluster.keys_dir == KEYS_DIR
        assert cluster.client_endpoint.startswith("tcp://")
        assert cluster.admin_endpoint.startswith("ipc://")
        assert cluster.worker_endpoint.startswith("ipc://")


def _mounts_from(name: str, directory: str) -> list[str]:
    """What follows `directory` in the sources of mounts."""
    sources = _mounts(name).values() if "volumes" in SERVICES[name] else ()
    return [source.removeprefix(directory) for source in sources if source.startswith(directory)]


def test_keys_lie_outside_the_build_context() -> None:
    """They belong to another user, with mode 0700, and a build reads its whole context."""
    directory = PurePosixPath(DEFAULTS["KEYS_DIR"])
    assert directory.is_absolute()
    assert {service["build"]["context"] for service in SERVICES.values() if "build" in service} == {"."}


def run_keys(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The key service's own entry point, as a shell runs it here, with `arguments` as after `run keys`."""
    *shell, script, name = map(filled, SERVICES["keys"]["entrypoint"])
    assert SERVICES["keys"]["command"] == []
    python = f'#!/bin/sh\nexec {sys.executable} -m hisparse.cli "$@"\n'
    (tmp_path / "hisparse").write_text(python)
    (tmp_path / "hisparse").chmod(0o755)
    directory = tmp_path / "keys"
    directory.mkdir(exist_ok=True)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environ["HISPARSE_CLUSTER_KEYS_DIR"] = f"{directory}/coordinator"
    script = script.replace("/keys", str(directory))
    command = [*shell, script, name, *arguments]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True)


def test_every_key_is_made_by_the_key_service(tmp_path: Path) -> None:
    assert SERVICES["keys"]["environment"] == {"HISPARSE_CLUSTER_KEYS_DIR": "/keys/coordinator"}
    made = set(run_keys(tmp_path).stdout.split())
    root = tmp_path / "keys"
    assert made == {str(path) for path in root.rglob("*") if path.is_file()}
    assert {path.name for path in (root / "coordinator").iterdir()} == {SERVER_FILE, ALLOWED_FILE}
    assert {path.name for path in (root / "http").iterdir()} == {"client.key", "api.keys"}
    assert {path.name for path in (root / "peers").iterdir()} == {f"{role}.key" for role in ROLES}
    assert {Path(path).stat().st_mode & 0o777 for path in made} == {0o600}
    allowed = {(key.role, key.name) for key in read_allowed(root / "coordinator")}
    assert allowed == {*((role, role) for role in ROLES), ("client", "http")}
    assert read_peer_key(root / "http", "client").name == "http"


def test_key_service_runs_what_it_is_given(tmp_path: Path) -> None:
    run_keys(tmp_path)
    run_keys(tmp_path, "hisparse", "keys", "add", "client", "alice", "--output", f"{tmp_path}/alice.key")
    assert "alice" in run_keys(tmp_path, "hisparse", "keys", "list").stdout
    assert run_keys(tmp_path, "echo", "a  b").stdout == "a  b\n", "arguments stay apart"


def test_only_the_cpu_profile_makes_the_tiny_model() -> None:
    """Else the gpu profile builds the CPU image, for a model that it does not serve."""
    assert SERVICES["model"]["profiles"] == ["cpu"]
    for name in WORKERS:
        depends = "model" in SERVICES[name].get("depends_on", {})
        assert depends == (SERVICES[name]["profiles"] == ["cpu"])


@pytest.mark.parametrize("profile", ["cpu", "gpu", "cpu,gpu", "gpu,cpu", "gpu8"])
def test_prometheus_scrapes_exactly_the_profiles_processes(profile: str) -> None:
    started = {name for name in WORKERS if set(profile.split(",")) & set(SERVICES[name]["profiles"])}
    groups = yaml.safe_load((ROOT / "metrics" / "targets" / f"{profile}.yml").read_text())
    targets = {f"{name}:{9400 + rank}" for name in started for rank in range(settings(name).worker.group_size)}
    assert {target for group in groups for target in group["targets"]} == targets
    scraped = yaml.safe_load((ROOT / "metrics" / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": ["coordinator:9400"]}]
    assert scraped[1]["static_configs"] == [{"targets": ["http:9400"]}]
    assert [it["job_name"] for it in scraped] == ["hisparse-coordinator", "hisparse-http", "hisparse-worker"]


def test_a_gpu_worker_may_pin_memory_and_has_a_device() -> None:
    for name, profile, gpus in (("worker-gpu-0", "gpu", 1), ("worker-group-0", "gpu8", 8)):
        worker = SERVICES[name]
        assert worker["ulimits"]["memlock"] == -1
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert len(device["device_ids"]) == gpus == settings(name).worker.group_size
        assert worker["profiles"] == [profile]


#: A worker that says how it was started, and what it is told then: to end, or to stop with its group.
SAYING: Final = """#!{python}
import os, signal, sys, time
names = ("NAME", "GROUP_RANK", "DEVICE", "METRICS_PORT")
def ended(*_):
    os.write(1, b"stopped\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, ended)
print(*(os.environ["HISPARSE_WORKER_" + name] for name in names), flush=True)
time.sleep(0.5 if os.environ["HISPARSE_WORKER_GROUP_RANK"] in "{dies}" else 60)
sys.exit(5)
"""


def start_group(tmp_path: Path, *, dies: str, limit_s: int = 20) -> subprocess.Popen[str]:
    """The group's own entry point, as a shell runs it here, with a worker of which the ranks in `dies` end soon."""
    service = SERVICES["worker-group-0"]
    (tmp_path / "hisparse").write_text(SAYING.format(python=sys.executable, dies=dies))
    (tmp_path / "hisparse").chmod(0o755)
    script = filled(service["command"][0]).replace("sleep 20", f"sleep {limit_s}")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HISPARSE_WORKER_NAME": "worker-group-0"}
    return subprocess.Popen(
        [*service["entrypoint"], script], env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_each_rank_of_the_group_has_a_gpu_and_a_port(tmp_path: Path) -> None:
    """And a stop reaches all of them, with time to withdraw their requests."""
    with start_group(tmp_path, dies="none") as group:
        assert group.stdout is not None
        said = {group.stdout.readline().strip() for _ in range(8)}
        assert said == {f"worker-group-0-{rank} {rank} cuda:{rank} {9400 + rank}" for rank in range(8)}
        group.terminate()
        assert [group.stdout.readline() for _ in range(8)] == ["stopped\n"] * 8
        assert group.wait(HANG_LIMIT_S) == 0


def test_a_rank_that_ends_ends_its_container(tmp_path: Path) -> None:
    """Ranks that do not follow it are killed, since a container of which some run is not restarted."""
    with start_group(tmp_path, dies="3", limit_s=1) as group:
        assert group.wait(HANG_LIMIT_S) == -9
    with start_group(tmp_path, dies="01234567", limit_s=60) as group:
        assert group.wait(HANG_LIMIT_S) == 71


def test_files_that_are_mounted_or_built_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = filled(volume).split(":")[0]
            outside = source.startswith(DEFAULTS["KEYS_DIR"])
            assert outside or ((ROOT / source).exists() if source[0] == "." else source in COMPOSE["volumes"])
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


def _copied_from(name: str) -> list[str]:
    return re.findall(r"^COPY --from=(\S+) ", _stage(name), re.MULTILINE)


def test_base_is_named_by_digest() -> None:
    assert re.search(r"^ARG BASE=\S+:\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.MULTILINE)) == {
        *("${BASE}", "python", "installer"),
    }


def test_images_install_from_locks_with_hashes() -> None:
    """One index for each install; the index of torch gives torch alone."""
    assert "--require-hashes" in _stage("installer")
    assert "--no-deps" in _stage("installer")
    assert "--extra-index-url" not in DOCKERFILE
    for image in ("coordinator", "http", "worker", "worker-gpu"):
        stage = _stage(f"requirements-{image}")
        locks = re.findall(r"^COPY locks/(\S+) \./$", stage, re.MULTILINE)
        assert locks == (["torch-cpu.txt", "worker.txt"] if image == "worker" else [f"{image}.txt"])
        runs = re.findall(r"^RUN (.*)$", stage, re.MULTILINE)
        assert len(runs) == len(locks)
        for run, lock in zip(runs, locks, strict=True):
            assert run.startswith("--mount=type=cache,target=/root/.cache/pip ${INSTALL} ")
            assert run.endswith(f"--requirement {lock}")
            assert ("--index-url" in run) == (lock == "torch-cpu.txt")
        assert _copied_from(image) == [f"requirements-{image}", "package"]


@pytest.mark.parametrize("image", ["coordinator", "http"])
def test_images_that_trace_have_what_traces_need(image: str) -> None:
    """Both are told where to send traces, and to send none by default."""
    lock = (ROOT / "locks" / f"{image}.txt").read_text()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["otel"]
    assert {re.split("[<>=]", it)[0] for it in extra} <= set(re.findall(r"^([\w-]+)==", lock, re.MULTILINE))
    endpoint = SERVICES[image]["environment"]["HISPARSE_CLUSTER_TRACES_ENDPOINT"]
    assert (endpoint, DEFAULTS["TRACES_ENDPOINT"]) == ("${TRACES_ENDPOINT:-}", "")


def test_code_change_reinstalls_only_that_code() -> None:
    """Only one stage sees the code and pyproject.toml, and only the last layer of an image what it makes."""
    assert [name for name in re.findall(r" AS ([\w-]+)\n", DOCKERFILE) if "COPY . ." in _stage(name)] == ["package"]
    assert "pyproject.toml" not in "".join(re.findall(r"^COPY .*$", DOCKERFILE, re.MULTILINE))
    assert "--no-deps --no-build-isolation" in _stage("package")
    for name in {service["build"]["target"] for service in SERVICES.values() if "build" in service}:
        assert _copied_from(name)[-1] == "package"


def test_images_that_run_have_no_pip() -> None:
    assert "python3 -m venv --without-pip /opt/hisparse" in _stage("installer")
    for name in ("python", "coordinator", "http", "worker", "worker-gpu"):
        assert "pip" not in _stage(name).replace("COPY --from=", "")
        assert "python3-venv" not in _stage(name)


def test_dockerignore_passes_build_inputs() -> None:
    passing = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "tools", "benchmarks"}
    assert passing == {*packages, "locks", "pyproject.toml", "README.md", "LICENSE"}


def test_unread_setting_is_refused() -> None:
    """The check above can fail: an unknown variable of our prefix is refused."""
    with pytest.raises(Exception, match="HISPARSE_WORKER_SEATZ"):
        load(environ={"HISPARSE_WORKER_SEATZ": "8"})


def test_prometheus_beside_up_scrapes_the_ports_that_its_comment_names() -> None:
    path = ROOT / "metrics" / "prometheus-up.yml"
    named = re.search(r"-n (\d+) .*--metrics-port (\d+)", path.read_text())
    assert named is not None
    workers, port = map(int, named.groups())
    config = with_metrics_ports(build({}, {}, {}, HostFacts("host", 1, 1)), port, workers)
    ports = [it.metrics_port for it in place(config.worker, workers)]
    expected = {
        "hisparse-coordinator": [config.coordinator.metrics_port],
        "hisparse-worker": ports,
        "hisparse-http": [config.http.metrics_port],
    }
    scraped = {it["job_name"]: it["static_configs"][0] for it in yaml.safe_load(path.read_text())["scrape_configs"]}
    assert scraped == {job: {"targets": [f"127.0.0.1:{it}" for it in ports]} for job, ports in expected.items()}
