"""Early launches in Triton: blocks of a kernel begin while the kernel ahead is at work, and await it before they read.

What `launch_options` of triton_units.py gives is passed with each launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait until the kernel ahead has ended and its writes are visible; let the next one begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
