"""Every kernel in vectorised torch: what runs on the CPU, and what the CUDA kernels are compared with."""

from kernels.reference.attention import attend_rows, prepare_attention
from kernels.reference.begin_step import begin_step
from kernels.reference.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.reference.index_topk import index_topk, prepare_index
from kernels.reference.prompt_topk import prepare_prompt, prompt_topk
from kernels.reference.rows import (
    gather_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.reference.seat import (
    clear_seat,
    grow_managed,
    hold_tokens,
    init_managed,
    init_resident,
    latest_tokens,
    shrink_managed,
)
from kernels.reference.swap_in import replay_misses, swap_in

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
