"""One declaration per metric: name, kind, unit, meaning, the question it answers, and the function that reads it.

A table is a tuple of metrics that read one source; a collector is a loop over tables (`families`). Names follow
Prometheus: base units, unit last, `_total` on counters. Totals are counters, never rates or ratios: a hit rate over any
window is `rate(hits) / (rate(hits) + rate(misses))`, which a gauge overwritten per batch cannot give.

Labels have few values, all chosen by this project: states, error codes, reasons. Request ids and free text are no
labels; what a single request did is its history (`hisparse request ID`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Generic, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from metrics.state import Buckets

Source = TypeVar("Source")

#: One value; or one for each key: the label values in the order of the metric's labels, or the only label's value.
Samples: TypeAlias = (
    float | Mapping[str, float] | Mapping[tuple[str, str], float] | Mapping[tuple[str, str, str], float]
)


class MetricType(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """`read` takes the samples from the source at scrape time; of a histogram, its buckets."""

    name: str
    type: MetricType
    unit: str
    help: str
    question: str
    labels: tuple[str, ...]
    read: Callable[[Source], Samples | Buckets]


def counter(
    name: str, unit: str, text: str, question: str, read: Callable[[Source], Samples], *, labels: str = ""
) -> Metric[Source]:
    """`labels` are separated by spaces."""
    return Metric(name, MetricType.COUNTER, unit, text, question, tuple(labels.split()), read)


def gauge(
    name: str, unit: str, text: str, question: str, read: Callable[[Source], Samples], *, labels: str = ""
) -> Metric[Source]:
    """`labels` are separated by spaces."""
    return Metric(name, MetricType.GAUGE, unit, text, question, tuple(labels.split()), read)


def histogram(name: str, text: str, question: str, read: Callable[[Source], Buckets]) -> Metric[Source]:
    """Of seconds, without labels."""
    return Metric(name, MetricType.HISTOGRAM, "seconds", text, question, (), read)


def families(table: Iterable[Metric[Source]], source: Source) -> Iterator[Family]:
    """What is exported of `source`: a family for each metric of its table."""
    for metric in table:
        yield _family(metric, metric.read(source))


def _family(metric: Metric[Source], samples: Samples | Buckets) -> Family:
    family: CounterMetricFamily | GaugeMetricFamily
    if isinstance(samples, Buckets):
        return _histogram(metric, samples)
    if metric.type is MetricType.COUNTER:
        family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    else:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    if isinstance(samples, Mapping):
        for key, value in samples.items():
            family.add_metric([key] if isinstance(key, str) else list(key), value)
    else:
        family.add_metric([], samples)
    return family


def _histogram(metric: Metric[Source], buckets: Buckets) -> HistogramMetricFamily:
    """Sum and counts are read one after another: see metrics.state."""
    family = HistogramMetricFamily(metric.name, metric.help)
    total, counts = buckets.total, list(buckets.counts)
    bounds = [*(f"{bound:g}" for bound in buckets.bounds), "+Inf"]
    family.add_metric([], list(zip(bounds, accumulate(counts), strict=True)), total)
    return family
