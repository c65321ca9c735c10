"""One request for some experts of a layer, as its caller iterates over it, and the slots that it is served from.

Both are plain state: what becomes of it, and when, is up to the `ExpertCache`, whose lock guards it.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from leanmoe.experts.lease import Lease, Slot
from leanmoe.experts.policy import Key, Phase, Policy
from leanmoe.experts.slots import SlotClass

if TYPE_CHECKING:
    from leanmoe.experts.cache import ExpertCache


class Shelf:
    """The slots of one size class, free ones apart, with the policy that rules them."""

    def __init__(self, facts: SlotClass, slots: list[Slot], policy: Policy) -> None:
        self.facts = facts
        self.free = slots
        self.policy = policy
        self.starved: deque[Acquire] = deque()
        # With a slot for every expert nothing is ever evicted: the policy need not look on.
        self.roomy = facts.slots == facts.experts
        self.wants_prompts = policy.wants_prompts and not self.roomy


class Acquire(Iterator[list[Lease]]):
    """Iterates over groups of ready leases; each expert asked for comes exactly once.

    In a prefill they come in the order in which they were asked for, else as they become ready.

    Resuming gives back the group before; so does `close`, leaving the `with` block, or dropping the iterator
    (then at the cache's leisure). `next` raises `ExpertReadError` if one of the experts could not be read,
    and `LeanError` if the cache was closed; the iterator is then exhausted and holds nothing.
    """

    __slots__ = (
        "_cache",
        "awaited",
        "deferred",
        "ended",
        "error",
        "following",
        "given_up",
        "held",
        "layer",
        "order",
        "phase",
        "reading",
        "ready",
        "shelf",
    )

    def __init__(
        self, cache: "ExpertCache", shelf: Shelf, layer: int, phase: Phase, keys: Sequence[Key]
    ) -> None:
        self._cache = cache
        self.shelf = shelf
        self.layer = layer
        self.phase = phase
        self.order = deque(keys) if phase is Phase.PREFILL else None  # in which the rest is to be handed out
        self.deferred: deque[Key] = deque()  # not yet given a slot
        self.given_up: set[Key] = set()  # were ready, and were deferred again
        self.reading: list[Slot] = []  # pinned, on their way
        self.awaited: set[Key] = set()  # those, and the ready ones that were on their way
        self.ready: list[Slot] = []  # pinned, to be handed out when it is their turn
        self.held: Sequence[Slot] = ()  # pinned, handed out
        self.following: Sequence[Key] = ()  # to be read when nothing is deferred
        self.error: Exception | None = None
        self.ended = False  # holds nothing, and never will again

    def __next__(self) -> list[Lease]:
        return self._cache._next_group(self)

    @property
    def deliverable(self) -> bool:
        """Whether something is ready whose turn it is."""
        if self.order:
            return any(slot.key == self.order[0] for slot in self.ready)
        return bool(self.ready)

    def take(self) -> list[Slot]:
        """Out of `ready`, all whose turn it is."""
        if self.order is None:
            group, self.ready = self.ready, []
            self.awaited.clear()
            return group
        ready = {slot.key: slot for slot in self.ready}
        group = []
        while self.order and (slot := ready.pop(self.order[0], None)):
            group.append(slot)
            self.order.popleft()
        self.ready = list(ready.values())
        self.awaited.intersection_update(self.order)
        return group

    def defer(self, slot: Slot) -> None:
        """It is `ready` before its turn, and now `deferred` instead, and `given_up`."""
        assert self.order is not None
        self.ready.remove(slot)
        self.awaited.discard(slot.key)
        self.given_up.add(slot.key)
        waiting = {slot.key, *self.deferred}
        self.deferred = deque(key for key in self.order if key in waiting)

    def follow(self, layer: int, experts: Iterable[int]) -> None:
        """Says what a long prompt will ask for next: read while this is computed, once all of this is on its way.

        They are guesses (`ExpertCache.read_ahead`), and given up when anyone asks the cache for anything. Layers of
        another cache, or whose guesses would have few slots, are passed over.
        """
        self._cache._follow(self, [(layer, expert) for expert in experts])

    def close(self) -> None:
        """Gives everything back and forgets what was not handed out; may be called again."""
        if not self.ended:
            self._cache._close_acquire(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run anywhere, even inside the cache's own locked code: only note it, without a lock.
        if self.held or self.ready or self.reading:
            self._cache._dropped.append(self)
