"""A token's kernels, recorded as they run and run again for the next token: the same calls on the same memory.

A decode step makes the same calls for every token, some thirty a layer, and between two of them the interpreter, its
caches cold from the weights that went by, costs more than most of the calls themselves. So a step is run once under
`Tape.recording` and afterwards replayed, with nothing of Python between its kernels. What Python has to decide for
each token anew, it does `aside`.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from leanmoe.kernels import _cpu
from leanmoe.kernels.workspace import LARGE, Workspace

_CPU = torch.device("cpu")
_LINE = 64
_SLAB_BYTES = 1 << 20
_current = threading.local()


class Tape:
    """The kernels of one token's step, on the CPU.

    `position` (int64 [1]) is where the token stands in its sequence, and `memories` are the tensors of that sequence
    which kernels read and write; before a `run` for another token both may be changed, by `move`.

    While the tape records, results lie in memory of its own. What torch itself computes is not recorded: between
    kernels it may make views, no more (tests look on while every architecture is recorded). The weights, and the
    tensors that it was shown, must outlive it.
    """

    def __init__(self, position: torch.Tensor, memories: Sequence[torch.Tensor]) -> None:
        self.position = position
        self._addresses = addresses(memories)
        self._places = {address: i for i, address in enumerate(self._addresses.tolist())}
        self._native = _cpu.Tape()
        self._asides: list[Callable[[Any], object]] = []
        self._kept: list[object] = []
        self._lasting, self._now, self._before = _Arena(), _Arena(), _Arena()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, what this thread calls runs as ever, and is recorded."""
        try:
            self._resume()
            yield
        finally:
            self._pause()

    def move(self, position: int, memories: torch.Tensor) -> None:
        """The next run is for a token at `position` of the sequence whose memories have these `addresses`."""
        self.position.fill_(position)
        self._addresses.copy_(memories)

    def run(self, given: object) -> None:
        """Makes the calls again, in their order; what is done aside gets `given`."""
        run, asides, part = self._native.run, self._asides, 0
        while (part := run(part)) < len(asides):
            asides[part](given)
            part += 1

    def keep(self, *needed: object) -> None:
        """These live as long as the tape."""
        self._kept.extend(needed)

    @property
    def nbytes(self) -> int:
        """Memory for results."""
        return self._lasting.nbytes + self._now.nbytes + self._before.nbytes

    def address_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The address of one of the `memories` (int64), which changes with the sequence."""
        return self._addresses[self._places[memory.data_ptr()]]

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, lasting: bool) -> torch.Tensor:
        return (self._lasting if lasting else self._now).take(shape, dtype)

    def _turn(self) -> None:
        self._now, self._before = self._before, self._now
        self._now.reset()

    def _aside(self, work: Callable[[Any], object], given: object, done: torch.Tensor | None) -> None:
        self._native.cut(0 if done is None else done.data_ptr())
        self._asides.append(work)
        self._pause()
        try:
            if done is None or not int(done):
                work(given)
        finally:
            self._resume()

    def _pause(self) -> None:
        # May come twice, if an interrupt came in between.
        _current.tape = None
        self._native.stop()

    def _resume(self) -> None:
        self._native.record()
        _current.tape = self


def recording() -> Tape | None:
    """The tape that this thread records."""
    return getattr(_current, "tape", None)


def empty(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device = _CPU,
    lasting: bool = False,
) -> torch.Tensor:
    """Memory for a kernel's result. On the CPU: on a tape that is recorded, good until the `turn` after the next.

    `lasting` memory is good for as long as the tape. Within `working_in`, large results lie in the workspace.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if (tape := recording()) is not None:
        return tape._empty(shape, dtype, lasting)
    if (space := getattr(_current, "workspace", None)) is not None:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= LARGE:
            return cast(torch.Tensor, space.take(shape, dtype, nbytes))
    return torch.empty(shape, dtype=dtype)


@contextmanager
def working_in(workspace: Workspace) -> Iterator[None]:
    """Within the block, large results of this thread's kernels lie in `workspace`, unless another thread has it."""
    with workspace.used() as mine:
        _current.workspace = mine
        try:
            yield
        finally:
            _current.workspace = None


def turn() -> None:
    """The next layer begins: it may use the results of the one before it, and those of earlier ones are done with."""
    if (tape := recording()) is not None:
        tape._turn()


def aside(work: Callable[[Any], object], given: object = None, *, done: torch.Tensor | None = None) -> None:
    """Does `work`, whose kernels are not recorded; when a tape is run, it is done anew at this place.

    `work` is called with `given`, or with what the tape's `run` was given. It leaves what it makes in memory. It is
    not called while `done` (int64, one number, on the CPU) is not 0.
    """
    if (tape := recording()) is not None:
        tape._aside(work, given, done)
    elif done is None or not int(done):
        work(given)


def address_of(memory: torch.Tensor) -> torch.Tensor:
    """The address (int64) of a sequence's tensor: on a tape that is recorded, that of the sequence it is run for."""
    tape = recording()
    return addresses([memory]) if tape is None else tape.address_of(memory)


def addresses(memories: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where they lie (int64)."""
    return torch.tensor([memory.data_ptr() for memory in memories], dtype=torch.int64)


class _Arena:
    """Memory that is handed out piece by piece, and again from the start after a reset."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._slab = self._used = 0

    @property
    def nbytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

    def reset(self) -> None:
        self._slab = self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        wanted = math.prod(shape) * dtype.itemsize
        while self._slab < len(self._slabs) and self._used + wanted > self._slabs[self._slab].numel():
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(torch.empty(max(wanted, _SLAB_BYTES), dtype=torch.uint8))
        piece = self._slabs[self._slab][self._used : self._used + wanted]
        self._used += -(-wanted // _LINE) * _LINE
        return piece.view(dtype).view(tuple(shape))
