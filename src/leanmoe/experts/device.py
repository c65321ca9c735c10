"""All that differs between the devices that hold slots: memory, the way from a file into it, and ordering."""

import contextlib
import mmap
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from leanmoe.errors import BudgetError, UnsupportedError
from leanmoe.kernels import arranged
from leanmoe.pack.layout import ExpertLayout
from leanmoe.units import format_bytes

PAGE = 4096
Fence = torch.cuda.Event | None
"""A point in a device's work to be passed before a slot may be overwritten; None on the CPU."""


class Device(ABC):
    """Where slots live. Lessees compute on the slot's tensor; reader threads call `load`."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """The arena: `nbytes` of uint8 that starts on a page. Raises `BudgetError` if refused."""

    @abstractmethod
    def layout(self, file: ExpertLayout) -> ExpertLayout:
        """The layout in which experts are computed with here; `kernels.Arrangement` makes it of the file's."""

    @abstractmethod
    def load(self, slot: torch.Tensor, fill: Callable[[memoryview], None], after: Fence) -> None:
        """Has `fill` write host memory as long as `slot`, and returns once the slot holds those bytes.

        Nothing is written to the slot before `after` is passed. If `fill` raises, so does this, and the
        slot's content is undefined. Called from reader threads, several at once, never twice for one slot.
        """

    @abstractmethod
    def fence(self) -> Fence:
        """The end of the work that this thread has queued on the device so far."""


class CPUDevice(Device):
    """Slots in anonymous memory, resident from their first use on; files are read into them in place.

    With `arrange`, matrices are kept in the order that the processor's products read fastest.
    """

    def __init__(self, *, arrange: bool = False) -> None:
        self._arrange = arrange

    def layout(self, file: ExpertLayout) -> ExpertLayout:
        return arranged(file) if self._arrange else file

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(
                f"{format_bytes(nbytes)} for expert slots were refused: {error.strerror}; lower the budget"
            ) from error
        with contextlib.suppress(OSError):  # a hint; kernels built without huge pages refuse it
            arena.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(arena, dtype=torch.uint8)

    def load(self, slot: torch.Tensor, fill: Callable[[memoryview], None], after: Fence) -> None:
        fill(slot.numpy().data)

    def fence(self) -> Fence:
        return None


class CUDADevice(Device):
    """Slots in VRAM: file -> pinned staging buffer -> slot, on its own copy stream.

    Has not run on hardware yet.

    One staging buffer per reader thread, each as large as the largest expert (`host_staging_bytes` of host
    memory). All compute on slots must be queued on the stream that was current when the device was opened:
    `fence` marks that stream, and refuses to be called from another.
    """

    def __init__(self, device: torch.device, readers: int, largest: int) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(readers):
            buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=True)
            if buffer.data_ptr() % PAGE:
                raise UnsupportedError(f"{device}: pinned memory is not page-aligned, which O_DIRECT needs")
            self._staging.put(buffer)

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise BudgetError(
                f"{self._device} has {format_bytes(free)} of {format_bytes(total)} free, not the "
                f"{format_bytes(nbytes)} wanted for expert slots; lower its budget"
            ) from error

    def layout(self, file: ExpertLayout) -> ExpertLayout:
        return file

    def load(self, slot: torch.Tensor, fill: Callable[[memoryview], None], after: Fence) -> None:
        staging = self._staging.get()
        try:
            host = staging[: slot.numel()]
            fill(host.numpy().data)
            with torch.cuda.stream(self._copy):
                if after is not None:
                    self._copy.wait_event(after)
                slot.copy_(host, non_blocking=True)
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._copy)
            done.synchronize()  # the staging buffer is free, and the slot may be computed with on any stream
        finally:
            self._staging.put(staging)

    def fence(self) -> Fence:
        if torch.cuda.current_stream(self._device) != self._compute:
            raise RuntimeError(f"experts on {self._device} were computed on another stream than the pool's")
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return event


def open_device(device: torch.device, readers: int, largest: int) -> Device:
    """The `Device` for a torch device, for `readers` threads and experts of up to `largest` bytes.

    Raises `UnsupportedError` for a device that is neither a CPU nor an available CUDA GPU.
    """
    if device.type == "cpu":
        return CPUDevice(arrange=True)
    if device.type == "cuda" and torch.cuda.is_available():
        return CUDADevice(device, readers, largest)
    raise UnsupportedError(
        f"device '{device}' is not available here; use cpu, or cuda where torch sees a GPU"
    )


def host_staging_bytes(device: torch.device, readers: int, largest: int) -> int:
    """Host memory that reading into `device` needs beside its slots: none on the CPU."""
    if device.type == "cpu":
        return 0
    return readers * (1 << (largest - 1).bit_length())  # torch rounds pinned blocks up to a power of two
