"""Which experts a token goes to, and how much each counts: the routing of every architecture, as data.

Sources: Shazeer et al. 2017 (softmax top-k), Wang et al. 2024 (a bias that takes part in the choice alone),
DeepSeek-AI 2024 (group-limited choice).
"""

from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from leanmoe.kernels import linear
from leanmoe.models.spec import RouterSpec
from leanmoe.models.trunk import Trunk

# llama.cpp's floor for the sum of chosen weights: the smallest normal half.
_MIN_WEIGHT_SUM = 2.0**-14
_SMALL = 1e-6


class Routing(NamedTuple):
    """For N tokens: expert ids [N, k], best first, their weights [N, k], and the `chances` [N, E] of every expert.

    The chances, 0 to 1, rank the experts as the choice did.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    chances: torch.Tensor


class Router:
    """The router of one layer, with the biases that its file has for it.

    `ffn_gate_inp.bias` is part of the logits; `exp_probs_b.bias` takes part in the choice, not in the weights.
    """

    def __init__(self, trunk: Trunk, spec: RouterSpec, hidden: int, layer: int) -> None:
        prefix = f"blk.{layer}."
        self.spec = spec
        self.weight = trunk.weight(prefix + "ffn_gate_inp.weight", spec.experts, hidden)
        self.bias = trunk.vector_if_present(prefix + "ffn_gate_inp.bias", spec.experts)
        self.selection_bias = trunk.vector_if_present(prefix + "exp_probs_b.bias", spec.experts)

    def __call__(self, x: torch.Tensor) -> Routing:
        """x [N, hidden], after the norm before the experts."""
        probabilities = router_probabilities(self._logits(x), self.spec)
        scores = best_groups(biased(probabilities, self.selection_bias), self.spec)
        ids, weights = pick(probabilities, scores, self.spec)
        return Routing(ids, weights, _chances(probabilities, scores, self.spec))

    def ranking(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers [N, E] that rank the experts as the choice does, spread like logits; -inf cannot be chosen."""
        logits = self._logits(x)
        if self.selection_bias is None and self.spec.groups == 1:
            return logits
        scores = biased(router_probabilities(logits, self.spec), self.selection_bias)
        return best_groups(scores / scores.std(-1, correction=0, keepdim=True).clamp_min(_SMALL), self.spec)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = linear(self.weight, x)
        return logits if self.bias is None else logits + self.bias


def router_probabilities(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Router logits [N, E] -> what each expert's weight is made from [N, E]."""
    match spec.gating:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrt_softplus":
            return softplus(logits).sqrt()
        case "chosen_softmax":
            return logits


def biased(probabilities: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What the choice goes by [N, E]: the probabilities, plus the selection bias [E] if there is one."""
    return probabilities if bias is None else probabilities + bias


def best_groups(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Scores [N, E] with -inf for each expert outside its token's best groups."""
    if spec.groups == 1:
        return scores
    grouped = scores.view(len(scores), spec.groups, -1)
    best = grouped.topk(1 if spec.group_score == "max" else 2, dim=-1).values.sum(-1)
    kept = best.topk(spec.groups_used, dim=-1).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def pick(
    probabilities: torch.Tensor, scores: torch.Tensor, spec: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [N, k] by falling score, and their weights [N, k], made from the probabilities."""
    ids = scores.topk(spec.top_k, dim=-1, sorted=True).indices
    weights = probabilities.gather(-1, ids)
    if spec.gating == "chosen_softmax":
        weights = weights.softmax(-1)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(_MIN_WEIGHT_SUM)
    return ids, weights * spec.scale if spec.scale != 1.0 else weights


def _chances(probabilities: torch.Tensor, scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Probabilities where they are what selects; else the scores, stretched to reach from 0 to 1."""
    if scores is probabilities and spec.gating in ("softmax", "sigmoid"):
        return probabilities
    if spec.gating == "chosen_softmax":
        return scores.softmax(-1)
    low = scores.where(scores > -torch.inf, torch.inf).amin(-1, keepdim=True)
    span = scores.amax(-1, keepdim=True) - low
    return ((scores - low) / span.clamp_min(_SMALL)).clamp_min(0.0)
