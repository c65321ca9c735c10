"""`lean bench`: what it feeds, in which state it measures, and where it says that the time went."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from leanmoe import LLM
from leanmoe.cli.bench import _show
from leanmoe.engine import speed
from leanmoe.engine.config import EngineConfig
from leanmoe.engine.speed import Sample, Speed, Test, measure
from leanmoe.errors import UsageError
from leanmoe.experts.stats import CacheStats, LayerStats
from leanmoe.kernels import _cpu, cpu
from leanmoe.kernels.clock import clocked
from leanmoe.pack import pack_gguf

BUDGET = 12 << 30


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    folder = tmp_path_factory.mktemp("speed")
    return pack_gguf(tiny_gguf(folder / "tiny.gguf", "qwen3moe", "Q4_K").path, folder / "tiny.lmpack")


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack with layers of gated delta net."""
    from oracles.tiny import tiny_gguf

    folder = tmp_path_factory.mktemp("speed")
    return pack_gguf(tiny_gguf(folder / "tiny.gguf", "qwen3next", "Q4_K").path, folder / "tiny.lmpack")


def smallest_cache(pack: Path) -> int:
    """Bytes for the fewest slots that run: one layer's top-k twice, for each size of expert."""
    from leanmoe.experts.slots import slot_floor
    from leanmoe.pack import open_pack

    manifest = open_pack(pack).manifest
    sizes = {m.layer: m.layout.file_bytes for m in manifest.layers}
    counts = {m.layer: m.expert_count for m in manifest.layers}
    return slot_floor(sizes, counts, manifest.expert_used_count)


class Watch:
    """What `measure` feeds: prompts' lengths, and of each run of `decode` the context before it and its tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefilled: list[int] = []
        self.runs: list[tuple[list[int], list[int]]] = []
        prefill, decode = speed.prefill, speed.decode

        def prefilled(decoder, sequence, tokens, *rest, **options):  # type: ignore[no-untyped-def]
            self.prefilled.append(len(tokens))
            return prefill(decoder, sequence, tokens, *rest, **options)

        def decoded(decoder, sequence, *rest):  # type: ignore[no-untyped-def]
            assert sequence.state.length == len(sequence.tokens)
            self.runs.append((list(sequence.tokens), []))
            for token in decode(decoder, sequence, *rest):
                self.runs[-1][1].append(token)
                yield token

        monkeypatch.setattr(speed, "prefill", prefilled)
        monkeypatch.setattr(speed, "decode", decoded)


@pytest.mark.parametrize("test", [Test("prompt", 12), Test("decode", 6), Test("decode", 4, depth=9)])
def test_where_everything_fits_nothing_is_read_while_it_is_measured(pack: Path, test: Test) -> None:
    """The disk was measured, not the kernels."""
    found = measure(pack, EngineConfig(memory=BUDGET), test, repetitions=2)
    assert found.all_resident
    assert found.first is None
    assert len(found.samples) == 2
    assert found.experts.read_bytes == 0
    assert found.experts.hit_rate == 1
    parts = found.kernel_seconds + found.stall_seconds + found.rest_seconds
    assert parts == pytest.approx(sum(s.seconds for s in found.samples) / (2 * test.tokens))
    assert found.kernel_seconds > 0
    assert found.record()["test"] == test.name


def test_with_few_slots_the_cold_run_is_kept_apart_and_reads_are_counted(pack: Path) -> None:
    config = EngineConfig(memory=BUDGET, cache=smallest_cache(pack))
    found = measure(pack, config, Test("prompt", 16), repetitions=2)
    assert not found.all_resident
    assert found.residency < 1
    assert found.first is not None
    assert found.first.experts.hit_rate < 1
    assert found.experts.read_bytes > 0
    assert found.experts.reading_seconds > 0
    assert found.record()["cold_tokens_per_second"] > 0


def test_without_a_warm_up_the_first_sample_is_the_cold_one(pack: Path) -> None:
    config = EngineConfig(memory=BUDGET, cache=smallest_cache(pack))
    found = measure(pack, config, Test("prompt", 16), repetitions=1, warm_up=False)
    assert found.first is None
    assert found.samples[0].experts.read_bytes > 0


def test_random_tokens_are_those_of_the_seed_and_others_each_time(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens again would find their experts in the cache: a hit rate that no user sees."""
    config, test, runs = EngineConfig(memory=BUDGET), Test("decode", 5), []
    for _ in range(2):
        with monkeypatch.context() as patch:
            seen = Watch(patch)
            measure(pack, config, test, repetitions=2, warm_up=False, feed="random")
        runs.append([fed[:5] for _, fed in seen.runs])
    assert runs[1] == runs[0]
    assert runs[0][0] != runs[0][1]
    assert len(set(runs[0][0])) > 1


@pytest.mark.parametrize("model", ["pack", "recurrent"])
def test_a_context_is_fed_once_for_all_depths_and_repetitions(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A depth of 32k took minutes for each repetition, and the tokens of the last one were still in its context."""
    path: Path = request.getfixturevalue(model)
    seen, depths = Watch(monkeypatch), (40, 0, 150, 40)
    tests = [Test("decode", 5, depth) for depth in depths]
    found = speed.measure_all(path, EngineConfig(memory=BUDGET, chunk=64), tests, repetitions=2)
    assert [f.test.depth for f in found] == [0, 40, 40, 150]
    assert [f.context_fed for f in found] == [0, 40, 0, 110]
    assert seen.prefilled == [40, 110]
    assert [len(before) for before, _ in seen.runs] == [0] * 3 + [40] * 6 + [150] * 3
    longest = seen.runs[-1][0]
    assert all(before == longest[: len(before)] for before, _ in seen.runs)
    assert len({fed[0] for _, fed in seen.runs}) > 6  # others each time
    with LLM(path, memory=BUDGET, context=156, warm=0) as llm:
        for before, (first, *then) in seen.runs:
            again = llm.generate([*before, first], max_tokens=5, temperature=0, ignore_eos=True)
            assert again.tokens == then


def test_a_context_that_cannot_be_gone_back_to_is_fed_anew_and_said_so(
    pack: Path, recurrent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt was measured in the context that an earlier one had left."""
    seen, config, test = Watch(monkeypatch), EngineConfig(memory=BUDGET), Test("prompt", 20, depth=30)
    for path, fed, anew in (
        (pack, [30, 20, 20, 20], False),
        (recurrent, [30, 20, 30, 20, 30, 20], True),
    ):
        seen.prefilled.clear()
        found = measure(path, config, test, repetitions=2)
        assert seen.prefilled == fed
        assert found.context_fed == found.record()["context_fed"] == sum(n for n in fed if n == 30)
        _show([(config, found)])
        assert ("fed anew for each repetition" in capsys.readouterr().out) == anew


def test_a_context_that_does_not_hold_the_test_is_refused_before_anything_is_measured(pack: Path) -> None:
    with pytest.raises(UsageError, match="takes 20 tokens of context; it is 16"):
        measure(pack, EngineConfig(memory=BUDGET, context=16), Test("prompt", 10, depth=10))


def test_the_clock_counts_this_threads_calls_and_leaves_the_extension_as_it_was() -> None:
    before = dict(vars(_cpu)), _cpu.Plan.run
    x = torch.randn(4, 256)
    q8 = cpu.BY_NAME["Q8_0"]
    with clocked() as clock:
        cpu.quantize(x, q8)
        other = threading.Thread(target=cpu.quantize, args=(x, q8))
        other.start()
        other.join()
    assert clock.calls == 1
    assert clock.seconds > 0
    assert (dict(vars(_cpu)), _cpu.Plan.run) == before


def test_rates_and_parts_are_means_over_all_repetitions() -> None:
    def sample(seconds: float, kernels: float, stall: float, read: int) -> Sample:
        stats = CacheStats({0: LayerStats(3, 0, 1, stall)}, 1, read, reading_seconds=stall)
        return Sample(seconds, kernels, stats)

    samples = (sample(1.0, 0.5, 0.25, 1000), sample(2.0, 1.0, 0.75, 3000))
    facts = dict(all_resident=False, residency=0.5, memory=1, peak=1, threads=1, isa="x", model="m")
    found = Speed(Test("decode", 10), "greedy", None, samples, 0, model_bytes=1, **facts)  # type: ignore[arg-type]
    assert found.rates == [10.0, 5.0]
    assert found.rate == 7.5
    assert found.deviation == pytest.approx(12.5**0.5)
    assert found.read_bytes == 200
    assert (found.kernel_seconds, found.stall_seconds) == (0.075, 0.05)
    assert found.rest_seconds == pytest.approx(0.025)
    assert found.experts.read_rate == 4000
    assert found.experts.hit_rate == 0.75


@pytest.mark.slow
def test_the_command_measures_each_budget_in_a_process_of_its_own(pack: Path) -> None:
    """The peak of one budget was shown for the next."""
    few = ["--cache", str(smallest_cache(pack)), "--memory", "2GiB,none"]
    command = [sys.executable, "-m", "leanmoe", "bench", str(pack), "-p", "0,8", "-n", "0", "-r", "1", *few]
    command += ["-d", "6,0"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [(r["memory"], r["test"]) for r in records] == [
        (budget, test) for budget in (2 << 30, None) for test in ("pp8", "pp8 @ d6")
    ]
    assert all(0 < r["memory_peak"] < 2 << 30 for r in records)
    refused = subprocess.run([*command, "-m", "100MiB"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "the smallest that works is" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_table_has_what_was_measured(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(memory=BUDGET, cache=smallest_cache(pack))
    found = [(config, measure(pack, config, Test("prompt", 8, depth=6), repetitions=1))]
    _show(found)
    shown = capsys.readouterr().out
    words = ("pp8 @ d6", "12.0 GiB", "from cold", "read/token", "kernels", "rest", "peak", "MiB")
    assert all(word in shown for word in words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-p", "many"), "wanted numbers of tokens"),
        (("-m", "1GiB,lots"), "'lots' is not a size"),
    ],
)
def test_misuse_is_named_before_anything_is_opened(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from leanmoe.cli.main import main

    monkeypatch.setattr(sys, "argv", ["lean", "bench", "nowhere.lmpack", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
