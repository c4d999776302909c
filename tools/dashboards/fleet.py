"""Is the cluster healthy, and where is the pressure?"""

from __future__ import annotations

from typing import Final

from tools.dashboards.grafana import Dashboard, Panel, Query, Row, View, named

HEALTH: Final = Row(
    "Is it healthy?",
    (
        Panel(
            "Workers by state",
            "Workers by state, as the coordinator sees them. Bad: disconnected; draining past its deadline.",
            "none",
            (Query("sum by (state) (hisparse_workers)", "{{state}}"),),
            View.NUMBER,
        ),
        Panel(
            "Ranks of groups by state",
            "Ranks of each group by state. Bad: missing above 0 for longer than a start takes: no request is placed on "
            "any rank of that group.",
            "none",
            (Query("sum by (group, state) (hisparse_group_ranks)", "{{group}} {{state}}", rare=True),),
            View.NUMBER,
        ),
        Panel(
            "Alerts firing",
            "Alerts of this project that fire now; docs/runbook.md has a section for each. Bad: anything but 0.",
            "none",
            (Query('count(ALERTS{alertname=~"HiSparse.*", alertstate="firing"}) or vector(0)', "firing"),),
            View.NUMBER,
            bad_above=1,
        ),
        Panel(
            "Tokens per second",
            "Tokens per second that reached the coordinator. Bad: 0 while requests run; a step down without less load.",
            "none",
            (Query("sum(rate(hisparse_tokens_total[$__rate_interval]))", "tokens/s"),),
            span=2,
        ),
        Panel(
            "Live requests by state",
            "Live requests by state. Bad: QUEUED grows and does not shrink; RELEASING or RETRACTING stays (a worker "
            "does not let go); forgotten held requests.",
            "none",
            (Query("sum by (state) (hisparse_requests)", "{{state}}"), Query("sum(hisparse_requests_held)", "held")),
            View.STACK,
            span=2,
        ),
        Panel(
            "Ended requests by outcome",
            "Requests per second by outcome. Bad: FAILED above 0.",
            "reqps",
            (Query("sum by (outcome) (rate(hisparse_ended_total[$__rate_interval]))", "{{outcome}}"),),
            span=2,
        ),
    ),
)

PRESSURE: Final = Row(
    "Where is the pressure?",
    (
        Panel(
            "Host pages by state",
            "Pages of each node by state. Bad: free near 0 (requests wait, then lose their rows); quarantined that "
            "stays (the exit of a process is not proved).",
            "none",
            (Query("sum by (node, state) (hisparse_host_pages)", "{{node}} {{state}}"),),
            View.STACK,
        ),
        Panel(
            "Prompt tokens reused",
            "Share of prompt tokens whose rows were reused, at admission. Bad: far below what clients repeat; "
            "docs/runbook.md says why hits may be low.",
            "percentunit",
            (
                Query(
                    "sum(rate(hisparse_prefix_tokens_total[$__rate_interval]))"
                    " / sum(rate(hisparse_prefix_asked_tokens_total[$__rate_interval]))",
                    "reused",
                ),
            ),
        ),
        Panel(
            "Cached pages and evictions",
            "Host pages that only the cache holds, and cached pages per second that made room for others. Bad: "
            "evictions at a steady rate while hits are low: the pool is too small for what is repeated.",
            "none",
            (
                Query('sum by (node) (hisparse_host_pages{state="cached"})', "{{node}} cached"),
                Query("sum(rate(hisparse_prefix_pages_evicted_total[$__rate_interval]))", "evicted/s"),
            ),
        ),
        Panel(
            "Batches of KV events",
            "Batches per second for routers, and those dropped. Bad: any dropped: routers do not know what is cached.",
            "cps",
            (
                Query("sum(rate(hisparse_kv_event_batches_total[$__rate_interval]))", "batches"),
                Query("sum(rate(hisparse_kv_event_batches_dropped_total[$__rate_interval]))", "dropped"),
            ),
        ),
        Panel(
            "Device memory in use",
            "Used share of hot chunks and index pages of each worker. Bad: one memory full while the other is half "
            "empty: hot buffers are too large or too small for these contexts.",
            "percentunit",
            (
                Query(
                    named(
                        'sum by (job, instance, memory) (hisparse_worker_memory_units{state="used"})'
                        " / sum by (job, instance, memory) (hisparse_worker_memory_units)"
                    ),
                    "{{name}} {{memory}}",
                ),
            ),
            bad_above=0.95,
        ),
        Panel(
            "Retractions and admissions",
            "Requests per second taken off their workers: keep (host rows stay) or drop (prefilled again), and why. "
            "Bad: gpu_memory or host_pages at half the rate of admissions; any steady drop.",
            "reqps",
            (
                Query(
                    "sum by (mode, reason) (rate(hisparse_retractions_total[$__rate_interval]))", "{{mode}} {{reason}}"
                ),
                Query("sum(rate(hisparse_admissions_total[$__rate_interval]))", "admissions"),
            ),
        ),
        Panel(
            "Hit rate",
            "Share of top-k rows found in hot buffers. Bad: below 0.5 for long: steps wait for the link to the host.",
            "percentunit",
            (
                Query(
                    named(
                        "rate(hisparse_worker_hits_total[$__rate_interval]) / (rate(hisparse_worker_hits_total"
                        "[$__rate_interval]) + rate(hisparse_worker_misses_total[$__rate_interval]))"
                    ),
                    "{{name}}",
                ),
            ),
            bad_below=0.5,
        ),
        Panel(
            "Step time",
            "Median decode step of each worker: the time between two tokens of a request. Bad: one worker far above "
            "the others; growth at the same batch size.",
            "s",
            (
                Query(
                    named(
                        "histogram_quantile(0.5, sum by (job, instance, le) "
                        "(rate(hisparse_worker_step_seconds_bucket[$__rate_interval])))"
                    ),
                    "{{name}}",
                ),
            ),
        ),
    ),
)

FLOORS: Final = Row(
    "Do hot buffers pay?",
    (
        Panel(
            "Hot floor of each worker",
            "Smallest hot size that policy gives on a worker, in slots; 0: resident alone. Bad: it goes to and fro; "
            "0 for long: on this load a miss costs more than the room that it saves, docs/operations.md says why.",
            "none",
            (Query("hisparse_hot_floor_slots", "{{worker}}"),),
        ),
        Panel(
            "Step time at the hot floor",
            "Decode step of each worker, as observed and as the model of steps predicts it. Bad: the two far apart for "
            "long: floors are chosen by a wrong model.",
            "s",
            (Query("hisparse_hot_floor_step_seconds", "{{worker}} {{kind}}"),),
        ),
        Panel(
            "Tokens per second, chosen and best floor",
            "What the model of steps promises of each worker at the chosen hot floor and at the best one. Bad: chosen "
            "below best for long: something holds the floor where it is.",
            "none",
            (Query("hisparse_hot_floor_tokens_per_second", "{{worker}} {{floor}}"),),
        ),
    ),
)

CONTROL: Final = Row(
    "Control path and journal",
    (
        Panel(
            "Time until a command is acknowledged",
            "From sending a command to a worker to its acknowledgement, which comes at a step boundary. Bad: far "
            "above the step time: the worker or its link is slow; grants come late and requests park.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    "(rate(hisparse_command_ack_seconds_bucket[$__rate_interval])))",
                    f"p{share * 100:.0f}",
                )
                for share in (0.5, 0.99)
            ),
        ),
        Panel(
            "Time of a journal commit",
            "Time of one group commit, fsync included; tokens and grants wait for it. Bad: p99 above 0.1 s.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    "(rate(hisparse_journal_commit_seconds_bucket[$__rate_interval])))",
                    f"p{share * 100:.0f}",
                )
                for share in (0.5, 0.99)
            ),
            bad_above=0.1,
        ),
        Panel(
            "Bytes written to the journal",
            "Bytes per second. Bad: growth without load.",
            "Bps",
            (Query("sum(rate(hisparse_journal_written_bytes_total[$__rate_interval]))", "written"),),
        ),
        Panel(
            "Journal records per commit",
            "Records that one commit makes durable. Bad: thousands: the disk does not keep up.",
            "none",
            (
                Query(
                    "sum(rate(hisparse_journal_records_total[$__rate_interval]))"
                    " / sum(rate(hisparse_journal_commits_total[$__rate_interval]))",
                    "records",
                ),
            ),
        ),
        Panel(
            "Journal failures",
            "Groups per second that could not be written, and whether new work is refused. Bad: anything but 0.",
            "none",
            (
                Query("sum(rate(hisparse_journal_errors_total[$__rate_interval]))", "errors/s"),
                Query("max(hisparse_journal_failing)", "refusing"),
            ),
            bad_above=0.001,
        ),
    ),
)

TRUST: Final = Row(
    "Links, audit, processes",
    (
        Panel(
            "Time since a worker was heard",
            "Seconds since the coordinator heard of each worker; heartbeats come twice a second. Bad: above 5.",
            "s",
            (Query("hisparse_worker_link_age_seconds", "{{worker}}"),),
            bad_above=5,
        ),
        Panel(
            "Standbys that are ready",
            "Of each worker that is to have a standby: 1 while it is ready. Bad: 0 for minutes: the worker's death "
            "would cost a whole start.",
            "short",
            (Query("hisparse_worker_standbys_ready", "{{worker}}", rare=True),),
        ),
        Panel(
            "Weights that are kept",
            "Of each worker that found a keeper: 1 while its weights stay when it dies. Bad: 0: its next start loads "
            "them.",
            "short",
            (Query(named("hisparse_worker_weights_kept"), "{{name}}", rare=True),),
        ),
        Panel(
            "Links dropped, messages repeated",
            "Links that ended, by reason, and messages sent again or too early. Bad: a steady rate: a link loses "
            "messages, or a process is too slow to read them.",
            "cps",
            (
                Query(
                    "sum by (reason) (rate(hisparse_link_drops_total[$__rate_interval]))",
                    "dropped: {{reason}}",
                    rare=True,
                ),
                Query("sum(rate(hisparse_replayed_commands_total[$__rate_interval]))", "commands again"),
                Query("sum(rate(hisparse_link_replayed_reports_total[$__rate_interval]))", "reports again"),
                Query("sum(rate(hisparse_report_gaps_total[$__rate_interval]))", "gaps in reports"),
                Query("sum(rate(hisparse_link_command_gaps_total[$__rate_interval]))", "gaps in commands"),
            ),
        ),
        Panel(
            "Audits and differences",
            "Workers compared with the ledger per second, and differences so far. Bad: no audits; any difference.",
            "none",
            (
                Query("sum(rate(hisparse_audits_total[$__rate_interval]))", "audits/s"),
                Query("sum by (kind) (hisparse_audit_differences_total)", "{{kind}}", rare=True),
            ),
        ),
        Panel(
            "Dropped messages by socket",
            "Messages per second that were unreadable, too large or out of role, by socket. Bad: any: an outdated or "
            "hostile peer.",
            "cps",
            (
                Query(
                    "sum by (socket, reason) (rate(hisparse_dropped_messages_total[$__rate_interval]))",
                    "{{socket}} {{reason}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Resident memory by process",
            "Of each process; a worker's holds the pages of the pool that it has touched. Bad: growth without end.",
            "bytes",
            (Query(named("process_resident_memory_bytes"), "{{name}} {{instance}}"),),
        ),
        Panel(
            "CPU cores by process",
            "Cores used by each process. Bad: the coordinator near 1: it is one thread.",
            "none",
            (Query(named("rate(process_cpu_seconds_total[$__rate_interval])"), "{{name}} {{instance}}"),),
        ),
    ),
)

FLEET: Final = Dashboard(
    "hisparse-fleet",
    "HiSparse: Fleet",
    "Is the cluster healthy, and where is the pressure?",
    (HEALTH, PRESSURE, FLOORS, CONTROL, TRUST),
)
