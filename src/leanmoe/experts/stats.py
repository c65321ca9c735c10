"""What the cache counted. All counts are exact and independent of the clock, except the stall."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Lookups of one layer, by what became of them.

    A *hit* was resident; a *joined* one was being read already; a *miss* had to be read for this acquire.
    """

    hits: int = 0
    joined: int = 0
    misses: int = 0

    @property
    def lookups(self) -> int:
        return self.hits + self.joined + self.misses

    @property
    def hit_rate(self) -> float:
        """Hits over lookups; 0.0 before the first lookup."""
        return self.hits / self.lookups if self.lookups else 0.0

    def __add__(self, other: "LayerStats") -> "LayerStats":
        return LayerStats(self.hits + other.hits, self.joined + other.joined, self.misses + other.misses)

    def __sub__(self, other: "LayerStats") -> "LayerStats":
        return LayerStats(self.hits - other.hits, self.joined - other.joined, self.misses - other.misses)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. `later - earlier` is what happened between two; `a + b` adds up caches.

    `reads` and `read_bytes` count expert files that arrived whole (on demand or preloaded); `stall_seconds`
    is the time for which acquires waited with nothing to compute, added up over threads.
    """

    layers: Mapping[int, LayerStats] = field(default_factory=dict)
    reads: int = 0
    read_bytes: int = 0
    evictions: int = 0
    stall_seconds: float = 0.0

    @property
    def total(self) -> LayerStats:
        """The lookups of all layers together."""
        return sum(self.layers.values(), LayerStats())

    @property
    def hit_rate(self) -> float:
        """Hits over lookups in all layers; 0.0 before the first lookup."""
        return self.total.hit_rate

    def __add__(self, other: "CacheStats") -> "CacheStats":
        none = LayerStats()
        layers = sorted({*self.layers, *other.layers})
        return CacheStats(
            {i: self.layers.get(i, none) + other.layers.get(i, none) for i in layers},
            self.reads + other.reads,
            self.read_bytes + other.read_bytes,
            self.evictions + other.evictions,
            self.stall_seconds + other.stall_seconds,
        )

    def __sub__(self, earlier: "CacheStats") -> "CacheStats":
        none = LayerStats()
        return CacheStats(
            {i: now - earlier.layers.get(i, none) for i, now in self.layers.items()},
            self.reads - earlier.reads,
            self.read_bytes - earlier.read_bytes,
            self.evictions - earlier.evictions,
            self.stall_seconds - earlier.stall_seconds,
        )


class Counters:
    """The live counts behind `CacheStats`; the owner's lock guards them."""

    def __init__(self, layers: Iterable[int]) -> None:
        self._layers = {layer: [0, 0, 0] for layer in layers}
        self.reads = 0
        self.read_bytes = 0
        self.evictions = 0
        self.stall_seconds = 0.0

    def count(self, layer: int, hits: int, joined: int, misses: int) -> None:
        """Adds one acquire's lookups."""
        counts = self._layers[layer]
        counts[0] += hits
        counts[1] += joined
        counts[2] += misses

    def snapshot(self) -> CacheStats:
        layers = {layer: LayerStats(*counts) for layer, counts in self._layers.items()}
        return CacheStats(layers, self.reads, self.read_bytes, self.evictions, self.stall_seconds)
