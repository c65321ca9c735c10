"""Safetensors checkpoints as named tensors: `read_checkpoint` reads headers only, of a folder with one file or many.

Source: the safetensors format: u64 length, a JSON header, then the data; offsets count from the header's end.
Everything in a header is untrusted: it is compared with the size of the file before it is used.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanmoe.errors import FormatError, UsageError

MAX_HEADER_BYTES = 100 << 20
MAX_DIMS = 8
# Bytes of one element, for the types that checkpoints are published in.
ELEMENT_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E5M2": 1,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: `dtype` as the file names it, `shape` in torch order, `offset` in bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredCheckpoint:
    """The tensors of a checkpoint, and its files with the byte at which the data of each starts."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[Path, int]


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """The headers of the checkpoint in `folder`: those files that its index names, or else every safetensors file.

    Raises `UsageError` if there is none and `FormatError` for a file that is missing, damaged or inconsistent.
    """
    tensors: dict[str, StoredTensor] = {}
    files: dict[Path, int] = {}
    for path in _files(folder):
        found, files[path] = read_safetensors(path)
        for name, tensor in found.items():
            if name in tensors:
                raise FormatError(f"{path}: tensor '{name}' is also in {tensors[name].path}")
            tensors[name] = tensor
    return StoredCheckpoint(tensors, files)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{folder}: holds no *.safetensors file; a downloaded checkpoint was wanted")
        return files
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise FormatError(f"{index}: 'weight_map' should give the file of each tensor")
    wanted = sorted(set(names.values()))
    for name in wanted:
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise FormatError(f"{index}: names the file {name[:80]!r}; NAME.safetensors beside it was wanted")
        if not (folder / name).exists():
            raise FormatError(f"{folder / name}: missing; {INDEX} names it: fetch the checkpoint again")
    return [folder / name for name in wanted]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `UsageError` if there is none, `FormatError` if it is malformed."""
    try:
        if path.exists() and not path.is_file():
            raise FormatError(f"{path}: is no regular file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; a checkpoint has one") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds no JSON object")
    return value


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of one file, in the order of their data, and where that starts. Raises `FormatError`."""
    try:
        if not path.is_file():
            raise FormatError(f"{path}: is missing, or is no regular file; fetch the checkpoint again")
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise FormatError(f"{path}: is no safetensors file, or is cut short: fetch it again")
            header = json.loads(file.read(length))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: its header is no JSON object")
    start = 8 + length
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    tensors = sorted((_tensor(path, name, e, start, size) for name, e in entries), key=lambda t: t.offset)
    end = start
    for tensor in tensors:
        if tensor.offset < end:
            raise FormatError(f"{path}: tensor '{tensor.name}' overlaps the one before it")
        end = tensor.offset + tensor.nbytes
    return {tensor.name: tensor for tensor in tensors}, start


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    def error(what: str) -> FormatError:
        return FormatError(f"{path}: tensor '{name[:200]}': {what}")

    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise error("its entry lacks dtype, shape or data_offsets") from None
    if dtype not in ELEMENT_BYTES:
        raise error(f"type {dtype!r} is unknown; known: {', '.join(ELEMENT_BYTES)}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMS
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise error(f"shape {str(shape)[:80]} is not a list of sizes")
    nbytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    if type(begin) is not int or type(end) is not int or begin < 0 or end - begin != nbytes:
        raise error(f"data_offsets {str([begin, end])[:80]} do not match {dtype} of shape {shape}")
    if start + end > size:
        raise error(f"needs bytes up to {start + end}, but the file has {size}; fetch it again")
    return StoredTensor(name, dtype, tuple(shape), path, start + begin, nbytes)
