"""Memory for the large results of a prompt's pass, which is taken again from layer to layer.

Every layer makes the same few dozen results, many of a megabyte or more. A block of that size comes from the kernel
page by page and goes back when it is freed; clearing pages took a sixth of a prompt's time. Here a block goes back to a
region that the next one is taken from, and after the pass all of it to the kernel.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

_PAGE = 4096
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has it from 3.12 on
# Addresses, not memory: only what was used counts, and first fit keeps that together at the front.
_REGION_BYTES = 1 << 32
LARGE = 1 << 18
"""Bytes from which a result is worth it; the C library gives smaller blocks out again by itself."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Gives the kernel what the C library keeps of freed blocks, where it is one that can (glibc).

    Those of up to a megabyte, which each layer of a prompt takes and frees, leave ever more holes between small ones
    that stay: 10 MB after 48 layers. It takes 0.3 ms.
    """
    if _trim is not None:
        _trim(0)


class Workspace:
    """A region of memory from which blocks are taken at the lowest place that is free. One thread uses it at a time.

    A block is free again when the last tensor that looks at it is gone, in whichever thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: mmap.mmap | None = None
        self._free: list[tuple[int, int]] = []  # (begin, end), in order, no two adjacent
        self._returned: deque[tuple[int, int]] = deque()  # by finalizers, which may run anywhere: no lock
        self._live = 0

    @contextlib.contextmanager
    def used(self) -> Iterator["Workspace | None"]:
        """For a pass; None if another one has it. Afterwards its memory is the kernel's again."""
        if not self._lock.acquire(blocking=False):
            yield None
            return
        try:
            yield self
        finally:
            self._give_back()
            self._lock.release()

    def take(self, shape: Sequence[int], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """A tensor of `nbytes`, its content undefined."""
        self._collect()
        size = -(-nbytes // _PAGE) * _PAGE
        i = next((i for i, (begin, end) in enumerate(self._free) if end - begin >= size), None)
        if i is None:
            return torch.empty(tuple(shape), dtype=dtype)
        begin, end = self._free[i]
        self._free[i : i + 1] = [(begin + size, end)] if begin + size < end else []
        self._live += 1
        assert self._region is not None
        block = np.frombuffer(self._region, np.uint8, nbytes, begin)
        # The tensor's storage holds the array, and views of the tensor hold the storage.
        weakref.finalize(block, self._returned.append, (begin, begin + size)).atexit = False
        return torch.from_numpy(block).view(dtype).view(tuple(shape))

    def _collect(self) -> None:
        if self._region is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            with contextlib.suppress(OSError):  # where addresses are counted as memory: there is no region
                self._region = mmap.mmap(-1, _REGION_BYTES, flags=flags)
                self._free = [(0, _REGION_BYTES)]
                self._region.madvise(mmap.MADV_HUGEPAGE)  # a hint; kernels built without huge pages refuse it
        while self._returned:
            block = self._returned.popleft()
            self._live -= 1
            insort(self._free, block)
            i = self._free.index(block)
            if i + 1 < len(self._free) and self._free[i + 1][0] == block[1]:
                self._free[i : i + 2] = [(block[0], self._free[i + 1][1])]
            if i and self._free[i - 1][1] == block[0]:
                self._free[i - 1 : i + 1] = [(self._free[i - 1][0], self._free[i][1])]

    def _give_back(self) -> None:
        if self._region is not None:
            self._collect()
            if not self._live:
                self._region.madvise(mmap.MADV_DONTNEED)
