"""`gemma4` (Gemma 4 26B-A4B, 31B): names, and heads whose size and number differ by kind of layer.

Rope that turns only the first part of the frequencies is a tensor of divisors, `rope_freqs.weight`, so large for the
others that they stand still. Images and sound are left out.
"""

from collections.abc import Iterator

import numpy as np

from leanmoe.convert.architectures.common import (
    ATTENTION,
    DENSE_FFN,
    IGNORED,
    QK_NORM,
    expert_count,
    sliding_layers,
    sliding_metadata,
    top,
)
from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import MAX_VOCAB, Config
from leanmoe.convert.conversion import Conversion
from leanmoe.convert.tensors import Tensor
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value
from leanmoe.formats.quant_types import BY_NAME

_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
}
_BARE = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_LEFT_OUT = (*IGNORED, r".*(vision|audio)_tower\..*", r".*embed_(vision|audio)\..*")
_STILL = 1e30
MAX_HEAD = 1 << 16


def _metadata(config: Config) -> dict[str, Value]:
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.integer(key, default=0):
            raise UnsupportedError(
                f"{config.source}: {key} is {config.integer(key)}; of Gemma 4, only models without it "
                "(26B-A4B, 31B) are supported"
            )
    near, far = config.integer("num_key_value_heads"), _full(config, "num_key_value_heads")
    size, full_size = config.integer("head_dim"), _full(config, "head_dim")
    rope = config.section("rope_parameters")
    keys: dict[str, Value] = {
        "block_count": config.layers,
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": config.integer("num_attention_heads"),
        "attention.head_count_kv": [near if flag else far for flag in sliding_layers(config)],
        "attention.key_length": full_size,
        "attention.value_length": full_size,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": full_size,
        "rope.dimension_count_swa": size,
        "rope.freq_base": rope.section("full_attention").number("rope_theta"),
        "rope.freq_base_swa": rope.section("sliding_attention").number("rope_theta"),
        "vocab_size": config.size("vocab_size", limit=MAX_VOCAB),
        **sliding_metadata(config),
    }
    if config.has("final_logit_softcapping"):
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
    if config.flag("enable_moe_block"):
        keys |= {
            "expert_count": expert_count(config),
            "expert_used_count": config.integer("top_k_experts"),
            "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        }
    return keys


def _full(config: Config, key: str) -> int:
    """The value for layers that see everything: in older and newer configurations a key of its own, or by layer."""
    own = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[key]
    if config.has(own):
        return config.integer(own)
    for layer in config.section("per_layer_config").values:
        found = config.section("per_layer_config").section(layer)
        if found.has(key):
            return found.integer(key)
    return config.integer(key)


def _block(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | QK_NORM | _NAMES | DENSE_FFN)
    for theirs, ours in _BARE.items():
        if block.has(theirs):
            yield ours, block.take(theirs)
    if block.config.flag("enable_moe_block"):
        yield from block.experts("experts", expert_count(block.config))


def _top(block: Block) -> Iterator[Named]:
    yield from top(block)
    rope = block.config.section("rope_parameters").section("full_attention")
    half = _full(block.config, "head_dim") // 2
    part = rope.number("partial_rotary_factor", default=1.0)
    if not 0 < part <= 1 or not 0 < half <= MAX_HEAD:
        raise rope.error(f"partial_rotary_factor is {part}, for heads of {2 * half}; that cannot be turned")
    turned = int(part * half)
    divisors = np.array([1.0] * turned + [_STILL] * (half - turned), dtype=np.float32)
    yield "rope_freqs.weight", Tensor(divisors.shape, lambda start, stop: divisors[None], BY_NAME["F32"])


CONVERSIONS = {
    name: Conversion("gemma4", _metadata, _block, _top, ("gemma4",), _LEFT_OUT)
    for name in ("gemma4", "gemma4_text")
}
