"""The best that any eviction could have done on a trace, which needs to know the future.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966:
evict what is used again last.
"""

import heapq
from collections.abc import Sequence

from leanmoe.experts.policy import Key, Phase
from leanmoe.experts.slots import SlotPlan
from leanmoe.experts.trace import Request

_NEVER = 1 << 62


def best_hits(requests: Sequence[Request], plan: SlotPlan) -> dict[int, int]:
    """The decode hits of each layer under the best schedule that the slots of `plan` allow.

    An upper bound on every policy without prefetch, and reached by a schedule that may read an expert without
    keeping it. An expert hits if it was kept since its last use; between two requests a size class keeps at
    most as many as it has slots. All slots of a class being equal, giving up the use that lies furthest ahead
    whenever there are too many leaves the most hits (a largest set of intervals that can be coloured with as
    many colours as slots: Carlisle and Lloyd 1995). What only a prompt would use again is not kept, since
    only decode hits count.
    """
    hits = {layer: 0 for c in plan.classes for layer in c.layers}
    for c in plan.classes:
        mine = [r for r in requests if r.layer in c.layers]
        following = _following(mine)
        kept: dict[Key, int] = {}
        ahead: list[tuple[int, Key]] = []  # (minus the next use, key), with entries that are out of date
        for request, uses in zip(mine, following, strict=True):
            keys = [(request.layer, expert) for expert in request.experts]
            if request.phase is Phase.DECODE:
                hits[request.layer] += sum(key in kept for key in keys)
            for key, use in zip(keys, uses, strict=True):
                kept.pop(key, None)
                if use != _NEVER and mine[use].phase is Phase.DECODE:
                    kept[key] = use
                    heapq.heappush(ahead, (-use, key))
            while len(kept) > c.slots:
                use, key = heapq.heappop(ahead)
                if kept.get(key) == -use:
                    del kept[key]
    return hits


def furthest_hits_in_bytes(requests: Sequence[Request], sizes: dict[int, int], budget: int) -> dict[int, int]:
    """The decode hits of each layer if one cache of `budget` bytes for all layers evicts the furthest next use.

    Experts come one at a time, prompts count as uses, and whatever is read is kept until evicted: the
    accounting of published replays. With experts of one size and no prompt nothing does better; with mixed
    sizes it is a feasible schedule and no bound, since the best one is NP-hard to find (Chrobak et al. 2012).
    """
    hits = dict.fromkeys(sizes, 0)
    flat = [(r.phase, (r.layer, expert)) for r in requests for expert in r.experts]
    following = [use for uses in _following([Request(p, k[0], (k[1],)) for p, k in flat]) for use in uses]
    kept: dict[Key, int] = {}
    ahead: list[tuple[int, Key]] = []
    used = 0
    for (phase, key), use in zip(flat, following, strict=True):
        if key in kept:
            hits[key[0]] += phase is Phase.DECODE
        else:
            while used + sizes[key[0]] > budget and ahead:
                next_use, victim = heapq.heappop(ahead)
                if kept.get(victim) == -next_use:
                    del kept[victim]
                    used -= sizes[victim[0]]
            used += sizes[key[0]]
        kept[key] = use
        heapq.heappush(ahead, (-use, key))
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
