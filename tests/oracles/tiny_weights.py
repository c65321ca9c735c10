"""Random weights with which a tiny model is well-conditioned.

Weights are Gaussian, scaled by fan-in so that attention is neither flat nor one-hot; norms and biases are far from 1
and 0, so that leaving one out shows.

Plain Gaussian models are ill-conditioned: rounding the activations to 8 bits by itself swaps experts and best
tokens. So each token's embedding leans towards two experts of each layer, and towards the output row of one
other token, as in trained models; what remains is decided by the context.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from oracles.tiny_families import Family, interleaved_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def randomise(model: "PreTrainedModel", family: Family, seed: int, *, pooled: bool) -> None:
    """Gives every parameter random numbers; `pooled` draws the rows of experts from a pool, quickly quantised."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if pooled and value.ndim == 3 and "experts" in name:
                noise = _pooled(family, value.shape, generator)
            else:
                noise = torch.randn(value.shape, generator=generator)
            value.copy_(_scaled(name, noise, centred=family.zero_centred(name)))
        _lean_to_experts_and_successors(model.state_dict(), generator)


_POOL = 1024


def _pooled(family: Family, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Gaussian experts whose rows, as they lie in the file, are all from one pool: no two of a matrix are the same.

    Quantising is most of the work of making a model, and `quantise` does it once for each row.
    """
    turned = family.experts is interleaved_experts
    experts, rows, columns = (shape[0], shape[2], shape[1]) if turned else shape
    pool = torch.randn((_POOL, columns), generator=torch.Generator().manual_seed(columns))
    picked = torch.rand((experts, _POOL), generator=generator).argsort(dim=1)[:, :rows]
    noise = pool[picked]
    return noise.transpose(1, 2) if turned else noise


_ROUTERS = ("router.proj.weight", "mlp.gate.weight", "mlp.router.weight", "sparse_moe.router.weight")


def _lean_to_experts_and_successors(state: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    embedding, output = state["model.embed_tokens.weight"], state["lm_head.weight"]
    vocab, width = embedding.shape
    for name, router in state.items():
        if name.endswith(_ROUTERS):
            ranks = torch.rand(vocab, len(router), generator=generator).argsort(dim=1)
            directions = torch.nn.functional.normalize(router, dim=1) * (0.8 * width**0.5)
            embedding += directions[ranks[:, 0]] + 0.8 * directions[ranks[:, 1]]
    embedding /= embedding.square().mean(dim=1, keepdim=True).sqrt()
    successor = torch.randperm(vocab, generator=generator)
    output[successor] += embedding * (18.0 / width)


def _scaled(name: str, noise: torch.Tensor, *, centred: bool) -> torch.Tensor:
    if name.endswith(("norm.weight", "layernorm_1.weight", "layernorm_2.weight", "scale", "scalar")):
        return 0.2 * noise if centred else 1.0 + 0.2 * noise
    if name.endswith(".e_score_correction_bias"):
        return 0.05 * noise
    if name.endswith(("bias", "sinks", "A_log")):
        return 0.3 * noise
    if "conv1d" in name:
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise
    gains = {
        **dict.fromkeys(_ROUTERS, 1.0),
        "lm_head.weight": 1.0,
        "gate_up_proj": 1.5,
        "input_linear": 1.5,
        "down_proj": 0.8,
        "output_linear": 0.8,
        "o_proj": 0.8,
        "out_proj": 0.8,
    }
    gain: float = next((gain for end, gain in gains.items() if end in name), 1.2)
    return noise.mul(gain / noise.shape[-1] ** 0.5)
