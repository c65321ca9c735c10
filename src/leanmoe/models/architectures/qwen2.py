"""`qwen2` (dense) and `qwen2moe` (Qwen1.5-MoE, Qwen2-57B): biases on q, k, v; a gated shared expert.

Qwen2-MoE never renormalises its top-k weights, whatever the original configuration says.
"""

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import qwen_expert_width, read_attention, read_router, read_spec
from leanmoe.models.spec import Metadata, ModelSpec


def _qwen2(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    return read_spec(meta, gguf, mixer=read_attention(meta, "neox"), router=None)


def _qwen2moe(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    router = read_router(meta, renormalise=False)
    shared = meta.integer("expert_shared_feed_forward_length", 0)
    return read_spec(
        meta,
        gguf,
        mixer=read_attention(meta, "neox"),
        router=router,
        expert_width=qwen_expert_width(meta, router),
        shared_width=shared or (meta.integer("feed_forward_length", 0) if router else 0),
    )


READERS = {"qwen2": _qwen2, "qwen2moe": _qwen2moe}
