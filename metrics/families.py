"""From rows of the table and plain numbers to Prometheus families; the only users of prometheus_client's types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector

from metrics.names import BY_NAME, Kind, Metric
from metrics.state import Buckets
from protocol.errors import InternalError

LabelValues = TypeVar("LabelValues", bound=str | tuple[str, ...])


def number(name: str, value: float) -> Family:
    """A counter or gauge without labels."""
    none: tuple[str, ...] = ()
    return labelled(name, {none: value})


def labelled(name: str, values: Mapping[LabelValues, float]) -> Family:
    """A counter or gauge with one sample per key: the label values in the table's order, or the only one's value."""
    metric = _metric(name)
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind is Kind.COUNTER:
        family = CounterMetricFamily(name.removesuffix("_total"), metric.help, labels=metric.labels)
    else:
        family = GaugeMetricFamily(name, metric.help, labels=metric.labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family


def histogram(name: str, buckets: Buckets) -> Family:
    """A histogram without labels. Sum and counts are read one after another: see metrics.state."""
    family = HistogramMetricFamily(name, _metric(name).help)
    total, counts = buckets.total, list(buckets.counts)
    bounds = [*(f"{bound:g}" for bound in buckets.bounds), "+Inf"]
    family.add_metric([], list(zip(bounds, accumulate(counts), strict=True)), total)
    return family


def process_families() -> Iterator[Family]:
    """CPU, memory and descriptors of this process."""
    yield from ProcessCollector(registry=None).collect()


def _metric(name: str) -> Metric:
    metric = BY_NAME.get(name)
    if metric is None:
        raise InternalError("a metric that is not in the table", field="metric", value=name)
    return metric
