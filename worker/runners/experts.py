"""Mixture of experts: the library's modules, with the experts' products formed as suits device and step.

| where          | decode       | prefill    | why                                                                     |
|----------------|--------------|------------|-------------------------------------------------------------------------|
| CPU            | batched_mm   | grouped_mm | a fixed shape per token keeps rows apart; grouped_mm is the library's   |
| GPU, bfloat16  | grouped_mm   | grouped_mm | reads each chosen expert once, its offsets stay on the device           |
| FP8 is kept    | BlockExperts of worker/weights/modules.py | reads each chosen expert once, in FP8          |
| GPU, otherwise | batched_mm   | batched_mm | torch's grouped_mm would read its offsets on the host                   |

On a GPU the experts of a row are chosen as the library's router does, in one launch (kernels/routing.py).

batched_mm copies the weights of every token's experts: nothing at the size of tests, 30 GB for 64 tokens of
DeepSeek-V3.2. torch has a grouped kernel for bfloat16 on compute capability 9 and 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kernels.cuda.pointwise import gate
from kernels.cuda.quantize import Codes
from kernels.expert_choice import ExpertChoice
from kernels.routing import ExchangedRows, choose_experts, router_logits
from worker.group.exchange import Exchange
from worker.weights.layout import ExpertShare
from worker.weights.modules import Activations, BlockExperts, BlockLinear, products

BATCHED: Final = "batched_mm"
GROUPED: Final = "grouped_mm"
GROUPED_SINCE: Final = (9, 10)  # major compute capability with a grouped kernel


@dataclass(frozen=True)
class Over:
    """Where the experts of a mixture are: this rank holds `share`, and `exchange` reaches the others. `rows` is the
    size of the round; `real` bool[B] tells rows of a decode batch from padding."""

    exchange: Exchange
    share: ExpertShare
    rows: int
    real: Tensor | None = None

    def own_hidden(self, hidden: Tensor) -> Tensor | Codes:
        """Return the places from which `hidden` [N, S, h] leaves for the ranks: [N * S, h], rows of which lie apart."""
        return self.exchange.own_states(self.rows, hidden.shape[:-1].numel())


def experts_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Names of the implementations for decode and for prefill."""
    if device.type != "cuda":
        return BATCHED, GROUPED
    has_kernel = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in GROUPED_SINCE
    return (GROUPED, GROUPED) if has_kernel else (BATCHED, BATCHED)


def routed(
    moe: Any, hidden: Tensor, experts: str, over: Over | None = None, choice: ExpertChoice | None = None
) -> Tensor:
    """Parts [R, N * S, hidden] of the sum that the routed experts of a mixture add to `hidden` [N, S, hidden]. `moe` is
    the library's module, or one with `BlockExperts` in it; without a `choice` its own router runs.

    `over` the ranks of a group, if `moe` holds a share of the experts. On a GPU `hidden` lies in `over.own_hidden` too.
    """
    rows = hidden.view(-1, hidden.shape[-1])
    if over is None:
        weights, chosen = _choose(moe.gate, choice, rows, None)
        return _experts(moe.experts, experts, rows, chosen, weights).unsqueeze(0)
    compute = partial(_share, moe.experts, experts, over.share)
    if not rows.is_cuda:
        weights, chosen = _choose(moe.gate, choice, rows, over.real)
        return over.exchange.parts(rows, chosen, weights, over.rows, compute)
    _choose(moe.gate, choice, rows, over.real, over.exchange.own(over.rows))
    return over.exchange.parts_of_own(len(rows), over.rows, compute)


def gated_mlp(mlp: Any, rows: Activations) -> Tensor:
    """Output [N, S, hidden] of the library's MLP, that of a layer without experts or of shared ones."""
    hidden = rows.values
    is_silu, down = mlp.config.hidden_act == "silu", mlp.down_proj
    if is_silu and isinstance(down, BlockLinear) and down.quantizes_rows:
        output: Tensor = down.gated(*products(rows, mlp.gate_proj, mlp.up_proj))
    elif is_silu and hidden.is_cuda:
        output = down(gate(*products(rows, mlp.gate_proj, mlp.up_proj)))
    else:
        output = mlp(hidden)
    return output


def _choose(
    router: Any, choice: ExpertChoice | None, rows: Tensor, real: Tensor | None, into: ExchangedRows | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and choices int[T, k] of rows [T, hidden]; where `real` bool[T] is false, choices are -1.

    Those of `into` where it is given; there, rows behind T choose -1."""
    if rows.is_cuda and choice is not None and choice.has_kernel:
        logits = router_logits(rows, router.weight)
        return choose_experts(logits, router.e_score_correction_bias, choice, real, into)
    _, weights, chosen = router(rows)
    if real is not None:
        chosen = chosen.masked_fill(~real.unsqueeze(1), -1)
    if into is not None:
        into.chosen[: len(rows)], into.weights[: len(rows)] = chosen, weights
        into.chosen[len(rows) :].fill_(-1)
        return into.weights, into.chosen
    return weights, chosen.int() if rows.is_cuda else chosen


def padding(moe: Any, hidden: int, dtype: torch.dtype, experts: str, over: Over) -> None:
    """Take part in a mixture over the ranks of a group without a row."""
    device, choices = moe.gate.weight.device, moe.gate.top_k
    rows, weights = (torch.empty(0, width, dtype=dtype, device=device) for width in (hidden, choices))
    chosen = torch.empty(0, choices, dtype=torch.int32, device=device)
    over.exchange.parts(rows, chosen, weights, over.rows, partial(_share, moe.experts, experts, over.share))


def hold_share(model: Any, share: ExpertShare) -> None:
    """Tell the library's modules that a choice beyond their last expert is another rank's, and adds nothing."""
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.num_experts, module._is_expert_parallel = share.count, True


def _experts(
    module: Any, experts: str, rows: Any, chosen: Tensor, weights: Tensor, out: Tensor | None = None
) -> Tensor:
    if isinstance(module, BlockExperts):
        output: Tensor = module(rows, chosen, weights, out)
        return output
    forward: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[experts]
    return forward(module, rows.contiguous(), chosen.long(), weights.contiguous())


def _share(
    module: Any,
    experts: str,
    share: ExpertShare,
    rows: Any,
    chosen: Tensor,
    weights: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Output [T, hidden] of the experts of `share` alone, for choices int[T, k] among all, -1 for none; in `out`, where
    it can be written there.

    The library's batched_mm has a fixed shape: there another rank's choice costs a product with weight 0.
    """
    if isinstance(module, BlockExperts):
        return _experts(module, experts, rows, chosen, weights, out)
    own = chosen - share.first
    absent = (own < 0) | (own >= share.count)
    return _experts(module, experts, rows, own.masked_fill(absent, share.count), weights.masked_fill(absent, 0))
