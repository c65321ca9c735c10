"""`qwen2` (dense) and `qwen2moe` (Qwen1.5-MoE, Qwen2-57B): nothing but names."""

from collections.abc import Iterator

from leanmoe.convert.architectures.common import (
    ATTENTION,
    DENSE_FFN,
    FFN_NORM,
    IGNORED,
    ROUTER,
    base_metadata,
    expert_count,
    expert_metadata,
    top,
)
from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.formats.gguf_values import Value

_SHARED = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def _dense(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | FFN_NORM | DENSE_FFN)


def _moe(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | FFN_NORM | ROUTER | _SHARED)
    gate = block.take("mlp.shared_expert_gate.weight")
    yield "ffn_gate_inp_shexp.weight", gate.reshaped(gate.shape[-1])
    yield from block.experts("mlp.experts", expert_count(block.config))


def _moe_metadata(config: Config) -> dict[str, Value]:
    return {
        **base_metadata(config),
        **expert_metadata(config),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
    }


CONVERSIONS = {
    "qwen2": Conversion("qwen2", base_metadata, _dense, top, ("qwen2",), IGNORED),
    "qwen2_moe": Conversion("qwen2moe", _moe_metadata, _moe, top, ("qwen2",), IGNORED),
}
