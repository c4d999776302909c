"""Hostile bytes for fuzz tests: noise, and valid messages of every kind with something wrong in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from protocol import messages
from protocol.arrays import pack_int32
from protocol.messages import PROTOCOL_VERSION, Sampling
from tests.support.fakes.worker import hello
from tests.support.progress import RequestEntry, progress

CLIENT_SEEDS: tuple[messages.Message, ...] = (
    messages.Hello(PROTOCOL_VERSION, "client", "fuzz"),
    messages.Submit(1, pack_int32([1, 2, 3]), Sampling(max_tokens=5, stop=("x",)), "fuzz", 1),
    messages.Attach(2, "fuzz", 0),
    messages.Detach(3, "fuzz"),
    messages.AbortRequests(4, ("fuzz",)),
    messages.AcknowledgeOutputs(5, ("fuzz",)),
    messages.ListRequests(5, 10),
    messages.DescribeRequest(6, "fuzz"),
    messages.ListWorkers(7),
    messages.ListPools(8),
    messages.FetchTokenizer(9),
)
ADMIN_SEEDS: tuple[messages.Message, ...] = (
    messages.Hello(PROTOCOL_VERSION, "admin", "fuzz"),
    *CLIENT_SEEDS[1:],
    messages.RetractRequests(10, ("fuzz",)),
    messages.ResumeRequests(11, ("fuzz",)),
    messages.ResizeRequests(12, ("fuzz",), 128),
    messages.DrainWorkers(13, ("fuzz",), True, 5.0),
    messages.UndrainWorkers(14, ("fuzz",)),
    messages.ReleaseQuarantine(15, ("fuzz",)),
)
#: As they are they speak for slot 0 and admission 1, which are the victim's.
WORKER_SEEDS: tuple[messages.Message, ...] = (
    hello("fuzz", epoch=1),
    messages.Report(
        1, 1, 0, progress(RequestEntry(0, 1, 2, [66, 66], 5), RequestEntry(1, 2, 0, [66])), (messages.Started(1),)
    ),
    messages.Report(
        1,
        1,
        0,
        None,
        (
            messages.Staged(1, 1.0, 1.0),
            messages.Parked(1),
            messages.Resized(1, 128, 3),
            messages.Counters(1, 1, 1, bytes(16), bytes(16), bytes(16)),
        ),
    ),
    messages.Report(1, 1, 0, None, (messages.Finished(1, "eos", 3, "tail"), messages.Released(1, 10))),
    messages.Report(1, 1, 0, None, (messages.Faulted(1, "fault"), messages.Released(1, 10))),
    messages.ReplayCommands(1, 1),
    messages.Heartbeat(1, 0, 1, 1, 1.0),
    messages.TokenizerChunk(1, "hash", 0, 1, b"data"),
)

NASTY: Final[Sequence[Any]] = (
    *(None, True, False, "", b"", [], {}, 0, -1, 1, 2, 3),
    *(2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.5, -1.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *("fuzz", "victim", "x" * 300, "\x00", "\U0001f600", b"abc", bytes(4), bytes(64), bytes(100_000)),
    *(["fuzz", "victim"], ["fuzz"] * 50, [[]], [1, 2, 3], {"a": 1}),
)
#: Commands by which an operator may rightfully touch any request, or all workers.
LAWFUL = frozenset(
    {
        "AbortRequests",
        "AcknowledgeOutputs",
        "RetractRequests",
        "ResumeRequests",
        "ResizeRequests",
        "DrainWorkers",
        "Detach",
    }
)


def harmless(frames: list[bytes]) -> list[bytes]:
    """Without what an operator may lawfully do to the victim or its worker, and what connects that worker anew."""
    return [frame for frame in frames if not is_lawful_harm(frame) and not is_reconnection(frame)]


def is_reconnection(frame: bytes) -> bool:
    """Whether the process of the worker "victim", which is this one, says its hello on another connection."""
    try:
        message = messages.decode_worker(frame)
    except ValueError:
        return False
    return isinstance(message, messages.WorkerHello) and (message.worker, message.pid) == ("victim", os.getpid())


def is_lawful_harm(frame: bytes) -> bool:
    try:
        message = messages.decode_admin(frame)
    except ValueError:
        return False
    if type(message).__name__ not in LAWFUL and not isinstance(message, messages.StopCoordinator):
        return False
    names = getattr(message, "request_ids", None)
    return names is None or "victim" in names


def leaves(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Paths to everything inside nested lists, the lists themselves included."""
    if not isinstance(tree, list):
        return [path]
    return [path, *(leaf for i, branch in enumerate(tree) for leaf in leaves(branch, (*path, i)))]


def replaced(tree: Any, path: tuple[int, ...], value: Any) -> Any:
    if not path:
        return value
    return [replaced(branch, path[1:], value) if i == path[0] else branch for i, branch in enumerate(tree)]


@st.composite
def _mutants(draw: st.DrawFn, seeds: tuple[messages.Message, ...]) -> bytes:
    """One to three places of a valid message replaced, or a few of its bytes, or its end cut off."""
    frame = messages.encode(draw(st.sampled_from(seeds)))
    match draw(st.sampled_from(["valid", "values", "values", "values", "bytes", "cut"])):
        case "values":
            tree = msgspec.msgpack.decode(frame)
            for _ in range(draw(st.integers(1, 3))):
                tree = replaced(tree, draw(st.sampled_from(leaves(tree))), draw(st.sampled_from(NASTY)))
            return msgspec.msgpack.encode(tree)
        case "bytes":
            mutable = bytearray(frame)
            for _ in range(draw(st.integers(1, 4))):
                mutable[draw(st.integers(0, len(mutable) - 1))] = draw(st.integers(0, 255))
            return bytes(mutable)
        case "cut":
            return frame[: draw(st.integers(0, len(frame)))]
    return frame


def hostile_frames(seeds: tuple[messages.Message, ...]) -> st.SearchStrategy[list[bytes]]:
    """What one hostile peer sends, in order."""
    return st.lists(st.one_of(_mutants(seeds), _mutants(seeds), _mutants(seeds), st.binary(max_size=200)), max_size=12)
