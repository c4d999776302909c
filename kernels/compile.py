"""`python -m kernels.compile --arch sm_80 sm_90 --json`: compile every unit for every row layout in use; no GPU needed.

Prints one line per kernel, architecture and row layout. Exits with 1 when a kernel spills more registers than
SPILL_BYTES allows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Final, NamedTuple

import torch

from kernels.cuda import block_plans, prompt_index
from kernels.cuda.attention import HEADS_TOGETHER, HOPPER, HOPPER_KINDS, hopper_defines, is_written
from kernels.cuda.encode import fp4_defines
from kernels.cuda.index_topk import Indexer, indexer_of, select_defines
from kernels.cuda.jit import UNITS, Defines, Resources, cache_dir, cached_unit, compile_unit, row_defines
from kernels.cuda.launch import CLUSTERS_SINCE, RANKS
from kernels.layout import Geometry
from kernels.row_format import RowFormat, index_key_format, kv_row_format

ARCHITECTURES: Final = ("sm_80", "sm_90", "sm_100", "sm_120")

# Row and index-key bytes. 656: fp8 latent, scales and bf16 rope; 1152: bf16 latent and rope; 352: fp4; 196 and 320: fp8
# and bf16 of A.X-K2-Light; 584: another fp8 layout, 8-byte words; 132: fp8 index key and scale; 256: bf16; 68: fp4; 13
# and 7: no alignment. Third, where a row of two planes parts: 512 values and 72 bytes of scales; K and V of eight bf16
# heads.
LAYOUTS: Final = (
    *((656, 132, 0), (584, 132, 0), (1152, 256, 0), (352, 68, 0), (196, 132, 0), (320, 132, 0)),
    *((13, 7, 0), (584, 132, 512), (4096, 256, 2048)),
)
ROWLESS: Final = ("begin_step", "seat")  # units that touch tables alone
# Indexers of 64 heads, DeepSeek-V3.2's, and of 32 in each pair of formats, of 16, A.X-K2-Light's, and a small one whose
# heads fill no tile.
INDEXERS: Final = (
    *(Indexer(heads, 128, 2, key_bytes) for heads in (32, 64) for key_bytes in (1, 2)),
    *(Indexer(heads, 128, 2, 1, codes=True) for heads in (32, 64)),
    Indexer(16, 128, 2, 1),
    Indexer(64, 128, 4, 4),
    Indexer(4, 32, 4, 1),
)
#: Rows and index keys of four bits.
FP4_FORMS: Final = (kv_row_format("fp4", 512, 64), index_key_format("fp4", 128))
#: Spills of kernels that have any: over bfloat16 keys a word of a thread, stored once a launch, loaded twice a job.
SPILL_BYTES: Final = {"prompt_index": 20}
SHOWN: Final = (
    *("ROW_BYTES", "PLANES", "INDEX_ROW_BYTES", "RANKS", "DRAFT", "DRAFTS"),
    *("HEADS", "DIM", "QUERY_BYTES", "KEY_BYTES", "FP4", "SINKS", "TOKENS", "SCALED", "VALUE_BYTES"),
)


def attention_variants() -> Iterator[Defines]:
    """Defines of every form of attend_rows on Hopper: rows, heads of a pair of blocks, without sinks and with them."""
    return (hopper_defines(*of) for of in product(HOPPER_KINDS, HEADS_TOGETHER, (False, True)))


class Kept(NamedTuple):
    """Formats of the rows and of the index keys that a model keeps, and heads of its indexer."""

    rows: RowFormat
    keys: RowFormat
    index_heads: int


def variants(
    arch: str, layouts: Sequence[tuple[int, int, int]] | None = None, indexers: Iterable[Indexer] = INDEXERS
) -> Iterator[tuple[str, Defines]]:
    """Unit and defines of every variant that is kept compiling for `arch`, by default for all LAYOUTS."""
    number = int(arch.removeprefix("sm_"))
    yield "index_select", select_defines()
    if arch == f"sm_{HOPPER[0]}{HOPPER[1]}":
        yield from (("attend_rows", defines) for defines in attention_variants())
        yield from (("prompt_index", defines) for defines in prompt_index.variants())
        yield "prompt_merge", ()
        yield "quantize", ()
        yield from (("encode", fp4_defines(form, size)) for form, size in product(FP4_FORMS, (2, 4)))
        yield from (("block_linear", plan.defines(form)) for plan, form in block_plans.forms())
    read = [indexer for indexer in indexers if indexer.on_hopper(number) or not indexer.codes]
    yield from ((indexer.unit(number), indexer.defines(number)) for indexer in read)
    yield from row_variants(arch, layouts or LAYOUTS)


def row_variants(arch: str, layouts: Sequence[tuple[int, int, int]]) -> Iterator[tuple[str, Defines]]:
    """Return unit and defines of what moves rows of `layouts` (as LAYOUTS) on `arch`: for drafts, and for tables alone,
    that of the first layout."""
    clusters = int(arch.removeprefix("sm_")) >= 10 * CLUSTERS_SINCE[0]
    for place, (row_bytes, index_row_bytes, split) in enumerate(layouts):
        defines = row_defines(Geometry(2, row_bytes, (0, 1), index_row_bytes, 2048, split))
        for unit in UNITS:
            if unit == "swap_in":
                kinds = product(RANKS if clusters else RANKS[:1], (0, 1) if place == 0 else (0,))
                yield from ((unit, (*defines, ("RANKS", ranks), ("DRAFT", draft))) for ranks, draft in kinds)
            elif unit == "begin_step":
                yield from ((unit, (*defines, ("DRAFTS", drafts))) for drafts in ((0, 1) if place == 0 else ()))
            elif place == 0 or unit not in ROWLESS:
                yield unit, defines


def build(arch: str, models: Iterable[Kept]) -> str:
    """Compile what a worker of any of `models` that `arch` has kernels for may load into its cache, as many units at a
    time as there are cores; return a line about it. Raises ConfigError, InternalError."""
    directory = cache_dir()
    began, before = time.monotonic(), len(list(directory.glob("*.cubin")))
    units: set[tuple[str, Defines]] = set()
    for rows, keys, heads in models:
        indexer = indexer_of(heads, keys, torch.bfloat16)
        if rows.kind != "fp4" or (is_written(rows) and indexer.on_hopper(int(arch.removeprefix("sm_")))):
            units.update(variants(arch, ((rows.row_bytes, keys.row_bytes, 0),), (indexer,)))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda unit: cached_unit(unit[0], unit[1], arch, directory), sorted(units)))
    compiled = len(list(directory.glob("*.cubin"))) - before
    seconds = time.monotonic() - began
    return f"{len(units)} units for {arch} lie in {directory}: {compiled} were compiled in {seconds:.0f} s"


def report(arch: str) -> Iterator[tuple[Defines, Resources]]:
    """What each kernel of each variant costs on `arch`."""
    for unit, defines in variants(arch):
        for resources in compile_unit(unit, defines, arch).resources:
            yield defines, resources


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), metavar="sm_NN")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    spills = False
    for arch in options.arch:
        for defines, cost in report(arch):
            line = {
                "kernel": cost.kernel,
                "arch": arch,
                "registers": cost.registers,
                "smem_bytes": cost.smem_bytes,
                "spill_bytes": cost.spill_bytes,
                **{name.lower(): value for name, value in defines if name in SHOWN},
            }
            print(json.dumps(line) if options.json else "  ".join(f"{k}={v}" for k, v in line.items()), flush=True)
            spills |= cost.spill_bytes > SPILL_BYTES.get(cost.kernel, 0)
    return int(spills)


if __name__ == "__main__":
    sys.exit(main())
