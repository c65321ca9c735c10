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

# Of a token of Qwen3-30B-A3B's kind, all experts resident, however many layers it has. Without a tape it took 33
# operations of torch's and 140 calls of Python's for each layer.
KERNEL_CALLS, TORCH_OPERATIONS, PYTHON_CALLS = 5, 50, 160


def _opened(path: Path, **sizes: int) -> LLM:
    """A small model of that kind in a pack, all of it in memory."""
    make_model(replace(scaled_down("qwen3-30b-a3b"), **sizes), path, pack=True)
    return LLM(path, context=2048, memory="4GiB")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workload]:
    with _opened(tmp_path_factory.mktemp("overhead") / "a.lmpack") as llm, llm.sequence() as sequence:
        yield Workload(llm, sequence, 8, SamplingParams(seed=0))


def test_a_token_takes_few_calls_beside_its_products(work: Workload) -> None:
    """Between two kernels the interpreter, its caches cold, takes longer than most kernels."""
    found = count(work)
    assert found.kernels["Tape.run"] == 1
    assert found.kernels.total() <= KERNEL_CALLS
    assert found.torch.total() <= TORCH_OPERATIONS
    assert found.python <= PYTHON_CALLS


def test_counts_do_not_grow_with_the_layers(work: Workload, tmp_path: Path) -> None:
    twice = 2 * len(work.llm.decoder.layers)
    with _opened(tmp_path / "d.lmpack", layers=twice) as llm, llm.sequence() as sequence:
        other = count(Workload(llm, sequence, 8, SamplingParams(seed=0)))
    mine = count(work)
    assert other.kernels == mine.kernels
    assert other.torch == mine.torch
    assert abs(other.python - mine.python) <= 2


@pytest.mark.parametrize("experts", [16, 256])
def test_counts_do_not_grow_with_the_experts(work: Workload, experts: int, tmp_path: Path) -> None:
    """Decoding must cost the same in a model of more experts, if as many are used."""
    with _opened(tmp_path / "b.lmpack", experts=experts) as llm, llm.sequence() as sequence:
        other = count(Workload(llm, sequence, 8, SamplingParams(seed=0)))
    mine = count(work)
    assert other.kernels == mine.kernels
    assert other.torch == mine.torch
    assert abs(other.python - mine.python) <= 2


def test_counts_do_not_grow_with_the_past(tmp_path: Path) -> None:
    """Late in a text a token may take longer in attention alone, which is one call."""
    with _opened(tmp_path / "c.lmpack") as llm:
        found = []
        for past in (8, 1500):
            with llm.sequence() as sequence:
                found.append(count(Workload(llm, sequence, past, SamplingParams(seed=0))))
        early, late = found
    assert late.kernels == early.kernels
    assert late.torch == early.torch


def test_the_report_adds_up(work: Workload) -> None:
    """Kernels, reads and the rest are all of a token."""
    found = report(work, 3)
    assert found["residency"] == 1.0
    assert 0 < found["wall"]["kernels"]["least"] < found["wall"]["whole"]["median"]
    assert found["wall"]["reads"]["median"] == 0
    assert f"| kernel calls | {found['kernel_calls']} |" in text(found)
