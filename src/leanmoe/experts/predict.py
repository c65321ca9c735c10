"""Predicting which experts the layers ahead will pick, from the picks of the layers before."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from leanmoe.experts.profile import RoutingProfile

_Floats = npt.NDArray[np.float32]
# Picks of an expert seen before its own successors count as much as the layer's popularity.
_PRIOR_PICKS = 2.0
DISTANCES = 2
"""Layers that transitions foresee."""


class Transitions:
    """Learns, while a model runs, which experts of the next layers follow those of a layer.

    Tells, for each of the next `distances` layers, every expert's chance to be picked. Counts lose half their
    weight in `half_life` picks of an expert. Memory: layers x distances x experts^2 x 4 bytes.
    """

    half_life = 64.0
    # What a profile knows of an expert counts as at most this many picks: this text's own soon outweigh it.
    most_seeded = 32.0

    @staticmethod
    def nbytes(experts: Mapping[int, int], distances: int = DISTANCES) -> int:
        """The bytes of the tables for these layers."""
        return len(experts) * distances * max(experts.values(), default=0) ** 2 * 4

    def __init__(self, experts: Mapping[int, int], distances: int = DISTANCES) -> None:
        self._layers = sorted(experts)
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        self._experts = [experts[layer] for layer in self._layers]
        n, width = len(self._layers), max(self._experts)
        self._decay = np.float32(0.5 ** (1 / self.half_life))
        self._follow: _Floats = np.zeros((n, distances, width, width), np.float32)
        self._picked: _Floats = np.zeros((n, distances, width, 1), np.float32)
        self._popular: _Floats = np.zeros((n, width), np.float32)
        self._recent: list[tuple[int, npt.NDArray[np.intp]]] = []  # the latest layers of this token

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """The router of `layer` picked `experts`. A layer not above the last one begins a token."""
        row, picked = self._row[layer], np.array(experts)
        if self._recent and row <= self._recent[-1][0]:
            self._recent.clear()
        self._popular[row] *= self._decay
        self._popular[row, picked] += 1 - self._decay
        for before, sources in self._recent:
            if (distance := row - before - 1) < self._follow.shape[1]:
                follow, seen = self._follow[before, distance], self._picked[before, distance]
                follow[sources] *= self._decay
                seen[sources] = seen[sources] * self._decay + 1
                follow[np.ix_(sources, picked)] += 1
        self._recent.append((row, picked))
        del self._recent[: -self._follow.shape[1]]

    def seed(self, profile: RoutingProfile) -> None:
        """Starts from what a profile of the same model knows. Raises `ValueError` for other layers."""
        if list(profile.layers) != self._layers:
            raise ValueError(f"a profile of the layers {list(profile.layers)}; wanted {self._layers}")
        for row, layer in enumerate(self._layers):
            self._popular[row, : self._experts[row]] = profile.popularity(layer)
            picks = profile.counts[row][:, None]
            weight = np.minimum(picks, np.float32(self.most_seeded)) / np.maximum(picks, 1)
            for distance in range(min(self._follow.shape[1], len(self._layers) - 1 - row)):
                self._follow[row, distance] = profile.followers(row, distance) * weight
                self._picked[row, distance] = picks * weight

    def ahead(self) -> Iterator[tuple[int, _Floats]]:
        """From the picks observed last: each of the next layers, with the chance of its experts."""
        if not self._recent:
            return
        row, picked = self._recent[-1]
        for distance in range(min(self._follow.shape[1], len(self._layers) - 1 - row)):
            popular = self._popular[row + distance + 1]
            follow, seen = self._follow[row, distance, picked], self._picked[row, distance, picked]
            chances = ((follow + _PRIOR_PICKS * popular) / (seen + _PRIOR_PICKS)).mean(0)
            yield self._layers[row + distance + 1], chances[: self._experts[row + distance + 1]]
