"""What benchmarks.swap_in runs on: one layer's state, top-k that misses so many tokens a step, and what must come out.

Top-k is a window over a random permutation of the context, another one per request, in random order. It moves by
`misses` tokens per step; what it leaves is long evicted when it comes round again, so each step misses exactly so many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from kernels.begin_step import begin_step
from kernels.cuda.launch import prepare
from kernels.layout import Geometry
from kernels.seat import init_managed
from kernels.state import BackupPlan, DeviceState, MissPlan, StepBatch
from protocol.units import PAGE_TOKENS, managed_chunks

STEPS: Final = 16  # of one graph
TOPK: Final = 2048
CONTEXT: Final = 65_536
TAIL_SLOTS: Final = 4
NOW: Final = 3  # word of a row that begin_step opened
CHECKED_ROWS: Final = 1 << 15  # whose bytes one check compares, of all requests together: tenths of a second


@dataclass
class Setup:
    """One layer's state as each of the steps of a graph sees it, and their inputs."""

    state: DeviceState
    batch: StepBatch
    steps: list[tuple[DeviceState, StepBatch]]  # the same, each with a clock of its own
    window: Tensor  # int32[B, CONTEXT-1]: the permutation that the top-k moves over
    topk: Tensor  # int32[STEPS, B, TOPK]
    out: Tensor  # likewise
    plans: list[MissPlan]
    place: int  # where the window begins
    step: int = 1
    shuffle: Tensor = field(default_factory=lambda: torch.arange(TOPK))  # int64[TOPK]: places in the last top-k

    def advance(self, misses: int) -> None:
        """The next steps' top-k: `misses` fresh tokens each, random order."""
        for step, (state, batch) in enumerate(self.steps):
            self.place += misses
            self.step += 1
            state.now.fill_(self.step)
            batch.opened[:, NOW].fill_(self.step)
            self.shuffle = torch.randperm(TOPK, device=self.window.device)
            self.topk[step].copy_(self.window[:, (self.place + self.shuffle) % (CONTEXT - 1)])

    def counts(self) -> tuple[int, int]:
        """Misses and hits of all requests so far."""
        return int(self.state.misses.sum()), int(self.state.hits.sum())


def build(pool: Tensor, row_bytes: int, hot: int, batch: int, device: str = "cuda") -> Setup:
    """Requests with tokens 0..hot-1 in their slots, rows not loaded; host rows scattered over `pool`, uint8[bytes].

    Requests share host pages once the pool is full.
    """
    geometry = Geometry(1, row_bytes, (0,), 4, TOPK)
    pages = pool.numel() // geometry.page_bytes
    chunks = managed_chunks(hot)
    state = DeviceState.allocate(
        geometry,
        seats=batch,
        chunks=batch * chunks,
        index_pages=batch * CONTEXT // PAGE_TOKENS,
        max_pages=CONTEXT // PAGE_TOKENS,
        max_chunks=chunks,
        slab_pages=1,
        tail_slots=TAIL_SLOTS,
        host=pool[: pages * geometry.page_bytes].view(pages, geometry.page_bytes),
        device=device,
    )
    if state.rows.is_cuda:
        prepare(state)
    for table in (state.index_table, state.chunk_table):
        table.copy_(torch.randperm(table.numel()).view(table.shape))
    held_pages = state.host_table.numel()
    shared = torch.cat([torch.randperm(pages) for _ in range(-(-held_pages // pages))])[:held_pages]
    state.host_table.copy_(shared.view(state.host_table.shape))
    for seat in range(batch):
        init_managed(state, seat, hot, 0, hot)
    inputs = StepBatch.allocate(batch, 1, device)
    inputs.seats.copy_(torch.randperm(batch))
    inputs.lengths.fill_(CONTEXT)
    inputs.num_real.fill_(batch)
    begin_step(state, inputs, BackupPlan.allocate(batch, 1, device))  # the newest token: in a tail slot, never selected
    held = torch.rand(batch, hot, device=device).argsort(1)
    fresh = torch.rand(batch, CONTEXT - 1 - hot, device=device).argsort(1) + hot
    topk = torch.zeros(STEPS, batch, TOPK, dtype=torch.int32, device=device)
    return Setup(
        state,
        inputs,
        [(replace(state, now=state.now.clone()), replace(inputs, opened=inputs.opened.clone())) for _ in range(STEPS)],
        torch.cat([held, fresh], 1).int(),
        topk,
        torch.empty_like(topk),
        [MissPlan.allocate(batch, TOPK, device) for _ in range(STEPS)],
        place=hot - TOPK,
    )


def check(setup: Setup, before: tuple[int, int], misses: int, launches: int) -> None:
    """Raises SystemExit unless `launches` steps since counts() was `before` did what they must, each with `misses`.

    Counters of all of them, plans of those of the last graph. Outputs and bytes of the last step: every output names
    its token's row; and rows that these launches loaded and that are still selected are the host's (all of them up to
    batch 16, a random sample of each request beyond), so that one which an earlier step got wrong, or a later one
    damaged, is found.
    """
    _check_counts(setup, before, misses, launches)
    topk, out = setup.topk[-1], setup.out[-1].long()
    wrong = (out < 0) | (setup.state.slot_token[0][out] != topk)
    if wrong.any():
        raise SystemExit(f"{int(wrong.sum())} outputs name a row that holds another token")
    _check_plan(setup, misses)
    # Places of the window count from its oldest token.
    loaded = (setup.shuffle >= TOPK - min(TOPK, launches * misses)).nonzero().flatten()
    loaded = loaded[: CHECKED_ROWS // out.shape[0]]  # in random order, as the top-k is
    for row in range(out.shape[0] if len(loaded) else 0):
        _check_bytes(setup, row, topk[row, loaded].long(), out[row, loaded])


def _check_counts(setup: Setup, before: tuple[int, int], misses: int, launches: int) -> None:
    state, requests = setup.state, setup.topk.shape[1]
    found = tuple(now - then for now, then in zip(setup.counts(), before, strict=True))
    wanted = (launches * requests * misses, launches * requests * (TOPK - misses))
    if found != wanted or state.tripwires.any():
        raise SystemExit(f"counted misses, hits {found}, expected {wanted}; tripwires {state.tripwires.tolist()}")
    planned = torch.stack([plan.count for plan in setup.plans])
    if (planned != misses).any():
        raise SystemExit(f"plans of {planned.unique().tolist()} copies, expected {misses}")


def _check_plan(setup: Setup, misses: int) -> None:
    """The last plan has the step's fresh tokens, each once, and where the host keeps them."""
    state, plan = setup.state, setup.plans[-1]
    device_row = plan.device_row[:, :misses].long()
    fresh = setup.out[-1][:, setup.shuffle >= TOPK - misses].long()
    token = state.slot_token[0][device_row]
    page = state.host_table[setup.batch.seats.long()].gather(1, (token // PAGE_TOKENS).long())
    if not (
        torch.equal(device_row.sort(1).values, fresh.sort(1).values)
        and torch.equal(plan.host_page[:, :misses], page)
        and torch.equal(plan.host_offset[:, :misses], token % PAGE_TOKENS)
    ):
        raise SystemExit("the last plan does not copy what its step missed")


def _check_bytes(setup: Setup, row: int, tokens: Tensor, device_rows: Tensor) -> None:
    """Device rows `device_rows` int64[n] of batch row `row` have the bytes of the host's rows of `tokens` int64[n]."""
    state = setup.state
    pages = state.host_table[int(setup.batch.seats[row])][tokens // PAGE_TOKENS].long()
    want = state.host_row_words[0][pages.cpu(), 0, (tokens % PAGE_TOKENS).cpu()]
    differ = (state.row_words[0][0][device_rows] != want.to(device_rows.device)).any(1)
    if differ.any():
        first = int(differ.nonzero()[0])
        raise SystemExit(
            f"batch row {row}: bytes of {int(differ.sum())} rows of {len(tokens)} differ from the host's; "
            f"the first is token {int(tokens[first])} in device row {int(device_rows[first])}"
        )
