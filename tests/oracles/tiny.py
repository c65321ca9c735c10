"""Tiny random models of every architecture, as a GGUF file and as the transformers model with equal weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import torch

from oracles.tiny_families import FAMILIES, SMALL, WIDE, Family
from oracles.tiny_tensors import file_tensors
from oracles.tiny_tokenizer import VOCAB_SIZE, add_tokenizer
from oracles.tiny_weights import randomise

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        family = FAMILIES[self.arch]
        model = _hf_model(family, self.config)
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(self.path).tensors}
        with torch.no_grad():
            for tensor in file_tensors(family, self.config, model.state_dict()):
                tensor.read(stored[tensor.name])
        return model


def tiny_gguf(path: Path, arch: str, quant: str = "F32", seed: int = 0, **overrides: Any) -> TinyModel:
    """Write a random model of `arch` (a name in `FAMILIES`) to `path`; `overrides` are transformers' names.

    `quant` is the type of every matrix but the router. Types other than F32, F16 and BF16 make a model of
    width 256, with fallback types as llama-quantize where rows do not divide (`moe_intermediate_size=288`).
    """
    family = FAMILIES[arch]
    wide = quant not in ("F32", "F16", "BF16")
    model, config = tiny_hf_model(arch, seed, wide=wide, **overrides)
    writer = gguf.GGUFWriter(path, family.architecture)
    _add_metadata(writer, family, config, model.config)
    add_tokenizer(writer, family.pre)
    for tensor in file_tensors(family, config, model.state_dict()):
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
    family = FAMILIES[arch]
    config: dict[str, Any] = SMALL | dict(family.config)
    if wide:
        config |= WIDE | {name: 256 for name in config if name.endswith("intermediate_size")}
        config |= family.wide
    config |= overrides
    model = _hf_model(family, config)
    randomise(model, family, seed, pooled=wide)
    return model, config


def _hf_model(family: Family, config: Mapping[str, Any]) -> "PreTrainedModel":
    import transformers

    kind = getattr(transformers, f"{family.hf}TextConfig", None) or getattr(
        transformers, f"{family.hf}Config"
    )
    hf_config = kind(**config, tie_word_embeddings=False)
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, f"{family.hf}ForCausalLM")(hf_config).float().eval()
    return model


def _add_metadata(writer: gguf.GGUFWriter, family: Family, config: Mapping[str, Any], hf_config: Any) -> None:
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
