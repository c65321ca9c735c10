"""The arithmetic between a byte budget and slots, and between a model and its devices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanmoe.errors import BudgetError
from leanmoe.experts.pool import split_layers
from leanmoe.experts.slots import plan_slots, slot_floor

PAGE = 4096
layer_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=12).map(
    lambda pages: {i: n * PAGE for i, n in enumerate(pages)}
)


@settings(deadline=None, max_examples=150)
@given(sizes=layer_sizes, experts=st.integers(1, 40), top_k=st.integers(1, 8), share=st.floats(0, 1.3))
def test_slots_stay_within_the_budget_and_no_size_starves(sizes, experts, top_k, share):
    counts = dict.fromkeys(sizes, experts)
    top_k = min(top_k, experts)
    total = sum(sizes.values()) * experts
    floor = slot_floor(sizes, counts, top_k)
    budget = floor + int(share * total)
    plan = plan_slots(sizes, counts, top_k, budget)

    assert plan.slot_bytes == sum(c.size * c.slots for c in plan.classes) <= budget
    assert sorted(layer for c in plan.classes for layer in c.layers) == sorted(sizes)
    for c in plan.classes:
        assert {sizes[layer] for layer in c.layers} == {c.size}
        assert min(2 * top_k, experts) <= c.slots <= c.experts == experts * len(c.layers)
    # Nothing is left that one more slot could have used.
    spare = budget - plan.slot_bytes
    assert all(c.slots == c.experts or c.size > spare for c in plan.classes)
    assert plan.fits == (budget >= total)
    # The last slot of `a` would have gone to `b`, had `b` been worse off and able to take one.
    for a in plan.classes:
        for b in plan.classes:
            if a.slots > a.floor and b.slots < b.experts and b.size <= spare + a.size:
                assert (a.slots - 1) / a.experts <= b.slots / b.experts


def test_two_sizes_get_equal_shares():
    """A mixed-quant model (here 48 layers, some with larger experts) caches all its layers equally well."""
    sizes = {layer: (3 if layer % 3 else 4) << 20 for layer in range(48)}
    plan = plan_slots(sizes, dict.fromkeys(sizes, 128), 8, 4 << 30)
    shares = [c.slots / c.experts for c in plan.classes]
    assert max(shares) - min(shares) < 0.001
    assert plan.budget - plan.slot_bytes < 4 << 20
    assert plan.resident_fraction == pytest.approx(shares[0], abs=0.001)


def test_a_budget_below_the_floor_is_refused_with_the_smallest_that_works():
    sizes, counts = {0: 2 * PAGE, 1: 3 * PAGE}, {0: 16, 1: 16}
    floor = (2 + 3) * PAGE * 2 * 4
    assert slot_floor(sizes, counts, 4) == floor
    assert plan_slots(sizes, counts, 4, floor).slot_bytes == floor
    with pytest.raises(BudgetError, match=str(floor)):
        plan_slots(sizes, counts, 4, floor - 1)
    with pytest.raises(BudgetError, match=str(floor)):
        plan_slots(sizes, counts, 4, -1)


def test_fewer_slots_than_one_token_uses_is_flagged():
    sizes, counts = dict.fromkeys(range(10), PAGE), dict.fromkeys(range(10), 16)
    assert plan_slots(sizes, counts, 4, 39 * PAGE).below_working_set
    assert not plan_slots(sizes, counts, 4, 40 * PAGE).below_working_set


def test_a_dense_model_needs_no_slots():
    plan = plan_slots({}, {}, 0, 0)
    assert plan.classes == ()
    assert plan.fits
    assert plan.resident_fraction == 1.0


@settings(deadline=None, max_examples=100)
@given(sizes=layer_sizes, budgets=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=4))
def test_layers_are_split_into_runs_in_proportion_to_budgets(sizes, budgets):
    shares = split_layers(sizes, budgets)
    assert [layer for share in shares for layer in share] == sorted(sizes)
    total = sum(sizes.values())
    for share, budget in zip(shares, budgets, strict=True):
        wanted = total * budget / sum(budgets)
        assert abs(sum(sizes[layer] for layer in share) - wanted) <= max(sizes.values())
