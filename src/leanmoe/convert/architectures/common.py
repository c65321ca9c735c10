"""What the architectures of the Llama line share: keys and names. Source: GGUF key and tensor name conventions."""

import math
from collections.abc import Iterator, Mapping

from leanmoe.convert.block import Block, Named
from leanmoe.convert.config import MAX_EXPERTS, MAX_VOCAB, Config
from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf_values import Value

# Within a block, checkpoint -> GGUF.
ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
QK_NORM = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
FFN_NORM = {"post_attention_layernorm": "ffn_norm"}
DENSE_FFN = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROUTER = {"mlp.gate": "ffn_gate_inp"}
SHARED_EXPERTS = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
# Buffers that follow from the configuration, and the scales of activations, which are not rounded here.
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.masked_bias", r".*\.(input|activation)_scale")

TOP = {"embed_tokens": "token_embd", "norm": "output_norm"}


def top(block: Block) -> Iterator[Named]:
    """Embedding, last norm and output; the output is left out where it is the embedding."""
    yield from block.renamed(TOP)
    checkpoint, tied = block.checkpoint, block.config.flag("tie_word_embeddings")
    for name in [
        name for name in checkpoint.names() if name.removeprefix("language_model.") == "lm_head.weight"
    ]:
        if tied:
            checkpoint.ignore(name)
        else:
            yield "output.weight", checkpoint.take(name)


def head_dim(config: Config) -> int:
    """The size of a head: its own key, or hidden / heads."""
    return config.integer(
        "head_dim", default=config.size("hidden_size") // config.size("num_attention_heads")
    )


def base_metadata(config: Config) -> dict[str, Value]:
    """Keys that every decoder has: sizes, heads, norm, rope."""
    heads, size = config.size("num_attention_heads"), head_dim(config)
    activation, eps = config.text("hidden_act", default="silu"), config.number("rms_norm_eps")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"{config.source}: hidden_act is '{activation[:80]}'; silu is supported")
    if not 0 < eps < 1:
        raise config.error(f"rms_norm_eps is {eps}; more than 0, less than 1 was wanted")
    return {
        "block_count": config.layers,
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": config.integer("intermediate_size", "moe_intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.integer("num_key_value_heads", default=heads),
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": eps,
        "vocab_size": config.size("vocab_size", limit=MAX_VOCAB),
        **rope_metadata(config, size),
    }


def rope_metadata(config: Config, size: int) -> dict[str, Value]:
    """Keys of rotary embedding for heads of `size`. A scaling that cannot be written down is refused."""
    rope = config.rope
    part = rope.number("partial_rotary_factor", default=1.0)
    if not 0 < part <= 1:
        raise rope.error(f"partial_rotary_factor is {part}; more than 0, at most 1 was wanted")
    keys: dict[str, Value] = {
        "rope.dimension_count": int(size * part),
        "rope.freq_base": rope.number("rope_theta", default=10000.0),
    }
    kind = rope.text("rope_type")
    if kind in ("default", "mrope"):
        return keys
    if kind == "linear":
        return keys | {"rope.scaling.type": "linear", "rope.scaling.factor": _factor(rope)}
    if kind == "yarn":
        return keys | yarn_metadata(config, rope)
    raise UnsupportedError(
        f"{rope.source}: rope_type '{kind}' is not supported; supported: default, linear, yarn"
    )


def _factor(rope: Config) -> float:
    """By how much the context was stretched. Raises `FormatError`."""
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error(f"factor is {factor}; a number from 1 was wanted")
    return factor


def yarn_metadata(config: Config, rope: Config) -> dict[str, Value]:
    """YaRN's keys. Those for its bounds are written where they are not what every reader takes them for."""
    factor = _factor(rope)
    original = (
        rope.integer("original_max_position_embeddings")
        if rope.has("original_max_position_embeddings")
        else config.integer("max_position_embeddings")
    )
    keys: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        if rope.has(name) and rope.number(name) != usual:
            keys[f"rope.scaling.yarn_{name}"] = rope.number(name)
    if not rope.flag("truncate", default=True):
        keys["rope.scaling.yarn_whole_pairs"] = False  # lean's own key
    if rope.has("attention_factor"):
        # Readers multiply this by YaRN's own magnitude.
        keys["rope.scaling.attn_factor"] = rope.number("attention_factor") / (1 + 0.1 * math.log(factor))
    return keys


def sliding_metadata(config: Config) -> dict[str, Value]:
    """The size of the window, and which layers have one."""
    keys: dict[str, Value] = {"attention.sliding_window": config.integer("sliding_window")}
    if config.has("layer_types"):
        keys["attention.sliding_window_pattern"] = sliding_layers(config)
    return keys


def sliding_layers(config: Config) -> list[bool]:
    """Which layers have a window. Raises `FormatError` where `layer_types` does not say so."""
    kinds, known = config.values.get("layer_types"), {"sliding_attention": True, "full_attention": False}
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise config.error(f"layer_types is {str(kinds)[:80]}; a list of {', '.join(known)} was wanted")
    return [known[kind] for kind in kinds]


def expert_metadata(config: Config) -> dict[str, Value]:
    """How many experts, and how many a token uses."""
    return {
        "expert_count": expert_count(config),
        "expert_used_count": config.integer("num_experts_per_tok"),
    }


def grouped_router_metadata(config: Config, *, gating: int) -> dict[str, Value]:
    """Keys of routed and shared experts where the first layers are dense, as DeepSeek and GLM put them.

    `gating` is GGUF's number for what makes probabilities of a router's logits.
    """
    groups = config.integer("n_group", default=1)
    return {
        **expert_metadata(config),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts", default=0),
        "leading_dense_block_count": config.integer("first_k_dense_replace", default=0),
        "expert_weights_scale": config.number("routed_scaling_factor", default=1.0),
        "expert_weights_norm": config.flag("norm_topk_prob"),
        "expert_gating_func": gating,
        "expert_group_count": groups,
        "expert_group_used_count": config.integer("topk_group", default=groups),
    }


def selection_bias(block: Block, name: str) -> Iterator[Named]:
    """The bias that takes part in the choice of experts alone, where there is one."""
    if block.has(name):
        yield "exp_probs_b.bias", block.take(name)


def qk_normed_moe(block: Block) -> Iterator[Named]:
    """A block of attention with normed q and k, and of routed experts: nothing but names."""
    yield from block.renamed(ATTENTION | QK_NORM | FFN_NORM | ROUTER)
    yield from block.experts("mlp.experts", expert_count(block.config))


def expert_count(config: Config) -> int:
    """The number of routed experts in a layer."""
    return config.size("num_experts", "num_local_experts", "n_routed_experts", limit=MAX_EXPERTS)


def merged(*parts: Mapping[str, str]) -> dict[str, str]:
    """Name tables joined, in order."""
    return {theirs: ours for part in parts for theirs, ours in part.items()}
