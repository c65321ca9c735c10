"""What a token costs beside its products: counted, since no clock disturbs a count."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from leanmoe import LLM
from leanmoe.bench.make_model import make_model
from leanmoe.bench.overhead import Workload, count, report, text
from leanmoe.engine.sampling import SamplingParams
from random_models import scaled_down

# Of one layer and token of Qwen3-30B-A3B's kind, all experts resident. Python's calls take most of the rest of the
# time: a tenth of a decode step of 130 ms is 270 microseconds for each of 48 layers.
KERNEL_CALLS, TORCH_OPERATIONS, PYTHON_CALLS = 11, 33, 140


def _opened(path: Path, **sizes: int) -> LLM:
    """A small model of that kind in a pack, all of it in memory."""
    make_model(replace(scaled_down("qwen3-30b-a3b"), **sizes), path, pack=True)
    return LLM(path, context=2048, memory="4GiB")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workload]:
    with _opened(tmp_path_factory.mktemp("overhead") / "a.lmpack") as llm, llm.sequence() as sequence:
        yield Workload(llm, sequence, 8, SamplingParams(seed=0))


def test_a_token_takes_few_calls_beside_its_products(work: Workload) -> None:
    """Many small operations once took as long as the products of a small model, and more than the target allows."""
    within, around = count(work)
    layers = len(work.llm.decoder.layers)
    assert within.kernels["Group.run"] == layers
    assert within.kernels["linear"] == 2 * layers
    assert within.kernels["attend"] == layers
    assert within.kernels["Plan.run"] == layers
    assert within.kernels.total() <= KERNEL_CALLS * layers
    assert within.torch.total() <= TORCH_OPERATIONS * layers
    assert within.python <= PYTHON_CALLS * layers
    assert around.kernels.total() <= 5
    assert around.torch.total() <= 45


@pytest.mark.parametrize("experts", [16, 256])
def test_counts_do_not_grow_with_the_experts(work: Workload, experts: int, tmp_path: Path) -> None:
    """Decoding must cost the same in a model of more experts, if as many are used."""
    with _opened(tmp_path / "b.lmpack", experts=experts) as llm, llm.sequence() as sequence:
        other, _ = count(Workload(llm, sequence, 8, SamplingParams(seed=0)))
    mine, _ = count(work)
    assert other.kernels == mine.kernels
    assert other.torch == mine.torch
    assert abs(other.python - mine.python) <= 2 * len(work.llm.decoder.layers)


def test_counts_do_not_grow_with_the_past(tmp_path: Path) -> None:
    """Late in a text a token may take longer in attention alone, which is one call."""
    with _opened(tmp_path / "c.lmpack") as llm:
        found = []
        for past in (8, 1500):
            with llm.sequence() as sequence:
                found.append(count(Workload(llm, sequence, past, SamplingParams(seed=0)))[0])
        early, late = found
    assert late.kernels == early.kernels
    assert late.torch == early.torch


def test_the_report_adds_up(work: Workload) -> None:
    """Kernels, reads and the rest are all of a token."""
    found = report(work, 3)
    assert found["residency"] == 1.0
    for place in ("layer", "around"):
        assert 0 < found[place]["wall"]["kernels"]["least"] < found[place]["wall"]["whole"]["median"]
        assert found[place]["wall"]["reads"]["median"] == 0
    assert f"| kernel calls | {found['layer']['kernel_calls']:.1f}" in text(found)
