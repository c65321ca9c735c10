"""All the experts of a model: its layers divided between the caches of one or more devices."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy.typing as npt
import torch

from leanmoe.errors import BudgetError, LeanError, UsageError
from leanmoe.experts.cache import Acquire, ExpertCache
from leanmoe.experts.device import open_device
from leanmoe.experts.policy import LRU, Key, Phase, Policy
from leanmoe.experts.predict import Transitions
from leanmoe.experts.prefetch import Prefetcher
from leanmoe.experts.profile import RoutingProfile
from leanmoe.experts.readers import Readers
from leanmoe.experts.slots import SlotClass, SlotPlan, plan_slots
from leanmoe.experts.stats import CacheStats
from leanmoe.experts.store import ExpertStore
from leanmoe.experts.throttle import (
    DEFAULT_LEVEL,
    Duel,
    Fixed,
    Predictor,
    Prefetch,
    Survey,
    highest_level,
)
from leanmoe.kernels import ResidentExperts
from leanmoe.pack import ExpertLayout, Manifest, Pack
from leanmoe.pack.digests import Verify

# Levels that are compared: of the higher ones every other would take as long to tell from its neighbour.
_SURVEYED = (0, 1, 2, 3, 5, 8)


class Observer(Protocol):
    """Told of every routing; `TraceRecorder` is one."""

    def record(
        self,
        phase: Phase,
        layer: int,
        experts: npt.NDArray[Any],
        weights: npt.NDArray[Any],
        probabilities: npt.NDArray[Any],
    ) -> None:
        """The router of `layer` gave N tokens `experts` and `weights` [N, top-k], probabilities [N, E]."""


class Placement(NamedTuple):
    """A device, the bytes of it that expert slots may use, and its layers (None: a share in proportion)."""

    device: torch.device | str
    budget: int
    layers: Sequence[int] | None = None


class ExpertPool:
    """Where the decoder gets its experts. Any number of threads may use it; close it when done.

    `caches` serve disjoint sets of layers; `readers` is closed with the pool.
    """

    def __init__(
        self,
        store: ExpertStore,
        caches: Sequence[ExpertCache],
        readers: Readers,
        *,
        prefetch: Prefetch = "off",
        prefetch_level: int | None = None,
        predictor: Predictor = "gate",
        observers: Sequence[Observer] = (),
    ) -> None:
        self.caches = tuple(caches)
        self._store = store
        self._readers = readers
        self._layers = {layer.layer: layer for layer in store.pack.manifest.layers}
        self._cache_of = {layer: c for c in caches for group in c.plan.classes for layer in group.layers}
        self._observers = tuple(observers)
        policies = [policy for cache in caches for policy in cache.policies]
        self._wants_prompts = any(cache.wants_prompts for cache in caches)
        self._wants_router = any(policy.wants_router for policy in policies)
        self._wants_predictions = any(policy.wants_predictions for policy in policies)
        self._prefetcher = self._make_prefetcher(prefetch, prefetch_level or DEFAULT_LEVEL)
        self.looks_ahead = self.predicting and predictor != "transitions"
        """Whether the model should apply the next layers' routers."""
        self._transitions = None
        self._learning = threading.Lock()
        if self.predicting and predictor != "gate":
            self._transitions = Transitions({i: m.expert_count for i, m in self._layers.items()})

    @classmethod
    def open(
        cls,
        pack: Pack,
        placements: Sequence[Placement],
        *,
        readers: int = 4,
        verify: Verify = "first",
        policy: Callable[[SlotClass], Policy] = LRU,
        prefetch: Prefetch = "off",
        prefetch_level: int | None = None,
        predictor: Predictor = "gate",
        observers: Sequence[Observer] = (),
        direct: bool = True,
    ) -> Self:
        """A pool over `pack` with one cache per placement and `readers` reading threads for all of them.

        `prefetch` says whether experts are read before they are asked for: "off", "on" (always `prefetch_level`), or
        "auto" (as much as makes tokens faster). `predictor` says from what: the next layers' routers applied
        to the present state ("gate"), what followed the present picks so far ("transitions"), or the latter
        from two layers ahead, confirmed or taken back by the former ("both"). `observers` are told of every
        routing.

        Raises `BudgetError` if a budget is below its floor, `UsageError` if the placements do not name every
        layer once, `UnsupportedError` for a device that is not there.
        """
        plans = plan_placements(pack.manifest, placements)
        store = ExpertStore(pack, verify=verify, direct=direct)
        largest = max((c.size for plan in plans for c in plan.classes), default=1)
        devices = [open_device(torch.device(p.device), readers, largest) for p in placements]
        threads = Readers(readers)
        try:
            caches = [ExpertCache(store, p, d, threads, policy) for p, d in zip(plans, devices, strict=True)]
        except BaseException:
            threads.close()
            raise
        return cls(
            store,
            caches,
            threads,
            prefetch=prefetch,
            prefetch_level=prefetch_level,
            predictor=predictor,
            observers=observers,
        )

    def acquire(self, layer: int, experts: Sequence[int], phase: Phase = Phase.DECODE) -> Acquire:
        """Groups of leases for the distinct `experts` of `layer`, as they become ready; see `ExpertCache`."""
        return self._cache_of[layer].acquire(layer, experts, phase)

    def observes(self, phase: Phase) -> bool:
        """Whether `observe` does anything in this phase."""
        wanted = {Phase.PREFILL: self._wants_prompts, Phase.DECODE: self._wants_router}
        return bool(self._observers) or wanted[phase]

    @property
    def predicting(self) -> bool:
        """Whether `visit` and `expect` may ever do anything."""
        return self._prefetcher is not None or self._wants_predictions

    @property
    def expecting(self) -> bool:
        """Whether `expect` does anything for the token being computed."""
        return self._wants_predictions or (self._prefetcher is not None and self._prefetcher.active)

    def observe(
        self,
        layer: int,
        phase: Phase,
        experts: npt.NDArray[Any],
        weights: npt.NDArray[Any],
        probabilities: npt.NDArray[Any],
    ) -> None:
        """Before `acquire`: the router of `layer` gave N tokens `experts` and `weights` [N, top-k].

        `probabilities` [N, E] are those of every expert.
        """
        if self._wants_prompts and phase is Phase.PREFILL:
            self._cache_of[layer].on_prompt(layer, experts)
        if self._wants_router and phase is Phase.DECODE:
            self._cache_of[layer].on_router(layer, probabilities)
        for observer in self._observers:
            observer.record(phase, layer, experts, weights, probabilities)

    def visit(self, layer: int, phase: Phase, experts: Sequence[int]) -> None:
        """After `acquire`: the router of `layer` picked `experts`, so what was expected of it is over."""
        if self._prefetcher is not None:
            self._prefetcher.visit(layer, phase, experts)
        if self._transitions is not None and phase is Phase.DECODE:
            with self._learning:
                self._transitions.observe(layer, experts)
                ahead = list(self._transitions.ahead()) if self.expecting else []
            for target, chances in ahead[1:] if self.looks_ahead else ahead:
                self.expect(target, chances)

    def expect(self, layer: int, chances: npt.NDArray[Any]) -> None:
        """A predictor's word: `layer` will pick each of its experts with these `chances`, [experts] in 0 to 1.

        A later word on the same layer takes the place of an earlier one.
        """
        if self._wants_predictions:
            self._cache_of[layer].on_predict(layer, chances)
        if self._prefetcher is not None:
            self._prefetcher.expect(layer, chances)

    def warm(self, keys: Iterable[Key], seconds: float) -> list[Future[bool]]:
        """Reads experts into free slots in the background, for `seconds` from now at most, behind all else.

        As `preload`, but what has not begun by then is not read, and its future is False.
        """
        end = time.monotonic() + seconds
        return [future for key in keys for future in self._cache_of[key[0]].preload([key], until=end)]

    def lacks(self, layer: int) -> bool:
        """Whether a long prompt should say what it will ask of `layer`; see `ExpertCache.lacks`."""
        return self._cache_of[layer].lacks(layer)

    def layout(self, layer: int) -> ExpertLayout:
        """Where gate, up and down lie inside each lease's `data` for `layer`, and in what order their bytes are."""
        return self._cache_of[layer].layouts[layer]

    def residents(self, layer: int) -> ResidentExperts | None:
        """Where the experts of `layer` are, for kernels that look for themselves; see `ExpertCache.residents`.

        None too where what is acquired is told to a predictor.
        """
        return None if self.predicting else self._cache_of[layer].residents(layer)

    def preload(self, keys: Iterable[Key]) -> list[Future[bool]]:
        """Reads experts into free slots in the background, in this order; see `ExpertCache.preload`."""
        return [future for key in keys for future in self._cache_of[key[0]].preload([key])]

    def load_all(self) -> int:
        """Fills the free slots, layer by layer, and returns how many experts were read.

        With `plan.fits` every expert is resident afterwards. Raises the first `ExpertReadError`, or
        `LeanError` if the pool is closed meanwhile.
        """
        keys = [(m.layer, expert) for m in self._layers.values() for expert in range(m.expert_count)]
        try:
            return sum(future.result() for future in self.preload(keys))
        except CancelledError:
            raise LeanError("the expert pool was closed while loading") from None

    @property
    def plans(self) -> tuple[SlotPlan, ...]:
        """The slots of each cache."""
        return tuple(cache.plan for cache in self.caches)

    @property
    def stats(self) -> CacheStats:
        """The counts of all caches together."""
        counted = sum((cache.stats for cache in self.caches), CacheStats())
        return replace(counted, reading_seconds=self._store.reading_seconds)

    def resident(self) -> list[Key]:
        """The experts whose bytes are in a slot now, on any device."""
        return [key for cache in self.caches for key in cache.resident()]

    def seed(self, profile: RoutingProfile) -> None:
        """Tells the predictor what followed what before this process began."""
        if self._transitions is not None:
            with self._learning:
                self._transitions.seed(profile)

    def survey_prefetch(self) -> Survey:
        """Lets every level of reading ahead, none included, take its turn from now on, and returns the account.

        Raises `UsageError` if the pool was not opened to prefetch, or nothing can be: all experts have slots.
        """
        if self._prefetcher is None:
            raise UsageError("nothing can be read ahead: prefetch is off, or every expert has a slot")
        highest = highest_level(self._readers.count)
        survey = Survey([level for level in _SURVEYED if level <= highest])
        self._prefetcher.regulate(survey)
        return survey

    def _make_prefetcher(self, mode: Prefetch, level: int) -> Prefetcher | None:
        # Where every expert has a slot there is nothing to gain: demand and warm start fill them once.
        if mode == "off" or len(self._layers) < 2 or all(plan.fits for plan in self.plans):
            return None
        highest = highest_level(self._readers.count)
        throttle = Duel(highest) if mode == "auto" else Fixed(min(level, highest))
        return Prefetcher(self._cache_of, self._readers, throttle)

    def close(self) -> None:
        """Fails whoever waits, ends the reading threads and frees the slots; may be called again."""
        for cache in self.caches:
            cache.close()
        self._readers.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan_placements(manifest: Manifest, placements: Sequence[Placement]) -> list[SlotPlan]:
    """The slots of each placement, from the manifest alone.

    Raises `BudgetError` (naming the device) or `UsageError` as `ExpertPool.open` does.
    """
    sizes = {layer.layer: layer.layout.file_bytes for layer in manifest.layers}
    counts = {layer.layer: layer.expert_count for layer in manifest.layers}
    given = [p.layers for p in placements if p.layers is not None]
    if not given:
        shares = split_layers({i: sizes[i] * counts[i] for i in sizes}, [p.budget for p in placements])
    elif len(given) == len(placements) and sorted(i for share in given for i in share) == sorted(sizes):
        shares = [tuple(share) for share in given]
    else:
        raise UsageError(
            f"placements name the layers {[list(share) for share in given]}, but each of the layers "
            f"{sorted(sizes)} must be named once, or none at all"
        )
    plans = []
    for p, share in zip(placements, shares, strict=True):
        try:
            plan = plan_slots(
                {i: sizes[i] for i in share},
                {i: counts[i] for i in share},
                manifest.expert_used_count,
                p.budget,
            )
        except BudgetError as error:
            raise BudgetError(f"{p.device}: {error}") from None
        plans.append(plan)
    return plans


def split_layers(layer_bytes: Mapping[int, int], budgets: Sequence[int]) -> list[tuple[int, ...]]:
    """Divides the layers, in order, into a run per budget, with expert bytes in proportion to the budgets."""
    shares: list[list[int]] = [[] for _ in budgets]
    total_bytes, total_budget = sum(layer_bytes.values()), sum(budgets)
    before, device, reach = 0, 0, budgets[0] if budgets else 0
    for layer in sorted(layer_bytes):
        # A layer belongs to the device whose part of the whole its middle falls into.
        middle = before + layer_bytes[layer] / 2
        while device + 1 < len(budgets) and middle * total_budget >= reach * total_bytes:
            device += 1
            reach += budgets[device]
        shares[device].append(layer)
        before += layer_bytes[layer]
    return [tuple(share) for share in shares]
