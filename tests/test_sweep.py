"""Sweeps: while a long prompt computes a layer, the next one's experts are read; what that may cost, and its end."""

import os
import random
import threading
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_packs import GatedStore, contents, make_pack
from leanmoe.errors import ExpertReadError, LeanError
from leanmoe.experts.cache import ExpertCache
from leanmoe.experts.device import CPUDevice
from leanmoe.experts.policy import POLICIES, Phase
from leanmoe.experts.pool import ExpertPool, Placement
from leanmoe.experts.readers import Readers
from leanmoe.experts.slots import plan_slots, slot_floor

PAGE = 4096
EXPERTS, TOP_K = 10, 1
ALL = range(EXPERTS)
MOST = range(1, EXPERTS)
SIZES = dict.fromkeys(range(10), PAGE) | {11: 2 * PAGE, 12: 2 * PAGE}  # layer 10 is dense
NEXT = dict(pairwise(SIZES))
COUNTS = dict.fromkeys(SIZES, EXPERTS)
FLOOR = slot_floor(SIZES, COUNTS, TOP_K)
TOTAL = sum(SIZES.values()) * EXPERTS
ROOMY = 120 * PAGE  # 86 slots of a page and 17 of two, each more than 8 floors; guesses may have 15 pages
TIGHT = 40 * PAGE  # 28 and 6 (too few for sweeps); guesses may have 5 pages


pytestmark = pytest.mark.usefixtures("deadlock_guard")


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("sweep") / "small.lmpack", SIZES, EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def files(pack):
    return contents(pack)


class Bench:
    """A cache over a gated store, with `readers` threads."""

    def __init__(self, pack, budget=ROOMY, readers=4):
        self.store, self.readers = GatedStore(pack), Readers(readers)
        self.cache = ExpertCache(
            self.store, plan_slots(SIZES, COUNTS, TOP_K, budget), CPUDevice(), self.readers
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.open()
        self.cache.close()
        self.readers.close()

    def settle(self):
        settle(self.readers)

    def held(self, layer):
        """The experts of `layer` in a slot."""
        return sorted(expert for at, expert in self.cache.resident() if at == layer)

    def counts(self, layer):
        return self.cache.stats.layers[layer].prefetch


def settle(readers):
    """Waits until no reader has or will take up anything."""
    while readers._demand or any(readers._running):
        os.sched_yield()


def ask(source, layer, experts=ALL):
    """As a long prompt does: acquires, and says that it will want all of the next layer."""
    groups = source.acquire(layer, experts, Phase.PREFILL)
    if layer in NEXT:
        groups.follow(NEXT[layer], ALL)
    return groups


def use(source, files, layer, experts, phase=Phase.PREFILL):
    """Acquires `experts` and checks each lease when it comes and before it goes; most of them as a long prompt."""
    got = []
    long = phase is Phase.PREFILL and len(experts) >= len(MOST)
    for leases in ask(source, layer, experts) if long else source.acquire(layer, experts, phase):
        for _ in range(2):
            for lease in leases:
                assert lease.data.numpy().tobytes() == files[layer, lease.expert]
        got += [lease.expert for lease in leases]
    assert sorted(got) == sorted(experts)


def assert_nothing_is_lost(cache):
    """Every slot is free or lists its one expert, and nobody has it pinned."""
    slots = list(cache._resident.values())
    assert not [slot.key for slot in slots if slot.pins or slot.waiting]
    assert all(slot.key == key for key, slot in cache._resident.items())
    for shelf in dict.fromkeys(cache._shelves.values()):
        mine = [slot for slot in slots if slot.key[0] in shelf.facts.layers]
        assert len({id(slot) for slot in (*mine, *shelf.free)}) == shelf.facts.slots
    assert cache._guesses.nbytes == sum(slot.nbytes for slot in slots if slot.guessed) <= cache._guesses.limit
    assert cache.stats.prefetch.unused == len(cache._guesses)


def test_the_next_layer_is_read_while_this_one_is_computed(pack, files):
    """Otherwise the disk rests through a layer's last products and all of the next one's attention."""
    with Bench(pack) as bench:
        groups, leases = ask(bench.cache, 3), []
        left = EXPERTS
        while left:
            leases = next(groups)
            left -= len(leases)
        bench.settle()  # the last group is still held
        assert bench.held(4) == list(ALL)
        assert bench.held(5) == []
        for lease in leases:
            assert lease.data.numpy().tobytes() == files[3, lease.expert]
        groups.close()
        assert_nothing_is_lost(bench.cache)


def test_a_sweep_waits_until_all_of_its_own_layer_is_on_its_way(pack, files):
    """What the prompt waits for now would queue behind what it wants later."""
    with Bench(pack, readers=1) as bench:
        use(bench.cache, files, 0, ALL)  # two at a time
        bench.settle()
        assert bench.store.order == [(layer, expert) for layer in (0, 1) for expert in ALL]


def test_a_prompt_through_all_layers_reads_each_expert_once_and_waits_for_the_first_layer_only(pack, files):
    """A sweep that displaced what it read itself, or that demand read again, would cost what it should save."""
    with Bench(pack) as bench:
        for layer in SIZES:
            use(bench.cache, files, layer, ALL)
            bench.settle()
        assert bench.cache.stats.evictions > 0
        assert set(Counter(bench.store.order).values()) == {1}
        layers = bench.cache.stats.layers
        assert {i: s.hits for i, s in layers.items()} == {
            0: 0,
            **dict.fromkeys(range(1, 10), 10),
            11: 7,
            12: 7,
        }
        assert bench.cache.stats.prefetch.useful == bench.cache.stats.prefetch.issued == 9 * 10 + 2 * 7
        assert_nothing_is_lost(bench.cache)


def test_what_is_read_and_not_used_has_a_cap_in_bytes(pack, files):
    """A layer larger than the cap would push out all that decoding uses."""
    with Bench(pack, TIGHT) as bench:
        fit = bench.cache._guesses.limit // PAGE
        assert 0 < fit < EXPERTS
        for layer in range(4):
            use(bench.cache, files, layer, MOST)  # expert 0 is read each time, and not wanted
            bench.settle()
            assert bench.held(layer + 1)[:fit] == list(range(fit))
            assert bench.cache._guesses.nbytes == fit * PAGE
        assert bench.cache.stats.prefetch.wasted > 0


def test_a_layer_whose_class_has_few_slots_is_not_swept(pack, files):
    """Guesses would have most of them, and leave a token none to read its experts into."""
    with Bench(pack, TIGHT) as bench:
        use(bench.cache, files, 9, ALL)
        bench.settle()
        assert bench.cache._guesses.nbytes == 0
        assert bench.store.of(11) == []


def test_what_is_resident_already_is_neither_read_again_nor_the_end_of_a_sweep(pack, files):
    """Most of a layer may be there from the chunk before."""
    with Bench(pack, readers=1) as bench:
        use(bench.cache, files, 4, [0, 2, 5], Phase.DECODE)
        use(bench.cache, files, 3, ALL)
        bench.settle()
        assert bench.store.of(4) == list(ALL)
        assert bench.counts(4).issued == EXPERTS - 3
        use(bench.cache, files, 3, ALL)  # nothing of it is read, and nothing is left to sweep
        bench.settle()
        assert bench.store.of(3) == bench.store.of(4) == list(ALL)


def test_only_what_the_prompt_will_want_is_swept(pack, files):
    """What no token of it goes to would be read in vain."""
    with Bench(pack, readers=1) as bench:
        groups = bench.cache.acquire(3, ALL, Phase.PREFILL)
        groups.follow(4, [7, 2])
        assert sorted(lease.expert for group in groups for lease in group) == list(ALL)
        bench.settle()
        assert bench.store.of(4) == [2, 7]
        assert bench.counts(4).issued == 2


def test_an_acquire_that_is_over_starts_no_sweep(pack, files):
    """A prompt that was cancelled between the two must leave nothing behind."""
    with Bench(pack) as bench:
        groups = bench.cache.acquire(3, ALL, Phase.PREFILL)
        groups.close()
        groups.follow(4, ALL)
        bench.settle()
        assert bench.store.of(4) == []
        assert_nothing_is_lost(bench.cache)


def test_a_layer_of_another_cache_is_not_swept(pack, files):
    first = [layer for layer in SIZES if layer < 5]
    with ExpertPool.open(
        pack,
        [
            Placement("cpu", TOTAL, first),
            Placement("cpu", TOTAL, [layer for layer in SIZES if layer not in first]),
        ],
    ) as pool:
        use(pool, files, 4, ALL)
        settle(pool._readers)
        assert pool.stats.prefetch.issued == 0


def test_a_layer_lacks_something_until_all_of_it_is_there(pack, files):
    """A prompt need not foresee what a layer will be asked for that has everything, or no room for guesses."""
    with Bench(pack) as bench:
        assert bench.cache.lacks(4)
        use(bench.cache, files, 4, MOST, Phase.DECODE)
        assert bench.cache.lacks(4)
        use(bench.cache, files, 4, ALL, Phase.DECODE)
        assert not bench.cache.lacks(4)
    with Bench(pack, TIGHT) as bench:
        assert bench.cache.lacks(4)
        assert not bench.cache.lacks(11)


def test_decoding_never_sweeps(pack, files):
    with Bench(pack) as bench:
        use(bench.cache, files, 3, ALL, Phase.DECODE)
        bench.settle()
        assert bench.cache.stats.prefetch.issued == 0


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PREFILL])
def test_whoever_asks_next_stops_the_sweep(pack, files, phase):
    """A token's reads would queue behind each read of a layer that another prompt, perhaps cancelled, wanted."""
    with Bench(pack, readers=1) as bench:
        bench.store.hold((4, 0))
        use(bench.cache, files, 3, ALL)
        assert bench.store.began[4, 0].wait(20)
        asked = bench.cache.acquire(7, [5], phase)
        bench.store.open()
        assert [lease.expert for group in asked for lease in group] == [5]
        bench.settle()
        assert bench.store.of(4) == [0, 1]  # one was being read, one queued
        assert_nothing_is_lost(bench.cache)


def test_a_layer_that_is_reached_is_read_on_demand(pack, files):
    """Guesses at what was not asked for would stay, as if their layer were still to come."""
    with Bench(pack, readers=1) as bench:
        bench.store.hold((4, 0))
        use(bench.cache, files, 3, ALL)
        assert bench.store.began[4, 0].wait(20)
        groups = bench.cache.acquire(4, MOST[:-1], Phase.PREFILL)
        bench.store.open()
        assert sorted(lease.expert for group in groups for lease in group) == list(MOST[:-1])
        bench.settle()
        assert bench.store.of(4) == list(range(EXPERTS - 1))
        assert bench.counts(4).issued == 2


def test_a_prompt_that_is_dropped_leaves_a_bounded_sweep_and_no_pinned_slot(pack, files):
    """Ctrl-C in a prompt must not leave the disk busy, or slots held."""
    with Bench(pack, TIGHT) as bench:
        fit = bench.cache._guesses.limit // PAGE
        ask(bench.cache, 0).close()
        bench.settle()
        assert bench.store.of(1) == []
        use(bench.cache, files, 0, ALL, Phase.DECODE)
        groups = ask(bench.cache, 0)
        next(groups)
        del groups
        use(bench.cache, files, 5, [1], Phase.DECODE)
        bench.settle()
        assert len(bench.store.of(1)) <= fit
        assert_nothing_is_lost(bench.cache)
        for layer in SIZES:
            use(bench.cache, files, layer, ALL)


@pytest.fixture
def damaged(tmp_path):
    """A pack in which expert 3 of layer 1 is missing."""
    pack = make_pack(tmp_path / "own.lmpack", SIZES, EXPERTS, TOP_K)
    files = contents(pack)
    pack.expert_path(1, 3).unlink()
    return pack, files


def test_a_swept_expert_that_cannot_be_read_fails_only_who_asks_for_it(damaged):
    """A prompt that does not need the damaged file must come through, and one that does must hear of it."""
    pack, files = damaged
    with Bench(pack) as bench:
        use(bench.cache, files, 0, ALL)
        bench.settle()
        assert bench.held(1) == [0, 1, 2, *range(4, EXPERTS)]
        assert (bench.counts(1).issued, bench.counts(1).wasted) == (EXPERTS, 1)
        assert bench.counts(1).read_bytes == (EXPERTS - 1) * PAGE
        assert_nothing_is_lost(bench.cache)
        with pytest.raises(ExpertReadError, match="003"):
            use(bench.cache, files, 1, ALL)
        use(bench.cache, files, 1, bench.held(1))
        bench.settle()
        assert bench.held(2) == list(ALL)
        assert_nothing_is_lost(bench.cache)


def test_who_joins_a_swept_read_is_told_of_its_failure(damaged):
    pack, files = damaged
    with Bench(pack) as bench:
        bench.store.hold((1, 3))
        use(bench.cache, files, 0, ALL)
        assert bench.store.began[1, 3].wait(20)
        groups = bench.cache.acquire(1, [3], Phase.PREFILL)
        bench.store.open()
        with pytest.raises(ExpertReadError, match="003"):
            next(groups)
        bench.settle()
        assert (bench.counts(1).late, bench.counts(1).wasted) == (1, 0)
        assert_nothing_is_lost(bench.cache)


@pytest.mark.parametrize("joined", [False, True])
def test_closing_ends_a_sweep(pack, files, monkeypatch, joined):
    """Stopping the program in the middle of a prompt must end its threads, and not with a traceback."""
    uncaught = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    bench = Bench(pack)
    bench.store.hold(*((1, expert) for expert in ALL))
    groups = ask(bench.cache, 0)
    while next(groups, None):
        pass
    assert all(bench.store.began[1, expert].wait(20) for expert in range(4))  # each reader has one
    waiting = bench.cache.acquire(1, ALL, Phase.PREFILL) if joined else None
    bench.cache.close()
    if waiting is not None:
        with pytest.raises(LeanError, match="closed"):
            next(waiting)
    bench.store.open()
    bench.readers.close()
    assert len(bench.store.of(1)) <= 8  # those that were queued; none was begun for them
    assert bench.store.of(2) == []
    assert not any(thread.is_alive() for thread in bench.readers._threads)
    assert not uncaught
    bench.cache.close()


def test_where_every_expert_has_a_slot_nothing_ever_leaves(pack, files):
    """Kernels look experts up by their address there: one that a sweep replaced would be computed with as another."""
    with Bench(pack, TOTAL) as bench:
        assert bench.cache.plan.fits
        for layer in SIZES:
            use(bench.cache, files, layer, MOST)
            bench.settle()
        assert bench.cache._guesses.nbytes > 0
        assert bench.cache.stats.evictions == 0
        for layer, expert in bench.cache.resident():
            slot = bench.cache._resident[layer, expert]
            residents = bench.cache.residents(layer)
            assert residents.addresses[expert] == slot.data.data_ptr()
            assert slot.data.numpy().tobytes() == files[layer, expert]
        assert sum(int((bench.cache.residents(i).addresses != 0).sum()) for i in SIZES) == len(
            bench.cache.resident()
        )


def placements(budget, halves):
    """One device, or two that have every other stretch of layers."""
    if not halves:
        return [Placement("cpu", budget)]
    first = [*range(5), 11]
    return [
        Placement("cpu", budget // 2, layers)
        for layers in (first, [layer for layer in SIZES if layer not in first])
    ]


uses = st.lists(
    st.tuples(
        st.sampled_from(sorted(SIZES)),
        st.one_of(st.just(list(ALL)), st.lists(st.sampled_from(ALL), unique=True)),
        st.sampled_from([Phase.PREFILL, Phase.PREFILL, Phase.DECODE]),
        st.integers(1, 4),  # layers, one after the other
        st.booleans(),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(
    uses=uses,
    budget=st.integers(2 * FLOOR, TOTAL),
    halves=st.booleans(),
    readers=st.integers(1, 4),
    policy=st.sampled_from(["lru", "adaptive"]),
)
def test_with_sweeps_any_sequence_gets_the_files_bytes_and_counts_add_up(
    pack, files, uses, budget, halves, readers, policy
):
    """A sweep must change nothing but the time."""
    where = placements(budget, halves)
    with ExpertPool.open(pack, where, readers=readers, policy=POLICIES[policy]) as pool:
        for layer, experts, phase, layers, wait in uses:
            for at in [i for i in SIZES if i >= layer][:layers]:
                use(pool, files, at, experts, phase)
                for cache in pool.caches:
                    resident = cache.resident()
                    assert cache._guesses.nbytes <= cache._guesses.limit
                    for c in cache.plan.classes:
                        assert sum(key[0] in c.layers for key in resident) <= c.slots
                if wait:
                    settle(pool._readers)
        settle(pool._readers)
        for cache in pool.caches:
            assert_nothing_is_lost(cache)
            stats = cache.stats
            assert stats.reads == stats.total.misses + stats.prefetch.issued
            assert stats.reads == len(cache.resident()) + stats.evictions
            if cache.plan.fits:
                assert stats.evictions == 0


@pytest.mark.parametrize("budget", [2 * FLOOR, TIGHT, ROOMY, TOTAL])
def test_prompts_and_tokens_at_once_get_the_right_bytes_and_finish(pack, files, budget):
    """A server computes long prompts and tokens of several requests over one cache."""
    failures = []

    def work(seed):
        source = random.Random(seed)
        try:
            for _ in range(3):
                for layer in SIZES:
                    if seed % 2:
                        use(pool, files, layer, source.sample(ALL, source.choice([9, 10])))
                    else:
                        for _ in range(4):
                            use(pool, files, layer, source.sample(ALL, TOP_K), Phase.DECODE)
        except Exception as error:
            failures.append(error)

    with ExpertPool.open(pack, [Placement("cpu", budget)], readers=3) as pool:
        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not failures
        settle(pool._readers)
        assert_nothing_is_lost(pool.caches[0])
        assert pool.stats.reads <= pool.stats.total.misses + pool.stats.prefetch.issued
        assert (pool.stats.prefetch.issued > 0) == (budget >= TIGHT)
