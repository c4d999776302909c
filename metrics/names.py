"""Every metric of every process: one table of name, kind, labels, unit, meaning and the question it answers.

Collectors may export nothing that is not here, and must export everything that is (test_metrics.py). Names follow
Prometheus: base units, unit last, `_total` on counters. Totals are counters, never rates or ratios: a hit rate over any
window is `rate(hits) / (rate(hits) + rate(misses))`, which a gauge overwritten per batch cannot give.

Labels have few values, all chosen by us: states, error codes, reasons. Request ids and free text are no labels; what a
single request did is its story (`hisparse request ID`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Role(Enum):
    """Which process exports it."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    HTTP = "http"
    BOTH = "both"


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    role: Role
    unit: str
    labels: tuple[str, ...]
    help: str
    question: str


def _rows(kind: Kind, role: Role, *rows: tuple[str, str, str, str, str]) -> tuple[Metric, ...]:
    """Rows of name, labels separated by spaces, unit, help, question."""
    return tuple(
        Metric(name, kind, role, unit, tuple(labels.split()), text, question)
        for name, labels, unit, text, question in rows
    )


_EVERY_PROCESS: Final = (
    *_rows(
        Kind.GAUGE,
        Role.BOTH,
        ("hisparse_info", "process name version", "", "Always 1; what this process is.", "Which versions run?"),
        ("process_resident_memory_bytes", "", "bytes", "Resident memory.", "Does it leak?"),
        (
            "process_virtual_memory_bytes",
            "",
            "bytes",
            "Virtual memory, the mapped pool included.",
            "Is the pool mapped?",
        ),
        ("process_start_time_seconds", "", "seconds", "Start, in seconds since the epoch.", "Did it restart?"),
        ("process_open_fds", "", "descriptors", "Open file descriptors.", "Does it leak connections?"),
        ("process_max_fds", "", "descriptors", "Most file descriptors it may open.", "How near is the limit?"),
    ),
    *_rows(
        Kind.COUNTER,
        Role.BOTH,
        ("process_cpu_seconds_total", "", "seconds", "CPU time, user and system.", "Is one core the limit?"),
    ),
)

_WORKER: Final = (
    *_rows(
        Kind.GAUGE,
        Role.WORKER,
        (
            "hisparse_worker_requests",
            "state",
            "requests",
            "Requests by state.",
            "What are the seats doing? Who is parked?",
        ),
        ("hisparse_worker_seats", "", "requests", "Most requests in one batch.", "Is the batch full?"),
        (
            "hisparse_worker_memory_units",
            "memory state",
            "units of 64 tokens",
            "Chunks (hot buffers and prefill slab) and index pages, used and free.",
            "Which memory is short?",
        ),
        ("hisparse_worker_memory_unit_bytes", "memory", "bytes", "Device bytes of one such unit.", "How much is that?"),
        (
            "hisparse_worker_hot_buffers",
            "size",
            "requests",
            "Hot buffers by size: resident, or managed with so many slots.",
            "Which sizes does policy give?",
        ),
        (
            "hisparse_worker_executor_silent_seconds",
            "",
            "seconds",
            "Time since the decode loop turned.",
            "Does it hang?",
        ),
        ("hisparse_worker_unreported_tokens", "", "tokens", "Tokens in no report yet.", "Is the coordinator behind?"),
        ("hisparse_link_welcomed", "", "", "1 while the coordinator's commands are obeyed.", "Is it in the cluster?"),
        ("hisparse_link_reports_in_flight", "", "reports", "Reports not yet acknowledged.", "Is the link stuck?"),
    ),
    *_rows(
        Kind.COUNTER,
        Role.WORKER,
        ("hisparse_worker_executor_beats_total", "", "turns", "Turns of the decode loop.", "Does the loop turn?"),
        ("hisparse_worker_steps_total", "", "steps", "Decode steps.", "Does it decode?"),
        ("hisparse_worker_tokens_total", "", "tokens", "Tokens generated.", "How fast is this worker?"),
        (
            "hisparse_worker_surplus_tokens_total",
            "",
            "tokens",
            "Decoded past a request's end.",
            "What does lookahead cost?",
        ),
        ("hisparse_worker_prompt_tokens_total", "", "tokens", "Prompt tokens prefilled.", "How much of it is prefill?"),
        (
            "hisparse_worker_hits_total",
            "",
            "rows",
            "Top-k rows found in hot buffers; layers that share a selection count once.",
            "What is the hit rate?",
        ),
        (
            "hisparse_worker_misses_total",
            "",
            "rows",
            "Top-k rows that were not there; layers that share a selection count once.",
            "What is the hit rate?",
        ),
        (
            "hisparse_worker_copied_bytes_total",
            "direction purpose",
            "bytes",
            "Bytes between host and device: stage, backup; swap, preload.",
            "What fills the link to the host?",
        ),
        (
            "hisparse_worker_copy_seconds_total",
            "direction purpose",
            "seconds",
            "Time in which such copies ran; of swap, one step in 64 is timed and stands for all.",
            "How fast are copies? What keeps the link busy?",
        ),
        (
            "hisparse_worker_compute_seconds_total",
            "",
            "seconds",
            "Decode steps on the device, swap-in included; one in 64 is timed and stands for all.",
            "How much of a step is the device at work?",
        ),
        ("hisparse_swap_hits_total", "layer", "rows", "Top-k rows found hot.", "Which layers hit?"),
        ("hisparse_swap_misses_total", "layer", "rows", "Top-k rows loaded from the host.", "Which layers load?"),
        (
            "hisparse_swap_evictions_total",
            "layer",
            "rows",
            "Rows that made way for others in hot buffers; reckoned on the host.",
            "Which layers churn?",
        ),
        ("hisparse_swap_bytes_total", "layer", "bytes", "Bytes loaded by swap-in.", "What does each layer load?"),
        (
            "hisparse_swap_seconds_total",
            "layer stream",
            "seconds",
            "Swap-in on compute, in the way of the step, or on swap, beside it; one step in 64 stands for all.",
            "What does each layer's swap-in cost?",
        ),
        ("hisparse_worker_admitted_total", "", "requests", "Requests taken in.", "How many stays were there?"),
        (
            "hisparse_worker_released_total",
            "",
            "requests",
            "Requests whose memory was released.",
            "Does memory come back?",
        ),
        ("hisparse_worker_faulted_total", "", "requests", "Requests that could not go on.", "Do requests fail here?"),
        ("hisparse_worker_parked_total", "", "times", "Times a request ran out of granted pages.", "Are grants late?"),
        ("hisparse_worker_resized_total", "", "times", "Hot buffers resized.", "Does policy thrash?"),
        (
            "hisparse_worker_warm_starts_total",
            "outcome",
            "requests",
            "Contexts longer than their hot buffer that came from host pages: warm, with the rows that their last "
            "top-k names; cold, without, for it was not known, or refused, unreadable.",
            "Does everybody wait for first steps?",
        ),
        (
            "hisparse_worker_fence_wait_seconds_total",
            "fence",
            "seconds",
            "Time waited for a fence, as far as it was measured; inline streams never wait.",
            "What does a step wait for: the host, copies, compute?",
        ),
        (
            "hisparse_worker_fence_waits_total",
            "fence",
            "waits",
            "Such waits: of the host all, of a stream one in 16, which stands for all; none inside a graph.",
            "How long is one wait?",
        ),
        ("hisparse_link_connects_total", "", "connections", "Connections made.", "Is the link stable?"),
        ("hisparse_link_welcomes_total", "", "connections", "Connections welcomed.", "Does it get in?"),
        (
            "hisparse_link_drops_total",
            "reason",
            "connections",
            "Connections ended, by reason.",
            "Why did the link end?",
        ),
        ("hisparse_link_epochs_total", "", "epochs", "New epochs begun after the first.", "Was everything withdrawn?"),
        ("hisparse_link_commands_total", "", "commands", "Commands applied.", "Is it being commanded?"),
        ("hisparse_link_duplicate_commands_total", "", "commands", "Commands received again.", "Is there much replay?"),
        ("hisparse_link_command_gaps_total", "", "messages", "Commands that came too early.", "Does the link lose?"),
        ("hisparse_link_unreadable_total", "", "messages", "Messages nobody could decode.", "Is the peer ours?"),
        ("hisparse_link_reports_total", "", "reports", "Reports sent.", "Does it report?"),
        ("hisparse_link_replayed_reports_total", "", "reports", "Reports sent again.", "Does the link lose?"),
    ),
    *_rows(
        Kind.HISTOGRAM,
        Role.WORKER,
        ("hisparse_worker_step_seconds", "", "seconds", "Time of one decode step.", "How long between two tokens?"),
        ("hisparse_worker_prefill_seconds", "", "seconds", "Prefill of one prompt.", "How long to the first token?"),
        (
            "hisparse_worker_stage_seconds",
            "",
            "seconds",
            "Staging of one prompt to the host.",
            "Is staging in the way?",
        ),
        (
            "hisparse_worker_load_seconds",
            "",
            "seconds",
            "Loading what a resumed or grown request needs.",
            "What does it cost to come back?",
        ),
    ),
)

_TRANSFER: Final = (
    *_rows(
        Kind.GAUGE,
        Role.WORKER,
        ("hisparse_transfer_open", "end", "transfers", "Page transfers under way, by end.", "Do transfers end?"),
        (
            "hisparse_transfer_in_flight_bytes",
            "end",
            "bytes",
            "Bytes being written to other nodes, or written and not yet verified there.",
            "Is the window what limits transfers?",
        ),
    ),
    *_rows(
        Kind.COUNTER,
        Role.WORKER,
        (
            "hisparse_transfer_bytes_total",
            "end",
            "bytes",
            "Bytes of host pages that have come from, or gone to, other nodes, verified by the receiver.",
            "What fills the network?",
        ),
        ("hisparse_transfer_pages_total", "end", "pages", "Such pages, whole.", "How fast do prompts travel?"),
        (
            "hisparse_transfer_refused_units_total",
            "end",
            "pages",
            "Pages, or parts of pages, whose checksum did not fit; each is sent again.",
            "Does the network, or a NIC, corrupt rows?",
        ),
        (
            "hisparse_transfer_ended_early_total",
            "end",
            "transfers",
            "Transfers that failed at their sender, or were revoked at their receiver.",
            "How many prompts travel in vain?",
        ),
        (
            "hisparse_transfer_shut_out_total",
            "end",
            "senders",
            "Senders whose endpoint was destroyed: silent, broken or dead.",
            "Do senders hang?",
        ),
        (
            "hisparse_transfer_unreadable_total",
            "end",
            "messages",
            "Words about transfers that nobody could decode.",
            "Is the peer of this release?",
        ),
        (
            "hisparse_transfer_checksum_seconds_total",
            "end",
            "seconds",
            "Time spent on verifying pages, by all threads.",
            "What does verification cost?",
        ),
    ),
)

_COORDINATOR: Final = (
    *_rows(
        Kind.GAUGE,
        Role.COORDINATOR,
        ("hisparse_requests", "state", "requests", "Live requests by state.", "What is everybody waiting for?"),
        (
            "hisparse_requests_held",
            "",
            "requests",
            "Held until an operator resumes them.",
            "Did an operator forget one?",
        ),
        ("hisparse_host_pages", "node state", "pages", "Host pages by state.", "Is the pool full? Does it leak?"),
        ("hisparse_host_page_bytes", "node", "bytes", "Bytes of one host page.", "How much is that?"),
        ("hisparse_workers", "state", "workers", "Workers by state.", "Who is there?"),
        ("hisparse_worker_link_age_seconds", "worker", "seconds", "Time since it was heard.", "Is a worker gone?"),
        ("hisparse_connections", "role", "connections", "Client and admin connections.", "Who is connected?"),
        ("hisparse_journal_failing", "", "", "1 while the journal refuses new work.", "Is its disk full or dying?"),
    ),
    *_rows(
        Kind.COUNTER,
        Role.COORDINATOR,
        ("hisparse_submitted_total", "", "requests", "Requests accepted.", "What is the load?"),
        ("hisparse_refused_total", "code", "requests", "Requests refused, by error code.", "Why were they refused?"),
        ("hisparse_ended_total", "outcome", "requests", "Requests ended, by outcome.", "Do requests succeed?"),
        (
            "hisparse_failed_total",
            "cause",
            "requests",
            "Requests that failed, by cause: fault, lost_tokens, poison, stopped, unknown.",
            "Is it the request, a worker, or us?",
        ),
        ("hisparse_admissions_total", "", "requests", "Stays on workers begun.", "How often is one admitted?"),
        (
            "hisparse_retractions_total",
            "mode reason",
            "requests",
            "Requests taken off their workers: keep or drop, and why.",
            "Which memory forces retraction?",
        ),
        ("hisparse_prompt_tokens_total", "", "tokens", "Prompt tokens accepted.", "How long are prompts?"),
        ("hisparse_tokens_total", "", "tokens", "Tokens received from workers.", "How fast is the cluster?"),
        ("hisparse_repeated_tokens_total", "", "tokens", "Positions known already.", "Is there much replay?"),
        ("hisparse_deliveries_total", "", "messages", "Deliveries to client connections.", "Do clients get tokens?"),
        ("hisparse_stalled_deliveries_total", "", "messages", "Deliveries put off.", "Is a client too slow?"),
        ("hisparse_commands_total", "", "commands", "Commands sent to workers.", "How busy is the control path?"),
        ("hisparse_replayed_commands_total", "", "commands", "Commands sent again.", "Does a link lose?"),
        ("hisparse_reports_total", "", "reports", "Reports from workers.", "Do workers report?"),
        ("hisparse_report_gaps_total", "", "reports", "Reports that came too early.", "Does a link lose?"),
        ("hisparse_audits_total", "", "audits", "Workers compared with the ledger.", "Does the audit run?"),
        (
            "hisparse_audit_differences_total",
            "kind",
            "differences",
            "What two audits in a row found alike: a worker and the ledger disagree.",
            "Does memory leak, or belong to two?",
        ),
        (
            "hisparse_dropped_messages_total",
            "socket reason",
            "messages",
            "Refused messages (unreadable, too large, too many) and connections (no allowed key, no hello, cut off).",
            "Is somebody hostile or outdated?",
        ),
    ),
    *_rows(
        Kind.COUNTER,
        Role.COORDINATOR,
        ("hisparse_journal_commits_total", "", "commits", "Groups written.", "How large are groups?"),
        ("hisparse_journal_records_total", "", "records", "Records written.", "How large are groups?"),
        ("hisparse_journal_written_bytes_total", "", "bytes", "Bytes of records written.", "How fast does it grow?"),
        ("hisparse_journal_errors_total", "", "times", "Groups that could not be written.", "Does its disk fail?"),
    ),
    *_rows(
        Kind.HISTOGRAM,
        Role.COORDINATOR,
        (
            "hisparse_queue_wait_seconds",
            "",
            "seconds",
            "Wait for a place on a worker, each time until admitted.",
            "How long is the queue?",
        ),
        (
            "hisparse_retract_seconds",
            "",
            "seconds",
            "From telling a worker to let a request go to having its memory back.",
            "How fast is pressure relieved?",
        ),
        (
            "hisparse_hand_over_seconds",
            "",
            "seconds",
            "From a prompt's being prefilled elsewhere to its rows being where it is decoded.",
            "What does it cost to prefill elsewhere?",
        ),
        (
            "hisparse_resume_seconds",
            "",
            "seconds",
            "From admitting a request whose rows are there to its running.",
            "What does a retraction cost its request?",
        ),
        (
            "hisparse_time_to_first_token_seconds",
            "",
            "seconds",
            "From submission to a first token at the coordinator.",
            "How long until clients see anything?",
        ),
        (
            "hisparse_inter_token_seconds",
            "",
            "seconds",
            "Between two tokens of a request at the coordinator, pauses of retractions included.",
            "How smooth is the output?",
        ),
        (
            "hisparse_host_page_lifetime_seconds",
            "",
            "seconds",
            "From taking a host page to its being free.",
            "How fast does the pool turn over?",
        ),
        (
            "hisparse_journal_commit_seconds",
            "",
            "seconds",
            "Writing one group, fsync included.",
            "Is the disk what tokens and grants wait for?",
        ),
        (
            "hisparse_command_ack_seconds",
            "",
            "seconds",
            "From sending a command to its acknowledgement.",
            "How late do workers learn of changes?",
        ),
    ),
)

_HTTP: Final = (
    *_rows(
        Kind.GAUGE,
        Role.HTTP,
        ("hisparse_http_requests", "", "requests", "Completions being answered.", "How near is http.requests_max?"),
        ("hisparse_http_connected", "", "", "1 while the coordinator is there.", "Can it answer at all?"),
        ("hisparse_http_connections", "", "connections", "Open connections of clients.", "How near is their limit?"),
    ),
    *_rows(
        Kind.COUNTER,
        Role.HTTP,
        ("hisparse_http_answers_total", "path status", "answers", "Answers by path and status.", "Who is refused?"),
        (
            "hisparse_http_connection_ends_total",
            "reason",
            "connections",
            "Ended connections by why: closed, idle, refused, unread, tls, evicted, stopped, defect.",
            "Do clients fail, or attack? Is there a defect of ours?",
        ),
        ("hisparse_http_disconnects_total", "", "clients", "Left before their answer.", "Do clients give up?"),
        ("hisparse_http_abandoned_total", "", "requests", "Aborted: nobody listened.", "What do those clients cost?"),
    ),
    *_rows(
        Kind.HISTOGRAM,
        Role.HTTP,
        ("hisparse_http_answer_seconds", "", "seconds", "To the end of a completion.", "How long do clients wait?"),
        ("hisparse_http_first_token_seconds", "", "seconds", "To a first token.", "How long until they see anything?"),
    ),
)

TABLE: Final[tuple[Metric, ...]] = (*_EVERY_PROCESS, *_WORKER, *_TRANSFER, *_COORDINATOR, *_HTTP)
BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in TABLE}

assert len(BY_NAME) == len(TABLE)  # a name means one thing


def names_of(role: Role) -> frozenset[str]:
    """What a process of `role` exports."""
    return frozenset(metric.name for metric in TABLE if metric.role in (role, Role.BOTH))


def as_markdown() -> str:
    """The table as docs/metrics.md has it: `python -m metrics.names > docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Written by `python -m metrics.names`; a test holds this page, the table in `metrics/names.py` and what the",
        "processes export equal. `/healthz` answers 503 when only a restart helps, `/readyz` when no work is taken.",
    ]
    titles = {
        Role.BOTH: "Every process",
        Role.WORKER: "Worker",
        Role.COORDINATOR: "Coordinator",
        Role.HTTP: "HTTP front",
    }
    for role, title in titles.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| name | kind | labels | meaning | question it answers |",
            "|---|---|---|---|---|",
        ]
        lines += [_markdown_row(metric) for metric in TABLE if metric.role is role]
    return "\n".join(lines) + "\n"


def _markdown_row(metric: Metric) -> str:
    labels = ", ".join(metric.labels)
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} | {metric.question} |"


if __name__ == "__main__":
    print(as_markdown(), end="")
