"""`olmoe` (OLMoE-1B-7B): q and k are normalised over the whole projection, before the split into heads.

The expert width is `feed_forward_length`, eps is 1e-5, and the top-k weights are not renormalised.
"""

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import read_attention, read_router, read_spec
from leanmoe.models.spec import Metadata, ModelSpec


def _olmoe(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    router = read_router(meta, renormalise=False)
    width = meta.integer("expert_feed_forward_length", meta.integer("feed_forward_length", low=1), low=1)
    attention = read_attention(meta, "neox", "full")
    return read_spec(meta, gguf, mixer=attention, router=router, expert_width=width, eps=1e-5)


READERS = {"olmoe": _olmoe}
