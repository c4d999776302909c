"""Coordinator and HTTP front: a StatefulSet with its journal, a Deployment behind a Service.

The Service of the coordinator reaches a pod that is not ready. It is ready when workers serve requests, and they find
it by that Service.
"""

from __future__ import annotations

from typing import Final

from hisparse.manifests.environments import check_settings
from hisparse.manifests.pods import (
    ADMIN_PORT,
    CLIENT_PORT,
    HTTP_PORT,
    KEYS_DIR,
    METRICS_PORT,
    RUNTIME_DIR,
    WORKER_PORT,
    Document,
    container,
    disruption_budget,
    labels,
    metadata,
    pod,
    quantity,
    resources,
    service,
)
from hisparse.manifests.values import CoordinatorValues, ManifestValues, size_bytes

#: The kubelet makes the directory of the volume, and the coordinator this one inside, mode 0700.
JOURNAL: Final = "/var/lib/hisparse/journal/journal.sqlite"
#: After coordinator.stop_deadline_s: the last answers leave within 10 s.
COORDINATOR_STOP_S: Final = 30
#: A front waits 30 s for running answers.
FRONT_STOP_S: Final = 45
#: Until load balancers send a pod that ends no new connections.
LEAVE_S: Final = 10
START_S: Final = 120
CACHE: Final = "/var/cache/hisparse"

COMMON: Final = {
    "HISPARSE_CLUSTER_RUNTIME_DIR": RUNTIME_DIR,
    "HISPARSE_CLUSTER_LOG_FORMAT": "json",
    "HISPARSE_CLUSTER_KEYS_DIR": KEYS_DIR,
}


def coordinator_environ(values: ManifestValues) -> dict[str, str]:
    """Raises ConfigError for settings that the coordinator would refuse."""
    fixed = COMMON | {
        "HISPARSE_CLUSTER_CLIENT_ENDPOINT": f"tcp://0.0.0.0:{CLIENT_PORT}",
        "HISPARSE_CLUSTER_ADMIN_ENDPOINT": f"tcp://0.0.0.0:{ADMIN_PORT}",
        "HISPARSE_CLUSTER_WORKER_ENDPOINT": f"tcp://0.0.0.0:{WORKER_PORT}",
        "HISPARSE_CLUSTER_SPEAK_AS": "admin",  # kubectl exec ... hisparse requests
        "HISPARSE_COORDINATOR_JOURNAL": JOURNAL,
        "HISPARSE_COORDINATOR_METRICS_HOST": "0.0.0.0",
        "HISPARSE_COORDINATOR_METRICS_PORT": str(METRICS_PORT),
    }
    settings = {"stop_deadline_s": 0.0} | values.coordinator.settings  # requests go on after the next start
    return check_settings("coordinator", settings, fixed, "coordinator.settings")


def coordinator(values: ManifestValues) -> list[Document]:
    """StatefulSet, Service and PodDisruptionBudget. Raises ConfigError."""
    environ, wanted = coordinator_environ(values), values.coordinator
    ports = {"clients": CLIENT_PORT, "admins": ADMIN_PORT, "workers": WORKER_PORT, "metrics": METRICS_PORT}
    process = container(
        "coordinator",
        values.images.coordinator,
        ["hisparse", "coordinator"],
        environ,
        {"journal": "/var/lib/hisparse"},
        resources(wanted.cpus, size_bytes(wanted.memory, "coordinator.memory")),
        ports,
        start_s=START_S,
    )
    grace_s = int(float(environ["HISPARSE_COORDINATOR_STOP_DEADLINE_S"])) + COORDINATOR_STOP_S
    stateful: Document = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(values, "coordinator"),
        "spec": {
            "replicas": 1,
            "serviceName": f"{values.name}-coordinator",
            "selector": {"matchLabels": labels(values, "coordinator")},
            "template": pod(values, "coordinator", process, [], f"{values.name}-coordinator", grace_s=grace_s),
            "volumeClaimTemplates": [_journal_claim(wanted)],
        },
    }
    return [
        stateful,
        service(values, "coordinator", ports, job="hisparse-coordinator", unready=True),
        disruption_budget(values, "coordinator"),
    ]


def _journal_claim(wanted: CoordinatorValues) -> Document:
    size = quantity(size_bytes(wanted.journal_storage, "coordinator.journal_storage"))
    spec: Document = {
        "accessModes": ["ReadWriteOncePod"],  # two coordinators never have one journal
        "resources": {"requests": {"storage": size}},
    }
    if wanted.storage_class:
        spec["storageClassName"] = wanted.storage_class
    return {"metadata": {"name": "journal"}, "spec": spec}


def front_environ(values: ManifestValues) -> dict[str, str]:
    """Raises ConfigError for settings that the front would refuse."""
    fixed = COMMON | {
        "HISPARSE_CLUSTER_CLIENT_ENDPOINT": f"tcp://{values.name}-coordinator:{CLIENT_PORT}",
        "HISPARSE_HTTP_HOST": "0.0.0.0",
        "HISPARSE_HTTP_PORT": str(HTTP_PORT),
        "HISPARSE_HTTP_API_KEYS_FILE": f"{KEYS_DIR}/api.keys",
        "HISPARSE_HTTP_METRICS_HOST": "0.0.0.0",
        "HISPARSE_HTTP_METRICS_PORT": str(METRICS_PORT),
    }
    return check_settings("http", values.http.settings, fixed, "http.settings")


def front(values: ManifestValues) -> list[Document]:
    """Deployment, Services and PodDisruptionBudget. Raises ConfigError."""
    wanted = values.http
    process = container(
        "http",
        values.images.http,
        ["hisparse", "http"],
        front_environ(values),
        {"cache": CACHE},
        resources(wanted.cpus, size_bytes(wanted.memory, "http.memory")),
        {"http": HTTP_PORT, "metrics": METRICS_PORT},
        start_s=START_S,
        pre_stop=["sleep", str(LEAVE_S)],
    )
    cache: Document = {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}
    deployment: Document = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(values, "http"),
        "spec": {
            "replicas": wanted.replicas,
            "selector": {"matchLabels": labels(values, "http")},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod(values, "http", process, [cache], f"{values.name}-http", grace_s=LEAVE_S + FRONT_STOP_S),
        },
    }
    return [
        deployment,
        service(values, "http", {"http": HTTP_PORT}),
        service(
            values,
            "http",
            {"metrics": METRICS_PORT},
            job="hisparse-http",
            suffix="-metrics",
            headless=True,
            unready=True,
        ),
        disruption_budget(values, "http"),
    ]
