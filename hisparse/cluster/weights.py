"""Keepers of weights beside the workers of a cluster (worker.keeper.process): one for each worker, and so for each GPU.

start    with its worker. This process binds the socket, so that a worker that comes first waits for the keeper
death    of a keeper: its worker has mapped the weights and goes on. Another keeper starts with the next worker
end      with the other children, and with this process

python -m hisparse.cluster.weights DESCRIPTOR PARENT_PID LOG_LEVEL LOG_FORMAT WORKER
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

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
        name, kept = config.worker.name, self.children.get(config.worker.name)
        if not config.worker.keeper or (kept is not None and kept.running):
            return
        if kept is not None:
            self.report(f"{kept.name} {exit_text(kept.process.returncode)}: {name} loads its weights once more")
            kept.close()
            del self.children[name]
        try:
            self.children[name] = start_weight_keeper(config, log_dir)
        except OSError as error:
            self.report(f"no keeper for the weights of {name}: {error}")


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

    die_with_parent(int(parent_pid))
    logs.configure(level, form, worker=worker)
    keep_weights(int(descriptor))


if __name__ == "__main__":
    main(*sys.argv[1:])
