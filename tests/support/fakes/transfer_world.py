"""A network, two senders and one receiver of pages under one seed, for the cores of worker/transfer.

Messages are lost, doubled and reordered; checksums are taken late; processes die with writes under way. Where senders
write, writes land at any moment, and again until the engine says that they have ended, unless their endpoint is
destroyed; failed ones land all the same. Where the receiver fetches, it copies when it takes the checksum, from a dead
sender whatever is there by then. Every page has an owner, and what lands in a foreign page is the defect looked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

from worker.transfer.interface import Arrived, Delivered, Description, Failed, Layout, Revoked
from worker.transfer.receiving import Action as ReceiverAction
from worker.transfer.receiving import AdmitSender, CheckUnit, EmitReceiverEvent, Receiving, SendToSender, ShutOut
from worker.transfer.sender_actions import Action as SenderAction
from worker.transfer.sender_actions import Connect, Disconnect, EmitSenderEvent, Post, SendToReceiver
from worker.transfer.sending import Sending
from worker.transfer.wire import Ready, ReceiverMessage, SenderMessage

Message = TypeVar("Message", SenderMessage, ReceiverMessage)

LAYOUT: Final = Layout(64, 600, 2, 4, 0, 1, 1, "model")
PART_ENDS: Final = ((600,), (300, 600), (100, 200, 600))
HOST_PAGES: Final = 12
WINDOW_UNITS: Final = 4
WINDOW_BYTES: Final = 1_500
PEER: Final = "the receiver"
LIFE: Final = 77
#: Parts of pages that are ready at one time, and go in any order.
SHUFFLED: Final = 6
#: Simulated seconds between two events.
STEP_S: Final = 0.05


@dataclass(eq=False)
class FakeSender:
    """One life of a process."""

    name: str
    core: Sending
    is_alive: bool = True
    failed: set[int] = field(default_factory=set)
    delivered: set[tuple[int, int]] = field(default_factory=set)


@dataclass(eq=False)
class Write:
    sender: FakeSender
    post: Post
    endpoint_life: object
    is_corrupt: bool
    has_landed: bool = False
    has_ended: bool = False


class FakeTransferWorld:
    """One seed. `run` is chaos, `settle` a fair network to the end; both check what must hold after every event."""

    def __init__(self, seed: int, *, fetches: bool) -> None:
        self.random = Random(seed)
        self.fetches = fetches
        self.now = 0.0
        self.receiver = Receiving(LAYOUT, HOST_PAGES, LIFE, fetches=fetches)
        self.senders: list[FakeSender] = []
        self.to_receiver: list[tuple[str, SenderMessage]] = []
        self.to_senders: list[tuple[str, ReceiverMessage]] = []
        self.writes: list[Write] = []
        self.checks: list[CheckUnit] = []
        self.endpoints: dict[str, object] = {}
        self.lives: dict[int, object] = {}
        self.owner: dict[int, str] = {}  # page -> who may write to it; absent: free
        self.memory: dict[tuple[int, int], str] = {}  # page, unit's part -> what lies there
        self.transfers: dict[int, tuple[FakeSender, tuple[int, ...], int]] = {}  # sender, pages, parts
        self.arrived: dict[int, set[int]] = {}
        self.over: dict[int, str] = {}  # transfer -> arrived or revoked, at the receiver
        self.unsent: list[tuple[int, int, int]] = []  # transfer, index, part
        self.corruption = 0.0
        for name in ("a/1", "b/1"):
            self._start(name)

    def _start(self, name: str) -> None:
        core = Sending(LAYOUT, HOST_PAGES, {"fake": b"here"}, window_bytes=WINDOW_BYTES, window_units=WINDOW_UNITS)
        self.senders.append(FakeSender(name, core))

    # ---------------------------------------------------------------- chaos

    def run(self, events: int) -> None:
        commands = {
            self._open: 3,
            self._send: 8,
            self._hear: 20,
            self._land: 10,
            self._end_write: 10,
            self._check: 10,
            self._tick: 4,
            self._revoke: 1,
            self._cancel: 1,
            self._exit: 0.3,
        }
        self.corruption = self.random.choice((0.0, 0.1, 0.5))
        self.loss = self.random.choice((0.0, 0.1, 0.3))
        for _ in range(events):
            self.now += STEP_S * self.random.random()
            self.random.choices(list(commands), list(commands.values()))[0]()
            self._check_invariants()

    def settle(self) -> None:
        """Lose nothing more, and prove every exit, until all transfers are over on both sides."""
        self.corruption = self.loss = 0.0
        living = {sender.name for sender in self._alive()}
        for number, (sender, _, _) in self.transfers.items():
            if not sender.is_alive:
                self._perform(self.receiver.revoke(number, "its sender is dead", self.now))
                if sender.name not in living:
                    self._perform(self.receiver.sender_exited(sender.name))
        for turn in range(5_000):
            for transfer_id in [t for s in self._alive() for t in s.failed] if turn % 50 == 0 else []:
                self._perform(self.receiver.revoke(transfer_id, "its sender failed", self.now))
            if not self.receiver.open_transfers and not any(s.core.open_transfers for s in self._alive()):
                break
            self.now += STEP_S
            self._send()
            self._land()
            for _ in range(4):
                self._hear()
                self._end_write()
                self._check()
            self._tick()
            self._check_invariants()
        for write in self.writes:  # whatever can still land does so now
            if not write.has_landed and self._may_land(write):
                self._store(write)
        self._check_invariants()

    # ---------------------------------------------------------------- commands

    def _alive(self) -> list[FakeSender]:
        return [sender for sender in self.senders if sender.is_alive]

    def _open(self) -> None:
        free = [page for page in range(HOST_PAGES) if page not in self.owner]
        if len(free) < 3 or not self._alive():
            return
        transfer_id, sender = len(self.transfers), self.random.choice(self._alive())
        pages = tuple(self.random.sample(free, self.random.randint(1, 3)))
        ends = self.random.choice(PART_ENDS)
        self.transfers[transfer_id] = (sender, pages, len(ends))
        self.arrived[transfer_id] = set()
        for page in pages:
            self.owner[page] = f"transfer {transfer_id}"
            for part in range(3):
                self.memory[page, part] = "old"
        description = Description(1, "fake", "receiver", PEER, LIFE, b"", LAYOUT).encode()
        self._perform(self.receiver.open(transfer_id, pages))
        self._act(sender, sender.core.open(transfer_id, description, len(pages), ends, self.now))
        self.unsent += [(transfer_id, index, part) for index in range(len(pages)) for part in range(len(ends))]

    def _send(self) -> None:
        if self.unsent:
            transfer_id, index, part = self.unsent.pop(self.random.randrange(min(len(self.unsent), SHUFFLED)))
            sender = self.transfers[transfer_id][0]
            if sender.is_alive:
                self._act(sender, sender.core.send(transfer_id, index, index, part, self.now))

    def _hear(self) -> None:
        mine = self.random.random() < 0.5
        if mine and self.to_receiver:
            name, message = self._pick(self.to_receiver)
            self._perform(self.receiver.heard(name, message, self.now))
        elif not mine and self.to_senders:
            name, answer = self._pick(self.to_senders)
            for sender in [sender for sender in self._alive() if sender.name == name]:
                self._act(sender, sender.core.heard(PEER, answer, self.now))

    def _pick(self, queue: list[tuple[str, Message]]) -> tuple[str, Message]:
        at = self.random.randrange(len(queue))
        return queue[at] if self.random.random() < self.loss / 2 else queue.pop(at)  # doubled, or once

    def _land(self) -> None:
        flying = [w for w in self.writes if not (w.has_landed and w.has_ended) and self._may_land(w)]
        if flying:
            self._store(self.random.choice(flying))

    def _may_land(self, write: Write) -> bool:
        return not self.fetches and self.endpoints.get(write.sender.name) is write.endpoint_life

    def _store(self, write: Write) -> None:
        write.has_landed = True
        post = write.post
        part = post.unit % self.transfers[post.transfer_id][2]
        owner = self.owner.get(post.target)
        assert owner == f"transfer {post.transfer_id}", f"I2: {post} landed in a page of {owner}"
        self.memory[post.target, part] = "corrupt" if write.is_corrupt else f"{post.transfer_id}:{post.unit}"

    def _end_write(self) -> None:
        open_writes = [w for w in self.writes if not w.has_ended and w.sender.is_alive]
        if not open_writes:
            return
        write = self.random.choice(open_writes)
        sender = write.sender
        is_cut = self.endpoints.get(sender.name) is not write.endpoint_life
        if not self.fetches and (is_cut or (self.corruption and self.random.random() < 0.02)):
            write.has_ended = True
            self._act(sender, sender.core.written(write.post, 0, "broken", self.now))
        elif write.has_landed or self.fetches:
            write.has_ended = True
            checksum = hash(f"{write.post.transfer_id}:{write.post.unit}")
            self._act(sender, sender.core.written(write.post, checksum, "", self.now))

    def _check(self) -> None:
        if self.checks:
            self._take(self.checks.pop(self.random.randrange(len(self.checks))))

    def _take(self, check: CheckUnit) -> None:
        part = check.unit % self.transfers[check.transfer_id][2]
        if self.fetches:
            owner = self.owner.get(check.page)
            assert owner == f"transfer {check.transfer_id}", f"I2: {check} was copied to a page of {owner}"
            is_corrupt = self.random.random() < self.corruption or not self.transfers[check.transfer_id][0].is_alive
            self.memory[check.page, part] = "corrupt" if is_corrupt else f"{check.transfer_id}:{check.unit}"
        found = hash(self.memory[check.page, part])
        self._perform(self.receiver.checked(check, found == check.checksum))

    def _tick(self) -> None:
        self._perform(self.receiver.tick(self.now))
        for sender in self._alive():
            self._act(sender, sender.core.tick(self.now))

    def _revoke(self) -> None:
        if self.transfers:
            self._perform(self.receiver.revoke(self.random.choice(list(self.transfers)), "aborted", self.now))

    def _cancel(self) -> None:
        if self.transfers:
            transfer_id = self.random.choice(list(self.transfers))
            sender = self.transfers[transfer_id][0]
            if sender.is_alive:
                self._act(sender, sender.core.cancel(transfer_id, "cancelled", self.now))

    def _exit(self) -> None:
        """A sender dies. Another one starts: under its name if its exit was proved, which processes of containers have
        in every life, else under a name of its own."""
        if not self._alive():
            return
        dead = self.random.choice(self._alive())
        dead.is_alive = False
        if self.random.random() < 0.5:
            self._perform(self.receiver.sender_exited(dead.name))
            self._start(dead.name)
        else:
            self._start(f"{dead.name[0]}/{len(self.senders)}")

    # ---------------------------------------------------------------- actions

    def _act(self, sender: FakeSender, actions: Sequence[SenderAction]) -> None:
        for action in actions:
            match action:
                case SendToReceiver(_, message):
                    if self.random.random() >= self.loss:
                        self.to_receiver.append((sender.name, message))
                case Post():
                    life = self.lives[action.endpoint]
                    self.writes.append(Write(sender, action, life, self.random.random() < self.corruption))
                case Disconnect():
                    for write in self.writes:  # the engine forgets them; their bytes are on the way all the same
                        write.has_ended |= write.sender is sender and write.post.endpoint == action.endpoint
                case EmitSenderEvent(Delivered(transfer_id, index)):
                    assert (transfer_id, index) not in sender.delivered
                    assert index in self.arrived[transfer_id]
                    sender.delivered.add((transfer_id, index))
                case EmitSenderEvent(Failed(transfer_id, _)):
                    assert transfer_id not in sender.failed
                    sender.failed.add(transfer_id)
                case Connect():
                    pass

    def _perform(self, actions: Sequence[ReceiverAction]) -> None:
        for action in actions:
            match action:
                case SendToSender(sender, message):
                    if isinstance(message, Ready):
                        self.lives[message.endpoint] = self.endpoints[sender]
                    if self.random.random() >= self.loss:
                        self.to_senders.append((sender, message))
                case AdmitSender(sender, place):
                    assert place == b"here"
                    self.endpoints[sender] = object()
                    self._perform(self.receiver.admitted(sender, b"blob"))
                case ShutOut(sender):
                    mine = [check for check in self.checks if check.sender == sender]
                    self.checks = [check for check in self.checks if check.sender != sender]
                    for check in mine:
                        self._take(check)
                    del self.endpoints[sender]
                    self._perform(self.receiver.shut_out(sender))
                case CheckUnit():
                    self.checks.append(action)
                case EmitReceiverEvent(event):
                    self._told(event)

    def _told(self, event: Arrived | Revoked) -> None:
        match event:
            case Arrived(transfer_id, index):
                _, pages, parts = self.transfers[transfer_id]
                assert transfer_id not in self.over
                assert index not in self.arrived[transfer_id]
                self.arrived[transfer_id].add(index)
                units = range(index * parts, (index + 1) * parts)
                held = [self.memory[pages[index], unit % parts] for unit in units]
                assert held == [f"{transfer_id}:{unit}" for unit in units], (
                    f"page {index} of {transfer_id} lacks a part: {held}"
                )
                if len(self.arrived[transfer_id]) == len(pages):
                    self._give_away(transfer_id, "arrived")
            case Revoked(transfer_id, _):
                self._give_away(transfer_id, "revoked")

    def _give_away(self, transfer_id: int, why: str) -> None:
        """The pages go to another owner: a request that decodes on, or the next transfer."""
        assert transfer_id not in self.over
        self.over[transfer_id] = why
        for page in self.transfers[transfer_id][1]:
            if self.random.random() < 0.5:
                del self.owner[page]
            else:
                self.owner[page] = f"a request after transfer {transfer_id}"
                if self.random.random() < 0.7:
                    del self.owner[page]

    def _check_invariants(self) -> None:
        for sender in self._alive():
            units, size = sender.core.in_flight
            assert 0 <= units <= WINDOW_UNITS
            assert 0 <= size <= WINDOW_BYTES
            assert (units == 0) == (size == 0)
