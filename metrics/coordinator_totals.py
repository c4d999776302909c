"""What the coordinator exports of its counters: totals since its start, waits of requests, the journal."""

from __future__ import annotations

from typing import Final

from metrics.families import Metric, counter, histogram
from metrics.state import CoordinatorCounters, JournalCounters, WaitCounters

COORDINATOR_METRICS: Final[tuple[Metric[CoordinatorCounters], ...]] = (
    counter("hisparse_submitted_total", "requests", "Requests accepted.", "What is the load?", lambda it: it.submitted),
    counter(
        "hisparse_refused_total",
        "requests",
        "Requests refused, by error code.",
        "Why were they refused?",
        lambda it: dict(it.refused),
        labels="code",
    ),
    counter(
        "hisparse_ended_total",
        "requests",
        "Requests ended, by outcome.",
        "Do requests succeed?",
        lambda it: dict(it.ended),
        labels="outcome",
    ),
    counter(
        "hisparse_failed_total",
        "requests",
        "Requests that failed, by cause: fault, lost_tokens, poison, stopped, unknown.",
        "Is it the request, a worker, or the coordinator?",
        lambda it: dict(it.failed),
        labels="cause",
    ),
    counter(
        "hisparse_admissions_total",
        "requests",
        "Stays on workers begun.",
        "How often is one admitted?",
        lambda it: it.admissions,
    ),
    counter(
        "hisparse_retractions_total",
        "requests",
        "Requests taken off their workers: keep or drop, and why.",
        "Which memory forces retraction?",
        lambda it: dict(it.retractions),
        labels="mode reason",
    ),
    counter(
        "hisparse_prompt_tokens_total",
        "tokens",
        "Prompt tokens accepted.",
        "How long are prompts?",
        lambda it: it.prompt_tokens,
    ),
    counter(
        "hisparse_prefix_asked_tokens_total",
        "tokens",
        "Prompt tokens admitted to be prefilled, while prefixes are reused.",
        "Of how many tokens could rows have been reused?",
        lambda it: it.prefix_asked_tokens,
    ),
    counter(
        "hisparse_prefix_tokens_total",
        "tokens",
        "Prompt tokens whose rows were reused, at admission.",
        "How much prefill does prefix reuse save?",
        lambda it: it.prefix_tokens,
    ),
    counter(
        "hisparse_prefix_pages_evicted_total",
        "pages",
        "Cached host pages evicted to make room.",
        "Is the host pool too small for what could be reused?",
        lambda it: it.prefix_pages_evicted,
    ),
    counter(
        "hisparse_prefix_pages_evicted_lent_total",
        "pages",
        "Of these: pages above the equal share of their owner.",
        "Does one owner flood the cache, or is the pool too small for what each repeats?",
        lambda it: it.prefix_pages_evicted_lent,
    ),
    counter(
        "hisparse_kv_event_batches_total",
        "batches",
        "Batches of KV events to be published.",
        "Do routers hear of the cache?",
        lambda it: it.kv_event_batches,
    ),
    counter(
        "hisparse_kv_event_batches_dropped_total",
        "batches",
        "Of these: dropped because the publisher's queue was full.",
        "Do routers miss events?",
        lambda it: it.kv_event_batches_dropped,
    ),
    counter(
        "hisparse_spans_total",
        "spans",
        "Spans of traces: exported, failed (the receiver did not take them) or dropped (the queue was full).",
        "Are traces whole?",
        lambda it: it.spans.by_outcome,
        labels="outcome",
    ),
    counter(
        "hisparse_tokens_total",
        "tokens",
        "Tokens received from workers.",
        "How fast is the cluster?",
        lambda it: it.tokens,
    ),
    counter(
        "hisparse_repeated_tokens_total",
        "tokens",
        "Positions that were known already.",
        "Is there much replay?",
        lambda it: it.repeated_tokens,
    ),
    counter(
        "hisparse_deliveries_total",
        "messages",
        "Deliveries to client connections.",
        "Do clients get tokens?",
        lambda it: it.deliveries,
    ),
    counter(
        "hisparse_stalled_deliveries_total",
        "messages",
        "Deliveries put off.",
        "Is a client too slow?",
        lambda it: it.stalled_deliveries,
    ),
    counter(
        "hisparse_commands_total",
        "commands",
        "Commands sent to workers.",
        "How busy is the control path?",
        lambda it: it.commands,
    ),
    counter(
        "hisparse_replayed_commands_total",
        "commands",
        "Commands sent again.",
        "Does a link lose?",
        lambda it: it.replayed_commands,
    ),
    counter("hisparse_reports_total", "reports", "Reports from workers.", "Do workers report?", lambda it: it.reports),
    counter(
        "hisparse_report_gaps_total",
        "reports",
        "Reports received ahead of a missing one.",
        "Does a link lose?",
        lambda it: it.report_gaps,
    ),
    counter(
        "hisparse_audits_total",
        "audits",
        "Workers compared with the ledger.",
        "Does the audit run?",
        lambda it: it.audits,
    ),
    counter(
        "hisparse_audit_differences_total",
        "differences",
        "Differences between a worker and the ledger, confirmed by two audits in a row.",
        "Does memory leak, or have two owners?",
        lambda it: dict(it.audit_differences),
        labels="kind",
    ),
    counter(
        "hisparse_dropped_messages_total",
        "messages",
        ("Refused messages (unreadable, too large, too many) and connections (no key, no hello, unfinished, cut off)."),
        "Is a peer hostile or outdated?",
        lambda it: dict(it.dropped_messages),
        labels="socket reason",
    ),
    histogram(
        "hisparse_host_page_lifetime_seconds",
        "From taking a host page to its being free.",
        "How fast does the pool turn over?",
        lambda it: it.host_page_s,
    ),
    histogram(
        "hisparse_command_ack_seconds",
        "From sending a command to its acknowledgement.",
        "How late do workers learn of changes?",
        lambda it: it.command_ack_s,
    ),
)

WAIT_METRICS: Final[tuple[Metric[WaitCounters], ...]] = (
    histogram(
        "hisparse_queue_wait_seconds",
        "Wait for a place on a worker, each time until admitted.",
        "How long is the queue?",
        lambda it: it.queue_s,
    ),
    histogram(
        "hisparse_retract_seconds",
        "From a worker's Withdraw to the release of the request's memory.",
        "How fast is pressure relieved?",
        lambda it: it.retract_s,
    ),
    histogram(
        "hisparse_hand_over_seconds",
        "From the end of prefill on another worker to the rows' arrival where the request is decoded.",
        "What does it cost to prefill elsewhere?",
        lambda it: it.hand_over_s,
    ),
    histogram(
        "hisparse_resume_seconds",
        "From admitting a request whose rows are in host memory to its running.",
        "What does a retraction cost its request?",
        lambda it: it.resume_s,
    ),
    histogram(
        "hisparse_time_to_first_token_seconds",
        "From submission to a first token at the coordinator.",
        "How long until clients see anything?",
        lambda it: it.first_token_s,
    ),
    histogram(
        "hisparse_inter_token_seconds",
        "Between two tokens of a request at the coordinator, pauses of retractions included.",
        "How smooth is the output?",
        lambda it: it.token_s,
    ),
)

JOURNAL_METRICS: Final[tuple[Metric[JournalCounters], ...]] = (
    counter(
        "hisparse_journal_commits_total", "commits", "Groups written.", "How large are groups?", lambda it: it.commits
    ),
    counter(
        "hisparse_journal_records_total", "records", "Records written.", "How large are groups?", lambda it: it.records
    ),
    counter(
        "hisparse_journal_written_bytes_total",
        "bytes",
        "Bytes of records written.",
        "How fast does it grow?",
        lambda it: it.written_bytes,
    ),
    counter(
        "hisparse_journal_errors_total",
        "times",
        "Groups that could not be written.",
        "Does its disk fail?",
        lambda it: it.errors,
    ),
    histogram(
        "hisparse_journal_commit_seconds",
        "Writing one group, fsync included.",
        "Is the disk what tokens and grants wait for?",
        lambda it: it.commit_s,
    ),
)
