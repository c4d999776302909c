"""A standby: a process that has done what a worker's start needs no memory of a living worker for, and waits.

    imports     of the model library too: its modules are made once without memory
    device      its context, on a GPU
    pool        the node's, mapped and registered. Nothing is read or written there before the order: the pages are a
                living worker's
    weights     those that the keeper holds, mapped for reading alone. Without a keeper, or where it does not hold them,
                they are found after the order. So it is for ranks of a group, which know their share once they meet
    kernels     on a GPU with such weights: each batch size runs once on padding, in scratch memory of this process, so
                that kernels are loaded, and libraries have what they keep
    order       one line on the standard input, from the supervisor alone, which has the proof that the worker before
                has exited (hisparse.cluster.supervision). The end of the input is the end of a standby

On a GPU, all but captures runs in the thread in which a plain start runs it:

    thread   calls                                                     order
    main     context, library handles of this thread                   before the pool is registered
    main     registration of the pool, by threads that set the device  behind the context, outside of captures
    main     weights, each batch size once on padding                  before the order, in memory of its own
    main     sizes, state, streams; weights and batch sizes that were  behind the order: memory of the worker before is
             not prepared                                              free only then
    loop     adopts the streams, waits for the device                  behind all launches of the main thread
    loop     first units and steps, eagerly: a thread has handles of   before any capture: no handle may be made while
             cuBLAS and a workspace on `compute` of its own            a stream is captured
    loop     graphs, one between two steps. The device is idle, the    behind a whole step (Decoder.may_capture). Other
             allocator has given back what it held unused              threads may allocate meanwhile (thread_local)

What fails says why: the error goes to the log with its traceback, and to the supervisor in one line
(protocol.start_and_end); a fault of a library shows where each thread was.

It has said no hello and has no epoch: no other process knows of it. What follows the order is the start of a worker
(worker.process), whose epoch begins then.

Rejected: a standby that is connected and idle (the coordinator would place requests on it, or need a state for it); a
signal as the order (whoever may end a process could start a second owner of its slots).
"""

from __future__ import annotations

import os
import pkgutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch

import kernels.cuda
from kernels.cuda.triton_units import triton_unit
from protocol.config import keeper_path
from protocol.errors import CapacityError, ConfigError, Unavailable
from protocol.logs import fields, logger
from protocol.settings import Config, WorkerSettings
from protocol.start_and_end import STANDBY, tell_step
from protocol.text import make_tokenizer
from protocol.tokenizer_files import read_tokenizer
from protocol.units import managed_chunks
from worker.device.gpu_memory import cuda_device, let_segments_grow
from worker.device.pinned import host_tensor
from worker.device.sizing import size_worker
from worker.families.table import library_config
from worker.keeper.memory import TableDiffersError
from worker.link.outbox import Outbox
from worker.loop.executor import Executor
from worker.pool.host_pool import MappedPool
from worker.pool.start import attach_pool
from worker.runners.checkpoint import fingerprint, geometry_of, kinds_of, library_refusals, read_dimensions
from worker.runners.load import ModelRunner, load_runner
from worker.streams import make_streams
from worker.weights.model import empty_model
from worker.weights.safetensors_header import FIELD

STDIN: Final = 0

log = logger("worker.standby")


class DismissedError(Exception):
    """The supervisor needs this standby no more, or has ended."""


@dataclass(frozen=True)
class Prepared:
    """The parts that a standby has when it is ordered to take over. `pool`: None where there was none to attach to.
    `runner`: None where no weights could be mapped. `is_warm`: each batch size has run."""

    pool: MappedPool | None = None
    runner: ModelRunner | None = None
    is_warm: bool = False


def stand_by(config: Config, halted: threading.Event) -> Prepared:
    """Prepare, and wait for the order to take over.

    Raises DismissedError, and HiSparseError when a worker with `config` would be refused.
    """
    began = time.monotonic()
    settings = config.worker
    tell_step("imports")
    _import_model_code(settings)
    if settings.device != "cpu":
        tell_step("context")
        let_segments_grow()
        _make_context(cuda_device(settings.device))
        _import_launchers()
    dimensions = read_dimensions(settings.model)
    geometry = geometry_of(dimensions, kinds_of(dimensions, settings), draft_layer=settings.draft_tokens_max > 0)
    pool = attach_pool(config, geometry, fingerprint(settings.model), halted)
    runner = _map_weights(config) if settings.keeper and not settings.group else None
    is_warm = runner is not None and settings.device != "cpu" and _warm_up(settings, runner)
    log.info(
        "ready to take over",
        extra=fields(
            seconds=round(time.monotonic() - began, 2),
            has_pool=pool is not None,
            has_weights=runner is not None,
            is_warm=is_warm,
        ),
    )
    tell_step(STANDBY)
    if not os.read(STDIN, 1):
        raise DismissedError
    tell_step("takes over")
    log.info("takes over")
    return Prepared(pool, runner, is_warm)


def _map_weights(config: Config) -> ModelRunner | None:
    """The runner of `config` with the weights that its keeper holds; None, and a line that says why, if it does not."""
    tell_step("weights")
    try:
        return load_runner(config.worker, keeper=keeper_path(config), only_attach=True)
    except (TableDiffersError, Unavailable, CapacityError) as error:
        log.warning("weights are not mapped ahead", extra=fields(cause=error))
        return None


def _warm_up(settings: WorkerSettings, runner: ModelRunner) -> bool:
    """Run each batch size on padding, over one page of each kind; returns whether the device had memory for that."""
    tell_step("kernels")
    geometry, device = runner.geometry, cuda_device(settings.device)
    chunks = managed_chunks(min(settings.hot_size_classes))
    least = msgspec.structs.replace(settings, host_mem=str(geometry.page_bytes), hot_chunks_max=chunks)
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    prompts = runner.prompt_bytes(settings.pass_tokens)
    sizing = size_worker(least, geometry, runner.info, free_device_bytes=device_bytes, prompt_bytes=prompts)
    host = host_tensor(sizing.capacity.host_pages, geometry.page_bytes, dtype=torch.uint8, device=device)
    streams, tokenizer = make_streams(settings.stream_backend, device=settings.device), read_tokenizer(settings.model)
    text = make_tokenizer(tokenizer.kind, tokenizer.data)
    try:
        executor = Executor(
            runner, least, replace(sizing, slab_pages=1), streams, host, text, Outbox(epoch=0), graphs_later=True
        )
    except torch.OutOfMemoryError as error:
        log.warning("kernels are not loaded ahead", extra=fields(cause=error))
        return False
    executor.stop()
    executor.run()  # its end alone: there is nothing to be done
    del executor, streams, host
    torch.cuda.empty_cache()
    return True


def _import_model_code(settings: WorkerSettings) -> None:
    """The library imports the modules of a family when they are first used."""
    with library_refusals(settings.model, FIELD):
        config: Any = library_config(settings.model)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        empty_model(config, torch.bfloat16)


def _import_launchers() -> None:
    """Launchers and compilers of kernels are imported when a kernel is first used: here, all of them."""
    for module in pkgutil.iter_modules(kernels.cuda.__path__):
        with suppress(ImportError, ConfigError):  # one that this machine lacks is no matter before it is used
            triton_unit(module.name)


def _make_context(device: torch.device) -> None:
    """Make the context of `device`, and the library handles of products: a gigabyte of the device at most."""
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    (one @ one).sum().item()
