"""Rows of floats to rows of a tensor type's bytes."""

import numpy as np

from leanmoe.convert.tensors import F32Array, U8Array
from leanmoe.formats.quant_types import QuantType


def encode(rows: F32Array, qtype: QuantType) -> U8Array:
    """`rows` [n, columns] in type `qtype`: uint8 [n, row bytes].

    Raises `ValueError` for numbers that the type cannot hold and `UnsupportedError` for a type that is not written.
    """
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if qtype.name == "F32":
        return rows.view(np.uint8)
    if qtype.name == "F16":
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        if not np.isfinite(halves).all():
            raise ValueError("a number is not finite, or too large for F16")
        return halves.view(np.uint8)
    if qtype.name == "BF16":
        return _bf16(rows).view(np.uint8)
    import torch  # loaded only where something is quantised: it takes a second

    from leanmoe.kernels import quantize

    blocks: U8Array = quantize(torch.from_numpy(rows), qtype).numpy()
    return blocks


def _bf16(rows: F32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Rounded to nearest, ties to even; a NaN stays one."""
    bits = rows.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(rows), bits >> 16 | 64, rounded).astype(np.uint16)
