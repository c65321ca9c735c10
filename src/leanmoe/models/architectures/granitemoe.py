"""`granitemoe` (Granite 3.x MoE, with or without a shared expert): a Llama with multipliers at four places.

The scale of attention is a key, instead of 1 / sqrt(head size); logits are divided by theirs.
"""

from dataclasses import replace

from leanmoe.errors import FormatError
from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import read_attention, read_router, read_spec
from leanmoe.models.spec import Metadata, ModelSpec


def _granitemoe(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    divisor = meta.number("logit_scale")
    if not divisor > 0:
        raise FormatError(
            f"{meta.source}: {meta.arch}.logit_scale is {divisor}; wanted a number greater than 0"
        )
    spec = read_spec(
        meta,
        gguf,
        mixer=read_attention(meta, "norm"),
        router=read_router(meta, renormalise=True),
        expert_width=meta.integer("feed_forward_length", low=1),
        shared_width=meta.integer("expert_shared_feed_forward_length", 0),
    )
    return replace(
        spec,
        embedding_scale=meta.number("embedding_scale", 0.0) or 1.0,
        residual_scale=meta.number("residual_scale", 0.0) or 1.0,
        logit_scale=1 / divisor,
    )


READERS = {"granitemoe": _granitemoe}
