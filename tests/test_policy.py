"""Eviction policies as the cache and the simulator call them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanmoe.errors import UsageError
from leanmoe.experts.policy import POLICIES, Adaptive, AlmostWinners, Forecast, Frequency, Phase, policy_named
from leanmoe.experts.slots import SlotClass

LAYERS, EXPERTS = (0, 3, 4), 6
FORECASTS = [kind for kind in POLICIES.values() if issubclass(kind, Forecast)]


def slots(n: int, layers: tuple[int, ...] = LAYERS, experts: int = EXPERTS, top_k: int = 2) -> SlotClass:
    return SlotClass(4096, layers, experts * len(layers), 2 * top_k, top_k * len(layers), n)


class Driver:
    """Calls a policy as a cache with `n` slots does."""

    def __init__(self, policy, n):
        self.policy, self.n, self.resident = policy, n, set()

    def read_prompt(self, layer, picks):
        """`picks` [tokens, top-k]: what each token of a prompt uses."""
        if self.policy.wants_prompts:
            self.policy.on_prompt(layer, np.array(picks))
        self.use(layer, sorted({int(e) for token in picks for e in token if e >= 0}), Phase.PREFILL)

    def use(self, layer, experts, phase=Phase.DECODE):
        """How many of them were resident."""
        keys = [(layer, e) for e in experts]
        hits = [k for k in keys if k in self.resident]
        pinned = set(hits)
        self.policy.on_use(keys, phase)
        for key in keys:
            if key not in self.resident:
                if phase is Phase.PREFILL and len(pinned) == 2:
                    pinned.clear()  # a prompt's experts are given back as soon as they were used
                self.insert(key, phase, pinned)
                pinned.add(key)
        return len(hits)

    def insert(self, key, phase, pinned=frozenset()):
        if len(self.resident) == self.n:
            victim = self.policy.victim(key, phase, pinned.__contains__)
            assert victim in self.resident
            assert victim not in pinned
            self.resident.remove(victim)
            self.policy.on_evict(victim)
        self.resident.add(key)
        self.policy.on_insert(key, phase)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    n=st.integers(4, 12),
    uses=st.lists(
        st.tuples(
            st.sampled_from(LAYERS),
            st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=2, unique=True),
            st.sampled_from([Phase.DECODE, Phase.PREFILL]),
        ),
        max_size=60,
    ),
)
def test_a_policy_names_a_resident_that_is_not_pinned_whenever_there_is_one(name, n, uses):
    """A cache would overwrite what is being computed, or wait for ever with a free choice."""
    driver = Driver(POLICIES[name](slots(n)), n)
    for layer, experts, phase in uses:
        if phase is Phase.PREFILL:
            driver.read_prompt(layer, [(experts * 2)[:2], (experts[-1], -1)])
        else:
            driver.use(layer, experts)
        assert driver.policy.victim((0, 5), phase, lambda key: True) is None
    assert len(driver.resident) <= n


@pytest.mark.parametrize("kind", FORECASTS)
def test_the_victim_is_the_one_that_is_used_last(kind):
    """The longest waits are kept for each layer; where they went stale, the wrong expert would leave."""
    rng = np.random.default_rng(0)
    policy = kind(slots(9))
    driver = Driver(policy, 9)
    for _ in range(300):
        layer = int(rng.choice(LAYERS))
        driver.use(layer, rng.choice(EXPERTS, 2, replace=False).tolist())
        if policy.wants_predictions:
            policy.on_predict(int(rng.choice(LAYERS)), rng.random(EXPERTS))
        incoming = (int(rng.choice(LAYERS)), 0)
        pinned = {key for key in driver.resident if rng.random() < 0.3}
        waits = {
            (layer, expert): policy._wait[row, expert] + policy._distance[row]
            for row, layer in enumerate(LAYERS)
            for expert in range(EXPERTS)
            if (layer, expert) in driver.resident - pinned
            and (layer == incoming[0] or sum(key[0] == layer for key in driver.resident) > policy._floor)
        }
        victim = policy.victim(incoming, Phase.DECODE, pinned.__contains__)
        assert victim not in pinned
        if waits:
            assert waits[victim] == pytest.approx(max(waits.values()))


def test_the_search_for_a_victim_finds_what_sorting_all_finds():
    """It passes over pinned experts a layer at a time; a step too far, and one that is needed sooner would leave.

    With few picks many waits are equal: then the first layer goes first, and of a layer the first expert.
    """
    rng = np.random.default_rng(0)
    keys = [(layer, expert) for layer in LAYERS for expert in range(EXPERTS)]
    for _ in range(500):
        policy = Frequency(slots(len(keys)))
        resident = [key for key in keys if rng.random() < 0.7]
        for key in resident:
            policy.on_insert(key, Phase.DECODE)
        for _ in range(rng.integers(8)):
            layer = int(rng.choice(LAYERS))
            policy.on_use([(layer, int(e)) for e in rng.choice(EXPERTS, 2, replace=False)], Phase.DECODE)
        pinned = {key for key in resident if rng.random() < rng.choice([0, 0.3, 0.8, 1])}
        longest = policy._longest + policy._distance
        hidden = [row for row in range(len(LAYERS)) if rng.random() < 0.2]  # layers that keep their floor
        longest[hidden] = -np.inf
        waits = {
            (layer, e): policy._wait[row, e] + policy._distance[row]
            for row, layer in enumerate(LAYERS)
            if row not in hidden
            for e in range(EXPERTS)
            if (layer, e) in resident and (layer, e) not in pinned
        }
        order = sorted(waits, key=lambda key: (-waits[key], key))
        assert policy._find(longest, pinned.__contains__) == (order[0] if order else None)
        assert policy.victim((0, 0), Phase.DECODE, lambda key: True) is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_prompt_leaves_what_decoding_uses(name):
    """After each prompt, decoding would begin with a cold cache."""
    driver = Driver(POLICIES[name](slots(8)), 8)
    for _ in range(20):
        for layer in LAYERS:
            driver.use(layer, (0, 1))
    for layer in LAYERS:
        driver.read_prompt(layer, [(2, 3), (4, 5), (2, 4), (3, 5)])
    assert {(layer, e) for layer in LAYERS for e in (0, 1)} <= driver.resident


@pytest.mark.parametrize("kind", FORECASTS)
def test_decoding_finds_what_the_end_of_a_prompt_used_most(kind):
    """After a first prompt the slots would hold all of some layers and nothing of others."""
    rng = np.random.default_rng(0)
    driver = Driver(kind(slots(36, experts=40)), 36)
    late = {(layer, e) for layer in LAYERS for e in range(10, 20)}
    for layer in LAYERS:
        picks = np.concatenate([rng.choice(10, (300, 2)), rng.choice(np.arange(10, 20), (300, 2))])
        picks[::3] = rng.choice(40, picks[::3].shape)
        driver.read_prompt(layer, picks)
    assert len(late & driver.resident) >= 0.9 * len(late)


@pytest.mark.parametrize("kind", FORECASTS)
def test_a_prompt_however_long_says_no_more_than_a_few_tokens(kind):
    """The answer's own routing would count for nothing until it was as long as the prompt."""
    driver = Driver(kind(slots(4, layers=(0,))), 4)
    for _ in range(100):
        driver.read_prompt(0, [(4, 5)] * 30)
    for _ in range(8):
        driver.use(0, (0, 1))
    for _ in range(4):
        driver.use(0, (2, 3))
    assert driver.resident == {(0, e) for e in range(4)}


@pytest.mark.parametrize("kind", FORECASTS)
def test_a_prompt_teaches_the_same_in_any_number_of_chunks(kind):
    """What is kept would depend on how much memory there is for a chunk."""
    rng = np.random.default_rng(0)
    before, picks = (
        rng.integers(0, EXPERTS, (20, 2)),
        rng.permuted(np.tile(np.arange(9), (100, 1)), axis=1)[:, :2],
    )
    found = []
    for chunk in (100, 7, 1):
        policy = kind(slots(8))
        for a, b in before.tolist():
            policy.on_use([(3, a), (3, b)], Phase.DECODE)
        for begin in range(0, 100, chunk):
            policy.on_prompt(3, picks[begin : begin + chunk])
        policy.on_use([(3, 0), (3, 1)], Phase.DECODE)
        found.append(policy._chance[1])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-9)


@pytest.mark.parametrize("kind", FORECASTS)
def test_a_prompt_of_a_token_is_a_token(kind):
    """Two ways of counting would drift apart, and prompts fed token by token would teach something else."""
    as_prompt, decoded = kind(slots(8)), kind(slots(8))
    rng = np.random.default_rng(0)
    decoded.weights = as_prompt.weights = np.full(13, 1 / 13) if kind is AlmostWinners else np.full(7, 1 / 7)
    decoded.rate = 0  # only decoding learns which memory to believe
    for _ in range(50):
        layer, picks = int(rng.choice(LAYERS)), rng.choice(EXPERTS, 2, replace=False)
        as_prompt.on_prompt(layer, picks[None])
        as_prompt.on_prompt(layer, np.zeros((0, 2), int))
        as_prompt._prompts.clear()  # as decoding between them does
        decoded.on_use([(layer, int(e)) for e in picks], Phase.DECODE)
    np.testing.assert_allclose(as_prompt._chance, decoded._chance, rtol=1e-9)


@pytest.mark.parametrize("kind", FORECASTS)
def test_below_one_tokens_working_set_something_still_hits(kind):
    """A small cache would read every expert of every token, where LRU falls off its cliff."""
    lru, ours = Driver(POLICIES["lru"](slots(4)), 4), Driver(kind(slots(4)), 4)
    hits = [sum(d.use(layer, (0, 1)) for _ in range(30) for layer in LAYERS) for d in (lru, ours)]
    assert hits[0] == 0
    assert hits[1] > 30


@pytest.mark.parametrize("kind", FORECASTS)
def test_a_layer_keeps_its_share_when_others_are_busier(kind):
    """One layer's newcomers would starve another that is used as often."""
    n = 6
    driver = Driver(kind(slots(n)), n)
    driver.use(0, (0, 1))
    rng = np.random.default_rng(0)
    for _ in range(40):
        for layer in (3, 4):
            driver.use(layer, rng.choice(EXPERTS, 2, replace=False).tolist())
        assert {(0, 0), (0, 1)} <= driver.resident


@pytest.mark.parametrize("kind", FORECASTS)
def test_counts_survive_eviction(kind):
    """An expert that comes and goes would be a stranger each time, and never stay."""
    driver = Driver(kind(slots(4, layers=(0,))), 4)
    for _ in range(20):
        driver.use(0, (0, 1))
    for key in [(0, 0), (0, 1)]:  # as a failed read does
        driver.resident.remove(key)
        driver.policy.on_evict(key)
    for experts in ((2, 3), (4, 5), (0, 2), (3, 4)):
        driver.use(0, experts)
    assert (0, 0) in driver.resident


@pytest.mark.parametrize("kind", FORECASTS)
def test_a_preload_evicts_only_what_is_worth_less(kind):
    """Prefetches would push out what is needed more."""
    driver = Driver(kind(slots(4)), 4)
    for _ in range(10):
        driver.use(0, (0, 1))
        driver.use(3, (0, 1))
    for experts in ((0, 2), (0, 2), (0, 1)):
        driver.use(0, experts)
    free = lambda key: False  # noqa: E731
    assert driver.policy.victim((4, 5), Phase.PRELOAD, free) is None
    driver.resident = set()
    policy = kind(slots(4))
    for key in ((0, 0), (0, 1), (3, 0), (3, 1)):
        policy.on_insert(key, Phase.PRELOAD)
    policy.on_use([(4, 2), (4, 3)], Phase.DECODE)
    assert policy.victim((4, 2), Phase.PRELOAD, free) is not None


def test_frequency_forgets():
    """What was popular an hour ago would stay for ever."""
    driver = Driver(Frequency(slots(2, layers=(0,), top_k=1)), 2)
    for _ in range(100):
        driver.use(0, (0,))
    for i in range(400):
        driver.use(0, (1 + i % 2,))
    assert (0, 0) not in driver.resident


def test_the_adaptive_policy_finds_out_what_predicts():
    """It would keep what was popular where what was just used comes back, or the reverse."""
    rng = np.random.default_rng(0)
    sticky, steady = Adaptive(slots(20, experts=40)), Adaptive(slots(20, experts=40))
    now = rng.permutation(40)[:2]
    for _ in range(300):
        if rng.random() < 0.1:
            now = rng.permutation(40)[:2]
        sticky.on_use([(0, int(e)) for e in now], Phase.DECODE)
        steady.on_use([(0, int(e)) for e in rng.choice(8, 2, replace=False)], Phase.DECODE)
    assert sticky.weights.sum() == pytest.approx(1)
    assert sticky.weights[0] > 0.5
    assert steady.weights[4:6].sum() > 0.5


def test_a_layer_with_more_experts_than_the_average_is_served():
    """A model whose layers differ in experts would stop with an index error."""
    for kind in POLICIES.values():
        driver = Driver(kind(slots(4, experts=4)), 4)
        for expert in (0, 9, 3, 11, 9):
            driver.use(3, (expert,))
            driver.policy.on_predict(3, np.zeros(12))
        assert (3, 9) in driver.resident
        driver.read_prompt(4, [(13, -1), (13, 2)])
        assert (4, 13) in driver.resident


def test_almost_winners_are_kept():
    """The router's word on what comes next would be lost."""
    policy = AlmostWinners(slots(4, layers=(0,), experts=20))
    rng = np.random.default_rng(0)
    after = rng.permutation(20)[:2]
    for _ in range(200):
        now, after = after, rng.permutation(20)[:2]
        given = np.full(20, 0.01)
        given[after] = 0.3
        policy.on_router(0, given[None])
        policy.on_use([(0, int(e)) for e in now], Phase.DECODE)
    for expert in range(20):
        policy.on_insert((0, expert), Phase.PRELOAD)
    gone = set()
    for _ in range(18):
        gone.add(policy.victim((0, 0), Phase.DECODE, gone.__contains__))
    assert {(0, e) for e in range(20)} - gone == {(0, int(e)) for e in after}


def test_what_is_predicted_is_kept():
    policy = policy_named("predicted")(slots(6))
    for layer in LAYERS:
        policy.on_use([(layer, 0), (layer, 1)], Phase.DECODE)
        for expert in range(3):
            policy.on_insert((layer, expert), Phase.DECODE)
    free = lambda key: False  # noqa: E731
    assert policy.victim((4, 5), Phase.DECODE, free) == (4, 2)
    policy.on_predict(4, np.array([0, 0, 0.9, 0, 0, 0]))
    assert policy.victim((4, 5), Phase.DECODE, free) != (4, 2)


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(UsageError, match="adaptive"):
        policy_named("lfu2")
    assert policy_named("auto") is Adaptive
