"""`python -m tests.support.slow_demo demo flags...`: `hisparse demo` whose workers take longer for each step until its
moves are made. So its requests have not ended before, however little of a core it gets."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hisparse.cli import main as hisparse
from hisparse.demo import scenario
from tests.support.cluster_rig import plant


def main() -> None:
    direct: Callable[..., Awaitable[None]] = scenario._direct
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        slow = Path(place) / "slow"
        slow.touch()

        async def directed(*arguments: object) -> None:
            try:
                await direct(*arguments)
            finally:
                slow.unlink()

        plant(patched, "slow-steps", slow)
        patched.setattr(scenario, "_direct", directed)
        hisparse(prog_name="hisparse")


if __name__ == "__main__":
    main()
