"""`hisparse top` under a real tmux, over a real cluster of three workers and fifty requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from hisparse.cluster.supervision import ProcessSupervisor
from hisparse.cluster.up import Cluster, running_cluster
from protocol.messages import Sampling
from protocol.settings import Config
from tests.support.cluster_rig import cluster_config, prompts_of, write_model

WORKERS: Final = 3
REQUESTS: Final = 50
NEW_TOKENS: Final = 1_200
LIMIT_S: Final = 240.0
COLUMNS: Final = 80
LINES: Final = 24


class Tmux:
    """One pane that runs a command; `close` ends the server, which is its own."""

    def __init__(
        self, socket: Path, command: str, environ: dict[str, str], columns: int = COLUMNS, lines: int = LINES
    ) -> None:
        self._socket = socket
        size = ("-x", str(columns), "-y", str(lines))
        settings = [f"-e{name}={value}" for name, value in environ.items()]
        self._run("-f", "/dev/null", "new-session", "-d", *size, *settings, command)

    def press(self, *keys: str) -> None:
        """Keys by tmux's names: Down, Enter, Escape, r."""
        self._run("send-keys", *keys)

    def screen(self, *, styled: bool = False) -> str:
        return self._run("capture-pane", "-p", *(["-e"] if styled else []))

    async def until(self, *texts: str, limit_s: float = LIMIT_S) -> str:
        """Wait until the screen shows all of them; the screen."""
        give_up_at = trio.current_time() + limit_s
        while not all(text in (screen := self.screen()) for text in texts):
            assert trio.current_time() < give_up_at, f"no {texts} in:\n{screen}"
            await trio.sleep(0.1)
        return screen

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], check=False, capture_output=True)

    def _run(self, *args: str) -> str:
        command = ["tmux", "-S", str(self._socket), *args]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def top_config(path: Path) -> Config:
    config = cluster_config(write_model(path / "model"), path / "run", streams="inline")
    worker = msgspec.structs.replace(config.worker, host_mem="256MiB", context_max_tokens=2_048)
    return msgspec.structs.replace(config, worker=worker)


@asynccontextmanager
async def watched_cluster(path: Path) -> AsyncIterator[tuple[Cluster, Tmux]]:
    """Three workers with fifty requests, and `hisparse top` looking at them; what dies is restarted."""
    config = top_config(path)
    async with running_cluster(config, WORKERS, log_dir=path) as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(ProcessSupervisor(cluster, lambda _: None, lambda: None).run)
        async with cluster.client("test") as client:
            for number, prompt in enumerate(prompts_of(5, REQUESTS)):
                sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
                await client.submit_detached(prompt, sampling, request_id=f"chat-{number:03}", priority=number % 3)
        tmux = Tmux(
            path / "tmux",
            f"exec {sys.executable} -m hisparse.cli top --interval 0.5",
            {"HISPARSE_CLUSTER_RUNTIME_DIR": config.cluster.runtime_dir, "PYTHONPATH": str(Path.cwd())},
        )
        try:
            yield cluster, tmux
        finally:
            tmux.close()
        nursery.cancel_scope.cancel()
