"""Layer groups: the parts in which prompt rows are sent while later layers are still computed. Pure.

A host page holds rows layer by layer and then all index keys (kernels/layout.py). A group is the rows of consecutive
layers; the last one takes the index keys as well, which lie behind its rows. So each group is one range of bytes:

    page       | layers 0..14 | 15..29 | 30..44 | 45..59 | 60, index keys |       DeepSeek-V3.2, bf16: 1.1 MB each
    staged     layer by layer, each once it is written; index keys with layer 60
    sent       one unit with one checksum, each

Groups are cut to equal bytes, not to equal layers: when the last layer is written, one n-th of a pass is left to send.
That index keys of earlier layers wait for it costs nothing thereby; the last group has fewer layers.

How many: as many as have worker.layer_group bytes each. A unit costs its two ends 0.08 ms (shared) to 0.17 ms (nixl) of
a processor, however small it is; so groups of 1 MiB, five of that page, cost a fifth more than whole pages, groups of
256 KiB nearly as much again.

Rejected: index keys as units of their own (twice as many for a tenth of the bytes, and nothing arrives earlier); units
of several ranges (an engine's write is one range); a group per index group (up to 61, of unequal size).
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.layout import Geometry
from protocol.units import PAGE_TOKENS
from worker.transfer.interface import PARTS_MAX


@dataclass(frozen=True)
class LayerGroups:
    """Groups of the layers of `geometry`; `ends[i]` is the first layer behind group i."""

    geometry: Geometry
    ends: tuple[int, ...]

    @classmethod
    def of(cls, geometry: Geometry, group_bytes: int) -> LayerGroups:
        """As many as get `group_bytes` of a page each, at most PARTS_MAX, one layer in each at least. 0: one group."""
        layer_bytes = PAGE_TOKENS * geometry.row_bytes
        count = min(max(1, geometry.page_bytes // group_bytes), PARTS_MAX) if group_bytes else 1
        cuts = {round(number * geometry.page_bytes / count / layer_bytes) for number in range(1, count)}
        return cls(geometry, (*sorted(cut for cut in cuts if 0 < cut < geometry.layers), geometry.layers))

    @property
    def count(self) -> int:
        return len(self.ends)

    @property
    def byte_ends(self) -> tuple[int, ...]:
        """Where groups end in a host page."""
        layer_bytes = PAGE_TOKENS * self.geometry.row_bytes
        return (*(end * layer_bytes for end in self.ends[:-1]), self.geometry.page_bytes)

    def layers(self, group: int) -> range:
        return range(self.ends[group - 1] if group else 0, self.ends[group])

    @property
    def all(self) -> list[range]:
        """The layers of each group."""
        return [self.layers(group) for group in range(self.count)]

    def ending_with(self, layer: int) -> int | None:
        """The group that is whole once `layer` is written."""
        return self.ends.index(layer + 1) if layer + 1 in self.ends else None
