"""`glm4moe` (GLM-4.5, 4.5-Air, 4.6, 4.7): nothing but names; blocks for multi-token prediction are left out."""

from collections.abc import Iterator

from leanmoe.convert.architectures.common import (
    ATTENTION,
    DENSE_FFN,
    IGNORED,
    QK_NORM,
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
from leanmoe.formats.gguf_values import Value

_NORM2 = {"post_attention_layernorm": "post_attention_norm"}


def _metadata(config: Config) -> dict[str, Value]:
    return {**base_metadata(config), **grouped_router_metadata(config, gating=2)}


def _block(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | QK_NORM | _NORM2 | DENSE_FFN | ROUTER | SHARED_EXPERTS)
    if block.has("mlp.gate.weight"):
        yield from selection_bias(block, "mlp.gate.e_score_correction_bias")
        yield from block.experts("mlp.experts", expert_count(block.config))


CONVERSIONS = {"glm4_moe": Conversion("glm4moe", _metadata, _block, top, ("glm4",), IGNORED)}
