"""What a listener decides, without sockets: rates, connections, and which keys ZAP accepts."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from basics.token_bucket import BYTES_PER_TOKEN, cost_of
from coordinator.listener import connection_tracker
from coordinator.listener.connection_tracker import NEWCOMERS_MAX, ConnectionTracker
from coordinator.listener.rate_limiter import CUT_AFTER, RateLimiter, RateVerdict
from coordinator.listener.router import OTHER_DESCRIPTORS
from coordinator.listener.zap import AllowList, ZapAnswer, ZapHandler
from protocol.errors import CapacityError
from protocol.transport.keys import AllowedKey
from tests import ROOT

PAIRS = [zmq.curve_keypair() for _ in range(3)]
PUBLICS = [public.decode() for public, _ in PAIRS]
ALICE, BOB, OPS = (
    AllowedKey(role, name, public)
    for (role, name), public in zip((("client", "alice"), ("client", "bob"), ("admin", "ops")), PUBLICS, strict=True)
)

# ---------------------------------------------------------------- rates


def verdicts(
    rate_limiter: RateLimiter, count: int, now: float, sender: bytes = b"s", connection: bytes = b"c"
) -> list[RateVerdict]:
    return [rate_limiter.judge(sender, connection, 1.0, now) for _ in range(count)]


def test_burst_is_served_then_warned_then_ignored_then_cut() -> None:
    said = verdicts(RateLimiter(10.0, 5), 5 + CUT_AFTER + 1, 0.0)
    assert said[:5] == [RateVerdict.TAKE] * 5
    assert said[5] is RateVerdict.REFUSE
    assert set(said[6:-1]) == {RateVerdict.IGNORE}
    assert said[-1] is RateVerdict.CUT


def test_bucket_refills_and_warning_is_rearmed() -> None:
    rate_limiter = RateLimiter(10.0, 10)
    assert RateVerdict.REFUSE in verdicts(rate_limiter, 11, 0.0)
    assert verdicts(rate_limiter, 2, 0.1) == [RateVerdict.TAKE, RateVerdict.IGNORE], (
        "one token a tenth of a second, and no pardon"
    )
    assert verdicts(rate_limiter, 12, 100.0) == [RateVerdict.TAKE] * 10 + [RateVerdict.REFUSE, RateVerdict.IGNORE]


def test_connections_of_a_sender_share_a_bucket() -> None:
    rate_limiter = RateLimiter(10.0, 4)
    assert verdicts(rate_limiter, 4, 0.0, connection=b"first") == [RateVerdict.TAKE] * 4
    assert verdicts(rate_limiter, 2, 0.0, connection=b"second") == [RateVerdict.REFUSE, RateVerdict.IGNORE]
    assert verdicts(rate_limiter, 1, 0.0, connection=b"first") == [RateVerdict.REFUSE]
    assert verdicts(rate_limiter, 1, 0.0, sender=b"other") == [RateVerdict.TAKE]


def test_large_messages_cost_more_tokens() -> None:
    rate_limiter = RateLimiter(10.0, 4)
    assert cost_of(2 * BYTES_PER_TOKEN) == 3.0
    assert rate_limiter.judge(b"s", b"c", 1_000.0, 0.0) is RateVerdict.TAKE
    assert rate_limiter.judge(b"s", b"c", 1.0, 0.0) is RateVerdict.REFUSE


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.floats(0.1, 9.0), st.floats(0, 0.5)), max_size=200),
    st.integers(1, 8),
)
def test_no_sender_exceeds_rate_and_burst(said: list[tuple[int, int, float, float]], senders_max: int) -> None:
    """I8: the number of remembered senders is bounded, too."""
    per_s, burst, now = 5.0, 10.0, 0.0
    rate_limiter, bounded = RateLimiter(per_s, burst), RateLimiter(per_s, burst, senders_max)
    taken: Counter[int] = Counter()
    for sender, connection, cost, pause in said:
        now += pause
        if rate_limiter.judge(b"%d" % sender, b"%d" % connection, cost, now) is RateVerdict.TAKE:
            taken[sender] += cost
        bounded.judge(b"%d" % sender, b"%d" % connection, cost, now)
        assert len(bounded) <= senders_max
    assert all(cost <= burst + per_s * now + 1e-6 for cost in taken.values())


# ---------------------------------------------------------------- connections


def test_connections_are_tracked_and_bounded_per_user() -> None:
    it = ConnectionTracker(connections_max=3, per_user_max=2)
    for descriptor in range(5):
        it.came(descriptor, 0.0)
    it.introduce(0, "alice")
    it.introduce(1, "alice")
    it.introduce(0, "alice")  # says hello again
    with pytest.raises(CapacityError, match="2 connections of alice"):
        it.introduce(2, "alice")
    it.introduce(3, "")
    with pytest.raises(CapacityError, match="3 connections of all peers"):
        it.introduce(4, "")
    it.left(0)
    it.introduce(2, "alice")
    assert (it.of({"alice"}), it.of({"bob"}), len(it)) == ([1, 2], [], 4)
    it.introduce(99, "alice")  # left before its hello was read
    assert len(it) == 4
    it.check_invariants()


def test_silent_newcomers_are_bounded_in_time_and_number() -> None:
    it = ConnectionTracker(10, 10)
    it.came(1, 0.0)
    it.came(2, 5.0)
    it.introduce(1, "alice")
    assert it.overdue(connection_tracker.INTRODUCE_LIMIT_S + 4.0) == []
    assert it.overdue(connection_tracker.INTRODUCE_LIMIT_S + 6.0) == [2]
    for descriptor in range(100, 100 + NEWCOMERS_MAX + 3):
        it.came(descriptor, 6.0)
    assert it.overdue(6.0) == [2, 100, 101, 102], "the oldest go first"


@given(
    st.lists(
        st.tuples(st.sampled_from(["came", "left", "hello"]), st.integers(0, 6), st.sampled_from("ab")), max_size=80
    )
)
def test_connection_counts_hold_under_any_events(steps: list[tuple[str, int, str]]) -> None:
    it = ConnectionTracker(connections_max=4, per_user_max=2)
    for what, descriptor, user in steps:
        match what:
            case "came":
                it.came(descriptor, 0.0)
            case "left":
                it.left(descriptor)
            case _:
                try:
                    it.introduce(descriptor, user)
                except CapacityError:
                    assert len(it.of({user})) == 2 or len(it.of("ab")) == 4
        it.check_invariants()
        assert all(len(it.of({name})) <= 2 for name in "ab")


def room_made(soft: int, hard: int, connections: int) -> list[str]:
    """Soft limit after `make_room` in a process with these limits, and what it logged."""
    script = (
        "import resource, sys; from coordinator.listener.router import make_room\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"make_room({connections}); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return [done.stdout.strip(), done.stderr.strip()]


def test_descriptor_limit_is_raised_as_far_as_permitted() -> None:
    assert room_made(256, 8_000, 1_000) == [str(1_000 + OTHER_DESCRIPTORS), ""]
    assert room_made(4_000, 8_000, 1_000) == ["4000", ""]
    limited, said = room_made(256, 1_000, 1_000)
    assert limited == "1000"
    assert "too few descriptors" in said


# ---------------------------------------------------------------- who may come in


def test_key_is_valid_at_the_listener_of_its_role() -> None:
    it = AllowList([ALICE, BOB, OPS])
    assert it.judge("client", ALICE.public, 0.0) == (ZapAnswer.WELCOME, "client:alice")
    assert it.judge("admin", OPS.public, 0.0) == (ZapAnswer.WELCOME, "admin:ops")
    for role, key in (("admin", ALICE), ("worker", ALICE), ("client", OPS)):
        assert it.judge(role, key.public, 0.0) == (ZapAnswer.REFUSED, "")


def test_revoked_key_is_known_by_name() -> None:
    it = AllowList([ALICE, BOB, OPS])
    second = ALICE._replace(public=PUBLICS[2])
    assert it.replace([second, OPS]) == {"client:alice", "client:bob"}
    assert it.judge("client", second.public, 0.0) == (ZapAnswer.WELCOME, "client:alice")
    assert it.judge("client", ALICE.public, 0.0) == (ZapAnswer.REFUSED, "")
    assert it.replace([second, OPS, BOB]) == frozenset()


def question(public: bytes, **changes: bytes) -> list[bytes]:
    parts = {
        **{"version": b"1.0", "number": b"7", "domain": b"client", "address": b"10.0.0.1"},
        **{"identity": b"", "mechanism": b"CURVE"},
    }
    return [*(parts | changes).values(), public]


@pytest.fixture
def handler() -> ZapHandler:
    handler = ZapHandler(AllowList([ALICE, OPS]), Counter())
    handler.close()
    return handler


def test_zap_answer_bears_the_number_of_its_question(handler: ZapHandler) -> None:
    raw = z85.decode(ALICE.public)
    assert handler.answer(question(raw), 0.0) == [b"1.0", b"7", b"200", b"WELCOME", b"client:alice", b""]


@pytest.mark.parametrize(
    "asked",
    [
        question(z85.decode(BOB.public)),
        question(z85.decode(ALICE.public), domain=b"admin"),
        question(z85.decode(ALICE.public), domain=b"\xff"),
        question(z85.decode(ALICE.public), version=b"2.0"),
        question(z85.decode(ALICE.public), mechanism=b"PLAIN"),
        question(b"short"),
        question(b""),
        [*question(z85.decode(ALICE.public)), b"more"],
        question(b"", mechanism=b"NULL")[:-1],
        [b"1.0"],
        [],
    ],
)
def test_unknown_zap_requests_are_refused(handler: ZapHandler, asked: list[bytes]) -> None:
    answer = handler.answer(asked, 0.0)
    assert answer[2] == b"400"
    assert answer[4] == b""
