"""Swap-in under model code of one's own: sparse attention over a context that lies in host memory.

    python examples/swap_in.py [--tokens 4096] [--steps 64]

A toy model of two layers that share one index group decodes one request. Its prompt lies in host pages; the device has
a hot buffer of a few hundred rows. In each step the result is compared with attention over a plain copy of all rows.
Runs on a GPU where there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from hisparse import kernels as hs

LAYERS, HEADS, LATENT, ROPE = 2, 16, 512, 64
INDEX_HEADS, INDEX_DIM = 16, 128
TOPK, HOT_SLOTS, TAIL_SLOTS = 128, 512, 2
SEAT, GROUP = 0, 0


class Model:
    """Random queries, rows and index keys in place of a real model's projections. Queries drift from step to step."""

    def __init__(self, device: str) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.device = device
        self.query = self.draw(1, HEADS, LATENT + ROPE)
        self.index_query = self.draw(1, INDEX_HEADS, INDEX_DIM)
        self.index_weights = torch.ones(1, INDEX_HEADS, device=device)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def rows(self, tokens: int) -> tuple[Tensor, Tensor]:
        """KV rows [LAYERS, tokens, LATENT + ROPE] and index keys [tokens, INDEX_DIM]."""
        return self.draw(LAYERS, tokens, LATENT + ROPE), self.draw(tokens, INDEX_DIM)

    def advance(self) -> None:
        self.query = 0.95 * self.query + 0.3 * self.draw(*self.query.shape)
        self.index_query = 0.95 * self.index_query + 0.3 * self.draw(*self.index_query.shape)


class Cache:
    """One request's memory: host pages of the whole context, index pages, and a small hot buffer."""

    def __init__(self, tokens_max: int, device: str) -> None:
        self.row_format = hs.kv_row_format("float32", LATENT, ROPE)
        self.key_format = hs.index_key_format("float32", INDEX_DIM)
        geometry = hs.Geometry(
            layers=LAYERS,
            row_bytes=self.row_format.row_bytes,
            group_of_layer=(GROUP,) * LAYERS,
            index_row_bytes=self.key_format.row_bytes,
            topk=TOPK,
        )
        pages, chunks = hs.pages_for(tokens_max), hs.managed_chunks(HOT_SLOTS)
        host = torch.zeros(pages, geometry.page_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        self.state = hs.DeviceState.allocate(
            geometry,
            seats=1,
            chunks=chunks,
            index_pages=pages,
            max_pages=pages,
            max_chunks=chunks,
            slab_pages=pages,
            tail_slots=TAIL_SLOTS,
            host=host,
            device=device,
        )
        hs.prepare(self.state)
        self.state.host_table[SEAT] = torch.arange(pages)  # an allocator's decisions: which pages and chunks are ours
        self.state.index_table[SEAT] = torch.arange(pages)
        self.state.chunk_table[SEAT] = torch.arange(chunks)
        self.batch = hs.StepBatch.allocate(1, geometry.places, device)
        self.backup = hs.BackupPlan.allocate(1, geometry.places, device)
        self.misses = hs.MissPlan.allocate(1, TOPK, device)

    def write_prompt(self, rows: Tensor, keys: Tensor) -> None:
        """Put a prompt's rows and index keys into host pages, page by page through one slab page, layer by layer; begin
        with no hot row."""
        state, device = self.state, rows.device
        for start in range(0, len(keys), hs.PAGE_TOKENS):
            stop, page = min(start + hs.PAGE_TOKENS, len(keys)), start // hs.PAGE_TOKENS
            state.slab_table[SEAT, page] = 0
            hs.write_prompt_index_keys(state, GROUP, SEAT, start, hs.encode(self.key_format, keys[start:stop]))
            places = torch.arange(stop - start, device=device)  # rows of slab page 0
            index_rows, host_pages = start + places, torch.full_like(places, page)  # index page n is the context's n-th
            for layer in range(LAYERS):  # whose rows lie over those of layer - 2
                hs.write_slab_rows(state, layer, SEAT, start, hs.encode(self.row_format, rows[layer, start:stop]))
                hs.copy_rows_to_host(
                    state.slab(layer),
                    places.unsqueeze(0),
                    index_rows if layer == LAYERS - 1 else None,
                    host_pages,
                    places,
                    range(layer, layer + 1),
                )
        hs.init_managed(state, SEAT, HOT_SLOTS, first_token=0, tokens=0)

    def step(self, model: Model, length: int, rows: Tensor, keys: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Decode the token at position length-1. Returns top-k positions [TOPK] and each layer's attention output."""
        state, batch, scale = self.state, self.batch, 1 / math.sqrt(LATENT + ROPE)
        device_rows = torch.empty(1, TOPK, dtype=torch.int32, device=rows.device)
        topk = torch.empty_like(device_rows)
        outputs = []
        batch.seats.fill_(SEAT)
        batch.lengths.fill_(length)
        batch.num_real.fill_(1)
        hs.begin_step(state, batch, self.backup)
        for layer in range(LAYERS):
            hs.write_new_rows(state, layer, batch, hs.encode(self.row_format, rows[layer]))
            if layer == 0:  # the group's anchor selects, for all of its layers
                hs.write_index_keys(state, GROUP, batch, hs.encode(self.key_format, keys))
                hs.index_topk(state, GROUP, model.index_query, model.index_weights, batch, INDEX_DIM**-0.5, topk)
                hs.swap_in(state, GROUP, topk, batch, device_rows, self.misses)
            else:
                hs.replay_misses(state, layer, self.misses)
            output = torch.empty(1, HEADS, LATENT, device=rows.device)
            hs.attend_rows(state, layer, model.query, device_rows, scale, output)
            outputs.append(output)
        plan = self.backup
        hs.copy_rows_to_host(state, plan.device_row, plan.index_row, plan.host_page, plan.host_offset)
        return topk[0].long(), outputs


def attend_all(query: Tensor, rows: Tensor) -> Tensor:
    """The same attention over selected rows [TOPK, LATENT + ROPE] of a plain tensor."""
    weights = torch.softmax(query @ rows.T / math.sqrt(LATENT + ROPE), dim=-1)
    return weights @ rows[:, :LATENT]


def main() -> None:
    parser = argparse.ArgumentParser(description="Swap-in under model code of one's own.")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, cache = Model(device), Cache(options.tokens + options.steps, device)
    rows, keys = model.rows(options.tokens)
    cache.write_prompt(rows, keys)
    worst = 0.0
    for length in range(options.tokens + 1, options.tokens + options.steps + 1):
        new_rows, new_key = model.rows(1)
        rows = torch.cat((rows, new_rows), dim=1)
        topk, outputs = cache.step(model, length, new_rows, new_key)
        for layer, output in enumerate(outputs):
            worst = max(worst, float((output - attend_all(model.query, rows[layer, topk])).abs().max()))
        model.advance()
    hits, misses = int(cache.state.hits[GROUP, SEAT]), int(cache.state.misses[GROUP, SEAT])
    hs.check_state(cache.state, SEAT, options.tokens + options.steps)
    print(f"{device}: {options.steps} steps, {hits / (hits + misses):.0%} of {hits + misses} rows were hot")
    print(f"largest difference to attention over a plain copy: {worst:.1e}")
    if worst > 1e-4 or int(cache.state.tripwires.sum()):
        raise SystemExit("attention over the hot buffer differs from attention over a plain copy")


if __name__ == "__main__":
    main()
