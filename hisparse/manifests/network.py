"""Which pods may reach which ports: nothing but what is named here. Pure.

    clients     ── 8000 ──► front           any pod, and what an ingress lets in
    front       ── 7400 ──► coordinator
    workers     ── 7401, 7402 ──► coordinator    drain of preStop; reports
    workers     ── any ──► workers          ranks of groups across pods, and pages between nodes: their ports are drawn
    Prometheus  ── 9400 on ──► all

The kubelet reaches its probes past policies.
"""

from __future__ import annotations

from collections.abc import Sequence

from hisparse.manifests.pods import (
    ADMIN_PORT,
    CLIENT_PORT,
    HTTP_PORT,
    METRICS_PORT,
    WORKER_PORT,
    Document,
    labels,
    metadata,
)
from hisparse.manifests.values import ManifestValues, WorkersValues
from hisparse.manifests.yaml_text import Node


def network_policies(values: ManifestValues) -> list[Document]:
    """One for each component; together they deny what they do not name."""
    names = [it.name for it in values.workers]
    meeting = [it.name for it in values.workers if crosses_pods(it)]
    coordinator = [
        _from(values, ["http"], [CLIENT_PORT]),
        _from(values, names, [ADMIN_PORT, WORKER_PORT]),
        _scraped(values, 1),
    ]
    front = [{"ports": _ports([HTTP_PORT])}, _scraped(values, 1)]
    found = [
        _policy(values, "coordinator", coordinator, []),
        _policy(values, "http", front, [_dns(), _to(values, ["coordinator"], [CLIENT_PORT])]),
    ]
    for workers in values.workers:
        into: list[Node] = [_scraped(values, workers.gpus)]
        out: list[Node] = [_dns(), _to(values, ["coordinator"], [ADMIN_PORT, WORKER_PORT])]
        if workers.name in meeting:
            into.append({"from": _peers(values, meeting)})
            out.append({"to": _peers(values, meeting)})
        found.append(_policy(values, workers.name, into, out))
    return found


def crosses_pods(workers: WorkersValues) -> bool:
    """Whether its pods speak to pods of workers."""
    return workers.pods > 1 or bool(workers.settings.get("transfer"))


def _policy(values: ManifestValues, component: str, into: Sequence[Node], out: Sequence[Node]) -> Document:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(values, component),
        "spec": {
            "podSelector": {"matchLabels": labels(values, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": list(into),
            "egress": list(out),
        },
    }


def _peers(values: ManifestValues, components: Sequence[str]) -> list[Node]:
    return [{"podSelector": {"matchLabels": labels(values, it)}} for it in components]


def _ports(numbers: Sequence[int]) -> list[Node]:
    return [{"protocol": "TCP", "port": number} for number in numbers]


def _from(values: ManifestValues, components: Sequence[str], ports: Sequence[int]) -> Node:
    return {"from": _peers(values, components), "ports": _ports(ports)}


def _to(values: ManifestValues, components: Sequence[str], ports: Sequence[int]) -> Node:
    return {"to": _peers(values, components), "ports": _ports(ports)}


def _scraped(values: ManifestValues, count: int) -> Node:
    prometheus: Node = {"namespaceSelector": _namespace(values.monitoring.namespace)}
    return {"from": [prometheus], "ports": _ports([METRICS_PORT + number for number in range(count)])}


def _dns() -> Node:
    servers: Node = {
        "namespaceSelector": _namespace("kube-system"),
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    return {"to": [servers], "ports": [{"protocol": it, "port": 53} for it in ("UDP", "TCP")]}


def _namespace(name: str) -> Node:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}
