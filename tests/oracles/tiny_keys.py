"""Metadata that only some architectures have, from transformers' configurations."""

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np


def gpt_oss_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_bool("gpt-oss.rope.scaling.yarn_whole_pairs", rope["truncate"])


def granite_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def gemma4_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    near, full = (config.per_layer_config[sliding.index(window)] for window in (True, False))
    writer.add_head_count_kv(
        [near.num_key_value_heads if window else full.num_key_value_heads for window in sliding]
    )
    writer.add_key_length_swa(near.head_dim)
    writer.add_value_length_swa(near.head_dim)
    writer.add_rope_dimension_count_swa(near.head_dim)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_expert_used_count(config.top_k_experts)
    half = full.head_dim // 2
    turned = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * half)
    divisors = np.array([1.0] * turned + [1e30] * (half - turned), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def grouped_router_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Routing as the DeepSeek and GLM configurations put it."""
    sigmoid = "topk_method" not in config
    return {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": sigmoid,
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def minimax_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
    }


def deepseek_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of latent attention, whose cache is like one key head's."""
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    keys = grouped_router_keys(config) | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
    }
    if config["q_lora_rank"]:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    scaling = config["rope_parameters"]
    if scaling["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        }
    return keys
