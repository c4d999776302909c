"""Messages of page transfer that a peer made wrong: each is refused as unreadable, and ends no thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from protocol.errors import ProtocolError
from tests.support.fakes.transfer_world import LAYOUT
from worker.transfer.control import ReceiverControl, SenderControl
from worker.transfer.interface import TRANSFER_VERSION, Description
from worker.transfer.wire import Stopped, StopWriting, encode, from_receiver, from_sender

DEEP = b"\x91" * 100_000 + b"\xc0"
NO_TEXT = b"\xff\xfe\xff\xfe"
POLL_MS = 60_000


def wrong(tag: str) -> dict[str, bytes]:
    """By kind."""
    whole = encode(Stopped(1, True, "gone") if tag == "stopped" else StopWriting(1, "gone"))
    return {
        "nested": DEEP,
        "nested behind the tag": whole[: 2 + len(tag)] + DEEP,
        "nested in an element too many": bytes([whole[0] + 1]) + whole[1:] + DEEP,
        "no UTF-8": whole.replace(b"gone", NO_TEXT),
        "cut off": whole[:-1],
        "nothing": b"",
    }


@pytest.mark.parametrize(("tag", "decode"), [("stopped", from_sender), ("stop", from_receiver)])
@pytest.mark.parametrize("kind", wrong("stop"))
def test_wrong_message_is_refused(tag: str, decode: Callable[[bytes], object], kind: str) -> None:
    with pytest.raises(ProtocolError, match="unreadable"):
        decode(wrong(tag)[kind])


def test_wrong_messages_are_counted_and_the_next_one_is_heard(tmp_path: Path) -> None:
    receiver = ReceiverControl(f"ipc://{tmp_path}/r")
    sender = SenderControl("s")
    sender.reach(receiver.address, b"")
    raw: zmq.Socket[bytes] = sender._sockets[receiver.address]
    heard_there, heard_here = [], []
    for data in (*wrong("stopped").values(), encode(Stopped(1, True, "gone"))):
        raw.send(data)
    while not heard_there:
        assert receiver.socket.poll(POLL_MS)
        heard_there += receiver.receive()
    for data in (*wrong("stop").values(), encode(StopWriting(1, "gone"))):
        receiver.socket.send_multipart([b"s", data])
    while not heard_here:
        assert sender.poller.poll(POLL_MS)
        heard_here += sender.receive()
    assert (heard_there, receiver.unreadable) == ([("s", Stopped(1, True, "gone"))], len(wrong("stop")))
    assert (heard_here, sender.unreadable) == ([(receiver.address, StopWriting(1, "gone"))], len(wrong("stop")))
    sender.close()
    receiver.close()


@pytest.mark.parametrize("kind", ["name", "array", "extra"])
def test_wrong_description_is_refused(kind: str) -> None:
    whole = Description(TRANSFER_VERSION, "shared", "gone", "ipc://x", 1, b"", LAYOUT).encode()
    data = {
        "name": whole.replace(b"gone", NO_TEXT),
        "array": whole[:1] + DEEP[:4_000],
        "extra": bytes([whole[0] + 1]) + whole[1:] + DEEP[:4_000],
    }[kind]
    with pytest.raises(ProtocolError, match="not a description"):
        Description.decode(data)
