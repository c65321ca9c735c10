"""The best that any eviction could have done on a trace, which needs to know the future.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966:
evict what is used again last.
"""

import heapq
from collections.abc import Mapping, Sequence

from leanmoe.experts.policy import Key, Phase
from leanmoe.experts.trace import Request

_NEVER = 1 << 62


def best_hits(requests: Sequence[Request], sizes: Mapping[int, int], budget: int) -> dict[int, int]:
    """The decode hits of each layer of `sizes` (bytes of an expert) by Belady's rule in `budget` bytes.

    An expert hits if it was kept since its last use. All of a request is looked up at once, and what it used
    need not be kept. Between two requests at most `budget` bytes are kept; what lies over them is given up,
    the furthest next use first. What only a prompt would use again is not kept, since prompts do not count.

    With experts of one size this is the most hits possible, hence a bound on every policy without prefetch:
    a largest set of intervals of which no more than the slots overlap (Carlisle and Lloyd, Discrete Applied
    Mathematics 59, 1995). With several sizes in one budget it is a schedule that can be followed, and no
    bound: it may be beaten by giving up one large expert for several small ones, and the best schedule is
    NP-hard to find (Chrobak et al., Journal of Scheduling 15, 2012).
    """
    mine = [r for r in requests if r.layer in sizes]
    hits = dict.fromkeys(sizes, 0)
    kept: dict[Key, int] = {}
    ahead: list[tuple[int, Key]] = []  # (minus the next use, key), with entries that are out of date
    used = 0
    for request, uses in zip(mine, _following(mine), strict=True):
        layer = request.layer
        keys = [(layer, expert) for expert in request.experts]
        found = sum(key in kept for key in keys)
        used -= found * sizes[layer]
        if request.phase is Phase.DECODE:
            hits[layer] += found
        for key, use in zip(keys, uses, strict=True):
            kept.pop(key, None)
            if use != _NEVER and mine[use].phase is Phase.DECODE:
                kept[key] = use
                used += sizes[layer]
                heapq.heappush(ahead, (-use, key))
        while used > budget:
            use, key = heapq.heappop(ahead)
            if kept.get(key) == -use:
                del kept[key]
                used -= sizes[key[0]]
    return hits


def _following(requests: Sequence[Request]) -> list[list[int]]:
    """For each expert of each request, the request that uses it next, or `_NEVER`."""
    last: dict[Key, int] = {}
    following = []
    for i in range(len(requests) - 1, -1, -1):
        keys = [(requests[i].layer, expert) for expert in requests[i].experts]
        following.append([last.get(key, _NEVER) for key in keys])
        last |= dict.fromkeys(keys, i)
    following.reverse()
    return following
