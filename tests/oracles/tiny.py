"""Tiny random models of every architecture, as a GGUF file and as the transformers model with equal weights.

Shapes come from the families' own configurations, scaled down. Weights are Gaussian, scaled by fan-in so that
attention is neither flat nor one-hot; norms and biases are far from 1 and 0, so that leaving one out shows.

Plain Gaussian models are ill-conditioned: rounding the activations to 8 bits by itself swaps experts and best
tokens. So each token's embedding leans towards two experts of each layer, and towards the output row of one
other token, as in trained models; what remains is decided by the context.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from oracles.quantise import dequantise, quantise, storage_type
from oracles.tiny_tokenizer import EOS_ID, VOCAB_SIZE, add_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SMALL = dict(
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
_WIDE = dict(hidden_size=256, intermediate_size=256)


def _fused_experts(parameter: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Gate rows before up rows [E, 2F, D], or down [E, D, F]."""
    names = ("down",) if parameter == "down_proj" else ("gate", "up")
    for name, rows in zip(names, value.chunk(len(names), dim=1), strict=True):
        yield f"ffn_{name}_exps.weight", rows


def _interleaved_experts(parameter: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """gpt-oss: inputs before outputs [E, D, 2F], gate and up taking turns; with biases [E, 2F]."""
    kind = "bias" if parameter.endswith("_bias") else "weight"
    rows = value if kind == "bias" else value.transpose(1, 2)
    names = ("down",) if parameter.startswith("down") else ("gate", "up")
    for i, name in enumerate(names):
        yield f"ffn_{name}_exps.{kind}", rows[:, i :: len(names)]


@dataclass(frozen=True, slots=True)
class _Family:
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
    # Configuration of the model whose rows are whole 256-element blocks, beside `_WIDE`.
    wide: Mapping[str, Any] = field(default_factory=dict)
    experts: Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]] = _fused_experts
    renamed: Mapping[str, str] = field(default_factory=dict)  # whole names, with their suffix
    metadata: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None


def _gpt_oss_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_bool("gpt-oss.rope.scaling.yarn_whole_pairs", rope["truncate"])


def _granite_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _gemma4_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
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


def _grouped_router_keys(config: Mapping[str, Any]) -> dict[str, Any]:
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


def _minimax_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
    }


def _deepseek_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of latent attention, whose cache is like one key head's."""
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    keys = _grouped_router_keys(config) | {
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

_FAMILIES = {
    "qwen3moe": _Family(
        architecture="qwen3moe",
        hf="Qwen3Moe",
        config=_EXPERTS
        | dict(intermediate_size=64, head_dim=32, moe_intermediate_size=32, norm_topk_prob=True),
        expert_width="moe_intermediate_size",
    ),
    "qwen2moe": _Family(
        architecture="qwen2moe",
        hf="Qwen2Moe",
        config=_EXPERTS
        | dict(intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=64)
        | dict(norm_topk_prob=False),
        expert_width="moe_intermediate_size",
    ),
    "olmoe": _Family(
        architecture="olmoe",
        hf="Olmoe",
        config=_EXPERTS | dict(intermediate_size=32, num_key_value_heads=4),
        expert_width="intermediate_size",
        pre="olmo",
    ),
    "mixtral": _Family(
        architecture="llama",
        hf="Mixtral",
        config=dict(intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
        expert_width="intermediate_size",
        permuted=True,
        pre="smollm",
    ),
    "qwen3next": _Family(
        architecture="qwen3next",
        hf="Qwen3Next",
        config=_DELTA_NET | dict(norm_topk_prob=True, rope_parameters=_PARTIAL_ROPE),
        expert_width="moe_intermediate_size",
        norm2="post_attention_norm",
    ),
    "qwen35moe": _Family(
        architecture="qwen35moe",
        hf="Qwen3_5Moe",
        config=_DELTA_NET
        | dict(rope_parameters=_PARTIAL_ROPE | dict(mrope_section=[3, 3, 2], mrope_interleaved=True)),
        expert_width="moe_intermediate_size",
        norm2="post_attention_norm",
        pre="qwen35",
    ),
    "glm4moe": _Family(
        architecture="glm4moe",
        hf="Glm4Moe",
        config=_LEADING_DENSE
        | dict(head_dim=32, use_qk_norm=True, attention_bias=True)
        | dict(rope_parameters=_PARTIAL_ROPE),
        expert_width="moe_intermediate_size",
        keys=_grouped_router_keys,
        names=_SHARED_EXPERTS | _SELECTION_BIAS,
        norm2="post_attention_norm",
        pre="glm4",
    ),
    "minimax-m2": _Family(
        architecture="minimax-m2",
        hf="MiniMaxM2",
        config=dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=32, head_dim=32)
        | dict(rope_parameters=_PARTIAL_ROPE),
        expert_width="intermediate_size",
        keys=_minimax_keys,
        names={"mlp.e_score_correction_bias": "exp_probs_b.bias"},
        pre="minimax-m2",
    ),
    # DeepSeek-V3 and Kimi-K2: YaRN, limited groups.
    "deepseek2": _Family(
        architecture="deepseek2",
        hf="DeepseekV3",
        config=_LATENT | dict(n_group=4, topk_group=2),
        expert_width="moe_intermediate_size",
        keys=_deepseek_keys,
        names=_SHARED_EXPERTS | _SELECTION_BIAS,
        wide=_LATENT_WIDE,
        pre="deepseek-v3",
    ),
    "glm4moelite": _Family(
        architecture="deepseek2",
        hf="Glm4MoeLite",
        config=_LATENT | dict(rope_parameters=_PLAIN_ROPE),
        expert_width="moe_intermediate_size",
        keys=_deepseek_keys,
        names=_SHARED_EXPERTS | _SELECTION_BIAS,
        wide=_LATENT_WIDE,
        pre="glm4",
    ),
    # DeepSeek-V2: softmax, groups by their best expert. llama.cpp has another rule for these.
    "deepseekv2": _Family(
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
        keys=_deepseek_keys,
        names=_SHARED_EXPERTS,
        wide=_LATENT_WIDE,
        pre="deepseek-llm",
    ),
    "deepseekv2lite": _Family(
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
        keys=_deepseek_keys,
        names=_SHARED_EXPERTS,
        wide={name: size for name, size in _LATENT_WIDE.items() if name != "q_lora_rank"},
        pre="deepseek-llm",
    ),
    "llama": _Family("llama", "Llama", dict(intermediate_size=96), permuted=True, pre="smollm"),
    "qwen2": _Family("qwen2", "Qwen2", dict(intermediate_size=96)),
    "qwen3": _Family("qwen3", "Qwen3", dict(intermediate_size=96, head_dim=32)),
    "gpt-oss": _Family(
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
        experts=_interleaved_experts,
        metadata=_gpt_oss_metadata,
    ),
    "gemma4": _Family(
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
        metadata=_gemma4_metadata,
    ),
    "granitemoe": _Family(
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
        metadata=_granite_metadata,
    ),
}
ARCHITECTURES = tuple(_FAMILIES)
MOE_ARCHITECTURES = tuple(name for name, family in _FAMILIES.items() if family.expert_width)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A GGUF file, and what it was made from."""

    path: Path
    arch: str
    config: Mapping[str, Any]
    vocab_size: int = VOCAB_SIZE

    @property
    def hf_model(self) -> "PreTrainedModel":
        """The float32 transformers model whose weights are what the file's blocks stand for, made anew each time."""
        family = _FAMILIES[self.arch]
        model = _hf_model(family, self.config)
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(self.path).tensors}
        with torch.no_grad():
            for tensor in _tensors(family, self.config, model.state_dict()):
                tensor.read(stored[tensor.name])
        return model


def tiny_gguf(path: Path, arch: str, quant: str = "F32", seed: int = 0, **overrides: Any) -> TinyModel:
    """Write a random model of `arch` (one of `ARCHITECTURES`) to `path`; `overrides` are transformers' names.

    `quant` is the type of every matrix but the router. Types other than F32, F16 and BF16 make a model of
    width 256, with fallback types as llama-quantize where rows do not divide (`moe_intermediate_size=288`).
    """
    family = _FAMILIES[arch]
    wide = quant not in ("F32", "F16", "BF16")
    model, config = tiny_hf_model(arch, seed, wide=wide, **overrides)
    writer = gguf.GGUFWriter(path, family.architecture)
    _add_metadata(writer, family, config, model.config)
    add_tokenizer(writer, family.pre)
    for tensor in _tensors(family, config, model.state_dict()):
        tensor.write(writer, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyModel(path, arch, config)


def tiny_hf_model(
    arch: str, seed: int = 0, *, wide: bool = False, **overrides: Any
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """A random float32 model of `arch` and what it was configured with; `wide` makes every row 256 long or more."""
    family = _FAMILIES[arch]
    config: dict[str, Any] = _SMALL | dict(family.config)
    if wide:
        config |= _WIDE | {name: 256 for name in config if name.endswith("intermediate_size")}
        config |= family.wide
    config |= overrides
    return _random_hf_model(family, config, seed, wide=wide), config


def _hf_model(family: _Family, config: Mapping[str, Any]) -> "PreTrainedModel":
    import transformers

    kind = getattr(transformers, f"{family.hf}TextConfig", None) or getattr(
        transformers, f"{family.hf}Config"
    )
    hf_config = kind(**config, tie_word_embeddings=False)
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, f"{family.hf}ForCausalLM")(hf_config).float().eval()
    return model


def _random_hf_model(
    family: _Family, config: Mapping[str, Any], seed: int, *, wide: bool
) -> "PreTrainedModel":
    model = _hf_model(family, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if wide and value.ndim == 3 and "experts" in name:
                noise = _pooled(family, value.shape, generator)
            else:
                noise = torch.randn(value.shape, generator=generator)
            value.copy_(_scaled(name, noise, centred=_zero_centred(family, name)))
        _lean_to_experts_and_successors(model.state_dict(), generator)
    return model


_POOL = 1024


def _pooled(family: _Family, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Gaussian experts whose rows, as they lie in the file, are all from one pool: no two of a matrix are the same.

    Quantising is most of the work of making a model, and `quantise` does it once for each row.
    """
    turned = family.experts is _interleaved_experts
    experts, rows, columns = (shape[0], shape[2], shape[1]) if turned else shape
    pool = torch.randn((_POOL, columns), generator=torch.Generator().manual_seed(columns))
    picked = torch.rand((experts, _POOL), generator=generator).argsort(dim=1)[:, :rows]
    noise = pool[picked]
    return noise.transpose(1, 2) if turned else noise


_ROUTERS = ("router.proj.weight", "mlp.gate.weight", "mlp.router.weight", "sparse_moe.router.weight")


def _lean_to_experts_and_successors(state: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    embedding, output = state["model.embed_tokens.weight"], state["lm_head.weight"]
    vocab, width = embedding.shape
    for name, router in state.items():
        if name.endswith(_ROUTERS):
            ranks = torch.rand(vocab, len(router), generator=generator).argsort(dim=1)
            directions = torch.nn.functional.normalize(router, dim=1) * (0.8 * width**0.5)
            embedding += directions[ranks[:, 0]] + 0.8 * directions[ranks[:, 1]]
    embedding /= embedding.square().mean(dim=1, keepdim=True).sqrt()
    successor = torch.randperm(vocab, generator=generator)
    output[successor] += embedding * (18.0 / width)


def _zero_centred(family: _Family, name: str) -> bool:
    """Whether transformers adds one to this norm's weight."""
    return "linear_num_key_heads" in family.config and "linear_attn" not in name


def _scaled(name: str, noise: torch.Tensor, *, centred: bool) -> torch.Tensor:
    if name.endswith(("norm.weight", "layernorm_1.weight", "layernorm_2.weight", "scale", "scalar")):
        return 0.2 * noise if centred else 1.0 + 0.2 * noise
    if name.endswith(".e_score_correction_bias"):
        return 0.05 * noise
    if name.endswith(("bias", "sinks", "A_log")):
        return 0.3 * noise
    if "conv1d" in name:
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise
    gains = {
        **dict.fromkeys(_ROUTERS, 1.0),
        "lm_head.weight": 1.0,
        "gate_up_proj": 1.5,
        "input_linear": 1.5,
        "down_proj": 0.8,
        "output_linear": 0.8,
        "o_proj": 0.8,
        "out_proj": 0.8,
    }
    gain: float = next((gain for end, gain in gains.items() if end in name), 1.2)
    return noise.mul(gain / noise.shape[-1] ** 0.5)


def _add_metadata(
    writer: gguf.GGUFWriter, family: _Family, config: Mapping[str, Any], hf_config: Any
) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    rope = hf_config.rope_parameters
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "attention.layer_norm_rms_epsilon": hf_config.rms_norm_eps,
        "vocab_size": config["vocab_size"],
    }
    if family.expert_width:
        keys["expert_count"] = config.get("num_experts") or config.get("num_local_experts")
        keys["expert_used_count"] = config["num_experts_per_tok"]
    if family.expert_width == "moe_intermediate_size":
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        keys["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if "linear_num_key_heads" in config:
        keys["ssm.conv_kernel"] = config["linear_conv_kernel_dim"]
        keys["ssm.state_size"] = config["linear_key_head_dim"]
        keys["ssm.group_count"] = config["linear_num_key_heads"]
        keys["ssm.time_step_rank"] = config["linear_num_value_heads"]
        keys["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        keys["full_attention_interval"] = 4
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_name(f"tiny random {family.architecture}")
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (keys | dict(family.keys(config))).items():
        kinds[type(value)](f"{family.architecture}.{key}", value)
    family.metadata(writer, hf_config)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the file and the parameter (or part of one) that it comes from."""

    name: str
    source: torch.Tensor
    rows: torch.Tensor | None = None  # the file's row i is the parameter's row rows[i]
    columns: torch.Tensor | None = None
    changed: str = ""  # "+1" or "-exp": what the file holds of each number

    def write(self, writer: gguf.GGUFWriter, quant: str) -> None:
        """Add it to a file whose matrices are of type `quant`."""
        kind = "F32" if self._stays_f32() else storage_type(quant, self.source.shape[-1])
        stored = self._to_file()
        data = quantise(stored.contiguous().numpy(), kind)
        if kind == "F32":
            writer.add_tensor(self.name, data.view(np.float32))
        else:
            writer.add_tensor(self.name, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    def read(self, stored: gguf.ReaderTensor) -> None:
        """Put into the transformers model exactly the values that a file holds."""
        data = np.ascontiguousarray(stored.data).view(np.uint8)
        self._from_file(torch.from_numpy(dequantise(data, stored.tensor_type.name)))

    def _stays_f32(self) -> bool:
        vector = self.source.ndim == 1 or self.name.endswith(".bias")
        return vector or "ffn_gate_inp" in self.name or "conv1d" in self.name

    def _to_file(self) -> torch.Tensor:
        value = self.source if self.rows is None else self.source[self.rows]
        value = value if self.columns is None else value[:, self.columns]
        return {"": lambda: value, "+1": lambda: value + 1, "-exp": lambda: -value.exp()}[self.changed]()

    def _from_file(self, value: torch.Tensor) -> None:
        value = {"": lambda: value, "+1": lambda: value - 1, "-exp": lambda: (-value).log()}[self.changed]()
        if self.columns is not None:
            value = value[:, self.columns.argsort()]
        if self.rows is None:
            self.source.copy_(value)
        else:
            self.source[self.rows] = value


def _interleaved(heads: int, rows: int) -> torch.Tensor:
    """From half-split rotary rows (transformers) to pairs of neighbours (GGUF `llama`), per head."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def _tensors(
    family: _Family, config: Mapping[str, Any], state: Mapping[str, torch.Tensor]
) -> Iterator[_Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, value in state.items():
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            yield _Tensor(f"{_TOP[stem]}.{suffix}", value, changed=_change(family, name))
            continue
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if renamed := family.renamed.get(f"{part}.{suffix}".lstrip(".")):
            yield _Tensor(f"blk.{layer}.{renamed}", value)
            continue
        if part.rpartition(".")[2] == "experts":
            for end, tensor in family.experts(suffix, value):
                yield _Tensor(f"blk.{layer}.{end}", tensor)
            continue
        if part.startswith("linear_attn"):
            tiled = family.architecture == "qwen35moe"
            part = name.rpartition("linear_attn.")[2]
            yield from _delta_net_tensors(f"blk.{layer}", part, config, value, tiled=tiled)
            continue
        if part == "self_attn.kv_b_proj":
            yield from _split_latent_products(f"blk.{layer}", config, value)
            continue
        if (whole := f"{part}.{suffix}") in family.names:
            yield _Tensor(f"blk.{layer}.{family.names[whole]}", value)
            continue
        names = {"post_attention_layernorm": family.norm2} | family.names
        shorts = (names.get(part) or _BLOCK[part]).split()
        for short, piece in zip(shorts, value.chunk(len(shorts)), strict=True):
            rows = _interleaved(heads[short], len(piece)) if family.permuted and short in heads else None
            flat = piece[0] if short == "ffn_gate_inp_shexp" else piece
            yield _Tensor(f"blk.{layer}.{short}.{suffix}", flat, rows, changed=_change(family, name))


def _change(family: _Family, name: str) -> str:
    return "+1" if name.endswith("norm.weight") and _zero_centred(family, name) else ""


def _delta_net_tensors(
    block: str, part: str, config: Mapping[str, Any], value: torch.Tensor, *, tiled: bool
) -> Iterator[_Tensor]:
    """Qwen3-Next fuses its projections by key head; Qwen3.5 does not, but its file deals value heads out in turn."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    value_rows = values * width
    if part == "in_proj_qkvz.weight":
        sizes = [config["linear_key_head_dim"]] * 2 + [value_rows // keys] * 2
        *qkv, z = (p.flatten() for p in torch.arange(len(value)).view(keys, -1).split(sizes, dim=1))
        yield _Tensor(f"{block}.attn_qkv.weight", value, torch.cat(qkv))
        yield _Tensor(f"{block}.attn_gate.weight", value, z)
        return
    if part == "in_proj_ba.weight":
        yield _Tensor(f"{block}.ssm_ba.weight", value)
        return
    names = {
        "in_proj_qkv.weight": "attn_qkv.weight",
        "in_proj_z.weight": "attn_gate.weight",
        "in_proj_a.weight": "ssm_alpha.weight",
        "in_proj_b.weight": "ssm_beta.weight",
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "conv1d.weight": "ssm_conv1d.weight",
        "norm.weight": "ssm_norm.weight",
        "out_proj.weight": "ssm_out.weight",
    }
    name, changed = f"{block}.{names[part]}", "-exp" if part == "A_log" else ""
    value = value[:, 0] if part == "conv1d.weight" else value
    if not tiled or part == "norm.weight":
        yield _Tensor(name, value, changed=changed)
        return
    heads = torch.arange(values).view(keys, -1).t().flatten()
    rows = (heads[:, None] * width + torch.arange(width)).flatten()
    if part == "out_proj.weight":
        yield _Tensor(name, value, columns=rows)
    elif len(value) == values:
        yield _Tensor(name, value, heads, changed=changed)
    else:
        untouched = torch.arange(len(value) - value_rows)
        yield _Tensor(name, value, torch.cat((untouched, len(untouched) + rows)))


def _split_latent_products(block: str, config: Mapping[str, Any], value: torch.Tensor) -> Iterator[_Tensor]:
    """What makes keys and values of a latent, head by head: the part for keys transposed."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = value.view(heads, -1, value.shape[1])
    yield _Tensor(f"{block}.attn_k_b.weight", both[:, :plain].transpose(1, 2))
    yield _Tensor(f"{block}.attn_v_b.weight", both[:, plain:])
