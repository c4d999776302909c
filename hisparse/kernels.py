"""The swap-in runtime's device side, to run under model code of one's own. docs/api.md describes all of it.

A decode step of a batch, for each layer `l` of index group `g` (the first layer of a group is its anchor):

    begin_step(state, batch, backup)                        once: places the new tokens, plans their backup
    write_new_rows(state, l, batch, rows)                   the step's KV rows, as bytes (RowFormat.encode)
    write_index_keys(state, g, batch, keys)                 anchor layers: the step's index keys
    index_topk(state, g, queries, weights, batch, ...)      anchor layers: top-k positions
    swap_in(state, g, topk, batch, out_rows, misses)        anchor layers: their device rows; loads what is missing
    replay_misses(state, l, misses)                         other layers: the same loads
    attend_rows(state, l, queries, out_rows, ...)           attention over these rows
    copy_rows_to_host(state, backup.device_row, ...)        once, behind all layers: the new rows and keys to the host

Every function takes a DeviceState and runs where its tensors are: in CUDA on a GPU, in torch on the CPU. Tensors are
checked before anything is changed; one that does not fit raises BadInput. No function waits for the device (only
check_state reads back), none can be cancelled, and none orders streams: what runs on streams of its own needs fences.

torch is imported when a name is first used; without it that raises ConfigError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

__all__ = [
    "PAGE_TOKENS",
    "SEAT_ROWS_MAX",
    "SLOTS_MAX",
    "TAIL_SLOTS_MAX",
    "TOPK_MAX",
    "BackupPlan",
    "DeviceState",
    "Geometry",
    "MissPlan",
    "RowFormat",
    "StepBatch",
    "Tripwire",
    "attend_rows",
    "begin_step",
    "check_state",
    "clear_seat",
    "copy_keys_to_device",
    "copy_rows_to_device",
    "copy_rows_to_host",
    "encode",
    "gather_rows",
    "grow_managed",
    "hadamard",
    "hold_tokens",
    "index_key_format",
    "index_topk",
    "init_managed",
    "init_resident",
    "kv_row_format",
    "latest_tokens",
    "managed_chunks",
    "pages_for",
    "prepare",
    "prepare_attention",
    "prepare_encode",
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

if TYPE_CHECKING:
    from kernels.attention import attend_rows, prepare_attention
    from kernels.backend import prepare
    from kernels.begin_step import begin_step
    from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
    from kernels.encode import encode, prepare_encode
    from kernels.index_topk import index_topk, prepare_index
    from kernels.integrity import check_state
    from kernels.layout import Geometry
    from kernels.prompt_topk import prepare_prompt, prompt_topk
    from kernels.row_format import RowFormat, hadamard, index_key_format, kv_row_format
    from kernels.rows import (
        gather_rows,
        read_index_keys,
        read_slab_rows,
        write_index_keys,
        write_new_rows,
        write_prompt_index_keys,
        write_slab_rows,
    )
    from kernels.seat import (
        clear_seat,
        grow_managed,
        hold_tokens,
        init_managed,
        init_resident,
        latest_tokens,
        shrink_managed,
    )
    from kernels.state import BackupPlan, DeviceState, MissPlan, StepBatch, Tripwire
    from kernels.swap_in import replay_misses, swap_in
    from protocol.units import (
        PAGE_TOKENS,
        SEAT_ROWS_MAX,
        SLOTS_MAX,
        TAIL_SLOTS_MAX,
        TOPK_MAX,
        managed_chunks,
        pages_for,
    )
else:
    from hisparse.lazy import attributes as _attributes
    from protocol.errors import ConfigError as _ConfigError

    #: Names by the module that defines them.
    _HOMES: Final = {
        "kernels.attention": "attend_rows prepare_attention",
        "kernels.backend": "prepare",
        "kernels.begin_step": "begin_step",
        "kernels.copy_rows": "copy_keys_to_device copy_rows_to_device copy_rows_to_host",
        "kernels.encode": "encode prepare_encode",
        "kernels.index_topk": "index_topk prepare_index",
        "kernels.integrity": "check_state",
        "kernels.layout": "Geometry",
        "kernels.prompt_topk": "prepare_prompt prompt_topk",
        "kernels.row_format": "RowFormat hadamard index_key_format kv_row_format",
        "kernels.rows": "gather_rows read_index_keys read_slab_rows write_index_keys write_new_rows "
        "write_prompt_index_keys write_slab_rows",
        "kernels.seat": "clear_seat grow_managed hold_tokens init_managed init_resident latest_tokens shrink_managed",
        "kernels.state": "BackupPlan DeviceState MissPlan StepBatch Tripwire",
        "kernels.swap_in": "replay_misses swap_in",
        "protocol.units": "PAGE_TOKENS SEAT_ROWS_MAX SLOTS_MAX TAIL_SLOTS_MAX TOPK_MAX managed_chunks pages_for",
    }
    _get, __dir__ = _attributes(__name__, _HOMES)

    def __getattr__(name: str) -> object:
        try:
            return _get(name)
        except ModuleNotFoundError as error:
            raise _ConfigError(
                f"hisparse.kernels needs the package {error.name}",
                field="kernels",
                value=name,
                remedy="pip install 'hisparse[worker]'",
            ) from error
