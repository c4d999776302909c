"""One worker: what a decode step waits for, what its memories hold, what crosses the link to the host.

Of what is timed on a sample (one step in 64, one wait of a stream in 16), each sample counts for all that it stands
for: rates are seconds per second, and over the rate of steps, seconds per step.
"""

from __future__ import annotations

from typing import Final

from tools.dashboards.grafana import Dashboard, Panel, Query, Row, Variable, View, named

#: What a GPU's link to the host carries one way, bytes per second: PCIe 5.0 x16, less protocol.
LINK_BYTES_PER_S: Final = 55e9

ONE: Final = 'instance=~"$worker"'


def rate(name: str, labels: str = ONE) -> str:
    return f"rate({name}{{{labels}}}[$__rate_interval])"


def of_workers(metric: str, labels: str = ONE) -> str:
    """The rate of a metric, summed over all labels but the worker's. Where one of the operands of an expression is such
    a sum, all are: targets may have labels that no sum has, and series with unlike labels match none."""
    return f"sum by (job, instance) ({rate(metric, labels)})"


def by_position(metric: str) -> str:
    """The rate of what is counted by the row of a draft."""
    return f"sum by (job, instance, position) ({rate(metric)})"


def per_step(seconds: str) -> str:
    return f"({seconds}) / {of_workers('hisparse_worker_steps_total')}"


def by_worker(expr: str, legend: str = "", *, rare: bool = False) -> Query:
    """A series for each worker, under the worker's name."""
    return Query(named(expr), f"{{{{name}}}} {legend}".strip(), rare)


COMPUTE: Final = of_workers("hisparse_worker_compute_seconds_total")
#: Swap-in of the layers that a step waits for; others are copied beside it.
SWAP: Final = of_workers("hisparse_swap_seconds_total", f'{ONE}, stream="compute"')
BACKED_UP: Final = of_workers("hisparse_worker_fence_wait_seconds_total", f'{ONE}, fence="backed_up"')


def quantiles(name: str, *shares: float) -> tuple[Query, ...]:
    """Return quantiles of one histogram, per worker."""
    return tuple(
        by_worker(
            f"histogram_quantile({share}, sum by (job, instance, le) ({rate(f'{name}_bucket')}))",
            f"p{share * 100:.0f}",
        )
        for share in shares
    )


STEPS: Final = Row(
    "Decode steps",
    (
        Panel(
            "Step time",
            "Time of one decode step: between two tokens of every request in the batch. Bad: p99 far above the median "
            "(something interrupts steps), or growth at the same batch size.",
            "s",
            quantiles("hisparse_worker_step_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Steps by duration",
            "How many steps took how long. Bad: two bands: some steps wait for what others do not.",
            "none",
            (
                Query(
                    f"sum by (le) (increase(hisparse_worker_step_seconds_bucket{{{ONE}}}[$__rate_interval]))", "{{le}}"
                ),
            ),
            View.HEATMAP,
        ),
        Panel(
            "Parts of the step time",
            "What the step time is made of: swap-in, other kernels, the wait for earlier rows to be backed up (on "
            "GPUs), and the rest, in which the device has nothing to do. Bad: swap-in above a third; the rest above a "
            "tenth of a step on a GPU: the host is too slow.",
            "s",
            (
                by_worker(per_step(SWAP), "swap-in"),
                by_worker(per_step(f"{COMPUTE} - {SWAP}"), "compute"),
                by_worker(per_step(BACKED_UP), "waits for backup", rare=True),
                by_worker(
                    per_step(f"clamp_min({of_workers('hisparse_worker_step_seconds_sum')} - {COMPUTE}, 0)"),
                    "rest",
                ),
            ),
            View.STACK,
        ),
        Panel(
            "Waiting time per step, by fence",
            "Seconds of waiting per decode step, by fence: copies, the host, or compute itself (sampled). Measured on "
            "GPUs alone. Bad: any fence but sampled at a tenth of the step time.",
            "s",
            (
                by_worker(
                    f"{rate('hisparse_worker_fence_wait_seconds_total')}"
                    f" / ignoring (fence) group_left {rate('hisparse_worker_steps_total')}",
                    "{{fence}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Mean wait, by fence",
            "Mean of the waits that were measured. Bad: three times what it was at the same load.",
            "s",
            (
                by_worker(
                    f"{rate('hisparse_worker_fence_wait_seconds_total')} / {rate('hisparse_worker_fence_waits_total')}",
                    "{{fence}}",
                    rare=True,
                ),
            ),
        ),
    ),
)

OUTPUT: Final = Row(
    "Output",
    (
        Panel(
            "Tokens generated and thrown away",
            "Tokens generated per second, and those decoded past a request's end and thrown away. Bad: surplus above "
            "one in a hundred.",
            "none",
            (
                by_worker(rate("hisparse_worker_tokens_total")),
                by_worker(rate("hisparse_worker_surplus_tokens_total"), "surplus"),
            ),
        ),
        Panel(
            "Drafts accepted, by position",
            "Share of verified drafts that the model drew as well, by row of the step: known tokens come before "
            "drafts. A worker without worker.draft_tokens has none. Bad: the share of the last row below a tenth: "
            "fewer drafts a step would do. Near 0 in the first: the model is not drafted well, so that drafts cost "
            "time.",
            "percentunit",
            (
                by_worker(
                    f"{by_position('hisparse_worker_accepted_tokens_total')}"
                    f" / {by_position('hisparse_worker_drafted_tokens_total')}",
                    "{{position}}",
                ),
            ),
        ),
        Panel(
            "Steps repeated for late masks",
            "Share of rows of decode steps that drew no token, since the mask of a grammar came late; each is computed "
            "again. Bad: above one in a hundred: grammars are too complex, or the worker has too few cores for the "
            "threads that compute masks.",
            "percentunit",
            (
                by_worker(
                    f"{rate('hisparse_worker_late_masks_total')} / ({rate('hisparse_worker_tokens_total')}"
                    f" + {rate('hisparse_worker_late_masks_total')})"
                ),
            ),
        ),
        Panel(
            "Requests per step, and seats",
            "Mean requests per decode step, and seats. Bad: far below the seats while requests are queued: memory, "
            "not compute, is the limit.",
            "none",
            (
                by_worker(
                    f"({of_workers('hisparse_worker_tokens_total')}"
                    f" + {of_workers('hisparse_worker_surplus_tokens_total')}"
                    f" + {of_workers('hisparse_worker_late_masks_total')}"
                    f" - {of_workers('hisparse_worker_accepted_tokens_total')})"
                    f" / {of_workers('hisparse_worker_steps_total')}",
                    "batch",
                ),
                by_worker(f"hisparse_worker_seats{{{ONE}}}", "seats"),
            ),
        ),
        Panel(
            "Requests by state",
            "By state. Bad: parked for more than a moment: grants of host pages come late.",
            "none",
            (by_worker(f"hisparse_worker_requests{{{ONE}}}", "{{state}}"),),
            View.STACK,
        ),
        Panel(
            "Requests admitted, released, faulted",
            "Requests per second taken in, released and faulted; times a request parked or its hot buffer was resized. "
            "Bad: faulted above 0; parked or resized several times per request.",
            "cps",
            tuple(
                by_worker(rate(f"hisparse_worker_{name}_total"), name)
                for name in ("admitted", "released", "faulted", "parked", "resized")
            ),
        ),
    ),
)

MEMORY: Final = Row(
    "Hot buffers",
    (
        Panel(
            "Hit rate",
            "Share of top-k rows found in hot buffers. Bad: below 0.5 for long.",
            "percentunit",
            (
                by_worker(
                    f"{rate('hisparse_worker_hits_total')}"
                    f" / ({rate('hisparse_worker_hits_total')} + {rate('hisparse_worker_misses_total')})",
                ),
            ),
            bad_below=0.5,
        ),
        Panel(
            "Rows loaded per step",
            "Misses of all layers and requests in one step. Bad: times the bytes of a row, over the link's bandwidth, "
            "it comes near the step time.",
            "none",
            (by_worker(f"{rate('hisparse_worker_misses_total')} / {rate('hisparse_worker_steps_total')}"),),
        ),
        Panel(
            "Hot buffers by size",
            "Hot buffers by size: resident, or managed with so many slots. Bad: many of the smallest while device "
            "memory is free; all resident while requests are queued.",
            "none",
            (by_worker(f"hisparse_worker_hot_buffers{{{ONE}}}", "{{size}}"),),
            View.STACK,
        ),
        Panel(
            "Device memory, used and free",
            "Bytes of hot chunks and index pages, used and free. Bad: free at 0 while requests wait.",
            "bytes",
            (
                by_worker(
                    f"hisparse_worker_memory_units{{{ONE}}} * ignoring (state) group_left "
                    f"hisparse_worker_memory_unit_bytes{{{ONE}}}",
                    "{{memory}} {{state}}",
                ),
            ),
            View.STACK,
        ),
    ),
)

LAYERS: Final = Row(
    "Layers",
    (
        Panel(
            "Hit rate by layer",
            "Share of top-k rows found hot, one row per layer; layers that share a selection are alike. Bad: a few "
            "layers far below the others: their selections wander, and hot buffers are sized for the others.",
            "percentunit",
            (
                Query(
                    "sum by (layer) ("
                    + rate("hisparse_swap_hits_total")
                    + ") / (sum by (layer) ("
                    + rate("hisparse_swap_hits_total")
                    + ") + sum by (layer) ("
                    + rate("hisparse_swap_misses_total")
                    + "))",
                    "{{layer}}",
                ),
            ),
            View.ROWS,
        ),
        Panel(
            "Swap-in time by layer",
            "Seconds per decode step, one row per layer. Bad: layers that take several times what others with the same "
            "hit rate take.",
            "s",
            (
                Query(
                    f"sum by (layer) ({rate('hisparse_swap_seconds_total')})"
                    f" / scalar(sum({rate('hisparse_worker_steps_total')}))",
                    "{{layer}}",
                ),
            ),
            View.ROWS,
        ),
        Panel(
            "Rows loaded and evicted",
            "Rows of all layers per second that came into hot buffers from the host, and that made way. Bad: evictions "
            "near loads at a low hit rate: buffers are too small for what is selected.",
            "none",
            (
                by_worker(of_workers("hisparse_swap_misses_total"), "loaded"),
                by_worker(of_workers("hisparse_swap_evictions_total"), "evicted"),
            ),
        ),
    ),
)

LINK: Final = Row(
    "The link to the host",
    (
        Panel(
            "Bytes copied, by purpose",
            "Bytes per second between host and device, by purpose. Bad: near what the link carries one way (the line: "
            "PCIe 5.0 x16); backup above what tokens explain.",
            "Bps",
            (by_worker(rate("hisparse_worker_copied_bytes_total"), "{{direction}} {{purpose}}"),),
            bad_above=LINK_BYTES_PER_S,
        ),
        Panel(
            "Bandwidth while copying",
            "Bytes over the time in which such copies ran; the line is what PCIe 5.0 x16 carries one way. Bad: staging "
            "and loading far below it on a GPU: fewer lanes, or memory of another socket. Backup and swap-in move a "
            "few rows at a time and lie below it by nature.",
            "Bps",
            (
                by_worker(
                    f"{rate('hisparse_worker_copied_bytes_total')} / {rate('hisparse_worker_copy_seconds_total')}",
                    "{{direction}} {{purpose}}",
                ),
            ),
            bad_above=LINK_BYTES_PER_S,
        ),
        Panel(
            "Share of time spent copying",
            "Share of the time in which copies of each purpose ran. Bad: one direction at 1 in all: what is copied "
            "there waits.",
            "percentunit",
            (by_worker(rate("hisparse_worker_copy_seconds_total"), "{{direction}} {{purpose}}"),),
            View.STACK,
        ),
    ),
)

TRANSFERS: Final = Row(
    "Pages to and from other nodes",
    (
        Panel(
            "Bytes verified, by end",
            "Verified bytes of host pages per second, by end. Bad: far below the network while transfers are open.",
            "Bps",
            (by_worker(rate("hisparse_transfer_bytes_total"), "{{end}}", rare=True),),
        ),
        Panel(
            "Open transfers, by end",
            "Transfers under way. Bad: transfers that stay open while no bytes are verified.",
            "none",
            (by_worker(f"hisparse_transfer_open{{{ONE}}}", "{{end}}", rare=True),),
        ),
        Panel(
            "Bytes not yet verified, by end",
            "Bytes of open transfers that are written and not yet verified. Bad: the same for long.",
            "bytes",
            (by_worker(f"hisparse_transfer_in_flight_bytes{{{ONE}}}", "{{end}}", rare=True),),
        ),
        Panel(
            "Failed transfers, by cause",
            "Per second: units whose checksum did not fit, transfers ended early, senders shut out. "
            "Bad: checksums at all.",
            "cps",
            tuple(
                by_worker(rate(f"hisparse_transfer_{name}_total"), f"{{{{end}}}} {words}", rare=True)
                for name, words in (
                    ("refused_units", "checksum"),
                    ("ended_early", "early"),
                    ("shut_out", "shut out"),
                )
            ),
        ),
    ),
)

PROMPTS: Final = Row(
    "Prompts and returns",
    (
        Panel(
            "Prefill time of a prompt",
            "Time to prefill one prompt. Bad: growth at the same prompt lengths; decoding waits meanwhile.",
            "s",
            quantiles("hisparse_worker_prefill_seconds", 0.5, 0.99),
        ),
        Panel(
            "Staging time of a prompt",
            "Time to bring one prompt's rows to the host. Bad: more than prefill itself took.",
            "s",
            quantiles("hisparse_worker_stage_seconds", 0.5, 0.99),
        ),
        Panel(
            "Loading time of a return",
            "Time until a request that returns, or whose buffer became resident, has its index keys and rows again. "
            "Bad: more than staging takes: the link is busy with something else.",
            "s",
            quantiles("hisparse_worker_load_seconds", 0.5, 0.99),
        ),
        Panel(
            "Prompt tokens prefilled",
            "Prompt tokens per second, of passes that ended and of whole prompts. Bad: passes above whole prompts for "
            "long: prompts leave before their end; either above what clients send: prompts are prefilled again after "
            "drops.",
            "none",
            (
                by_worker(rate("hisparse_worker_prompt_pass_tokens_total"), "passes"),
                by_worker(rate("hisparse_worker_prompt_tokens_total"), "whole prompts"),
            ),
        ),
        Panel(
            "Share of time spent on prompts",
            "Share of the time in which the device computed units of prompts. Bad: near 1 for long: more prompts come "
            "than the worker computes.",
            "percentunit",
            (by_worker(rate("hisparse_worker_prompt_seconds_total")),),
        ),
        Panel(
            "Time of a prompt unit",
            "Mean time of one unit of a prompt, one layer over a block of tokens, and a plain decode step. Bad: units "
            "above the plain step while requests decode: a step waits for the whole unit.",
            "s",
            (
                by_worker(
                    f"{rate('hisparse_worker_prompt_seconds_total')} / {rate('hisparse_worker_prompt_units_total')}",
                    "unit",
                ),
                by_worker(f"hisparse_worker_plain_step_seconds{{{ONE}}}", "plain step"),
            ),
        ),
        Panel(
            "Gap and target",
            "Gap between two decode steps with prompts between them, and its target (worker.gap_target_ms; 0: "
            "unbounded). Bad: p99 above 1.25 times the target.",
            "s",
            (
                *quantiles("hisparse_worker_gap_seconds", 0.5, 0.99),
                by_worker(f"hisparse_worker_gap_target_seconds{{{ONE}}}", "target"),
            ),
        ),
        Panel(
            "Prompts waiting, by age",
            "Prompts that wait or are under way, by how long ago they were admitted at least. Bad: some that are older "
            "than 60 s for long, where prompts are short.",
            "none",
            (by_worker(f"hisparse_worker_prompts_waiting{{{ONE}}}", "{{older_than}} s and more"),),
        ),
    ),
)

PROCESS: Final = Row(
    "The process and its link to the coordinator",
    (
        Panel(
            "Time since the decode loop turned",
            "Seconds since the loop turned. Bad: above 30: it hangs.",
            "s",
            (by_worker(f"hisparse_worker_executor_silent_seconds{{{ONE}}}"),),
            bad_above=30,
        ),
        Panel(
            "Turns of the decode loop",
            "Turns per second, busy or idle. Bad: 0.",
            "cps",
            (by_worker(rate("hisparse_worker_executor_beats_total")),),
        ),
        Panel(
            "Welcomed by the coordinator",
            "1 while the coordinator's commands are obeyed. Bad: 0.",
            "none",
            (by_worker(f"hisparse_link_welcomed{{{ONE}}}"),),
            bad_below=1,
        ),
        Panel(
            "Tokens and reports not acknowledged",
            "Tokens in no report, and reports without an acknowledgement. Bad: growth: the coordinator, or its "
            "journal, is behind.",
            "none",
            (
                by_worker(f"hisparse_worker_unreported_tokens{{{ONE}}}", "tokens"),
                by_worker(f"hisparse_link_reports_in_flight{{{ONE}}}", "reports"),
            ),
        ),
        Panel(
            "Resident memory of the process",
            "Resident bytes, pages of the pool that it touched included. Bad: growth without end.",
            "bytes",
            (by_worker(f"process_resident_memory_bytes{{{ONE}}}"),),
        ),
    ),
)

WORKER: Final = Dashboard(
    "hisparse-worker",
    "HiSparse: Worker",
    "One worker: what a step waits for, what its memories hold, what crosses the link to the host.",
    (STEPS, OUTPUT, MEMORY, LAYERS, LINK, PROMPTS, TRANSFERS, PROCESS),
    (Variable("worker", "worker"),),
)
