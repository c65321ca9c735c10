"""The simulator: known results, bounds that hold always, and agreement with the cache that it stands for."""

import json
import sys

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from expert_packs import make_pack
from leanmoe.cli.simulate import simulate
from leanmoe.cli.trace_commands import export_trace, import_trace
from leanmoe.errors import BudgetError, FormatError, UsageError
from leanmoe.experts.cache import ExpertCache
from leanmoe.experts.device import CPUDevice
from leanmoe.experts.policy import LRU, POLICIES, Adaptive, AlmostWinners, Phase, policy_named
from leanmoe.experts.predict import Transitions
from leanmoe.experts.readers import Readers
from leanmoe.experts.recall import recalls
from leanmoe.experts.simulate import plan_for, replay, replay_best, replay_best_in_bytes, replay_in_bytes
from leanmoe.experts.slots import slot_floor
from leanmoe.experts.store import ExpertStore
from leanmoe.experts.trace import Request
from trace_fixtures import made_up, recorded

MIB = 1 << 20
PUBLISHED = {1000: (37.7, 62.7), 2000: (56.5, 79.4), 3000: (70.6, 87.8), 4000: (80.3, 92.7)}  # LRU, Belady
RESIDENCIES = (3, 6, 9, 12, 18, 24, 30, 36, 50)


@pytest.fixture(scope="module")
def qwen():
    trace = recorded("qwen")
    return trace, list(trace.requests())


@pytest.mark.parametrize("mib", PUBLISHED)
def test_published_replays_are_reproduced(qwen, mib):
    """Nothing else that the simulator says could be believed."""
    trace, requests = qwen
    plan = plan_for(trace, mib * MIB)
    in_bytes = (
        replay_in_bytes(requests, trace, mib * MIB, LRU),
        replay_best_in_bytes(requests, trace, mib * MIB),
    )
    in_slots = replay(requests, plan, LRU), replay_best(requests, plan)
    for found in (in_bytes, in_slots):
        assert [100 * r.hit_rate for r in found] == pytest.approx(PUBLISHED[mib], abs=0.7)
        assert all(r.most_bytes <= mib * MIB for r in found)


@pytest.mark.parametrize(("share", "wanted"), [(0.12, 62), (0.24, 82)])
def test_the_default_policy_reaches_what_was_promised(qwen, share, wanted):
    trace, requests = qwen
    plan = plan_for(trace, int(share * trace.expert_bytes))
    assert 100 * replay(requests, plan, policy_named("auto")).hit_rate >= wanted
    decode = [r for r in requests if r.phase is Phase.DECODE]
    assert 100 * replay(decode, plan, policy_named("auto")).hit_rate >= wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "gemma"])
@pytest.mark.parametrize("kind", ["whole", "second half", "some layers", "two of the picks"])
def test_the_default_policy_does_not_lose_to_lru(name, kind):
    """Whoever left `--policy` alone would be worse off at some budget."""
    trace = recorded(name)
    requests = list(trace.requests())
    if kind == "second half":
        requests = requests[len(requests) // 2 :]
    elif kind == "some layers":
        requests = [r for r in requests if r.layer % 3 == 0]
    elif kind == "two of the picks":
        requests = [r._replace(experts=r.experts[:2]) if r.phase is Phase.DECODE else r for r in requests]
    for percent in RESIDENCIES:
        plan = plan_for(trace, trace.expert_bytes * percent // 100)
        ours, lru = (replay(requests, plan, kind).hit_rate for kind in (Adaptive, LRU))
        assert ours >= lru - 0.005, f"{percent} %"


@pytest.mark.parametrize(
    "habits",
    [
        {"skew": 1.0},
        {"skew": 0.3, "sticky": 4.0},
        {"skew": 0.0, "sticky": 6.0},
        {"skew": 1.2, "subject": 40},
        {"skew": 1.0, "sticky": 2.0, "subject": 40},
    ],
)
def test_the_default_policy_suits_other_habits(habits):
    """The two recorded traces would be all that it is good at."""
    trace = made_up(dict.fromkeys(range(4), 4096), 32, 4, 250, prompt=20, **habits)
    requests = list(trace.requests())
    for percent in (15, 25, 40):
        plan = plan_for(trace, trace.expert_bytes * percent // 100)
        ours, lru = (replay(requests, plan, kind).hit_rate for kind in (Adaptive, LRU))
        assert ours >= lru - 0.01, f"{percent} %"


def test_router_probabilities_help_when_they_tell_and_do_not_hurt_when_not():
    sizes = dict.fromkeys(range(4), 4096)
    for foresight, least in ((0.3, 0.02), (0.0, -0.01)):
        trace = made_up(sizes, 32, 4, 200, foresight=foresight)
        requests = list(trace.requests())
        plan = plan_for(trace, trace.expert_bytes // 4)
        assert (
            replay(requests, plan, AlmostWinners).hit_rate - replay(requests, plan, Adaptive).hit_rate
            >= least
        )


small_traces = st.builds(
    made_up,
    st.sampled_from([{0: 4096}, {0: 4096, 1: 4096, 2: 4096}, {0: 4096, 2: 8192, 3: 8192}]),
    st.integers(6, 9),
    st.integers(1, 3),
    st.integers(1, 25),
    seed=st.integers(0, 99),
    prompt=st.integers(0, 4),
    sticky=st.sampled_from([0.0, 3.0]),
    subject=st.sampled_from([0, 7]),
)


@settings(max_examples=60, deadline=None)
@given(trace=small_traces, share=st.floats(0, 1))
def test_no_policy_beats_belady_or_its_budget(trace, share):
    """The best possible would be wrong, or a cache would use more memory than it was given."""
    requests = list(trace.requests())
    sizes = {i: facts.expert_bytes for i, facts in trace.layers.items()}
    floor = slot_floor(sizes, {i: facts.experts for i, facts in trace.layers.items()}, trace.top_k)
    budget = int(floor + share * (trace.expert_bytes - floor))
    plan = plan_for(trace, budget)
    best = replay_best(requests, plan)
    for kind in POLICIES.values():
        found = replay(requests, plan, kind, Transitions({i: f.experts for i, f in trace.layers.items()}))
        assert found.total.hits <= best.total.hits
        for layer, stats in found.layers.items():
            assert stats.lookups == best.layers[layer].lookups
        assert found.most_bytes <= plan.slot_bytes <= budget
        assert replay_in_bytes(requests, trace, budget, kind).most_bytes <= budget


@settings(max_examples=40, deadline=None)
@given(trace=small_traces)
def test_a_larger_lru_never_hits_less(trace):
    """A user who gives more memory would get less for it. (Of one size, and without a prompt's waves.)"""
    requests = [r for r in trace.requests() if r.phase is Phase.DECODE and r.layer == 0]
    one = made_up({0: 4096}, trace.layers[0].experts, trace.top_k, 1)
    least = min(2 * trace.top_k, trace.layers[0].experts)
    hits = [
        replay(requests, plan_for(one, n * 4096), LRU).total.hits
        for n in range(least, trace.layers[0].experts + 1)
    ]
    assert hits == sorted(hits)


@settings(max_examples=60, deadline=None)
@given(
    picks=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=2), min_size=1, max_size=7),
    slots=st.integers(2, 4),
)
def test_belady_is_the_best_of_all_schedules(picks, slots):
    """Tried out: every choice of what to keep after every request."""
    trace = made_up({0: 4096}, 6, 1, 1)
    requests = [Request(Phase.DECODE, 0, tuple(p)) for p in picks]
    best = {frozenset[int](): 0}
    for wanted in picks:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            for left in _subsets(kept | wanted, slots):
                after[left] = max(after.get(left, 0), hits + len(wanted & kept))
        best = after
    assert replay_best(requests, plan_for(trace, slots * 4096)).total.hits == max(best.values())


def _subsets(whole, most):
    found = [frozenset()]
    for x in whole:
        found += [s | {x} for s in found if len(s) < most]
    return found


@pytest.mark.parametrize("name", ["lru", "frequency", "adaptive"])
def test_the_cache_hits_what_the_simulator_says(tmp_path, name):
    """A budget or policy chosen by replay would do something else in the cache."""
    sizes = {0: 4096, 1: 8192, 2: 4096}
    trace = made_up(sizes, 12, 2, 60, sticky=1.0)
    requests = list(trace.requests())
    plan = plan_for(trace, trace.expert_bytes // 2)
    found = replay(requests, plan, POLICIES[name])
    pack = make_pack(tmp_path / "a.lmpack", sizes, 12, 2)
    readers = Readers(2)
    try:
        cache = ExpertCache(ExpertStore(pack), plan, CPUDevice(), readers, POLICIES[name])
        for request in requests:
            for _ in cache.acquire(request.layer, request.experts, request.phase):
                pass
        stats = cache.stats
        cache.close()
    finally:
        readers.close()
    assert {i: s.hits for i, s in stats.layers.items()} == {i: s.hits for i, s in found.layers.items()}
    assert stats.read_bytes == found.read_bytes


def test_predictors_reach_what_was_measured_elsewhere(qwen):
    """Recall of the transition profile on this trace, as published for another implementation, or better."""
    found = recalls(qwen[0], (6, 12, 24))
    assert [100 * x for x in found["popularity"]] == pytest.approx([32, 47, 67], abs=1)
    for distance, wanted in {1: (48, 65, 80), 2: (47, 65, 80), 4: (46, 64, 79), 6: (45, 63, 79)}.items():
        assert all(100 * x >= y - 1 for x, y in zip(found[f"transition +{distance}"], wanted, strict=True))


def test_a_budget_below_the_floor_is_refused_in_bytes_too():
    trace = made_up({0: 4096}, 8, 2, 3)
    with pytest.raises(BudgetError, match="8191"):
        replay_in_bytes(list(trace.requests()), trace, 8191, LRU)


app = typer.Typer()
for command in (simulate, import_trace, export_trace):
    app.command()(command)


def lean(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def file(tmp_path):
    made_up(dict.fromkeys(range(4), 4096), 16, 2, 30, prompt=5, foresight=0.2).save(tmp_path / "a.trace")
    return tmp_path / "a.trace"


def test_simulate_prints_every_policy_at_every_budget(file):
    result = lean("simulate", file, "--budgets", "1%,50%,200KiB")
    assert result.exit_code == 0
    for word in (*POLICIES, "belady", "50.0%", "transition +3", "too small"):
        assert word in result.stdout


def test_simulate_json_says_the_same_and_more(file):
    """A script could not choose a budget."""
    options = ("--budgets", "1%,50%,100%", "--policies", "lru,auto", "--json")
    record = json.loads(lean("simulate", file, *options).stdout)
    assert record["budgets"] == [2621, 131072, 262144]
    assert list(record["hit_rate"]) == ["lru", "auto", "belady"]
    assert [rate is None for rate in record["hit_rate"]["auto"]] == [True, False, False]
    assert record["hit_rate"]["lru"][2] == record["hit_rate"]["belady"][2] > 0.5
    assert record["decode_tokens"] == 30
    assert record["recall"]["popularity"][2] > record["recall"]["popularity"][0]
    cold = json.loads(lean("simulate", file, *options, "--decode-only", "--accounting", "bytes").stdout)
    assert cold["hit_rate"]["lru"][2] < record["hit_rate"]["lru"][2]


def test_simulate_draws_the_curves(file, tmp_path):
    pytest.importorskip("matplotlib")
    result = lean(
        "simulate", file, "--plot", tmp_path / "out.png", "--budgets", "1%,30%,60%", "--policies", "lru"
    )
    assert result.exit_code == 0
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    result = lean("simulate", file, "--plot", tmp_path / "out.what", "--budgets", "60%", "--policies", "lru")
    assert isinstance(result.exception, UsageError)


def test_simulate_without_matplotlib_says_what_to_install(file, tmp_path, monkeypatch):
    """The user would wait for the replay and then get a traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = lean("simulate", file, "--plot", tmp_path / "out.png")
    assert isinstance(result.exception, UsageError)
    assert "leanmoe[plot]" in str(result.exception)


def test_flags_that_cannot_be_honoured_are_refused(file, tmp_path):
    made_up({0: 4096}, 8, 2, 3).save(tmp_path / "b.trace")
    for options, words in (
        (("--policies", "best"), "no policy 'best'"),
        (("--policies", "router"), "router probabilities"),
        (("--budgets", "120%"), "between 0% and 100%"),
        (("--budgets", "many"), "not a size"),
    ):
        result = lean("simulate", tmp_path / "b.trace", *options)
        assert isinstance(result.exception, UsageError)
        assert words in str(result.exception)


def test_a_trace_without_decoding_is_refused(tmp_path):
    made_up({0: 4096}, 8, 2, 0, prompt=3).save(tmp_path / "a.trace")
    result = lean("simulate", tmp_path / "a.trace")
    assert isinstance(result.exception, FormatError)
    assert "no decoded token" in str(result.exception)


def test_export_and_import_are_commands(file, tmp_path):
    assert lean("export-trace", file, tmp_path / "a.csv").exit_code == 0
    assert lean("import-trace", tmp_path / "a.csv", tmp_path / "b.trace").exit_code == 0
    options = ("--policies", "lru", "--json")
    first, *others = (
        lean("simulate", tmp_path / f, *options).stdout for f in ("a.trace", "a.csv", "b.trace")
    )
    assert others == [first, first]
    assert isinstance(lean("export-trace", tmp_path / "a.csv", tmp_path / "c.csv").exception, FormatError)
