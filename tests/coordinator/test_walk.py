"""The walks from submit to Admit and from retract to Withdraw, as `python -m tools.docs.walk` counts them."""

from __future__ import annotations

from pathlib import Path

from trio.testing import MockClock

from tools.docs.walk import CLOCK_RATE, product_of, walk

#: Files of the product on the way, by call. The numbers may only fall.
FILES_MAX = {"submit": 60, "retract": 38}


async def test_a_call_passes_two_mailboxes_and_known_files(tmp_path: Path, mock_clock: MockClock) -> None:
    mock_clock.rate = CLOCK_RATE
    walks = await walk(tmp_path)
    assert walks.keys() == FILES_MAX.keys()
    for call, walked in walks.items():
        assert {"scheduler": 1, "request": 1} in [it.mailboxes for it in walked], call
        product = product_of(walked)
        assert {"hisparse/client/client.py", "coordinator/scheduler/api.py", "protocol/skew.py"} <= {*product}
        assert len(product) <= FILES_MAX[call], (call, product)
