"""Pure parts of the chaos of two groups (tools/faults/group_chaos.py), which takes minutes and is run by hand."""

from __future__ import annotations

from tools.faults.group_chaos import STREAMS, Streams, all_heard, left_behind


def test_sockets_pools_and_ready_files_are_left_behind() -> None:
    kept = ["journal.sqlite", "journal.sqlite-wal", "journal.sqlite.head", "incarnation", "client.sock.lock"]
    gone = ["client.sock", "group-g0.sock", "http-17.sock", "node.pool", "ready.json"]
    assert left_behind([*kept, *gone]) == gone


def test_a_fault_waits_until_every_stream_has_had_text() -> None:
    streams = Streams(port=1, seed=0)
    streams.heard_at = {-1: 1.0} | dict.fromkeys(range(STREAMS), 5.0)
    assert all_heard(streams, since=4.0)
    streams.heard_at[3] = 3.0
    assert not all_heard(streams, since=4.0)
    del streams.heard_at[3]
    assert not all_heard(streams, since=4.0)
