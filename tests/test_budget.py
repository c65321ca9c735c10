"""A memory budget is a promise: the kernel holds the process to it, and the answer stays the same."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cgroup import memory_limit

LEAN = [sys.executable, "-m", "leanmoe"]
RUN = ["-p", "Tell me about the sea.", "--temp", "0", "-n", "12", "--context", "512", "--json"]


def _lean(arguments: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run([*LEAN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.mark.slow
@pytest.mark.cgroup
def test_a_pack_four_times_its_budget_answers_the_same_under_a_kernel_limit(demo_pack: Path) -> None:
    """The point of lean: without this, a model larger than memory ends in the out-of-memory killer."""
    size = sum(f.stat().st_size for f in demo_pack.rglob("*") if f.is_file())
    budget = size // 4
    assert _lean(["plan", str(demo_pack), "--context", "512", "--json"])["floor"] <= budget
    unlimited = _lean(["run", str(demo_pack), *RUN])
    assert unlimited["residency"] == 1.0
    with memory_limit(budget) as group:
        limited = group.run([*LEAN, "run", str(demo_pack), "--memory", str(budget), *RUN])
        assert limited.returncode == 0, limited.stderr
        assert group.killed() == 0
    record = json.loads(limited.stdout)
    assert record["residency"] < 0.2
    assert record["memory_peak"] <= budget
    assert record["tokens"] == unlimited["tokens"]


@pytest.mark.slow
@pytest.mark.cgroup
def test_the_smallest_budget_that_plan_names_holds_under_a_kernel_limit(demo_pack: Path) -> None:
    """A user buys or rents memory by this number; a prompt of a thousand tokens must not break it."""
    context = ["--context", "1024"]
    floor = _lean(["plan", str(demo_pack), *context, "--json"])["floor"]
    prompt = "The sea is wide and the ship is small. " * 90
    with memory_limit(floor) as group:
        command = [*LEAN, "run", str(demo_pack), "--memory", str(floor), *context, "--raw", "-p", prompt]
        done = group.run([*command, "-n", "4", "--temp", "0", "--json"])
        assert done.returncode == 0, done.stderr
        assert group.killed() == 0
    record = json.loads(done.stdout)
    assert record["prompt_tokens"] > 800
    assert record["memory_peak"] <= floor


@pytest.mark.slow
def test_bits_on_the_demo_model_do_not_depend_on_residency(demo_pack: Path) -> None:
    """At the floor, at 30 % and fully resident: the same logits, for a prompt and for single tokens."""
    import torch

    from leanmoe import LLM
    from leanmoe.models.batch import Batch

    with LLM(demo_pack, context=512) as llm:
        experts = llm.plan.experts
        tokens = llm.tokenizer.encode("Once upon a time there was a lighthouse keeper who counted the ships.")
    floor = 4 * experts // 960  # one layer's top-2 twice
    seen = []
    for cache in (floor, experts * 3 // 10, experts):
        with LLM(demo_pack, context=512, cache=cache) as llm:
            state = llm.decoder.new_state(64, torch.float16)
            single = [llm.decoder.forward(Batch.of([(state, [t])])) for t in tokens]
            seen.append((llm.plan.residency, torch.cat([llm.logits(tokens), *single])))
    assert [round(r, 2) for r, _ in seen] == [0.0, 0.3, 1.0]
    assert torch.equal(seen[0][1], seen[2][1])
    assert torch.equal(seen[1][1], seen[2][1])
