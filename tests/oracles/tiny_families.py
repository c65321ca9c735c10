"""How each architecture is configured in transformers, scaled down, and what its GGUF calls things."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import torch

from oracles.tiny_keys import (
    deepseek_keys,
    gemma4_metadata,
    gpt_oss_metadata,
    granite_metadata,
    grouped_router_keys,
    minimax_keys,
)
from oracles.tiny_tokenizer import EOS_ID, VOCAB_SIZE

SMALL = dict(
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=1024,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=EOS_ID,
    bos_token_id=None,
    pad_token_id=None,
)
_EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2)
# Wide enough that each row of each matrix is a whole number of 256-element blocks.
WIDE = dict(hidden_size=256, intermediate_size=256)


def _fused_experts(parameter: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Gate rows before up rows [E, 2F, D], or down [E, D, F]."""
    names = ("down",) if parameter == "down_proj" else ("gate", "up")
    for name, rows in zip(names, value.chunk(len(names), dim=1), strict=True):
        yield f"ffn_{name}_exps.weight", rows


def interleaved_experts(parameter: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """gpt-oss: inputs before outputs [E, D, 2F], gate and up taking turns; with biases [E, 2F]."""
    kind = "bias" if parameter.endswith("_bias") else "weight"
    rows = value if kind == "bias" else value.transpose(1, 2)
    names = ("down",) if parameter.startswith("down") else ("gate", "up")
    for i, name in enumerate(names):
        yield f"ffn_{name}_exps.{kind}", rows[:, i :: len(names)]


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is configured in transformers and named in GGUF."""

    architecture: str
    hf: str
    config: Mapping[str, Any]
    expert_width: str = ""
    permuted: bool = False
    norm2: str = "ffn_norm"
    pre: str = "qwen2"
    # Keys beyond the usual ones, or other values for them, from the configuration.
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    # Names within a block where they are not the usual ones.
    names: Mapping[str, str] = field(default_factory=dict)
    # Configuration of the model whose rows are whole 256-element blocks, beside `WIDE`.
    wide: Mapping[str, Any] = field(default_factory=dict)
    experts: Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]] = _fused_experts
    renamed: Mapping[str, str] = field(default_factory=dict)  # whole names, with their suffix
    metadata: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None

    def zero_centred(self, name: str) -> bool:
        """Whether transformers adds one to the weight of the norm `name`."""
        return "linear_num_key_heads" in self.config and "linear_attn" not in name


def gpt_oss_rope(*, whole_pairs: bool) -> dict[str, Any]:
    """YaRN as gpt-oss has it, or as llama.cpp computes it (`whole_pairs`)."""
    return dict(
        rope_type="yarn",
        rope_theta=150000.0,
        factor=16.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=whole_pairs,
        original_max_position_embeddings=64,
    )


_DELTA_NET: dict[str, Any] = _EXPERTS | dict(
    num_hidden_layers=4,
    intermediate_size=64,
    head_dim=32,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
_GEMMA4: dict[str, Any] = _EXPERTS | dict(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    intermediate_size=96,
    moe_intermediate_size=32,
    top_k_experts=2,
    enable_moe_block=True,
    head_dim=32,
    global_head_dim=64,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=8,
    final_logit_softcapping=30.0,
    hidden_size_per_layer_input=0,
)
_PARTIAL_ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)


_PLAIN_ROPE = dict(rope_type="default", rope_theta=10000.0)
_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=128,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
# One dense layer, then two with experts, of which one is shared.
_LEADING_DENSE: dict[str, Any] = dict(
    num_hidden_layers=3,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=0.4,
    norm_topk_prob=True,
)
_LATENT: dict[str, Any] = _LEADING_DENSE | dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope_parameters=_YARN,
)
_LATENT_WIDE = dict(
    q_lora_rank=256, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
)
_SHARED_EXPERTS = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
_SELECTION_BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}

FAMILIES = {
    "qwen3moe": Family(
        architecture="qwen3moe",
        hf="Qwen3Moe",
        config=_EXPERTS
        | dict(intermediate_size=64, head_dim=32, moe_intermediate_size=32, norm_topk_prob=True),
        expert_width="moe_intermediate_size",
    ),
    "qwen2moe": Family(
        architecture="qwen2moe",
        hf="Qwen2Moe",
        config=_EXPERTS
        | dict(intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=64)
        | dict(norm_topk_prob=False),
        expert_width="moe_intermediate_size",
    ),
    "olmoe": Family(
        architecture="olmoe",
        hf="Olmoe",
        config=_EXPERTS | dict(intermediate_size=32, num_key_value_heads=4),
        expert_width="intermediate_size",
        pre="olmo",
    ),
    "mixtral": Family(
        architecture="llama",
        hf="Mixtral",
        config=dict(intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
        expert_width="intermediate_size",
        permuted=True,
        pre="smollm",
    ),
    "qwen3next": Family(
        architecture="qwen3next",
        hf="Qwen3Next",
        config=_DELTA_NET | dict(norm_topk_prob=True, rope_parameters=_PARTIAL_ROPE),
        expert_width="moe_intermediate_size",
        norm2="post_attention_norm",
    ),
    "qwen35moe": Family(
        architecture="qwen35moe",
        hf="Qwen3_5Moe",
        config=_DELTA_NET
        | dict(rope_parameters=_PARTIAL_ROPE | dict(mrope_section=[3, 3, 2], mrope_interleaved=True)),
        expert_width="moe_intermediate_size",
        norm2="post_attention_norm",
        pre="qwen35",
    ),
    "glm4moe": Family(
        architecture="glm4moe",
        hf="Glm4Moe",
        config=_LEADING_DENSE
        | dict(head_dim=32, use_qk_norm=True, attention_bias=True)
        | dict(rope_parameters=_PARTIAL_ROPE),
        expert_width="moe_intermediate_size",
        keys=grouped_router_keys,
        names=_SHARED_EXPERTS | _SELECTION_BIAS,
        norm2="post_attention_norm",
        pre="glm4",
    ),
    "minimax-m2": Family(
        architecture="minimax-m2",
        hf="MiniMaxM2",
        config=dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=32, head_dim=32)
        | dict(rope_parameters=_PARTIAL_ROPE),
        expert_width="intermediate_size",
        keys=minimax_keys,
        names={"mlp.e_score_correction_bias": "exp_probs_b.bias"},
        pre="minimax-m2",
    ),
    # DeepSeek-V3 and Kimi-K2: YaRN, limited groups.
    "deepseek2": Family(
        architecture="deepseek2",
        hf="DeepseekV3",
        config=_LATENT | dict(n_group=4, topk_group=2),
        expert_width="moe_intermediate_size",
        keys=deepseek_keys,
        names=_SHARED_EXPERTS | _SELECTION_BIAS,
        wide=_LATENT_WIDE,
        pre="deepseek-v3",
    ),
    "glm4moelite": Family(
        architecture="deepseek2",
        hf="Glm4MoeLite",
        config=_LATENT | dict(rope_parameters=_PLAIN_ROPE),
        expert_width="moe_intermediate_size",
        keys=deepseek_keys,
        names=_SHARED_EXPERTS | _SELECTION_BIAS,
        wide=_LATENT_WIDE,
        pre="glm4",
    ),
    # DeepSeek-V2: softmax, groups by their best expert. llama.cpp has another rule for these.
    "deepseekv2": Family(
        architecture="deepseek2",
        hf="DeepseekV2",
        config=_LATENT
        | dict(
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            n_shared_experts=2,
            norm_topk_prob=False,
        ),
        expert_width="moe_intermediate_size",
        keys=deepseek_keys,
        names=_SHARED_EXPERTS,
        wide=_LATENT_WIDE,
        pre="deepseek-llm",
    ),
    "deepseekv2lite": Family(
        architecture="deepseek2",
        hf="DeepseekV2",
        # llama.cpp knows the small one by its 27 layers.
        config=_LATENT
        | dict(
            q_lora_rank=None,
            topk_method="greedy",
            n_shared_experts=2,
            norm_topk_prob=False,
            num_hidden_layers=27,
        ),
        expert_width="moe_intermediate_size",
        keys=deepseek_keys,
        names=_SHARED_EXPERTS,
        wide={name: size for name, size in _LATENT_WIDE.items() if name != "q_lora_rank"},
        pre="deepseek-llm",
    ),
    "llama": Family("llama", "Llama", dict(intermediate_size=96), permuted=True, pre="smollm"),
    "qwen2": Family("qwen2", "Qwen2", dict(intermediate_size=96)),
    "qwen3": Family("qwen3", "Qwen3", dict(intermediate_size=96, head_dim=32)),
    "gpt-oss": Family(
        architecture="gpt-oss",
        hf="GptOss",
        config=dict(intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=4)
        | dict(head_dim=32, sliding_window=8, rope_parameters=gpt_oss_rope(whole_pairs=False)),
        expert_width="intermediate_size",
        pre="gpt-4o",
        norm2="post_attention_norm",
        names={
            "mlp.router": "ffn_gate_inp",
        },
        renamed={"self_attn.sinks": "attn_sinks.weight"},
        experts=interleaved_experts,
        metadata=gpt_oss_metadata,
    ),
    "gemma4": Family(
        architecture="gemma4",
        hf="Gemma4",
        config=_GEMMA4,
        expert_width="moe_intermediate_size",
        norm2="post_attention_norm",
        names={
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "router.proj": "ffn_gate_inp",
        },
        renamed={
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "layer_scalar": "layer_output_scale.weight",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        },
        metadata=gemma4_metadata,
    ),
    "granitemoe": Family(
        architecture="granitemoe",
        hf="GraniteMoeShared",
        config=dict(intermediate_size=32, num_local_experts=8, num_experts_per_tok=2)
        | dict(shared_intermediate_size=48, embedding_multiplier=1.5, attention_multiplier=0.3)
        | dict(residual_multiplier=0.7, logits_scaling=2.0),
        expert_width="intermediate_size",
        permuted=True,
        pre="refact",
        names={
            "block_sparse_moe.router": "ffn_gate_inp",
            "shared_mlp.input_linear": "ffn_gate_shexp ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        metadata=granite_metadata,
    ),
}
ARCHITECTURES = tuple(FAMILIES)
