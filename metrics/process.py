"""What every process exports: what it is, its CPU time, memory and descriptors, and rooms that clients fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.process_collector import ProcessCollector

from basics.rooms import RoomUse
from metrics.families import Metric, counter, gauge


@dataclass(frozen=True)
class ProcessStatistics:
    """`identity` is the kind of process, its name and its version; `statistics` are those of the operating system."""

    identity: tuple[str, str, str]
    statistics: dict[str, float]


def process_statistics(kind: str, name: str, version: str) -> ProcessStatistics:
    """Of this process, now."""
    families = ProcessCollector(registry=None).collect()
    samples = (sample for family in families for sample in family.samples)
    return ProcessStatistics((kind, name, version), {sample.name: sample.value for sample in samples})


PROCESS_METRICS: Final[tuple[Metric[ProcessStatistics], ...]] = (
    gauge(
        "hisparse_info",
        "",
        "Always 1; what this process is.",
        "Which versions run?",
        lambda it: {it.identity: 1},
        labels="process name version",
    ),
    gauge(
        "process_resident_memory_bytes",
        "bytes",
        "Resident memory.",
        "Does it leak?",
        lambda it: it.statistics["process_resident_memory_bytes"],
    ),
    gauge(
        "process_virtual_memory_bytes",
        "bytes",
        "Virtual memory, the mapped pool included.",
        "Is the pool mapped?",
        lambda it: it.statistics["process_virtual_memory_bytes"],
    ),
    gauge(
        "process_start_time_seconds",
        "seconds",
        "Start, in seconds since the epoch.",
        "Did it restart?",
        lambda it: it.statistics["process_start_time_seconds"],
    ),
    gauge(
        "process_open_fds",
        "descriptors",
        "Open file descriptors.",
        "Does it leak connections?",
        lambda it: it.statistics["process_open_fds"],
    ),
    gauge(
        "process_max_fds",
        "descriptors",
        "Most file descriptors it may open.",
        "How near is the limit?",
        lambda it: it.statistics["process_max_fds"],
    ),
    counter(
        "process_cpu_seconds_total",
        "seconds",
        "CPU time, user and system.",
        "Is one core the limit?",
        lambda it: it.statistics["process_cpu_seconds_total"],
    ),
)

#: Of rooms by name and by what happens when they are full (basics.rooms).
ROOM_METRICS: Final[tuple[Metric[Mapping[tuple[str, str], RoomUse]], ...]] = (
    gauge(
        "hisparse_room_used",
        "",
        "What is used of each room that clients fill, in its unit; full, it refuses, forgets or drops.",
        "Which room runs full?",
        lambda it: {name: used for name, (used, _) in it.items()},
        labels="room when_full",
    ),
    gauge(
        "hisparse_room_limit",
        "",
        "What each of these rooms can hold.",
        "How full is it?",
        lambda it: {name: limit for name, (_, limit) in it.items()},
        labels="room when_full",
    ),
)
