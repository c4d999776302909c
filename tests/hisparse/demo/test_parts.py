"""The pure parts of the demo: prompts, memory that keeps every request managed, comparison, verdict."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hisparse.demo.compare import TIE_BOUND, OracleRun, compare, first_difference
from hisparse.demo.oracles import deal
from hisparse.demo.plan import (
    DemoOptions,
    DemoRequest,
    PromptSource,
    cut_prompts,
    default_prompt_tokens,
    memory_for,
    prompt_lengths,
)
from hisparse.demo.report import DemoReport, RequestReport, figure_lines, judged, render
from hisparse.demo.run import NUDGES, _deterministic_if_possible, nudged_runs
from hisparse.demo.setup import cluster_config
from hisparse.demo.watch import DemoWatch, Outcome, pages_in_use
from protocol.errors import BadInput, ConfigError
from protocol.messages import PoolRow, RequestRow
from protocol.settings import Config, WorkerSettings
from protocol.units import managed_chunks, pages_for
from worker.device.sizing import size_worker
from worker.families.table import family_named, names
from worker.runners.checkpoint import anonymous_info, geometry_of
from worker.runners.tiny import tiny_config


def oracle(tokens: list[int], gaps: list[float] | None = None, runners_up: list[int] | None = None) -> OracleRun:
    return OracleRun(
        tuple(tokens), tuple(runners_up or [-1] * len(tokens)), tuple(gaps if gaps is not None else [1.0] * len(tokens))
    )


# ---------------------------------------------------------------- plan


def test_default_demo_has_the_promised_size() -> None:
    options, memory = DemoOptions(), memory_for(DemoOptions())
    assert options.requests >= 8
    assert options.new_tokens >= 128
    assert memory.hot_slots + 64 <= options.prompt_tokens_min / 8
    assert options.topk <= options.prompt_tokens_min / 16
    assert (memory.hot_slots, memory.hot_chunks) == (192, 32)


@given(st.integers(2, 64), st.integers(2048, 8192))
def test_no_request_becomes_resident_and_a_managed_one_fits(requests: int, shortest: int) -> None:
    memory = memory_for(DemoOptions(requests=requests, prompt_tokens_min=shortest, prompt_tokens_max=8192))
    assert memory.hot_chunks < pages_for(shortest + 1)
    assert memory.hot_chunks >= managed_chunks(memory.hot_slots)
    assert memory.hot_slots >= 128


@pytest.mark.parametrize("name", names())
def test_hot_buffers_of_the_demo_suit_each_family(name: str) -> None:
    """Prompts are long enough for what a tiny checkpoint selects, and a worker takes the size."""
    family = family_named(name)
    topk = max(DemoOptions.topk, family.topk_least)
    shortest, longest = default_prompt_tokens(topk)
    about: dict[str, Any] = {"prompt_tokens_min": shortest, "prompt_tokens_max": longest}
    memory = memory_for(DemoOptions(name, topk=topk, hot_multiple=family.hot_multiple, **about))
    dimensions = tiny_config(name, topk, 16_384)
    settings = WorkerSettings(
        hot_size_classes=(memory.hot_slots,), hot_chunks_max=memory.hot_chunks, host_mem="64MiB", device_mem="256MiB"
    )
    sizing = size_worker(settings, geometry_of(dimensions, "float32"), anonymous_info(dimensions, name))
    assert sizing.capacity.hot_size_classes == (memory.hot_slots,)
    assert sizing.capacity.hot_chunks == memory.hot_chunks


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": 1},
        {"workers": 1},
        {"workers": 3, "group_size": 2},
        {"group_size": 0},
        {"new_tokens": 8},
        {"prompt_tokens_min": 2047},
        {"prompt_tokens_min": 4096, "prompt_tokens_max": 4000},
    ],
)
def test_trivial_demo_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        DemoOptions(**changes)  # type: ignore[arg-type]


def test_lengths_spread_over_the_whole_range() -> None:
    assert prompt_lengths(8, 2048, 6000) == [2048, 2612, 3177, 3741, 4306, 4870, 5435, 6000]


def test_prompts_start_at_different_files_with_exact_lengths() -> None:
    sources = [PromptSource(f"file{i}.py", chr(ord("a") + i) * 1000) for i in range(4)] + [
        PromptSource("tiny.txt", "x")
    ]
    requests = cut_prompts(sources, [500, 2500, 100, 4000], lambda text: text.encode())
    assert [len(request.prompt) for request in requests] == [500, 2500, 100, 4000]
    assert [request.source for request in requests] == ["file0.py", "file1.py", "file2.py", "file3.py"]
    assert bytes(requests[1].prompt).decode().startswith("### file1.py\n\nbbb")
    assert len({request.request_id for request in requests}) == 4


@pytest.mark.refuses("all text together has {} tokens", "no text for prompts")
def test_too_little_text_is_refused_with_the_count() -> None:
    with pytest.raises(BadInput, match="all text together has 1015 tokens"):
        cut_prompts([PromptSource("file.txt", "a" * 1000)], [2000], lambda text: text.encode())
    with pytest.raises(BadInput, match="no text"):
        cut_prompts([PromptSource("file.txt", "a")], [2000], lambda text: text.encode())


# ---------------------------------------------------------------- compare


@given(st.lists(st.integers(0, 300)))
def test_equal_outputs_are_verified_in_full(tokens: list[int]) -> None:
    verdict = compare("r", tokens, oracle(tokens), TIE_BOUND)
    assert (verdict.verified, verdict.mismatched, verdict.unverified) == (len(tokens), 0, 0)
    assert verdict.divergence is None


@given(st.lists(st.integers(0, 3), min_size=1), st.lists(st.integers(0, 3), min_size=1), st.floats(0, 2e-4))
def test_every_position_and_difference_is_counted_once(ours: list[int], theirs: list[int], gap: float) -> None:
    assume(ours != theirs)
    runners_up = [(token + 1) % 4 for token in theirs]
    verdict = compare("r", ours, oracle(theirs, [gap] * len(theirs), runners_up), TIE_BOUND)
    assert verdict.verified + verdict.mismatched + verdict.unverified == max(len(ours), len(theirs))
    assert (verdict.mismatched > 0) != verdict.tie_excused
    assert verdict.divergence == first_difference(ours, theirs)


def test_tie_excuses_only_the_runner_up_below_the_bound() -> None:
    near, far = TIE_BOUND / 2, TIE_BOUND * 2
    excused = compare("r", [7, 8, 1], oracle([7, 9, 2], [1.0, near, 1.0], [0, 8, 0]), TIE_BOUND)
    assert (excused.verified, excused.mismatched, excused.unverified, excused.tie_excused) == (1, 0, 2, True)
    assert excused.gap == near
    too_far = compare("r", [7, 8, 1], oracle([7, 9, 2], [1.0, far, 1.0], [0, 8, 0]), TIE_BOUND)
    assert (too_far.mismatched, too_far.tie_excused) == (2, False)
    another_token = compare("r", [7, 5, 1], oracle([7, 9, 2], [1.0, near, 1.0], [0, 8, 0]), TIE_BOUND)
    assert (another_token.mismatched, another_token.tie_excused) == (2, False)


def test_output_of_an_oracle_with_other_last_bits_excuses_the_same_tokens_alone() -> None:
    plain, other = oracle([7, 9, 2, 3], [1.0] * 4, [0] * 4), oracle([7, 8, 5, 5], [1.0] * 4, [0] * 4)
    excused = compare("r", [7, 8, 1, 1], plain, TIE_BOUND, [plain, other])
    assert (excused.verified, excused.mismatched, excused.unverified, excused.tie_excused) == (1, 0, 3, True)
    for tokens in ([7, 6, 1, 1], [5, 8, 5, 5], [7, 9, 5, 5], [7]):
        wrong = compare("r", tokens, plain, TIE_BOUND, [plain, other])
        assert (wrong.mismatched > 0, wrong.tie_excused) == (True, False)


async def test_oracle_is_asked_again_until_a_difference_is_excused() -> None:
    equal, excused, wrong = (DemoRequest(name, "", ()) for name in ("equal", "excused", "wrong"))
    tokens = {"equal": [7, 9], "excused": [7, 8], "wrong": [7, 1]}
    runs = {name: oracle([7, 9], [1.0] * 2, [0] * 2) for name in tokens}
    asked, notes = list[list[str]](), list[str]()

    async def ask(
        requests: Sequence[DemoRequest],
        done: Callable[[str, OracleRun], None],
        nudge: int,
        limits: Mapping[str, int],
    ) -> None:
        assert nudge == len(asked)
        assert limits == {request.request_id: 2 for request in requests}
        asked.append([request.request_id for request in requests])
        for name in asked[-1]:
            done(name, oracle([7, 8] if nudge else [7, 9], [1.0] * 2, [0] * 2))

    found = await nudged_runs(ask, [equal, excused, wrong], tokens, runs, notes.append)
    assert asked == [["excused", "wrong"]] * 2 + [["wrong"]] * (NUDGES - 2)
    assert {name: len(outputs) for name, outputs in found.items()} == {"equal": 0, "excused": 2, "wrong": NUDGES}
    assert len(notes) == NUDGES


def test_missing_or_surplus_token_is_a_mismatch_even_at_a_tie() -> None:
    short = compare("r", [7], oracle([7, 9], [0.0, 0.0], [0, 0]), TIE_BOUND)
    assert (short.verified, short.mismatched, short.tie_excused) == (1, 1, False)
    long = compare("r", [7, 9], oracle([7], [0.0], [0]), TIE_BOUND)
    assert (long.verified, long.mismatched, long.tie_excused) == (1, 1, False)


# ---------------------------------------------------------------- watch and report


def request_row(**changes: object) -> RequestRow:
    row = RequestRow(
        request_id="demo-00", state="RUNNING", priority=0, worker="w0", prompt_tokens=2048, generated_tokens=5,
        max_tokens=128, durable_tokens=2050, host_pages=33, hot_slots=192, hot_chunks=4, hits=90, misses=10,
        retractions=0, age_s=1.0, held=False, reason="",
    )  # fmt: skip
    return msgspec.structs.replace(row, **changes)


def pool_row(free: int) -> PoolRow:
    return PoolRow("n", 100, free, 100 - free, 0, 0, 4096, 0, ("w0", "w1"))


def test_request_seen_on_two_workers_was_handed_over() -> None:
    watch = DemoWatch()
    for worker in ("w0", "", "w0"):
        watch.saw_requests([request_row(worker=worker), request_row(request_id="demo-01", worker="w0")])
    outcome = Outcome(watch, drained="w0", leaving=("demo-00", "demo-01"))
    assert outcome.handed_over == ()
    watch.saw_requests([request_row(worker="w1")])
    assert outcome.handed_over == ("demo-00",)
    assert watch.workers_of["demo-00"] == ["w0", "w1"]
    assert watch.running_on() == {"w1": ["demo-00"], "w0": ["demo-01"]}


def test_peaks_are_kept_and_include_quarantined_pages() -> None:
    watch = DemoWatch()
    for free in (100, 30, 60):
        watch.saw_pools([pool_row(free)])
    assert watch.host_pages_peak == 70
    quarantined = msgspec.structs.replace(pool_row(90), owned=8, quarantined=2)
    assert pages_in_use([quarantined]) == 10
    watch.saw_requests([request_row(), request_row(request_id="demo-01")])
    watch.saw_requests([request_row(state="FINISHED")])
    assert watch.hot_chunks_peak == 8


def test_request_to_move_is_in_mid_decode_with_most_left() -> None:
    watch = DemoWatch()
    assert watch.running_past(0) is None
    assert not watch.over
    rows = [request_row(request_id=f"demo-{i}", generated_tokens=tokens) for i, tokens in enumerate((50, 20, 3))]
    arriving = request_row(request_id="demo-9", state="READY")
    watch.saw_requests([*rows, arriving])
    assert watch.running_past(16) is None
    watch.saw_requests([request_row(request_id="demo-1", generated_tokens=64), request_row(request_id="demo-9")])
    chosen = watch.running_past(16)
    assert chosen is not None
    assert chosen.request_id == "demo-0"
    watch.saw_requests([request_row(request_id=name, state="FINISHED") for name in watch.rows])
    assert watch.over
    assert watch.running_past(16) is None


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(1, 8))
def test_prompts_are_assigned_once_and_evenly(sizes: list[int], hands: int) -> None:
    dealt = deal(sizes, hands)
    assert sorted(i for hand in dealt for i in hand) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in hand) for hand in dealt]
    assert max(sums) - min(sums) <= max(sizes)


def report(**changes: object) -> DemoReport:
    row = RequestReport(
        request_id="demo-00", source="a.py", outcome="FINISHED", workers=("w0", "w1"), retractions=1,
        prompt_tokens=2048, new_tokens=128, verified=128, mismatched=0, unverified=0, tie_excused=False,
        divergence=None, gap=None, hits=90, misses=10, oracle_s=1.5,
    )  # fmt: skip
    base = DemoReport(
        family="glm-5", device="cpu",
        weights="float32",
        requests=1, workers=2, group_size=1, verified_tokens=128, distinct_tokens=40, mismatched_tokens=0,
        unverified_tokens=0, tie_excused=0, tie_bound=TIE_BOUND, hits=90, misses=10, hit_rate=0.9, rows_swapped=20,
        bytes_swapped=2048, retracted=1, handed_over=1, host_pages_before=0, host_pages_peak=70, host_pages_after=0,
        full_kv_bytes=1 << 20, hot_bytes=1 << 17, topk=128, hot_slots=192, start_s=1.0, serve_s=2.0, oracle_s=3.0,
        per_request=(row,),
    )  # fmt: skip
    return judged(msgspec.structs.replace(base, **changes))


def test_a_clean_run_passes() -> None:
    assert report().passed


@pytest.mark.parametrize(
    "changes",
    [
        {"mismatched_tokens": 1},
        {"host_pages_after": 1},
        {"verified_tokens": 0},
        {"misses": 0},
        {"retracted": 0},
        {"handed_over": 0},
        {"per_request": (msgspec.structs.replace(report().per_request[0], outcome="FAILED"),)},
        {"per_request": (msgspec.structs.replace(report().per_request[0], cached_tokens=63, known_tokens=64),)},
        {"per_request": (msgspec.structs.replace(report().per_request[0], owner="apart", cached_tokens=64),)},
    ],
)
def test_any_failed_check_fails_the_run(changes: dict[str, object]) -> None:
    failed = report(**changes)
    assert not failed.passed
    assert len(failed.problems) == 1


def test_the_table_shows_the_figures() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(report(mismatched_tokens=3)))
    text = console.export_text()
    assert "FAILED  3 tokens differ" in text
    assert "w0 > w1" in text
    assert "0 before, 70 at peak, 0 after" in text
    assert figure_lines(report())["memory"] == "0.1 MiB hot buffers against 1.0 MiB full KV (12.5%)"


@pytest.mark.parametrize(
    ("options", "is_deterministic"),
    [
        (DemoOptions(), True),
        (DemoOptions(device="cuda"), True),
        (DemoOptions(turns=2), False),
        (DemoOptions(draft_tokens=2), True),
        (DemoOptions(device="cuda:0", draft_tokens=2), True),
    ],
)
def test_demo_is_deterministic_where_workers_can_be(
    options: DemoOptions, is_deterministic: bool, tmp_path: Path
) -> None:
    """Settings that refuse each other are refused here."""
    config = cluster_config(options, tmp_path / "model", tmp_path / "run", tmp_path)
    assert config.worker.deterministic == is_deterministic


@pytest.mark.parametrize("other_refusal", [False, True])
async def test_demo_starts_again_where_workers_refuse_deterministic_mode(other_refusal: bool, tmp_path: Path) -> None:
    """A setting that is refused without that mode too ends it."""
    started: list[bool] = []
    notes: list[str] = []

    @asynccontextmanager
    async def start(config: Config) -> AsyncIterator[Any]:
        started.append(config.worker.deterministic)
        if config.worker.deterministic or other_refusal:
            raise ConfigError("exit code 3 during start", field="process", value="w0")
        yield "cluster"

    config = cluster_config(DemoOptions(draft_tokens=2), tmp_path / "model", tmp_path / "run", tmp_path)
    serving = _deterministic_if_possible(start, config, notes.append)
    if other_refusal:
        with pytest.raises(ConfigError, match="exit code 3"):
            await serving.__aenter__()
    else:
        async with serving as cluster:
            assert cast(str, cluster) == "cluster"
    assert started == [True, False]
    assert "without deterministic mode" in notes[0]
    assert len(notes) == 1
