"""How the two ends are made: which engine, with which options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from protocol.errors import ConfigError
from worker.transfer.control import ReceiverControl
from worker.transfer.engines.base import Jobs, Source, SourceMaker, Target
from worker.transfer.engines.shared import SharedSource, SharedTarget, place_of
from worker.transfer.interface import NAME_CHARS_MAX, Layout, PoolMemory
from worker.transfer.receiver import PageReceiver
from worker.transfer.sender import PageSender

ENGINES: Final = ("shared", "nixl", "mooncake")
EVERY_ADDRESS: Final = ("0.0.0.0", "::", "*")


@dataclass(frozen=True)
class EngineOptions:
    """What the engines that go through a network are told; both ends alike.

    `transports` is UCX_TLS for nixl ("tcp", or "rc,tcp" with InfiniBand or RoCE) and the protocol of mooncake ("tcp",
    "rdma"). `devices` are network devices by name, comma-separated; empty: the engine's own choice.
    """

    transports: str = "tcp"
    devices: str = ""


def no_wake() -> None:
    """For owners that poll by themselves."""


def open_receiver(
    engine: str,
    pool: PoolMemory,
    layout: Layout,
    *,
    name: str,
    address: str,
    options: EngineOptions = EngineOptions(),
    wake: Callable[[], None] = no_wake,
) -> PageReceiver:
    """A started receiver that senders reach at `address`: tcp://HOST:PORT (port 0: any) or ipc://PATH.

    `wake` is called, by the receiver's thread, when `poll` has something new. Raises ConfigError when the engine is
    unknown or not installed, or the address cannot be had.
    """
    _check(pool, layout, name)
    if urlsplit(address).hostname in EVERY_ADDRESS:
        raise ConfigError(
            "senders are told this address, and no receiver can have it",
            field="worker.transfer_address",
            value=address,
            remedy="name the address of this node that prefill nodes reach",
        )
    control = ReceiverControl(address)
    try:
        target = _target(engine, pool, name, control.host, options)
    except BaseException:
        control.close()
        raise
    return PageReceiver(engine, target, control, pool, layout, name, wake)


def open_sender(
    pool: PoolMemory,
    layout: Layout,
    *,
    name: str,
    engines: Sequence[str] = ENGINES,
    options: EngineOptions = EngineOptions(),
    wake: Callable[[], None] = no_wake,
    host: str = "127.0.0.1",
) -> PageSender:
    """A started sender. `name` is that of one process at a time: receivers are told of its exit before another one has
    it. An engine is loaded when the first receiver asks for it;
    a transfer whose engine is not installed fails. `host` is this node's address for `mooncake`."""
    _check(pool, layout, name)
    makers: Mapping[str, SourceMaker] = {engine: partial(_source, engine, name, host, options) for engine in engines}
    places = {engine: place_of(pool) if engine == "shared" else b"" for engine in engines}
    return PageSender(pool, layout, name, makers, places, wake)


def check_engine(engine: str, options: EngineOptions) -> None:
    """Raise ConfigError when it is not installed, or its options are refused: known at start, before pages are touched,
    and not by the first transfer."""
    match engine:
        case "nixl":
            from worker.transfer.engines.nixl import load as load_nixl

            load_nixl(options.transports, options.devices)
        case "mooncake":
            from worker.transfer.engines.mooncake import load as load_mooncake

            load_mooncake()


def _check(pool: PoolMemory, layout: Layout, name: str) -> None:
    if pool.pages.shape[1] != layout.page_bytes:
        raise ConfigError(
            f"the pool has pages of {pool.pages.shape[1]} bytes, its layout of {layout.page_bytes}",
            field="layout.page_bytes",
            value=layout.page_bytes,
            remedy="describe the pool by the geometry it was made for",
        )
    if not 0 < len(name.encode()) < NAME_CHARS_MAX:
        raise ConfigError(f"1 to {NAME_CHARS_MAX - 1} bytes", field="transfer.name", value=name, remedy="shorten it")


def _target(engine: str, pool: PoolMemory, name: str, host: str, options: EngineOptions) -> Target:
    match engine:
        case "shared":
            return SharedTarget(pool)
        case "nixl":
            from worker.transfer.engines.nixl import NixlTarget

            return NixlTarget(pool, name, options.transports, options.devices)
        case "mooncake":
            from worker.transfer.engines.mooncake import MooncakeTarget

            return MooncakeTarget(pool, host, options.transports, options.devices)
    raise ConfigError(
        f"one of {', '.join(ENGINES)}", field="worker.transfer", value=engine, remedy="choose one of them"
    )


def _source(engine: str, name: str, host: str, options: EngineOptions, pool: PoolMemory, jobs: Jobs) -> Source:
    match engine:
        case "nixl":
            from worker.transfer.engines.nixl import NixlSource

            return NixlSource(pool, jobs, name, options.transports, options.devices)
        case "mooncake":
            from worker.transfer.engines.mooncake import MooncakeSource

            return MooncakeSource(pool, jobs, host, options.transports, options.devices)
    return SharedSource(pool, jobs)
