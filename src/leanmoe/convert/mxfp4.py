"""MXFP4 tensors as gpt-oss checkpoints hold them, in the blocks of GGUF. The numbers stay exactly the same.

Source: a checkpoint's byte j of a block of 32 holds elements 2j (low half) and 2j + 1, its scale lies in a tensor of
its own; a GGUF block is the scale byte, then bytes j with elements j (low half) and j + 16.
"""

import numpy as np

from leanmoe.convert.block import Block
from leanmoe.convert.tensors import Tensor, U8Array
from leanmoe.errors import FormatError
from leanmoe.formats.quant_types import BY_NAME

_MXFP4 = BY_NAME["MXFP4"]


def take_mxfp4(block: Block, name: str) -> Tensor:
    """The tensor stored as `name_blocks` [..., K/32, 16] and `name_scales` [..., K/32], encoded, K the row length."""
    shape, blocks = block.checkpoint.take_bytes(f"{block.prefix}{name}_blocks")
    scale_shape, scales = block.checkpoint.take_bytes(f"{block.prefix}{name}_scales")
    if len(shape) < 3 or shape[-1] != 16 or scale_shape != shape[:-1]:
        raise FormatError(
            f"{block.config.source}: tensor '{block.prefix}{name}' has blocks {list(shape)} and scales "
            f"{list(scale_shape)}; blocks of 16 bytes with a scale for each were wanted"
        )
    per_row = shape[-2]

    def read(start: int, stop: int) -> U8Array:
        halves = blocks(start * per_row, stop * per_row)
        out = np.empty((stop - start, per_row, 17), dtype=np.uint8)
        out[:, :, 0] = scales(start, stop)
        out[:, :, 1:] = _arranged(halves).reshape(stop - start, per_row, 16)
        return out.reshape(stop - start, -1)

    return Tensor((*shape[:-2], per_row * _MXFP4.block_bytes), read, _MXFP4, encoded=True)


def _arranged(halves: U8Array) -> U8Array:
    """[n, 16] bytes with neighbours in one byte to bytes with elements 16 apart."""
    low, high = halves & 15, halves >> 4
    first = np.stack([low[:, :8], high[:, :8]], axis=2).reshape(-1, 16)
    second = np.stack([low[:, 8:], high[:, 8:]], axis=2).reshape(-1, 16)
    arranged: U8Array = first | second << 4
    return arranged
