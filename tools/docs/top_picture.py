"""The picture of `hisparse top` in the docs, from a real run on a terminal under tmux.

python -m tools.docs.top_picture docs/top.svg      draw it anew
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

import trio
from rich.console import Console
from rich.text import Text

from tests.support.top_rig import COLUMNS, REQUESTS, WORKERS, watched_cluster


def to_svg(screen: str, name: str, title: str, columns: int = COLUMNS) -> str:
    """A styled capture of a screen as a picture; `name` begins the ids in it."""
    console = Console(record=True, width=columns, file=io.StringIO(), color_system="256", force_terminal=True)
    for line in screen.splitlines():
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    picture = console.export_svg(title=title, unique_id=name)
    return re.sub(r" *@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)  # fonts of another site


async def _held_by_key(path: Path) -> str:
    """The styled screen with one request held, some time into the decode."""
    async with watched_cluster(path) as (_, tmux):
        await tmux.until("connected", f"{WORKERS} of {WORKERS} workers", f"{REQUESTS} requests")
        tmux.press("s")
        await trio.sleep(20)
        tmux.press("Down", "Down", "r", "y")
        await tmux.until("HELD")
        await trio.sleep(4)
        return tmux.screen(styled=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="top") as directory:
        shown = trio.run(_held_by_key, Path(directory))
    Path(sys.argv[1]).write_text(to_svg(shown, "top", "hisparse top, 3 workers, 50 requests, 80x24"))
