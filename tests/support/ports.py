"""Ports for processes that take several in a row. Where one is enough, the kernel gives it: port 0."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from typing import Final

#: Below those that kernels give to connections and to listeners at port 0: a free one stays free until it is used.
CHOICE: Final = range(12_000, 32_000)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that no process listens at now."""
    while True:
        first = random.SystemRandom().choice(CHOICE)
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
