"""Chooses and loads the runner of a checkpoint: by its family, as a worker's settings ask for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from protocol.logs import fields, logger
from protocol.settings import WorkerSettings
from worker.device.step_rows import rows_max
from worker.families.latent import LatentFamily
from worker.families.table import FAMILIES
from worker.group.exchange import Collectives
from worker.keeper.memory import TableDiffersError
from worker.runners.base import arithmetic, prefix_unit_tokens
from worker.runners.block_sparse import BlockSparseRunner
from worker.runners.checkpoint import read_config
from worker.runners.transformers_dsa import TransformersRunner

ModelRunner: TypeAlias = TransformersRunner | BlockSparseRunner

log = logger("worker.runners")


def load_runner(
    settings: WorkerSettings,
    collectives: Collectives | None = None,
    keeper: Path | None = None,
    *,
    only_attach: bool = False,
) -> ModelRunner:
    """The runner a worker's settings ask for; a rank's with the `collectives` of its group; with weights in the memory
    of the keeper at socket `keeper`. Raises ConfigError, and with `only_attach` TableDiffersError and Unavailable (see
    `TransformersRunner.load`)."""
    load = partial(
        _kind_of(settings.model).load,
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        row_dtype=settings.row_dtype,
        index_dtype=settings.index_dtype,
        deterministic_seats=settings.seats if settings.deterministic else 0,
        matmul=settings.matmul,
        collectives=collectives,
        rows_max=rows_max(settings),
        draft_tokens=settings.draft_tokens_max,
        keeper=keeper,
        only_attach=only_attach,
    )
    try:
        runner = load()
    except TableDiffersError as difference:
        if only_attach:
            raise
        log.warning("kept weights are not those of this code: they are loaded anew", extra=fields(cause=difference))
        runner = load()
    unit = prefix_unit_tokens(settings)
    runner.info = msgspec.structs.replace(
        runner.info,
        prefix_unit_tokens=unit,
        reuses_generated=not settings.deterministic,
        arithmetic=arithmetic(settings, runner.matmul),
    )
    return runner


def _kind_of(path: str) -> type[TransformersRunner] | type[BlockSparseRunner]:
    """Return the runner that serves the checkpoint's family. Raises ConfigError."""
    family = FAMILIES[read_config(path, with_weights=False)["model_type"]]
    return TransformersRunner if isinstance(family, LatentFamily) else BlockSparseRunner
