"""Keepers of weights beside the workers of a cluster (worker.keeper.process): one for each worker, and so for each GPU.

start    with its worker. This process binds the socket, so that a worker that comes first waits for the keeper
death    of a keeper: told at once. Its worker has mapped the weights and goes on. Another keeper starts with the next
         worker, or with its standby
end      with the other children, and with this process

python -m hisparse.cluster.weights DESCRIPTOR PARENT_PID LOG_LEVEL LOG_FORMAT WORKER
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hisparse.cluster.children import Child, child_environ, die_with_parent, exit_text
from protocol import logs
from protocol.config import keeper_path
from protocol.settings import Config


@dataclass
class WeightKeepers:
    """Keepers of weights by the names of their workers. `report` is called with lines for the user."""

    report: Callable[[str], None]
    children: dict[str, Child] = field(default_factory=dict)

    def keep(self, config: Config, log_dir: Path | None) -> None:
        """Have one for the worker of `config` that is about to start, if its settings want one."""
        self.look()
        name = config.worker.name
        if not config.worker.keeper or name in self.children:
            return
        try:
            self.children[name] = start_weight_keeper(config, log_dir)
        except OSError as error:
            self.report(f"no keeper for the weights of {name}: {error}")

    def look(self) -> None:
        """Report and forget those that have ended."""
        for name, child in list(self.children.items()):
            if not child.running:
                ended = exit_text(child.process.returncode)
                self.report(f"{child.name} {ended}: {name} goes on, and its next start loads weights once more")
                child.close()
                del self.children[name]


def start_weight_keeper(config: Config, log_dir: Path | None) -> Child:
    """Start the keeper of the worker of `config`, where none listens. Raises OSError."""
    name, path = f"{config.worker.name}-weights", keeper_path(config)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with suppress(FileNotFoundError):
            path.unlink()
        listener.bind(str(path))
        listener.listen()
        about = (str(listener.fileno()), str(os.getpid()), config.cluster.log_level, config.cluster.log_format)
        command = [sys.executable, "-m", "hisparse.cluster.weights", *about, config.worker.name]
        log_path = log_dir / f"{name}.log" if log_dir else None
        return Child.start(name, command, child_environ(), log_path, inherited=(listener.fileno(),))


def main(descriptor: str, parent_pid: str, level: str, form: str, worker: str) -> None:
    from worker.keeper.process import keep_weights

    with socket.socket(fileno=os.dup(int(descriptor))) as listener:
        path = listener.getsockname()

    def end(*_: object) -> NoReturn:
        """Leave no socket. The kernel takes the memory back, once no worker has mapped it."""
        with suppress(OSError):
            os.unlink(path)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    die_with_parent(int(parent_pid))
    logs.configure(level, form, worker=worker)
    keep_weights(int(descriptor))


if __name__ == "__main__":
    main(*sys.argv[1:])
