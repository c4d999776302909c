"""Make a CUDA stream lag: a kernel that spins for a given time goes before every operation launched on it.

What races without a fence mostly wins by luck on an idle card. With the producer held back, a consumer that does not
wait for it comes too early, every time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from kernels.cuda import jit
from worker.streams.cuda import CudaStream

SOURCE = """
struct Spin { unsigned long long nanoseconds; };
extern "C" __global__ void __launch_bounds__(32) spin(const __grid_constant__ Spin what) {
  unsigned long long began, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - began < what.nanoseconds);
}
"""


class _Spin(ctypes.Structure):
    _fields_ = (("nanoseconds", ctypes.c_uint64),)


@cache
def _kernel() -> jit.Kernel:
    torch.cuda.synchronize()  # makes the context that the module belongs to
    major, minor = torch.cuda.get_device_capability()
    compiled = jit.compile_source(SOURCE, "spin", (), f"sm_{major}{minor}")
    return jit.Kernel(jit._call(jit._bindings("driver").cuModuleLoadData, compiled.cubin), "spin")


def spin(seconds: float) -> None:
    """Occupy the current stream, and next to nothing of the card."""
    _kernel().launch((1, 1), _Spin(round(seconds * 1e9)), torch.cuda.current_stream().cuda_stream, threads=1)


def hold_back(stream: CudaStream, seconds: float) -> None:
    """From now on each operation of `stream` begins `seconds` late."""
    launch = stream.launch

    def launch_late(label: str, work: Callable[[], object]) -> None:
        if not torch.cuda.is_current_stream_capturing():
            launch("spin", lambda: spin(seconds))
        launch(label, work)

    stream.launch = launch_late  # type: ignore[method-assign]
