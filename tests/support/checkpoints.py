"""Tiny checkpoints that all tests of a run read and none changes, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.support.once import made_once
from worker.families.table import FAMILIES, latent_names
from worker.runners.tiny import write_tiny_checkpoint

#: Names of the families with latent attention, which one kind of runner serves.
LATENT: Final = tuple(latent_names())
#: Names of the families whose tiny checkpoints have a draft layer.
DRAFTING: Final = tuple(family.name for family in FAMILIES.values() if family.drafts)


def tiny_checkpoint(run_dir: Path, family: str = "deepseek-v3.2", **options: int | bool) -> Path:
    """Return the directory of a checkpoint that `write_tiny_checkpoint` has written with `options`.

    Each process of the run gets the same one. A test that changes a file copies the directory first.
    """
    name = "-".join(["tiny", family, *(f"{option}-{value}" for option, value in sorted(options.items()))])
    path = run_dir / name

    def write() -> str:
        write_tiny_checkpoint(path, family, **options)  # type: ignore[arg-type]
        return str(path)

    return Path(made_once(run_dir, name, write))
