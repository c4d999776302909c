"""`hisparse kernels`: compile CUDA kernels ahead of a worker's start."""

from __future__ import annotations

import click

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
    """Compile the units of CUDA that workers of DeepSeek-V3.2 and GLM-5 load, for each --arch.

    They go where workers look for them: $HISPARSE_KERNEL_CACHE, or hisparse/kernels in the user's cache folder. What
    is there already is kept. Kernels in Triton and DeepGEMM's are compiled on a GPU, at a worker's first start.
    """
    from hisparse.console.output import write_line
    from kernels.compile import build as build_all

    for arch in architectures:
        write_line(build_all(arch))
