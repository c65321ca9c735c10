"""Random weights of every type, and what llama.cpp's rounding of activations leaves of an input."""

from collections.abc import Iterator
from contextlib import contextmanager

import gguf
import numpy as np
import numpy.typing as npt
import torch

from leanmoe import kernels
from leanmoe.formats.quant_types import BY_NAME, QuantType
from leanmoe.kernels import ExpertBatch, Weight
from leanmoe.pack.layout import ExpertLayout, Section

Array = npt.NDArray[np.float64]

PRODUCT_TYPES = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]
GGUF_ONLY_TYPES = [
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
    "IQ1_M",
    "TQ1_0",
    "TQ2_0",
    "NVFP4",
]
# Where a block's halves stand, so that random ones are finite.
_HALVES = {
    **dict.fromkeys(["Q4_K", "Q5_K", "Q4_1", "Q5_1"], (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **dict.fromkeys(("MXFP4", "NVFP4", "IQ1_M", "F32", "BF16"), ()),
}
_PARTNER = {
    **dict.fromkeys(["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"], "Q8_K"),
    **dict.fromkeys(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"], "Q8_0"),
    **dict.fromkeys(["Q4_1", "Q5_1"], "Q8_1"),
}


def random_blocks(name: str, rows: int, cols: int, rng: np.random.Generator) -> torch.Tensor:
    """Random bytes of `rows` x `cols` elements whose floats are finite and of moderate size: uint8, 1-D."""
    qtype = BY_NAME[name]
    n = rows * cols // qtype.block
    normal = rng.standard_normal(n).astype(np.float32)
    blocks = rng.integers(0, 256, (n, qtype.block_bytes), dtype=np.uint8)
    for at in _HALVES.get(name, (0,)):
        blocks[:, at : at + 2] = rng.standard_normal(n).astype(np.float16).view(np.uint8).reshape(n, 2)
    if name == "F32":
        blocks = normal.view(np.uint8)
    elif name == "BF16":
        blocks = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 130, n)
    elif name == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 15 | 0x20  # the half's exponent is spread over the scales
    return torch.from_numpy(blocks.reshape(-1).copy())


def random_weight(name: str, rows: int, cols: int, rng: np.random.Generator) -> Weight:
    return Weight(random_blocks(name, rows, cols, rng), BY_NAME[name], (rows, cols))


def exact(data: torch.Tensor, qtype: QuantType, rows: int, cols: int) -> npt.NDArray[np.float32]:
    """gguf's dequantisation."""
    blocks = data.numpy().reshape(-1, qtype.block_bytes)
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(qtype.id)).reshape(rows, cols)


def _q8_k(x: npt.NDArray[np.float32]) -> Array:
    blocks = x.reshape(-1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.float32(-127) / largest
        scale = np.where(largest == 0, 0, np.float32(1) / factor)
        q = np.where(largest == 0, 0, np.rint(factor * blocks))
    return (q.astype(np.float64) * scale).reshape(x.shape)


def _q8_32(x: npt.NDArray[np.float32]) -> tuple[Array, Array, Array]:
    """The rounded values, and per block scale * sum with the scale as half, and as Q8_1 stores it."""
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(largest == 0, 0, np.rint(blocks * (np.float32(127) / largest)))
    scale = largest / np.float32(127)
    total = q.sum(1, keepdims=True)
    half = scale.astype(np.float16).astype(np.float64)
    stored = (scale * total.astype(np.float32)).astype(np.float16).astype(np.float64)
    shape = (len(x), -1)
    return (q * half).reshape(x.shape), (half * total).reshape(shape), stored.reshape(shape)


def expected(w: Weight, x: torch.Tensor) -> tuple[Array, Array]:
    """The product with llama.cpp's rounding of `x`, in float64, and the sums of its terms' sizes."""
    values = exact(w.data, w.qtype, *w.shape).astype(np.float64)
    name, source = w.qtype.name, x.numpy()
    partner = _PARTNER.get(name, name)
    correction: Array | float = 0.0
    sizes = np.abs(values)
    if partner == "Q8_K":
        rounded = _q8_k(source)
    elif partner in ("Q8_0", "Q8_1"):
        rounded, sums, stored = _q8_32(source)
        if partner == "Q8_1":
            blocks = w.data.numpy().reshape(-1, w.qtype.block_bytes)
            minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float64).reshape(w.shape[0], -1)
            correction = (stored - sums) @ minimum.T
            # A term of its own, which may take away most of the other.
            sizes = sizes + np.repeat(np.abs(minimum), 32, axis=1)
    elif partner == "BF16":
        rounded = x.bfloat16().double().numpy()
    elif partner == "F16":
        rounded = x.half().double().numpy()
    else:
        rounded = source.astype(np.float64)
    return rounded @ values.T + correction, np.abs(rounded) @ sizes.T


@contextmanager
def using(isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Runs the block with that instruction set and number of threads."""
    before = kernels.isa(), kernels.get_num_threads()
    kernels.set_isa(isa or before[0])
    kernels.set_num_threads(threads or before[1])
    try:
        yield
    finally:
        kernels.set_isa(before[0])
        kernels.set_num_threads(before[1])


def expert_layout(
    types: tuple[str, str, str], inner: int, width: int, extras: tuple[str, ...] = ()
) -> ExpertLayout:
    """gate, up, down of these types, then the named biases and scales, each on a multiple of 64."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "gate": (types[0], (inner, width)),
        "up": (types[1], (inner, width)),
        "down": (types[2], (width, inner)),
    }
    for name in extras:
        rows = shapes[name.split("_")[0]][1][0]
        shapes[name] = ("F32", (rows,) if name.endswith("bias") else (1,))
    sections, at = {}, 0
    for name, (type_name, shape) in shapes.items():
        qtype = BY_NAME[type_name]
        nbytes = int(np.prod(shape)) // qtype.block * qtype.block_bytes
        sections[name] = Section(qtype, shape, at, nbytes)
        at += (nbytes + 63) // 64 * 64
    return ExpertLayout(sections, (at + 4095) // 4096 * 4096)


def random_slot(layout: ExpertLayout, rng: np.random.Generator) -> torch.Tensor:
    slot = torch.zeros(layout.file_bytes, dtype=torch.uint8)
    for section in layout.sections.values():
        cols = section.shape[-1]
        data = random_blocks(section.qtype.name, int(np.prod(section.shape)) // cols, cols, rng)
        slot[section.offset : section.offset + section.nbytes] = data
    return slot


def expert_part(layout: ExpertLayout, slot: torch.Tensor, name: str) -> Weight:
    section = layout.sections[name]
    data = slot[section.offset : section.offset + section.nbytes].clone()
    shape = section.shape if len(section.shape) == 2 else (1, section.shape[0])
    return Weight(data, section.qtype, (shape[0], shape[1]))


def random_batch(
    layout: ExpertLayout, counts: list[int], tokens: int, rng: np.random.Generator
) -> ExpertBatch:
    pairs = sum(counts)
    return ExpertBatch(
        [random_slot(layout, rng) for _ in counts],
        counts,
        torch.from_numpy(rng.integers(0, tokens, pairs).astype(np.int32)),
        torch.from_numpy(rng.permutation(pairs).astype(np.int32)),
    )
