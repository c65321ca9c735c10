"""Choosing an instruction set and threads: a package built on one machine must run on another."""

import platform
import subprocess
import sys

import pytest

from kernel_fixtures import using
from leanmoe import kernels
from leanmoe.errors import UnsupportedError


def test_this_build_has_every_unit() -> None:
    """A user with another processor gets the fast path that it has, from the same wheel."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    assert kernels.compiled_isas() == (["portable", "avx2", "avx512", "amx"] if x86 else ["portable"])


def test_the_fastest_unit_that_runs_is_chosen() -> None:
    """Otherwise a good processor is wasted."""
    available = kernels.available_isas()
    assert available[0] == "portable"
    assert [name for name in kernels.compiled_isas() if name in available] == available
    fresh = subprocess.run(
        [
            sys.executable,
            "-c",
            "from leanmoe import kernels; print(kernels.isa(), kernels.get_num_threads())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    name, threads = fresh.stdout.split()
    assert name == available[-1]
    assert int(threads) >= 1


def test_an_instruction_set_can_be_chosen() -> None:
    for name in kernels.available_isas():
        with using(name):
            assert kernels.isa() == name


def test_one_that_cannot_run_is_refused() -> None:
    before = kernels.isa()
    with pytest.raises(UnsupportedError, match="sve"):
        kernels.set_isa("sve")
    assert kernels.isa() == before


@pytest.mark.parametrize("n", [0, -1, 1 << 20])
def test_numbers_of_threads_that_make_no_sense_are_refused(n: int) -> None:
    before = kernels.get_num_threads()
    with pytest.raises(ValueError, match="threads"):
        kernels.set_num_threads(n)
    assert kernels.get_num_threads() == before


def test_a_forked_child_computes_too() -> None:
    """Threads do not survive a fork; a child that waits for them would hang forever."""
    script = """
import os, torch
from leanmoe import kernels
from leanmoe.formats.quant_types import BY_NAME
kernels.set_num_threads(3)
w = kernels.Weight(torch.zeros(4096 * 34, dtype=torch.uint8), BY_NAME["Q8_0"], (4096, 32))
kernels.linear(w, torch.ones(2, 32))
child = os.fork()
if child == 0:
    kernels.linear(w, torch.ones(2, 32))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
