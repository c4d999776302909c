"""Every kernel for NVIDIA GPUs of compute capability 8.0 and up, behind the contracts of kernels/*.py.

`prepare` (launch.py) compiles and loads what a state needs, at worker start; attention, encoding and draws are written
in Triton, all or in part, and get ready by a run. No verb waits for the device.
"""

from kernels.cuda.attention import attend_rows, prepare_attention
from kernels.cuda.begin_step import begin_step
from kernels.cuda.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.cuda.index_topk import index_topk, prepare_index
from kernels.cuda.launch import prepare
from kernels.cuda.prompt_topk import prepare_prompt, prompt_topk
from kernels.cuda.rows import (
    gather_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.cuda.seat import (
    clear_seat,
    grow_managed,
    hold_tokens,
    init_managed,
    init_resident,
    latest_tokens,
    shrink_managed,
)
from kernels.cuda.swap_in import replay_misses, swap_in

__all__ = [
    "attend_rows",
    "begin_step",
    "clear_seat",
    "copy_keys_to_device",
    "copy_rows_to_device",
    "copy_rows_to_host",
    "gather_rows",
    "grow_managed",
    "hold_tokens",
    "index_topk",
    "init_managed",
    "init_resident",
    "latest_tokens",
    "prepare",
    "prepare_attention",
    "prepare_index",
    "prepare_prompt",
    "prompt_topk",
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
