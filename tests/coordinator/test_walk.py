"""The walk of a request from submit to Admit, as `python -m tools.docs.walk` counts it."""

from __future__ import annotations

from pathlib import Path

from trio.testing import MockClock

from tools.docs.walk import CLOCK_RATE, product_of, walk

#: Files of the product on the way. The number may only fall.
FILES_MAX = 65


async def test_a_request_passes_two_mailboxes_and_known_files(tmp_path: Path, mock_clock: MockClock) -> None:
    mock_clock.rate = CLOCK_RATE
    walks = await walk(tmp_path)
    assert {"scheduler": 1, "request": 1} in [walked.mailboxes for walked in walks]
    product = product_of(walks)
    assert {"hisparse/client/client.py", "coordinator/policy/policy.py", "protocol/sizing.py"} <= {*product}
    assert len(product) <= FILES_MAX, product
