"""`glm4moe` (GLM-4.5, 4.5-Air, 4.6, 4.7): partial rope, biases on q, k, v, and in the larger ones q and k norms.

The first layers are dense. The router is a sigmoid with a bias that only selects; a shared expert is added.
"""

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import (
    read_attention,
    read_router,
    read_spec,
    shared_expert_width,
)
from leanmoe.models.spec import Metadata, ModelSpec


def _glm4moe(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    width = meta.integer("expert_feed_forward_length", low=1)
    return read_spec(
        meta,
        gguf,
        mixer=read_attention(meta, "neox", "head" if "blk.0.attn_q_norm.weight" in gguf.tensors else None),
        router=read_router(meta, gating="sigmoid"),
        expert_width=width,
        shared_width=shared_expert_width(meta, width),
        norm2="post_attention_norm",
    )


READERS = {"glm4moe": _glm4moe}
