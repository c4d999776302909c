"""Files and mailboxes on two ways: from Client.submit until an Admit has left the coordinator, and from
Client.retract until a Withdraw has.

    python -m tools.docs.walk [--files]

A coordinator with a journal, a client and a fake worker run in this process; a profiler notes each file of the project
whose code runs in between. Of several calls, after a first one, the files that each of them passes are counted: what
happens once a process, and what timers run meanwhile, is not. A slow clock keeps most timers from running at all,
however busy the machine is.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import click
import trio
from trio.testing import MockClock

from coordinator.actor import Mailbox
from coordinator.listener.router import RouterSocket
from coordinator.service import Coordinator
from hisparse.client.client import open_client
from protocol import messages
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX, Sampling
from protocol.settings import ClusterSettings, Config, CoordinatorSettings
from tests.support.fakes.worker import FakeWorker, hello

ROOT: Final = Path(__file__).resolve().parents[2]
ROLES: Final = ("client", "admin", "worker")
WALKS: Final = 5
#: Seconds of timers in a second of the walk.
CLOCK_RATE: Final = 0.05
PRODUCT: Final = ("coordinator", "protocol", "basics", "hisparse", "metrics")


class Walk:
    """Collects the files that run, and the mailboxes that are told, while it is entered."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.mailboxes: Counter[str] = Counter()
        self._put = patch.object(Mailbox, "put", self._noting(Mailbox.put))

    def __enter__(self) -> Walk:
        self._put.start()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._put.stop()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.files.add(frame.f_code.co_filename)

    def _noting(self, put: Any) -> Any:
        def noting(mailbox: Mailbox[Any], message: Any) -> None:
            self.mailboxes[mailbox.owner.rpartition(" ")[0] or mailbox.owner] += 1
            put(mailbox, message)

        return noting


def product_of(walks: list[Walk]) -> list[str]:
    """Return the files of the product that all of `walks` passed, by path."""
    files = set.intersection(*(walked.files for walked in walks))
    names = [str(Path(file).relative_to(ROOT)) for file in files if file.startswith(f"{ROOT}/")]
    return sorted(name for name in names if name.startswith(PRODUCT))


async def next_command(worker: FakeWorker, kind: type[messages.Command]) -> None:
    while True:
        match await worker.hear():
            case messages.Commands(commands=commands) if any(isinstance(command, kind) for command in commands):
                return


async def walk(directory: Path) -> dict[str, list[Walk]]:
    """Submit requests one after the other, then retract them; return what each call passed, but the first, by name."""
    client_endpoint, admin_endpoint, worker_endpoint = (f"ipc://{directory}/{role}.sock" for role in ROLES)
    config = Config(
        cluster=ClusterSettings(
            runtime_dir=str(directory),
            client_endpoint=client_endpoint,
            admin_endpoint=admin_endpoint,
            worker_endpoint=worker_endpoint,
        ),
        coordinator=CoordinatorSettings(journal=f"{directory}/journal.sqlite", metrics_port=-1),
    )
    client = RouterSocket(client_endpoint, message_bytes_max=CLIENT_MESSAGE_BYTES_MAX)
    admin = RouterSocket(admin_endpoint, message_bytes_max=CLIENT_MESSAGE_BYTES_MAX)
    worker = RouterSocket(worker_endpoint, message_bytes_max=WORKER_MESSAGE_BYTES_MAX, credentials=True)
    coordinator = Coordinator(config, client, admin, worker)
    walks = {name: [Walk() for _ in range(1 + WALKS)] for name in ("submit", "retract")}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(coordinator.serve)
        await coordinator.started.wait()
        fake = await FakeWorker.connect(worker_endpoint)
        await fake.say(hello("w0"))
        await fake.hear()
        async with open_client(client_endpoint) as user:
            for number, walked in enumerate(walks["submit"]):
                with walked:
                    await user.submit([1, 2, 3], Sampling(max_tokens=8), request_id=f"r{number}")
                    await next_command(fake, messages.Admit)
        async with open_client(admin_endpoint, role="admin") as operator:
            for number, walked in enumerate(walks["retract"]):
                with walked:
                    await operator.retract([f"r{number}"])
                    await next_command(fake, messages.Withdraw)
        fake.close()
        nursery.cancel_scope.cancel()
    for socket in (client, admin, worker):
        socket.close()
    return {name: walked[1:] for name, walked in walks.items()}


@click.command()
@click.option("--files", is_flag=True, help="Print each file, too.")
def main(files: bool) -> None:
    """Count files and mailboxes from submit to Admit, and from retract to Withdraw."""
    with tempfile.TemporaryDirectory() as directory:
        walks = trio.run(walk, Path(directory), clock=MockClock(CLOCK_RATE))
    for call, walked in walks.items():
        product, mailboxes = product_of(walked), walked[0].mailboxes
        if files:
            print("\n".join(product))
        rooms = Counter(path.split("/")[0] for path in product)
        print(f"{call}: {len(product)} files: " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
        print(f"{call}: {len(mailboxes)} mailboxes: " + ", ".join(f"{owner} {n}" for owner, n in mailboxes.items()))


if __name__ == "__main__":
    main()
