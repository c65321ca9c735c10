"""Quantised blocks made in bulk, of random bytes with sane scales. Layouts: the tensor types of ggml."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from leanmoe.convert.encode import encode
from leanmoe.formats.quant_types import QuantType

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_E2M1_RMS = float(np.sqrt(np.mean(np.square([0, 1, 2, 3, 4, 6, 8, 12]))))
_IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def random_rows(rng: np.random.Generator, qtype: QuantType, rows: int, columns: int, std: float) -> U8:
    """`rows` rows [rows, row bytes] of `columns` random values of mean 0 and standard deviation `std`.

    The bytes of values are uniformly random: the values are uniform between their extremes, not Gaussian, but
    for F32, F16 and BF16.
    """
    if qtype.name in ("F32", "F16", "BF16"):
        return encode(rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std), qtype)
    count = rows * (qtype.row_bytes(columns) // qtype.block_bytes)
    # Whole words are made several times faster than bytes.
    words = rng.integers(0, 1 << 64, -(-count * qtype.block_bytes // 8), np.uint64)
    blocks = words.view(np.uint8)[: count * qtype.block_bytes].reshape(count, qtype.block_bytes)
    _SCALERS[qtype.name](rng, blocks, std)
    return blocks.reshape(rows, -1)


def _spread(heads: U8, count: int) -> U8:
    """`heads` [H, n] over and over: [count, n]."""
    return heads[np.arange(count) % len(heads)]


def _signed_halves(rng: np.random.Generator, scale: float) -> U8:
    """64 halves of size `scale`, half of them negative: no bias, though the blocks' integers have one."""
    signs = rng.permutation(np.repeat([-1.0, 1.0], 32))
    return (signs * scale).astype("<f2")[:, None].view(np.uint8)


def _k_heads(d: npt.NDArray[np.float16], scales: npt.NDArray[np.integer], centre: float) -> U8:
    """The first 16 bytes of Q4_K and Q5_K blocks, for values d * scale * (q - centre). d [n], scales [n, 8]."""
    s = scales.astype(np.uint8)
    low, high = s[:, :4], s[:, 4:]
    packed = [low | high >> 4 << 6, low | high >> 4 << 6, (high & 15) * 17]
    halves = np.stack([d, (d.astype(np.float32) * centre).astype(np.float16)], axis=1).astype("<f2")
    return np.concatenate([halves.view(np.uint8), *packed], axis=1)


def _random_k(levels: int) -> Callable[[np.random.Generator, U8, float], None]:
    centre = (levels - 1) / 2
    spread = float(np.sqrt((levels**2 - 1) / 12))

    def scale(rng: np.random.Generator, blocks: U8, std: float) -> None:
        scales = rng.integers(36, 64, (256, 8))
        d = std / (spread * float(np.sqrt(np.mean(scales**2))))
        heads = _k_heads(np.full(256, d, np.float16), scales, centre)
        blocks[:, :16] = _spread(heads, len(blocks))

    return scale


def _random_q6_k(rng: np.random.Generator, blocks: U8, std: float) -> None:
    scales = rng.integers(8, 17, (256, 16)) * rng.permuted(
        np.repeat([[-1, 1]], 256 * 8, 0).reshape(256, 16), axis=1
    )
    d = std / (float(np.sqrt((64**2 - 1) / 12)) * float(np.sqrt(np.mean(scales**2))))
    halves = np.full((256, 1), d, "<f2").view(np.uint8)
    heads = np.concatenate([scales.astype(np.int8).view(np.uint8), halves], axis=1)
    blocks[:, 192:] = _spread(heads, len(blocks))


def _random_symmetric(values: list[int]) -> Callable[[np.random.Generator, U8, float], None]:
    rms = float(np.sqrt(np.mean(np.square(values))))

    def scale(rng: np.random.Generator, blocks: U8, std: float) -> None:
        blocks[:, :2] = _spread(_signed_halves(rng, std / rms), len(blocks))

    return scale


def _random_offset(levels: int) -> Callable[[np.random.Generator, U8, float], None]:
    """Types with a minimum beside the scale: d * q + m."""

    def scale(rng: np.random.Generator, blocks: U8, std: float) -> None:
        d = std / np.sqrt((levels**2 - 1) / 12)
        blocks[:, :4] = np.array([d, -d * (levels - 1) / 2], "<f2").view(np.uint8)

    return scale


def _random_mxfp4(rng: np.random.Generator, blocks: U8, std: float) -> None:
    """Powers of two only: two neighbouring ones, in the proportion that gives `std`."""
    wanted = std / _E2M1_RMS
    low = int(np.floor(np.log2(wanted)))
    share = ((wanted / 2.0**low) ** 2 - 1) / 3
    exponents = 128 + low + (np.arange(256) < round(256 * share))
    blocks[:, :1] = _spread(rng.permutation(exponents.astype(np.uint8))[:, None], len(blocks))


_SCALERS = {
    "Q4_K": _random_k(16),
    "Q5_K": _random_k(32),
    "Q6_K": _random_q6_k,
    "Q8_0": _random_symmetric(list(range(-128, 128))),
    "Q5_0": _random_symmetric(list(range(-16, 16))),
    "Q4_0": _random_symmetric(list(range(-8, 8))),
    "IQ4_NL": _random_symmetric(_IQ4_NL),
    "Q4_1": _random_offset(16),
    "Q5_1": _random_offset(32),
    "MXFP4": _random_mxfp4,
}
