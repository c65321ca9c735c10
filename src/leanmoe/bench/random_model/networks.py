"""What a GGUF file of a shape holds: metadata and tensors by architecture. Source: GGUF naming conventions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanmoe.bench.random_model.shapes import Delta, Latent, Shape
from leanmoe.errors import UsageError
from leanmoe.formats.gguf_values import Value
from leanmoe.pack.manifest import MAX_EXPERT_FILES, MAX_EXPERTS

Tensor = tuple[str, tuple[int, ...]]
"""A tensor's name and its dimensions in ggml order: fastest first."""


@dataclass(frozen=True, slots=True)
class Network:
    """A shape's metadata, but for tokenizer and `general.*`, and its tensors. `blocks` includes prediction layers.

    `published_experts` are those of the shape as it is published, which a mixture of types goes by.
    """

    shape: Shape
    published_experts: int
    blocks: int
    keys: dict[str, Value]
    tensors: tuple[Tensor, ...]


def network(
    shape: Shape, *, layers: int | None = None, experts: int | None = None, prediction: bool = False
) -> Network:
    """The network of `shape`, cut to its first `layers`; with its layers for multi-token prediction if asked.

    With `experts` so many routed ones in each layer, whatever the shape has; a token uses as many of them as before.

    Raises `UsageError` if the shape does not have that many layers, or none for prediction, or cannot route so.
    """
    if layers is not None and not 1 <= layers <= shape.layers:
        raise UsageError(f"--layers {layers}: this shape has 1 to {shape.layers}")
    if prediction and not shape.prediction_layers:
        raise UsageError("--mtp: this shape has no layers for multi-token prediction")
    extra = shape.prediction_layers if prediction else 0
    cut = replace(shape, layers=layers or shape.layers, prediction_layers=extra)
    blocks = cut.layers + extra
    if experts is not None:
        cut = replace(cut, experts=_routable(shape, experts, blocks))
    tensors = [("token_embd.weight", (cut.hidden, cut.vocab)), ("output_norm.weight", (cut.hidden,))]
    tensors.append(("output.weight", (cut.hidden, cut.vocab)))
    for index in range(blocks):
        for name, ne in _block(cut, index):
            tensors.append((f"blk.{index}.{name}", ne))
    keys = {f"{cut.architecture}.{key}": value for key, value in _keys(cut, blocks).items()}
    return Network(cut, shape.experts, blocks, keys, tuple(tensors))


def _routable(shape: Shape, experts: int, blocks: int) -> int:
    """`experts`, if a token can choose the shape's top-k of them and a pack can hold them."""
    most = min(MAX_EXPERTS, MAX_EXPERT_FILES // blocks)
    if not shape.top_k <= experts <= most:
        raise UsageError(
            f"--experts {experts}: a token of this shape uses {shape.top_k}, and {blocks} layers may have up to {most}"
        )
    groups, used = (shape.keys.get(f"expert_group_{key}", 1) for key in ("count", "used_count"))
    assert isinstance(groups, int)
    assert isinstance(used, int)
    # A group is judged by its two best experts.
    least = groups * max(-(-shape.top_k // used), 2) if groups > 1 else 1
    if experts % groups or experts < least:
        raise UsageError(
            f"--experts {experts}: this shape routes by {groups} groups, of which a token uses {used}; "
            f"wanted a multiple of {groups}, at least {least}"
        )
    return experts


def _keys(shape: Shape, blocks: int) -> dict[str, Value]:
    width = shape.expert_width
    keys: dict[str, Value] = {
        "block_count": blocks,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.dense_width or width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.dimension_count": shape.rope_dim or shape.head_dim,
        "rope.freq_base": shape.rope_base,
        "vocab_size": shape.vocab,
        "expert_count": shape.experts,
        "expert_used_count": shape.top_k,
    }
    if shape.architecture not in ("llama", "olmoe"):
        keys["expert_feed_forward_length"] = width
    if shape.dense_layers:
        keys["leading_dense_block_count"] = shape.dense_layers
    if shape.prediction_layers:
        keys["nextn_predict_layers"] = shape.prediction_layers
    if (delta := shape.delta) is not None:
        keys["expert_shared_feed_forward_length"] = shape.shared_width
        keys["ssm.conv_kernel"] = delta.conv
        keys["ssm.state_size"] = delta.head_dim
        keys["ssm.group_count"] = delta.key_heads
        keys["ssm.time_step_rank"] = delta.value_heads
        keys["ssm.inner_size"] = delta.value_heads * delta.head_dim
        keys["full_attention_interval"] = delta.interval
    if (latent := shape.latent) is not None:
        keys["attention.q_lora_rank"] = latent.q_rank
        keys["attention.kv_lora_rank"] = latent.kv_rank
        keys["attention.key_length"] = latent.kv_rank + latent.rope
        keys["attention.value_length"] = latent.kv_rank
        keys["attention.key_length_mla"] = latent.nope + latent.rope
        keys["attention.value_length_mla"] = latent.value
        keys["rope.dimension_count"] = latent.rope
    return keys | dict(shape.keys)


def _block(shape: Shape, index: int) -> Iterator[Tensor]:
    d = shape.hidden
    yield "attn_norm.weight", (d,)
    recurrent = shape.delta is not None and index < shape.layers and (index + 1) % shape.delta.interval
    if shape.latent is not None:
        yield from _latent_attention(shape, shape.latent)
    elif shape.delta is not None and recurrent:
        yield from _delta_net(shape, shape.delta)
    else:
        yield from _attention(shape)
    after = shape.architecture in ("qwen35moe", "qwen3next", "glm4moe", "gpt-oss")
    yield "post_attention_norm.weight" if after else "ffn_norm.weight", (d,)
    if index < shape.dense_layers:
        yield from _feed_forward("", d, shape.dense_width)
    else:
        yield from _experts(shape)
    if index >= shape.layers:
        yield "nextn.eh_proj.weight", (2 * d, d)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}.weight", (d,)


def _attention(shape: Shape) -> Iterator[Tensor]:
    d, arch = shape.hidden, shape.architecture
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gated = 2 if shape.delta is not None else 1  # beside each head's query the gate of its output
    for name, rows in (("q", gated * q), ("k", kv), ("v", kv)):
        yield f"attn_{name}.weight", (d, rows)
        if arch in ("gpt-oss", "glm4moe"):
            yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (q, d)
    if arch == "gpt-oss":
        yield "attn_output.bias", (d,)
        yield "attn_sinks.weight", (shape.heads,)
    if shape.qk_norm:
        whole = arch in ("olmoe", "minimax-m2")  # over all heads at once
        yield "attn_q_norm.weight", (q if whole else shape.head_dim,)
        yield "attn_k_norm.weight", (kv if whole else shape.head_dim,)


def _delta_net(shape: Shape, delta: Delta) -> Iterator[Tensor]:
    d, values = shape.hidden, delta.value_heads * delta.head_dim
    channels = 2 * delta.key_heads * delta.head_dim + values
    yield "attn_qkv.weight", (d, channels)
    yield "attn_gate.weight", (d, values)
    if shape.architecture == "qwen3next":
        yield "ssm_ba.weight", (d, 2 * delta.value_heads)
    else:
        yield "ssm_beta.weight", (d, delta.value_heads)
        yield "ssm_alpha.weight", (d, delta.value_heads)
    yield "ssm_a", (delta.value_heads,)
    yield "ssm_dt.bias", (delta.value_heads,)
    yield "ssm_conv1d.weight", (delta.conv, channels)
    yield "ssm_norm.weight", (delta.head_dim,)
    yield "ssm_out.weight", (values, d)


def _latent_attention(shape: Shape, latent: Latent) -> Iterator[Tensor]:
    d, heads = shape.hidden, shape.heads
    yield "attn_q_a.weight", (d, latent.q_rank)
    yield "attn_q_a_norm.weight", (latent.q_rank,)
    yield "attn_q_b.weight", (latent.q_rank, heads * (latent.nope + latent.rope))
    yield "attn_kv_a_mqa.weight", (d, latent.kv_rank + latent.rope)
    yield "attn_kv_a_norm.weight", (latent.kv_rank,)
    yield "attn_k_b.weight", (latent.nope, latent.kv_rank, heads)
    yield "attn_v_b.weight", (latent.kv_rank, latent.value, heads)
    yield "attn_output.weight", (heads * latent.value, d)


def _feed_forward(suffix: str, hidden: int, width: int) -> Iterator[Tensor]:
    yield f"ffn_gate{suffix}.weight", (hidden, width)
    yield f"ffn_up{suffix}.weight", (hidden, width)
    yield f"ffn_down{suffix}.weight", (width, hidden)


def _experts(shape: Shape) -> Iterator[Tensor]:
    d, e, f = shape.hidden, shape.experts, shape.expert_width
    yield "ffn_gate_inp.weight", (d, e)
    if shape.architecture in ("glm4moe", "minimax-m2", "deepseek2"):
        yield "exp_probs_b.bias", (e,)
    for name, ne in (("gate", (d, f, e)), ("up", (d, f, e)), ("down", (f, d, e))):
        yield f"ffn_{name}_exps.weight", ne
    if shape.architecture == "gpt-oss":
        yield "ffn_gate_inp.bias", (e,)
        for name, rows in (("gate", f), ("up", f), ("down", d)):
            yield f"ffn_{name}_exps.bias", (rows, e)
    if shape.shared_width:
        yield from _feed_forward("_shexp", d, shape.shared_width)
        if shape.delta is not None:
            yield "ffn_gate_inp_shexp.weight", (d,)
