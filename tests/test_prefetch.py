"""Reading ahead: what it may evict and hold, what becomes of each read, and that demand goes first."""

import os
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_packs import GatedStore, contents, make_pack
from leanmoe.experts.cache import ExpertCache
from leanmoe.experts.device import CPUDevice
from leanmoe.experts.policy import LRU, POLICIES, Phase
from leanmoe.experts.pool import ExpertPool, Placement
from leanmoe.experts.prefetch import Prefetcher
from leanmoe.experts.readers import Ahead, Readers
from leanmoe.experts.slots import plan_slots, slot_floor
from leanmoe.experts.stats import PrefetchStats
from leanmoe.experts.throttle import Fixed

PAGE = 4096
EXPERTS, TOP_K = 12, 2
SIZES = {0: PAGE, 1: PAGE, 3: PAGE, 4: 2 * PAGE}  # layer 2 is dense
COUNTS = dict.fromkeys(SIZES, EXPERTS)
FLOOR = slot_floor(SIZES, COUNTS, TOP_K)
ROOMY = sum(SIZES.values()) * EXPERTS // 2


pytestmark = pytest.mark.usefixtures("deadlock_guard")


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("prefetch") / "small.lmpack", SIZES, EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def files(pack):
    return contents(pack)


class Bench:
    """A cache with LRU over a gated store, a prefetcher, and `readers` threads."""

    def __init__(self, pack, budget=ROOMY, readers=4, level=3):
        self.store, self.readers = GatedStore(pack), Readers(readers)
        self.cache = ExpertCache(
            self.store, plan_slots(SIZES, COUNTS, TOP_K, budget), CPUDevice(), self.readers, LRU
        )
        self.throttle = Fixed(level)
        self.prefetcher = Prefetcher(dict.fromkeys(SIZES, self.cache), self.readers, self.throttle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.open()
        self.cache.close()
        self.readers.close()

    def expect(self, layer, *experts):
        self.prefetcher.expect(layer, chances(*experts))

    def use(self, files, layer, *experts):
        with self.cache.acquire(layer, experts) as groups:
            self.prefetcher.visit(layer, Phase.DECODE, experts)
            for group in groups:
                for lease in group:
                    assert lease.data.numpy().tobytes() == files[layer, lease.expert]

    def settle(self):
        """Waits until no reader has or will take up anything."""
        while self.readers._ahead or any(self.readers._running):
            os.sched_yield()

    def counts(self, layer):
        return self.cache.stats.layers[layer].prefetch


def chances(*experts):
    found = np.zeros(EXPERTS)
    found[list(experts)] = 0.9
    return found


def test_an_expected_expert_is_there_when_it_is_asked_for(pack, files):
    """The point of it all: no wait for the disk."""
    with Bench(pack) as bench:
        bench.use(files, 0, 1)
        bench.expect(1, 5, 6)
        bench.settle()
        assert {(1, 5), (1, 6)} <= set(bench.cache.resident())
        bench.use(files, 1, 5, 7)
        layer = bench.cache.stats.layers[1]
        assert (layer.hits, layer.joined, layer.misses) == (1, 0, 1)
        assert layer.prefetch == PrefetchStats(issued=2, useful=1, read_bytes=2 * PAGE)
        assert layer.prefetch.unused == 1


def test_demand_joins_a_read_ahead_that_is_under_way(pack, files):
    """Reading it twice would take longer than waiting for the one."""
    with Bench(pack) as bench:
        bench.store.hold((1, 5))
        bench.use(files, 0, 1)
        bench.expect(1, 5)
        assert bench.store.began[1, 5].wait(20)
        groups = bench.cache.acquire(1, [5])
        bench.store.gates[1, 5].set()
        assert [lease.expert for group in groups for lease in group] == [5]
        assert bench.store.order.count((1, 5)) == 1
        assert bench.counts(1).late == 1
        assert bench.cache.stats.layers[1].joined == 1


def test_demand_overtakes_reads_ahead_that_are_queued(pack, files):
    """What the router has picked must never wait behind a guess; and what it picks is a guess no more."""
    with Bench(pack, readers=1) as bench:
        bench.store.hold((0, 1))
        first = bench.cache.acquire(0, [1])
        assert bench.store.began[0, 1].wait(20)
        bench.expect(1, 5, 6)
        second = bench.cache.acquire(1, [6, 7])
        bench.store.gates[0, 1].set()
        for groups in (first, second):
            for _ in groups:
                pass
        bench.settle()
        assert bench.store.order[:3] == [(0, 1), (1, 6), (1, 7)]
        assert bench.store.order.count((1, 6)) == 1
        counts = bench.counts(1)
        assert (counts.issued, counts.dropped) == (1, 1)


def test_a_layer_that_is_reached_takes_its_queue_back(pack, files):
    """A read that comes too late would only keep the disk from the next ones."""
    with Bench(pack, level=0) as bench:
        bench.throttle.level = 1  # it may queue, but the readers were told to read nothing
        bench.use(files, 0, 1)
        bench.expect(1, 5, 6)
        bench.use(files, 1, 2)
        bench.readers.allow_ahead(Ahead(2, True))
        bench.settle()
        assert (1, 5) not in bench.store.order
        assert bench.counts(1) == PrefetchStats(dropped=2)


def test_a_later_word_on_a_layer_confirms_or_cancels_an_earlier_one(pack, files):
    """Far ahead is a guess; nearer, the router's own word counts."""
    with Bench(pack, level=0) as bench:
        bench.throttle.level = 1
        bench.use(files, 0, 1)
        bench.expect(3, 4, 5)
        bench.expect(3, 5, 6)
        bench.readers.allow_ahead(Ahead(2, True))
        bench.settle()
        assert sorted(key for key in bench.store.order if key[0] == 3) == [(3, 5), (3, 6)]
        assert bench.counts(3).dropped == 1


def test_on_an_idle_disk_only_nothing_is_read_beside_demand(pack, files):
    """Level 1: a disk that one read saturates must not serve two."""
    with Bench(pack, level=1) as bench:
        bench.store.hold((0, 1))
        groups = bench.cache.acquire(0, [1])
        assert bench.store.began[0, 1].wait(20)
        bench.expect(1, 5)
        assert bench.readers.cancel_ahead((1, 5))  # still queued, though three readers have nothing to do
        bench.store.gates[0, 1].set()
        for _ in groups:
            pass


def test_reads_ahead_leave_a_thread_for_demand(pack, files):
    """However slow they are, and however many are wanted."""
    with Bench(pack, readers=3, level=8) as bench:
        bench.store.hold(*((1, e) for e in range(EXPERTS)))
        bench.use(files, 0, 1)
        bench.expect(1, *range(EXPERTS))
        for expert in range(EXPERTS):
            bench.use(files, 0, expert)
        assert sum(began.is_set() for began in bench.store.began.values()) <= 2


def test_a_held_lease_is_never_the_victim(pack, files):
    """A slot that is being computed with must keep its bytes."""
    with Bench(pack, FLOOR) as bench:
        slots = bench.cache._shelves[0].facts.slots
        for expert in range(slots):
            bench.use(files, 0, expert)
        groups = bench.cache.acquire(0, range(slots))
        leases = next(groups)
        assert len(leases) == slots
        assert not bench.cache.read_ahead((1, 5))
        assert bench.counts(1).dropped == 1
        for lease in leases:
            assert lease.data.numpy().tobytes() == files[0, lease.expert]
        groups.close()
        assert bench.cache.read_ahead((1, 5))


def test_guesses_have_a_cap_in_bytes_and_new_ones_replace_those_that_failed(pack, files):
    """Wrong guesses must not fill the cache."""
    with Bench(pack) as bench:
        limit = bench.cache._guesses.limit
        fit = limit // PAGE
        assert 0 < fit < EXPERTS
        read = [bench.cache.read_ahead((1, expert)) for expert in range(EXPERTS)]
        assert read == [expert < fit for expert in range(EXPERTS)]
        bench.use(files, 1, 0)  # one came true, the others did not
        assert bench.cache.read_ahead((3, 0))
        assert bench.cache.read_ahead((3, 1))
        assert bench.cache._guesses.nbytes <= limit
        assert bench.counts(1).wasted >= 1


def test_a_guess_that_cannot_be_read_fails_nobody_who_did_not_ask(tmp_path):
    """A damaged file nobody needs must not end an answer; and its slot must not be lost."""
    pack = make_pack(tmp_path / "own.lmpack", SIZES, EXPERTS, TOP_K)
    files = contents(pack)
    pack.expert_path(1, 5).unlink()
    with Bench(pack, FLOOR) as bench:
        for _ in range(8):
            bench.use(files, 0, 1)
            bench.expect(1, 5)
            bench.settle()
            bench.use(files, 1, 2, 3)
        counts = bench.counts(1)
        assert counts.issued == counts.wasted > 0
        assert counts.read_bytes == 0


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    budget=st.integers(FLOOR, ROOMY),
    readers=st.integers(1, 4),
    policy=st.sampled_from(sorted(POLICIES)),
    mode=st.sampled_from(["auto", "on"]),
)
def test_under_any_guesses_leases_hold_the_right_bytes_and_counts_add_up(
    pack, files, seed, budget, readers, policy, mode
):
    """Right or wrong, early or late, a guess must change nothing but the time."""
    source = random.Random(seed)
    with ExpertPool.open(
        pack, [Placement("cpu", budget)], readers=readers, policy=POLICIES[policy], prefetch=mode
    ) as pool:
        cache = pool.caches[0]
        for _ in range(12):
            for layer in SIZES:
                picked = source.sample(range(EXPERTS), TOP_K)
                with pool.acquire(layer, picked) as groups:
                    pool.visit(layer, Phase.DECODE, picked)
                    pool.expect(source.choice(list(SIZES)), np.array(source.choices([0, 0.5, 1], k=EXPERTS)))
                    for group in groups:
                        for lease in group:
                            assert lease.data.numpy().tobytes() == files[layer, lease.expert]
                assert cache._guesses.nbytes <= cache._guesses.limit
        pool.close()
        for counts in pool.stats.layers.values():
            ahead = counts.prefetch
            assert min(ahead.useful, ahead.late, ahead.wasted, ahead.dropped, ahead.unused) >= 0
        unused = pool.stats.prefetch.unused
        assert unused == len(cache._guesses)
        assert pool.stats.prefetch.read_bytes <= pool.stats.read_bytes


def test_many_threads_and_guesses_at_once(pack, files):
    """A server computes for several requests over one cache while it reads ahead."""
    with ExpertPool.open(pack, [Placement("cpu", FLOOR)], readers=3, prefetch="on") as pool:
        failures = []

        def work(seed):
            source = random.Random(seed)
            try:
                for _ in range(60):
                    layer, experts = source.choice(list(SIZES)), source.sample(range(EXPERTS), TOP_K)
                    with pool.acquire(layer, experts) as groups:
                        pool.visit(layer, Phase.DECODE, experts)
                        pool.expect(
                            source.choice(list(SIZES)), chances(*source.sample(range(EXPERTS), TOP_K))
                        )
                        for group in groups:
                            for lease in group:
                                assert lease.data.numpy().tobytes() == files[layer, lease.expert]
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not failures


def test_warm_start_fills_free_slots_in_order_until_its_time_is_over(pack, files):
    """The hottest experts first; nothing is evicted for them; and it ends."""
    with ExpertPool.open(pack, [Placement("cpu", FLOOR)], readers=2) as pool:
        assert not any(future.result(20) for future in pool.warm([(0, 1)], 0.0))
        keys = [(1, e) for e in range(EXPERTS)]
        read = [future.result(20) for future in pool.warm(keys, 60.0)]
        slots = next(c.slots for c in pool.plans[0].classes if 1 in c.layers)
        assert read == [i < slots for i in range(EXPERTS)]
        assert sorted(pool.resident()) == keys[:slots]
        assert pool.stats.evictions == 0


def test_warm_start_waits_while_demand_reads(pack, files):
    """The first token must not wait for the warm-up."""
    with Bench(pack) as bench:
        bench.store.hold((0, 1))
        groups = bench.cache.acquire(0, [1])
        assert bench.store.began[0, 1].wait(20)
        (warm,) = bench.cache.preload([(1, 5)])
        bench.use(files, 0, 2)
        assert not warm.running()
        assert not warm.done()
        bench.store.gates[0, 1].set()
        for _ in groups:
            pass
        assert warm.result(20)
