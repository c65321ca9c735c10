"""Memory of a prompt's pass: taken again, never under somebody's feet, and the kernel's afterwards."""

import platform
import subprocess
import sys
from threading import Thread

import pytest
import torch

from leanmoe import kernels
from leanmoe.engine.memory import resident_bytes
from leanmoe.kernels import Workspace, empty, working_in

MIB = 1 << 20


def _numbers(mib: int) -> tuple[int]:
    return (mib * MIB // 4,)


def test_a_block_is_taken_again_once_nobody_looks_at_it() -> None:
    with working_in(Workspace()):
        first = empty(_numbers(2))
        place, view = first.data_ptr(), first.view(-1, 4)[1:]
        del first
        second = empty(_numbers(2))
        assert second.data_ptr() != place  # a view looks at it still
        del view
        assert empty(_numbers(2)).data_ptr() == place
        assert empty(_numbers(1)).data_ptr() == place  # the lowest that is free


def test_free_neighbours_make_room_for_a_larger_block() -> None:
    """Else each layer of a prompt would take new memory for its largest result."""
    with working_in(Workspace()):
        blocks = [empty(_numbers(2)) for _ in range(6)]
        place = blocks[1].data_ptr()
        keep = blocks[5]
        for i in (3, 1, 2):
            blocks[i] = keep
        assert empty(_numbers(6)).data_ptr() == place


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_live_at_once_are_apart(seed: int) -> None:
    """Two results in one place would be garbage without a word."""
    draw = torch.Generator().manual_seed(seed)
    live: list[tuple[torch.Tensor, float]] = []
    with working_in(Workspace()):
        for step in range(300):
            if len(live) > 6 or (live and torch.rand(1, generator=draw) < 0.4):
                tensor, value = live.pop(int(torch.randint(len(live), (1,), generator=draw)))
                assert tensor.eq(value).all()
            else:
                size = int(torch.randint(MIB // 4, MIB, (1,), generator=draw))
                live.append((empty((size,)).fill_(step), step))
        assert all(tensor.eq(value).all() for tensor, value in live)


def test_what_outlives_the_pass_keeps_its_numbers() -> None:
    space = Workspace()
    with working_in(space):
        kept = kernels.scaled(torch.ones(1024, 1024), 3.0)
    with working_in(space):
        other = kernels.scaled(torch.ones(1024, 1024), 5.0)
    assert kept.eq(3).all()
    assert other.eq(5).all()


def test_after_the_pass_the_memory_is_given_back() -> None:
    """It would stand beside the slots for the rest of the answer."""
    space, before = Workspace(), resident_bytes()
    with working_in(space):
        for _ in range(5):
            kernels.scaled(torch.ones(8192, 2048), 2.0)
        assert resident_bytes() - before > 40 * MIB
    assert resident_bytes() - before < 20 * MIB


_HOLES = """
import ctypes
from leanmoe.engine.memory import resident_bytes, return_large_blocks
from leanmoe.kernels import give_back_freed
return_large_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = []
for _ in range(100):
    blocks.append(libc.malloc(900_000))
    ctypes.memset(blocks[-1], 1, 900_000)
    libc.malloc(99_000)
for block in blocks:
    libc.free(block)
before = resident_bytes()
give_back_freed()
print(before - resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_blocks_between_others_are_given_back() -> None:
    """In a process of its own: the blocks of another's heap are where they fit."""
    run = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 80_000_000


def test_a_second_thread_goes_without() -> None:
    space, places = Workspace(), list[int]()

    def other() -> None:
        with working_in(space):
            places.append(empty(_numbers(2)).fill_(1).data_ptr())

    with working_in(space):
        mine = empty(_numbers(2)).fill_(7)
        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert mine.eq(7).all()
        again = empty(_numbers(2))
    assert abs(again.data_ptr() - mine.data_ptr()) == 2 * MIB
    assert places


def test_outside_of_a_pass_results_are_torchs_own() -> None:
    with working_in(Workspace()):
        inside = empty(_numbers(2))
    assert not inside.untyped_storage().resizable()
    assert empty(_numbers(2)).untyped_storage().resizable()
