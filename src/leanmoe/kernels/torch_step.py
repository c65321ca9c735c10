"""What happens to a token between the products, in plain torch, on any device. The reference for the C++ ones."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from leanmoe.kernels.types import RoutingRule

# llama.cpp's floor for the sum of chosen weights: the smallest normal half.
_MIN_WEIGHT_SUM = 2.0**-14
_SMALL = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm`."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def turn_heads(
    x: Tensor, cos: Tensor, sin: Tensor, *, apart: bool, norm: Tensor | None, eps: float
) -> Tensor:
    """As `kernels.turn_heads`."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if apart:
        a, b = turned[..., :half], turned[..., half:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((pairs.flatten(-2), rest), dim=-1)


def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.route`."""
    probabilities = gated(logits, rule)
    scores = best_groups(probabilities if bias is None else probabilities + bias, rule)
    ids = scores.topk(rule.top_k, dim=-1, sorted=True).indices
    weights = probabilities.gather(-1, ids)
    if rule.gating == "chosen_softmax":
        weights = weights.softmax(-1)
    if rule.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(_MIN_WEIGHT_SUM)
    return ids, weights * rule.scale, _chances(scores, rule, plain=bias is None and rule.groups == 1)


def gated(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Router logits [N, E] -> what each expert's weight is made from [N, E]."""
    match rule.gating:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrt_softplus":
            return softplus(logits).sqrt()
        case "chosen_softmax":
            return logits


def best_groups(scores: Tensor, rule: RoutingRule) -> Tensor:
    """Scores [N, E] with -inf for each expert outside its token's best groups."""
    if rule.groups == 1:
        return scores
    grouped = scores.view(len(scores), rule.groups, -1)
    best = grouped.topk(1 if rule.group_score == "max" else 2, dim=-1).values.sum(-1)
    kept = best.topk(rule.groups_used, dim=-1).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def _chances(scores: Tensor, rule: RoutingRule, *, plain: bool) -> Tensor:
    """Probabilities where they are what selects; else the scores, stretched to reach from 0 to 1."""
    if plain and rule.gating in ("softmax", "sigmoid"):
        return scores
    if rule.gating == "chosen_softmax":
        return scores.softmax(-1)
    low = scores.where(scores > -torch.inf, torch.inf).amin(-1, keepdim=True)
    span = scores.amax(-1, keepdim=True) - low
    return ((scores - low) / span.clamp_min(_SMALL)).clamp_min(0.0)


def angles(frequencies: Tensor, positions: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """As `kernels.angles`."""
    angle = positions[:, None, None].double() * frequencies
    return (angle.cos() * magnitude).float(), (angle.sin() * magnitude).float()


def weighted_sum(rows: Tensor, weights: Tensor, ids: Tensor, onto: Tensor | None) -> Tensor:
    """As `kernels.weighted_sum`."""
    y = torch.zeros_like(rows[:, 0]) if onto is None else onto.clone()
    tokens = torch.arange(len(rows), device=rows.device)
    for place in ids.argsort(dim=-1, stable=True).unbind(-1):
        y += rows[tokens, place] * weights[tokens, place, None]
    return y
