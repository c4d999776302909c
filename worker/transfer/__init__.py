"""Host pages from one node's pool to another's, straight into the pages that were reserved for them.

    prefill node                                      decode node
    Sender ── Begin ────────────────────────────────► Receiver      control: small messages (wire.py)
           ◄──────────────────────── Ready: where ──
           ══ page ═══════════════════════════════►  host page      data: the engine, one-sided
           ── Written: checksum ───────────────────►  verifies
           ◄──────────────────────────── Checked ──

A transfer moves the pages of one request, in the order of its context. Pages travel whole, or in parts
(layer groups), several at a time, in any order, while prefill is still at work on later ones.

| engine     | moves bytes by                              | across nodes | shuts a silent sender out               |
|------------|---------------------------------------------|--------------|-----------------------------------------|
| `shared`   | memcpy by the receiver, from the mapped     | no           | need not: senders never write           |
|            | pool file of the sender                     |              |                                         |
| `nixl`     | NIXL over UCX (TCP, RDMA by `UCX_TLS`)      | yes          | by destroying the endpoint it writes to |
| `mooncake` | Mooncake Transfer Engine (TCP, RDMA)        | yes          | likewise                                |

**Revocation.** Where the sender writes, one that answers stops by itself: it posts nothing more, waits for what is in
flight and says so. One that does not (dead, hung, cut off) is shut out: each sender writes through an endpoint of its
own, and destroying it ends all its transfers. That its process is proved dead is not enough with a network in between:
what the kernel holds in socket buffers still lands. In every engine what lands goes through the receiver's process or
its registrations, so that nothing lands once that is gone.

    interface.py                   layouts, descriptions, events
    ends.py                        how they are made
    sending.py, receiving.py       the protocol: pure (outgoing.py: its state, sender_actions.py: what it asks for)
    sender.py, receiver.py         threads and sockets round it (pump.py, control.py)
    wire.py                        what the two ends say to each other
    engines/                       how bytes get across

The ends are loaded on first use: a worker that transfers nothing needs no checksum library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from worker.transfer.interface import (
    Arrived,
    Delivered,
    Description,
    Failed,
    Layout,
    PoolMemory,
    ReceiverEvent,
    Revoked,
    SenderEvent,
)

if TYPE_CHECKING:
    from worker.transfer.ends import ENGINES, EngineOptions, check_engine, open_receiver, open_sender

__all__ = [
    "ENGINES",
    "Arrived",
    "Delivered",
    "Description",
    "EngineOptions",
    "Failed",
    "Layout",
    "PoolMemory",
    "ReceiverEvent",
    "Revoked",
    "SenderEvent",
    "check_engine",
    "open_receiver",
    "open_sender",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.ends"), name)
