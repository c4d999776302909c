"""What the pods of all processes have in common: who they run as, what they may use, their keys and probes. Pure.

Keys. A Secret's files belong to root and are readable by the group of the pod, which the processes refuse: other users
could read them. So a first container copies them to a volume in memory, where they are the process's own. A changed
Secret is read by the next pod.

Volumes of the kubelet belong to root, mode 0777. Where a process asks for a directory of its own, it makes one inside.

`enableServiceLinks` is off: for a Service hisparse-coordinator the kubelet would set HISPARSE_COORDINATOR_PORT and
others, and a process refuses variables that begin so and are no settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from hisparse.manifests.values import ManifestValues, WorkersValues
from hisparse.manifests.yaml_text import Node

Document: TypeAlias = dict[str, Node]

USER: Final = 10001
KEYS_DIR: Final = "/keys"
RUNTIME_DIR: Final = "/run/hisparse/private"
#: Ports; the ranks of a pod serve metrics from METRICS_PORT on.
CLIENT_PORT: Final = 7400
ADMIN_PORT: Final = 7401
WORKER_PORT: Final = 7402
GROUP_PORT: Final = 7500
HTTP_PORT: Final = 8000
METRICS_PORT: Final = 9400
#: Volumes that every pod has, in memory, with their sizes: they count towards its memory limit.
SCRATCH: Final = {"run": ("/run/hisparse", "16Mi"), "tmp": ("/tmp", "64Mi")}
NOTHING: Final[Mapping[str, str]] = {}
COPY_KEYS: Final = "umask 077; cp -fL /secrets/* /keys/"


def labels(values: ManifestValues, component: str) -> dict[str, Node]:
    return {"app.kubernetes.io/name": "hisparse", "app.kubernetes.io/instance": values.name, "component": component}


def metadata(values: ManifestValues, component: str, name: str = "") -> dict[str, Node]:
    """Of the object `name`, by default that of the component's own name."""
    return {
        "name": f"{values.name}-{name or component}",
        "namespace": values.namespace,
        "labels": labels(values, component),
    }


def worker_ports(workers: WorkersValues) -> dict[str, int]:
    return {f"metrics-{gpu}": METRICS_PORT + gpu for gpu in range(workers.gpus)}


def quantity(size: int) -> str:
    """`size` bytes as Kubernetes writes them."""
    for unit, step in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size % step == 0:
            return f"{size // step}{unit}"
    return str(size)


def resources(cpus: int, memory_bytes: int, gpus: int = 0, hugepages_bytes: int = 0) -> dict[str, Node]:
    """Requests equal limits: nothing of a pod is taken away when its node is short, and Kubernetes demands it of GPUs
    and huge pages."""
    limits: dict[str, Node] = {"cpu": str(cpus), "memory": quantity(memory_bytes)}
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    if hugepages_bytes:
        limits["hugepages-2Mi"] = quantity(hugepages_bytes)
    return {"requests": dict(limits), "limits": limits}


def variables(environ: Mapping[str, str], from_pod: Mapping[str, str]) -> list[Node]:
    """Those that the kubelet reads of the pod first, paths by name: `environ` may contain $(POD_NAME) and others."""
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"} | dict(from_pod)
    known: list[Node] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    return known + [{"name": name, "value": value} for name, value in environ.items()]


def probe(path: str, *, period_s: int, failures: int) -> dict[str, Node]:
    return {
        "httpGet": {"path": path, "port": METRICS_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": 6,  # a coordinator asks its loop for 5 s at most
        "failureThreshold": failures,
    }


def container(
    name: str,
    image: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    mounts: Mapping[str, str],
    limits: Mapping[str, Node],
    ports: Mapping[str, int],
    *,
    start_s: int,
    pre_stop: Sequence[str] = (),
    from_pod: Mapping[str, str] = NOTHING,
    sub_paths: Mapping[str, str] = NOTHING,
) -> dict[str, Node]:
    """A process with its probes. `mounts` has paths by volume, `sub_paths` directories of a volume, `from_pod` further
    variables that the kubelet reads of the pod. `start_s` bounds the time to the first /healthz."""
    all_mounts = {volume: path for volume, (path, _) in SCRATCH.items()} | {"keys": KEYS_DIR} | dict(mounts)
    found: dict[str, Node] = {
        "name": name,
        "image": image,
        "command": list(command),
        "env": variables(environ, from_pod),
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "resources": limits,
        "securityContext": hardened(),
        "volumeMounts": [_mount(volume, path, sub_paths.get(volume, "")) for volume, path in all_mounts.items()],
        "startupProbe": probe("/healthz", period_s=10, failures=-(-start_s // 10)),
        "livenessProbe": probe("/healthz", period_s=10, failures=6),
        "readinessProbe": probe("/readyz", period_s=5, failures=2),
    }
    if pre_stop:
        found["lifecycle"] = {"preStop": {"exec": {"command": list(pre_stop)}}}
    return found


def _mount(volume: str, path: str, sub_path: str) -> dict[str, Node]:
    found: dict[str, Node] = {"name": volume, "mountPath": path, "readOnly": volume in ("keys", "model")}
    return found | {"subPath": sub_path} if sub_path else found


def hardened() -> dict[str, Node]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod(
    values: ManifestValues,
    component: str,
    process: dict[str, Node],
    volumes: Sequence[Node],
    secret: str,
    *,
    grace_s: int,
    node_selector: Mapping[str, str] = NOTHING,
) -> dict[str, Node]:
    """A pod template of one process with the keys of the Secret `secret`."""
    spec: dict[str, Node] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            # Always would open the files of the journal to the group, and the coordinator refuses such a journal
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_keys_container(str(process["image"]))],
        "containers": [process],
        "volumes": [
            *(_in_memory(name, size) for name, (_, size) in SCRATCH.items()),
            _in_memory("keys", "1Mi"),
            {"name": "secrets", "secret": {"secretName": secret, "defaultMode": 0o440}},
            *volumes,
        ],
    }
    if values.images.pull_secret:
        spec["imagePullSecrets"] = [{"name": values.images.pull_secret}]
    if node_selector:
        spec["nodeSelector"] = dict(node_selector)
    return {"metadata": {"labels": labels(values, component)}, "spec": spec}


def _keys_container(image: str) -> dict[str, Node]:
    return {
        "name": "keys",
        "image": image,
        "command": ["sh", "-euc", COPY_KEYS],
        "resources": resources(1, 64 << 20),
        "securityContext": hardened(),
        "volumeMounts": [
            {"name": "secrets", "mountPath": "/secrets", "readOnly": True},
            {"name": "keys", "mountPath": KEYS_DIR},
        ],
    }


def _in_memory(name: str, size: str) -> dict[str, Node]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def service(
    values: ManifestValues,
    component: str,
    ports: Mapping[str, int],
    *,
    job: str = "",
    suffix: str = "",
    headless: bool = False,
    unready: bool = False,
) -> Document:
    """`unready`: reach pods that are not ready, too. `job`: the name that Prometheus gives to its metrics."""
    about = metadata(values, component, f"{component}{suffix}")
    if job:
        about["labels"] = labels(values, component) | {"prometheus-job": job}
    spec: dict[str, Node] = {
        "selector": labels(values, component),
        "ports": [{"name": name, "port": number, "targetPort": number} for name, number in ports.items()],
    }
    if headless:
        spec["clusterIP"] = "None"
    if unready:
        spec["publishNotReadyAddresses"] = True
    return {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}


def disruption_budget(values: ManifestValues, component: str) -> Document:
    """One pod at a time may be taken from its node."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(values, component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(values, component)}},
    }
