"""`qwen3` (dense) and `qwen3moe` (Qwen3-30B-A3B, 235B-A22B, Coder): nothing but names.

GGUF's qwen3moe always renormalises the weights of the chosen experts, so a checkpoint that does not is refused.
"""

from collections.abc import Iterator

from leanmoe.convert.architectures.common import (
    ATTENTION,
    DENSE_FFN,
    FFN_NORM,
    IGNORED,
    QK_NORM,
    base_metadata,
    expert_metadata,
    qk_normed_moe,
    top,
)
from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value


def _dense(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | QK_NORM | FFN_NORM | DENSE_FFN)


def _moe_metadata(config: Config) -> dict[str, Value]:
    if not config.flag("norm_topk_prob"):
        raise UnsupportedError(
            f"{config.source}: norm_topk_prob is false; the weights of a qwen3moe model's experts sum to one"
        )
    return {
        **base_metadata(config),
        **expert_metadata(config),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
    }


CONVERSIONS = {
    "qwen3": Conversion("qwen3", base_metadata, _dense, top, ("qwen2",), IGNORED),
    "qwen3_moe": Conversion("qwen3moe", _moe_metadata, qk_normed_moe, top, ("qwen2",), IGNORED),
}
