"""`hisparse model`: checks of repositories, and small checkpoints for trials."""

from __future__ import annotations

from pathlib import Path

import click

from hisparse.cli.model_check import check
from protocol.errors import BadInput, ConfigError
from worker.families.table import models, names


@click.group()
def model() -> None:
    """Check a repository, or make small checkpoints."""


model.add_command(check)


@model.command(short_help="Write a small random checkpoint.")
@click.argument("path", type=click.Path(file_okay=False, path_type=Path))
@click.option("--family", type=click.Choice(names()), default="deepseek-v3.2", show_default=True, help="Model code.")
@click.option("--topk", default=128, show_default=True, type=click.IntRange(1), help="Rows the indexer selects.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random weights.")
@click.option("--fp8", is_flag=True, help="Weights in block-FP8, in the layout of the published repositories.")
@click.option("--predictable", is_flag=True, help="Output that the checkpoint's own draft layer mostly foretells.")
@click.option("--force", is_flag=True, help="Overwrite an existing checkpoint.")
def tiny(path: Path, family: str, topk: int, seed: int, fp8: bool, predictable: bool, force: bool) -> None:
    """Write a small random checkpoint at PATH, from the real configuration class of the family."""
    from hisparse.console.output import note

    try:
        from worker.runners.tiny import write_tiny_checkpoint

        _prepare(path, force)
        write_tiny_checkpoint(path, family=family, seed=seed, index_topk=topk, fp8=fp8, predictable=predictable)
    except ModuleNotFoundError as error:
        raise _lacks(error) from error
    note(f"{family} checkpoint written to {path}; serve it with: hisparse up --model {path}")


@model.command(short_help="Write a checkpoint of published shapes, with fewer layers.")
@click.argument("path", type=click.Path(file_okay=False, path_type=Path))
@click.option("--like", "family", required=True, type=click.Choice(models()), help="The published model.")
@click.option("--layers", required=True, type=click.IntRange(1), help="Layers, fewer than published.")
@click.option("--experts", default=0, type=click.IntRange(0), help="Routed experts of a layer; default: as published.")
@click.option("--fp8/--bf16", default=True, show_default=True, help="Weights in block-FP8, or all in bfloat16.")
@click.option("--ue8m0", is_flag=True, help="FP8 scales are powers of two, as in DeepSeek-V3.2.")
@click.option("--shard-mem", default="4GiB", show_default=True, metavar="SIZE", help="Largest size of a file.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random weights.")
@click.option("--force", is_flag=True, help="Overwrite an existing checkpoint.")
def synth(
    path: Path,
    family: str,
    layers: int,
    experts: int,
    fp8: bool,
    ue8m0: bool,
    shard_mem: str,
    seed: int,
    force: bool,
) -> None:
    """Write a repository at PATH with the published shapes and layout, fewer layers, and random weights.

    Its output means nothing; loading, sizes and speed are those of the published model's layers. One layer of
    DeepSeek-V3.2 takes 0.6 GB without experts and 11.5 GB with them, embeddings and output head 3.7 GB. The draft
    layer, one with experts, comes on top.
    """
    from hisparse.console.output import note, size_text
    from protocol.byte_sizes import parse_size

    try:
        from worker.weights.synth import write_synthetic
    except ModuleNotFoundError as error:
        raise _lacks(error) from error
    _prepare(path, force)
    size = write_synthetic(
        path,
        family,
        layers=layers,
        experts=experts,
        fp8=fp8,
        powers_of_two=ue8m0,
        seed=seed,
        shard_bytes=parse_size(shard_mem, "shard-mem"),
    )
    note(f"{size_text(size)} written to {path}; serve it with: hisparse up --model {path}")


def _lacks(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"making a checkpoint needs the package {error.name}",
        field="model",
        value=error.name,
        remedy="pip install 'hisparse[worker]'",
    )


def _prepare(path: Path, force: bool) -> None:
    """Make the directory; with `force`, remove the weights of an earlier checkpoint."""
    if (path / "config.json").exists() and not force:
        raise BadInput(
            "a checkpoint exists", field="path", value=path, remedy="name another directory, or pass --force"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in (*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")):
            file.unlink()
    except OSError as error:
        reason, remedy = error.strerror or "cannot be made", "name a directory that this user may make and write"
        raise BadInput(reason, field="path", value=path, remedy=remedy) from error
