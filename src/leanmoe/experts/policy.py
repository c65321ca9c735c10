"""Which resident expert leaves when a slot is needed.

A policy is a plain, deterministic data structure: no threads, no bytes, no files. The cache and the simulator
drive the same class. There is one instance per size class (all the experts of a layer are of one size, so a
layer belongs to exactly one), which is why a policy never sees a size.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum

from leanmoe.experts.slots import SlotClass

Key = tuple[int, int]
"""(layer, expert)."""


class Phase(Enum):
    """Why an expert is wanted."""

    DECODE = "decode"  # the router picked it for a token being generated
    PREFILL = "prefill"  # the router picked it for prompt tokens: a scan, most of it not wanted again soon
    PRELOAD = "preload"  # nobody picked it yet


class Policy(ABC):
    """Told of every use, arrival and departure; asked for a victim.

    Calls come in this order: `on_use` once for each acquire with all its experts, resident or not (so that a
    policy can count experts that are not resident); then for each one that must be read, `victim` if no slot
    is free, `on_evict` for that victim, `on_insert` for the newcomer. A read that fails is an `on_evict` too.
    """

    def __init__(self, slots: SlotClass) -> None:
        self.slots = slots

    @abstractmethod
    def on_use(self, keys: Sequence[Key], phase: Phase) -> None:
        """The router picked `keys`, all of one layer."""

    @abstractmethod
    def on_insert(self, key: Key, phase: Phase) -> None:
        """`key` now occupies a slot (its bytes may still be on their way)."""

    @abstractmethod
    def on_evict(self, key: Key) -> None:
        """`key` no longer occupies a slot."""

    @abstractmethod
    def victim(self, incoming: Key, phase: Phase, pinned: Callable[[Key], bool]) -> Key | None:
        """The resident expert to evict for `incoming`: never one that is `pinned`.

        None when all are pinned. For `PRELOAD`, also None when none is worth less than `incoming`; for a
        picked expert the policy must name one if any is not pinned.
        """


class LRU(Policy):
    """Evicts the expert that decoding has not used for the longest time.

    Prefill is scan-resistant: what it reads enters at the cold end and what it hits is not refreshed, so that
    a long prompt recycles its own slots and leaves those that decoding was using.
    """

    def __init__(self, slots: SlotClass) -> None:
        super().__init__(slots)
        self._order: OrderedDict[Key, None] = OrderedDict()  # coldest first

    def on_use(self, keys: Sequence[Key], phase: Phase) -> None:
        if phase is Phase.DECODE:
            for key in keys:
                if key in self._order:
                    self._order.move_to_end(key)

    def on_insert(self, key: Key, phase: Phase) -> None:
        self._order[key] = None
        if phase is not Phase.DECODE:
            self._order.move_to_end(key, last=False)

    def on_evict(self, key: Key) -> None:
        del self._order[key]

    def victim(self, incoming: Key, phase: Phase, pinned: Callable[[Key], bool]) -> Key | None:
        if phase is Phase.PRELOAD:
            return None
        return next((key for key in self._order if not pinned(key)), None)
