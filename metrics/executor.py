"""What a worker's executor exports of its counters, and swap-in by layer."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import Final

from metrics.families import Metric, counter, gauge, histogram
from metrics.state import PROMPT_AGES_S, WARM_STARTS, IntArray, SwapTotals, WorkerCounters
from protocol.units import SEAT_ROWS_MAX


def _waiting_by_age(counters: WorkerCounters) -> dict[str, float]:
    now, since = monotonic(), counters.prompts_since
    return {str(age): sum(now - it >= age for it in since) for age in PROMPT_AGES_S}


def _copied_bytes(counters: WorkerCounters) -> dict[tuple[str, str], float]:
    return {
        ("to_host", "stage"): counters.staged_bytes,
        ("to_host", "backup"): counters.backed_up_bytes,
        ("to_device", "swap"): counters.swapped_bytes,
        ("to_device", "preload"): counters.preloaded_bytes,
        ("to_device", "refill"): counters.refilled_bytes,
    }


def _copy_seconds(counters: WorkerCounters) -> dict[tuple[str, str], float]:
    return {
        ("to_host", "stage"): counters.staging.seconds,
        ("to_host", "backup"): counters.backing_up.seconds,
        ("to_device", "swap"): sum(counters.swap.seconds),
        ("to_device", "preload"): counters.preloading.seconds,
        ("to_device", "refill"): counters.refilling.seconds,
    }


def _layers(swap: SwapTotals) -> list[str]:
    """Numbers of the layers that select, of one width, so that series sort."""
    width = len(str(len(swap.group_of_layer) - 1))
    return [f"{layer:0{width}}" for layer in swap.selecting]


def _by_layer(swap: SwapTotals, counts: IntArray) -> dict[str, float]:
    """Each layer's counts of its index group."""
    return dict(zip(_layers(swap), swap.by_layer(counts), strict=True))


def _by_position(drafts: Counter[int]) -> dict[str, float]:
    """Of all places that a step may have, so that a series begins at 0."""
    return {str(place): drafts[place] for place in range(1, SEAT_ROWS_MAX)}


def _swap_seconds(swap: SwapTotals) -> dict[tuple[str, str], float]:
    """By layer and stream: a step waits for the first layer of a group; the others are copied beside it."""
    groups, layers = swap.group_of_layer, swap.selecting
    streams = ["compute" if groups.index(groups[layer]) == layer else "swap" for layer in layers]
    seconds = [swap.seconds[layer] for layer in layers]
    return dict(zip(zip(_layers(swap), streams, strict=True), seconds, strict=True))


EXECUTOR_METRICS: Final[tuple[Metric[WorkerCounters], ...]] = (
    gauge(
        "hisparse_worker_executor_silent_seconds",
        "seconds",
        "Time since the decode loop turned.",
        "Does it hang?",
        lambda counters: monotonic() - counters.beat_at,
    ),
    counter(
        "hisparse_worker_executor_beats_total",
        "turns",
        "Turns of the decode loop.",
        "Does the loop turn?",
        lambda it: it.beats,
    ),
    counter("hisparse_worker_steps_total", "steps", "Decode steps.", "Does it decode?", lambda it: it.steps),
    counter(
        "hisparse_worker_tokens_total", "tokens", "Tokens generated.", "How fast is this worker?", lambda it: it.tokens
    ),
    counter(
        "hisparse_worker_surplus_tokens_total",
        "tokens",
        "Decoded past a request's end.",
        "What does lookahead cost?",
        lambda it: it.surplus_tokens,
    ),
    counter(
        "hisparse_worker_late_masks_total",
        "rows",
        "Rows of steps that drew no token, since the mask of their grammar came late; each is computed again.",
        "Do grammars slow requests down?",
        lambda it: it.late_masks,
    ),
    counter(
        "hisparse_worker_drafted_tokens_total",
        "tokens",
        "Drafts of the model's draft layer that steps verified, by row of the step, 1 to 4: known tokens come before "
        "drafts.",
        "How much is drafted?",
        lambda it: _by_position(it.drafted),
        labels="position",
    ),
    counter(
        "hisparse_worker_accepted_tokens_total",
        "tokens",
        "Drafts that were what the model drew, likewise.",
        "Do drafts pay? Would fewer a step do?",
        lambda it: _by_position(it.accepted),
        labels="position",
    ),
    gauge(
        "hisparse_worker_draft_tokens",
        "tokens",
        "Tokens drafted for each request of the step launched last: worker.draft_tokens, or what auto chose.",
        "How many drafts pay?",
        lambda it: it.draft_tokens,
    ),
    counter(
        "hisparse_worker_draft_switches_total",
        "times",
        "Times that worker.draft_tokens auto chose another number; trials of other numbers are not counted.",
        "Does the choice swing?",
        lambda it: it.draft_switches,
    ),
    counter(
        "hisparse_worker_prompt_tokens_total",
        "tokens",
        "Prompt tokens prefilled, counted when the whole prompt is.",
        "How much of it is prefill?",
        lambda it: it.prompt_tokens,
    ),
    counter(
        "hisparse_worker_prompt_pass_tokens_total",
        "tokens",
        "Prompt tokens of passes that ended, of prompts that left before their end too.",
        "How fast does this worker compute prompts?",
        lambda it: it.prompt_pass_tokens,
    ),
    counter(
        "hisparse_worker_prompt_units_total",
        "units",
        "Units of prompts: one layer over a block of prompt tokens each.",
        "How finely is prompt work cut?",
        lambda it: it.prompt_units,
    ),
    counter(
        "hisparse_worker_prompt_split_units_total",
        "units",
        "Units of passes that the ranks of a group split, on the rank that has the prompts and on those that help.",
        "Do ranks without prompts help the others?",
        lambda counters: counters.split_units,
    ),
    counter(
        "hisparse_worker_prompt_seconds_total",
        "seconds",
        "Time of units of prompts on the device.",
        "Which share of the time do prompts take?",
        lambda it: it.prompt_s,
    ),
    gauge(
        "hisparse_worker_prompts_waiting",
        "prompts",
        "Prompts that wait or are under way, and were admitted so many seconds ago or earlier.",
        "Do prompts pile up?",
        _waiting_by_age,
        labels="older_than",
    ),
    gauge(
        "hisparse_worker_prompt_wait_seconds",
        "seconds",
        "Time since the oldest of these prompts was admitted; 0: there is none.",
        "How long does a first token take now?",
        lambda it: it.prompts_waiting[1],
    ),
    gauge(
        "hisparse_worker_gap_target_seconds",
        "seconds",
        "Target of the time between two decode steps with prompts between them, worker.gap_target_ms; 0: unbounded.",
        "How much may prompts delay decoding?",
        lambda it: it.gap_target_s,
    ),
    gauge(
        "hisparse_worker_plain_step_seconds",
        "seconds",
        "A decode step without prompts before it, as the worker measures it; 0: none was measured.",
        "What is the smallest gap?",
        lambda it: it.plain_step_s,
    ),
    gauge(
        "hisparse_worker_gap_target_too_small",
        "",
        "1: the target of gaps is set below a plain step, which no gap can hold.",
        "Is worker.gap_target_ms too small?",
        lambda it: it.gap_target_too_small,
    ),
    counter(
        "hisparse_worker_copied_bytes_total",
        "bytes",
        "Bytes between host and device: stage, backup; swap, preload, refill.",
        "What fills the link to the host?",
        _copied_bytes,
        labels="direction purpose",
    ),
    counter(
        "hisparse_worker_copy_seconds_total",
        "seconds",
        "Time in which such copies ran; of swap, one step in 64 is timed and stands for all.",
        "How fast are copies? What keeps the link busy?",
        _copy_seconds,
        labels="direction purpose",
    ),
    counter(
        "hisparse_worker_compute_seconds_total",
        "seconds",
        "Decode steps on the device, swap-in included; one in 64 is timed and stands for all.",
        "How much of a step is the device at work?",
        lambda it: it.computing_s,
    ),
    counter(
        "hisparse_worker_admitted_total",
        "requests",
        "Requests admitted.",
        "How many stays were there?",
        lambda it: it.admitted,
    ),
    counter(
        "hisparse_worker_released_total",
        "requests",
        "Requests whose memory was released.",
        "Does memory come back?",
        lambda it: it.released,
    ),
    counter(
        "hisparse_worker_faulted_total",
        "requests",
        "Requests that could not go on.",
        "Do requests fail here?",
        lambda it: it.faulted,
    ),
    counter(
        "hisparse_worker_parked_total",
        "times",
        "Times a request ran out of granted pages.",
        "Are grants late?",
        lambda it: it.parked,
    ),
    counter(
        "hisparse_worker_resized_total", "times", "Hot buffers resized.", "Does policy thrash?", lambda it: it.resized
    ),
    counter(
        "hisparse_worker_warm_starts_total",
        "requests",
        (
            "Contexts longer than their hot buffer that came from host pages: warm, with the rows that "
            "their last top-k names; cold, without, for it was not known, or refused, unreadable."
        ),
        "Do resumed requests wait for their first steps?",
        lambda it: {outcome: it.warm_starts[outcome] for outcome in WARM_STARTS},
        labels="outcome",
    ),
    counter(
        "hisparse_worker_fence_wait_seconds_total",
        "seconds",
        "Measured time waited for a fence; inline streams never wait.",
        "What does a step wait for: the host, copies, compute?",
        lambda it: dict(it.fence_waits.seconds),
        labels="fence",
    ),
    counter(
        "hisparse_worker_fence_waits_total",
        "waits",
        (
            "Measured waits for a fence: all of the host; of a stream one in 16, which stands for all; none "
            "inside a graph."
        ),
        "How long is one wait?",
        lambda it: dict(it.fence_waits.samples),
        labels="fence",
    ),
    histogram(
        "hisparse_worker_step_seconds", "Time of one decode step.", "How long between two tokens?", lambda it: it.step_s
    ),
    histogram(
        "hisparse_worker_gap_seconds",
        "Gap between two decode steps that a decoding request saw beside prompts.",
        "How much do prompts delay decoding?",
        lambda it: it.gap_s,
    ),
    histogram(
        "hisparse_worker_prefill_seconds",
        "Prefill of one prompt.",
        "How long to the first token?",
        lambda it: it.prefill_s,
    ),
    histogram(
        "hisparse_worker_stage_seconds",
        "Staging of one prompt to the host.",
        "Is staging in the way?",
        lambda it: it.stage_s,
    ),
    histogram(
        "hisparse_worker_load_seconds",
        "Loading what a resumed or grown request needs.",
        "What does it cost to come back?",
        lambda it: it.load_s,
    ),
)

SWAP_METRICS: Final[tuple[Metric[SwapTotals], ...]] = (
    counter(
        "hisparse_worker_hits_total",
        "rows",
        "Top-k rows found in hot buffers; layers that share a selection count once.",
        "What is the hit rate?",
        lambda it: int(it.hits.sum()),
    ),
    counter(
        "hisparse_worker_misses_total",
        "rows",
        "Top-k rows missing from hot buffers; layers that share a selection count once.",
        "What is the hit rate?",
        lambda it: int(it.misses.sum()),
    ),
    counter(
        "hisparse_swap_hits_total",
        "rows",
        "Top-k rows found hot.",
        "Which layers hit?",
        lambda it: _by_layer(it, it.hits),
        labels="layer",
    ),
    counter(
        "hisparse_swap_misses_total",
        "rows",
        "Top-k rows loaded from the host.",
        "Which layers load?",
        lambda it: _by_layer(it, it.misses),
        labels="layer",
    ),
    counter(
        "hisparse_swap_evictions_total",
        "rows",
        "Rows evicted from hot buffers; computed on the host.",
        "Which layers churn?",
        lambda it: _by_layer(it, it.evictions),
        labels="layer",
    ),
    counter(
        "hisparse_swap_bytes_total",
        "bytes",
        "Bytes loaded by swap-in.",
        "What does each layer load?",
        lambda it: _by_layer(it, it.misses * it.row_bytes),
        labels="layer",
    ),
    counter(
        "hisparse_swap_seconds_total",
        "seconds",
        "Swap-in on compute, in the way of the step, or on swap, beside it; one step in 64 stands for all.",
        "What does each layer's swap-in cost?",
        _swap_seconds,
        labels="layer stream",
    ),
)
