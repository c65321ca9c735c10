"""`granitemoe` (Granite 3.x MoE, with or without a shared expert): gate above up in one matrix; four multipliers.

Rows of q and k are re-ordered for rope on neighbouring dimensions, as for `llama`.
"""

from collections.abc import Iterator

from leanmoe.convert.architectures.common import (
    ATTENTION,
    FFN_NORM,
    IGNORED,
    base_metadata,
    expert_metadata,
    top,
)
from leanmoe.convert.block import Block, Named, interleaved
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.formats.gguf_values import Value

_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_ROUTER = {"block_sparse_moe.router.layer": "ffn_gate_inp"}
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _metadata(config: Config) -> dict[str, Value]:
    keys = {**base_metadata(config), **expert_metadata(config)}
    keys |= {ours: config.number(theirs) for ours, theirs in _SCALES.items()}
    if shared := config.integer("shared_intermediate_size", default=0):
        keys["expert_shared_feed_forward_length"] = shared
    return keys


def _block(block: Block) -> Iterator[Named]:
    heads = block.config.size("num_attention_heads")
    for name, tensor in block.renamed(ATTENTION | FFN_NORM | _ROUTER):
        key = _HEADS.get(name.split(".")[0])
        yield name, tensor if key is None else interleaved(tensor, block.config.integer(key, default=heads))
    yield from _ffn(block, "block_sparse_moe", "exps")
    if block.has("shared_mlp.input_linear.weight"):
        yield from _ffn(block, "shared_mlp", "shexp")


def _ffn(block: Block, prefix: str, suffix: str) -> Iterator[Named]:
    both = block.take(f"{prefix}.input_linear.weight")
    width = both.shape[-2] // 2
    yield f"ffn_gate_{suffix}.weight", both.reindexed(lambda rows: rows[..., :width])
    yield f"ffn_up_{suffix}.weight", both.reindexed(lambda rows: rows[..., width:])
    yield f"ffn_down_{suffix}.weight", block.take(f"{prefix}.output_linear.weight")


CONVERSIONS = {
    name: Conversion("granitemoe", _metadata, _block, top, ("refact",), IGNORED)
    for name in ("granitemoe", "granitemoeshared")
}
