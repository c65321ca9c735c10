"""The trunk: every weight that is not a routed expert, resident on its device in its file's quantised bytes."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3

from leanmoe.errors import ExpertReadError, FormatError, UnsupportedError
from leanmoe.formats.gguf import GGUFFile, TensorInfo
from leanmoe.formats.io import open_direct
from leanmoe.kernels import Weight, arrange, best_layout, dequantize

_CHUNK = 16 << 20


class Trunk:
    """Named trunk tensors of a pack, held in memory.

    `load` reads the data section of `trunk.gguf` once, in order, past the page cache, and checks its digest
    on the way. Tensors are views into that one image; `device_of` may place a tensor on another device.
    """

    def __init__(
        self, gguf: GGUFFile, image: torch.Tensor, start: int, device_of: Callable[[str], torch.device]
    ) -> None:
        self._gguf, self._image, self._start, self._device_of = gguf, image, start, device_of
        self._taken: set[str] = set()
        self._weights: dict[str, Weight] = {}

    @classmethod
    def load(cls, gguf: GGUFFile, digest: bytes, device_of: Callable[[str], torch.device]) -> "Trunk":
        """Reads the trunk of one file. Raises `ExpertReadError` if it is short or does not match `digest`."""
        size = gguf.path.stat().st_size
        start = min((t.offset for t in gguf.tensors.values()), default=size) & ~(mmap.PAGESIZE - 1)
        image = _anonymous(size - start)
        hasher = blake3()
        with gguf.path.open("rb") as header:
            hasher.update(header.read(start))
        for chunk in _read_chunks(gguf.path, start, size, image):
            hasher.update(chunk)
        if hasher.digest() != digest:
            raise ExpertReadError(
                f"{gguf.path}: its digest is {hasher.hexdigest()}, but the pack recorded {digest.hex()}; "
                "the file has changed since packing: pack the model again"
            )
        return cls(gguf, image, start, device_of)

    @property
    def nbytes(self) -> int:
        return self._image.numel()

    def has(self, name: str) -> bool:
        return name in self._gguf.tensors

    def check_all_taken(self) -> None:
        """Raises `UnsupportedError` if a tensor was never asked for: a network that ignores one says wrong things."""
        left = [name for name in self._gguf.tensors if name not in self._taken]
        if left:
            raise UnsupportedError(
                f"{self._gguf.path}: {len(left)} tensors have no place in a network of architecture "
                f"'{self._gguf.architecture}' as its metadata describes it, like {left[0]}"
            )

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        """The matrix `name` [rows, cols], still quantised. Raises `FormatError` if it is missing or misshapen."""
        return self._weight(self._info(name, (rows, cols)), rows, (rows, cols))

    def stacked(self, name: str, count: int, rows: int, cols: int) -> Weight:
        """The `count` matrices [rows, cols] of the tensor `name`, as one of all their rows. Raises as `weight` does."""
        return self._weight(self._info(name, (count, rows, cols)), rows, (count * rows, cols))

    def _weight(self, info: TensorInfo, together: int, shape: tuple[int, int]) -> Weight:
        """The tensor in the layout that its device multiplies fastest, runs of `together` rows apart."""
        if info.name not in self._weights:
            device = self._device_of(info.name)
            weight = Weight(self._bytes(info).to(device), info.qtype, shape)
            if device.type == "cpu":  # in place: the image then has no other order of this tensor
                weight = arrange(weight, best_layout(info.qtype, together))
            self._weights[info.name] = weight
        return self._weights[info.name]

    def vector(self, name: str, size: int) -> torch.Tensor:
        """The vector `name` [size] as float32."""
        info = self._info(name, (size,))
        return dequantize(self._bytes(info), info.qtype, (size,)).to(self._device_of(name))

    def matrix(self, name: str, rows: int, cols: int) -> torch.Tensor:
        """The matrix `name` [rows, cols] as float32."""
        info = self._info(name, (rows, cols))
        return dequantize(self._bytes(info), info.qtype, (rows, cols)).to(self._device_of(name))

    def vector_if_present(self, name: str, size: int) -> torch.Tensor | None:
        return self.vector(name, size) if self.has(name) else None

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._gguf.tensors.get(name)
        if info is None:
            raise FormatError(f"{self._gguf.path}: tensor {name} {list(shape)} is missing")
        squeezed = [n for n in info.shape if n != 1]
        if squeezed != [n for n in shape if n != 1]:
            raise FormatError(
                f"{self._gguf.path}: tensor {name} has shape {list(info.shape)}; wanted {list(shape)}"
            )
        self._taken.add(name)
        return info

    def _bytes(self, info: TensorInfo) -> torch.Tensor:
        begin = info.offset - self._start
        return self._image[begin : begin + info.nbytes]


def _anonymous(nbytes: int) -> torch.Tensor:
    """Page-aligned zero memory of at least `nbytes`, a whole number of pages, as a uint8 tensor."""
    pages = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    image = mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a hint; kernels built without huge pages refuse it
        image.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(image, dtype=torch.uint8)


def _read_chunks(path: Path, start: int, size: int, image: torch.Tensor) -> Iterator[memoryview]:
    """Reads path[start:size] into `image` and yields each chunk while the next one is being read."""
    target = memoryview(image.numpy().data)
    with open_direct(path) as source, ThreadPoolExecutor(1) as reader:

        def read(begin: int) -> memoryview:
            # O_DIRECT wants whole blocks; the last read asks past the end of the file and comes back short.
            want = min(_CHUNK, size - begin)
            view = target[begin - start : min(begin - start + _CHUNK, len(target))]
            got = 0
            while got < want:
                n = os.preadv(source.fd, [view[got:]], begin + got)
                if n == 0:
                    raise ExpertReadError(f"{path}: ends at byte {begin + got}; wanted {size}")
                got += n
            source.consumed(begin, got)
            return view[:want]

        pending = None
        for begin in range(start, size, _CHUNK):
            following = reader.submit(read, begin)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()
