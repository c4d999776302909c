"""What a worker exports of page transfers, by end: sender, receiver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from metrics.families import Metric, counter, gauge
from metrics.state import TransferCounters

Ends: TypeAlias = Mapping[str, TransferCounters]


def _by_end(ends: Ends, read: Callable[[TransferCounters], float]) -> dict[str, float]:
    return {end: read(counters) for end, counters in ends.items()}


TRANSFER_METRICS: Final[tuple[Metric[Ends], ...]] = (
    gauge(
        "hisparse_transfer_open",
        "transfers",
        "Page transfers under way, by end.",
        "Do transfers end?",
        lambda it: _by_end(it, lambda end: end.open_transfers),
        labels="end",
    ),
    gauge(
        "hisparse_transfer_in_flight_bytes",
        "bytes",
        "Bytes being written to other nodes, or written and not yet verified there.",
        "Is the window what limits transfers?",
        lambda it: _by_end(it, lambda end: end.in_flight_bytes),
        labels="end",
    ),
    counter(
        "hisparse_transfer_bytes_total",
        "bytes",
        "Bytes of host pages that have come from, or gone to, other nodes, verified by the receiver.",
        "What fills the network?",
        lambda it: _by_end(it, lambda end: end.bytes),
        labels="end",
    ),
    counter(
        "hisparse_transfer_pages_total",
        "pages",
        "Whole host pages that were transferred and verified.",
        "How fast do prompts travel?",
        lambda it: _by_end(it, lambda end: end.pages),
        labels="end",
    ),
    counter(
        "hisparse_transfer_refused_units_total",
        "pages",
        "Pages, or parts of pages, whose checksum did not fit; each is sent again.",
        "Does the network, or a NIC, corrupt rows?",
        lambda it: _by_end(it, lambda end: end.refused_units),
        labels="end",
    ),
    counter(
        "hisparse_transfer_ended_early_total",
        "transfers",
        "Transfers that failed at their sender, or were revoked at their receiver.",
        "How many prompts travel in vain?",
        lambda it: _by_end(it, lambda end: end.failed_transfers + end.revoked_transfers),
        labels="end",
    ),
    counter(
        "hisparse_transfer_shut_out_total",
        "senders",
        "Senders whose endpoint was destroyed: silent, broken or dead.",
        "Do senders hang?",
        lambda it: _by_end(it, lambda end: end.shut_out_senders),
        labels="end",
    ),
    counter(
        "hisparse_transfer_unreadable_total",
        "messages",
        "Messages about transfers that could not be decoded.",
        "Is the peer of this release?",
        lambda it: _by_end(it, lambda end: end.unreadable_messages),
        labels="end",
    ),
    counter(
        "hisparse_transfer_checksum_seconds_total",
        "seconds",
        "Time spent on verifying pages, by all threads.",
        "What does verification cost?",
        lambda it: _by_end(it, lambda end: end.checksum_seconds),
        labels="end",
    ),
)
