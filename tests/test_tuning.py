"""`lean tune` measures, chooses, and says why; `lean run` follows it; `lean plan` foretells from the same figures."""

import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from leanmoe import LLM
from leanmoe.cli.main import main
from leanmoe.engine.config import Choice, EngineConfig
from leanmoe.engine.estimate import estimate, pack_trace, replayed
from leanmoe.engine.tune import THREADS, fewest_readers, read_rates, tune
from leanmoe.engine.tuning import TUNING, Measured, Tuned, choice_for, find_tuned, keep, this_host
from leanmoe.errors import UsageError
from leanmoe.experts.policy import LRU
from leanmoe.experts.simulate import plan_for, replay
from leanmoe.experts.slots import plan_slots
from leanmoe.experts.throttle import Survey
from leanmoe.pack import open_pack, pack_gguf
from trace_fixtures import made_up

MEASURED = Measured(0.02, {1: 1e9, 2: 1.2e9, 4: 1.5e9})
# A budget for this process, whatever the tests before have left in it.
BUDGET = 12 << 30
CHOICE = Choice("frequency", "on", 2, 8)


@pytest.fixture
def path(tmp_path: Path, tiny_model: Callable[..., object]) -> Path:
    return pack_gguf(tiny_model("qwen3moe", "Q4_K").path, tmp_path / "m.lmpack")  # type: ignore[attr-defined]


def entry(memory: int = 1 << 30, choice: Choice = CHOICE, host: str | None = None) -> Tuned:
    return Tuned(host or this_host(), memory, choice, MEASURED)


def test_a_run_follows_what_was_chosen_unless_told_otherwise(path: Path) -> None:
    keep(path, entry(BUDGET))
    with LLM(path, BUDGET, context=128) as llm:
        config = llm.config
        assert (config.policy, config.prefetch, config.prefetch_level, config.readers) == (
            "frequency",
            "on",
            2,
            8,
        )
    with LLM(path, BUDGET, context=128, policy="lru", prefetch="off", readers=2) as llm:
        config = llm.config
        assert (config.policy, config.prefetch, config.prefetch_level, config.readers) == (
            "lru",
            "off",
            None,
            2,
        )


def find_choice(pack: Path, memory: int) -> Choice | None:
    return choice_for(find_tuned(pack), memory)


def test_a_choice_holds_for_its_machine_and_about_its_budget(path: Path) -> None:
    keep(path, entry(1 << 30))
    keep(path, entry(4 << 30, replace(CHOICE, policy="lru")))
    keep(path, entry(2 << 30, replace(CHOICE, policy="adaptive"), host="another processor, 64 cores"))
    assert find_choice(path, (1 << 30) + (100 << 20)) == CHOICE
    assert find_choice(path, 2 << 30) is None
    assert find_choice(path, 5 << 30) == replace(CHOICE, policy="lru")
    assert [t.memory for t in find_tuned(path)] == [1 << 30, 4 << 30]
    keep(path, entry(1 << 30, replace(CHOICE, readers=4)))
    assert find_choice(path, 1 << 30) == replace(CHOICE, readers=4)
    assert len(json.loads((path / TUNING).read_bytes())["entries"]) == 3


def test_a_choice_for_one_reader_thread_is_not_forced_on_another_number() -> None:
    """`--readers 1` with a tuned prefetch: no thread is left to prefetch, and nobody asked for it by name."""
    settled = EngineConfig(readers=1).settled(CHOICE)
    assert (settled.readers, settled.prefetch, settled.prefetch_level) == (1, "off", None)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"version": 2, "entries": []}',
        b'{"version": 1}',
        b'{"version": 1, "entries": [{"host": "x"}]}',
        b'{"version": 1, "entries": [{"host": "x", "memory": 1, "choice": {"policy": "none such"},'
        b' "measured": {"compute_seconds": 1, "read_rates": {"1": 1}}}]}',
        b'{"version": 1, "entries": [{"host": "x", "memory": 0, "choice": {},'
        b' "measured": {"compute_seconds": 1, "read_rates": {"1": 1}}}]}',
        b'{"version": 1, "entries": [{"host": "x", "memory": 1, "choice": {},'
        b' "measured": {"compute_seconds": NaN, "read_rates": {"1": 1}}}]}',
        b'{"version": 1, "entries": [{"host": "x", "memory": 1, "choice": {},'
        b' "measured": {"compute_seconds": 1, "read_rates": {}}}]}',
        b"[" * 5000,
        bytes(2 << 20),
    ],
)
def test_a_file_that_nobody_vouches_for_is_said_and_not_used(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (path / TUNING).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert find_choice(path, 1 << 30) is None
    assert str(path / TUNING) in caplog.text
    assert "lean tune" in caplog.text


def test_a_plan_reads_the_tuning_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same warning was given twice."""
    (path / TUNING).write_bytes(b"{")
    monkeypatch.setattr(sys, "argv", ["lean", "plan", str(path), "--memory", "4GiB"])
    with suppress(SystemExit), caplog.at_level(logging.WARNING):
        main()
    assert caplog.text.count("is not used") == 1


def test_tuning_measures_this_pack_and_keeps_the_choice(path: Path) -> None:
    steps: list[str] = []
    layers = open_pack(path).manifest.layers
    least = sum(m.expert_count * m.layout.file_bytes for m in layers) * 3 // 4
    config = EngineConfig(memory=BUDGET, context=256, cache=least)
    found = tune(path, config, tokens=64, report=steps.append)
    assert len(steps) == 5
    assert found.tuned.choice == find_choice(path, BUDGET)
    assert set(found.tuned.measured.read_rates) == set(THREADS)
    assert found.trace.rows.tobytes() == pack_trace(path).rows.tobytes()  # type: ignore[union-attr]
    assert 0 < found.residency < 1
    assert found.hit_rates["auto"] > 0
    assert found.levels[0] == (0.0, 0.0)
    assert all(
        0 < found.recall[name][1][0] <= found.recall[name][1][1] for name in ("routers", "transitions")
    )
    assert {1, 2} <= set(found.levels)
    with LLM(path, BUDGET, context=256, cache=least) as llm:
        assert llm.config.readers == found.tuned.choice.readers


def test_a_dense_model_has_nothing_to_tune(tmp_path: Path, tiny_model: Callable[..., object]) -> None:
    dense = pack_gguf(tiny_model("qwen3", "Q8_0").path, tmp_path / "d.lmpack")  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="without experts"):
        tune(dense, EngineConfig(context=64), tokens=64)


def test_every_reader_number_reads_the_packs_own_files(path: Path) -> None:
    rates = read_rates(open_pack(path), nbytes=1 << 20)
    assert set(rates) == set(THREADS)
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ({1: 1.0, 2: 1.5, 4: 1.51, 8: 1.52}, 2),
        ({1: 1.0, 2: 1.2, 4: 1.5, 8: 1.3}, 4),
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 2),
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, 8),
    ],
)
def test_the_fewest_threads_that_fill_the_disk_are_chosen(rates: dict[int, float], wanted: int) -> None:
    assert fewest_readers(rates) == wanted


def test_a_survey_finds_the_level_that_is_faster_and_none_where_none_is() -> None:
    """With noise twice as large as the gain, over 50 rounds; and without any gain."""
    import random

    noise = random.Random(1)
    for gain, wanted in ((0.1, 2), (0.0, 0), (-0.1, 0)):
        survey = Survey([0, 1, 2, 3])
        for _ in range(4 * 16 * 50):
            level = survey.level
            survey.token((1 - gain * (level == 2)) * noise.lognormvariate(0, 0.2), 0, 0)
        assert {len(taken) for taken in survey.seconds.values()} == {50}
        assert survey.best() == wanted


def test_a_survey_favours_no_level_by_its_place_in_the_order() -> None:
    """Where every token takes longer than the one before, levels must come out equal."""
    survey = Survey([0, 1, 2])
    for i in range(3 * 16 * 20):
        survey.token(1 + i / 1000, 0, 0)
    assert all(abs(mean) < 0.002 for mean, _ in survey.gains().values())


def test_the_second_half_of_a_trace_is_replayed_once_the_first_has_filled_the_slots() -> None:
    """A short trace from an empty cache says little of the tokens after it."""
    sizes = dict.fromkeys(range(4), 4096)
    trace = made_up(sizes, 16, 2, 200)
    plan = plan_for(trace, 32 * 4096)
    steady = replayed(trace, [plan], "lru")
    assert steady > replay(trace.requests(), plan, LRU).hit_rate - 0.02
    halves = [
        plan_slots({i: 4096 for i in part}, {i: 16 for i in part}, 2, 16 * 4096) for part in ((0, 1), (2, 3))
    ]
    assert 0 < replayed(trace, halves, "lru") < 1
    with pytest.raises(ValueError, match="other layers"):
        replayed(trace, [plan_slots({9: 4096}, {9: 16}, 2, 16 * 4096)], "lru")


def test_an_estimate_adds_up_and_says_what_it_assumes() -> None:
    sizes, counts = dict.fromkeys(range(10), 1 << 20), dict.fromkeys(range(10), 32)
    plan = plan_slots(sizes, counts, 4, 80 << 20)
    found = estimate([plan], 4, touched=60_000_000, trace=None, measured=MEASURED, policy="auto", readers=4)
    assert found.hit_rate == pytest.approx(
        0.85, abs=0.05
    )  # a quarter resident: as the published curve has it
    assert found.read_bytes == pytest.approx(40 * (1 - found.hit_rate) * (1 << 20))
    assert found.compute_seconds == 0.02
    assert found.read_seconds == pytest.approx(found.read_bytes / 1e9)  # a layer misses one at a time
    assert found.tokens_per_second == pytest.approx(1 / (0.02 + found.read_seconds))
    assert any("lean trace" in text for text in found.assumes)
    blind = estimate([plan], 4, touched=60_000_000, trace=None, measured=None, policy="auto", readers=4)
    assert blind.compute_seconds == pytest.approx(0.01)
    assert any("lean tune" in text for text in blind.assumes)
    whole = plan_slots(sizes, counts, 4, 320 << 20)
    all_there = estimate([whole], 4, touched=1, trace=None, measured=MEASURED, policy="auto", readers=4)
    assert (all_there.hit_rate, all_there.read_bytes) == (1.0, 0.0)
