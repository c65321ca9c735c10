"""Rows of floats to rows of a tensor type's bytes."""

import numpy as np

from leanmoe.convert.tensors import F32Array, U8Array
from leanmoe.errors import UnsupportedError
from leanmoe.formats.quant_types import QuantType

# Types that floats can be written in.
ENCODED = ("F32", "F16", "BF16")


def encode(rows: F32Array, qtype: QuantType) -> U8Array:
    """`rows` [n, columns] in type `qtype`: uint8 [n, row bytes]. Raises `UnsupportedError` for a type without one."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if qtype.name == "F32":
        return rows.view(np.uint8)
    if qtype.name == "F16":
        with np.errstate(over="ignore"):
            return rows.astype(np.float16).view(np.uint8)
    if qtype.name == "BF16":
        return _bf16(rows).view(np.uint8)
    raise UnsupportedError(
        f"nothing can be written as {qtype.name}; types with a quantiser: {', '.join(ENCODED)}"
    )


def _bf16(rows: F32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Rounded to nearest, ties to even; a NaN stays one."""
    bits = rows.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(rows), bits >> 16 | 64, rounded).astype(np.uint16)
