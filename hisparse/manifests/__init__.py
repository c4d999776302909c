"""Plain manifests of a cluster on Kubernetes, from typed values: `hisparse manifests`.

    values ─► groups, processes, network, monitoring ─► yaml_text

No module reads a file: the command reads the values, the alerts and the dashboards. docs/kubernetes.md is the guide.
"""

from __future__ import annotations

from collections.abc import Mapping

from hisparse.manifests.groups import group_set
from hisparse.manifests.monitoring import alerts, autoscalers, dashboards, service_monitors
from hisparse.manifests.network import network_policies
from hisparse.manifests.pods import Document
from hisparse.manifests.processes import coordinator, front
from hisparse.manifests.values import ManifestValues, read_values
from hisparse.manifests.yaml_text import documents


def manifests(values: ManifestValues, rules: str, dashboard_files: Mapping[str, str]) -> list[Document]:
    """All objects but the namespace and its Secrets. Raises ConfigError for settings that a process would refuse."""
    found = [*coordinator(values), *front(values)]
    for workers in values.workers:
        found += group_set(values, workers)
    found += [*network_policies(values), *autoscalers(values)]
    if values.monitoring.enabled:
        found += [*service_monitors(values), alerts(values, rules), *dashboards(values, dashboard_files)]
    return found


__all__ = ["ManifestValues", "documents", "manifests", "read_values"]
