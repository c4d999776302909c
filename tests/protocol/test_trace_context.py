"""traceparent and tracestate, as W3C Trace Context has them."""

from __future__ import annotations

import pytest

from protocol import messages
from protocol.messages import TRACE_STATE_CHARS_MAX, Sampling, Submit, TraceContext
from protocol.trace_context import context_of_headers, headers_of, is_sampled, read_context

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
CALLER = TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), is_sampled=True)


def test_valid_parent_is_read() -> None:
    assert read_context(f"00-{TRACE}-{SPAN}-01") == CALLER
    assert read_context(f" 00-{TRACE}-{SPAN}-01 ", "a=1") == TraceContext(CALLER.trace_id, CALLER.span_id, True, "a=1")
    assert read_context(f"00-{TRACE}-{SPAN}-02") == TraceContext(CALLER.trace_id, CALLER.span_id, False)
    assert read_context(f"cc-{TRACE}-{SPAN}-03-of-a-later-version") == CALLER


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\x00",
        f"0٠-{TRACE}-{SPAN}-01",
    ],
)
def test_invalid_parent_is_as_good_as_absent(header: str) -> None:
    assert read_context(header, "a=1") is None


def test_long_state_loses_its_last_members() -> None:
    state = ",".join(f"vendor{number}=1" for number in range(100))
    read = read_context(f"00-{TRACE}-{SPAN}-01", state)
    assert read is not None
    assert state.startswith(f"{read.state},")
    assert TRACE_STATE_CHARS_MAX - 20 < len(read.state) <= TRACE_STATE_CHARS_MAX
    unreadable = read_context(f"00-{TRACE}-{SPAN}-01", "a=\n")
    assert unreadable is not None
    assert unreadable.state == ""


def test_headers_with_one_parent_are_a_context() -> None:
    parent = ("traceparent", f"00-{TRACE}-{SPAN}-01")
    states = ("tracestate", "a=1"), ("tracestate", "b=2")
    assert context_of_headers([("host", "x"), parent, *states]) == read_context(parent[1], "a=1,b=2")
    assert context_of_headers([parent, parent]) is None
    assert context_of_headers([*states]) is None


def test_context_is_written_as_it_is_read() -> None:
    for context in (CALLER, TraceContext(CALLER.trace_id, CALLER.span_id, is_sampled=False, state="a=1,b=2")):
        assert read_context(**headers_of(context)) == context
    assert headers_of(None) == {}


def test_caller_decides_about_sampling_and_else_the_ratio() -> None:
    quiet = TraceContext(CALLER.trace_id, CALLER.span_id, is_sampled=False)
    assert is_sampled(CALLER, CALLER.trace_id, 0.0)
    assert not is_sampled(quiet, CALLER.trace_id, 1.0)
    ids = [number.to_bytes(2, "big") * 8 for number in range(0, 65_536, 16)]
    shares = [sum(is_sampled(None, it, ratio) for it in ids) / len(ids) for ratio in (0.0, 0.25, 1.0)]
    assert shares == pytest.approx([0.0, 0.25, 1.0], abs=0.001)


def test_context_travels_in_a_submission() -> None:
    submit = Submit(1, b"", Sampling(1), trace=CALLER)
    assert messages.decode_admin(messages.encode(submit)) == submit
