"""The report of a demo run: figures, problems, and their rendering. Pure except for the rendering with rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from hisparse.demo.compare import TIE_BOUND, OracleRun, compare
from hisparse.demo.plan import DemoOptions, DemoRequest, memory_for
from hisparse.demo.watch import Outcome
from protocol.units import PAGE_TOKENS

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

FINISHED: Final = "FINISHED"


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    request_id: str
    source: str
    outcome: str
    workers: tuple[str, ...]  # workers that it ran on, in order
    retractions: int
    prompt_tokens: int
    new_tokens: int
    verified: int
    mismatched: int
    unverified: int
    tie_excused: bool
    divergence: int | None
    gap: float | None
    hits: int
    misses: int
    oracle_s: float
    owner: str = ""
    cached_tokens: int = 0  # of the prompt: reused, not computed
    known_tokens: int = 0  # of the prompt: in full pages of the turn before, which can be reused


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `--json`. Fields are counts unless their name ends in a unit."""

    family: str
    weights: str
    device: str
    requests: int
    turns: int = 1
    workers: int
    group_size: int
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts: reused, not computed
    verified_tokens: int
    distinct_tokens: int
    mismatched_tokens: int
    unverified_tokens: int
    tie_excused: int
    tie_bound: float
    hits: int
    misses: int
    hit_rate: float
    rows_swapped: int
    bytes_swapped: int
    drafted_tokens: int = 0  # that steps verified
    accepted_tokens: int = 0  # of them, those that the model drew as well
    retracted: int
    handed_over: int
    host_pages_before: int
    host_pages_peak: int
    host_pages_after: int
    full_kv_bytes: int
    hot_bytes: int
    topk: int
    hot_slots: int
    start_s: float
    serve_s: float
    oracle_s: float
    per_request: tuple[RequestReport, ...]
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Evidence:
    """All data of a run that the report is made of."""

    outcome: Outcome
    runs: Mapping[str, OracleRun]  # by request id
    nudged: Mapping[str, Sequence[OracleRun]]  # with other last bits, by request id; none where tokens are equal
    kv_row_bytes: int
    layers: int
    start_s: float
    oracle_s: float


def build_report(options: DemoOptions, evidence: Evidence) -> DemoReport:
    """Compare every output, sum up the figures, find the problems."""
    outcome, watch = evidence.outcome, evidence.outcome.watch
    served = sorted(outcome.served, key=lambda it: it.request_id)
    before = {later.request_id: request for request, later in pairwise(served) if _is_next_turn(request, later)}
    rows = [_request_report(request, before.get(request.request_id), evidence) for request in served]
    hits, misses = sum(row.hits for row in rows), sum(row.misses for row in rows)
    swapped = sum(worker.swapped_bytes for worker in watch.workers.values())
    page_kv_bytes = PAGE_TOKENS * evidence.layers * evidence.kv_row_bytes
    report = DemoReport(
        family=options.family,
        weights=options.weights,
        device=options.device,
        requests=options.requests,
        turns=options.turns,
        workers=options.workers,
        group_size=options.group_size,
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        verified_tokens=sum(row.verified for row in rows),
        distinct_tokens=len({token for tokens in outcome.tokens.values() for token in tokens}),
        mismatched_tokens=sum(row.mismatched for row in rows),
        unverified_tokens=sum(row.unverified for row in rows),
        tie_excused=sum(row.tie_excused for row in rows),
        tie_bound=TIE_BOUND,
        hits=hits,
        misses=misses,
        hit_rate=round(hits / max(hits + misses, 1), 4),
        rows_swapped=swapped // evidence.kv_row_bytes,
        bytes_swapped=swapped,
        drafted_tokens=sum(row.drafted_tokens for row in watch.rows.values()),
        accepted_tokens=sum(row.accepted_tokens for row in watch.rows.values()),
        retracted=len(outcome.retracted),
        handed_over=len(outcome.handed_over),
        host_pages_before=outcome.host_pages_before,
        host_pages_peak=watch.host_pages_peak,
        host_pages_after=outcome.host_pages_after,
        full_kv_bytes=watch.host_pages_peak * page_kv_bytes,
        hot_bytes=watch.hot_chunks_peak * page_kv_bytes,
        topk=options.topk,
        hot_slots=memory_for(options).hot_slots,
        start_s=round(evidence.start_s, 1),
        serve_s=round(outcome.serve_s, 1),
        oracle_s=round(evidence.oracle_s, 1),
        per_request=tuple(rows),
    )
    return judged(report)


def _is_next_turn(request: DemoRequest, later: DemoRequest) -> bool:
    """Of one conversation: turns are numbered behind its id."""
    return "." in later.request_id and request.request_id.rpartition(".")[0] == later.request_id.rpartition(".")[0]


def _request_report(request: DemoRequest, before: DemoRequest | None, evidence: Evidence) -> RequestReport:
    """`before`: the turn before in its conversation. The last token that was generated there has no row."""
    outcome, run = evidence.outcome, evidence.runs[request.request_id]
    row = outcome.watch.rows[request.request_id]
    tokens, nudged = outcome.tokens[request.request_id], evidence.nudged[request.request_id]
    verdict = compare(request.request_id, tokens, run, TIE_BOUND, nudged)
    known = len(before.prompt) + len(outcome.tokens[before.request_id]) - 1 if before else 0
    return RequestReport(
        request_id=request.request_id,
        source=request.source,
        outcome=row.state,
        workers=tuple(outcome.watch.workers_of[request.request_id]),
        retractions=row.retractions,
        prompt_tokens=row.prompt_tokens,
        new_tokens=row.generated_tokens,
        verified=verdict.verified,
        mismatched=verdict.mismatched,
        unverified=verdict.unverified,
        tie_excused=verdict.tie_excused,
        divergence=verdict.divergence,
        gap=verdict.gap,
        hits=row.hits,
        misses=row.misses,
        oracle_s=round(run.duration_s, 2),
        owner=request.owner,
        cached_tokens=row.prefix_tokens,
        known_tokens=known // PAGE_TOKENS * PAGE_TOKENS,
    )


def problems_of(report: DemoReport) -> tuple[str, ...]:
    """The reasons why the run failed, as text. A run without swap-in or moves fails, too."""
    unfinished = [row.request_id for row in report.per_request if row.outcome != FINISHED]
    cold = [row.request_id for row in report.per_request if row.cached_tokens < row.known_tokens]
    taken = [row.request_id for row in report.per_request if row.owner and row.cached_tokens > row.known_tokens]
    judged = [
        (report.mismatched_tokens > 0, f"{report.mismatched_tokens} tokens differ from the model library's"),
        (
            report.host_pages_after != report.host_pages_before,
            f"host pages leaked: {report.host_pages_before} before, {report.host_pages_after} after",
        ),
        (bool(unfinished), f"not finished: {', '.join(unfinished)}"),
        (report.verified_tokens == 0, "no token was verified"),
        (report.misses == 0, "no row was swapped in: the hot buffers held all selected rows"),
        (report.retracted == 0, "no request was retracted mid-decode"),
        (report.handed_over == 0, "no request was handed over"),
        (bool(cold), f"turns computed what the turns before had computed: {', '.join(cold)}"),
        (bool(taken), f"turns reused what another owner had computed: {', '.join(taken)}"),
    ]
    return tuple(problem for wrong, problem in judged if wrong)


def judged(report: DemoReport) -> DemoReport:
    return msgspec.structs.replace(report, problems=problems_of(report))


# ---------------------------------------------------------------- rendering


def render(report: DemoReport) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    verdict = (
        Text("PASSED  every token equals the model library's", style="bold green")
        if report.passed
        else Text("FAILED  " + "; ".join(report.problems), style="bold red")
    )
    return Group(_request_table(report), _figures(report), Text(), verdict)


def _request_table(report: DemoReport) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("request", "prompt from", "workers"):
        table.add_column(header)
    for header in (
        "prompt",
        *(["reused"] if report.turns > 1 else []),
        "new",
        "verified",
        "mismatched",
        "hit rate",
        "misses",
        "moved",
    ):
        table.add_column(header, justify="right")
    for row in report.per_request:
        table.add_row(
            row.request_id,
            row.source,
            " > ".join(row.workers),
            f"{row.prompt_tokens:,}",
            *([f"{row.cached_tokens:,}"] if report.turns > 1 else []),
            f"{row.new_tokens}",
            f"{row.verified}" + (" (tie)" if row.unverified else ""),
            f"[red]{row.mismatched} from {row.divergence}[/]" if row.mismatched else "0",
            _share(row.hits, row.hits + row.misses),
            f"{row.misses:,}",
            f"{row.retractions}" if row.retractions else "",
        )
    return table


def _figures(report: DemoReport) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, text in figure_lines(report).items():
        table.add_row(name, text)
    return table


def figure_lines(report: DemoReport) -> Mapping[str, str]:
    """The summary below the table, as label and text."""
    turns = f"{report.turns}; {report.cached_tokens:,} of {report.prompt_tokens:,} prompt tokens reused"
    drafts = f"{report.drafted_tokens:,} verified, {_share(report.accepted_tokens, report.drafted_tokens)} accepted"
    return {
        **({"turns": turns} if report.turns > 1 else {}),
        "tokens": f"{report.verified_tokens:,} verified, {report.distinct_tokens} distinct, "
        f"{report.mismatched_tokens} mismatched, {report.tie_excused} requests excused by a tie below "
        f"{report.tie_bound:g} or one that rounding decides; float32 on {report.device}",
        "swap-in": f"{_share(report.hits, report.hits + report.misses)} hits with {report.hot_slots} hot slots "
        f"for top-{report.topk}; {report.rows_swapped:,} rows, {_mib(report.bytes_swapped)} loaded from host memory",
        **({"drafts": drafts} if report.drafted_tokens else {}),
        "memory": f"{_mib(report.hot_bytes)} hot buffers against {_mib(report.full_kv_bytes)} full KV "
        f"({_share(report.hot_bytes, report.full_kv_bytes)})",
        "host pages": f"{report.host_pages_before} before, {report.host_pages_peak} at peak, "
        f"{report.host_pages_after} after",
        "workers": f"{report.workers}"
        + (f" in {report.workers // report.group_size} groups of {report.group_size}" if report.group_size > 1 else ""),
        "moves": f"{report.retracted} retracted and resumed, {report.handed_over} handed over to another worker",
        "time": f"start {report.start_s:.0f} s, service {report.serve_s:.0f} s, oracle {report.oracle_s:.0f} s",
    }


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
