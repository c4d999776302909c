"""The picture of `hisparse demo` in the README, from a real run on a terminal under tmux.

python -m tools.docs.demo_picture docs/demo.svg      draw it anew: 3 minutes on 2 cores
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

import trio

from tests.support.top_rig import Tmux
from tools.docs.top_picture import to_svg

COLUMNS: Final = 132
LINES: Final = 60
RUN_LIMIT_S: Final = 600.0
#: The note after which requests are on the move, and the text that ends a run.
MOVING: Final = "requests go on elsewhere"
PASSED: Final = "PASSED"


async def run_demo(path: Path) -> str:
    """What the terminal shows, styled: up to MOVING with the live lines of that moment, then all that was printed."""
    command = f"{sys.executable} -m hisparse.cli demo; exec sleep {RUN_LIMIT_S:g}"
    tmux = Tmux(path / "tmux", command, {"PYTHONPATH": str(Path.cwd())}, COLUMNS, LINES)
    try:
        await tmux.until(MOVING, limit_s=RUN_LIMIT_S)
        moving = tmux.screen(styled=True).rstrip().splitlines()
        await tmux.until(PASSED, limit_s=RUN_LIMIT_S)
        printed = tmux.screen(styled=True).rstrip().splitlines()
    finally:
        tmux.close()
    begin = next(index for index, line in enumerate(printed) if MOVING in line)
    return "\n".join(["$ make demo", *moving, *printed[begin + 1 :]])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="demo") as directory:
        shown = trio.run(run_demo, Path(directory))
    Path(sys.argv[1]).write_text(to_svg(shown, "demo", "hisparse demo", COLUMNS))
