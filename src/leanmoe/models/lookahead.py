"""What the next layers will pick, by their own routers: the gate look-ahead of Eliseev and Mazur (2023).

The hidden state changes little from layer to layer, so a later layer's norm and router, applied to the present
state, name most of the experts that layer will pick.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leanmoe.experts.policy import Phase
from leanmoe.experts.pool import ExpertPool
from leanmoe.kernels import Weight, linear
from leanmoe.models.norm import RMSNorm

# With more tokens than this the picks cover much of a layer, and demand reads fill the disk.
MOST_TOKENS = 4
# A rank's chance is the mean over about so many visits of a layer.
_MEMORY = 256


@dataclass(frozen=True, slots=True)
class Gate:
    """A layer's norm before its router, the router [experts, hidden], and how many experts it picks."""

    layer: int
    norm: RMSNorm
    router: Weight
    top_k: int


class LookAhead:
    """Tells the pool, after each routing of the layer of `own`, what `later` gates will probably pick.

    The i-th choice of a later router is given the chance that i-th choices came true with up to now: `ranks`,
    shared by all layers at the same distance.
    """

    def __init__(self, pool: ExpertPool, own: Gate, later: Sequence[Gate], ranks: Sequence["Ranks"]) -> None:
        self._pool, self._own, self._later, self._ranks = pool, own, tuple(later), tuple(ranks)

    def __call__(self, phase: Phase, h: torch.Tensor, picked: Sequence[int]) -> None:
        """`h` [N, hidden] after this layer's attention; its router `picked` these experts for the N tokens."""
        pool = self._pool
        pool.visit(self._own.layer, phase, picked)
        if phase is not Phase.DECODE or len(h) > MOST_TOKENS or not pool.expecting:
            return
        for ranks in self._ranks:
            ranks.learn(self._own.layer, picked)
        for gate, ranks in zip(self._later, self._ranks, strict=False):
            logits = linear(gate.router, gate.norm(h))
            choices = logits.topk(min(ranks.width, logits.shape[1]), dim=-1).indices.tolist()
            pool.expect(gate.layer, ranks.chances(gate.layer, choices, logits.shape[1]))


class Ranks:
    """How often a predicted layer's first, second, ... choice came true, `width` of them."""

    def __init__(self, top_k: int) -> None:
        self.width = 2 * top_k + 2
        self._came_true = [0.5] * top_k + [0.1] * (self.width - top_k)
        self._seen = 0
        self._predicted: dict[int, list[int]] = {}

    def chances(
        self, layer: int, choices: list[list[int]], experts: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        """Chances [experts] from the choices of each token, best first."""
        found = np.zeros(experts, np.float32)
        for chosen in choices:
            for expert, chance in zip(chosen, self._came_true, strict=False):
                if chance > found[expert]:
                    found[expert] = chance
        if len(choices) == 1:
            self._predicted[layer] = choices[0]
        return found

    def learn(self, layer: int, picked: Sequence[int]) -> None:
        """The layer picked these experts: compares with what was predicted last, if it was for one token."""
        chosen = self._predicted.pop(layer, None)
        if chosen is None:
            return
        self._seen += 1
        rate = 1 / min(self._seen + 8, _MEMORY)
        true = self._came_true
        for rank, expert in enumerate(chosen):
            true[rank] += rate * ((expert in picked) - true[rank])


def attach(pool: ExpertPool, gates: Sequence[Gate], distances: int) -> list[LookAhead]:
    """A look-ahead for each of the `gates` (layers in order), to the gates up to `distances` further on."""
    ranks = [Ranks(gates[0].top_k) for _ in range(distances)] if gates else []
    return [LookAhead(pool, gate, gates[i + 1 : i + 1 + distances], ranks) for i, gate in enumerate(gates)]
