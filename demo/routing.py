"""Routers for a model whose experts are copies: directions of the hidden state that change from text to text."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# How much of the tokens before is mixed into each state before clustering. Routers of trained models send
# neighbouring tokens to the same experts more often than chance would; 0.5 gives about as much of that.
MEMORY = 0.5
# Standard deviation of the router's logits over tokens and experts: top-2 weights far from equal, not one-hot.
LOGIT_STD = 2.0
TOP_K = 2


def fit_router(states: torch.Tensor, windows: int, experts: int, seed: int) -> torch.Tensor:
    """A router matrix `[experts, width]` from what one layer's FFN reads, `[windows * T, width]`.

    The rows are centroids (spherical k-means) of the states, averaged over the preceding tokens and stripped of
    their common direction, which carries no information and would make all experts' logits alike.
    """
    common = F.normalize(states.mean(dim=0), dim=0)
    varying = states - (states @ common)[:, None] * common
    points = F.normalize(_with_memory(varying.view(windows, -1, states.shape[1])).flatten(0, 1), dim=1)
    centroids = _spherical_kmeans(points, experts, seed)
    return centroids * (LOGIT_STD / (states @ centroids.T).std())


def _with_memory(states: torch.Tensor) -> torch.Tensor:
    """Exponential average over the second dimension of `[windows, T, width]`."""
    out = states.clone()
    for t in range(1, states.shape[1]):
        out[:, t] = MEMORY * out[:, t - 1] + (1 - MEMORY) * states[:, t]
    return out


def _spherical_kmeans(points: torch.Tensor, count: int, seed: int, rounds: int = 20) -> torch.Tensor:
    """Unit centroids `[count, width]` of unit `points`; one that attracts none restarts at a random point.

    Starts as k-means++ does: each first centroid is a point drawn in proportion to its distance to the others.
    """
    generator = torch.Generator().manual_seed(seed)
    centroids = points[torch.randint(len(points), (1,), generator=generator)]
    distance = torch.full((len(points),), 2.0)
    for _ in range(count - 1):
        distance = torch.minimum(distance, (1 - points @ centroids[-1]).clamp_min(1e-9))
        centroids = torch.cat([centroids, points[distance.multinomial(1, generator=generator)]])
    for _ in range(rounds):
        nearest = (points @ centroids.T).argmax(dim=1)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        empty = torch.bincount(nearest, minlength=count) == 0
        spare = torch.randint(len(points), (int(empty.sum()),), generator=generator)
        sums[empty] = points[spare]
        centroids = F.normalize(sums, dim=1)
    return centroids


@dataclass(frozen=True, slots=True)
class RoutingStats:
    """How one layer routes some text. Shares are fractions of the (token, expert) choices."""

    unused: int
    effective: float
    largest_share: float
    repeated: float
    repeated_by_chance: float


def routing_stats(router: torch.Tensor, states: torch.Tensor, windows: int) -> RoutingStats:
    """Statistics of `router` on `states` `[windows * T, width]`.

    `effective` is the exponential of the usage's entropy; `repeated` is how often an expert was also chosen by
    the token before, and `repeated_by_chance` what it would be if tokens came in random order.
    """
    chosen = (states @ router.T).topk(TOP_K, dim=1).indices
    usage = torch.bincount(chosen.flatten(), minlength=len(router)) / chosen.numel()
    tokens = chosen.view(windows, -1, TOP_K)  # [W, T, K]
    again = (tokens[:, 1:, :, None] == tokens[:, :-1, None, :]).any(dim=-1)
    return RoutingStats(
        unused=int((usage == 0).sum()),
        effective=float(torch.special.entr(usage).sum().exp()),
        largest_share=float(usage.max()),
        repeated=float(again.float().mean()),
        repeated_by_chance=float(TOP_K * usage.square().sum()),
    )
