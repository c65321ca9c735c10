"""The expert cache: what its leases hold, under any sequence of acquires, any threads, any fault."""

import os
import random
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_packs import GatedStore, contents, make_pack
from leanmoe.errors import ExpertReadError, LeanError
from leanmoe.experts.cache import ExpertCache
from leanmoe.experts.device import CPUDevice
from leanmoe.experts.policy import Phase
from leanmoe.experts.pool import ExpertPool, Placement
from leanmoe.experts.readers import Readers
from leanmoe.experts.slots import plan_slots, slot_floor

PAGE = 4096
EXPERTS, TOP_K = 12, 2
SIZES = {0: PAGE, 1: 2 * PAGE, 3: PAGE, 4: 3 * PAGE}  # layer 2 is dense
COUNTS = dict.fromkeys(SIZES, EXPERTS)
FLOOR = slot_floor(SIZES, COUNTS, TOP_K)
TOTAL = sum(SIZES.values()) * EXPERTS


pytestmark = pytest.mark.usefixtures("deadlock_guard")


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("cache") / "small.lmpack", SIZES, EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def files(pack):
    return contents(pack)


@contextmanager
def gated(pack, budget=FLOOR, readers=4):
    """A store to steer, and a cache over it."""
    store, threads = GatedStore(pack), Readers(readers)
    cache = ExpertCache(store, plan_slots(SIZES, COUNTS, TOP_K, budget), CPUDevice(), threads)
    try:
        yield store, cache
    finally:
        store.open()
        cache.close()
        threads.close()


def use(source, files, layer, experts, phase=Phase.DECODE):
    """Acquires `experts`, checks each lease when it comes and before it goes; returns the groups' sizes."""
    got, groups = [], []
    for leases in source.acquire(layer, experts, phase):
        for lease in leases:
            assert lease.layer == layer
            assert lease.data.numpy().tobytes() == files[layer, lease.expert]
        got += [lease.expert for lease in leases]
        groups.append(len(leases))
        for lease in leases:
            assert lease.data.numpy().tobytes() == files[layer, lease.expert], "overwritten while held"
    assert sorted(got) == sorted(experts)
    return groups


def finished(call):
    """Runs `call` in a thread; the returned function waits for its result, or raises what it raised."""
    result, failure = [], []

    def run():
        try:
            result.append(call())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(20)
        assert not thread.is_alive(), "blocked"
        if failure:
            raise failure[0]
        return result[0]

    return wait


acquires = st.lists(
    st.tuples(
        st.sampled_from(sorted(SIZES)),
        st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS),
        st.sampled_from([Phase.DECODE, Phase.PREFILL]),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(acquires=acquires, extra=st.floats(0, 1.1), readers=st.integers(1, 4))
def test_any_sequence_of_acquires_gets_the_files_bytes(pack, files, acquires, extra, readers):
    """Otherwise the model computes with the wrong weights: silently wrong text."""
    budget = FLOOR + int(extra * TOTAL)
    asked = Counter()
    with ExpertPool.open(pack, [Placement("cpu", budget)], readers=readers) as pool:
        for layer, experts, phase in acquires:
            use(pool, files, layer, experts, phase)
            asked[layer] += len(experts)
            resident = pool.resident()
            assert len(set(resident)) == len(resident)
            for c in pool.plans[0].classes:
                assert sum(key[0] in c.layers for key in resident) <= c.slots
        stats = pool.stats
    assert {layer: s.lookups for layer, s in stats.layers.items()} == {i: asked[i] for i in SIZES}
    assert stats.total.misses == stats.reads == len(resident) + stats.evictions if acquires else True
    if pool.plans[0].fits:
        assert stats.evictions == 0


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PREFILL])
def test_a_whole_layer_through_the_fewest_slots(pack, files, phase):
    """A prompt touches more experts than there are slots: it must come through, reading each once."""
    with gated(pack) as (store, cache):
        for layer in SIZES:
            use(cache, files, layer, range(EXPERTS), phase)
        assert set(store.reads.values()) == {1}


def test_waves_compute_one_half_while_the_other_is_read(pack, files):
    """With every slot ready and more to read, half comes first, so that its slots are refilled early."""
    with gated(pack) as (store, cache):
        slots = 2 * TOP_K
        use(cache, files, 1, range(slots))
        store.hold(*((1, e) for e in range(slots, EXPERTS)))
        groups = cache.acquire(1, range(EXPERTS))
        assert len(next(groups)) == slots // 2
        assert not store.reads[1, slots]
        second = next(groups)  # gives the first half back, so its slots are being refilled now
        assert len(second) == slots // 2
        store.open(*((1, e) for e in range(slots, EXPERTS)))
        assert sum(len(group) for group in groups) == EXPERTS - slots


def test_hits_come_first_and_at_once_while_misses_are_read(pack, files):
    """Otherwise nothing is computed during a read."""
    with gated(pack) as (store, cache):
        use(cache, files, 0, [1, 2])
        store.hold((0, 3), (0, 4))
        groups = cache.acquire(0, [1, 3, 2, 4])
        assert [lease.expert for lease in next(groups)] == [1, 2]
        store.open((0, 4))
        assert [lease.expert for lease in next(groups)] == [4]
        store.open((0, 3))
        assert [lease.expert for lease in next(groups)] == [3]
        assert next(groups, None) is None
        layer = cache.stats.layers[0]
        assert (layer.hits, layer.joined, layer.misses) == (2, 0, 4)


def test_a_prompt_gets_experts_in_the_order_in_which_it_asks(pack, files):
    """It adds up what they say as they come: the bits would depend on what was resident."""
    with gated(pack, TOTAL, readers=2) as (store, cache):
        use(cache, files, 0, [2, 4])
        store.hold((0, 1), (0, 3))
        groups = cache.acquire(0, [0, 1, 2, 3, 4], Phase.PREFILL)
        assert [lease.expert for lease in next(groups)] == [0]
        store.open((0, 3))
        while (0, 3) not in cache.resident():
            os.sched_yield()
        store.open((0, 1))
        assert [lease.expert for group in groups for lease in group] == [1, 2, 3, 4]


def test_what_a_prompt_has_too_early_makes_room_for_what_comes_before(pack, files):
    """With every slot held by experts whose turn comes later it would wait for ever."""
    with gated(pack) as (store, cache):
        slots = 2 * TOP_K
        later = range(EXPERTS - slots, EXPERTS)
        use(cache, files, 4, later)
        reads = sum(store.reads.values())
        groups = cache.acquire(4, range(EXPERTS), Phase.PREFILL)
        got = finished(lambda: [lease.expert for group in groups for lease in group])()
        assert got == list(range(EXPERTS))
        # What went was what is wanted last, and little of it.
        again = sum(store.reads.values()) - reads - (EXPERTS - slots)
        assert again <= slots


def test_two_acquires_of_one_expert_read_it_once(pack, files):
    """Two requests that want the same expert at the same time must not read it twice."""
    with gated(pack) as (store, cache):
        store.hold((0, 5))
        first, second = cache.acquire(0, [5]), cache.acquire(0, [5, 6])
        store.open((0, 5))
        assert [lease.expert for lease in next(first)] == [5]
        assert sorted(lease.expert for group in second for lease in group) == [5, 6]
        assert store.reads == {(0, 5): 1, (0, 6): 1}
        assert cache.stats.layers[0].joined == 1


def test_a_held_lease_is_not_evicted_by_others(pack, files):
    """A slot that is being computed with must keep its bytes, whatever other threads need."""
    with gated(pack) as (_, cache):
        use(cache, files, 4, [0, 1])
        held = cache.acquire(4, [0, 1])
        leases = next(held)
        for expert in range(2, EXPERTS):
            use(cache, files, 4, [expert])
        assert [lease.data.numpy().tobytes() for lease in leases] == [files[4, e] for e in (0, 1)]
        assert {(4, 0), (4, 1)} <= set(cache.resident())
        held.close()
        use(cache, files, 4, range(2, EXPERTS))
        assert not {(4, 0), (4, 1)} & set(cache.resident())


def test_an_acquire_without_slots_waits_for_those_held_by_another(pack, files, monkeypatch):
    """Two requests that together want more slots than there are: one waits, neither fails, none deadlocks."""
    monkeypatch.setattr(
        "leanmoe.experts.cache._RECLAIM_SECONDS", 3600
    )  # it must be woken, not find out by itself
    with gated(pack) as (_, cache):
        slots = 2 * TOP_K
        use(cache, files, 4, range(slots))
        first = cache.acquire(4, range(slots))
        assert len(next(first)) == slots  # every slot of the class is held
        waiting = [finished(lambda e=e: use(cache, files, 4, [e, e + 1])) for e in (5, 7, 9)]
        assert next(first, None) is None
        for wait in waiting:
            wait()


def test_a_waiting_acquire_goes_before_one_that_wants_more_slots(pack, files):
    """A long prompt must not keep a short request waiting for a slot until it is through."""
    with gated(pack) as (store, cache):
        use(cache, files, 4, range(2 * TOP_K))
        store.hold(*((4, e) for e in range(2 * TOP_K, EXPERTS - 1)))
        greedy = cache.acquire(4, range(EXPERTS - 1))
        next(greedy)
        waiting = finished(lambda: use(cache, files, 4, [EXPERTS - 1]))
        while not cache._shelves[4].starved:
            os.sched_yield()
        next(greedy)  # gives slots back, and wants them all for itself
        waiting()


def test_an_expert_that_another_acquire_fetched_meanwhile_is_not_read_again(pack, files):
    """Else a prompt's later waves would waste reads and slots on what a neighbour has brought in."""
    with gated(pack, TOTAL, readers=2) as (store, cache):
        prompt = cache.acquire(0, range(EXPERTS), Phase.PREFILL)  # reads some now, the rest later
        use(cache, files, 0, [EXPERTS - 1])
        assert sorted(lease.expert for group in prompt for lease in group) == list(range(EXPERTS))
        assert store.reads[0, EXPERTS - 1] == 1
        assert len(cache.resident()) == EXPERTS


def test_dropped_iterators_give_their_slots_back(pack, files):
    """Ctrl-C in the middle of a layer must not leak slots until nothing can be read any more."""
    with gated(pack) as (_, cache):
        for expert in range(EXPERTS):
            assert finished(lambda e=expert: next(cache.acquire(4, [e, (e + 1) % EXPERTS])))()
        assert finished(lambda: use(cache, files, 4, range(EXPERTS)))()


def test_closing_an_iterator_early_leaves_its_reads_to_others(pack, files):
    """A cancelled request neither disturbs a request that joined its read, nor wastes the read."""
    with gated(pack) as (store, cache):
        store.hold((0, 1), (0, 2))
        cancelled, other = cache.acquire(0, [1, 2]), cache.acquire(0, [1])
        cancelled.close()
        cancelled.close()
        assert next(cancelled, None) is None
        store.open((0, 1), (0, 2))
        assert [lease.expert for lease in next(other)] == [1]
        other.close()
        assert use(cache, files, 0, [1, 2])
        assert store.reads == {(0, 1): 1, (0, 2): 1}


@pytest.mark.parametrize("extra", [0, TOTAL // 3])
def test_many_threads_get_the_right_bytes_and_finish(pack, files, extra):
    """The server computes for several requests at once over one cache."""
    threads, rounds = 6, 40
    start = threading.Barrier(threads)

    def work(seed):
        source = random.Random(seed)
        start.wait(20)
        for _ in range(rounds):
            experts = source.sample(range(EXPERTS), source.choice([1, 2, TOP_K, EXPERTS]))
            use(
                pool, files, source.choice(list(SIZES)), experts, source.choice([Phase.DECODE, Phase.PREFILL])
            )

    with ExpertPool.open(pack, [Placement("cpu", FLOOR + extra)], readers=3) as pool:
        for wait in [finished(lambda seed=seed: work(seed)) for seed in range(threads)]:
            wait()
        total = pool.stats.total
        assert (
            pool.stats.reads <= total.misses
        )  # an expert read by another acquire meanwhile is not read again
        for layer in SIZES:
            assert finished(lambda layer=layer: use(pool, files, layer, range(EXPERTS)))()


@pytest.fixture
def own_pack(tmp_path):
    return make_pack(tmp_path / "own.lmpack", SIZES, EXPERTS, TOP_K)


def damage(kind, path, other):
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[:-1])
    elif kind == "too long":
        path.write_bytes(data + b"\0" * PAGE)
    elif kind == "bit flipped":
        path.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    elif kind == "swapped":
        path.write_bytes(other.read_bytes())
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    return data


@pytest.mark.parametrize("kind", ["missing", "truncated", "too long", "bit flipped", "swapped", "directory"])
def test_a_damaged_file_fails_only_those_who_need_it_until_it_is_repaired(own_pack, kind):
    """One bad file must not stop the server, nor ever be computed with."""
    files = contents(own_pack)
    path = own_pack.expert_path(1, 3)
    good = damage(kind, path, own_pack.expert_path(1, 4))
    with ExpertPool.open(own_pack, [Placement("cpu", FLOOR)]) as pool:
        for _ in range(5):  # more often than there are slots: none may be lost
            with pytest.raises(ExpertReadError, match=str(path)) as error:
                use(pool, files, 1, [2, 3, 4])
            assert "lean verify" in str(error.value)
            assert (1, 3) not in pool.resident()
            use(pool, files, 1, [2, 4, 5])
            use(pool, files, 0, range(EXPERTS))
        if path.is_dir():
            path.rmdir()
        path.write_bytes(good)
        use(pool, files, 1, [2, 3, 4])


def test_a_failed_read_does_not_disturb_an_acquire_that_shares_other_reads(own_pack):
    """Two requests share an expert in flight; one also needs a missing file. The other one must go on."""
    files = contents(own_pack)
    own_pack.expert_path(0, 1).unlink()
    with gated(own_pack) as (store, cache):
        store.hold((0, 2))
        failing, fine = cache.acquire(0, [1, 2]), cache.acquire(0, [2])
        with pytest.raises(ExpertReadError, match="001"):
            next(failing)
        assert next(failing, None) is None
        store.open((0, 2))
        (lease,) = next(fine)
        assert lease.data.numpy().tobytes() == files[0, 2]
        assert store.reads[0, 2] == 1


def test_everyone_who_waits_for_a_bad_file_is_told(own_pack):
    own_pack.expert_path(0, 1).unlink()
    with gated(own_pack) as (store, cache):
        store.hold((0, 1))
        waiting = [cache.acquire(0, [1]) for _ in range(3)]
        store.open((0, 1))
        errors = []
        for groups in waiting:
            with pytest.raises(ExpertReadError) as error:
                next(groups)
            errors.append(error.value)
        assert len({id(error) for error in errors}) == 3  # a traceback each
        assert store.reads[0, 1] == 1


def test_close_wakes_those_who_wait_and_can_be_repeated(pack, files):
    """Stopping the program while a read hangs must end the requests with an error, not hang with them."""
    store, threads = GatedStore(pack), Readers(2)
    cache = ExpertCache(store, plan_slots(SIZES, COUNTS, TOP_K, FLOOR), CPUDevice(), threads)
    use(cache, files, 4, range(2 * TOP_K))
    held = cache.acquire(4, range(2 * TOP_K))
    leases = next(held)
    starved = cache.acquire(4, [9])
    store.hold((0, 1))
    reading = cache.acquire(0, [1])
    waiting = [finished(lambda g=g: next(g)) for g in (starved, reading)]
    cache.close()
    for wait in waiting:
        with pytest.raises(LeanError, match="closed"):
            wait()
    store.open((0, 1))
    threads.close()
    threads.close()
    cache.close()
    for lease in leases:  # still readable
        assert lease.data.numpy().tobytes() == files[4, lease.expert]
    assert next(held, None) is None
    with pytest.raises(LeanError, match="closed"):
        cache.acquire(0, [1])
    assert not [t for t in threading.enumerate() if t in threads._threads]


def test_an_expert_that_does_not_exist_is_refused(pack, files):
    with gated(pack) as (_, cache):
        for experts in ([EXPERTS], [0, -1]):
            with pytest.raises(ValueError, match="layer 0"):
                cache.acquire(0, experts)
        use(cache, files, 0, range(EXPERTS))  # nothing was pinned by the refused ones


def test_prefill_leaves_the_experts_that_decoding_uses(pack, files):
    """A long prompt in a conversation must not make the next answer start cold."""
    budget = TOTAL // 2
    with gated(pack, budget) as (_, cache):
        used = {layer: [1, 4] for layer in SIZES}
        for phase_experts in (range(EXPERTS), *[[1, 4]] * 3):
            for layer in SIZES:
                use(cache, files, layer, phase_experts)
        for layer in SIZES:
            use(cache, files, layer, range(EXPERTS), Phase.PREFILL)
        before = cache.stats
        for layer, experts in used.items():
            use(cache, files, layer, experts)
        assert (cache.stats - before).hit_rate == 1.0


def test_decoding_reuses_what_stays(pack, files):
    """LRU: a working set that fits is read once; a hit rate of 1 afterwards, and no eviction."""
    with gated(pack, TOTAL // 2) as (store, cache):
        for _ in range(3):
            for layer in SIZES:
                use(cache, files, layer, [3, 7])
        assert set(store.reads.values()) == {1}
        stats = cache.stats
        assert stats.total.hits == 2 * stats.total.misses
        assert stats.read_bytes == 2 * sum(SIZES.values())
        assert stats.evictions == 0
