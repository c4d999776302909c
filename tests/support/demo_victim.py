"""Which host row to corrupt, and where it lies: worked out with the model library alone, as a stranger would.

Of one prompt, the library says which rows each decode step selects and what a layer holds of them. A row is found in
the pool file by its value, so nothing of the ledger, the worker or its page tables is used. Not in layer 0: its latents
are functions of the token alone, so that equal bytes have equal rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.units import PAGE_TOKENS
from worker.pool.file import HEADER_BYTES

#: An anchor layer in both families, below which attention has mixed the context in.
LAYER = 2
#: Largest difference of a latent between the library's prefill and ours.
SAME_VALUE = 1e-3


@dataclass(frozen=True)
class Victim:
    """The row of LAYER that most late decode steps select."""

    position: int
    latent: npt.NDArray[np.float32]
    selected_by: int  # late decode steps


def find_victim(model: Any, prompt: Sequence[int], new_tokens: int, late: int) -> Victim:
    """Run generate() with an ear on the layer's indexer. Steps are late from number `late` on."""
    steps: list[list[int]] = []

    def listen(_module: Any, _inputs: Any, topk: torch.Tensor) -> None:
        if topk.shape[1] == 1:  # a decode step, not the prefill
            steps.append([position for position in topk[0, 0].tolist() if 0 <= position < len(prompt)])

    handle = model.model.layers[LAYER].self_attn.indexer.register_forward_hook(listen)
    try:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([list(prompt)]), max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
            )
    finally:
        handle.remove()
    position, count = Counter(position for step in steps[late:] for position in step).most_common(1)[0]
    latents = output.past_key_values.layers[LAYER].keys[0, 0]
    return Victim(position, latents[position].numpy(), count)


def corrupt(pool: Path, victim: Victim, page_bytes: int, row_bytes: int) -> int:
    """Overwrite the victim's row in the pool file; how many rows had its value (1 when it is there, 0 before)."""
    with pool.open("r+b") as file:
        body = np.memmap(file, np.uint8, mode="r+", offset=HEADER_BYTES)
        offset = (LAYER * PAGE_TOKENS + victim.position % PAGE_TOKENS) * row_bytes
        rows = body.reshape(-1, page_bytes)[:, offset : offset + row_bytes].view(np.float32)
        width = len(victim.latent)
        found = np.flatnonzero(np.abs(rows[:, :width] - victim.latent).max(axis=1) < SAME_VALUE)
        rows[found] = 100.0 * np.roll(rows[found], 1, axis=1)
        body.flush()
    return len(found)
