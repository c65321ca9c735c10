"""`gemma4` (Gemma 4 26B-A4B, 31B): a window in most layers, a dense FFN beside the experts, norms after each half.

Layers that see everything have larger heads, fewer of them for keys, values that are the keys before their norm, and
rope on a part of the frequencies (`rope_freqs.weight` is huge for the others). Attention is not scaled.
The small models with embeddings for each layer and keys shared between layers are refused.
"""

from dataclasses import replace

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import read_router, read_sliding, read_spec
from leanmoe.models.spec import MAX_LAYERS, AttentionSpec, Metadata, ModelSpec, RopeSpec


def _gemma4(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    for key in ("embedding_length_per_layer_input", "attention.shared_kv_layers"):
        if meta.integer(key, 0):
            raise UnsupportedError(
                f"{meta.source}: {meta.arch}.{key} is {meta.integer(key)}; of Gemma 4, only models without it "
                "(26B-A4B, 31B) are supported"
            )
    layers = meta.integer("block_count", low=1, high=MAX_LAYERS)
    sliding = read_sliding(meta, layers, period=6)
    kv_heads = meta.integers("attention.head_count_kv", layers, low=1, high=4096)
    attention = [
        _attention(meta, sliding[n], kv_heads[n], shared_kv=f"blk.{n}.attn_v.weight" not in gguf.tensors)
        for n in range(layers)
    ]
    distinct = {spec: spec for spec in attention}
    router = read_router(meta, renormalise=True)
    spec = read_spec(
        meta,
        gguf,
        mixer=lambda n: distinct[attention[n]],
        router=router,
        expert_width=meta.integer("expert_feed_forward_length", low=1) if router else 0,
    )
    return replace(
        spec,
        activation="gelu",
        embedding_scale=spec.hidden**0.5,
        logit_cap=max(0.0, meta.number("final_logit_softcapping", 0.0)),
        post_norms=True,
        dense_beside_experts=True,
    )


def _attention(meta: Metadata, window: bool, kv_heads: int, *, shared_kv: bool) -> AttentionSpec:
    suffix = "_swa" if window else ""
    heads = meta.integer("attention.head_count", low=1, high=4096)
    size = meta.integer(f"attention.key_length{suffix}", low=2, high=4096)
    values = meta.integer(f"attention.value_length{suffix}", size)
    rotary = meta.integer(f"rope.dimension_count{suffix}", size, low=2, high=size)
    base = meta.number(f"rope.freq_base{suffix}", 10000.0 if window else 1000000.0)
    if heads % kv_heads or values != size or rotary % 2 or not base > 1:
        raise FormatError(
            f"{meta.source}: {heads} heads of {size}, {kv_heads} for keys, values of {values}, rope on {rotary} "
            f"dimensions with base {base} make no attention"
        )
    return AttentionSpec(
        heads,
        kv_heads,
        size,
        RopeSpec("neox", rotary, base, divided=not window),
        scale=1.0,
        qk_norm="head",
        window=meta.integer("attention.sliding_window", low=1) if window else None,
        v_norm=True,
        shared_kv=shared_kv,
    )


READERS = {"gemma4": _gemma4}
