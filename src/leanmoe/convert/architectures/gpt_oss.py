"""`gpt-oss` (gpt-oss-20b, 120b): experts fused and interleaved, gate and up rows taking turns; MXFP4 or floats."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy.typing as npt

from leanmoe.convert.architectures.common import (
    ATTENTION,
    IGNORED,
    base_metadata,
    expert_metadata,
    sliding_metadata,
    top,
)
from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.convert.mxfp4 import take_mxfp4
from leanmoe.convert.tensors import Tensor
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value

_NAMES = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
_EXPERTS = "mlp.experts."


def _metadata(config: Config) -> dict[str, Value]:
    for key, known in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.has(key) and config.number(key) != known:
            raise UnsupportedError(
                f"{config.source}: {key} is {config.number(key)}; a gpt-oss GGUF has {known}"
            )
    return {
        **base_metadata(config),
        **expert_metadata(config),
        **sliding_metadata(config),
        "expert_feed_forward_length": config.integer("intermediate_size"),
    }


def _block(block: Block) -> Iterator[Named]:
    yield from block.renamed(ATTENTION | _NAMES)
    yield "attn_sinks.weight", block.take("self_attn.sinks")
    both, down = _matrices(block, "gate_up_proj"), _matrices(block, "down_proj")
    biases = block.take(_EXPERTS + "gate_up_proj_bias")
    for first, name in enumerate(("gate", "up")):
        every_other = partial(_every_other, first)
        yield f"ffn_{name}_exps.weight", both.reindexed(every_other)
        yield f"ffn_{name}_exps.bias", biases.mapped(every_other, width=biases.shape[1] // 2)
    yield "ffn_down_exps.weight", down
    yield "ffn_down_exps.bias", block.take(_EXPERTS + "down_proj_bias")


def _every_other(first: int, columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return columns[:, first::2]


def _matrices(block: Block, name: str) -> Tensor:
    """All experts' matrices [E, out, in]; as floats they are stored [E, in, out]."""
    if block.has(f"{_EXPERTS}{name}_blocks"):
        return take_mxfp4(block, _EXPERTS + name)
    return block.take(_EXPERTS + name).transposed()


CONVERSIONS = {"gpt_oss": Conversion("gpt-oss", _metadata, _block, top, ("gpt-4o",), IGNORED)}
