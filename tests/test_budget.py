"""A memory budget is a promise: the kernel holds the process to it, and the answer stays the same."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cgroup import memory_limit

LEAN = [sys.executable, "-m", "leanmoe"]
RUN = [
    "-p",
    "Tell me about the sea.",
    "--temperature",
    "0",
    "--max-tokens",
    "12",
    "--context",
    "256",
    "--json",
]


def _answer(output: str) -> list[int]:
    tokens: list[int] = json.loads(output)["tokens"]
    return tokens


@pytest.mark.slow
@pytest.mark.cgroup
def test_a_pack_four_times_its_budget_answers_the_same_under_a_kernel_limit(demo_pack: Path) -> None:
    """The point of lean: without this, a model larger than memory ends in the out-of-memory killer."""
    size = sum(f.stat().st_size for f in demo_pack.rglob("*") if f.is_file())
    plan = _lean(["plan", str(demo_pack), "--context", "256", "--json"])
    budget = max(size // 4, json.loads(plan)["floor"])
    assert budget <= size // 4, "the demo model is too small for this test"
    unlimited = _lean(["run", str(demo_pack), *RUN])
    with memory_limit(budget) as group:
        limited = group.run([*LEAN, "run", str(demo_pack), "--memory", str(budget), *RUN])
        assert limited.returncode == 0, limited.stderr
        assert group.killed() == 0
    record = json.loads(limited.stdout)
    assert record["residency"] < 0.25
    assert record["memory_peak"] <= budget
    assert _answer(limited.stdout) == _answer(unlimited)


def _lean(arguments: Sequence[str]) -> str:
    import subprocess

    done = subprocess.run([*LEAN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
