"""`llama`: Llama-like dense models, and Mixtral, whose experts have the width of the dense FFN.

The converter permuted the rows of q and k, so rope pairs neighbours ("norm"). Top-k weights are renormalised.
"""

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import read_attention, read_router, read_spec
from leanmoe.models.spec import Metadata, ModelSpec


def _llama(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    router = read_router(meta, renormalise=True)
    width = (
        meta.integer("expert_feed_forward_length", meta.integer("feed_forward_length", low=1))
        if router
        else 0
    )
    return read_spec(meta, gguf, mixer=read_attention(meta, "norm"), router=router, expert_width=width)


READERS = {"llama": _llama}
