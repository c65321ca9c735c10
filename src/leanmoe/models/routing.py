"""Which experts a token goes to, and how much each counts: the routing of every architecture, as data.

Sources: Shazeer et al. 2017 (softmax top-k), Wang et al. 2024 (a bias that takes part in the choice alone),
DeepSeek-AI 2024 (group-limited choice).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from leanmoe.kernels import add, linear, route
from leanmoe.kernels.torch_step import best_groups, gated
from leanmoe.models.spec import RouterSpec
from leanmoe.models.trunk import Trunk

_SMALL = 1e-6


class Routing(NamedTuple):
    """For N tokens: expert ids [N, k], best first, their weights [N, k], and the `chances` [N, E] of every expert.

    The chances, 0 to 1, rank the experts as the choice did.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    chances: torch.Tensor

    @classmethod
    def joined(cls, parts: "Sequence[Routing]") -> "Routing":
        """That of all the parts' tokens."""
        return parts[0] if len(parts) == 1 else cls(*map(torch.cat, zip(*parts, strict=True)))


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
        return Routing(*route(self._logits(x), self.selection_bias, self.spec))

    def ranking(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers [N, E] that rank the experts as the choice does, spread like logits; -inf cannot be chosen."""
        logits = self._logits(x)
        if self.selection_bias is None and self.spec.groups == 1:
            return logits
        scores = gated(logits, self.spec)
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        return best_groups(scores / scores.std(-1, correction=0, keepdim=True).clamp_min(_SMALL), self.spec)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = linear(self.weight, x)
        return logits if self.bias is None else add(logits, self.bias)
