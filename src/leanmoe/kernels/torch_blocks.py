"""Quantised blocks to float32 in torch operations, on any device.

Each function takes blocks as uint8 [n, block_bytes] and returns float32 [n, block]. Layouts: ggml's block
formats. The products are written in the order that gives gguf's values exactly.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half at byte `at` of each block: float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _shifts(blocks: Tensor, step: int, count: int) -> Tensor:
    return torch.arange(0, step * count, step, dtype=torch.uint8, device=blocks.device).view(1, 1, count, 1)


def _fields(data: Tensor, run: int, bits: int) -> Tensor:
    """Every `bits` bits of each run of `run` bytes, low ones first, run by run: uint8 [n, -1]."""
    count = 8 // bits
    runs = data.reshape(len(data), -1, 1, run)
    fields: Tensor = (runs >> _shifts(data, bits, count)) & (2**bits - 1)
    return fields.reshape(len(data), -1)


def _bits32(data: Tensor) -> Tensor:
    """The bits of 4 bytes in order: uint8 [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & 1).reshape(len(data), 32)


def _lookup(table: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.long()]


def _spread(scale: Tensor, q: Tensor) -> Tensor:
    """Multiplies each run of q [n, block] with its scale [n, runs]."""
    n, runs = scale.shape
    return (scale.unsqueeze(-1) * q.float().view(n, runs, -1)).view(n, -1)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (_fields(b[:, 2:], 16, 4).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _fields(b[:, 4:], 16, 4).float() + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _half(b, 0) * ((_fields(b[:, 6:], 16, 4) | _bits32(b[:, 2:6]) << 4).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b, 0) * (_fields(b[:, 8:], 16, 4) | _bits32(b[:, 4:8]) << 4).float() + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].contiguous().view(torch.int8).float()


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b, 0) * _lookup(_IQ4, _fields(b[:, 2:], 16, 4))


def _mxfp4(b: Tensor) -> Tensor:
    exponent = b[:, :1].int()
    # 2^(E - 128): below E = 2 a subnormal, whose bits are shifted into place
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _lookup(_FP4, _fields(b[:, 1:], 16, 4))


def _scales_k4(s: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and minima in 12 bytes: float32 [n, 8] each."""
    a, b, c = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=1)
    minimum = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=1)
    return scale.float(), minimum.float()


def _with_minima(d: Tensor, dmin: Tensor, scale: Tensor, minimum: Tensor, q: Tensor) -> Tensor:
    n, runs = scale.shape
    return _spread(d * scale, q) - (dmin * minimum).unsqueeze(-1).expand(n, runs, 256 // runs).reshape(n, 256)


def _q4_k(b: Tensor) -> Tensor:
    return _with_minima(_half(b, 0), _half(b, 2), *_scales_k4(b[:, 4:16]), _fields(b[:, 16:], 32, 4))


def _q5_k(b: Tensor) -> Tensor:
    q = _fields(b[:, 48:], 32, 4) | _fields(b[:, 16:48], 32, 1) << 4
    return _with_minima(_half(b, 0), _half(b, 2), *_scales_k4(b[:, 4:16]), q)


def _q2_k(b: Tensor) -> Tensor:
    scale, minimum = (b[:, :16] & 15).float(), (b[:, :16] >> 4).float()
    return _with_minima(_half(b, 80), _half(b, 82), scale, minimum, _fields(b[:, 16:80], 32, 2))


def _q3_k(b: Tensor) -> Tensor:
    low, high = b[:, 96:104], b[:, 104:108]
    scale = _fields(low, 8, 4) | _fields(high, 4, 2) << 4
    q = _fields(b[:, 32:96], 32, 2) | _fields(b[:, :32], 32, 1) << 2
    return _spread(_half(b, 108) * (scale.float() - 32), q.float() - 4)


def _q6_k(b: Tensor) -> Tensor:
    scale = b[:, 192:208].contiguous().view(torch.int8).float()
    q = _fields(b[:, :128], 64, 4) | _fields(b[:, 128:192], 32, 2) << 4
    return _spread(_half(b, 208) * scale, q.float() - 32)


def _iq4_xs(b: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)
    high = ((b[:, 2:4].unsqueeze(-1) >> shifts) & 3).reshape(len(b), 8)
    scale = (_fields(b[:, 4:8], 1, 4) | high << 4).float() - 32
    return _spread(_half(b, 0) * scale, _lookup(_IQ4, _fields(b[:, 8:], 16, 4)))


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda b: b.view(torch.float32),
    "F16": lambda b: b.view(torch.float16).float(),
    "BF16": lambda b: b.view(torch.bfloat16).float(),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
