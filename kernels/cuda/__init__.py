"""Every kernel for NVIDIA GPUs of compute capability 8.0 and up, behind the contracts of kernels/*.py.

`prepare` (launch.py) compiles and loads what a state needs, at worker start. Verbs that have no kernel of their own are
the reference's torch code, on the GPU.
"""

from kernels.cuda.begin_step import begin_step
from kernels.cuda.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.cuda.launch import prepare
from kernels.cuda.swap_in import replay_misses, swap_in
from kernels.reference.index_topk import index_topk
from kernels.reference.rows import (
    gather_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.reference.seat import clear_seat, grow_managed, init_managed, init_resident, shrink_managed

__all__ = [
    "begin_step",
    "clear_seat",
    "copy_keys_to_device",
    "copy_rows_to_device",
    "copy_rows_to_host",
    "gather_rows",
    "grow_managed",
    "index_topk",
    "init_managed",
    "init_resident",
    "prepare",
    "read_index_keys",
    "read_slab_rows",
    "replay_misses",
    "shrink_managed",
    "swap_in",
    "write_index_keys",
    "write_new_rows",
    "write_prompt_index_keys",
    "write_slab_rows",
]
