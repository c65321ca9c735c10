"""`olmoe` (OLMoE-1B-7B): nothing but names. A GGUF has no key for clipped q, k, v, so a model that clips is refused."""

from leanmoe.convert.architectures.common import (
    IGNORED,
    base_metadata,
    expert_metadata,
    qk_normed_moe,
    top,
)
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value


def _metadata(config: Config) -> dict[str, Value]:
    if config.has("clip_qkv"):
        raise UnsupportedError(f"{config.source}: clip_qkv is set; an olmoe GGUF cannot say so")
    return base_metadata(config) | expert_metadata(config)


CONVERSIONS = {"olmoe": Conversion("olmoe", _metadata, qk_normed_moe, top, ("olmo",), IGNORED)}
