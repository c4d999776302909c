"""`hisparse model`: small checkpoints for trials."""

from __future__ import annotations

from pathlib import Path

import click

FAMILIES = ("deepseek-v3.2", "glm-5")


@click.group()
def model() -> None:
    """Make small checkpoints for trials."""


@model.command()
@click.argument("path", type=click.Path(file_okay=False, path_type=Path))
@click.option("--family", type=click.Choice(FAMILIES), default="deepseek-v3.2", show_default=True, help="Model code.")
@click.option("--topk", default=128, show_default=True, type=click.IntRange(1), help="Rows the indexer selects.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random weights.")
@click.option("--force", is_flag=True, help="Overwrite an existing checkpoint.")
def tiny(path: Path, family: str, topk: int, seed: int, force: bool) -> None:
    """Write a small random checkpoint at PATH, from the real configuration class of the family."""
    from hisparse.console.output import note
    from protocol.errors import BadInput, ConfigError

    try:
        from worker.runners.tiny import write_tiny_checkpoint
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"making a checkpoint needs the package {error.name}",
            field="model",
            value=error.name,
            remedy="pip install 'hisparse[worker]'",
        ) from error
    if (path / "config.json").exists() and not force:
        raise BadInput(
            "a checkpoint exists", field="path", value=path, remedy="name another directory, or pass --force"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason, remedy = error.strerror or "cannot be made", "name a directory that this user may make and write"
        raise BadInput(reason, field="path", value=path, remedy=remedy) from error
    write_tiny_checkpoint(path, family=family, seed=seed, index_topk=topk)
    note(f"{family} checkpoint written to {path}; serve it with: hisparse up --model {path}")
