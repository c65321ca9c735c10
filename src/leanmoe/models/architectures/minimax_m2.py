"""`minimax-m2` (MiniMax-M2, M2.1, M2.5): partial rope; q and k are normalised over the whole projection.

The router is a sigmoid with a bias that only selects; the weights are renormalised whatever the file says.
"""

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import read_attention, read_router, read_spec
from leanmoe.models.spec import Metadata, ModelSpec


def _minimax_m2(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    return read_spec(
        meta,
        gguf,
        mixer=read_attention(meta, "neox", "full"),
        router=read_router(meta, renormalise=True, gating="sigmoid"),
        expert_width=meta.integer("expert_feed_forward_length", low=1),
    )


READERS = {"minimax-m2": _minimax_m2}
