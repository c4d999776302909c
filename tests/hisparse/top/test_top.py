"""`hisparse top` without a terminal: keys, rates, what is selected and asked for, and how it is drawn."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from basics.request_states import TERMINAL, State
from hisparse.top.draw import HEIGHT_MIN, WIDTH_MIN, clean, draw
from hisparse.top.keys import SEQUENCE_BYTES_MAX, SEQUENCES, KeyDecoder
from hisparse.top.run import Top
from hisparse.top.sample import WINDOW_S, History, Sample
from hisparse.top.screen import (
    ENDED,
    FILTER_CHARS_MAX,
    NOTICE_S,
    ORDERS,
    STATES,
    Mode,
    OperatorAction,
    OperatorAsk,
    Screen,
)
from protocol import messages
from protocol.errors import NotFound

CAPACITY = messages.WorkerCapacity(16, 100, 1000, 8_192, 4000, 98_304, (192,), 8, 1, "/tmp/p")
WORKER = messages.WorkerRow(
    worker="w0", node="n0", state="connected", epoch=1, running=12, capacity=CAPACITY, hot_chunks_free=10,
    index_pages_free=400, seats_free=4, steps=100, step_us=2500.0, hits=900, misses=100,
    link_age_s=0.1, command_ack_ms=1.5, swapped_bytes=0,
)  # fmt: skip
REQUEST = messages.RequestRow(
    request_id="r1", state="RUNNING", priority=0, worker="w0", prompt_tokens=1000, generated_tokens=50, max_tokens=640,
    durable_tokens=1040, host_pages=17, hot_slots=192, hot_chunks=4, hits=90, misses=10, retractions=1, age_s=75.0,
    held=False, reason="on w0",
)  # fmt: skip
POOL = messages.PoolRow("n0", 4000, 1000, 3000, 0, 0, 98_304, 12, ("w0", "w1", "w2"))
MODEL = "DeepSeek-V3.2"


def row(base: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(base, **changes)


def sample(*requests: messages.RequestRow, at_s: float = 0.0, **changes: Any) -> Sample:
    known: dict[str, Any] = {"workers": (WORKER,), "pools": (POOL,), "truncated": False, "incarnation": 3}
    return Sample(at_s=at_s, model=MODEL, requests=requests, **(known | changes))


def screen_of(*requests: messages.RequestRow, **changes: Any) -> Screen:
    screen = Screen()
    screen.take(sample(*requests, **changes))
    return screen


def numbered(count: int) -> list[messages.RequestRow]:
    return [row(REQUEST, request_id=f"r{number:02}") for number in range(count)]


def press(screen: Screen, *keys: str, now: float = 0.0) -> OperatorAsk | None:
    """The last answer."""
    answer = None
    for key in keys:
        answer = screen.handle(key, now)
    return answer


def shown(screen: Screen, width: int = 80, height: int = 24, now: float = 0.0) -> list[str]:
    return [line.plain for line in draw(screen, width, height, now)]


# ---------------------------------------------------------------- keys


def test_key_sequences_survive_any_split() -> None:
    for sequence, name in SEQUENCES.items():
        for cut in range(len(sequence)):
            decoder = KeyDecoder()
            assert decoder.feed(sequence[:cut]) + decoder.feed(sequence[cut:] + b"r") == [name, "r"]


def test_characters_map_to_themselves_and_escape_by_timeout() -> None:
    decoder = KeyDecoder()
    assert decoder.feed("rÄ\t\r\x7f\x00".encode()) == ["r", "Ä", "tab", "enter", "backspace"]
    assert decoder.feed(b"\xc3") + decoder.feed(b"\x84") == ["Ä"]
    assert decoder.feed(b"\x1b") == []
    assert decoder.waiting
    assert decoder.flush() == ["escape"]
    assert decoder.feed(b"\x1b[") + decoder.flush() == [], "half a sequence is no key"
    assert decoder.feed(b"q") == ["q"]


def test_unknown_sequences_press_no_key() -> None:
    """An answer of the terminal, a function key, a mouse: none of their bytes may count as r, a or y."""
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b[?1;2c\x1b[15~\x1b[<0;1;1M\x1bOP\x1b[200~k") == ["k"]


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_key_parser_is_bounded_on_any_bytes(pieces: list[bytes]) -> None:
    """I8."""
    decoder = KeyDecoder()
    for piece in pieces:
        for key in decoder.feed(piece):
            assert key in {*SEQUENCES.values(), "enter", "tab", "backspace"} or (len(key) == 1 and key.isprintable())
        assert len(decoder._pending) <= SEQUENCE_BYTES_MAX


# ---------------------------------------------------------------- rates


def test_rates_are_over_the_window_and_by_worker() -> None:
    history = History()
    for second in range(11):
        rows = (
            row(REQUEST, generated_tokens=10 * second),
            row(REQUEST, request_id="r2", worker="w0" if second < 10 else "", generated_tokens=20 * second),
        )
        worker = row(
            WORKER,
            hits=30 * second,
            misses=10 * second,
            swapped_bytes=1000 * second,
            prompt_tokens=500 * second,
        )
        history.add(sample(*rows, at_s=float(second), workers=(worker,)))
    rates = history.worker_rates()["w0"]
    assert rates.tokens_per_s == pytest.approx(30), "of the request that has just left w0, too"
    assert rates.hit_share == pytest.approx(0.75)
    assert rates.swapped_bytes_per_s == pytest.approx(1000)
    assert rates.prompt_tokens_per_s == pytest.approx(500)
    assert history.request_rates() == {"r1": 10, "r2": 20}
    first = history._samples[0]
    assert history.latest is not None
    assert WINDOW_S <= history.latest.at_s - first.at_s < WINDOW_S + 1


def test_restarted_process_has_no_rates_yet() -> None:
    history = History()
    history.add(sample(REQUEST, at_s=0))
    history.add(sample(REQUEST, at_s=1, workers=(row(WORKER, epoch=2, hits=0, misses=0),)))
    assert history.worker_rates() == {}
    history.add(sample(REQUEST, at_s=2, incarnation=4))
    assert (history.worker_rates(), history.request_rates()) == ({}, {})
    idle = History()
    idle.add(sample(REQUEST, at_s=0))
    idle.add(sample(REQUEST, at_s=1))
    assert idle.worker_rates()["w0"].hit_share is None


# ---------------------------------------------------------------- the selection


def test_the_selection_stays_with_its_request_when_rows_move() -> None:
    """An operator aims at a request, not at a line."""
    screen = screen_of(*numbered(5))
    ranked = [row(it, priority=number) for number, it in enumerate(numbered(5))]
    press(screen, "down")
    assert screen.selected(of_workers=False) == "r01"
    screen.take(sample(*ranked))
    press(screen, "s", "s", "s")
    assert screen.order == "priority"
    assert [it.request_id for it in screen.requests()] == ["r04", "r03", "r02", "r01", "r00"]
    assert screen.selected(of_workers=False) == "r01"
    screen.take(sample(*(it for it in ranked if it.request_id != "r01")))
    assert screen.selected(of_workers=False) == "r00", "the row now in the place of the gone one is selected"
    screen.take(sample())
    assert screen.selected(of_workers=False) == ""


@given(st.lists(st.sampled_from(["up", "down", "page_up", "page_down", "home", "end", "j", "k", "tab", "e", "s", "S"])))
def test_some_row_is_always_selected(keys: list[str]) -> None:
    screen = screen_of(*numbered(7))
    press(screen, *keys)
    assert screen.selected(of_workers=False) in {it.request_id for it in numbered(7)}
    assert screen.selected(of_workers=True) == "w0"


def test_each_sort_order_puts_its_subject_first() -> None:
    rows = (
        row(REQUEST, request_id="done", state="FINISHED", age_s=9),
        row(REQUEST, request_id="fresh", hits=0, misses=0, age_s=1),
        row(REQUEST, request_id="long", prompt_tokens=90_000, age_s=2),
        row(REQUEST, request_id="cold", hits=1, misses=99, age_s=3),
        row(REQUEST, request_id="high", priority=5, age_s=4),
        row(REQUEST, request_id="queued", state="QUEUED", age_s=5),
    )
    screen = screen_of(*rows)
    press(screen, "e")
    first, last = {}, {}
    for _ in ORDERS:
        ids = [it.request_id for it in screen.requests()]
        first[screen.order], last[screen.order] = ids[0], ids[-1]
        press(screen, "S")
        assert screen.requests()[0].request_id == ids[-1] or screen.order != "age"
        press(screen, "s")
    assert first == {"state": "cold", "tokens": "long", "hit rate": "cold", "priority": "high", "age": "done"}
    assert last["state"] == "done"
    assert last["hit rate"] == "fresh"


def test_every_state_is_known_and_fits_its_column() -> None:
    assert set(STATES) == {state.value for state in State}
    assert {state.value for state in TERMINAL} == ENDED
    assert max(map(len, STATES)) <= 12, "the width of their column"


def test_find_filters_by_id_state_worker_and_held() -> None:
    rows = (
        REQUEST,
        row(REQUEST, request_id="x", state="RETRACTED", worker="", held=True),
        row(REQUEST, request_id="y", worker="w1"),
    )
    screen = screen_of(*rows)
    for text, ids in (("RUNN", ["r1", "y"]), ("held", ["x"]), ("w1", ["y"]), ("zz", [])):
        press(screen, "/", *text, "enter")
        assert [it.request_id for it in screen.requests()] == ids
        assert screen.selected(of_workers=False) == (ids[0] if ids else "")
        press(screen, "/", *["backspace"] * 5, "enter")
    press(screen, "/", *"quit", "escape")
    assert (screen.mode, screen.filter) == (Mode.BROWSE, ""), "q is a character there"
    press(screen, "/", *["x"] * 200)
    assert len(screen.filter) == FILTER_CHARS_MAX


def test_ended_requests_are_shown_when_asked_for() -> None:
    screen = screen_of(REQUEST, row(REQUEST, request_id="done", state="FINISHED"))
    assert [it.request_id for it in screen.requests()] == ["r1"]
    assert "1 ended (e)" in "\n".join(shown(screen))
    press(screen, "e")
    assert [it.request_id for it in screen.requests()] == ["r1", "done"]


# ---------------------------------------------------------------- asking


@pytest.mark.parametrize(
    ("key", "command"), [("r", OperatorAction.RETRACT), ("R", OperatorAction.RESUME), ("a", OperatorAction.ABORT)]
)
def test_command_runs_only_after_confirmation(key: str, command: OperatorAction) -> None:
    screen = screen_of(*numbered(3))
    press(screen, "down")
    assert press(screen, key) is None
    assert f"{command.name.lower()} r01" in shown(screen)[-1]
    assert press(screen, "y") == OperatorAsk(command, "r01")
    for other in ("n", "enter", key, "escape", "q"):
        press(screen, key)
        assert press(screen, other) is None
        assert screen.mode is Mode.BROWSE
    assert "cancelled" in shown(screen)[-1]


@pytest.mark.parametrize(("key", "command"), [("d", OperatorAction.DRAIN), ("D", OperatorAction.UNDRAIN)])
def test_drain_applies_to_the_selected_worker(key: str, command: OperatorAction) -> None:
    screen = screen_of(REQUEST, workers=(WORKER, row(WORKER, worker="w1")))
    press(screen, key)
    assert screen.pending is None
    assert "Tab to the workers" in shown(screen)[-1]
    assert press(screen, "tab", "down", key, "y") == OperatorAsk(command, "w1")
    press(screen, "r")
    assert screen.pending is None


def test_rank_shows_its_group_and_what_it_waits_for() -> None:
    rank = {"group": "g0", "rank": 1}
    workers = (
        row(WORKER, **rank, ranks_missing=(3,)),
        row(WORKER, worker="w1", **rank, ranks_missing=(0, 3)),
        row(WORKER, worker="w2", **rank, awaits="w0"),
        row(WORKER, worker="w3", **rank, state="disconnected", awaits="w0"),
    )
    lines = "\n".join(shown(screen_of(REQUEST, workers=workers), width=120, height=40))
    assert " g0/1 " in lines
    for name, text in (("w0", "no rank 3"), ("w1", "no rank 0+"), ("w2", "for w0"), ("w3", "disconnected")):
        assert f"{name} {text} " in " ".join(lines.split())


def test_confirmed_request_stays_the_target_when_rows_move() -> None:
    screen = screen_of(*numbered(3))
    press(screen, "r")
    screen.take(sample(*numbered(3)[1:]))
    assert screen.selected(of_workers=False) == "r01"
    assert press(screen, "y") == OperatorAsk(OperatorAction.RETRACT, "r00")


def test_no_command_is_offered_while_disconnected() -> None:
    screen = screen_of(REQUEST)
    screen.disconnected("no coordinator listens there", 1.0)
    press(screen, "r")
    assert screen.pending is None
    assert "not connected" in shown(screen)[-1]
    assert press(Screen(), "r", "y") is None
    assert press(screen, "q") == OperatorAsk(OperatorAction.QUIT)


def test_history_is_shown_and_acted_on() -> None:
    history = tuple(messages.HistoryLine(60.0 + at, f"event{at}", "RUNNING", f"reason {at}") for at in range(40))
    screen = screen_of(REQUEST)
    press(screen, "enter")
    assert screen.history_id == "r1"
    screen.take(sample(REQUEST, history=messages.RequestDetail(0, REQUEST, history)))
    assert any("event0 " in line for line in shown(screen))
    press(screen, "end")
    assert any("event39" in line for line in shown(screen))
    assert press(screen, "r", "y") == OperatorAsk(OperatorAction.RETRACT, "r1")
    assert screen.mode is Mode.HISTORY
    press(screen, "escape")
    assert (screen.mode, screen.history_id) == (Mode.BROWSE, "")


def test_notices_expire() -> None:
    screen = screen_of(REQUEST)
    screen.note("r1: held", 5.0)
    screen.tick(5.0 + NOTICE_S - 0.1)
    assert "r1: held" in shown(screen)[-1]
    screen.tick(5.0 + NOTICE_S)
    assert "r retract" in shown(screen)[-1]


def test_history_of_a_request_that_is_gone_is_closed_with_its_question() -> None:
    screen = screen_of(REQUEST)
    press(screen, "enter", "a")
    assert screen.pending is not None
    screen.close_history()
    assert (screen.mode, screen.history_id, screen.pending) == (Mode.BROWSE, "", None)


class Forgetful:
    """A client of a coordinator that has forgotten all requests."""

    async def request(self, request_id: str) -> messages.RequestDetail:
        raise NotFound("no request of this id", field="request_id", value=request_id, remedy="list requests")


def test_request_that_was_forgotten_is_told_once_and_its_notice_expires() -> None:
    """Else each look would tell it again, and the notice would never go."""
    top = Top(cast(Any, None), cast(Any, None), 1.0, 10)
    screen = top._screen
    screen.take(sample(REQUEST))
    press(screen, "enter")

    async def look_twice() -> None:
        assert await top._history(cast(Any, Forgetful())) is None
        screen.tick(trio.current_time() + NOTICE_S)
        assert await top._history(cast(Any, Forgetful())) is None

    trio.run(look_twice)
    assert screen.notice == ""
    assert screen.mode is Mode.BROWSE


# ---------------------------------------------------------------- drawing


def test_80_by_24_shows_the_main_figures() -> None:
    screen = screen_of(*numbered(30), workers=tuple(row(WORKER, worker=f"w{number}") for number in range(3)))
    lines = shown(screen)
    assert lines[0].startswith(f" hisparse top  {MODEL}  connected  3 of 3 workers  incarnation 3")
    assert lines[1] == " n0 host ##########.... 75% of 375.0 MiB  pages: 1000 free, 3000 owned, 0 shared"
    assert " ".join(lines[2].split()) == "WORKER STATE RUN HOT INDX HOST STEP MS TOK/S HIT H2D/S SEEN"
    assert lines[3].split() == ["w0", "connected", "12/16", "90%", "60%", "75%", "2.5", "-", "-", "-", "0.1s"]
    assert lines[6].startswith(" 30 requests: 30 running  by state")
    assert " ".join(lines[7].split()) == "ID STATE PRIO WORKER PROMPT NEW TOK/S HIT AGE"
    assert lines[8].split() == [">r00", "RUNNING", "0", "w0", "1000", "50/640", "-", "90%", "1m15s"]
    assert lines[-1].strip().endswith("q quit")
    press(screen, "end")
    assert any(line.startswith(">r29") for line in shown(screen)), "the selected row is always in view"


def test_prompts_have_columns_where_a_worker_has_computed_some() -> None:
    assert "PROMPT/S" not in shown(screen_of(REQUEST), 200)[2]
    busy = row(WORKER, prompt_tokens=8_192, prompts_waiting=3, prompt_wait_s=75.0)
    idle = row(WORKER, worker="w1", prompt_tokens=100)
    screen = screen_of(REQUEST, workers=(busy, idle))
    screen.take(sample(REQUEST, workers=(row(busy, prompt_tokens=16_384), idle), at_s=2.0))
    for width in (100, 200):
        head, first, second = shown(screen, width)[2:5]
        at = head.index("PROMPT/S")
        assert first[at : at + 18].split() == ["4096", "3", "1m15s"]
        assert second[at : at + 18].split()[:2] == ["0", "-"]
    assert "PROMPT/S" not in shown(screen, 80)[2]


def test_share_of_drafts_has_a_column_where_a_request_drafts() -> None:
    one, other = row(REQUEST, request_id="a"), row(REQUEST, request_id="b", drafted_tokens=8, accepted_tokens=6)
    assert "DRAFTS" not in shown(screen_of(one), 200)[5]
    head, first, second = (line.split() for line in shown(screen_of(one, other), 200)[5:8])
    assert (first[head.index("DRAFTS")], second[head.index("DRAFTS")]) == ("-", "75%")


@pytest.mark.parametrize(
    ("changed", "state", "speed"),
    [
        ({}, "RUNNING", "5.0"),
        ({"state": "RETRACTED", "held": True}, "HELD", "-"),
        ({"state": "RETRACTED"}, "RETRACTED", "-"),
        ({"state": "QUEUED"}, "QUEUED", "-"),
    ],
)
def test_only_a_running_request_has_a_speed(changed: dict[str, Any], state: str, speed: str) -> None:
    screen = screen_of(REQUEST)
    screen.take(sample(row(REQUEST, generated_tokens=60, **changed), at_s=2.0))
    cells = next(line for line in shown(screen) if line.startswith(">r1")).split()
    assert (cells[1], cells[-3]) == (state, speed)


def test_a_resident_request_has_no_hit_rate() -> None:
    cells = shown(screen_of(row(REQUEST, hot_slots=0, hits=90, misses=0)))[6].split()
    assert cells[-2:] == ["-", "1m15s"]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_numbers_are_whole_and_ids_distinct_at_any_width(width: int) -> None:
    """Ids that share their first 30 characters, and a million tokens."""
    long = [
        row(
            REQUEST,
            request_id=f"tenant-7-nightly-evaluation-{number:04}",
            worker=f"gpu-node-of-rack-{number}",
            prompt_tokens=1_000_000,
            generated_tokens=1_000_000,
            max_tokens=1_000_001,
        )
        for number in (1, 2)
    ]
    lines = shown(screen_of(*long, workers=tuple(row(WORKER, worker=it.worker) for it in long)), width=width)
    requests = [line for line in lines if "1000000/1000001" in line]
    assert len({line[1:].split()[0] for line in requests}) == 2, lines
    workers = {line[1:].split()[0] for line in lines if "connected " in line and "12/16" in line}
    assert len(workers) == 2, lines
    prompts = [header for header in lines if " PROMPT " in header]
    assert not prompts or all(" 1000000 " in line for line in requests)


def test_worker_that_was_never_heard_has_no_age() -> None:
    lines = shown(screen_of(workers=(row(WORKER, state="disconnected", link_age_s=messages.NOT_SEEN),)))
    assert lines[3].split()[-1] == "-"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0B"), (999, "999B"), (1234, "1.2kB"), (12_345_678, "12MB"), (55.6e9, "56GB"), (2e12, "2TB")],
)
def test_link_rates_name_their_unit(size_bytes: float, text: str) -> None:
    fleet = (row(WORKER, swapped_bytes=0),), (row(WORKER, swapped_bytes=size_bytes),)
    screen = screen_of(workers=fleet[0])
    screen.take(sample(workers=fleet[1], at_s=1.0))
    assert shown(screen)[3].split()[-2] == text


def test_lost_coordinator_changes_only_the_head() -> None:
    screen = screen_of(REQUEST)
    before = shown(screen)
    screen.disconnected("no coordinator listens there", 2.0)
    screen.disconnected("still down", 3.0)
    after = shown(screen, now=12.0)
    assert "DISCONNECTED for 10.0s, trying again: still down" in after[0]
    assert after[1:] == before[1:]
    screen.take(sample(REQUEST, at_s=13.0))
    assert "connected" in shown(screen, now=13.0)[0]
    assert "nothing new for 6.0s" in shown(screen, now=19.0)[0]


def test_screen_says_so_before_the_first_answer() -> None:
    screen = Screen()
    assert "DISCONNECTED, trying again: connecting" in shown(screen)[0]
    why = "runtime_dir=/run/hisparse: owner 0, mode 0755: others could reach it (chown it to user 1000 and chmod 700)"
    screen.disconnected(why, 1.0)
    assert why in " ".join(line.strip() for line in shown(screen)), "the whole of it, with the remedy"


@given(
    width=st.integers(1, 200),
    height=st.integers(1, 60),
    requests=st.integers(0, 40),
    workers=st.integers(0, 30),
    keys=st.lists(st.sampled_from(["tab", "?", "/", "enter", "end", "r", "d", "x", "S"]), max_size=4),
)
def test_any_size_is_filled_without_overrun(
    width: int, height: int, requests: int, workers: int, keys: list[str]
) -> None:
    long = "a name much longer than its column 漢字漢字" * 4
    rows = [row(REQUEST, request_id=f"{number}{long}", worker=long, reason=long) for number in range(requests)]
    fleet = tuple(row(WORKER, worker=f"{number}{long}", node=long) for number in range(workers))
    screen = screen_of(*rows, workers=fleet, pools=(POOL, row(POOL, node=long)) * 3)
    press(screen, *keys)
    lines = draw(screen, width, height, 0.0)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    assert not any("\n" in line.plain for line in lines)
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        assert lines[0].plain.strip() in f"{width}x{height} is too small: {WIDTH_MIN}x{HEIGHT_MIN} at least"


def test_names_and_reasons_cannot_command_the_terminal() -> None:
    """They come from clients and workers."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\u202e"
    detail = messages.RequestDetail(0, row(REQUEST, request_id=evil), (messages.HistoryLine(1.0, "e", "S", evil),))
    screen = screen_of(row(REQUEST, request_id=evil, reason=evil), workers=(row(WORKER, worker=evil),), history=detail)
    press(screen, "r")
    screen.note(evil, 0.0)
    for keys in ((), ("n",), ("enter",)):
        press(screen, *keys)
        text = "".join(line.plain for line in draw(screen, 150, 30, 0.0))
        assert text.isprintable()
    assert clean("a\x1bb") == "a?b"
