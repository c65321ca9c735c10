"""`deepseek2` (DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash): what makes keys and values of a latent is split.

`kv_b_proj` [heads x (plain + value), latent] becomes `attn_v_b` [heads, value, latent] and, transposed for attention
to the latents themselves, `attn_k_b` [heads, latent, plain]. Rope already pairs neighbours.
"""

from collections.abc import Iterator

from leanmoe.convert.architectures.common import (
    DENSE_FFN,
    FFN_NORM,
    IGNORED,
    ROUTER,
    SHARED_EXPERTS,
    base_metadata,
    expert_count,
    grouped_router_metadata,
    selection_bias,
    top,
)
from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf_values import Value

_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
}
_SOFTMAX, _SIGMOID = 1, 2


def _sigmoid(config: Config) -> dict[str, Value]:
    return _attention_metadata(config) | grouped_router_metadata(config, gating=_SIGMOID)


def _softmax(config: Config) -> dict[str, Value]:
    if config.flag("norm_topk_prob"):
        raise UnsupportedError(f"{config.source}: norm_topk_prob is true, which no DeepSeek-V2 model has")
    keys = _attention_metadata(config) | grouped_router_metadata(config, gating=_SOFTMAX)
    if config.text("topk_method", "greedy") == "greedy":
        keys["expert_group_count"] = keys["expert_group_used_count"] = 1
    return keys


def _attention_metadata(config: Config) -> dict[str, Value]:
    if not config.flag("rope_interleave", True):
        raise UnsupportedError(
            f"{config.source}: rope_interleave is false; rope on neighbouring pairs was wanted"
        )
    rotary, latent = config.integer("qk_rope_head_dim"), config.integer("kv_lora_rank")
    keys = base_metadata(config) | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotary,
        "attention.value_length": latent,
        "attention.key_length_mla": config.integer("qk_nope_head_dim") + rotary,
        "attention.value_length_mla": config.integer("v_head_dim"),
        "rope.dimension_count": rotary,
    }
    if config.has("q_lora_rank"):
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank")
    rope = config.rope
    if rope.has("mscale_all_dim"):
        everywhere = rope.number("mscale_all_dim")
        if rope.number("mscale", default=1.0) != everywhere:
            raise UnsupportedError(
                f"{rope.source}: mscale and mscale_all_dim differ; a GGUF has one for both"
            )
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * everywhere
    return keys


def _block(block: Block) -> Iterator[Named]:
    yield from block.renamed(_ATTENTION | FFN_NORM | DENSE_FFN | ROUTER | SHARED_EXPERTS)
    yield from _split(block)
    if block.has("mlp.gate.weight"):
        yield from selection_bias(block, "mlp.gate.e_score_correction_bias")
        yield from block.experts("mlp.experts", expert_count(block.config))


def _split(block: Block) -> Iterator[Named]:
    config, both = block.config, block.take("self_attn.kv_b_proj.weight")
    heads, plain = config.size("num_attention_heads"), config.integer("qk_nope_head_dim")
    wanted = (heads * (plain + config.integer("v_head_dim")), config.integer("kv_lora_rank"))
    if both.shape != wanted:
        raise FormatError(
            f"{config.source}: kv_b_proj of layer {block.layer} is {list(both.shape)}; wanted {list(wanted)}"
        )
    by_head = both.reshaped(heads, wanted[0] // heads, wanted[1])
    yield "attn_k_b.weight", by_head.reindexed(lambda rows: rows[:, :plain]).transposed()
    yield "attn_v_b.weight", by_head.reindexed(lambda rows: rows[:, plain:])


_PRE = ("deepseek-v3", "kimi-k2", "glm4")
_V3 = Conversion("deepseek2", _sigmoid, _block, top, _PRE, IGNORED)
CONVERSIONS = {
    "deepseek_v2": Conversion("deepseek2", _softmax, _block, top, ("deepseek-llm",), IGNORED),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": _V3,
}
