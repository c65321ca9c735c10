"""How fast a pack will be, from figures: what the cache will hit, what that reads, and how long it takes.

One token takes `compute + misses x time to read one`. Both are measured by `lean tune`; hit rates come from replaying
the pack's own trace through the cache's policy. Where a figure is missing a stated assumption takes its place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from leanmoe.engine.tuning import TRACE, Measured
from leanmoe.errors import LeanError
from leanmoe.experts.policy import Phase, policy_named
from leanmoe.experts.predict import Transitions
from leanmoe.experts.simulate import replay
from leanmoe.experts.slots import SlotPlan
from leanmoe.experts.trace import Request, RoutingTrace
from leanmoe.units import format_bytes

# Hit rates of `adaptive` on the Qwen3-30B-A3B trace of docs/experts.md, by residency.
_PUBLISHED = dict(
    zip(
        (0.0, 0.03, 0.06, 0.12, 0.18, 0.24, 0.36, 0.5, 1.0),
        (0.0, 0.291, 0.444, 0.643, 0.756, 0.833, 0.925, 0.963, 1.0),
        strict=True,
    )
)
_DISK = 1.0e9
_WEIGHTS = 6.0e9
_FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one decoded token: hit rate (0 to 1), bytes read, seconds computing and waiting. `assumes` says from what."""

    hit_rate: float
    read_bytes: float
    compute_seconds: float
    read_seconds: float
    assumes: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return 1 / (self.compute_seconds + self.read_seconds)


def estimate(
    slots: Sequence[SlotPlan],
    top_k: int,
    *,
    touched: int,
    trace: RoutingTrace | None,
    measured: Measured | None,
    policy: str,
    readers: int,
) -> Estimate:
    """What a token will take with these slots (one plan for each device).

    `touched`: bytes of weights that a token computes with, to estimate the time where it was not `measured`.
    """
    classes = [c for plan in slots for c in plan.classes]
    picks = sum(c.working_set for c in classes)
    mean = sum(c.working_set * c.size for c in classes) / max(picks, 1)
    assumes = []
    if all(plan.fits for plan in slots):
        hit_rate = 1.0
    elif trace is not None:
        hit_rate = replayed(trace, slots, policy)
        decoded = trace.tokens[Phase.DECODE]
        assumes.append(
            f"routing like that of the pack's trace ({decoded} tokens; `lean trace` records another)"
        )
    else:
        hit_rate = _interpolated(sum(c.bytes for c in classes) / sum(c.size * c.experts for c in classes))
        assumes.append("routing as local as Qwen3-30B-A3B's in chat (`lean trace` records this model's own)")
    missed = picks * (1 - hit_rate)
    if measured is None:
        assumes.append(
            f"a disk of {format_bytes(int(_DISK))}/s and {format_bytes(int(_WEIGHTS))} of weights computed a second "
            "(`lean tune` measures both)"
        )
        compute, rate = touched / _WEIGHTS, _DISK
    else:
        assumes.append("disk and processor as `lean tune` measured them")
        # Reads that go on at once: those that one layer misses, if it misses any.
        some = 1 - hit_rate**top_k
        at_once = min(readers, max(1, round(top_k * (1 - hit_rate) / some))) if some > 0 else 1
        compute, rate = measured.compute_seconds, _rate(measured, at_once)
    return Estimate(hit_rate, missed * mean, compute, missed * mean / rate, tuple(assumes))


def pack_trace(pack: Path) -> RoutingTrace | None:
    """The pack's own trace, if there is one of some length that can be used."""
    try:
        trace = RoutingTrace.load(pack / TRACE)
    except (LeanError, OSError):
        return None
    return trace if trace.tokens[Phase.DECODE] >= _FEWEST_TOKENS else None


def replayed(trace: RoutingTrace, slots: Iterable[SlotPlan], policy: str) -> float:
    """The hit rate of a trace's second half in decode, once the first has filled the slots.

    Raises `ValueError` if the trace has other layers than the slots.
    """
    requests = list(trace.requests())
    steps = [r for r in requests if r.phase is Phase.DECODE]
    half = len(requests) - len(steps) // 2
    kind = policy_named(policy)
    hits = lookups = 0
    for plan in slots:
        mine = {layer for c in plan.classes for layer in c.layers}
        if not mine <= set(trace.layers):
            raise ValueError("the trace is of a model with other layers")
        predictor = {i: trace.layers[i].experts for i in sorted(mine)}

        def run(
            part: Sequence[Request], plan: SlotPlan = plan, experts: dict[int, int] = predictor
        ) -> tuple[int, int]:
            done = replay(part, plan, kind, Transitions(experts) if kind.wants_predictions else None).total
            return done.hits, done.lookups

        here = [r for r in requests if r.layer in mine]
        before = [r for r in requests[:half] if r.layer in mine]
        (h1, n1), (h0, n0) = run(here), run(before)
        hits, lookups = hits + h1 - h0, lookups + n1 - n0
    return hits / lookups if lookups else 0.0


def _interpolated(resident: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(_PUBLISHED.items()):
        if resident <= x1:
            return y0 + (y1 - y0) * (resident - x0) / (x1 - x0)
    return 1.0


def _rate(measured: Measured, threads: int) -> float:
    """Bytes a second with so many threads; of the next fewer that was measured."""
    known = [n for n in measured.read_rates if n <= threads] or [min(measured.read_rates)]
    return measured.read_rates[max(known)]
