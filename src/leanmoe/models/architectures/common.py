"""What the architectures of the Llama line share: keys, defaults, shapes. Source: GGUF key conventions."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf import GGUFFile
from leanmoe.models.spec import (
    MAX_EXPERTS,
    MAX_LAYERS,
    AttentionSpec,
    Metadata,
    MixerSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    YarnRange,
)

if TYPE_CHECKING:
    from leanmoe.kernels.types import Gating

_GATINGS: dict[int, "Gating"] = {1: "softmax", 2: "sigmoid", 3: "chosen_softmax", 4: "sqrt_softplus"}


def read_rope(
    meta: Metadata, style: Literal["neox", "norm"], head_dim: int, *, whole_pairs: bool = True
) -> RopeSpec:
    """Rope keys. A scaling type that lean does not compute is refused rather than ignored.

    `whole_pairs` is what the architecture's YaRN does where the file does not say.
    """
    rotary = meta.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if rotary % 2:
        raise FormatError(
            f"{meta.source}: {meta.arch}.rope.dimension_count is {rotary}; wanted an even number"
        )
    rope = RopeSpec(style, rotary, meta.number("rope.freq_base", 10000.0))
    if not rope.base > 1:
        raise FormatError(f"{meta.source}: {meta.arch}.rope.freq_base is {rope.base}; wanted more than 1")
    kind = meta.text("rope.scaling.type", "none")
    if not meta.has("rope.scaling.type") and meta.has("rope.scale_linear"):
        kind = "linear"
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0))
    if kind == "none" or factor in (0.0, 1.0):
        return rope
    if factor < 0:
        raise FormatError(
            f"{meta.source}: {meta.arch}.rope.scaling.factor is {factor}; wanted a positive number"
        )
    if kind == "linear":
        return replace(rope, scaling="linear", factor=factor)
    if kind == "yarn":
        return _read_yarn(meta, replace(rope, scaling="yarn", factor=factor), whole_pairs)
    raise UnsupportedError(
        f"{meta.source}: rope scaling '{kind}' is not supported; supported: none, linear, yarn"
    )


def _read_yarn(meta: Metadata, rope: RopeSpec, whole_pairs: bool) -> RopeSpec:
    """YaRN's own keys (Peng et al. 2023).

    The bounds are read where the file has them: llama.cpp ignores them, but they are the model's.
    `yarn_whole_pairs` is lean's own key; llama.cpp always takes whole pairs.
    """
    original = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"), low=1)
    fast = meta.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = meta.number("rope.scaling.yarn_beta_slow", 1.0)
    if not fast >= slow > 0:
        raise FormatError(
            f"{meta.source}: {meta.arch}.rope.scaling.yarn_beta_fast is {fast} and yarn_beta_slow {slow}; "
            "wanted positive numbers, the first not below the second"
        )
    whole = meta.flag("rope.scaling.yarn_whole_pairs", whole_pairs)
    # A log multiplier says that the magnitude is in the attention's scale instead.
    own = 1.0 if meta.has("rope.scaling.yarn_log_multiplier") else 1 + 0.1 * math.log(rope.factor)
    return replace(
        rope,
        original_context=original,
        yarn=YarnRange(fast, slow, whole),
        magnitude=own * meta.number("rope.scaling.attn_factor", 1.0),
    )


def read_attention(
    meta: Metadata,
    style: Literal["neox", "norm"],
    qk_norm: Literal["head", "full"] | None = None,
    *,
    gated: bool = False,
    whole_pairs: bool = True,
) -> AttentionSpec:
    """Head counts and sizes; head size defaults to hidden / heads. `whole_pairs` as for `read_rope`."""
    heads = meta.integer("attention.head_count", low=1, high=4096)
    kv_heads = meta.integer("attention.head_count_kv", heads, low=1, high=heads)
    if heads % kv_heads:
        raise FormatError(
            f"{meta.source}: {heads} query heads cannot share {kv_heads} key/value heads evenly"
        )
    hidden = meta.integer("embedding_length", low=1, high=2**20)
    head_dim = meta.integer("attention.key_length", hidden // heads or None, low=2, high=4096)
    value_dim = meta.integer("attention.value_length", head_dim, low=1, high=4096)
    if value_dim != head_dim:
        raise UnsupportedError(f"{meta.source}: value heads of {value_dim} beside key heads of {head_dim}")
    scale = meta.number("attention.scale", 0.0) or head_dim**-0.5
    rope = read_rope(meta, style, head_dim, whole_pairs=whole_pairs)
    return AttentionSpec(heads, kv_heads, head_dim, rope, scale, qk_norm, gated)


def read_sliding(meta: Metadata, layers: int, period: int) -> list[bool]:
    """Which layers see a window of the past: the file says so for each, or the last of each `period` does not."""
    flags = meta.flags("attention.sliding_window_pattern", layers)
    if flags is not None:
        return flags
    period = meta.integer("attention.sliding_window_pattern", period)
    return [period == 0 or n % period < period - 1 for n in range(layers)]


def read_router(
    meta: Metadata, *, renormalise: bool | None = None, gating: "Gating" = "softmax"
) -> RouterSpec | None:
    """Router keys; None for a model without routed experts.

    `gating` holds where the file does not say; `renormalise` is the architecture's own rule, None if the file
    says so.
    """
    experts = meta.integer("expert_count", 0, high=MAX_EXPERTS)
    if not experts:
        return None
    top_k = meta.integer("expert_used_count", low=1, high=experts)
    groups = meta.integer("expert_group_count", 0, high=experts) or 1
    used = meta.integer("expert_group_used_count", 0, high=groups) or groups
    if used == groups:
        groups = used = 1
    size = experts // groups
    if experts % groups or size * used < top_k or (groups > 1 and size < 2):
        raise FormatError(
            f"{meta.source}: {top_k} of {experts} experts cannot be chosen from {used} of {groups} equal groups"
        )
    return RouterSpec(
        experts,
        top_k,
        gating=_GATINGS.get(meta.integer("expert_gating_func", 0, high=len(_GATINGS)), gating),
        renormalise=meta.flag("expert_weights_norm", False) if renormalise is None else renormalise,
        scale=meta.number("expert_weights_scale", 0.0) or 1.0,
        groups=groups,
        groups_used=used,
    )


def read_spec(
    meta: Metadata,
    gguf: GGUFFile,
    *,
    mixer: MixerSpec | Callable[[int], MixerSpec],
    router: RouterSpec | None,
    expert_width: int = 0,
    shared_width: int = 0,
    norm2: str = "ffn_norm",
    eps: float | None = None,
) -> ModelSpec:
    """Assembles the spec and checks it against the tensors that the file lists.

    `mixer` is that of every layer, or gives that of each.
    """
    blocks = meta.integer("block_count", low=1, high=MAX_LAYERS)
    layers = blocks - meta.integer("nextn_predict_layers", 0, high=blocks - 1)  # MTP blocks come last
    hidden = meta.integer("embedding_length", low=1, high=2**20)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.ne) < 2 or embedding.ne[0] != hidden:
        raise FormatError(f"{gguf.path}: token_embd.weight of {hidden} columns is missing")
    moe = frozenset(n for n in range(layers) if f"blk.{n}.ffn_gate_inp.weight" in gguf.tensors)
    if router is None and moe:
        raise FormatError(
            f"{gguf.path}: has routers (blk.{min(moe)}.ffn_gate_inp) but no {meta.arch}.expert_count"
        )
    if router is not None and not moe:
        raise FormatError(
            f"{gguf.path}: {meta.arch}.expert_count is {router.experts} but there is no router tensor"
        )
    dense_width = meta.integer("feed_forward_length", 0)
    _check_width(gguf, layers, "ffn_up", dense_width, f"{meta.arch}.feed_forward_length is")
    _check_width(gguf, layers, "ffn_up_shexp", shared_width, "by its metadata the shared expert's width is")
    return ModelSpec(
        architecture=meta.arch,
        hidden=hidden,
        vocab=embedding.ne[1],
        context_length=meta.integer("context_length", low=1),
        eps=_read_epsilon(meta) if eps is None else eps,
        mixers=tuple(mixer(n) if callable(mixer) else mixer for n in range(layers)),
        dense_width=dense_width,
        router=router,
        expert_width=expert_width,
        shared_width=shared_width,
        shared_gate=any(f"blk.{n}.ffn_gate_inp_shexp.weight" in gguf.tensors for n in moe),
        moe_layers=moe,
        norm2=norm2,
    )


def _check_width(gguf: GGUFFile, layers: int, name: str, width: int, says: str) -> None:
    """Raises `FormatError` where a tensor is of another width: the plan goes by the metadata, and is made first."""
    for n in range(layers):
        up = gguf.tensors.get(f"blk.{n}.{name}.weight")
        rows = width if up is None else math.prod(up.ne[1:])
        if rows != width:
            raise FormatError(f"{gguf.path}: {says} {width}, but blk.{n}.{name}.weight has {rows} rows")


def _read_epsilon(meta: Metadata) -> float:
    """What is added to a mean square before its root."""
    key = "attention.layer_norm_rms_epsilon"
    eps = meta.number(key)
    if not 0 < eps < 1:
        raise FormatError(f"{meta.source}: {meta.arch}.{key} is {eps}; wanted more than 0, less than 1")
    return eps


def shared_expert_width(meta: Metadata, expert_width: int) -> int:
    """Width of the shared expert: that of so many routed ones."""
    return meta.integer("expert_shared_count", 0, high=MAX_EXPERTS) * expert_width


def qwen_expert_width(meta: Metadata, router: RouterSpec | None) -> int:
    """Width of one expert's FFN; old Qwen files give only the sum over the chosen ones."""
    if router is None:
        return 0
    fallback = meta.integer("feed_forward_length", 0) // router.top_k
    return meta.integer("expert_feed_forward_length", fallback or None, low=1)
