"""Public shapes scaled down, with everything that makes each architecture its own."""

from dataclasses import replace
from typing import Any

from leanmoe.bench.random_model.shapes import SHAPES, Delta, Latent, Shape

# One of each architecture, and of each variant within one.
FAMILIES = (
    *("qwen3-30b-a3b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "glm-4.5-air", "glm-4.6", "minimax-m2"),
    *("gpt-oss-20b", "deepseek-v3", "glm-4.7-flash", "mixtral-8x7b", "olmoe-1b-7b"),
)


def scaled_down(name: str) -> Shape:
    """The shape `name` with 3 layers of 64 experts: a few megabytes. Recurrent ones have their attention too."""
    shape = SHAPES[name]
    sizes: dict[str, Any] = dict(
        layers=3, hidden=512, vocab=1024, heads=4, kv_heads=min(2, shape.kv_heads), head_dim=64, context=2048
    )
    sizes |= dict(experts=64, top_k=4, expert_width=32, shared_width=min(32, shape.shared_width))
    sizes |= dict(rope_dim=min(32, shape.rope_dim))
    sizes |= dict(dense_layers=min(1, shape.dense_layers), dense_width=min(256, shape.dense_width))
    if shape.architecture == "olmoe":  # its norm of q is as wide as the model
        sizes |= dict(heads=8, kv_heads=8)
    if shape.delta is not None:
        sizes |= dict(delta=Delta(2, 4, 32, interval=3))
    if shape.latent is not None:
        sizes |= dict(latent=Latent(128, 64, 64, 32, 64), head_dim=96)
    if "rope.dimension_sections" in shape.keys:
        sizes |= dict(keys={**shape.keys, "rope.dimension_sections": [5, 6, 5, 0]})
    return replace(shape, **sizes)
