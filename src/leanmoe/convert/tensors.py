"""Tensors of a checkpoint as they will stand in the GGUF, computed a few rows at a time when their bytes are wanted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from leanmoe.errors import FormatError
from leanmoe.formats.quant_types import QuantType

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of torch `shape` that is not in memory.

    `read(start, stop)` gives rows [start, stop) of all its rows: every dimension but the last flattened into one
    (a vector is one row). They are float32 [stop - start, shape[-1]]; or, if `encoded`, the rows' bytes in type
    `qtype`, uint8. `qtype` is else the float type that holds the checkpoint's values without loss.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], npt.NDArray[Any]]
    qtype: QuantType
    encoded: bool = False

    @property
    def rows(self) -> int:
        """The number of rows."""
        return math.prod(self.shape[:-1])

    def whole(self) -> npt.NDArray[Any]:
        """All of it, in memory. For small tensors, or where a transform needs everything at once."""
        rows = self.read(0, self.rows)
        return rows.reshape(*self.shape[:-1], -1)

    def reindexed(self, choose: Callable[[Index], Index]) -> "Tensor":
        """The rows that `choose` picks: it gets the array of row numbers, in the shape of all dimensions but the last.

        For example `lambda i: i[:, :f]` takes the first f rows of each expert. For a vector the numbers are those
        of its elements.
        """
        if len(self.shape) == 1:
            order = choose(np.arange(self.shape[0]))
            return replace(self, shape=order.shape, read=lambda start, stop: self.read(0, 1)[:, order])
        order = choose(np.arange(self.rows).reshape(self.shape[:-1]))
        flat = np.ascontiguousarray(order).reshape(-1)
        return replace(
            self,
            shape=(*order.shape, self.shape[-1]),
            read=lambda start, stop: _read_chosen(self, flat[start:stop]),
        )

    def mapped(self, change: Callable[[F32Array], npt.NDArray[Any]], width: int | None = None) -> "Tensor":
        """`change` applied to rows [n, shape[-1]] of it; it may give rows of another `width`."""
        self._wants_floats("a change of its numbers")
        columns = self.shape[-1] if width is None else width
        return replace(
            self,
            shape=(*self.shape[:-1], columns),
            read=lambda start, stop: np.asarray(change(self.read(start, stop)), dtype=np.float32),
        )

    def transposed(self) -> "Tensor":
        """The last two dimensions exchanged. Reading holds one matrix in memory."""
        self._wants_floats("a transposition")
        *lead, height, width = self.shape
        held: list[tuple[int, F32Array]] = []

        def matrix(number: int) -> F32Array:
            if not held or held[0][0] != number:
                held.clear()
                whole = self.read(number * height, (number + 1) * height)
                held.append((number, np.ascontiguousarray(whole.T)))
            return held[0][1]

        def read(start: int, stop: int) -> F32Array:
            parts, at = [], start
            while at < stop:
                number, first = divmod(at, width)
                last = min(width, first + stop - at)
                parts.append(matrix(number)[first:last])
                at += last - first
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return replace(self, shape=(*lead, width, height), read=read)

    def reshaped(self, *shape: int) -> "Tensor":
        """The same numbers in another shape; with another last dimension, reading holds all of it in memory."""
        if math.prod(shape) != math.prod(self.shape):
            raise FormatError(f"{math.prod(self.shape)} numbers do not make the shape {list(shape)}")
        if shape[-1] == self.shape[-1]:
            return replace(self, shape=shape)
        self._wants_floats("another last dimension")
        return replace(
            self, shape=shape, read=lambda start, stop: self.whole().reshape(-1, shape[-1])[start:stop]
        )

    def _wants_floats(self, what: str) -> None:
        if self.encoded:
            raise FormatError(f"a tensor stored as {self.qtype.name} cannot take {what}")


def _read_chosen(tensor: Tensor, rows: Index) -> npt.NDArray[Any]:
    """These rows, read in as few runs as possible; a permutation within a narrow range is read as that range."""
    if not len(rows):
        return tensor.read(0, 0)
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low <= 2 * len(rows) + 256:
        block = tensor.read(low, high)
        return block if high - low == len(rows) and (np.diff(rows) == 1).all() else block[rows - low]
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = np.split(rows, cuts)
    return np.concatenate([tensor.read(int(run[0]), int(run[-1]) + 1) for run in runs])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """`parts` one after the other along the first dimension."""
    first = parts[0]
    if any(part.shape[1:] != first.shape[1:] or part.encoded != first.encoded for part in parts):
        shapes = sorted({part.shape for part in parts})
        raise FormatError(f"tensors of different shapes cannot be joined: {shapes[:4]}")
    starts = np.cumsum([0, *(part.rows for part in parts)])

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        number = int(np.searchsorted(starts, start, side="right")) - 1
        pieces, at = [], start
        while at < stop:
            last = min(stop, int(starts[number + 1]))
            pieces.append(parts[number].read(at - int(starts[number]), last - int(starts[number])))
            at, number = last, number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    total = sum(part.shape[0] for part in parts)
    if len(first.shape) == 1:
        return replace(
            first,
            shape=(total,),
            read=lambda start, stop: np.concatenate([p.read(0, 1) for p in parts], axis=1),
        )
    return Tensor((total, *first.shape[1:]), read, widest([part.qtype for part in parts]), first.encoded)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """`parts` along a new first dimension."""
    return joined([replace(part, shape=(1, *part.shape)) for part in parts])


def widest(types: Sequence[QuantType]) -> QuantType:
    """The type that holds the values of all `types`."""
    return max(types, key=lambda t: (t.block_bytes / t.block, t.id))
