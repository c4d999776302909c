"""How a router chooses experts, the numbers that its weights do not say, and what a choice takes where rows travel.

Imports no torch: `hisparse size` counts these bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

#: Of one choice of an expert in an exchange: its number, int32, and its weight, float32.
NUMBER_BYTES: Final = 4
CHOICE_BYTES: Final = 8
#: Values of a hidden state that share a scale, float32, where it travels as e4m3.
SCALED_VALUES: Final = 128
SCALE_BYTES: Final = 4


def state_bytes(width: int, value_bytes: int) -> int:
    """Bytes of a hidden state of `width` values; with the scales of e4m3 where a value has one byte."""
    scales = -(-width // SCALED_VALUES) if value_bytes == 1 else 0
    return width * value_bytes + SCALE_BYTES * scales


@dataclass(frozen=True)
class ExpertChoice:
    """How a router chooses k of E experts: from the `groups_chosen` of `groups` whose best two score highest."""

    experts: int
    groups: int
    groups_chosen: int
    choices: int
    normalizes: bool
    scaling: float

    @classmethod
    def of(cls, router: Any) -> ExpertChoice:
        """Of the model library's router."""
        counts = router.num_experts, router.num_group, router.topk_group, router.top_k
        return cls(*counts, router.norm_topk_prob, router.routed_scaling_factor)

    @property
    def has_kernel(self) -> bool:
        """Whether `choose_experts` takes it: powers of two, and two experts in a group at least."""
        each = self.experts // self.groups
        powers = all(it & (it - 1) == 0 for it in (self.experts, self.groups))
        return powers and each >= 2 and self.choices <= each * self.groups_chosen
