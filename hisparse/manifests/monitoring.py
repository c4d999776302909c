"""Metrics, alerts, dashboards, and groups that are added by the length of the queue. Pure.

ServiceMonitor and PrometheusRule are those of Prometheus' operator. Jobs have the names that the alerts use: the label
`prometheus-job` of a Service. Dashboards are ConfigMaps with the label that Grafana's sidecar looks for.

A HorizontalPodAutoscaler needs the number of waiting requests as an external metric, which prometheus-adapter computes
by the rule in the ConfigMap NAME-adapter-rules. All groups share one queue, so the target is a number for each group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hisparse.manifests.pods import Document, labels, metadata, worker_ports
from hisparse.manifests.values import ManifestValues, WorkersValues
from hisparse.manifests.yaml_text import Verbatim

WAITING: Final = "hisparse_waiting_requests"
#: As prometheus-adapter's configuration has it. Prometheus' operator adds the labels namespace and service.
ADAPTER_RULES: Final = """\
externalRules:
  - seriesQuery: 'vllm:num_requests_waiting{model_name!=""}'
    resources: {overrides: {namespace: {resource: namespace}}}
    name: {as: hisparse_waiting_requests}
    metricsQuery: sum(vllm:num_requests_waiting{<<.LabelMatchers>>}) by (<<.GroupBy>>)
"""


def service_monitors(values: ManifestValues) -> list[Document]:
    found = [_monitor(values, "coordinator", ["metrics"]), _monitor(values, "http", ["metrics"])]
    return found + [_monitor(values, it.name, list(worker_ports(it))) for it in values.workers]


def _monitor(values: ManifestValues, component: str, ports: list[str]) -> Document:
    about = metadata(values, component)
    about["labels"] = labels(values, component) | values.monitoring.labels
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": about,
        "spec": {
            "jobLabel": "prometheus-job",
            "selector": {
                "matchLabels": labels(values, component),
                "matchExpressions": [{"key": "prometheus-job", "operator": "Exists"}],
            },
            "endpoints": [{"port": port, "path": "/metrics", "interval": "5s"} for port in ports],
        },
    }


def alerts(values: ManifestValues, rules: str) -> Document:
    """`rules` is the text of a rule file of Prometheus."""
    about = metadata(values, "alerts")
    about["labels"] = labels(values, "alerts") | values.monitoring.labels
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": about,
        "spec": Verbatim(rules),
    }


def dashboards(values: ManifestValues, files: Mapping[str, str]) -> list[Document]:
    """A ConfigMap for each of `files`, JSON texts by file name."""
    found = []
    for name, text in files.items():
        about = metadata(values, "dashboards", f"dashboard-{name.removesuffix('.json')}")
        about["labels"] = labels(values, "dashboards") | {"grafana_dashboard": "1"}
        found.append(Document(apiVersion="v1", kind="ConfigMap", metadata=about, data={name: text}))
    return found


def autoscalers(values: ManifestValues) -> list[Document]:
    """None where no workers have `scaling`; else the adapter's rule, and one for each that has."""
    scaled = [_autoscaler(values, it) for it in values.workers if it.scaling is not None]
    rules = Document(
        apiVersion="v1",
        kind="ConfigMap",
        metadata=metadata(values, "adapter-rules"),
        data={"config.yaml": ADAPTER_RULES},
    )
    return [rules, *scaled] if scaled else []


def _autoscaler(values: ManifestValues, workers: WorkersValues) -> Document:
    assert workers.scaling is not None
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(values, workers.name),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "leaderworkerset.x-k8s.io/v1",
                "kind": "LeaderWorkerSet",
                "name": f"{values.name}-{workers.name}",
            },
            "minReplicas": workers.groups,
            "maxReplicas": workers.scaling.groups_max,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {
                            "name": WAITING,
                            "selector": {"matchLabels": {"service": f"{values.name}-coordinator"}},
                        },
                        "target": {"type": "AverageValue", "averageValue": str(workers.scaling.waiting_per_group)},
                    },
                }
            ],
            # A group that loads its weights answers nothing yet, and one that ends drains: neither is repeated at once
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 60},
                "scaleDown": {
                    "stabilizationWindowSeconds": 900,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 900}],
                },
            },
        },
    }
