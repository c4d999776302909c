"""What a worker exports of its link to the coordinator."""

from __future__ import annotations

from typing import Final

from metrics.families import Metric, counter, gauge
from metrics.state import LinkCounters

LINK_METRICS: Final[tuple[Metric[LinkCounters], ...]] = (
    gauge(
        "hisparse_link_welcomed",
        "",
        "1 while the coordinator's commands are obeyed.",
        "Is it in the cluster?",
        lambda it: it.welcomed,
    ),
    counter(
        "hisparse_link_connects_total",
        "connections",
        "Connections made.",
        "Is the link stable?",
        lambda it: it.connects,
    ),
    counter(
        "hisparse_link_welcomes_total",
        "connections",
        "Connections welcomed.",
        "Do coordinators accept it?",
        lambda it: it.welcomes,
    ),
    counter(
        "hisparse_link_drops_total",
        "connections",
        "Connections ended, by reason.",
        "Why did the link end?",
        lambda it: dict(it.drops),
        labels="reason",
    ),
    counter(
        "hisparse_link_epochs_total",
        "epochs",
        "New epochs begun after the first.",
        "Was everything withdrawn?",
        lambda it: it.epochs,
    ),
    counter(
        "hisparse_link_commands_total",
        "commands",
        "Commands applied.",
        "Is it being commanded?",
        lambda it: it.commands,
    ),
    counter(
        "hisparse_link_duplicate_commands_total",
        "commands",
        "Commands received again.",
        "Is there much replay?",
        lambda it: it.duplicate_commands,
    ),
    counter(
        "hisparse_link_command_gaps_total",
        "messages",
        "Commands received ahead of a missing one.",
        "Does the link lose?",
        lambda it: it.command_gaps,
    ),
    counter(
        "hisparse_link_unreadable_total",
        "messages",
        "Messages that could not be decoded.",
        "Is the peer ours?",
        lambda it: it.unreadable,
    ),
    counter("hisparse_link_reports_total", "reports", "Reports sent.", "Does it report?", lambda it: it.reports),
    counter(
        "hisparse_link_replayed_reports_total",
        "reports",
        "Reports sent again.",
        "Does the link lose?",
        lambda it: it.replayed_reports,
    ),
)
