"""The walk of a request from submit to Admit, as `python -m tools.docs.walk` counts it."""

from __future__ import annotations

from pathlib import Path

from tools.docs.walk import walk

#: Files of the product on the way: 69, and a few that timers run meanwhile. The number may only fall.
FILES_MAX = 74


async def test_a_request_passes_three_mailboxes_and_known_files(tmp_path: Path) -> None:
    walked = await walk(tmp_path)
    assert walked.mailboxes == {"scheduler": 1, "host pool of n": 1, "request second": 1}
    product = walked.product()
    assert {"hisparse/client/client.py", "coordinator/scheduling/policy.py", "protocol/sizing.py"} <= {*product}
    assert len(product) <= FILES_MAX, product
