"""`qwen3` (dense) and `qwen3moe` (Qwen3-30B-A3B, 235B-A22B, Coder): RMSNorm of each q and k head before rope.

Qwen3-MoE always renormalises its top-k weights. The head size is its own key, not hidden / heads.
"""

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import qwen_expert_width, read_attention, read_router, read_spec
from leanmoe.models.spec import Metadata, ModelSpec


def _qwen3(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    return read_spec(meta, gguf, mixer=read_attention(meta, "neox", "head"), router=None)


def _qwen3moe(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    router = read_router(meta, renormalise=True)
    width = qwen_expert_width(meta, router)
    return read_spec(
        meta, gguf, mixer=read_attention(meta, "neox", "head"), router=router, expert_width=width
    )


READERS = {"qwen3": _qwen3, "qwen3moe": _qwen3moe}
