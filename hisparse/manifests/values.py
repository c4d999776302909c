"""Values of `hisparse manifests`: typed, checked, with the defaults of one small cluster. Pure.

A values file is TOML, as the configuration file of the processes is. Settings of a process stand in tables named
`settings` and are those of protocol/settings.py; what the manifests set themselves (addresses, paths, names) is refused
there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from protocol.byte_sizes import parse_size
from protocol.errors import ConfigError
from protocol.messages import GROUP_SIZE_MAX
from protocol.settings import Settings

#: Of a cluster, of a kind of groups, of a namespace. Names of pods are made of the first two, the index of a group and
#: an index in it, and must differ: so a kind has no dash. Both are short: a StatefulSet's has 52 letters at most.
NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,18}[a-z0-9])?")
KIND: Final = re.compile(r"[a-z][a-z0-9]{0,19}")
NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: Of any other object of Kubernetes, made by someone else.
OBJECT: Final = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
LABEL_KEY: Final = re.compile(rf"({OBJECT.pattern}/)?[A-Za-z0-9]([-_.A-Za-z0-9]{{0,61}}[A-Za-z0-9])?")
LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
#: Largest count that an object of Kubernetes takes: int32.
COUNT_MAX: Final = 2**31 - 1
#: Larger than any memory or disk; sums of a few sizes stay below the int64 of Kubernetes.
SIZE_BYTES_MAX: Final = 1 << 60
HUGE_PAGE_BYTES: Final = 2 << 20
REMEDY: Final = "docs/kubernetes.md lists the values"


class ImageValues(Settings, frozen=True):
    coordinator: str = "hisparse-coordinator"
    http: str = "hisparse-http"
    worker: str = "hisparse-worker-gpu"
    pull_secret: str = ""  # name of a Secret with credentials of the registry


class ModelValues(Settings, frozen=True):
    """A checkpoint on a volume that all nodes may read."""

    name: str  # what clients call the model
    claim: str  # name of a PersistentVolumeClaim
    path: str = ""  # directory of the checkpoint on that volume


class CoordinatorValues(Settings, frozen=True):
    cpus: int = 2
    memory: str = "4GiB"
    journal_storage: str = "20GiB"
    storage_class: str = ""  # default: the cluster's
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class FrontValues(Settings, frozen=True):
    replicas: int = 2
    cpus: int = 2
    memory: str = "2GiB"
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class ScalingValues(Settings, frozen=True):
    """A HorizontalPodAutoscaler of the groups, by requests that wait for a place."""

    groups_max: int
    waiting_per_group: int = 16  # above it, a group is added


class WorkersValues(Settings, frozen=True):
    """Groups of one kind. A group is `pods` pods of `gpus` ranks each; one rank alone is a worker without a group."""

    name: str
    role: str = "both"
    groups: int = 1
    pods: int = 1
    gpus: int = 1
    cpus: int = 16
    memory: str = "64GiB"  # of the processes of a pod, beside its host pool
    host_mem: str = "256GiB"  # host pool of a pod
    hugepages: str = ""  # of 2 MiB, for libraries of page transfer that take such; the pool's large pages are others
    drain_s: int = 300  # requests may run on so long when a pod is to end
    stop_s: int = 180  # from SIGTERM to the end of the processes: they withdraw requests and unpin the pool
    start_s: int = 1800  # from the start of a container to /healthz: weights are loaded and the pool is pinned
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    scaling: ScalingValues | None = None

    @property
    def ranks(self) -> int:
        return self.pods * self.gpus


class MonitoringValues(Settings, frozen=True):
    namespace: str = "monitoring"  # where Prometheus runs
    labels: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # by which Prometheus' operator selects ServiceMonitors and rules
    enabled: bool = True


class ManifestValues(Settings, frozen=True):
    model: ModelValues
    workers: tuple[WorkersValues, ...]
    name: str = "hisparse"  # of the cluster, in front of the name of each object
    namespace: str = "hisparse"
    images: ImageValues = ImageValues()
    coordinator: CoordinatorValues = CoordinatorValues()
    http: FrontValues = FrontValues()
    monitoring: MonitoringValues = MonitoringValues()


def read_values(text: str, file_name: str) -> ManifestValues:
    """The values in `text`, which is TOML. Raises ConfigError with the field, the value and the remedy."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", field="--values", value=file_name, remedy="correct the file") from error
    except RecursionError as error:
        raise ConfigError("is nested too deeply", field="--values", value=file_name, remedy=REMEDY) from error
    try:
        values = msgspec.convert(table, ManifestValues)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), table) from error
    _check(values)
    return values


def size_bytes(text: str, field: str) -> int:
    """Raises ConfigError for what is no size, or none."""
    found = parse_size(text, field)
    if found <= 0:
        raise ConfigError("no memory at all", field=field, value=text, remedy="give it a size, as in 4GiB")
    if found > SIZE_BYTES_MAX:
        raise ConfigError("more than any machine has", field=field, value=text, remedy="give it a size, as in 4GiB")
    return found


def _refusal(message: str, table: Mapping[str, Any]) -> ConfigError:
    """msgspec says what is wrong and, behind it, where: "... - at `$.workers[0].gpus`"."""
    what, _, where = message.partition(" - at `$")
    field = where.rstrip("`").removeprefix(".")
    unknown = re.fullmatch(r"Object (?:contains unknown|missing required) field `(.*)`", what)
    if unknown is not None:
        field = ".".join(filter(None, (field, unknown[1])))
    value = _at(table, re.findall(r"[^.\[\]]+", field))
    missing = what.startswith("Object missing")
    problem = "is missing" if missing else "unknown value" if unknown else what[:1].lower() + what[1:]
    return ConfigError(problem, field=field or "--values", value=value, remedy=REMEDY)


def _at(table: Any, path: Iterable[str]) -> object:
    for step in path:
        if isinstance(table, list) and step.isdecimal():
            table = table[int(step)]
        elif isinstance(table, dict) and step in table:
            table = table[step]
        else:
            return ""
    return table


def _check(values: ManifestValues) -> None:
    _require_name(NAME, "name", values.name, "a-z, 0-9 and -, 20 at most")
    _require_name(NAMESPACE, "namespace", values.namespace, "a-z, 0-9 and -, 63 at most")
    _require_name(NAMESPACE, "monitoring.namespace", values.monitoring.namespace, "a-z, 0-9 and -, 63 at most")
    _require(bool(values.workers), "workers", "", "there are none", "add a table [[workers]]")
    for number, workers in enumerate(values.workers):
        earlier = [it.name for it in values.workers[:number]]
        field = f"workers[{number}].name"
        _require_name(KIND, field, workers.name, "a-z and 0-9, 20 at most")
        _require(workers.name not in (*earlier, "coordinator", "http"), field, workers.name, "taken", "choose another")
        _check_workers(workers, f"workers[{number}]")
    _require_counts({"http.replicas": values.http.replicas})
    _require_counts({"coordinator.cpus": values.coordinator.cpus, "http.cpus": values.http.cpus})
    _check_elsewhere(values)
    for field, size in {
        "coordinator.memory": values.coordinator.memory,
        "coordinator.journal_storage": values.coordinator.journal_storage,
        "http.memory": values.http.memory,
    }.items():
        size_bytes(size, field)


def _check_elsewhere(values: ManifestValues) -> None:
    """Check names and paths of what the manifests do not make: Kubernetes would refuse them, some only in a pod."""
    model, images = values.model, values.images
    _require_text("model.name", model.name, "name the model for clients")
    _require_name(OBJECT, "model.claim", model.claim, "the name of a PersistentVolumeClaim")
    if model.path:
        _require_text("model.path", model.path, "name a directory of the volume")
        inside = not model.path.startswith("/") and ".." not in model.path.split("/")
        _require(inside, "model.path", model.path, "not a path inside the volume", "leave out / in front, and ..")
    for field, name in {
        "images.pull_secret": images.pull_secret,
        "coordinator.storage_class": values.coordinator.storage_class,
    }.items():
        if name:
            _require_name(OBJECT, field, name, "the name of an object, or leave it out")
    for field in ("coordinator", "http", "worker"):
        image = getattr(images, field)
        _require_text(f"images.{field}", image, "name an image, as in registry/name:tag")
        _require(" " not in image, f"images.{field}", image, "has a space", "name an image, as in registry/name:tag")
    _check_labels("monitoring.labels", values.monitoring.labels)


def _check_labels(field: str, labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        _require(
            bool(LABEL_KEY.fullmatch(key)), field, _shown(key), "no key of a label", "write as in example.org/name"
        )
        remedy = "write letters, digits, -, _ and ., 63 at most"
        _require(bool(LABEL_VALUE.fullmatch(value)), f"{field}.{key}", _shown(value), "no value of a label", remedy)


def _check_workers(workers: WorkersValues, field: str) -> None:
    numbers = ("groups", "pods", "gpus", "cpus", "drain_s", "stop_s", "start_s")
    _require_counts({f"{field}.{name}": getattr(workers, name) for name in numbers})
    _check_labels(f"{field}.node_selector", workers.node_selector)
    size_bytes(workers.memory, f"{field}.memory")
    size_bytes(workers.host_mem, f"{field}.host_mem")
    huge_bytes = size_bytes(workers.hugepages, f"{field}.hugepages") if workers.hugepages else 0
    _require(
        huge_bytes % HUGE_PAGE_BYTES == 0,
        f"{field}.hugepages",
        workers.hugepages,
        "no whole number of pages of 2 MiB",
        "use a multiple of 2MiB",
    )
    _require(
        workers.ranks <= GROUP_SIZE_MAX,
        f"{field}.pods",
        workers.pods,
        f"with {workers.gpus} GPUs each, more than {GROUP_SIZE_MAX} ranks of a group",
        "use more groups of fewer pods",
    )
    if workers.scaling is not None:
        _require(
            workers.scaling.groups_max >= workers.groups,
            f"{field}.scaling.groups_max",
            workers.scaling.groups_max,
            f"below the {workers.groups} groups to begin with",
            "raise it, or lower groups",
        )
        _require_counts(
            {f"{field}.scaling.{name}": getattr(workers.scaling, name) for name in ("groups_max", "waiting_per_group")}
        )


def _require_name(form: re.Pattern[str], field: str, name: str, remedy: str) -> None:
    _require(bool(form.fullmatch(name)), field, _shown(name), "no name of an object", f"write {remedy}")


def _require_text(field: str, text: str, remedy: str) -> None:
    """Refuse an empty text, and one with a character, such as NUL, that neither a person nor a process could read."""
    _require(bool(text) and text.isprintable(), field, _shown(text), "empty, or not printable", remedy)


def _require_counts(numbers: Mapping[str, int]) -> None:
    for field, number in numbers.items():
        holds = 1 <= number <= COUNT_MAX
        _require(holds, field, number, f"not a number from 1 to {COUNT_MAX}", f"use 1 or more, at most {COUNT_MAX}")


def _shown(text: str) -> str:
    """`text` for a message, with quotes and escapes where it would be unseen."""
    return text if text and text.isprintable() else repr(text)


def _require(holds: bool, field: str, value: object, message: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(message, field=field, value=value, remedy=remedy)
