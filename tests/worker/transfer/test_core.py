"""Page transfer under a network and processes that do their worst (tests/support/fakes/transfer_world.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from protocol.arrays import pack_int32, pack_int64
from protocol.errors import BadInput, WrongState
from tests.support.fakes.transfer_world import HOST_PAGES, LAYOUT, FakeTransferWorld
from worker.transfer import receiving, sender_actions, sending
from worker.transfer.interface import Arrived, Description, Failed, Layout, Revoked
from worker.transfer.receiving import Receiving
from worker.transfer.sending import Sending
from worker.transfer.wire import Begin, BeginRefused, Checked, Ready, Stopped, StopWriting, Written

SEEDS = range(150)


#: Few seeds find the guard missing that is needed least: this one is tried first.
FOUND_BY = 985


def lives(seeds: Iterable[int], *, fetches: bool) -> Counter[str]:
    """How the transfers of these seeds ended at the receiver. Fails where one never does."""
    ended: Counter[str] = Counter()
    for seed in seeds:
        world = FakeTransferWorld(seed, fetches=fetches)
        try:
            world.run(events=400)
            world.settle()
            assert world.receiver.open_transfers == 0
            assert [s.core.in_flight for s in world.senders if s.is_alive] == [(0, 0)] * 2
            assert set(world.over) == set(world.transfers)
        except Exception as error:
            error.add_note(f"seed {seed}, {fetches=}")
            raise
        ended.update(world.over.values())
    return ended


@pytest.mark.parametrize("fetches", [True, False])
def test_no_write_lands_in_a_foreign_page(fetches: bool) -> None:
    """I2, SGLang #24578. Each transfer ends once at the receiver, arrived or revoked, with no more in flight than
    the window."""
    ended = lives(SEEDS, fetches=fetches)
    assert min(ended["arrived"], ended["revoked"]) > len(SEEDS)


def revoke_at_once(self: Any, transfer_id: int, reason: str, now: float) -> list[Any]:
    return [self._end(transfer_id)] if transfer_id in self._transfers else []


def take_exit_as_the_end_of_writes(self: Any, sender: str) -> list[Any]:
    return self.shut_out(sender) if sender in self._endpoints else []


def stop_at_once(self: Any, number: int, reason: str, now: float) -> list[Any]:
    transfer = self._transfers[number]
    for at, unit in transfer.units.items():
        if unit.posted or unit.written:
            self._leave_flight(transfer, at)
    return self._end(number, reason, clean=True)


def call_broken_clean(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number, reason, clean: original(self, number, reason, clean=True)


def look_at_refused_attempts_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, check: Any, good: bool) -> list[Any]:
        actions: list[Any] = original(self, check, good)
        for transfer in self._transfers.values():
            transfer.refused.clear()
        return actions

    return checked


def count_a_page_with_its_first_part(original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, check: Any, good: bool) -> list[Any]:
        transfer = self._transfers.get(check.transfer_id)
        if good and transfer is not None:
            transfer.parts_left[check.unit // len(transfer.part_ends)] = 1
        actions: list[Any] = original(self, check, good)
        return actions

    return checked


@pytest.mark.mutation
def test_page_counted_with_its_first_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiving, "checked", count_a_page_with_its_first_part(Receiving.checked))
    with pytest.raises(AssertionError, match="lacks a part"):
        lives(range(100), fetches=True)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("core", "method", "mutant", "fetches"),
    [
        (Receiving, "revoke", revoke_at_once, False),
        (Receiving, "revoke", revoke_at_once, True),
        (Receiving, "_cut_off", take_exit_as_the_end_of_writes, False),
        (Receiving, "checked", look_at_refused_attempts_again(Receiving.checked), False),
        (Sending, "_stop", stop_at_once, False),
        (Sending, "_end", call_broken_clean(Sending._end), False),
    ],
    ids=[
        "revoke at once",
        "revoke while copying",
        "exit is enough",
        "refused attempts again",
        "stop at once",
        "broken is clean",
    ],
)
def test_each_guard_against_late_writes_is_needed(
    core: type, method: str, mutant: Callable[..., Any], fetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, method, mutant)
    with pytest.raises(AssertionError, match="I2"):
        lives((FOUND_BY, *range(2_000)), fetches=fetches)


# ---------------------------------------------------------------- one message at a time


def description() -> bytes:
    return Description(1, "fake", "receiver", "tcp://r:1", 1, b"", LAYOUT).encode()


def receiver_with_a_page_checked() -> tuple[Receiving, Written]:
    """A transfer of two pages, the first of which has arrived by the message that comes along."""
    core = Receiving(LAYOUT, HOST_PAGES, 1, fetches=False)
    core.open(7, [3, 4])
    core.heard("a/1", Begin(1, 1, 7, 2, LAYOUT, pack_int64([600])), 0.0)
    core.admitted("a/1", b"")
    written = Written(7, 0, 1, 99, 2)
    (check,) = core.heard("a/1", written, 0.0)
    assert isinstance(check, receiving.CheckUnit)
    assert receiving.EmitReceiverEvent(Arrived(7, 0)) in core.checked(check, True)
    return core, written


def test_repeated_completion_is_answered_and_reported_once() -> None:
    core, written = receiver_with_a_page_checked()
    assert core.heard("a/1", written, 0.0) == [receiving.SendToSender("a/1", Checked(7, 0, 1, True))]


def test_foreign_completion_is_ignored() -> None:
    core, _ = receiver_with_a_page_checked()
    assert core.heard("b/1", Written(7, 1, 1, 99, 2), 0.0) == []
    assert core.heard("a/1", Written(7, 2, 1, 99, 2), 0.0) == []
    assert core.heard("b/1", Stopped(7, True, ""), 0.0) == []


def test_name_is_reused_once_its_process_is_proved_dead() -> None:
    """A late message of the dead process about an open transfer is refused. One of the next process about a later
    transfer is not."""
    core, _ = receiver_with_a_page_checked()
    core.open(8, [5])
    assert core.sender_exited("a/1") == [receiving.ShutOut("a/1")]
    assert receiving.EmitReceiverEvent(Revoked(7, "a/1 was shut out")) in core.shut_out("a/1")
    (refusal,) = core.heard("a/1", Begin(1, 1, 8, 1, LAYOUT, pack_int64([600])), 0.0)
    assert isinstance(refusal, receiving.SendToSender)
    assert isinstance(refusal.message, BeginRefused)
    core.open(9, [3])
    assert core.heard("a/1", Begin(1, 1, 9, 1, LAYOUT, pack_int64([600])), 0.0) == [receiving.AdmitSender("a/1", b"")]


def test_completion_after_revocation_is_ignored() -> None:
    core, _ = receiver_with_a_page_checked()
    core.revoke(7, "aborted", 0.0)
    assert core.heard("a/1", Written(7, 1, 1, 99, 2), 0.0) == [receiving.SendToSender("a/1", StopWriting(7, "aborted"))]


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (Begin(2, 1, 7, 2, LAYOUT, pack_int64([600])), "speaks version 2, this receiver 1"),
        (Begin(1, 5, 7, 2, LAYOUT, pack_int64([600])), "is gone"),
        (Begin(1, 1, 7, 3, LAYOUT, pack_int64([600])), "3 pages to send, 2 reserved"),
        (Begin(1, 1, 7, 2, LAYOUT, pack_int64([600, 300])), "ascending ends"),
        (Begin(1, 1, 7, 2, LAYOUT, b"123"), "do not divide"),
        (
            Begin(1, 1, 7, 2, Layout(32, 600, 2, 4, 0, 1, 1, "model"), pack_int64([600])),
            "layout.page_tokens=64: host pages of b/1 have page_tokens 32, those of this worker 64",
        ),
    ],
)
def test_unfit_sender_is_refused_with_both_values(begin: Begin, reason: str) -> None:
    core = Receiving(LAYOUT, HOST_PAGES, 1, fetches=False)
    core.open(7, [3, 4])
    (answer,) = core.heard("b/1", begin, 0.0)
    assert isinstance(answer, receiving.SendToSender)
    assert isinstance(answer.message, BeginRefused)
    assert reason in answer.message.reason
    assert core.revoke(7, "aborted", 0.0) == [receiving.EmitReceiverEvent(Revoked(7, "aborted"))], "no sender has begun"


def sender_with_a_post() -> tuple[Sending, sender_actions.Post]:
    core = Sending(LAYOUT, HOST_PAGES, {"fake": b""})
    core.open(7, description(), 1, (), 0.0)
    core.send(7, 0, 2, 0, 0.0)
    *_, post = core.heard("tcp://r:1", Ready(7, pack_int32([5]), 40, b""), 0.0)
    assert isinstance(post, sender_actions.Post)
    return core, post


def test_endless_write_breaks_its_endpoint() -> None:
    """I8; and the receiver learns that it may still land."""
    core, post = sender_with_a_post()
    assert core.tick(sending.WRITE_LIMIT_S - 1) == []
    actions = core.tick(sending.WRITE_LIMIT_S)
    reason = f"a write took longer than {sending.WRITE_LIMIT_S:g} s"
    assert actions == [
        sender_actions.Disconnect("tcp://r:1", 40),
        sender_actions.SendToReceiver("tcp://r:1", Stopped(7, False, reason)),
        sender_actions.EmitSenderEvent(Failed(7, reason)),
    ]
    assert core.written(post, 99, "", 50.0) == []


def test_unverified_page_fails_its_transfer() -> None:
    """I8; what was written has ended, so the pages are free at once."""
    core, post = sender_with_a_post()
    written = sender_actions.SendToReceiver("tcp://r:1", Written(7, 0, 1, 99, 2))
    assert core.written(post, 99, "", 0.0) == [written]
    assert core.tick(sending.CHECK_RESEND_S) == [written], "it may have been lost"
    reason = f"a page was not verified within {sending.CHECK_LIMIT_S:g} s"
    said = sender_actions.SendToReceiver("tcp://r:1", Stopped(7, True, reason))
    assert core.tick(sending.CHECK_LIMIT_S) == [said, sender_actions.EmitSenderEvent(Failed(7, reason))]
    assert core.in_flight == (0, 0)


def test_transfer_outcome_is_repeated_to_the_receiver() -> None:
    core, _ = sender_with_a_post()
    core.tick(sending.WRITE_LIMIT_S)
    (answer,) = core.heard("tcp://r:1", StopWriting(7, "aborted"), 99.0)
    assert answer == sender_actions.SendToReceiver("tcp://r:1", Stopped(7, False, "the transfer has ended"))


def test_short_prompt_does_not_wait_for_all_pages_of_a_long_one() -> None:
    """One unit is in flight at a time, and transfers to the same receiver take turns."""
    core, posted = Sending(LAYOUT, HOST_PAGES, {"fake": b""}, window_units=1), list[tuple[int, int]]()
    for transfer_id, pages in ((7, 4), (8, 1), (9, 2)):
        core.open(transfer_id, description(), pages, (), 0.0)
        core.heard("tcp://r:1", Ready(transfer_id, pack_int32(list(range(pages))), 40, b""), 0.0)
    sent = [(7, 0), (7, 1), (7, 2), (7, 3), (8, 0), (9, 0), (9, 1)]
    actions = [action for number, index in sent for action in core.send(number, index, index, 0, 0.0)]
    while actions:
        (post,) = (it for it in actions if isinstance(it, sender_actions.Post))
        posted.append((post.transfer_id, post.unit))
        core.written(post, 99, "", 0.0)
        actions = core.heard("tcp://r:1", Checked(post.transfer_id, post.unit, 1, True), 0.0)
        actions = [it for it in actions if isinstance(it, sender_actions.Post)]
    assert posted == [(7, 0), (7, 1), (8, 0), (9, 0), (7, 2), (9, 1), (7, 3)]
    assert core.in_flight == (0, 0)


# ---------------------------------------------------------------- refusals


def test_receiver_refuses_pages_outside_its_pool() -> None:
    core = Receiving(LAYOUT, HOST_PAGES, 1, fetches=False)
    with pytest.raises(BadInput, match=f"not among the {HOST_PAGES}"):
        core.open(1, [0, HOST_PAGES])
    with pytest.raises(BadInput, match="twice"):
        core.open(1, [3, 3])
    core.open(1, [3])
    with pytest.raises(WrongState, match="it is open"):
        core.open(1, [4])
