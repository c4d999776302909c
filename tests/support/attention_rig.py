"""Cases of attend_rows: a state with encoded rows, entries that name them, and attention computed another way."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import Geometry
from kernels.row_format import RowFormat, kv_row_format
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS, pages_for

LAYERS = 2


class Case:
    """`batch` rows of `heads` queries over `k` entries each, among `stored` rows; some entries are -1, and the whole
    of the last batch row where there are several."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        *,
        batch: int = 3,
        heads: int = 4,
        k: int = 50,
        latent: int = 64,
        rope: int = 16,
        stored: int = 300,
        seed: int = 0,
        device: str = "cpu",
        sinks: bool = False,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.form: RowFormat = kv_row_format(kind, latent, rope)
        geometry = Geometry(LAYERS, self.form.row_bytes, (0,) * LAYERS, 4, k)
        self.state = DeviceState.allocate(
            geometry,
            seats=1,
            chunks=pages_for(stored) + 1,
            index_pages=1,
            max_pages=1,
            max_chunks=1,
            slab_pages=1,
            tail_slots=1,
            host=torch.zeros(1, geometry.page_bytes, dtype=torch.uint8),
            device=device,
        )
        self.state.rows.fill_(0xFF)  # NaN in every format, where nothing is stored
        values = torch.randn(LAYERS, stored, latent + rope, generator=draw)
        self.state.rows[:, PAGE_TOKENS : PAGE_TOKENS + stored] = self.form.encode(values).to(device)
        entries = torch.randint(PAGE_TOKENS, PAGE_TOKENS + stored, (batch, k), generator=draw, dtype=torch.int32)
        entries[torch.rand(batch, k, generator=draw) < 0.2] = -1
        if batch > 1:
            entries[-1] = -1
        self.out_rows = entries.to(device)
        self.queries = torch.randn(batch, heads, latent + rope, generator=draw).to(device=device, dtype=dtype)
        self.scaling = (latent + rope) ** -0.5
        self.sinks = (3 * torch.randn(heads, generator=draw)).to(device) if sinks else None
        self.out = torch.full((batch, heads, latent), float("nan"), dtype=dtype, device=device)

    def expected(self, layer: int, rounded: torch.dtype = torch.float64) -> Tensor:
        """float64[B, H, r], entry by entry as the definition has it, from the bytes of the state, of which values are
        `rounded` to a type first."""
        out = torch.zeros(self.out.shape, dtype=torch.float64)
        stored = self.form.decode(self.state.rows[layer].cpu()).to(rounded).double()
        for row, entries in enumerate(self.out_rows.cpu()):
            held = stored[entries[entries >= 0].long()]
            if len(held):
                scores = self.queries[row].cpu().double() @ held.T * self.scaling
                if self.sinks is not None:  # one more score, whose share goes to no row
                    scores = torch.cat((scores, self.sinks.cpu().double().unsqueeze(1)), 1)
                out[row] = scores.softmax(-1)[:, : len(held)] @ held[:, : self.form.scaled]
        return out

    def sort_entries(self, row: int, head: int, *, falling: bool) -> None:
        """The entries of a batch row in the order of its scores for one head, those of -1 as if they scored 0."""
        entries = self.out_rows[row]
        scores = self.form.decode(self.state.rows[1][entries.clamp(min=0).long()]) @ self.queries[row, head].float()
        self.out_rows[row] = entries[scores.masked_fill(entries < 0, 0.0).argsort(descending=falling)]

    def relocate(self, seed: int) -> None:
        """Move every stored row to another place and rename the entries: what a different hot buffer would do."""
        places = torch.randperm(self.state.rows.shape[1], generator=torch.Generator().manual_seed(seed))
        self.state.rows.copy_(self.state.rows[:, torch.argsort(places).to(self.state.rows.device)])
        renamed = places.int().to(self.out_rows.device)[self.out_rows.long().clamp(min=0)]
        self.out_rows.copy_(torch.where(self.out_rows < 0, -1, renamed))
