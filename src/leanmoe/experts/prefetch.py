"""Reading experts before the router asks for them.

Predictors say what a layer ahead will probably pick (`expect`); the latest word on a layer counts. What is
likely enough and not resident is queued behind every demand read, and taken back when a later prediction no
longer names it or when the layer is reached (`visit`): then demand knows better. A slot is claimed only when
a reader has time for the read, so a queue costs nothing. How much is read at once is up to a `Throttle`.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from leanmoe.experts.cache import ExpertCache
from leanmoe.experts.policy import Key, Phase
from leanmoe.experts.readers import Readers
from leanmoe.experts.throttle import Throttle, allowance

LEAST_CHANCE = 0.3
"""A read ahead must be asked for with this chance."""
_BINS = 10
_MEMORY = 256  # expectations that a bin's rate is the mean over


class Prefetcher:
    """Queues reads of what is expected; `caches` serve the layers. Any number of threads may use it.

    An expert that is likely is mostly resident already, so one that is not is less likely to be picked than
    its predictor says. How often such experts were picked is learned, for each tenth of the predicted chance.
    """

    def __init__(
        self,
        caches: Mapping[int, ExpertCache],
        readers: Readers,
        throttle: Throttle,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._caches = caches
        self._readers = readers
        self._throttle = throttle
        self._clock = clock
        self._lock = threading.Lock()
        self._row = {layer: row for row, layer in enumerate(sorted(caches))}
        self._queued: dict[int, set[int]] = {layer: set() for layer in caches}
        self._expected: dict[int, dict[int, int]] = {layer: {} for layer in caches}  # expert -> bin
        self._rates = [(b + 0.5) / _BINS for b in range(_BINS)]
        self._weights = [4] * _BINS
        self._visits = 0  # of layers, in decoding
        self._last = -1  # row visited last
        self._rows_seen = 0
        self._began = self._ended = 0.0
        self._before = (0, 0)
        readers.allow_ahead(allowance(throttle.level))

    def regulate(self, throttle: Throttle) -> None:
        """Puts `throttle` in place of the one that said how much is read."""
        with self._lock:
            self._throttle = throttle
            self._readers.allow_ahead(allowance(throttle.level))

    @property
    def active(self) -> bool:
        """Whether predictions are of any use for the token being computed."""
        return self._throttle.level > 0

    def visit(self, layer: int, phase: Phase, experts: Sequence[int]) -> None:
        """The router of `layer` picked `experts`, which have just been acquired."""
        row = self._row[layer]
        with self._lock:
            if phase is not Phase.DECODE:
                self._rows_seen, self._last = 0, -1  # a token beside a prompt is not to be compared
                return
            now = self._clock()
            if row <= self._last or self._last < 0:
                self._begin_token(now)
            self._last, self._ended = row, now
            self._rows_seen += 1
            self._visits += 1
            if self._queued[layer]:
                self._take_back(layer, list(self._queued[layer]))
            if self._expected[layer]:
                self._learn(self._expected[layer], experts)

    def expect(self, layer: int, chances: npt.NDArray[Any]) -> None:
        """The next visit of `layer` will pick each of its experts with these `chances`, [experts] in 0 to 1."""
        if not self._throttle.level:
            return
        with self._lock:
            cache, queued, expected = self._caches[layer], self._queued[layer], self._expected[layer]
            due = self._visits + (self._row[layer] - self._last) % len(self._row)
            missing = {}
            for expert in np.flatnonzero(chances >= 1 / _BINS).tolist():
                if not cache.holds((layer, expert)):
                    expected[expert] = min(_BINS - 1, int(chances[expert] * _BINS))
                    chance = self._rates[expected[expert]]
                    if chance >= LEAST_CHANCE:
                        missing[expert] = chance
            if queued:
                self._take_back(layer, [expert for expert in queued if expert not in missing])
            for expert, chance in missing.items():
                if expert not in queued:
                    queued.add(expert)
                    read = partial(self._read, cache, (layer, expert))
                    if not self._readers.submit_ahead((layer, expert), due - chance / 2, read):
                        queued.discard(expert)

    def _learn(self, expected: dict[int, int], picked: Sequence[int]) -> None:
        for expert, b in expected.items():
            self._weights[b] = min(self._weights[b] + 1, _MEMORY)
            self._rates[b] += ((expert in picked) - self._rates[b]) / self._weights[b]
        expected.clear()

    def _read(self, cache: ExpertCache, key: Key) -> None:
        with self._lock:
            self._queued[key[0]].discard(key[1])
        cache.read_ahead(key)

    def _take_back(self, layer: int, experts: Sequence[int]) -> None:
        taken = [expert for expert in experts if self._readers.cancel_ahead((layer, expert))]
        if taken:
            self._queued[layer].difference_update(taken)
            self._caches[layer].drop_ahead(layer, len(taken))

    def _begin_token(self, now: float) -> None:
        """Tells the throttle of the last token, if it passed through every layer, and asks how to go on."""
        totals = self._totals()
        if self._rows_seen == len(self._row) > 1:
            issued, used = totals[0] - self._before[0], totals[1] - self._before[1]
            self._throttle.token(self._ended - self._began, issued, used)
            self._readers.allow_ahead(allowance(self._throttle.level))
        self._before = totals
        self._began, self._rows_seen = now, 0

    def _totals(self) -> tuple[int, int]:
        counts = [cache.ahead_totals() for cache in set(self._caches.values())]
        return sum(issued for issued, _ in counts), sum(used for _, used in counts)
