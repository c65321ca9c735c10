"""`gpt-oss` (gpt-oss-20b, 120b): attention sinks, a window in every other layer, experts with biases.

The router has a bias, and its weights are a softmax over the chosen experts. YaRN goes over from kept to divided
frequencies at fractions of a pair, as the model was trained; llama.cpp rounds them to whole pairs, and a file can
ask for that with `rope.scaling.yarn_whole_pairs`.
"""

from dataclasses import replace

from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.architectures.common import read_attention, read_router, read_sliding, read_spec
from leanmoe.models.spec import MAX_LAYERS, Metadata, ModelSpec


def _gpt_oss(meta: Metadata, gguf: GGUFFile) -> ModelSpec:
    everything = replace(read_attention(meta, "neox", whole_pairs=False), sinks=True)
    window = replace(everything, window=meta.integer("attention.sliding_window", low=1))
    sliding = read_sliding(meta, meta.integer("block_count", low=1, high=MAX_LAYERS), period=2)
    spec = read_spec(
        meta,
        gguf,
        mixer=lambda n: window if sliding[n] else everything,
        router=read_router(meta, renormalise=False, gating="chosen_softmax"),
        expert_width=meta.integer("expert_feed_forward_length", low=1),
        norm2="post_attention_norm",
    )
    return replace(spec, activation="swiglu_oai")


READERS = {"gpt-oss": _gpt_oss}
