"""Prefetch "auto": it finds out by the time of tokens whether reading ahead pays. Simulated clocks throughout."""

import heapq
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_packs import make_pack
from leanmoe.experts.cache import ExpertCache
from leanmoe.experts.device import CPUDevice
from leanmoe.experts.policy import LRU, Phase
from leanmoe.experts.prefetch import Prefetcher
from leanmoe.experts.readers import Ahead
from leanmoe.experts.slots import plan_slots
from leanmoe.experts.store import ExpertStore
from leanmoe.experts.throttle import Duel, Fixed, allowance, highest_level


def drive(duel, seconds, tokens, seed=0, noise=0.25, used=0.8):
    """Runs `tokens` tokens that take `seconds(level)`, times a random factor; how many were run at each level."""
    source, levels = random.Random(seed), Counter()
    for _ in range(tokens):
        level = duel.level
        levels[level] += 1
        issued = 10 if level else 0
        duel.token(seconds(level) * source.lognormvariate(0, noise), issued, round(issued * used))
    return levels


@pytest.mark.parametrize("seed", range(8))
def test_a_slower_setting_is_hardly_used(seed):
    """On a saturated disk prefetch must not cost anything beyond a few tokens of trying."""
    levels = drive(Duel(4), lambda level: 1 + 0.3 * level, 2000, seed)
    assert levels[0] >= 0.94 * 2000
    expected = sum(n * (1 + 0.3 * level) for level, n in levels.items())
    assert expected < 1.04 * 2000


@pytest.mark.parametrize("seed", range(8))
def test_a_faster_setting_is_found_and_kept(seed):
    """Where the disk has slack, reading ahead must stay on."""
    levels = drive(Duel(4), lambda level: 1 - 0.07 * level, 2000, seed)
    assert levels[0] < 0.2 * 2000
    assert levels[3] + levels[4] > 0.5 * 2000


def test_it_turns_itself_down_when_the_disk_becomes_saturated():
    """Another program starts to use the disk in the middle of an answer."""
    duel = Duel(4)
    drive(duel, lambda level: 1 - 0.07 * level, 600, noise=0.1)
    assert duel.kept > 0
    drive(duel, lambda level: 1 + 0.3 * level, 600, seed=1, noise=0.1)
    assert duel.kept == 0
    assert drive(duel, lambda level: 1 + 0.3 * level, 600, seed=2, noise=0.1)[0] > 0.9 * 600


def test_it_tries_again_after_a_while():
    """A disk that was busy at the start must not leave prefetch off for ever."""
    duel = Duel(4)
    drive(duel, lambda level: 1 + 0.3 * level, 300, noise=0.1)
    assert duel.kept == 0
    drive(duel, lambda level: 1 - 0.07 * level, 1500, noise=0.1)
    assert duel.kept > 0


def test_guesses_that_are_mostly_wrong_end_a_trial_before_its_time():
    """Text that the predictor cannot foresee: reads would be wasted, whatever the clock says."""
    levels = drive(Duel(4), lambda level: 0.9 if level else 1.0, 400, used=0.1)
    assert levels[0] > 0.8 * 400


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(1e-6, 100), st.integers(0, 50), st.floats(0, 1)), max_size=400))
def test_whatever_happens_the_level_is_one_that_exists(tokens):
    duel = Duel(highest_level(4))
    for seconds, issued, share in tokens:
        assert 0 <= duel.level <= highest_level(4)
        duel.token(seconds, issued, round(issued * share))


def test_levels_mean_more_and_more_reads():
    assert [allowance(level) for level in range(5)] == [
        Ahead(0, False), Ahead(1, False), Ahead(1, True), Ahead(2, True), Ahead(3, True)
    ]  # fmt: skip
    assert highest_level(4) == 4


EXPERTS, TOP_K, LAYERS = 16, 2, 8
SIZES = dict.fromkeys(range(LAYERS), 4096)


class SimulatedDisk:
    """Readers without threads on a simulated clock. One read alone takes `seconds`.

    Up to `lanes` reads at once go at full speed; more than that share the disk equally.
    """

    count = 4

    def __init__(self, seconds, lanes):
        self.now, self.seconds, self.lanes = 0.0, seconds, lanes
        self.allowed, self.queue = Ahead(0, False), []
        self.running = []  # [work left, task, whether for demand]

    def submit(self, tasks):
        self.running.extend([self.seconds, task, True] for task in tasks)

    def submit_ahead(self, key, due, task):
        if any(key == k for _, k, _ in self.queue):
            return False
        heapq.heappush(self.queue, (due, key, task))
        return True

    def cancel_ahead(self, key):
        before = len(self.queue)
        self.queue = [entry for entry in self.queue if entry[1] != key]
        heapq.heapify(self.queue)
        return len(self.queue) < before

    def allow_ahead(self, allowed):
        self.allowed = allowed

    def serve_demand(self):
        """Lets time pass until no demand read is left."""
        while any(demand for _, _, demand in self.running):
            self._step(float("inf"))

    def advance(self, seconds):
        """Lets `seconds` of computing pass."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self._step(end - self.now)

    def _step(self, most):
        while self.queue and sum(not demand for _, _, demand in self.running) < self.allowed.depth:
            if any(demand for _, _, demand in self.running) and not self.allowed.beside:
                break
            _, _, task = heapq.heappop(self.queue)
            self.running.append([self.seconds, task, False])
        speed = min(1.0, self.lanes / len(self.running)) if self.running else 1.0
        step = min([work / speed for work, _, _ in self.running] + [most])
        self.now += step
        for entry in self.running:
            entry[0] -= step * speed
        done = [entry for entry in self.running if entry[0] <= 1e-9]
        self.running = [entry for entry in self.running if entry[0] > 1e-9]
        for _, task, _ in done:
            task()


def decode(pack, throttle, tokens, *, read, compute, lanes, right=0.9):
    """Decodes through a small cache; the next layer's picks are foreseen with probability `right`. -> seconds."""
    disk, source = SimulatedDisk(read, lanes), random.Random(3)
    plan = plan_slots(SIZES, dict.fromkeys(SIZES, EXPERTS), TOP_K, 4096 * LAYERS * EXPERTS // 4)
    cache = ExpertCache(ExpertStore(pack), plan, CPUDevice(), disk, LRU)
    prefetcher = Prefetcher(dict.fromkeys(SIZES, cache), disk, throttle, clock=lambda: disk.now)
    for _ in range(tokens):
        picks = [source.sample(range(EXPERTS), TOP_K) for _ in SIZES]
        for layer, picked in enumerate(picks):
            with cache.acquire(layer, picked) as groups:
                prefetcher.visit(layer, Phase.DECODE, picked)
                if layer + 1 < LAYERS:
                    chances = np.zeros(EXPERTS)
                    for e in picks[layer + 1]:
                        chances[e if source.random() < right else source.randrange(EXPERTS)] = 0.85
                    prefetcher.expect(layer + 1, chances)
                disk.serve_demand()
                for _ in groups:
                    pass
            disk.advance(compute)
    counts = cache.stats.prefetch
    assert counts.unused >= 0
    return disk.now, cache.stats


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("throttle") / "small.lmpack", SIZES, EXPERTS, TOP_K)


def test_on_a_saturated_disk_auto_turns_itself_to_nothing(pack):
    """The disk is busy all the time and compute is nothing: what is read ahead only delays what is needed."""
    setting = {"read": 1.0, "compute": 0.01, "lanes": 1, "right": 0.5}
    off, _ = decode(pack, Fixed(0), 400, **setting)
    on, _ = decode(pack, Fixed(3), 400, **setting)
    auto, stats = decode(pack, duel := Duel(4), 400, **setting)
    assert on > 1.05 * off  # it would have cost something
    assert duel.kept == 0
    assert auto < 1.03 * off
    assert stats.prefetch.issued < 0.1 * stats.total.misses


def test_where_the_disk_has_slack_auto_stays_on(pack):
    """Compute takes as long as reading: what is read ahead is free, and its readers do not wait."""
    setting = {"read": 1.0, "compute": 2.0, "lanes": 2}
    off, _ = decode(pack, Fixed(0), 400, **setting)
    on, _ = decode(pack, Fixed(3), 400, **setting)
    auto, stats = decode(pack, duel := Duel(4), 400, **setting)
    assert on < 0.8 * off
    assert duel.kept > 0
    assert auto < 0.9 * off
    assert stats.prefetch.useful > 5 * stats.prefetch.wasted
