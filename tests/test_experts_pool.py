"""The pool: several devices, loading everything, and what it refuses."""

import json
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest
import torch

from expert_packs import contents, make_pack
from leanmoe.errors import BudgetError, ExpertReadError, LeanError, UnsupportedError, UsageError
from leanmoe.experts.device import host_staging_bytes
from leanmoe.experts.pool import ExpertPool, Placement
from leanmoe.experts.readers import Readers
from leanmoe.experts.slots import slot_floor

PAGE = 4096
EXPERTS, TOP_K = 8, 2
SIZES = {0: PAGE, 1: PAGE, 2: 2 * PAGE, 3: 2 * PAGE}
TOTAL = sum(SIZES.values()) * EXPERTS


@pytest.fixture
def pack(tmp_path):
    return make_pack(tmp_path / "small.lmpack", SIZES, EXPERTS, TOP_K)


def experts_of(pool, layer, experts):
    return {
        lease.expert: lease.data.cpu().numpy().tobytes()
        for group in pool.acquire(layer, experts)
        for lease in group
    }


def test_two_devices_each_serve_their_layers(pack):
    """A model split between two devices: each keeps within its own budget, and every layer has an owner."""
    files = contents(pack)
    budgets = [TOTAL // 3, TOTAL // 2]
    with ExpertPool.open(pack, [Placement("cpu", b) for b in budgets]) as pool:
        owned = [[layer for c in plan.classes for layer in c.layers] for plan in pool.plans]
        assert sorted(owned[0] + owned[1]) == sorted(SIZES)
        assert all(owned)
        assert max(owned[0]) < min(owned[1])
        for _ in range(2):
            for layer in SIZES:
                got = experts_of(pool, layer, range(EXPERTS))
                assert got == {e: files[layer, e] for e in range(EXPERTS)}
        for cache, budget in zip(pool.caches, budgets, strict=True):
            assert cache.plan.slot_bytes <= budget
            assert cache.stats.total.lookups == 2 * EXPERTS * len(cache.stats.layers)
        assert pool.stats.total.lookups == 2 * EXPERTS * len(SIZES)
        assert pool.layout(2).file_bytes == 2 * PAGE


def test_layers_can_be_placed_by_hand(pack):
    with ExpertPool.open(pack, [Placement("cpu", TOTAL, [3, 0]), Placement("cpu", TOTAL, [1, 2])]) as pool:
        assert pool.load_all() == len(SIZES) * EXPERTS
        assert {key[0] for key in pool.caches[0].resident()} == {0, 3}
    for layers in ([0, 1], [0, 1, 2, 3, 3], [0, 1, 2, 4]):
        with pytest.raises(UsageError, match=r"\[0, 1, 2, 3\]"):
            ExpertPool.open(pack, [Placement("cpu", TOTAL, layers)])
    with pytest.raises(UsageError):
        ExpertPool.open(pack, [Placement("cpu", TOTAL, [0, 1, 2, 3]), Placement("cpu", TOTAL)])


def test_with_room_for_all_nothing_is_read_after_loading(pack):
    """ "Fully resident" must be true before anything is timed as such."""
    files = contents(pack)
    with ExpertPool.open(pack, [Placement("cpu", TOTAL)]) as pool:
        assert pool.plans[0].fits
        assert pool.load_all() == len(files)
        assert pool.load_all() == 0
        assert sorted(pool.resident()) == sorted(files)
        before = pool.stats
        for layer in SIZES:
            experts_of(pool, layer, range(EXPERTS))
        after = pool.stats - before
        assert (after.hit_rate, after.reads, after.evictions) == (1.0, 0, 0)


def test_loading_evicts_nothing_and_reports_a_bad_file(pack):
    """Warming up must not push out what is in use, nor hide that the pack is damaged."""
    pack.expert_path(3, 7).unlink()
    with ExpertPool.open(pack, [Placement("cpu", TOTAL // 2)]) as pool:
        experts_of(pool, 0, [6, 7])
        pool.load_all()
        assert pool.stats.evictions == 0
        assert {(0, 6), (0, 7)} <= set(pool.resident())
    with (
        ExpertPool.open(pack, [Placement("cpu", TOTAL)]) as pool,
        pytest.raises(ExpertReadError, match="007"),
    ):
        pool.load_all()


def test_demand_reads_overtake_background_ones():
    """The first token must not wait for the warm-up to end."""
    readers, order, gate, started = Readers(1), [], threading.Event(), threading.Event()

    def blocking():
        started.set()
        return gate.wait(20)

    running = readers.submit_background(blocking)
    assert started.wait(20)
    queued = [readers.submit_background(lambda: not order.append("background")) for _ in range(3)]
    done = threading.Event()
    readers.submit([lambda: order.append("demand"), done.set])
    gate.set()
    assert running.result(20)
    assert done.wait(20)
    assert all(future.result(20) for future in queued)
    assert order == ["demand", *["background"] * 3]
    readers.close()


def test_background_reads_leave_a_thread_for_demand():
    """However slow the warm-up's reads are, a demand read starts at once."""
    readers, gate = Readers(3), threading.Event()
    running = [readers.submit_background(lambda: gate.wait(20)) for _ in range(6)]
    for _ in range(100):
        done = threading.Event()
        readers.submit([done.set])
        assert done.wait(20)
    gate.set()
    assert all(future.result(20) for future in running)
    readers.close()


def test_closing_stops_loading(pack):
    pool = ExpertPool.open(pack, [Placement("cpu", TOTAL)], readers=1)
    gate, started = threading.Event(), threading.Event()

    def blocking():
        started.set()
        return gate.wait(20)

    pool._readers.submit_background(blocking)
    assert started.wait(20)
    loading = pool.preload([(0, 0), (0, 1)])
    closing = threading.Thread(target=pool.close)
    closing.start()
    for future in loading:
        with pytest.raises(CancelledError):
            future.result(20)
    gate.set()
    closing.join(20)
    assert not closing.is_alive()
    pool.close()
    with pytest.raises(LeanError, match="closed"):
        pool.load_all()
    with pytest.raises(LeanError, match="closed"):
        pool.acquire(0, [0])


def test_what_cannot_work_is_refused(pack):
    floor = slot_floor(SIZES, dict.fromkeys(SIZES, EXPERTS), TOP_K)
    with pytest.raises(BudgetError, match=f"cpu: .*{floor} bytes"):
        ExpertPool.open(pack, [Placement("cpu", floor - 1)])
    with pytest.raises(UnsupportedError, match="meta"):
        ExpertPool.open(pack, [Placement("meta", TOTAL)])
    assert host_staging_bytes(torch.device("cpu"), 4, 3 << 20) == 0
    assert host_staging_bytes(torch.device("cuda:0"), 4, 3 << 20) == 16 << 20


# In a process of its own: the memory that other tests left may go back to the kernel at any time.
GROWTH = """
import json, os, sys
from pathlib import Path
from leanmoe.experts.pool import ExpertPool, Placement
from leanmoe.pack import open_pack

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def read(pool, layer, experts):
    return max(resident() for group in pool.acquire(layer, experts))

pack, budget, experts = open_pack(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
with ExpertPool.open(pack, [Placement("cpu", budget // 16)]) as pool:
    read(pool, 0, range(4))  # whatever the first read needs of libraries
before = resident()
with ExpertPool.open(pack, [Placement("cpu", budget)]) as pool:
    opened = resident()
    peak = max(read(pool, layer, range(experts)) for layer in (0, 1, 0, 1))
    filled = resident()
print(json.dumps([size - before for size in (opened, peak, filled, resident())]))
"""


def test_memory_grows_by_the_slots_and_no_more(tmp_path):
    """The budget is a hard cap, taken only as slots are used, and given back at the end."""
    size, slack = 1 << 20, 12 << 20
    path = tmp_path / "big.lmpack"
    make_pack(path, {0: size, 1: size}, 64, 2)
    budget = 64 * size
    command = [sys.executable, "-c", GROWTH, str(path), str(budget), "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    opened, peak, filled, closed = json.loads(done.stdout)
    assert opened < slack
    assert budget - slack < filled <= peak < budget + slack
    assert closed < slack


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_slots_on_a_gpu_hold_the_files_bytes(pack):
    files = contents(pack)
    floor = slot_floor(SIZES, dict.fromkeys(SIZES, EXPERTS), TOP_K)
    with ExpertPool.open(pack, [Placement("cuda:0", floor)]) as pool:
        for _ in range(3):
            for layer in SIZES:
                for group in pool.acquire(layer, range(EXPERTS)):
                    for lease in group:
                        assert lease.data.is_cuda
                        # The clone runs on the GPU later: the slot may only be overwritten after that.
                        copy = lease.data.clone()
                        assert copy.cpu().numpy().tobytes() == files[layer, lease.expert]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_slot_is_not_overwritten_before_queued_work_has_read_it(pack):
    """Releasing a lease only says that the work was queued: the next copy into its slot must wait for it."""
    files = contents(pack)
    floor = slot_floor(SIZES, dict.fromkeys(SIZES, EXPERTS), TOP_K)
    copies = {}
    with ExpertPool.open(pack, [Placement("cuda:0", floor)]) as pool:
        for group in pool.acquire(2, range(EXPERTS)):
            torch.cuda._sleep(20_000_000)  # keeps the stream busy, so that the clones below run late
            copies |= {lease.expert: lease.data.clone() for lease in group}
    assert {e: c.cpu().numpy().tobytes() for e, c in copies.items()} == {
        e: files[2, e] for e in range(EXPERTS)
    }
