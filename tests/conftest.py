"""What holds in every process of the suite. It runs in several at once (`-n`): a test owns what it names, and one core.

A test's files lie under tmp_path, its ports are those that the kernel gives it, and what costs long to make is made
once for all processes (tests/support/shared.py).
"""

from __future__ import annotations

import os
import signal

#: Of torch, here and in what is started here: more threads would take the cores from the tests beside this one.
os.environ["OMP_NUM_THREADS"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` in a script; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
