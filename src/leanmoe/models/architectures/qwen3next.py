"""`qwen3next` (Qwen3-Next-80B-A3B) and `qwen35moe` (Qwen3.5: 35B-A3B, 122B-A10B, 397B-A17B; Qwen3.6-35B-A3B).

Of every `full_attention_interval` layers the last attends, with a gate on what each head saw; the others are gated
delta nets. Top-k weights are renormalised; a gated shared expert stands beside the routed ones. The two differ in
the order of value heads and in how the delta net's projections are stored. The three position streams of Qwen3.5
(`rope.dimension_sections`) are one and the same for text, so its rope is the plain one.
"""

from leanmoe.errors import FormatError
from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import qwen_expert_width, read_attention, read_router, read_spec
from leanmoe.models.spec import DeltaNetSpec, Metadata, MixerSpec, ModelSpec


def _qwen3next(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    return _spec(meta, gguf, grouped=True)


def _qwen35moe(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    return _spec(meta, gguf, grouped=False)


def _spec(meta: Metadata, gguf: GGUFFile, *, grouped: bool) -> ModelSpec:
    attention = read_attention(meta, "neox", "head", gated=True)
    delta = _read_delta_net(meta, grouped=grouped)
    interval = meta.integer("full_attention_interval", 4, low=1)
    main = meta.integer("block_count", low=1) - meta.integer("nextn_predict_layers", 0)
    recurrent = meta.flags("attention.recurrent_layers", max(main, 0))

    def mixer(layer: int) -> MixerSpec:
        is_recurrent = (layer + 1) % interval != 0 if recurrent is None else recurrent[layer]
        return delta if is_recurrent else attention

    router = read_router(meta, renormalise=True)
    return read_spec(
        meta,
        gguf,
        mixer=mixer,
        router=router,
        expert_width=qwen_expert_width(meta, router),
        shared_width=meta.integer("expert_shared_feed_forward_length", 0),
        norm2="post_attention_norm",
    )


def _read_delta_net(meta: Metadata, *, grouped: bool) -> DeltaNetSpec:
    key_heads = meta.integer("ssm.group_count", low=1, high=4096)
    value_heads = meta.integer("ssm.time_step_rank", low=1, high=4096)
    inner = meta.integer("ssm.inner_size", low=1, high=2**20)
    if value_heads % key_heads or inner % value_heads:
        raise FormatError(
            f"{meta.source}: {value_heads} value heads cannot share {key_heads} key heads and a width of {inner} evenly"
        )
    return DeltaNetSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=meta.integer("ssm.state_size", low=1, high=4096),
        value_dim=inner // value_heads,
        kernel=meta.integer("ssm.conv_kernel", 4, low=2, high=64),
        grouped=grouped,
    )


READERS = {"qwen3next": _qwen3next, "qwen35moe": _qwen35moe}
