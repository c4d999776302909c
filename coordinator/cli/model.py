"""Checkpoints to try things with."""

from __future__ import annotations

from pathlib import Path

import click

FAMILIES = ("deepseek-v3.2", "glm-5")


@click.group()
def model() -> None:
    """Make checkpoints to try things with."""


@model.command()
@click.argument("path", type=click.Path(file_okay=False, path_type=Path))
@click.option("--family", type=click.Choice(FAMILIES), default="deepseek-v3.2", show_default=True, help="Model code.")
@click.option("--topk", default=128, show_default=True, type=click.IntRange(1), help="Rows the indexer selects.")
@click.option("--seed", default=0, show_default=True, help="Of the random weights.")
def tiny(path: Path, family: str, topk: int, seed: int) -> None:
    """Write a small random checkpoint at PATH, from the real configuration class of the family."""
    from coordinator.cli.output import note
    from coordinator.errors import ConfigError

    try:
        from worker.runners.tiny import write_tiny_checkpoint
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"making a checkpoint needs the package {error.name}",
            field="model",
            value=error.name,
            remedy="pip install 'hisparse[worker]'",
        ) from error
    write_tiny_checkpoint(path, family=family, seed=seed, index_topk=topk)
    note(f"{family} checkpoint written to {path}; serve it with: hisparse up --model {path}")
