"""A project of docker-compose.yml on this machine's engine, for tests/compose.

The project is run from a copy of the tracked files, which any user may read, by the commands of docs/operations.md.
Base images cannot be pulled everywhere, so images are built on one that `.ci/compose-base` makes of Debian's packages,
and Prometheus is Debian's program in place of its image. All other lines of the compose file are used as they
are; ports, too, so that one such project runs on a machine at a time.

What the machine has to have: root, a running Docker engine, `docker compose` or docker-compose, debootstrap. Where one
is missing, `missing()` names it and the tests are skipped. COMPOSE_TEST_TORCH_INDEX is an index with the CPU build of
torch, where that of the torch project cannot be reached.
"""

from __future__ import annotations

import grp
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tests import ROOT

PROJECT: Final = "hisparse-test"
BASE: Final = "hisparse-base:test"
PROMETHEUS: Final = "hisparse-prometheus:test"
MODEL_NAME: Final = "acme/tiny-1"
#: The user of the containers, and one that owns nothing, as which images are built.
CONTAINER_USER: Final = 10_001
BUILDING_USER: Final = 65_534
BUILD_LIMIT_S: Final = 1_500.0
LIMIT_S: Final = 180.0
WORKERS: Final = ("worker-0", "worker-1")
SERVICES: Final = ("coordinator", "http", *WORKERS)
API: Final = "http://127.0.0.1:8000"


def missing() -> str:
    """What this machine lacks for these tests; empty: nothing."""
    if os.geteuid() != 0:
        return "not root, who makes the base image and the directory of keys"
    absent = [name for name in ("docker", "debootstrap") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if not compose_command():
        return "neither `docker compose` nor docker-compose is installed"
    answered = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return "" if answered.returncode == 0 else "no Docker engine answers `docker info`"


def compose_command() -> list[str]:
    """Compose v2 where it is, else docker-compose 1; empty: none."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def versions() -> str:
    """Engine, Compose and kernel, in one line."""
    engine = _output(["docker", "version", "--format", "{{.Server.Version}}"])
    compose = _output([*compose_command(), "version", "--short"])
    return f"engine {engine}, Compose {compose}, Linux {os.uname().release}"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass
class ComposeRig:
    """`place`: a directory for the copy, the keys and the override file."""

    place: Path
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree, self.keys = self.place / "tree", self.place / "keys"
        self._command = [*compose_command(), "-f", "docker-compose.yml", "-f", "override.yml"]
        self.environ = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COMPOSE_PROFILES": "cpu",
            "COMPOSE_DOCKER_CLI_BUILD": "1",
            "DOCKER_BUILDKIT": "1",
            "BUILDKIT_PROGRESS": "plain",
            "KEYS_DIR": str(self.keys),
            "MODEL_NAME": MODEL_NAME,
        }

    # ------------------------------------------------------------ commands

    def command(self, *args: str) -> list[str]:
        return [*self._command, *args]

    def compose(self, *args: str, check: bool = True, limit_s: float = LIMIT_S, stdin: bytes | None = None) -> Done:
        return _run(self.command(*args), cwd=self.tree, environ=self.environ, check=check, limit_s=limit_s, stdin=stdin)

    def hisparse(self, *args: str, service: str = "coordinator", check: bool = True) -> Done:
        """As an operator: inside the container."""
        return self.compose("exec", "-T", service, "hisparse", *args, check=check)

    def rows(self, listing: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.hisparse(listing, "--json").out)
        return rows

    def request(self, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.hisparse("request", request_id, "--json").out)
        return found

    def keys_run(self, *args: str, check: bool = True) -> Done:
        return self.compose("run", "--rm", "-T", "keys", *args, check=check)

    # ------------------------------------------------------------ containers

    def container(self, service: str) -> dict[str, Any]:
        name = self.compose("ps", "-q", service).out.strip()
        (found,) = json.loads(_output(["docker", "inspect", name]))
        state: dict[str, Any] = found
        return state

    def process(self, service: str) -> int:
        return int(self.container(service)["State"]["Pid"])

    def kill(self, *services: str) -> None:
        """SIGKILL to processes from outside the engine, which takes it for a death, not for a stop by hand."""
        for process in [self.process(it) for it in services]:
            os.kill(process, signal.SIGKILL)

    def healthy(self, *services: str) -> None:
        """Return when the engine says that all are."""
        until(
            lambda: all(self.container(it)["State"].get("Health", {}).get("Status") == "healthy" for it in services),
            f"health of {services}",
        )

    def connected(self, *workers: str) -> None:
        """Return when the coordinator has these workers connected."""

        def are_connected() -> bool:
            done = self.hisparse("workers", "--json", check=False)
            return done.code == 0 and set(workers) <= {
                row["worker"] for row in json.loads(done.out) if row["state"] == "connected"
            }

        until(are_connected, f"{workers} connected")

    # ------------------------------------------------------------ start and end

    def prepare(self) -> None:
        """The copy, the override file, and a directory of keys that the building user cannot enter."""
        self.place.chmod(0o755)
        self.down()
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir()
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
        tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout
        pack = ["tar", "--create", "--file=-", "--no-recursion", "--null", "--files-from=-"]
        archive = subprocess.run(pack, cwd=ROOT, input=tracked, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--extract", "--file=-", "--directory", str(self.tree)], input=archive, check=True)
        subprocess.run(["chmod", "-R", "a+rX", str(self.tree)], check=True)
        self.keys.mkdir(mode=0o700)
        os.chown(self.keys, CONTAINER_USER, CONTAINER_USER)
        self._write_override()

    def _write_override(self) -> None:
        args = {"BASE": BASE}
        build: dict[str, Any] = {"context": ".", "args": args}
        index = os.environ.get("COMPOSE_TEST_TORCH_INDEX", "")
        if index:
            args["TORCH_INDEX"] = index
            build["network"] = "host"  # an index on this machine's loopback
        targets = {"keys": "coordinator", "coordinator": "coordinator", "http": "http", "model": "worker"}
        targets |= dict.fromkeys(WORKERS, "worker")
        services: dict[str, Any] = {name: {"build": build | {"target": target}} for name, target in targets.items()}
        services["prometheus"] = {"image": PROMETHEUS, "healthcheck": {"test": ["CMD", "true"]}}
        (self.tree / "override.yml").write_text(yaml.safe_dump({"services": services}))

    def build_base(self) -> None:
        _run([str(ROOT / ".ci" / "compose-base"), BASE], cwd=ROOT, environ={}, limit_s=BUILD_LIMIT_S)

    def build(self) -> str:
        """Build all images as a user who is not root and may use the engine. The output of the build."""
        home = Path(tempfile.mkdtemp(dir=self.place))
        os.chown(home, BUILDING_USER, BUILDING_USER)
        group = grp.getgrgid(os.stat("/var/run/docker.sock").st_gid).gr_gid
        done = _run(
            self.command("build", "coordinator", "http", "model"),
            cwd=self.tree,
            environ=self.environ | {"HOME": str(home)},
            limit_s=BUILD_LIMIT_S,
            user=BUILDING_USER,
            group=group,
        )
        return done.out + done.err

    def build_prometheus(self, program: str) -> None:
        """Debian's Prometheus in an image that has what the file expects of Prometheus' image."""
        place = Path(tempfile.mkdtemp(dir=self.place))
        shutil.copy(program, place / "prometheus")
        (place / "Dockerfile").write_text(
            f"FROM {BASE}\n"
            "COPY prometheus /bin/prometheus\n"
            "RUN install --directory --owner=65534 --group=65534 /prometheus\n"
            'ENTRYPOINT ["/bin/prometheus"]\n'
        )
        _run(["docker", "build", "--tag", PROMETHEUS, "."], cwd=place, environ=self.environ, limit_s=BUILD_LIMIT_S)

    def down(self) -> None:
        if (self.tree / "override.yml").exists():
            self.compose("down", "--volumes", "--remove-orphans", check=False)
        for kind, flags in (("container", ["-aq"]), ("network", ["-q"]), ("volume", ["-q"])):
            mark = ["--filter", f"label=com.docker.compose.project={PROJECT}"]
            left = _output(["docker", kind, "ls", *flags, *mark]).split()
            if left:
                subprocess.run(["docker", kind, "rm", "-f", *left], capture_output=True, check=False)

    def logs(self, service: str) -> str:
        done = self.compose("logs", "--no-color", service, check=False)
        return done.out + done.err

    # ------------------------------------------------------------ clients

    def api_key(self) -> str:
        return (self.keys / "http" / "api.keys").read_text().strip()

    def client_keys(self, name: str) -> Path:
        """A directory with the peer's key `name`, of this user, as an operator hands it out."""
        place = Path(tempfile.mkdtemp(dir=self.place))
        (place / "client.key").write_bytes((self.keys / "peers" / name).read_bytes())
        (place / "client.key").chmod(0o600)
        return place


class Load:
    """Clients of the API that ask for the same completions over and over, each held against the first answer."""

    def __init__(self, api_key: str, prompts: Sequence[str], max_tokens: int = 96) -> None:
        self._key, self._prompts, self._max_tokens = api_key, prompts, max_tokens
        self.expected = [self._ask(prompt) for prompt in prompts]  # undisturbed, one after another
        self.completed = 0
        self.wrong: list[str] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def _ask(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = ask("/v1/completions", self._key, body)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    def _repeat(self, number: int) -> None:
        while not self._over.is_set():
            try:
                text = self._ask(self._prompts[number])
            except (AssertionError, OSError) as error:
                self.wrong.append(f"{number}: {error!r}")
                return
            if text != self.expected[number]:
                self.wrong.append(f"{number}: {text!r} instead of {self.expected[number]!r}")
            self.completed += 1

    def __enter__(self) -> Load:
        self._over.clear()
        self._threads = [threading.Thread(target=self._repeat, args=(it,)) for it in range(len(self._prompts))]
        for thread in self._threads:
            thread.start()
        return self

    def some_more(self) -> None:
        """Return when as many answers as there are clients have come since now."""
        goal = self.completed + len(self._prompts)
        until(lambda: self.completed >= goal or bool(self.wrong), "answers")

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert self.wrong == []


def ask(path: str, key: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of one request to the API."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(API + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Return when `is_so`; raises AssertionError after `limit_s`."""
    give_up_at = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < give_up_at, f"not within {limit_s:g} s: {what}"
        time.sleep(0.25)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _run(
    command: Sequence[str],
    *,
    cwd: Path,
    environ: dict[str, str],
    check: bool = True,
    limit_s: float = LIMIT_S,
    stdin: bytes | None = None,
    user: int | None = None,
    group: int | None = None,
) -> Done:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        input=stdin or b"",
        timeout=limit_s,
        check=False,
        user=user,
        group=group,
        extra_groups=None if user is None else [],
    )
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{out[-4000:]}\n{err[-4000:]}"
    return Done(done.returncode, out, err)
