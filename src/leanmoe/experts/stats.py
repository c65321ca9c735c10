"""What the cache counted. All counts are exact and independent of the clock, except those of seconds."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Reads ahead of demand, by what became of them.

    `issued` were started. Of these `useful` ones were used while resident, `late` ones were asked for while
    they were being read, `wasted` ones were evicted unused (or failed); the others are still unused. `dropped`
    were expected but never started: the disk or the byte cap was full, no slot was worth less, demand came
    first, or a later prediction took them back. `read_bytes` are of those that arrived.
    """

    issued: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    dropped: int = 0
    read_bytes: int = 0

    @property
    def unused(self) -> int:
        """Issued ones whose fate is open (in a snapshot since the start, not in a difference of two)."""
        return self.issued - self.useful - self.late - self.wasted

    def __add__(self, other: "PrefetchStats") -> "PrefetchStats":
        return PrefetchStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "PrefetchStats") -> "PrefetchStats":
        return PrefetchStats(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


_NO_PREFETCH = PrefetchStats()


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Lookups of one layer, by what became of them.

    A *hit* was resident; a *joined* one was being read already; a *miss* had to be read for this acquire.
    `stall_seconds` is the time for which acquires waited with nothing to compute, added up over threads.
    """

    hits: int = 0
    joined: int = 0
    misses: int = 0
    stall_seconds: float = 0.0
    prefetch: PrefetchStats = _NO_PREFETCH

    @property
    def lookups(self) -> int:
        return self.hits + self.joined + self.misses

    @property
    def hit_rate(self) -> float:
        """Hits over lookups; 0.0 before the first lookup."""
        return self.hits / self.lookups if self.lookups else 0.0

    def __add__(self, other: "LayerStats") -> "LayerStats":
        return LayerStats(
            self.hits + other.hits,
            self.joined + other.joined,
            self.misses + other.misses,
            self.stall_seconds + other.stall_seconds,
            self.prefetch + other.prefetch,
        )

    def __sub__(self, other: "LayerStats") -> "LayerStats":
        return LayerStats(
            self.hits - other.hits,
            self.joined - other.joined,
            self.misses - other.misses,
            self.stall_seconds - other.stall_seconds,
            self.prefetch - other.prefetch,
        )


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. `later - earlier` is what happened between two; `a + b` adds up caches.

    `reads` and `read_bytes` count expert files that arrived whole, for whatever reason they were read; `warm_bytes` of
    them in the background, before there was any reason. `reading_seconds` is the time in which at least one read was
    in flight, whether anyone waited for it or not; checking digests is no part of it.
    """

    layers: Mapping[int, LayerStats] = field(default_factory=dict)
    reads: int = 0
    read_bytes: int = 0
    evictions: int = 0
    warm_bytes: int = 0
    reading_seconds: float = 0.0

    @property
    def read_rate(self) -> float:
        """Bytes that arrived in a second of reading; 0.0 before the first read."""
        return self.read_bytes / self.reading_seconds if self.reading_seconds else 0.0

    @property
    def total(self) -> LayerStats:
        """The lookups of all layers together."""
        return sum(self.layers.values(), LayerStats())

    @property
    def hit_rate(self) -> float:
        """Hits over lookups in all layers; 0.0 before the first lookup."""
        return self.total.hit_rate

    @property
    def stall_seconds(self) -> float:
        """Time for which acquires waited with nothing to compute, in all layers, added up over threads."""
        return self.total.stall_seconds

    @property
    def prefetch(self) -> PrefetchStats:
        """Reads ahead in all layers."""
        return self.total.prefetch

    def __add__(self, other: "CacheStats") -> "CacheStats":
        none = LayerStats()
        layers = sorted({*self.layers, *other.layers})
        return CacheStats(
            {i: self.layers.get(i, none) + other.layers.get(i, none) for i in layers},
            self.reads + other.reads,
            self.read_bytes + other.read_bytes,
            self.evictions + other.evictions,
            self.warm_bytes + other.warm_bytes,
            self.reading_seconds + other.reading_seconds,
        )

    def __sub__(self, earlier: "CacheStats") -> "CacheStats":
        none = LayerStats()
        return CacheStats(
            {i: now - earlier.layers.get(i, none) for i, now in self.layers.items()},
            self.reads - earlier.reads,
            self.read_bytes - earlier.read_bytes,
            self.evictions - earlier.evictions,
            self.warm_bytes - earlier.warm_bytes,
            self.reading_seconds - earlier.reading_seconds,
        )


class AheadCounts:
    """The live counts of one layer's reads ahead; see `PrefetchStats`."""

    __slots__ = ("dropped", "issued", "late", "read_bytes", "useful", "wasted")

    def __init__(self) -> None:
        self.issued = self.useful = self.late = self.wasted = self.dropped = self.read_bytes = 0

    def snapshot(self) -> PrefetchStats:
        if not self.issued and not self.dropped:
            return _NO_PREFETCH
        return PrefetchStats(self.issued, self.useful, self.late, self.wasted, self.dropped, self.read_bytes)


class Counters:
    """The live counts behind `CacheStats`; the owner's lock guards them."""

    def __init__(self, layers: Iterable[int]) -> None:
        self._layers = {layer: [0, 0, 0] for layer in layers}
        self._stalls = dict.fromkeys(self._layers, 0.0)
        self._ahead = {layer: AheadCounts() for layer in self._layers}
        self.reads = 0
        self.read_bytes = 0
        self.evictions = 0
        self.warm_bytes = 0

    def count(self, layer: int, hits: int, joined: int, misses: int) -> None:
        """Adds one acquire's lookups."""
        counts = self._layers[layer]
        counts[0] += hits
        counts[1] += joined
        counts[2] += misses

    def stalled(self, layer: int, seconds: float) -> None:
        """An acquire of `layer` waited with nothing to compute."""
        self._stalls[layer] += seconds

    def ahead(self, layer: int) -> AheadCounts:
        """The counts of the reads ahead for `layer`, to be added to."""
        return self._ahead[layer]

    def ahead_totals(self) -> tuple[int, int]:
        """Reads ahead issued, and those of them that were asked for."""
        counts = self._ahead.values()
        return sum(c.issued for c in counts), sum(c.useful + c.late for c in counts)

    def snapshot(self) -> CacheStats:
        layers = {
            layer: LayerStats(hits, joined, misses, self._stalls[layer], self._ahead[layer].snapshot())
            for layer, (hits, joined, misses) in self._layers.items()
        }
        return CacheStats(layers, self.reads, self.read_bytes, self.evictions, self.warm_bytes)
