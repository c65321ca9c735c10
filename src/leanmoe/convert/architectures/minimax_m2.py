"""`minimax-m2` (MiniMax-M2, M2.1, M2.5): nothing but names; multi-token prediction is left out."""

from collections.abc import Iterator

from leanmoe.convert.architectures.common import (
    ATTENTION,
    FFN_NORM,
    IGNORED,
    QK_NORM,
    base_metadata,
    expert_count,
    expert_metadata,
    selection_bias,
    top,
)
from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value

_SIGMOID = 2


def _metadata(config: Config) -> dict[str, Value]:
    if (
        config.text("scoring_func", "sigmoid") != "sigmoid"
        or config.text("qk_norm_type", "per_layer") != "per_layer"
    ):
        raise UnsupportedError(
            f"{config.source}: scoring_func or qk_norm_type is not that of MiniMax-M2 (sigmoid, per_layer)"
        )
    keys = base_metadata(config) | expert_metadata(config)
    if config.has("rotary_dim"):
        keys["rope.dimension_count"] = config.integer("rotary_dim")
    width = config.integer("intermediate_size")
    return keys | {"expert_feed_forward_length": width, "expert_gating_func": _SIGMOID}


def _block(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | QK_NORM | FFN_NORM)
    moe = "block_sparse_moe" if block.has("block_sparse_moe.gate.weight") else "mlp"
    yield from block.renamed({f"{moe}.gate": "ffn_gate_inp"})
    yield from selection_bias(block, f"{moe}.e_score_correction_bias")
    yield from block.experts(f"{moe}.experts", expert_count(block.config), ("w1", "w3", "w2"))


CONVERSIONS = {
    "minimax_m2": Conversion(
        "minimax-m2", _metadata, _block, top, ("minimax-m2", "gpt-4o"), (*IGNORED, r"(model\.)?mtp\..*")
    )
}
