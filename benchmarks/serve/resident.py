"""The coordinator's process of a service without hot buffers: `python -m benchmarks.serve.resident coordinator ...` is
`hisparse coordinator ...` whose hot floor is resident on every worker, from the beginning and for good. It wants
coordinator.hot_floor = "smallest", which leaves floors as they are."""

from __future__ import annotations

from unittest.mock import patch

from coordinator.state.worker_entry import WorkerEntry
from protocol.sizing import RESIDENT


def main() -> None:
    from hisparse.cli import main as hisparse_main

    begin = WorkerEntry.__post_init__

    def begun(worker: WorkerEntry) -> None:
        begin(worker)
        worker.hot_floor = RESIDENT

    with patch.object(WorkerEntry, "__post_init__", begun):
        hisparse_main(prog_name="hisparse")


if __name__ == "__main__":
    main()
