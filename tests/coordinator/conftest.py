"""Connections between a test and a coordinator in the same process: either may stand still with the machine for as long
as the product waits for a peer. Tests of these limits set their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.listener import router
from hisparse.client import connection
from protocol.transport import dealer
from tests.support.limits import HANG_LIMIT_S
from tests.support.version_before import BEFORE, serve_version_before


@pytest.fixture
def version_before(monkeypatch: pytest.MonkeyPatch) -> int:
    """A protocol version before this one, which the coordinator serves in this test."""
    serve_version_before(monkeypatch)
    return BEFORE


@pytest.fixture(scope="package", autouse=True)
def _patient_peers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dealer, "CONNECT_LIMIT_S", HANG_LIMIT_S)
        patched.setattr(connection, "WELCOME_LIMIT_S", HANG_LIMIT_S)
        patched.setattr(router, "HANDSHAKE_LIMIT_MS", int(1_000 * HANG_LIMIT_S))
        yield
