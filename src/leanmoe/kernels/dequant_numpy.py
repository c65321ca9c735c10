"""Exact dequantisation of the types that have no code of their own, through `gguf` where it knows them."""

import numpy as np
import numpy.typing as npt
import torch

from leanmoe.errors import UnsupportedError
from leanmoe.formats.quant_types import QuantType

_INTEGERS = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}


def dequantize_rows(data: torch.Tensor, qtype: QuantType, rows: int, cols: int) -> torch.Tensor:
    """`data` (uint8, on the CPU; whole rows of whole blocks) as float32 [rows, cols].

    Raises `UnsupportedError` for a type that neither this module nor the installed `gguf` can read.
    """
    raw = data.numpy()
    if qtype.name in _INTEGERS:
        values = raw.view(_INTEGERS[qtype.name]).astype(np.float32)
    elif qtype.name in ("Q1_0", "Q2_0"):
        values = _few_bits(raw.reshape(-1, qtype.block_bytes), bits=int(qtype.name[1]))
    else:
        values = _through_gguf(raw.reshape(-1, qtype.block_bytes), qtype)
    return torch.from_numpy(np.ascontiguousarray(values.reshape(rows, cols)))


def _few_bits(blocks: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.float32]:
    """A half d, then the elements. Q1_0: one bit, +d or (clear) -d. Q2_0: two bits, d * (bits - 1)."""
    scale: npt.NDArray[np.float32] = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = ((blocks[:, 2:, None] >> shifts) & (2**bits - 1)).reshape(len(blocks), -1).astype(np.float32)
    scale = scale * (2 * codes - 1 if bits == 1 else codes - 1)
    return scale


def _through_gguf(blocks: npt.NDArray[np.uint8], qtype: QuantType) -> npt.NDArray[np.float32]:
    import gguf  # takes a tenth of a second and 3 MB, for types that few models have

    try:
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(qtype.id))
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(f"tensor type {qtype.name} cannot be read: {error}") from error
    return values
