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

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # What the module exports. At run time hisparse.lazy reads these lines.
    from kernels.attention import attend_rows as attend_rows
    from kernels.attention import prepare_attention as prepare_attention
    from kernels.backend import prepare as prepare
    from kernels.begin_step import begin_step as begin_step
    from kernels.block_attention import attend_dense as attend_dense
    from kernels.block_attention import attend_pages as attend_pages
    from kernels.block_topk import block_topk as block_topk
    from kernels.copy_rows import copy_keys_to_device as copy_keys_to_device
    from kernels.copy_rows import copy_rows_to_device as copy_rows_to_device
    from kernels.copy_rows import copy_rows_to_host as copy_rows_to_host
    from kernels.encode import encode as encode
    from kernels.encode import prepare_encode as prepare_encode
    from kernels.index_topk import index_topk as index_topk
    from kernels.index_topk import prepare_index as prepare_index
    from kernels.integrity import check_state as check_state
    from kernels.layout import DENSE as DENSE
    from kernels.layout import Geometry as Geometry
    from kernels.prompt_pieces import PromptPiece as PromptPiece
    from kernels.prompt_pieces import PromptPieces as PromptPieces
    from kernels.prompt_topk import prepare_prompt as prepare_prompt
    from kernels.prompt_topk import prompt_topk as prompt_topk
    from kernels.row_format import RowFormat as RowFormat
    from kernels.row_format import hadamard as hadamard
    from kernels.row_format import index_key_format as index_key_format
    from kernels.row_format import kv_row_format as kv_row_format
    from kernels.rows import copy_slab_pages as copy_slab_pages
    from kernels.rows import gather_rows as gather_rows
    from kernels.rows import read_dense_rows as read_dense_rows
    from kernels.rows import read_index_keys as read_index_keys
    from kernels.rows import read_slab_rows as read_slab_rows
    from kernels.rows import write_index_keys as write_index_keys
    from kernels.rows import write_new_rows as write_new_rows
    from kernels.rows import write_prompt_index_keys as write_prompt_index_keys
    from kernels.rows import write_slab_rows as write_slab_rows
    from kernels.seat import clear_seat as clear_seat
    from kernels.seat import grow_managed as grow_managed
    from kernels.seat import hold_tokens as hold_tokens
    from kernels.seat import init_managed as init_managed
    from kernels.seat import init_resident as init_resident
    from kernels.seat import latest_tokens as latest_tokens
    from kernels.seat import shrink_managed as shrink_managed
    from kernels.state import BackupPlan as BackupPlan
    from kernels.state import DeviceState as DeviceState
    from kernels.state import MissPlan as MissPlan
    from kernels.state import StepBatch as StepBatch
    from kernels.state import Tripwire as Tripwire
    from kernels.swap_in import replay_misses as replay_misses
    from kernels.swap_in import swap_in as swap_in
    from protocol.units import PAGE_TOKENS as PAGE_TOKENS
    from protocol.units import SEAT_ROWS_MAX as SEAT_ROWS_MAX
    from protocol.units import SLOTS_MAX as SLOTS_MAX
    from protocol.units import TAIL_SLOTS_MAX as TAIL_SLOTS_MAX
    from protocol.units import TOPK_MAX as TOPK_MAX
    from protocol.units import managed_chunks as managed_chunks
    from protocol.units import pages_for as pages_for
else:
    from hisparse.lazy import attributes as _attributes
    from protocol.errors import ConfigError as _ConfigError

    _get, __dir__ = _attributes(__name__)

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
