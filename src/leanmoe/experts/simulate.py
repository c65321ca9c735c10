"""Replays a routing trace through a policy and a budget, with no bytes read: what a cache would have hit.

The policies are the very classes that the cache runs, and are called as the cache calls them for one request
at a time; budgets become slots by the same arithmetic.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from leanmoe.errors import BudgetError
from leanmoe.experts.belady import best_hits
from leanmoe.experts.policy import Key, Phase, Policy
from leanmoe.experts.predict import Transitions
from leanmoe.experts.slots import SlotClass, SlotPlan, plan_slots
from leanmoe.experts.stats import LayerStats
from leanmoe.experts.trace import Request, RoutingTrace

NewPolicy = Callable[[SlotClass], Policy]


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a trace's look-ups in decode, per layer.

    `read_bytes` is what decode missed; `most_bytes` the most that was resident at once, in any phase.
    """

    layers: Mapping[int, LayerStats]
    read_bytes: int
    most_bytes: int

    @property
    def total(self) -> LayerStats:
        """All layers together."""
        return sum(self.layers.values(), LayerStats())

    @property
    def hit_rate(self) -> float:
        """Decode hits over decode look-ups, 0 to 1."""
        return self.total.hit_rate


class _Shelf:
    """The slots of one size class, or all layers in bytes, as the cache's shelves are."""

    def __init__(self, policy: Policy, sizes: Mapping[int, int], room: int) -> None:
        self.policy = policy
        self.resident: set[Key] = set()
        self.used = self.most = 0
        self._sizes, self._room = sizes, room
        self._wave = max(1, policy.slots.floor // 2)

    def serve(self, request: Request, phase: Phase) -> int:
        """Makes all of the request's experts resident, in waves if need be; how many were so before."""
        policy, layer = self.policy, request.layer
        keys = [(layer, expert) for expert in request.experts]
        missing = [key for key in keys if key not in self.resident]
        pinned = set(keys) - set(missing) if phase is Phase.DECODE else set()
        if phase is Phase.DECODE and policy.wants_router and request.probabilities is not None:
            policy.on_router(layer, request.probabilities)
        if phase is Phase.PREFILL and policy.wants_prompts and request.picks is not None:
            policy.on_prompt(layer, request.picks)
        policy.on_use(keys, phase)
        for key in missing:
            if phase is Phase.PREFILL and len(pinned) >= self._wave:
                pinned.clear()  # a prompt's experts are given back as soon as they were used
            while self.used + self._sizes[layer] > self._room:
                victim = policy.victim(key, phase, pinned.__contains__)
                if victim is None:
                    pinned.clear()  # the next wave waits for this one
                    continue
                self.resident.remove(victim)
                self.used -= self._sizes[victim[0]]
                policy.on_evict(victim)
            self.resident.add(key)
            self.used += self._sizes[layer]
            self.most = max(self.most, self.used)
            policy.on_insert(key, phase)
            pinned.add(key)
        return len(keys) - len(missing)


def replay(
    requests: Iterable[Request], plan: SlotPlan, policy: NewPolicy, predictor: Transitions | None = None
) -> Replay:
    """Runs `requests` through the slots of `plan`, starting with none in use.

    `predictor` learns while the trace goes by, for policies that want predictions.
    """
    shelves: dict[int, _Shelf] = {}
    for c in plan.classes:
        shelf = _Shelf(policy(c), dict.fromkeys(c.layers, c.size), c.bytes)
        shelves |= dict.fromkeys(c.layers, shelf)
    sizes = {layer: c.size for c in plan.classes for layer in c.layers}
    return _drive(requests, shelves, sizes, predictor, scan=True)


def replay_in_bytes(
    requests: Iterable[Request],
    trace: RoutingTrace,
    budget: int,
    policy: NewPolicy,
    predictor: Transitions | None = None,
) -> Replay:
    """Runs `requests` through one cache of `budget` bytes for the experts of all layers and sizes.

    The accounting of published replays, to compare with: a prompt is treated like any other request. lean's
    own cache has slots (`replay`). Raises `BudgetError` if the budget does not hold one token's picks of each
    layer.
    """
    sizes = {i: facts.expert_bytes for i, facts in trace.layers.items()}
    counts = {i: facts.experts for i, facts in trace.layers.items()}
    if budget < (least := trace.top_k * max(sizes.values())):
        raise BudgetError(
            f"a budget of {budget} bytes is less than the {least} bytes of a layer's top {trace.top_k}"
        )
    total, mean = sum(counts.values()), trace.expert_bytes // sum(counts.values())
    working_set = sum(min(trace.top_k, n) for n in counts.values())
    as_class = SlotClass(mean, tuple(sorted(sizes)), total, trace.top_k, working_set, budget // mean)
    shelf = _Shelf(policy(as_class), sizes, budget)
    return _drive(requests, dict.fromkeys(sizes, shelf), sizes, predictor, scan=False)


def plan_for(trace: RoutingTrace, budget: int) -> SlotPlan:
    """The slots that `budget` bytes buy for the traced model. Raises `BudgetError` below the floor."""
    sizes = {i: facts.expert_bytes for i, facts in trace.layers.items()}
    counts = {i: facts.experts for i, facts in trace.layers.items()}
    return plan_slots(sizes, counts, trace.top_k, budget)


def replay_best(requests: Sequence[Request], plan: SlotPlan) -> Replay:
    """The most that any policy without prefetch could have hit in the slots of `plan`; see `best_hits`."""
    sizes = {layer: c.size for c in plan.classes for layer in c.layers}
    hits: dict[int, int] = {}
    for c in plan.classes:
        hits |= best_hits(requests, dict.fromkeys(c.layers, c.size), c.bytes)
    return _replay(hits, _picks(requests, sizes), sizes, plan.slot_bytes)


def replay_best_in_bytes(requests: Sequence[Request], trace: RoutingTrace, budget: int) -> Replay:
    """Belady's rule in the accounting of `replay_in_bytes`: no bound where sizes differ; see `best_hits`."""
    sizes = {i: facts.expert_bytes for i, facts in trace.layers.items()}
    return _replay(best_hits(requests, sizes, budget), _picks(requests, sizes), sizes, budget)


def _drive(
    requests: Iterable[Request],
    shelves: Mapping[int, _Shelf],
    sizes: Mapping[int, int],
    predictor: Transitions | None,
    *,
    scan: bool,
) -> Replay:
    """Serves the requests, and counts those of decode. `scan`: the policy is told which are a prompt's."""
    hits, picks = dict.fromkeys(shelves, 0), dict.fromkeys(shelves, 0)
    for request in requests:
        layer, shelf = request.layer, shelves[request.layer]
        found = shelf.serve(request, request.phase if scan else Phase.DECODE)
        if request.phase is Phase.DECODE:
            hits[layer] += found
            picks[layer] += len(request.experts)
            if predictor is not None and shelf.policy.wants_predictions:
                predictor.observe(layer, request.experts)
                for ahead, chances in predictor.ahead():
                    shelves[ahead].policy.on_predict(ahead, chances)
    return _replay(hits, picks, sizes, sum(shelf.most for shelf in set(shelves.values())))


def _picks(requests: Iterable[Request], layers: Iterable[int]) -> dict[int, int]:
    picks = dict.fromkeys(layers, 0)
    for request in requests:
        if request.phase is Phase.DECODE:
            picks[request.layer] += len(request.experts)
    return picks


def _replay(hits: Mapping[int, int], picks: Mapping[int, int], sizes: Mapping[int, int], most: int) -> Replay:
    layers = {i: LayerStats(hits=hits[i], misses=picks[i] - hits[i]) for i in sorted(hits)}
    return Replay(layers, sum(stats.misses * sizes[i] for i, stats in layers.items()), most)
