"""Processes of pytest-xdist that are forked (tests/support/zygote.py), each with the model library and all test modules
imported: 5 to 10 s of CPU time that each is spared.

As a program it is what execnet has an interpreter execute: the source of its side comes as a line on stdin.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.support.zygote import COLLECT, MODULE, XDIST, Forked, fork_own, zygote


class ForkedIO(gateway_io.Popen2IOMaster):
    """execnet's end of the pipes to a process that was forked in place of `args`."""

    def __init__(self, args: list[str], execmodel: Any) -> None:
        self.popen = Forked([sys.executable, MODULE, XDIST], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


def fork_processes() -> None:
    """Let execnet fork the processes that it starts in this one from now on, from one that has all tests imported."""
    zygote(COLLECT)
    vars(gateway_io)["Popen2IOMaster"] = ForkedIO


if __name__ == "__main__":
    fork_own()
    gc.unfreeze()  # hypothesis asks who refers to an object
    exec(eval(sys.stdin.readline()))
