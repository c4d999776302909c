"""What one end of page transfer counts. Written by its thread under its lock; read at scrape time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounters:
    """Totals, which only grow, and the two levels that say how busy it is.

    `bytes` and `pages` were verified by the receiver; `writes` includes those that had to be repeated.
    `checksum_seconds` is a sum over the threads that verify.
    """

    bytes: int = 0
    pages: int = 0
    writes: int = 0
    refused_units: int = 0
    failed_tickets: int = 0
    revoked_tickets: int = 0
    unproved_tickets: int = 0
    shut_out_senders: int = 0
    unreadable_messages: int = 0
    checksum_seconds: float = 0.0
    open_tickets: int = 0
    in_flight_bytes: int = 0
