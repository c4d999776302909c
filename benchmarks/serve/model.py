"""The model of a benchmark's service: what is written for its worker, what its weights and contexts take. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from kernels.layout import Geometry
from worker.runners.checkpoint import geometry_of
from worker.weights.layout import ExpertShare, exchange_bytes, weights_bytes
from worker.weights.synth import published_config

FAMILY: Final = "deepseek-v3.2"
BLOCK: Final = (128, 128)
#: Of the tiny model, for a CPU.
TINY: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4_096,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
}


class Spec(msgspec.Struct, frozen=True):
    """Settings from which the worker makes its runner. `control`: the file that says whether contexts are written;
    `journal`: the file of its records. `layers` 0: as published. `resident`: without hot buffers."""

    layers: int
    ranks: int
    overlap: float
    fp8: bool
    tiny: bool
    resident: bool
    control: str
    journal: str

    @property
    def config(self) -> Any:
        return config_of(self.layers, tiny=self.tiny)


def config_of(layers: int, *, tiny: bool) -> Any:
    """DeepSeek-V3.2 as published, or tiny, with so many layers (0: 61, or 4)."""
    if not tiny:
        return published_config(FAMILY, layers=layers)
    from transformers import DeepseekV32Config

    return DeepseekV32Config(**TINY, num_hidden_layers=layers or 4)


def ranks_of(text: str) -> int:
    """The size of the group in `rank-of-N`. Raises ValueError."""
    found = re.fullmatch(r"rank-of-([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"{text} is not rank-of-N, such as rank-of-8")
    return int(found[1])


def geometry(config: Any, kv_dtype: str) -> Geometry:
    return geometry_of(config, kv_dtype)


def device_bytes(config: Any, ranks: int, rows_max: int) -> int:
    """Bytes of a rank's weights and of its exchange with the others."""
    share = ExpertShare.of(0, ranks, config.n_routed_experts)
    weights = weights_bytes(config, "bfloat16", BLOCK, on_gpu=True, experts=share)
    return sum(weights.values()) + exchange_bytes(config, "bfloat16", ranks, rows_max)


def write_tokenizer(directory: Path, vocab: int) -> None:
    """A tokenizer.json in which token i is the word i, in hexadecimal, behind a space: every token is text at once, and
    a text can be read back."""
    words = {f"Ġ{number:x}": number for number in range(vocab)}
    kind: dict[str, Any] = {
        "type": "BPE",
        "vocab": words,
        "merges": [],
        "unk_token": None,
        "dropout": None,
        "fuse_unk": False,
    }
    kind |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": False}
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    whole: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    whole |= {"pre_tokenizer": steps, "post_processor": None, "decoder": steps, "model": kind}
    (directory / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False))


def tokens_of(text: str) -> list[int]:
    """The tokens of a text of `write_tokenizer`'s words."""
    return [int(word, 16) for word in text.split()]
