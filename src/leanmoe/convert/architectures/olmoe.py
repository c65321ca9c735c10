"""`olmoe` (OLMoE-1B-7B): nothing but names. A GGUF has no key for clipped q, k, v, so a model that clips is refused."""

from collections.abc import Iterator

from leanmoe.convert.architectures.common import (
    ATTENTION,
    FFN_NORM,
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
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value


def _block(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | QK_NORM | FFN_NORM | ROUTER)
    yield from block.experts("mlp.experts", expert_count(block.config))


def _metadata(config: Config) -> dict[str, Value]:
    if config.has("clip_qkv"):
        raise UnsupportedError(f"{config.source}: clip_qkv is set; an olmoe GGUF cannot say so")
    return base_metadata(config) | expert_metadata(config)


CONVERSIONS = {"olmoe": Conversion("olmoe", _metadata, _block, top, ("olmo",), IGNORED)}
