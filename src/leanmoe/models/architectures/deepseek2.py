"""`deepseek2` (DeepSeek-V2, V2-Lite, V3, R1, Kimi-K2, GLM-4.7-Flash): multi-head latent attention, dense first layers.

Where sources disagree: V2's groups of experts count as their best expert, as in its authors' code (llama.cpp adds
the best two, V3's rule); the norms of the latents use the model's eps, as in llama.cpp (transformers fixes 1e-6).
"""

import math
from dataclasses import replace

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import (
    read_rope,
    read_router,
    read_spec,
    shared_expert_width,
)
from leanmoe.models.spec import LatentAttentionSpec, Metadata, ModelSpec, RopeSpec, RouterSpec

_GLM_FLASH = (154880, (47, 48))


def _deepseek2(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    width = meta.integer("expert_feed_forward_length", 0)
    return read_spec(
        meta,
        gguf,
        mixer=_attention(meta),
        router=_router(meta, gguf),
        expert_width=width,
        shared_width=shared_expert_width(meta, width),
    )


def _attention(meta: Metadata) -> LatentAttentionSpec:
    if meta.has("attention.temperature_scale"):
        raise UnsupportedError(
            f"{meta.source}: attention scaled by position is not supported for {meta.arch}"
        )
    if not meta.has("attention.key_length_mla"):
        raise UnsupportedError(
            f"{meta.source}: an old {meta.arch} file, whose attn_kv_b is not split for latent attention; "
            "convert the checkpoint again, or take a newer file"
        )
    latent = meta.integer("attention.kv_lora_rank", low=1, high=1 << 16)
    key = meta.integer("attention.key_length_mla", low=3, high=4096)
    rope = read_rope(meta, "norm", meta.integer("rope.dimension_count", low=2, high=key - 1))
    stored = meta.integer("attention.key_length", latent + rope.rotary_dim)
    if stored != latent + rope.rotary_dim:
        raise FormatError(
            f"{meta.source}: {meta.arch}.attention.key_length is {stored}; wanted {latent} + {rope.rotary_dim}"
        )
    return LatentAttentionSpec(
        heads=meta.integer("attention.head_count", low=1, high=4096),
        latent=latent,
        query_latent=meta.integer("attention.q_lora_rank", 0, high=1 << 16),
        plain_dim=key - rope.rotary_dim,
        value_dim=meta.integer("attention.value_length_mla", low=1, high=4096),
        rope=rope,
        scale=_yarn_gain(meta, rope) ** 2 / math.sqrt(key),
    )


def _yarn_gain(meta: Metadata, rope: RopeSpec) -> float:
    """By what YaRN stretches queries and keys: in the scale rather than in the rotation."""
    if rope.scaling != "yarn":
        return 1.0
    return 1 + meta.number("rope.scaling.yarn_log_multiplier", 0.0) * math.log(rope.factor)


def _router(meta: Metadata, gguf: GGUFFile) -> RouterSpec | None:
    vocab, layers = _GLM_FLASH
    embedding = gguf.tensors.get("token_embd.weight")
    flash = embedding is not None and embedding.ne[-1] == vocab and meta.integer("block_count") in layers
    router = read_router(meta, gating="sigmoid" if flash else "softmax")
    if router is not None and router.gating == "softmax":
        return replace(router, group_score="max")
    return router


READERS = {"deepseek2": _deepseek2}
