"""Slots that hold an expert nobody has asked for yet: how many there may be, and what became of them."""

from collections.abc import Callable

from leanmoe.experts.lease import Slot
from leanmoe.experts.policy import Key
from leanmoe.experts.stats import Counters


class Speculation:
    """Counts guesses from the start of their read to their first use or their end. The cache's lock guards it.

    Their slots, reads in flight included, never hold more than `limit` bytes together. When they do, a new
    guess takes the place of the oldest one that did not come true.
    """

    def __init__(self, limit: int, counters: Counters) -> None:
        self.limit = limit
        self.nbytes = 0
        self._counters = counters
        self._slots: dict[Key, Slot] = {}  # oldest first
        self._coming: dict[int, list[Slot]] = {}  # by layer, since it was last visited; some may have ended

    def __len__(self) -> int:
        return len(self._slots)

    def room_for(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= self.limit

    def stale(self, wanted: Callable[[Key], bool]) -> Key | None:
        """The oldest guess that is no longer expected, may be evicted, and is `wanted`."""
        slots = self._slots.items()
        return next((k for k, slot in slots if not slot.fresh and not slot.pins and wanted(k)), None)

    def begin(self, slot: Slot) -> None:
        """`slot` was claimed for a read ahead, which starts now."""
        slot.guessed = slot.fresh = True
        self._slots[slot.key] = slot
        self._coming.setdefault(slot.layer, []).append(slot)
        self.nbytes += slot.nbytes
        self._counters.ahead(slot.key[0]).issued += 1

    def used(self, slot: Slot) -> None:
        """Someone asked for the expert: in time, or while it was still being read."""
        counts = self._counters.ahead(slot.key[0])
        if slot.arrived:
            counts.useful += 1
        else:
            counts.late += 1
        self._end(slot)

    def wasted(self, slot: Slot) -> None:
        """The slot is evicted, or its read failed, before anyone asked for it."""
        self._counters.ahead(slot.key[0]).wasted += 1
        self._end(slot)

    def visited(self, layer: int) -> None:
        """The router of `layer` has spoken: its guesses that were not among the picks are stale."""
        for slot in self._coming.pop(layer, ()):
            if slot.layer == layer:
                slot.fresh = False

    def _end(self, slot: Slot) -> None:
        slot.guessed = slot.fresh = False
        del self._slots[slot.key]
        self.nbytes -= slot.nbytes
