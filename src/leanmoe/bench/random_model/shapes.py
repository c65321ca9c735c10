"""The sizes of public models, as data. Source: their published configurations; see each family's model card."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from leanmoe.formats.gguf_values import Value

Keys = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated delta net: `key_heads` and `value_heads` of `head_dim`, a causal convolution over `conv` tokens."""

    key_heads: int
    value_heads: int
    head_dim: int = 128
    conv: int = 4
    interval: int = 4  # every so many layers one has full attention instead


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: ranks of q and of the cached latent, and dimensions per head."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One model. `layers` are decoder layers, `prediction_layers` those for multi-token prediction after them.

    `dense_layers` leading layers have a dense FFN of `dense_width`. `keys` are further metadata, without the
    architecture's prefix. `quant` is the type mixture it is published in.
    """

    architecture: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    rope_base: float
    rope_dim: int = 0  # 0: all of a head
    eps: float = 1e-6
    context: int = 32768
    prediction_layers: int = 0
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0
    qk_norm: bool = False
    delta: Delta | None = None
    latent: Latent | None = None
    keys: Keys = field(default_factory=dict)
    pre: str = "qwen2"
    quant: str = "q4_k_m"


def _qwen3(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    experts: int = 128,
    base: float = 1e6,
    context: int = 40960,
) -> Shape:
    return Shape(
        *("qwen3moe", layers, hidden, 151936, heads, kv_heads, 128, experts, 8, width, base),
        context=context,
        qk_norm=True,
    )


def _qwen35(
    layers: int, hidden: int, heads: int, width: int, delta: Delta, experts: int, top_k: int
) -> Shape:
    return Shape(
        *("qwen35moe", layers, hidden, 248320, heads, 2, 256, experts, top_k, width, 1e7),
        rope_dim=64,
        context=262144,
        prediction_layers=1,
        shared_width=width,
        qk_norm=True,
        delta=delta,
        keys={"rope.dimension_sections": [11, 11, 10, 0]},
        pre="qwen35",
    )


def _glm4(layers: int, hidden: int, experts: int, width: int, dense: tuple[int, int], scale: float) -> Shape:
    return Shape(
        *("glm4moe", layers, hidden, 151552, 96, 8, 128, experts, 8, width, 1e6),
        rope_dim=64,
        eps=1e-5,
        context=131072,
        prediction_layers=1,
        shared_width=width,
        dense_layers=dense[0],
        dense_width=dense[1],
        qk_norm=hidden > 4096,
        keys={
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": scale,
        },
        pre="glm4",
    )


def _deepseek(
    *,
    heads: int,
    vocab: int,
    experts: int,
    dense_layers: int,
    base: float,
    context: int,
    pre: str,
    keys: Keys,
) -> Shape:
    return Shape(
        *("deepseek2", 61, 7168, vocab, heads, 1, 192, experts, 8, 2048, base),
        context=context,
        shared_width=2048,
        dense_layers=dense_layers,
        dense_width=18432,
        latent=Latent(1536, 512, 128, 64, 128),
        keys={
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "rope.scaling.type": "yarn",
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_log_multiplier": 0.1,
            **keys,
        },
        pre=pre,
    )


def _gpt_oss(layers: int, experts: int) -> Shape:
    return Shape(
        *("gpt-oss", layers, 2880, 201088, 64, 8, 64, experts, 4, 2880, 150000.0),
        eps=1e-5,
        context=131072,
        keys={
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        pre="gpt-4o",
        quant="mxfp4",
    )


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 1536),
    "qwen3-coder-480b-a35b": _qwen3(62, 6144, 96, 8, 2560, experts=160, base=1e7, context=262144),
    "qwen3.5-35b-a3b": _qwen35(40, 2048, 16, 512, Delta(16, 32), 256, 8),
    "qwen3.5-122b-a10b": _qwen35(48, 3072, 32, 1024, Delta(16, 64), 256, 8),
    "qwen3.5-397b-a17b": _qwen35(60, 4096, 32, 1024, Delta(16, 64), 512, 10),
    "qwen3-next-80b-a3b": Shape(
        *("qwen3next", 48, 2048, 151936, 16, 2, 256, 512, 10, 512, 1e7),
        rope_dim=64,
        context=262144,
        prediction_layers=1,
        shared_width=512,
        qk_norm=True,
        delta=Delta(16, 32),
    ),
    "glm-4.5-air": _glm4(46, 4096, 128, 1408, (1, 10944), 1.0),
    "glm-4.6": _glm4(92, 5120, 160, 1536, (3, 12288), 2.5),
    "glm-4.7-flash": Shape(
        *("deepseek2", 47, 2048, 154880, 20, 1, 256, 64, 4, 1536, 1e6),
        eps=1e-5,
        context=202752,
        prediction_layers=1,
        shared_width=1536,
        dense_layers=1,
        dense_width=10240,
        latent=Latent(768, 512, 192, 64, 256),
        keys={
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.8,
        },
        pre="glm4",
    ),
    "minimax-m2": Shape(
        *("minimax-m2", 62, 3072, 200064, 48, 8, 128, 256, 8, 1536, 5e6),
        rope_dim=64,
        context=196608,
        qk_norm=True,
        keys={"expert_gating_func": 2},
        pre="minimax-m2",
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": _deepseek(
        heads=128,
        vocab=129280,
        experts=256,
        dense_layers=3,
        base=1e4,
        context=163840,
        pre="deepseek-v3",
        keys={
            "rope.scaling.factor": 40.0,
            "expert_weights_scale": 2.5,
            "expert_group_count": 8,
            "expert_group_used_count": 4,
        },
    ),
    "kimi-k2": _deepseek(
        heads=64,
        vocab=163840,
        experts=384,
        dense_layers=1,
        base=5e4,
        context=131072,
        pre="kimi-k2",
        keys={"rope.scaling.factor": 32.0, "expert_weights_scale": 2.827},
    ),
    "mixtral-8x7b": Shape(
        *("llama", 32, 4096, 32000, 32, 8, 128, 8, 2, 14336, 1e6), eps=1e-5, pre="llama-bpe"
    ),
    "olmoe-1b-7b": Shape(
        *("olmoe", 16, 2048, 50304, 16, 16, 128, 64, 8, 1024, 1e4),
        eps=1e-5,
        context=4096,
        qk_norm=True,
        pre="olmo",
    ),
    # No public model: as small as one can be that routes like a large one. 10 MB, made in a second.
    "tiny": Shape(*("qwen3moe", 4, 512, 1024, 4, 2, 64, 64, 4, 32, 1e6), context=4096, qk_norm=True),
}
