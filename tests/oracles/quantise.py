"""Rows of floats to quantised blocks by llama.cpp's own quantisers: real weights for every tensor type."""

import hashlib

import gguf
import numpy as np
import numpy.typing as npt

from oracles.llama_c_api import library

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]

# llama-quantize's replacements for a row that is not a whole number of 256-element blocks.
_FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
}


def storage_type(name: str, columns: int) -> str:
    """The type of a tensor of `columns` columns when type `name` is asked for, as llama-quantize chooses."""
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]
    if columns % block == 0:
        return name
    if columns % 32:
        return "F16"
    return _FALLBACK.get(name, "IQ4_NL")


def quantise(rows: F32Array, name: str) -> U8Array:
    """`[..., columns]` floats to `[..., row bytes]` of type `name`.

    Types that want an importance matrix get a flat one. Raises `ValueError` if a row is not whole blocks.
    """
    kind = gguf.GGMLQuantizationType[name]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    columns = rows.shape[-1]
    if columns % block:
        raise ValueError(f"rows of {columns} are not a whole number of {name} blocks of {block}")
    if name == "F32":
        return np.ascontiguousarray(rows, dtype=np.float32).view(np.uint8)
    if name in ("F16", "BF16"):
        packed: U8Array = gguf.quants.quantize(rows, kind).view(np.uint8)
        return packed
    if rows.ndim == 3:
        return _quantise_experts(rows, name)
    return _quantise(np.ascontiguousarray(rows, dtype=np.float32), name)


# By type: the blocks of each row of experts, under a digest of its floats.
_rows: dict[str, dict[bytes, bytes]] = {}


def _quantise_experts(experts: F32Array, name: str) -> U8Array:
    """Each row is quantised by itself, so one that was seen before need not be again."""
    flat = np.ascontiguousarray(experts, dtype=np.float32).reshape(-1, experts.shape[-1])
    digests = [hashlib.blake2b(row, digest_size=16).digest() for row in flat]
    known = _rows.setdefault(name, {})
    new = {digest: index for index, digest in enumerate(digests) if digest not in known}
    if new:
        blocks = _quantise(flat[list(new.values())], name)
        known.update((digest, row.tobytes()) for digest, row in zip(new, blocks, strict=True))
    joined = np.frombuffer(b"".join([known[digest] for digest in digests]), dtype=np.uint8)
    return joined.reshape(*experts.shape[:-1], -1)


def _quantise(source: F32Array, name: str) -> U8Array:
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = source.shape[-1]
    lib = library()
    out = np.zeros((*source.shape[:-1], columns // block * block_bytes), dtype=np.uint8)
    flat = np.ones(columns, dtype=np.float32)
    importance = flat.ctypes.data if lib.ggml_quantize_requires_imatrix(kind) else None
    count = source.size // columns
    written = lib.ggml_quantize_chunk(
        kind, source.ctypes.data, out.ctypes.data, 0, count, columns, importance
    )
    if written != out.nbytes:
        raise ValueError(f"the {name} quantiser wrote {written} bytes, wanted {out.nbytes}")
    return out


def dequantise(data: U8Array, name: str) -> F32Array:
    """`[..., row bytes]` of type `name` to `[..., columns]` floats, by the `gguf` package."""
    kind = gguf.GGMLQuantizationType[name]
    if name in ("F32", "F16"):
        return data.view(np.dtype(name.lower().replace("f", "float"))).astype(np.float32)
    values: F32Array = gguf.quants.dequantize(data, kind)
    return values
