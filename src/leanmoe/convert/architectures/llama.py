"""`llama`: Llama-like dense models, and Mixtral. Rows of q and k are re-ordered for rope on neighbouring dimensions.

Llama 3's rope scaling becomes a tensor of divisors, `rope_freqs.weight` (Llama 3.1's published configuration).
"""

import math
from collections.abc import Iterator

import numpy as np

from leanmoe.convert.architectures.common import (
    ATTENTION,
    DENSE_FFN,
    FFN_NORM,
    IGNORED,
    base_metadata,
    expert_count,
    expert_metadata,
    head_dim,
    top,
)
from leanmoe.convert.block import Block, Named, interleaved
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion
from leanmoe.convert.tensors import Tensor
from leanmoe.formats.gguf_values import Value
from leanmoe.formats.quant_types import BY_NAME

_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def _metadata(config: Config) -> dict[str, Value]:
    if config.rope.text("rope_type") != "llama3":
        return base_metadata(config)
    plain = Config({**config.values, "rope_scaling": None, "rope_parameters": None}, config.source)
    return base_metadata(plain) | {"rope.freq_base": config.rope.number("rope_theta", default=10000.0)}


def _mixtral_metadata(config: Config) -> dict[str, Value]:
    return _metadata(config) | expert_metadata(config)


def _attention(block: Block) -> Iterator[Named]:
    heads = block.config.size("num_attention_heads")
    for name, tensor in block.renamed(ATTENTION | FFN_NORM):
        key = _HEADS.get(name.split(".")[0])
        yield name, tensor if key is None else interleaved(tensor, block.config.integer(key, default=heads))


def _dense(block: Block) -> Iterator[Named]:
    yield from _attention(block)
    yield from block.renamed(DENSE_FFN)


def _mixtral(block: Block) -> Iterator[Named]:
    yield from _attention(block)
    moe = "block_sparse_moe" if block.has("block_sparse_moe.gate.weight") else "mlp"
    yield from block.renamed({f"{moe}.gate": "ffn_gate_inp"})
    yield from block.experts(f"{moe}.experts", expert_count(block.config), ("w1", "w3", "w2"))


def _top(block: Block) -> Iterator[Named]:
    yield from top(block)
    if block.config.rope.text("rope_type") == "llama3":
        factors = _llama3_factors(block.config)
        yield "rope_freqs.weight", Tensor(factors.shape, lambda start, stop: factors[None], BY_NAME["F32"])


def _llama3_factors(config: Config) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """By what each frequency is divided: nothing for short waves, `factor` for long ones, a blend between."""
    rope, half = config.rope, head_dim(config) // 2
    factor, original = rope.number("factor"), rope.integer("original_max_position_embeddings")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not factor > 0 or not low < high:
        raise rope.error(f"a factor of {factor} between {low} and {high} is no llama3 scaling")
    waves = 2 * math.pi * rope.number("rope_theta", default=10000.0) ** (np.arange(half) / half)
    blend = np.clip((original / waves - low) / (high - low), 0, 1)
    divisors = np.where(blend == 0, factor, 1 / ((1 - blend) / factor + blend))
    return divisors.astype(np.float32)


CONVERSIONS = {
    "llama": Conversion("llama", _metadata, _dense, _top, ("llama-bpe", "smollm"), IGNORED),
    "mixtral": Conversion("llama", _mixtral_metadata, _mixtral, top, ("default",), IGNORED),
}
