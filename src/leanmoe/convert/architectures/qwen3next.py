"""`qwen3next` (Qwen3-Next) and `qwen35moe` (Qwen3.5 MoE): norms around zero, and what a gated delta net stores.

A GGUF holds `-exp(A_log)`, and queries, keys and values apart. Qwen3-Next's checkpoints fuse them with the gate, by
key head; value heads stay in that order. Qwen3.5's have them apart, but its GGUF has value head `j` read key head
`j % key_heads`, so the value heads are dealt out anew. Qwen3.5 always sums the chosen experts' weights to one; images
and multi-token prediction are left out.
"""

from collections.abc import Iterator

import numpy as np

from leanmoe.convert.architectures.common import (
    ATTENTION,
    IGNORED,
    QK_NORM,
    ROUTER,
    base_metadata,
    expert_count,
    expert_metadata,
    top,
)
from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.convert.tensors import Index, Tensor
from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf_values import Value

_NORM2 = {"post_attention_layernorm": "post_attention_norm"}
_SHARED = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_LEFT_OUT = (*IGNORED, r"mtp\..*", r"model\.mtp\..*", r"(model\.)?visual\..*")
_DEFAULT_SECTIONS = [11, 11, 10]
_KINDS = ["full_attention", "linear_attention"]


def _delta_metadata(config: Config) -> dict[str, Value]:
    values = config.integer("linear_num_value_heads")
    kinds = config.values.get("layer_types")
    interval = config.size("full_attention_interval") if config.has("full_attention_interval") else 4
    layers = config.layers
    regular = ["full_attention" if (n + 1) % interval == 0 else "linear_attention" for n in range(layers)]
    keys: dict[str, Value] = {
        "ssm.conv_kernel": config.integer("linear_conv_kernel_dim"),
        "ssm.state_size": config.integer("linear_key_head_dim"),
        "ssm.group_count": config.integer("linear_num_key_heads"),
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config.integer("linear_value_head_dim"),
        "full_attention_interval": interval,
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
    }
    if kinds is not None and kinds != regular:
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
            raise FormatError(f"{config.source}: layer_types is not a kind of layer for each of {layers}")
        keys["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
    return base_metadata(config) | expert_metadata(config) | keys


def _qwen3next_metadata(config: Config) -> dict[str, Value]:
    if not config.flag("norm_topk_prob", default=True):
        raise UnsupportedError(
            f"{config.source}: norm_topk_prob is false; the weights of a qwen3next model's experts sum to one"
        )
    if config.values.get("mlp_only_layers") or config.integer("decoder_sparse_step", default=1) != 1:
        raise UnsupportedError(f"{config.source}: has layers without experts (mlp_only_layers)")
    return _delta_metadata(config)


def _qwen35moe_metadata(config: Config) -> dict[str, Value]:
    sections = config.rope.values.get("mrope_section", _DEFAULT_SECTIONS)
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(n, int) for n in sections):
        raise FormatError(
            f"{config.source}: mrope_section is {str(sections)[:80]}; three numbers were wanted"
        )
    return _delta_metadata(config) | {"rope.dimension_sections": [*sections, 0]}


def _shared_parts(block: Block) -> Iterator[Named]:
    """What both kinds of layer have in common, and the attention of those that have it."""
    zero_centred = block.renamed({"input_layernorm": "attn_norm"} | _NORM2 | QK_NORM)
    yield from ((name, tensor.mapped(lambda x: x + 1)) for name, tensor in zero_centred)
    projections = {theirs: ours for theirs, ours in ATTENTION.items() if theirs != "input_layernorm"}
    yield from block.renamed(projections | ROUTER | _SHARED)
    gate = block.take("mlp.shared_expert_gate.weight")
    yield "ffn_gate_inp_shexp.weight", gate.reshaped(gate.shape[-1])
    yield from block.experts("mlp.experts", expert_count(block.config))


def _qwen3next(block: Block) -> Iterator[Named]:
    yield from _shared_parts(block)
    if not block.has("linear_attn.A_log"):
        return
    config = block.config
    keys, key_dim = config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")
    fused = block.take("linear_attn.in_proj_qkvz.weight")
    _check_split(config, fused.shape[0], keys)
    values = fused.shape[0] // keys // 2 - key_dim
    cuts = np.cumsum([key_dim, key_dim, values])

    def qkv(rows: Index) -> Index:
        q, k, v, _ = np.split(rows.reshape(keys, -1), cuts, axis=1)
        return np.concatenate([part.reshape(-1) for part in (q, k, v)])

    yield "attn_qkv.weight", fused.reindexed(qkv)
    yield "attn_gate.weight", fused.reindexed(lambda rows: rows.reshape(keys, -1)[:, cuts[-1] :].reshape(-1))
    yield "ssm_ba.weight", block.take("linear_attn.in_proj_ba.weight")
    yield "ssm_a", _rate(block)
    yield "ssm_dt.bias", block.take("linear_attn.dt_bias")
    yield "ssm_conv1d.weight", _taps(block)
    yield "ssm_norm.weight", block.take("linear_attn.norm.weight")
    yield "ssm_out.weight", block.take("linear_attn.out_proj.weight")


def _qwen35moe(block: Block) -> Iterator[Named]:
    yield from _shared_parts(block)
    if not block.has("linear_attn.A_log"):
        return
    config = block.config
    keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    size, before = config.integer("linear_value_head_dim"), 2 * keys * config.integer("linear_key_head_dim")
    _check_split(config, values, keys)

    def heads(rows: Index) -> Index:
        return rows.reshape(keys, values // keys, -1).swapaxes(0, 1).reshape(-1)

    def last_heads(rows: Index) -> Index:
        return np.concatenate([rows[:before], heads(rows[before:])])

    take = block.take
    out = take("linear_attn.out_proj.weight")
    if out.shape[-1] != values * size:
        raise FormatError(
            f"{config.source}: {values} value heads of {size} do not fit {block.prefix}linear_attn.out_proj.weight "
            f"of shape {list(out.shape)}"
        )
    columns = heads(np.arange(values * size))
    yield "attn_qkv.weight", take("linear_attn.in_proj_qkv.weight").reindexed(last_heads)
    yield "attn_gate.weight", take("linear_attn.in_proj_z.weight").reindexed(heads)
    yield "ssm_beta.weight", take("linear_attn.in_proj_b.weight").reindexed(heads)
    yield "ssm_alpha.weight", take("linear_attn.in_proj_a.weight").reindexed(heads)
    yield "ssm_a", _rate(block).reindexed(heads)
    yield "ssm_dt.bias", take("linear_attn.dt_bias").reindexed(heads)
    yield "ssm_conv1d.weight", _taps(block).reindexed(last_heads)
    yield "ssm_norm.weight", take("linear_attn.norm.weight")
    yield "ssm_out.weight", out.mapped(lambda x: x[:, columns])


def _top(block: Block) -> Iterator[Named]:
    for name, tensor in top(block):
        yield name, tensor.mapped(lambda x: x + 1) if name == "output_norm.weight" else tensor


def _rate(block: Block) -> Tensor:
    return block.take("linear_attn.A_log").mapped(lambda x: -np.exp(x))


def _taps(block: Block) -> Tensor:
    taps = block.take("linear_attn.conv1d.weight")
    return taps.reshaped(taps.shape[0], taps.shape[-1])


def _check_split(config: Config, count: int, heads: int) -> None:
    if not heads or count % heads:
        raise FormatError(f"{config.source}: {count} rows or heads do not divide between {heads} key heads")


_QWEN35 = Conversion("qwen35moe", _qwen35moe_metadata, _qwen35moe, _top, ("qwen35", "qwen2"), _LEFT_OUT)
CONVERSIONS = {
    "qwen3_next": Conversion("qwen3next", _qwen3next_metadata, _qwen3next, _top, ("qwen2",), _LEFT_OUT),
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
}
