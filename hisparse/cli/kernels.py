"""`hisparse kernels`: compile CUDA kernels ahead of a worker's start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.compile import Kept

#: Compute capabilities that units are kept compiling for (kernels.compile).
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


@click.group(short_help="Compile kernels ahead of a start.")
def kernels() -> None:
    """Compile CUDA kernels ahead of a worker's start. Needs no GPU."""


@kernels.command(short_help="Fill the cache of compiled kernels.")
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    required=True,
    type=click.Choice(ARCHITECTURES),
    help="Compute capability.",
)
def build(architectures: tuple[str, ...]) -> None:
    """Compile the units of CUDA that workers of all published models load, for each --arch and kv_dtype but float32.

    They go where workers look for them: $HISPARSE_KERNEL_CACHE, or hisparse/kernels in the user's cache folder. What
    is there already is kept. Kernels in Triton and DeepGEMM's are compiled on a GPU, at a worker's first start.
    """
    from hisparse.console.output import write_line
    from kernels.compile import build as build_all

    models = list(_published())
    for arch in architectures:
        write_line(build_all(arch, models))


def _published() -> Iterator[Kept]:
    """Yield what each published model with latent attention keeps, in each format."""
    from kernels.compile import Kept
    from kernels.row_bytes import KINDS
    from kernels.row_format import index_key_format, kv_row_format
    from worker.families.table import family_named, latent_names
    from worker.weights.synth import published_config

    for config in map(published_config, (model for name in latent_names() for model in family_named(name).models)):
        for kind in KINDS[1:]:  # no model is published in float32
            rows = kv_row_format(kind, config.kv_lora_rank, config.qk_rope_head_dim)
            yield Kept(rows, index_key_format(kind, config.index_head_dim), config.index_n_heads)
