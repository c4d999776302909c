"""config.json of the served models, as their authors publish them."""

from __future__ import annotations

from typing import Any, Final

_ROUTING: Final = {
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_layer_freq": 1},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "ep_size": 1},
}
_SHARED: Final = {
    **{"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_head_dim": 128},
    **{"tie_word_embeddings": False, "use_cache": True, "num_nextn_predict_layers": 1},
}
FP8: Final = {**{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}}

DEEPSEEK_V32: Final[dict[str, Any]] = {
    **_SHARED,
    **_ROUTING,
    **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "transformers_version": "4.44.2"},
    **{"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "vocab_size": 129280},
    **{"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "rms_norm_eps": 1e-06},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "v_head_dim": 128},
    **{"qk_nope_head_dim": 128, "index_n_heads": 64, "n_group": 8, "topk_group": 4},
    **{"max_position_embeddings": 163840, "rope_theta": 10000},
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}
GLM_5: Final[dict[str, Any]] = {
    **_SHARED,
    **_ROUTING,
    **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "transformers_version": "5.0.2.dev0"},
    **{"bos_token_id": 0, "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820},
    **{"dtype": "bfloat16", "vocab_size": 154880, "pretraining_tp": 1, "head_dim": 64, "qk_head_dim": 256},
    **{"hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78, "rms_norm_eps": 1e-05},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "v_head_dim": 256},
    **{"qk_nope_head_dim": 192, "index_n_heads": 32, "n_group": 1, "topk_group": 1},
    **{"rope_interleave": True, "indexer_rope_interleave": True, "max_position_embeddings": 202752},
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "quantization_config": FP8,
}
#: One layer of four selects for all four, behind the first three.
GLM_52: Final[dict[str, Any]] = GLM_5 | {
    **{"index_topk_pattern": None, "index_topk_freq": 4, "index_skip_topk_offset": 3},
    **{"index_share_for_mtp_iteration": True, "max_position_embeddings": 1048576},
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
GLM_53: Final[dict[str, Any]] = GLM_52 | {"moe_router_dtype": "float32"}

SERVED: Final = {"deepseek-v3.2": DEEPSEEK_V32, "glm-5": GLM_5, "glm-5.2": GLM_52, "glm-5.3": GLM_53}
