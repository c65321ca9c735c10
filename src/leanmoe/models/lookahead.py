"""What the next layers will pick, by their own routers: the gate look-ahead of Eliseev and Mazur (2023).

The hidden state changes little from layer to layer, so a later layer's norm and router, applied to the present
state, name most of the experts that layer will pick.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from leanmoe.experts.acquire import Acquire
from leanmoe.experts.policy import Phase
from leanmoe.experts.pool import ExpertPool
from leanmoe.models.norm import RMSNorm
from leanmoe.models.routing import Router

# With more tokens than this the picks cover much of a layer, and demand reads fill the disk.
MOST_TOKENS = 4
LONG_PROMPT = 256
"""Tokens from which on a prompt says what the next layer will be asked for, and of how many it does."""
_TOGETHER = 64  # of them, whose copies take memory at once
_GOLDEN = (5**0.5 - 1) / 2
_MEMORY = 64  # choices that a rate is the mean over
_MARGINS = (0.1, 0.3, 0.8)
Chances = npt.NDArray[np.float32]


Watcher = Callable[[Phase, torch.Tensor, Sequence[int]], None]
"""Called with the phase, the state `h` [N, hidden] before the experts, and what the N tokens picked."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A layer's router, and the norm before it."""

    layer: int
    norm: RMSNorm
    router: Router


class Foresight:
    """Says, for a long prompt, which experts the layer of `gate` will be asked for, so that they are read meanwhile."""

    def __init__(self, pool: ExpertPool, gate: Gate) -> None:
        self._pool, self._gate = pool, gate

    def __call__(self, h: torch.Tensor, groups: Acquire) -> None:
        """`h` [N, hidden] after the attention of the layer before, of which `groups` was asked.

        Of so many tokens, a part has use for nearly all that the rest has. They are taken at steps of the golden
        section, since text may repeat itself at any even step.
        """
        gate = self._gate
        if len(h) < LONG_PROMPT or not self._pool.lacks(gate.layer):
            return
        some = torch.arange(len(h))
        if len(h) >= 2 * LONG_PROMPT:
            some = (torch.arange(LONG_PROMPT) * _GOLDEN % 1 * len(h)).long()
        some, picks = some.to(h.device), []
        for begin in range(0, len(some), _TOGETHER):
            ranks = gate.router.ranking(gate.norm(h[some[begin : begin + _TOGETHER]]))
            picks.append(ranks.topk(gate.router.spec.top_k, dim=-1).indices)
        groups.follow(
            gate.layer, np.flatnonzero(np.bincount(torch.cat(picks).cpu().numpy().ravel())).tolist()
        )


class LookAhead:
    """Tells the pool, after each routing of the layer of `own`, what the `later` gates will probably pick.

    `experience`, for each of these, turns a router's choices into chances; it is shared by the layers.
    """

    def __init__(
        self, pool: ExpertPool, own: Gate, later: Sequence[Gate], experience: Sequence["Experience"]
    ) -> None:
        self._pool, self._own, self._later = pool, own, tuple(later)
        self._experience = tuple(experience)

    def __call__(self, phase: Phase, h: torch.Tensor, picked: Sequence[int]) -> None:
        """`h` [N, hidden] after this layer's attention; its router `picked` these experts for the N tokens."""
        pool, layer = self._pool, self._own.layer
        pool.visit(layer, phase, picked)
        if phase is not Phase.DECODE or len(h) > MOST_TOKENS or not pool.expecting:
            return
        for experience in self._experience:
            experience.learn(layer, picked)
        for gate, experience in zip(self._later, self._experience, strict=False):
            ranks, ids = gate.router.ranking(gate.norm(h)).topk(experience.width, dim=-1)
            pool.expect(gate.layer, experience.chances(gate.layer, ranks.tolist(), ids.tolist()))


class GateRecall:
    """Counts how many picks of later layers their routers foresaw from the present state, at each distance.

    For judging, not for running: every layer's state goes through the routers of the next `distances` layers.
    `widths` are the numbers of experts that may be named.
    """

    def __init__(self, gates: Sequence[Gate], widths: Sequence[int], distances: int) -> None:
        self._gates, self._widths, self._distances = tuple(gates), tuple(widths), distances
        self._named: dict[tuple[int, int], list[int]] = {}  # by layer's place and distance
        self._hits = np.zeros((distances, len(widths)), np.int64)
        self._picks = np.zeros(distances, np.int64)

    def watcher(self, place: int) -> "Watcher":
        """What the layer of the gate at `place` calls."""
        return partial(self._visit, place)

    def _visit(self, place: int, phase: Phase, h: torch.Tensor, picked: Sequence[int]) -> None:
        if phase is not Phase.DECODE or len(h) > 1:
            self._named.clear()
            return
        for distance in range(1, self._distances + 1):
            if named := self._named.pop((place, distance), None):
                self._picks[distance - 1] += len(picked)
                found = [named.index(expert) for expert in picked if expert in named]
                self._hits[distance - 1] += [sum(rank < width for rank in found) for width in self._widths]
            if place + distance < len(self._gates):
                gate = self._gates[place + distance]
                ranks = gate.router.ranking(gate.norm(h))[0]
                best = ranks.topk(min(max(self._widths), len(ranks))).indices.tolist()
                self._named[place + distance, distance] = best

    def recall(self) -> dict[int, list[float]]:
        """By distance, where there were picks: the share of them (0 to 1) among the best `widths` of the router."""
        counted = zip(self._hits.tolist(), self._picks.tolist(), strict=True)
        return {d: [n / picks for n in hits] for d, (hits, picks) in enumerate(counted, 1) if picks}


class Experience:
    """How often a predicted router's choices came true.

    For the i-th best of `experts`, it is told apart by how far its logit (or what else selects) is from the last
    winner's or the first loser's (the border it would have to cross), in four steps. Covers `width` choices.
    """

    def __init__(self, experts: int, top_k: int) -> None:
        self.width = min(experts, 2 * top_k + 2)
        self._experts, self._top_k = experts, min(top_k, experts - 1)
        start = [0.6 if rank < top_k else 0.1 for rank in range(self.width)]
        self._rates = [[rate] * (len(_MARGINS) + 1) for rate in start]
        self._predicted: dict[int, list[tuple[int, list[float], int]]] = {}

    def chances(self, layer: int, logits: list[list[float]], ids: list[list[int]]) -> Chances:
        """Chances [experts] from each token's best logits and their experts, best first."""
        found = np.zeros(self._experts, np.float32)
        cells: list[tuple[int, list[float], int]] = []
        for values, chosen in zip(logits, ids, strict=True):
            winner, loser = values[self._top_k - 1], values[self._top_k]
            for rank, (value, expert) in enumerate(zip(values, chosen, strict=True)):
                margin = value - loser if rank < self._top_k else winner - value
                step = bisect(_MARGINS, margin)
                cells.append((expert, self._rates[rank], step))
                found[expert] = max(found[expert], self._rates[rank][step])
        self._predicted[layer] = cells if len(ids) == 1 else []
        return found

    def learn(self, layer: int, picked: Sequence[int]) -> None:
        """The layer picked these experts: compares with what was predicted last, if it was for one token."""
        for expert, rates, step in self._predicted.pop(layer, ()):
            rates[step] += ((expert in picked) - rates[step]) / _MEMORY


def attach(pool: ExpertPool, gates: Sequence[Gate]) -> list[LookAhead]:
    """A look-ahead from each of the `gates` (layers in order) to the next; to none if the pool does without."""
    experience = [Experience(gates[0].router.spec.experts, gates[0].router.spec.top_k)] if gates else []
    later = [gates[i + 1 : i + 2] if pool.looks_ahead else [] for i in range(len(gates))]
    return [LookAhead(pool, gate, after, experience) for gate, after in zip(gates, later, strict=True)]
