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
from leanmoe.experts.predict import Transitions
from leanmoe.experts.readers import Readers
from leanmoe.experts.throttle import Throttle, allowance

LEAST_CHANCE = 0.35
"""A less likely expert is not read ahead."""
# From here on a guess takes the policy's least valuable slot, like a pick: most policies know nothing of the
# prediction, and would refuse an expert because it was rare up to now.
_SURE = 0.5


class Prefetcher:
    """Queues reads of what is expected; `caches` serve the layers. Any number of threads may use it.

    `transitions`, if given, expects what is two layers and more ahead, from the picks.
    """

    def __init__(
        self,
        caches: Mapping[int, ExpertCache],
        readers: Readers,
        throttle: Throttle,
        transitions: Transitions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._caches = caches
        self._readers = readers
        self._throttle = throttle
        self._transitions = transitions
        self._clock = clock
        self._lock = threading.Lock()
        self._row = {layer: row for row, layer in enumerate(sorted(caches))}
        self._queued: dict[int, dict[int, None]] = {layer: {} for layer in caches}
        self._visits = 0  # of layers, in decoding
        self._last = -1  # row visited last
        self._rows_seen = 0
        self._began = self._ended = 0.0
        self._before = (0, 0)
        readers.allow_ahead(allowance(throttle.level))

    @property
    def active(self) -> bool:
        """Whether predictions are of any use for the token being computed."""
        return self._throttle.level > 0

    def visit(self, layer: int, phase: Phase, experts: Sequence[int]) -> None:
        """The router of `layer` picked `experts`, which have just been acquired."""
        row = self._row[layer]
        with self._lock:
            if phase is not Phase.DECODE:
                self._rows_seen = 0  # a token beside a prompt is not to be compared
                self._last = -1
                return
            now = self._clock()
            if row <= self._last or self._last < 0:
                self._begin_token(now)
            self._last, self._ended = row, now
            self._rows_seen += 1
            self._visits += 1
            self._take_back(layer, list(self._queued[layer]))
            if self._transitions is not None:
                self._transitions.observe(layer, experts)
                if self._throttle.level:
                    for target, chances in self._transitions.ahead():
                        if self._row[target] > row + 1:
                            self._expect(target, chances)

    def expect(self, layer: int, chances: npt.NDArray[Any]) -> None:
        """The next visit of `layer` will pick each of its experts with these `chances`, [experts] in 0 to 1."""
        if self._throttle.level:
            with self._lock:
                self._expect(layer, chances)

    def _expect(self, layer: int, chances: npt.NDArray[Any]) -> None:
        cache, queued = self._caches[layer], self._queued[layer]
        likely = [e for e in np.flatnonzero(chances >= LEAST_CHANCE).tolist() if not cache.holds((layer, e))]
        if queued:
            self._take_back(layer, [expert for expert in queued if expert not in likely])
        due = self._visits + (self._row[layer] - self._last) % len(self._row)
        for expert in likely:
            if expert not in queued:
                chance = float(chances[expert])
                queued[expert] = None
                read = partial(self._read, cache, (layer, expert), sure=chance >= _SURE)
                if not self._readers.submit_ahead((layer, expert), due - chance / 2, read):
                    del queued[expert]

    def _read(self, cache: ExpertCache, key: Key, *, sure: bool) -> None:
        with self._lock:
            self._queued[key[0]].pop(key[1], None)
        cache.read_ahead(key, sure=sure)

    def _take_back(self, layer: int, experts: Sequence[int]) -> None:
        taken = [expert for expert in experts if self._readers.cancel_ahead((layer, expert))]
        if taken:
            for expert in taken:
                del self._queued[layer][expert]
            self._caches[layer].drop_ahead(layer, len(taken))

    def _begin_token(self, now: float) -> None:
        """Tells the throttle of the last token, if it passed through every layer, and asks how to go on."""
        if self._rows_seen == len(self._row) > 1:
            issued, used = self._totals()
            self._throttle.token(self._ended - self._began, issued - self._before[0], used - self._before[1])
            self._readers.allow_ahead(allowance(self._throttle.level))
        self._before = self._totals()
        self._began, self._rows_seen = now, 0

    def _totals(self) -> tuple[int, int]:
        counts = [cache.ahead_totals() for cache in set(self._caches.values())]
        return sum(issued for issued, _ in counts), sum(used for _, used in counts)
