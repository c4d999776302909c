"""Inputs of the demo: text for prompts, a checkpoint, and the settings of its cluster."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import hisparse
from hisparse.cluster.children import Child, child_environ, exit_text, stop_children
from hisparse.demo.plan import DemoOptions, PromptSource, memory_for
from protocol.config import HostFacts, build
from protocol.errors import BadInput, Unavailable
from protocol.settings import Config, WorkerSettings
from protocol.units import PAGE_TOKENS, pages_for

#: Names of text files in a directory.
TEXT_PATTERNS: Final = ("*.md", "*.py", "*.toml", "*.txt")
#: Directories of the repository that the demo reads by default.
OWN_ROOMS: Final = ("docs", "coordinator", "worker", "kernels", "metrics")
#: Host memory for one token of the demo's checkpoint, rounded up (1,536 bytes in fp32, 2,432 of MiniMax-M3).
HOST_BYTES_PER_TOKEN: Final = 2_560
#: Tokens granted ahead, beyond the length of a request.
SPARE_TOKENS: Final = 4 * PAGE_TOKENS
DEVICE_MEM: Final = "256MiB"
#: Directory of the pool on a GPU: CUDA cannot register a mapping of a file on a disk.
TMPFS: Final = "/dev/shm"
KV_DTYPE: Final = "float32"  # as in the model library's run


def read_sources(paths: Sequence[Path]) -> list[PromptSource]:
    """Texts of `paths` (files, or directories with text files below); without paths, source files of hisparse."""
    root = Path(hisparse.__file__).resolve().parents[1]
    files = [file for path in paths for file in _text_files(path)] if paths else _own_files(root)
    return [PromptSource(_name(file, root), _text(file)) for file in files]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"not readable as text: {error}", field="prompts", value=file, remedy="name text files"
        ) from error


def _own_files(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *(file for room in OWN_ROOMS for file in _text_files(root / room))]


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for pattern in TEXT_PATTERNS for file in path.rglob(pattern) if file.is_file())


def _name(file: Path, root: Path) -> str:
    file = file.resolve()
    return str(file.relative_to(root)) if file.is_relative_to(root) else file.name


async def write_checkpoint(model: Path, options: DemoOptions, log_dir: Path) -> None:
    """Make the checkpoint in a child, so that this process stays free of torch. Raises Unavailable."""
    command = [sys.executable, "-m", "hisparse.cli", "model", "tiny", str(model)]
    arguments = ["--family", options.family, "--topk", str(options.topk), "--force"]
    arguments += ["--fp8"] if options.weights == "fp8" else []
    arguments += ["--predictable"] if options.draft_tokens else []
    child = Child.start("model", [*command, *arguments], child_environ(), log_dir / "model.log")
    try:
        status = await child.wait()
    finally:
        await stop_children([child], 0)
        child.close()
    if status != 0:
        raise Unavailable(f"writing it {exit_text(status)}: {child.tail()}", field="model", value=model)


@contextmanager
def pool_directory(device: str, directory: Path) -> Iterator[Path]:
    """Directory of the host pool: `directory` on the CPU; for a GPU a temporary directory in TMPFS."""
    if device == "cpu":
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="hisparse-demo-", dir=TMPFS) as path:
        yield Path(path)


def cluster_config(options: DemoOptions, model: Path, runtime_dir: Path, pool_dir: Path) -> Config:
    """Settings of the cluster: every request managed (`memory_for`). The user's settings are ignored. Deterministic,
    but for conversations, since in that mode nothing that was decoded is reused.
    """
    memory = memory_for(options)
    longest = options.context_tokens_max + PAGE_TOKENS
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(runtime_dir),
        "worker.pool_dir": str(pool_dir),
        "worker.model": str(model),
        "worker.device": options.device,
        "worker.dtype": KV_DTYPE,
        "worker.deterministic": options.turns == 1,
        "worker.draft_tokens": options.draft_tokens,
        "worker.tail_slots": max(WorkerSettings().tail_slots, 2 * (1 + options.draft_tokens)),
        "worker.stream_backend": options.streams,
        "worker.seats": options.requests,
        "worker.device_mem": DEVICE_MEM,
        "worker.host_mem": str(options.requests * (longest + SPARE_TOKENS) * HOST_BYTES_PER_TOKEN),
        "worker.context_max_tokens": PAGE_TOKENS * pages_for(longest),
        "worker.hot_size_classes": (memory.hot_slots,),
        "worker.hot_chunks_max": memory.hot_chunks,
        "worker.threads": 1,
    }
    return build({}, {}, flags, HostFacts.read())


def kv_shape(model: Path) -> tuple[int, int]:
    """Layers of the checkpoint, and bytes of one KV row."""
    from worker.runners.checkpoint import geometry_of, read_dimensions

    geometry = geometry_of(read_dimensions(model), KV_DTYPE)
    return geometry.layers, geometry.row_bytes
