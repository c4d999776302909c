"""What happens to requests: how many, how long, and why not."""

from __future__ import annotations

from typing import Final

from metrics.dashboards.grafana import Dashboard, Panel, Query, Row, View

LIFE: Final = Row(
    "Life cycle",
    (
        Panel(
            "Accepted, refused, ended",
            "Requests per second. Bad: accepted above ended for long; refused above 0.",
            "reqps",
            (
                Query("sum(rate(hisparse_submitted_total[$__rate_interval]))", "accepted"),
                Query("sum(rate(hisparse_refused_total[$__rate_interval]))", "refused"),
                Query("sum by (outcome) (rate(hisparse_ended_total[$__rate_interval]))", "{{outcome}}"),
            ),
        ),
        Panel(
            "By state",
            "Live requests. Bad: QUEUED or RETRACTED grow; PREFILLING stays high (prompts wait for the prefill slab).",
            "none",
            (Query("sum by (state) (hisparse_requests)", "{{state}}"),),
            View.STACK,
        ),
        Panel(
            "Held",
            "Requests that wait until an operator resumes them. Bad: more than you know of: they keep host pages.",
            "none",
            (Query("sum(hisparse_requests_held)", "held"),),
            View.NUMBER,
        ),
        Panel(
            "Stays per request",
            "Admissions to workers per accepted request. Bad: above 1.5: requests are pushed off and come back.",
            "none",
            (
                Query(
                    "sum(rate(hisparse_admissions_total[$__rate_interval]))"
                    " / sum(rate(hisparse_submitted_total[$__rate_interval]))",
                    "stays",
                ),
            ),
            bad_above=1.5,
        ),
    ),
)

REASONS: Final = Row(
    "Why not?",
    (
        Panel(
            "Refusals",
            "Per second, by error code: capacity (can never fit, or the queue is full), unavailable (stopping, or the "
            "journal fails), bad_input. Bad: capacity at the usual load; unavailable at all.",
            "reqps",
            (Query("sum by (code) (rate(hisparse_refused_total[$__rate_interval]))", "{{code}}", rare=True),),
        ),
        Panel(
            "Retractions",
            "Per second, by mode and reason. Bad: drop, since its prompt is prefilled again; gpu_memory and host_pages "
            "at half the rate of admissions.",
            "reqps",
            (
                Query(
                    "sum by (mode, reason) (rate(hisparse_retractions_total[$__rate_interval]))",
                    "{{mode}} {{reason}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Failed",
            "Requests that ended FAILED, per second, and those that a worker could not go on with. Bad: above 0; "
            "`hisparse request ID` has the reason.",
            "reqps",
            (
                Query('sum(rate(hisparse_ended_total{outcome="FAILED"}[$__rate_interval]))', "failed", rare=True),
                Query("sum(rate(hisparse_worker_faulted_total[$__rate_interval]))", "faulted"),
            ),
        ),
    ),
)

LATENCY: Final = Row(
    "How long?",
    (
        Panel(
            "Prefill of a prompt",
            "All workers: most of the time to the first token of a request that did not wait. Bad: above what clients "
            "were promised.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    "(rate(hisparse_worker_prefill_seconds_bucket[$__rate_interval])))",
                    f"p{share * 100:.0f}",
                )
                for share in (0.5, 0.99)
            ),
        ),
        Panel(
            "Between two tokens",
            "Decode steps of all workers: what a request waits for its next token. Bad: p99 far above the median.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    "(rate(hisparse_worker_step_seconds_bucket[$__rate_interval])))",
                    f"p{share * 100:.0f}",
                )
                for share in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            "Waiting requests for each that starts",
            "Queued requests over admissions per second: roughly the seconds that a new one waits. Bad: above what "
            "clients were promised.",
            "s",
            (
                Query(
                    'sum(hisparse_requests{state="QUEUED"}) / sum(rate(hisparse_admissions_total[$__rate_interval]))',
                    "estimated wait",
                    rare=True,
                ),
            ),
        ),
    ),
)

TRAFFIC: Final = Row(
    "Tokens and deliveries",
    (
        Panel(
            "Tokens",
            "Prompt tokens accepted and tokens generated per second. Bad: generated falls while requests run.",
            "none",
            (
                Query("sum(rate(hisparse_prompt_tokens_total[$__rate_interval]))", "prompt"),
                Query("sum(rate(hisparse_tokens_total[$__rate_interval]))", "generated"),
            ),
        ),
        Panel(
            "Repeated tokens",
            "Tokens per second that were known already. Bad: steady: links or workers are lost often.",
            "none",
            (Query("sum(rate(hisparse_repeated_tokens_total[$__rate_interval]))", "repeated"),),
        ),
        Panel(
            "Deliveries",
            "Messages per second to clients, and those put off since a client reads too slowly. Bad: put off near all.",
            "cps",
            (
                Query("sum(rate(hisparse_deliveries_total[$__rate_interval]))", "delivered"),
                Query("sum(rate(hisparse_stalled_deliveries_total[$__rate_interval]))", "put off"),
            ),
        ),
        Panel(
            "Connections",
            "Clients and admins. Bad: near coordinator.connections_max.",
            "none",
            (Query("sum by (role) (hisparse_connections)", "{{role}}"),),
        ),
    ),
)

REQUESTS: Final = Dashboard(
    "hisparse-requests",
    "HiSparse: Requests",
    "What happens to requests: how many, how long, and why not.",
    (LIFE, REASONS, LATENCY, TRAFFIC),
)
