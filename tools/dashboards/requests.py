"""Fate of requests: how many, how long, and why not."""

from __future__ import annotations

from typing import Final

from tools.dashboards.grafana import Dashboard, Panel, Query, Row, View, named


def quantiles(histogram: str, *shares: float, rare: bool = False) -> tuple[Query, ...]:
    """Return quantiles of one histogram, over all that export it."""
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket[$__rate_interval])))",
            f"p{share * 100:.0f}",
            rare,
        )
        for share in shares
    )


LIFE: Final = Row(
    "Life cycle",
    (
        Panel(
            "Requests accepted, refused, ended",
            "Requests per second. Bad: accepted above ended for long; refused above 0.",
            "reqps",
            (
                Query("sum(rate(hisparse_submitted_total[$__rate_interval]))", "accepted"),
                Query("sum(rate(hisparse_refused_total[$__rate_interval]))", "refused"),
                Query("sum by (outcome) (rate(hisparse_ended_total[$__rate_interval]))", "{{outcome}}"),
            ),
        ),
        Panel(
            "Live requests by state",
            "Live requests. Bad: QUEUED or RETRACTED grow; PREFILLING stays high (prompts wait for the prefill slab).",
            "none",
            (Query("sum by (state) (hisparse_requests)", "{{state}}"),),
            View.STACK,
        ),
        Panel(
            "Held requests",
            "Requests that wait until an operator resumes them. Bad: more than you know of: they keep host pages.",
            "none",
            (Query("sum(hisparse_requests_held)", "held"),),
            View.NUMBER,
        ),
        Panel(
            "Admissions per request",
            "Admissions to workers per accepted request. Bad: above 1.5: requests are pushed off and come back.",
            "none",
            (
                Query(
                    "sum(rate(hisparse_admissions_total[$__rate_interval]))"
                    " / sum(rate(hisparse_submitted_total[$__rate_interval]))",
                    "admissions",
                ),
            ),
            bad_above=1.5,
        ),
    ),
)

REASONS: Final = Row(
    "Refused, retracted, failed",
    (
        Panel(
            "Refused requests by error code",
            "Per second, by error code: capacity (can never fit, or the queue is full), unavailable (stopping, or the "
            "journal fails), bad_input. Bad: capacity at the usual load; unavailable at all.",
            "reqps",
            (Query("sum by (code) (rate(hisparse_refused_total[$__rate_interval]))", "{{code}}", rare=True),),
        ),
        Panel(
            "Retractions by mode and reason",
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
            "Failed requests by cause",
            "Requests that ended FAILED, per second, by cause: fault (a worker could not go on with it), poison (it "
            "kills workers), lost_tokens, stopped; and what workers call faulted. Bad: above 0; `hisparse request ID` "
            "has the reason.",
            "reqps",
            (
                Query("sum by (cause) (rate(hisparse_failed_total[$__rate_interval]))", "{{cause}}", rare=True),
                Query("sum(rate(hisparse_worker_faulted_total[$__rate_interval]))", "faulted"),
            ),
        ),
    ),
)

LATENCY: Final = Row(
    "How long?",
    (
        Panel(
            "Time to first token",
            "From submission to a first token at the coordinator: waiting, prefill, staging. Clients see it one commit "
            "of the journal later. Bad: above what clients were promised; see which of the three it is.",
            "s",
            quantiles("hisparse_time_to_first_token_seconds", 0.5, 0.99),
        ),
        Panel(
            "Wait for a place on a worker",
            "Until a request that may run is admitted to a worker, each time. Bad: above what clients were promised; "
            "growth while seats are free: memory, not seats, is short.",
            "s",
            quantiles("hisparse_queue_wait_seconds", 0.5, 0.99),
        ),
        Panel(
            "Prefill time of a prompt",
            "All workers: most of the time to the first token of a request that did not wait. Bad: growth at the same "
            "prompt lengths.",
            "s",
            quantiles("hisparse_worker_prefill_seconds", 0.5, 0.99),
        ),
        Panel(
            "Time between two tokens",
            "As tokens reach the coordinator, pauses of retracted requests included. Bad: p99 far above the median "
            "while steps are even: retractions, a busy coordinator, a lossy link.",
            "s",
            quantiles("hisparse_inter_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Time of a decode step",
            "All workers: what a running request waits for its next token. Bad: p99 far above the median.",
            "s",
            quantiles("hisparse_worker_step_seconds", 0.5, 0.95, 0.99),
        ),
    ),
)

RETURNS: Final = Row(
    "Retraction, handover, return",
    (
        Panel(
            "Time of a retraction",
            "From telling a worker to let a request go to having its memory back: one step and what is in flight. Bad: "
            "seconds: the worker hangs, or its link does.",
            "s",
            quantiles("hisparse_retract_seconds", 0.5, 0.99),
        ),
        Panel(
            "Time of a handover",
            "Where some workers only prefill: from a prompt's being prefilled to its rows being where it is decoded. "
            "Bad: as long as a prefill: the link between nodes is the limit.",
            "s",
            quantiles("hisparse_hand_over_seconds", 0.5, 0.99, rare=True),
        ),
        Panel(
            "Time of a resumption",
            "From admitting a request whose rows are there to its running: loading index keys, and rows if resident. "
            "Bad: as long as a prefill.",
            "s",
            quantiles("hisparse_resume_seconds", 0.5, 0.99),
        ),
        Panel(
            "Lifetime of a host page",
            "From taken to free, across owners. Bad: growth at the same load: held requests, or quarantine.",
            "s",
            quantiles("hisparse_host_page_lifetime_seconds", 0.5, 0.99),
        ),
    ),
)

TRAFFIC: Final = Row(
    "Tokens and deliveries",
    (
        Panel(
            "Tokens of prompts and outputs",
            "Prompt tokens accepted and tokens generated per second. Bad: generated falls while requests run.",
            "none",
            (
                Query("sum(rate(hisparse_prompt_tokens_total[$__rate_interval]))", "prompt"),
                Query("sum(rate(hisparse_tokens_total[$__rate_interval]))", "generated"),
            ),
        ),
        Panel(
            "Tokens reported again",
            "Tokens per second that were known already. Bad: steady: links or workers are lost often.",
            "none",
            (Query("sum(rate(hisparse_repeated_tokens_total[$__rate_interval]))", "repeated"),),
        ),
        Panel(
            "Deliveries to clients",
            "Messages per second to clients, and those put off since a client reads too slowly. Bad: put off near all.",
            "cps",
            (
                Query("sum(rate(hisparse_deliveries_total[$__rate_interval]))", "delivered"),
                Query("sum(rate(hisparse_stalled_deliveries_total[$__rate_interval]))", "put off"),
            ),
        ),
        Panel(
            "Connections by role",
            "Clients and admins. Bad: near coordinator.connections_max.",
            "none",
            (Query("sum by (role) (hisparse_connections)", "{{role}}"),),
        ),
    ),
)

FRONT: Final = Row(
    "HTTP front",
    (
        Panel(
            "Answers by path and status",
            "Answers per second. Bad: 5xx; 429 at the usual load.",
            "reqps",
            (
                Query(
                    "sum by (path, status) (rate(hisparse_http_answers_total[$__rate_interval]))",
                    "{{path}} {{status}}",
                ),
            ),
        ),
        Panel(
            "Completions being answered",
            "Completions that are under way at each HTTP front. Bad: near http.requests_max.",
            "none",
            (Query(named("hisparse_http_requests"), "{{name}} {{instance}}"),),
        ),
        Panel(
            "Time to first token over HTTP",
            "As HTTP clients see it. Bad: far above what the coordinator sees: tokenization, or the journal.",
            "s",
            quantiles("hisparse_http_first_token_seconds", 0.5, 0.99),
        ),
        Panel(
            "Time of a whole answer",
            "To the end of a completion. Bad: growth at the same lengths.",
            "s",
            quantiles("hisparse_http_answer_seconds", 0.5, 0.99),
        ),
        Panel(
            "Clients that left before their answer",
            "Clients per second that left before their answer, and requests aborted after their last client left. Bad: "
            "a steady rate: clients give up.",
            "cps",
            (
                Query("sum(rate(hisparse_http_disconnects_total[$__rate_interval]))", "left"),
                Query("sum(rate(hisparse_http_abandoned_total[$__rate_interval]))", "aborted"),
            ),
        ),
    ),
)

REQUESTS: Final = Dashboard(
    "hisparse-requests",
    "HiSparse: Requests",
    "What happens to requests: how many, how long, and why not.",
    (LIFE, LATENCY, RETURNS, REASONS, TRAFFIC, FRONT),
)
