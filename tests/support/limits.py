"""How long tests wait for what has to happen. A limit only ends a wait that would be endless: on a busy machine any
process may stand still for seconds, or run at a fifth of its speed."""

from __future__ import annotations

from typing import Final

#: Below the limit of a whole test (pyproject.toml), so that a failure shows the line that waits.
HANG_LIMIT_S: Final = 100.0
