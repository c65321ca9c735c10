"""How a byte budget becomes slots: arithmetic only, shared by the cache, the simulator and `lean plan`.

Types differ between the tensors of one model, so experts come in a few sizes, and all the experts of one
layer have the same size. A *size class* is the layers that share a size; its slots are all of that size.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

from leanmoe.errors import BudgetError
from leanmoe.units import format_bytes


@dataclass(frozen=True, slots=True)
class SlotClass:
    """The experts of one size and the slots they share.

    `size` is the bytes of an expert (and of a slot), `layers` the layers that have it, `experts` how many
    experts those layers have together, `floor` the fewest slots that work, `working_set` what one token uses.
    """

    size: int
    layers: tuple[int, ...]
    experts: int
    floor: int
    working_set: int
    slots: int

    @property
    def bytes(self) -> int:
        """Bytes of its slots."""
        return self.slots * self.size


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots per size class for one device. `budget` is what was asked, `slot_bytes` what is used of it."""

    budget: int
    classes: tuple[SlotClass, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots; never more than the budget."""
        return sum(c.bytes for c in self.classes)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts, resident or not."""
        return sum(c.experts * c.size for c in self.classes)

    @property
    def resident_fraction(self) -> float:
        """Slot bytes over expert bytes: 1.0 when every expert has a slot (or there are no experts)."""
        return self.slot_bytes / self.expert_bytes if self.classes else 1.0

    @property
    def fits(self) -> bool:
        """Whether every expert has a slot of its own, so that nothing is ever evicted."""
        return all(c.slots == c.experts for c in self.classes)

    @property
    def below_working_set(self) -> bool:
        """Whether some class has fewer slots than one token uses of it: an LRU would hit nothing there."""
        return any(c.slots < c.working_set for c in self.classes)


def plan_slots(sizes: Mapping[int, int], counts: Mapping[int, int], top_k: int, budget: int) -> SlotPlan:
    """Divides `budget` bytes between the size classes so that each has the same share of its experts.

    `sizes` maps a layer to the bytes of one of its experts, `counts` to how many it has. Every class first
    gets its floor: one layer's top-k twice, so that one half is computed while the other is read (or the
    whole layer where that is less). Each further slot goes to the class with the smallest share that can
    still take one.

    Raises `BudgetError`, naming the smallest budget that works, when the floors do not fit.
    """
    classes = [_floor_class(size, sizes, counts, top_k) for size in sorted(set(sizes.values()), reverse=True)]
    smallest = sum(c.bytes for c in classes)
    left = budget - smallest
    if left < 0:
        raise BudgetError(
            f"expert slots need at least {format_bytes(smallest)} ({smallest} bytes: "
            f"the top {top_k} experts of one layer twice, for each expert size), but only "
            f"{format_bytes(max(budget, 0))} is left for them; give a larger memory budget"
        )
    slots = [c.slots for c in classes]
    neediest = [(c.slots / c.experts, i) for i, c in enumerate(classes)]
    heapq.heapify(neediest)
    while neediest:
        _, i = heapq.heappop(neediest)
        # A class that is full or whose slot no longer fits leaves the queue for good: the rest only shrinks.
        if slots[i] < classes[i].experts and classes[i].size <= left:
            slots[i] += 1
            left -= classes[i].size
            heapq.heappush(neediest, (slots[i] / classes[i].experts, i))
    return SlotPlan(budget, tuple(replace(c, slots=n) for c, n in zip(classes, slots, strict=True)))


def slot_floor(sizes: Mapping[int, int], counts: Mapping[int, int], top_k: int) -> int:
    """The smallest budget, in bytes, that `plan_slots` does not refuse."""
    return sum(_floor_class(size, sizes, counts, top_k).bytes for size in set(sizes.values()))


def _floor_class(size: int, sizes: Mapping[int, int], counts: Mapping[int, int], top_k: int) -> SlotClass:
    layers = tuple(sorted(layer for layer in sizes if sizes[layer] == size))
    floor = max(min(2 * top_k, counts[layer]) for layer in layers)
    working_set = sum(min(top_k, counts[layer]) for layer in layers)
    return SlotClass(size, layers, sum(counts[layer] for layer in layers), floor, working_set, floor)
