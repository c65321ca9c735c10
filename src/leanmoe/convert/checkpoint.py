"""The tensors of a safetensors checkpoint, as floats whatever they are stored as."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leanmoe.convert.tensors import F32Array, Tensor
from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.quant_types import BY_NAME, QuantType
from leanmoe.formats.safetensors import StoredCheckpoint, StoredTensor
from leanmoe.pack.source import read_at

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_RAW = {"U8": "<u1", "I8": "<i1", "F8_E8M0": "<u1"}


def _bf16(bits: npt.NDArray[np.uint16]) -> F32Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3_values() -> F32Array:
    """The value of each 8-bit float with 4 bits of exponent (bias 7), no infinities, NaN at 0x7F and 0xFF."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(bits & 0x7F) == 0x7F] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3_values()


class Checkpoint:
    """The tensors of a checkpoint by name. A context manager: it owns the open files.

    `take` gives each tensor once, and `left` lists those that nobody took, so that none is lost unnoticed.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        fp8_block: tuple[int, int] = (128, 128),
        arrive: Callable[[Path], None] | None = None,
    ) -> None:
        """`fp8_block` are the rows and columns that share a scale in 8-bit matrices.

        `arrive` is called before a file is opened, which is when it is first read, and may wait for it.
        """
        self._fp8_block = fp8_block
        self._stored = stored
        self._taken: set[str] = set()
        self._fds: dict[Path, int] = {}
        self._arrive = arrive
        self._stack = ExitStack()

    def close(self) -> None:
        """Closes the files. May be called twice."""
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._stored.tensors

    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        return iter(self._stored.tensors)

    def left(self) -> list[str]:
        """The names of the tensors that were not taken."""
        return [name for name in self._stored.tensors if name not in self._taken]

    def ignore(self, name: str) -> None:
        """Counts a tensor as taken."""
        self._taken.add(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is stored. Raises `FormatError` if it is missing."""
        return self._find(name).shape

    def take(self, name: str) -> Tensor:
        """The tensor called `name`, as floats. Raises `FormatError` if it is missing."""
        stored = self._find(name)
        if stored.dtype == "BF16":
            return self._floats(stored, "<u2", BY_NAME["BF16"], _bf16)
        if stored.dtype in _FLOATS:
            kind = BY_NAME["F16" if stored.dtype == "F16" else "F32"]
            return self._floats(stored, _FLOATS[stored.dtype], kind, lambda x: x.astype(np.float32))
        if stored.dtype == "F8_E4M3":
            return self._scaled(name, self._floats(stored, "<u1", BY_NAME["BF16"], lambda bits: _E4M3[bits]))
        raise UnsupportedError(
            f"{stored.path}: tensor '{name}' is stored as {stored.dtype}, which is not converted; "
            "a checkpoint in BF16, F16, F32 or FP8 with block scales was wanted"
        )

    def take_bytes(self, name: str) -> tuple[tuple[int, ...], Callable[[int, int], npt.NDArray[np.uint8]]]:
        """The shape of a tensor of bytes, and a function that reads some of its rows, uint8 [n, shape[-1]]."""
        stored = self._find(name)
        if stored.dtype not in _RAW:
            raise FormatError(f"{stored.path}: tensor '{name}' is {stored.dtype}; bytes (U8) were wanted")
        return stored.shape, lambda start, stop: self._read(stored, "<u1", start, stop)

    def _find(self, name: str) -> StoredTensor:
        stored = self._stored.tensors.get(name)
        if stored is None:
            raise FormatError(f"{next(iter(self._stored.files)).parent}: has no tensor '{name}'")
        self._taken.add(name)
        return stored

    def _floats(
        self, stored: StoredTensor, dtype: str, qtype: QuantType, decode: Callable[[Any], F32Array]
    ) -> Tensor:
        shape = stored.shape or (1,)
        return Tensor(shape, lambda start, stop: decode(self._read(stored, dtype, start, stop)), qtype)

    def _scaled(self, name: str, tensor: Tensor) -> Tensor:
        """8-bit floats times their scales: one for each block of a matrix (`NAME_scale_inv`), or for each row or the
        whole (`NAME_scale`)."""
        path = self._find(name).path
        suffix = next((end for end in ("_scale_inv", "_scale") if name + end in self), None)
        if suffix is None or len(tensor.shape) < 2:
            raise FormatError(
                f"{path}: tensor '{name}' is 8-bit, but not a matrix with scales ({name}_scale_inv)"
            )
        scales = self.take(name + suffix)
        *lead, rows, columns = tensor.shape
        one = math.prod(scales.shape) == 1
        high, wide = (rows, columns) if one else self._fp8_block if suffix == "_scale_inv" else (1, columns)
        per_matrix, per_row = -(-rows // high), -(-columns // wide)
        if not one and math.prod(scales.shape) != math.prod(lead) * per_matrix * per_row:
            raise FormatError(
                f"{path}: tensor '{name}' of shape {list(tensor.shape)} has scales of shape {list(scales.shape)}; "
                f"one for each block of {high} x {wide} was wanted"
            )
        table = scales.reshaped(math.prod(scales.shape) // per_row, per_row)

        def read(start: int, stop: int) -> F32Array:
            row = np.arange(start, stop)
            block = row * 0 if one else row // rows * per_matrix + row % rows // high
            chosen = table.read(int(block[0]), int(block[-1]) + 1)[block - block[0]]
            spread = np.repeat(chosen, wide, axis=1)[:, :columns]
            product: F32Array = tensor.read(start, stop) * spread
            return product

        return replace(tensor, read=read)

    def _open(self, path: Path) -> int:
        if path not in self._fds:
            if self._arrive is not None:
                self._arrive(path)
            try:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise FormatError(f"{path}: cannot be opened: {error.strerror}") from error
            self._stack.callback(os.close, self._fds[path])
        return self._fds[path]

    def _read(self, stored: StoredTensor, dtype: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows [start, stop) of a tensor as it is stored; dropped from the page cache once read."""
        columns = stored.shape[-1] if stored.shape else 1
        out = np.empty((stop - start, columns), dtype=dtype)
        if out.size:
            fd, offset = self._open(stored.path), stored.offset + start * out[:1].nbytes
            read_at(fd, stored.path, offset, out.data.cast("B"))
            os.posix_fadvise(fd, offset, out.nbytes, os.POSIX_FADV_DONTNEED)
        return out
