"""A small MiniMax-M3 with random weights in memory: its library model, its runner, and what the library says."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import DynamicCache, MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from kernels.layout import DENSE, Geometry
from protocol.messages import ModelInfo
from worker.runners.block_sparse import BlockSparseRunner

HEADS, DIM, BLOCK, BLOCKS = 2, 16, 128, 3


@cache
def model() -> Any:
    torch.manual_seed(3)
    config = MiniMaxM3VLTextConfig(
        **{"vocab_size": 264, "hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 96},
        **{"shared_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": DIM},
        **{"num_key_value_heads": HEADS, "index_n_heads": HEADS, "index_head_dim": DIM, "index_block_size": BLOCK},
        **{"index_topk_blocks": BLOCKS, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
        layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=4096,
        **{"bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2},
    )
    made = MiniMaxM3VLForCausalLM(config).float().eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def geometry() -> Geometry:
    row = HEADS * 2 * DIM * 4
    return Geometry(4, row, (DENSE, 0, 1, 2), DIM * 4, BLOCKS * BLOCK // 64, DIM * 4, HEADS, 64)


def runner() -> BlockSparseRunner:
    info = ModelInfo("m3", "m3", 4096, 264, 4, BLOCKS * BLOCK, (), "bytes", "")
    return BlockSparseRunner(model(), info, geometry())


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
@torch.no_grad()
def library(length: int, steps: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens of the library's own forward, and their logits float32[steps, vocab]."""
    held, logits = DynamicCache(config=model().config), list[torch.Tensor]()
    fed = torch.tensor([prompt(length, seed)])
    for _ in range(steps):
        out = model()(input_ids=fed, cache=held, use_cache=True)
        logits.append(out.logits[0, -1].float())
        fed = logits[-1].argmax().view(1, 1)
    found = torch.stack(logits)
    return found.argmax(-1).tolist(), found
