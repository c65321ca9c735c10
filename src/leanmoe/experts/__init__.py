"""The heart: where experts live. Files on disk, slots on a device, and the cache between them."""

from leanmoe.experts.cache import Acquire, ExpertCache, Lease
from leanmoe.experts.device import host_staging_bytes
from leanmoe.experts.policy import LRU, Key, Phase, Policy
from leanmoe.experts.pool import ExpertPool, Placement, plan_placements, split_layers
from leanmoe.experts.slots import SlotClass, SlotPlan, plan_slots, slot_floor
from leanmoe.experts.stats import CacheStats, LayerStats
from leanmoe.experts.store import ExpertStore

__all__ = [
    "LRU",
    "Acquire",
    "CacheStats",
    "ExpertCache",
    "ExpertPool",
    "ExpertStore",
    "Key",
    "LayerStats",
    "Lease",
    "Phase",
    "Placement",
    "Policy",
    "SlotClass",
    "SlotPlan",
    "host_staging_bytes",
    "plan_placements",
    "plan_slots",
    "slot_floor",
    "split_layers",
]
