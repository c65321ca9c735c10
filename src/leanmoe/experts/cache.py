"""The expert cache of one device: which experts are in slots, who is using them, and what is being read.

The idea in short. `acquire` looks its experts up: those in a slot are pinned (hits), those being read by
someone else are joined, and for the rest a slot is claimed, a free one or a victim's, and a read is queued.
The caller iterates and gets *groups* of leases as they become ready, hits first, or for a prefill in the order asked
for; asking for the next group gives the last one back. When there are fewer slots than experts asked for, the
remainder is deferred and read in waves, into the slots that its own earlier groups give back.

A slot is either free, or belongs to one expert and is listed in `_resident`. It is *pinned* while its bytes
are on their way (by the reader) and while anyone was promised it or holds it; only an unpinned one can be
evicted. Hence a leased slot is never overwritten, an evicted one never read, and a slot is handed out only
after its bytes have arrived.

No two acquires can block each other for ever: an acquire waits only when it has nothing to hand out, having given
back its last group, so all that a waiting acquire pins are reads in flight, which end by themselves (and in a prefill
what is ready before its turn, which it gives up where no read of its own is in flight). Whoever holds ready leases is
computing and will give them back. None is starved either: acquires that wait with no read in flight stand in a queue,
and only its head may claim slots. (One thread must not acquire from a cache while it holds a group of the same cache.)

One lock guards all of it. Readers hold it only to publish; nothing under it touches the disk.
"""

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy.typing as npt

from leanmoe.errors import LeanError
from leanmoe.experts.acquire import Acquire, Shelf
from leanmoe.experts.device import Device
from leanmoe.experts.lease import Lease, Slot
from leanmoe.experts.policy import LRU, Key, Phase, Policy
from leanmoe.experts.readers import Readers
from leanmoe.experts.slots import SlotClass, SlotPlan
from leanmoe.experts.speculation import Speculation
from leanmoe.experts.stats import CacheStats, Counters
from leanmoe.experts.store import ExpertStore
from leanmoe.experts.sweep import Sweep
from leanmoe.kernels import Arrangement, ResidentExperts

__all__ = ["Acquire", "ExpertCache"]

# How often a starved acquire looks for leases that were dropped without being given back.
_RECLAIM_SECONDS = 1.0
# Guesses that nobody has used yet may hold one slot byte in this many.
_GUESS_SHARE = 8


class ExpertCache:
    """Experts of some layers in the slots of one device. Any number of threads may use it.

    `plan` says how many slots of each size; `readers` does the reads (shared; its owner closes it later).
    """

    def __init__(
        self,
        store: ExpertStore,
        plan: SlotPlan,
        device: Device,
        readers: Readers,
        policy: Callable[[SlotClass], Policy] = LRU,
    ) -> None:
        self.plan = plan
        self._store = store
        self._device = device
        self._readers = readers
        self._resident: dict[Key, Slot] = {}
        self._dropped: deque[Acquire] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._shelves: dict[int, Shelf] = {}
        self._experts = {layer.layer: layer.expert_count for layer in store.pack.manifest.layers}
        self.layouts = {layer.layer: device.layout(layer.layout) for layer in store.pack.manifest.layers}
        """Where gate, up and down lie inside a lease's `data`, and in what order their bytes are, by layer."""
        self._arrangements = {layer: Arrangement(layout) for layer, layout in self.layouts.items()}
        self._counters = Counters(layer for c in plan.classes for layer in c.layers)
        largest = max((c.size for c in plan.classes), default=0)
        self._guesses = Speculation(max(largest, plan.slot_bytes // _GUESS_SHARE), self._counters)
        self._sweep = Sweep(2 * readers.count)
        # Where guesses may have slots enough to be worth it.
        large = (c for c in plan.classes if c.slots >= _GUESS_SHARE * c.floor)
        self._sweepable = {layer for c in large for layer in c.layers}
        arena, start = device.allocate(plan.slot_bytes), 0
        # Where nothing is ever evicted, kernels may look for themselves.
        self._residents: dict[int, ResidentExperts] = {}
        if plan.fits and arena.is_cpu:
            layers = [layer for c in plan.classes for layer in c.layers]
            self._residents = {layer: ResidentExperts.none(self._experts[layer], arena) for layer in layers}
        self._found = dict.fromkeys(self._residents, 0)  # hits of theirs that the counters have
        for c in plan.classes:
            end = start + c.bytes
            slots = [Slot(data) for data in reversed(arena[start:end].view(c.slots, c.size).unbind())]
            shelf = Shelf(c, slots, policy(c))
            self._shelves |= dict.fromkeys(c.layers, shelf)
            start = end

    def acquire(self, layer: int, experts: Sequence[int], phase: Phase = Phase.DECODE) -> Acquire:
        """Pins the resident `experts` (distinct ids) of `layer`, queues reads of the others; never waits.

        Raises `ValueError` for an expert that does not exist and `LeanError` if the cache is closed.
        """
        if experts and (min(experts) < 0 or max(experts) >= self._experts[layer]):
            raise ValueError(
                f"layer {layer} has experts 0 to {self._experts[layer] - 1}, not {list(experts)}"
            )
        shelf = self._shelves[layer]
        keys = [(layer, expert) for expert in experts]
        acquire = Acquire(self, shelf, layer, phase, keys)
        with self._lock:
            if self._closed:
                raise _closed_error()
            if self._dropped:
                self._reclaim()
            for key in keys:
                if (slot := self._resident.get(key)) is None:
                    acquire.deferred.append(key)
                elif slot.waiting is None and not slot.guessed:  # a plain hit: what `_promise` would do
                    slot.pins += 1
                    acquire.ready.append(slot)
                else:
                    self._promise(slot, acquire)
            hits, joined = len(acquire.ready), len(acquire.reading)
            if not shelf.roomy:
                shelf.policy.on_use(keys, phase)
            self._sweep.stop()  # whoever asks knows what it wants; a long prompt aims it anew
            self._guesses.visited(layer)
            if acquire.deferred:
                self._start_reads(acquire)
            self._counters.count(layer, hits, joined, len(keys) - hits - joined)
        return acquire

    def preload(self, keys: Iterable[Key], until: float = math.inf) -> list[Future[bool]]:
        """Reads experts into free slots in the background, in this order, behind every demand read.

        Nothing is evicted for them. Each future is True if the expert was read, False if it was there already
        or no slot of its size was free, or `until` (of `time.monotonic`) had passed; it holds the error of a
        failed read, and is cancelled when the readers close.
        """
        return [self._readers.submit_background(partial(self._preload_one, key, until)) for key in keys]

    def read_ahead(self, key: Key) -> bool:
        """In a reader thread: reads an expert that nobody asked for yet; False if it was dropped.

        It takes a free slot, or the one that the policy would give to a pick: most policies know nothing of
        the prediction, and would refuse an expert for having been rare up to now. Never one that is pinned, or
        of a guess whose layer is still to come. Guesses that nobody used have a cap in bytes (`Speculation`).
        """
        with self._lock:
            slot = self._claim_ahead(key)
            if slot is None:
                self._counters.ahead(key[0]).dropped += 1
                return False
        self._read_guess(slot)
        return True

    def drop_ahead(self, layer: int, count: int) -> None:
        """Counts reads ahead that were given up before `read_ahead` was called."""
        with self._lock:
            self._counters.ahead(layer).dropped += count

    def ahead_totals(self) -> tuple[int, int]:
        """Reads ahead issued up to now, and those of them that were asked for, in time or late."""
        with self._lock:
            return self._counters.ahead_totals()

    def holds(self, key: Key) -> bool:
        """Whether the expert has a slot, its bytes perhaps on their way; may be out of date at once."""
        return key in self._resident

    def on_prompt(self, layer: int, picks: npt.NDArray[Any]) -> None:
        """For policies that want it: see `Policy.on_prompt`."""
        if (shelf := self._shelves[layer]).wants_prompts:
            with self._lock:
                shelf.policy.on_prompt(layer, picks)

    def on_router(self, layer: int, probabilities: npt.NDArray[Any]) -> None:
        """For policies that want it: see `Policy.on_router`."""
        policy = self._shelves[layer].policy
        if policy.wants_router:
            with self._lock:
                policy.on_router(layer, probabilities)

    def on_predict(self, layer: int, chances: npt.NDArray[Any]) -> None:
        """For policies that want it: see `Policy.on_predict`."""
        policy = self._shelves[layer].policy
        if policy.wants_predictions:
            with self._lock:
                policy.on_predict(layer, chances)

    def residents(self, layer: int) -> ResidentExperts | None:
        """Where the experts of `layer` are, for kernels of this process; None unless each has a slot to stay in.

        Their look-ups count as hits. Whoever keeps it keeps the slots' memory.
        """
        return self._residents.get(layer)

    @property
    def wants_prompts(self) -> bool:
        """Whether `on_prompt` does anything for any layer."""
        return any(shelf.wants_prompts for shelf in self._shelves.values())

    @property
    def policies(self) -> list[Policy]:
        """The policy of each size class."""
        return [shelf.policy for shelf in dict.fromkeys(self._shelves.values())]

    def resident(self) -> list[Key]:
        """The experts whose bytes are in a slot now."""
        with self._lock:
            return [key for key, slot in self._resident.items() if slot.waiting is None]

    @property
    def stats(self) -> CacheStats:
        with self._lock:
            self._count_residents()
            return self._counters.snapshot()

    def close(self) -> None:
        """Wakes every waiting acquire with an error and lets go of the slots; may be called again.

        Leases that are held stay readable: no read into their slots is started any more.
        """
        with self._lock:
            self._closed = True
            self._resident.clear()
            for residents in self._residents.values():
                residents.addresses.zero_()
            self._count_residents()
            self._residents.clear()
            for shelf in self._shelves.values():
                shelf.free.clear()
            self._changed.notify_all()

    def _count_residents(self) -> None:
        for layer, residents in self._residents.items():
            found = int(residents.hits)  # kernels go on counting meanwhile
            self._counters.count(layer, found - self._found[layer], 0, 0)
            self._found[layer] = found

    def lacks(self, layer: int) -> bool:
        """Whether some of `layer` is missing that a long prompt might have read ahead: see `Acquire.follow`."""
        missing = ((layer, expert) not in self._resident for expert in range(self._experts[layer]))
        return layer in self._sweepable and any(missing)

    # Everything below is called by `Acquire` and by reader threads.

    def _follow(self, acquire: Acquire, keys: Sequence[Key]) -> None:
        with self._lock:
            if not acquire.ended:
                acquire.following = [key for key in keys if key[0] in self._sweepable]
                self._start_reads(acquire)

    def _next_group(self, acquire: Acquire) -> list[Lease]:
        with self._lock:
            self._give_back(acquire)
            if acquire.deferred or acquire.reading:
                self._start_reads(acquire)
                self._wait_until_ready(acquire)
            if acquire.error is not None:
                error = acquire.error
                self._abandon(acquire)
                raise copy.copy(error) from error  # a copy, since several acquires may raise it at once
            if not acquire.ready:
                acquire.ended = True
                raise StopIteration
            group = acquire.take()
            blocked = acquire.deferred and not acquire.reading
            if blocked and len(group) > 1 and acquire.phase is Phase.DECODE:
                # Every slot is taken: keep half back, to compute while the next are read. Not in a prefill:
                # what is kept back is pinned, so the next reads could only evict what was just given back.
                half = len(group) // 2
                group, acquire.ready = group[:half], group[half:]
            acquire.held = group
            return list(group)

    def _start_reads(self, acquire: Acquire) -> None:
        """Gives slots to as many of the deferred experts as there are slots to be had."""
        shelf, limit = acquire.shelf, self._at_once(acquire)
        reads: list[Callable[[], object]] = []
        while acquire.deferred and not self._closed and len(acquire.awaited) < limit:
            key = acquire.deferred[0]
            slot = self._resident.get(key)  # another acquire may have fetched it meanwhile
            if slot is None:
                if shelf.starved and shelf.starved[0] is not acquire:
                    break
                if (slot := self._claim(shelf, key, acquire.phase)) is None:
                    break
                reads.append(partial(self._read, slot))
                if key in acquire.given_up:
                    self._counters.count(acquire.layer, -1, 0, 1)
            acquire.deferred.popleft()
            self._promise(slot, acquire)
        if reads:
            self._readers.submit(reads)
        if acquire.following and not acquire.deferred:
            self._sweep.aim(acquire.following)
            acquire.following = ()
            self._go_on_sweeping()

    def _at_once(self, acquire: Acquire) -> int:
        """Reads that it may have in flight, or waiting for their turn."""
        slots, floor = acquire.shelf.facts.slots, acquire.shelf.facts.floor
        if acquire.phase is not Phase.PREFILL:
            return slots
        # It holds few slots at a time, so that it does not displace more of what decoding uses.
        return max(floor // 2, min(2 * self._readers.count, slots // 4))

    def _give_up_some(self, acquire: Acquire) -> None:
        """Unpins what is ready before its turn: what is worth least, for as many reads as it may have at once."""
        policy, head = acquire.shelf.policy, acquire.deferred[0]
        own = {slot.key: slot for slot in acquire.ready if slot.pins == 1}
        some: list[Slot] = []
        while own and len(some) < self._at_once(acquire):
            victim = policy.victim(head, acquire.phase, lambda key: key not in own)
            assert victim is not None
            some.append(own.pop(victim))
        # Those that others use too make no room; but nobody is kept waiting for them.
        for slot in some or tuple(acquire.ready):
            acquire.defer(slot)
            slot.pins -= 1
        self._changed.notify_all()

    def _go_on_sweeping(self) -> None:
        """Queues reads for the layer after the one that a prompt computes, behind those it waits for.

        Once the cache is closed it queues none.
        """
        while (key := self._sweep.next()) is not None:
            if key in self._resident:
                self._sweep.ended()
            elif slot := self._claim_ahead(key):
                self._readers.submit([partial(self._read_swept, slot)])
            else:  # guesses have all the slots that they may have, or an acquire waits for one, or it is over
                self._sweep.ended()
                self._sweep.stop()

    def _promise(self, slot: Slot, acquire: Acquire) -> None:
        slot.pins += 1
        if slot.guessed:
            self._guesses.used(slot)
        if slot.waiting is None:
            acquire.ready.append(slot)
        else:
            slot.waiting.append(acquire)
            acquire.reading.append(slot)
            acquire.awaited.add(slot.key)

    def _claim(self, shelf: Shelf, key: Key, phase: Phase) -> Slot | None:
        """A slot for `key`, pinned for the reader; None if every slot is pinned."""
        if shelf.free:
            slot = shelf.free.pop()
        else:
            # Guesses whose layer is still to come stay if anything else can go.
            victim = shelf.policy.victim(key, phase, self._awaited)
            if victim is None and self._guesses:
                victim = shelf.policy.victim(key, phase, lambda k: self._resident[k].pins > 0)
            if victim is None:
                return None
            slot = self._evict(victim)
        self._give(slot, key, phase)
        return slot

    def _claim_ahead(self, key: Key) -> Slot | None:
        shelf = self._shelves[key[0]]
        if self._closed or key in self._resident or shelf.starved:
            return None
        if not self._guesses.room_for(shelf.facts.size):
            if shelf.roomy:  # nothing ever leaves it: kernels look for themselves
                return None
            victim = self._guesses.stale(lambda k: k[0] in shelf.facts.layers)
        elif shelf.free:
            return self._guess(shelf.free.pop(), key)
        else:
            victim = shelf.policy.victim(key, Phase.DECODE, self._awaited)
        if victim is None:
            return None
        return self._guess(self._evict(victim), key)

    def _guess(self, slot: Slot, key: Key) -> Slot:
        self._give(slot, key, Phase.PRELOAD)
        self._guesses.begin(slot)
        return slot

    def _awaited(self, key: Key) -> bool:
        slot = self._resident[key]
        return slot.pins > 0 or slot.fresh

    def _evict(self, victim: Key) -> Slot:
        slot = self._resident.pop(victim)
        if slot.guessed:
            self._guesses.wasted(slot)
        self._shelves[victim[0]].policy.on_evict(victim)
        self._counters.evictions += 1
        return slot

    def _give(self, slot: Slot, key: Key, phase: Phase) -> None:
        slot.assign(key)
        slot.pins, slot.waiting = 1, []
        self._resident[key] = slot
        self._shelves[key[0]].policy.on_insert(key, phase)

    def _wait_until_ready(self, acquire: Acquire) -> None:
        """Waits until something can be handed out or has failed, starting deferred reads as slots become free."""
        starved, began = acquire.shelf.starved, time.perf_counter()
        try:
            while not acquire.deliverable and acquire.error is None:
                if self._closed:
                    acquire.error = _closed_error()
                    return
                if acquire.reading:
                    self._changed.wait()
                elif acquire.ready:  # they hold the slots that what comes before them needs
                    self._give_up_some(acquire)
                else:
                    if acquire not in starved:
                        starved.append(acquire)
                    self._changed.wait(_RECLAIM_SECONDS)
                    self._reclaim()
                self._start_reads(acquire)
                if acquire.reading or acquire.ready:
                    self._leave_queue(acquire)
        finally:
            self._leave_queue(acquire)
            self._counters.stalled(acquire.layer, time.perf_counter() - began)

    def _leave_queue(self, acquire: Acquire) -> None:
        if acquire in acquire.shelf.starved:
            acquire.shelf.starved.remove(acquire)
            self._changed.notify_all()  # the next in the queue may claim now

    def _read(self, slot: Slot) -> Exception | None:
        """In a reader thread: fills the slot, then hands it to those who wait for it, or frees it."""
        error: Exception | None = None
        try:
            self._device.load(slot.data, partial(self._fill, slot.key), slot.fence)
        except Exception as failed:
            error = failed  # belongs to the acquires that wait for it, not to this thread
        with self._lock:
            waiting, slot.waiting = slot.waiting or [], None
            if error is None:
                slot.pins -= 1
                self._counters.reads += 1
                self._counters.read_bytes += slot.nbytes
                if (residents := self._residents.get(slot.layer)) is not None:
                    residents.addresses[slot.expert] = slot.data.data_ptr()
            else:
                self._free(slot)
            for acquire in waiting:
                acquire.reading.remove(slot)
                if error is None:
                    acquire.ready.append(slot)
                else:
                    acquire.error = error
            self._changed.notify_all()
        return error

    def _read_guess(self, slot: Slot) -> None:
        """In a reader thread: as `_read`. A failure is nobody's yet; whoever asks will meet it."""
        layer = slot.layer  # of the guess: once it was read, the slot may be given to another
        if self._read(slot) is None:
            with self._lock:
                self._counters.ahead(layer).read_bytes += slot.nbytes

    def _read_swept(self, slot: Slot) -> None:
        self._read_guess(slot)
        with self._lock:
            self._sweep.ended()
            self._go_on_sweeping()

    def _fill(self, key: Key, buffer: memoryview) -> None:
        self._store.read_into(key, buffer, self._arrangements[key[0]])

    def _free(self, slot: Slot) -> None:
        if not self._closed:
            shelf = self._shelves[slot.layer]
            if slot.guessed:
                self._guesses.wasted(slot)
            del self._resident[slot.key]
            shelf.policy.on_evict(slot.key)
            shelf.free.append(slot)
        slot.pins = 0

    def _preload_one(self, key: Key, until: float) -> bool:
        shelf = self._shelves[key[0]]
        if time.monotonic() >= until:
            return False
        with self._lock:
            if self._closed:
                raise _closed_error()
            if key in self._resident or not shelf.free:
                return False
            slot = self._claim(shelf, key, Phase.PRELOAD)
        assert slot is not None  # one was free
        if error := self._read(slot):
            raise error
        with self._lock:
            self._counters.warm_bytes += slot.nbytes
        return True

    def _give_back(self, acquire: Acquire) -> None:
        if acquire.held:
            fence = self._device.fence()
            for slot in acquire.held:
                slot.pins -= 1
                slot.fence = fence
            acquire.held = ()
            if acquire.shelf.starved:
                self._changed.notify_all()

    def _abandon(self, acquire: Acquire) -> None:
        """Unpins all that is promised; reads in flight go on, and leave their experts resident."""
        self._give_back(acquire)
        for slot in acquire.reading:
            assert slot.waiting is not None
            slot.waiting.remove(acquire)
        for slot in (*acquire.ready, *acquire.reading):
            slot.pins -= 1
        acquire.ready, acquire.reading, acquire.error = [], [], None
        acquire.deferred.clear()
        acquire.ended = True
        if acquire.shelf.starved:
            self._changed.notify_all()

    def _close_acquire(self, acquire: Acquire) -> None:
        with self._lock:
            self._abandon(acquire)

    def _reclaim(self) -> None:
        while self._dropped:
            self._abandon(self._dropped.popleft())


def _closed_error() -> LeanError:
    return LeanError("the expert cache is closed")
