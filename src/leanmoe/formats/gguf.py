"""GGUF files as named tensors: `read_gguf` reads headers only, through any shard of a split model.

Source: the GGUF format, versions 2 and 3, and llama.cpp's naming of split files.
"""

import re
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leanmoe.errors import FormatError, UsageError
from leanmoe.formats.consumed import MAGIC
from leanmoe.formats.gguf_header import KIND_UINT32, Header, StringArray, TensorInfo, read_header
from leanmoe.formats.quant_types import QuantType

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "encode_header", "encode_u32", "read_gguf"]

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


_VOCABULARY = {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges")}  # large


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """The header of a GGUF model, whole or split.

    `path` is the first shard; `data_starts` has the byte offset of the tensor data of each of `shards`.
    `metadata` has Python values: numbers, `str`, and for arrays numpy arrays or `StringArray`. `raw_kv` has
    the bytes of each key-value pair as they stand in the file. `tensors` is in file order, shard after shard.
    """

    path: Path
    shards: tuple[Path, ...]
    data_starts: tuple[int, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    raw_kv: Mapping[str, memoryview]

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises `FormatError` if it is missing."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise FormatError(
                f"{self.path}: general.architecture is {value!r}; a name like 'qwen3moe' was wanted"
            )
        return value

    def without_vocabulary(self) -> "GGUFFile":
        """The same without its vocabulary, any other lists of strings, and `raw_kv`: they keep the header's bytes."""
        kept = {
            key: value
            for key, value in self.metadata.items()
            if key not in _VOCABULARY and not isinstance(value, StringArray | list)
        }
        return replace(self, metadata=kept, raw_kv={})

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at `key`, the largest where it is an array. Raises `FormatError` if there is none."""
        value = self.metadata.get(key, default)
        if hasattr(value, "dtype") and value.size and value.dtype.kind in "iu":
            value = int(value.max())
        if type(value) is not int:
            raise FormatError(f"{self.path}: {key} is {value!r}; an integer was wanted")
        return value


def read_gguf(path: Path | str, *, consumer: int | None = None) -> GGUFFile:
    """The header of the model in `path`, which may be any shard of a split model; tensor data is not read.

    Shards that are being freed while they are packed are refused, unless `consumer` is who frees them.

    Raises `UsageError` if there is no such file, `FormatError` for a malformed, truncated or inconsistent
    file, and `UnsupportedError` for another version, byte order or tensor type.
    """
    path = Path(path)
    header = _read_one(path, consumer)
    count = _split_number(path, header, "split.count", 1)
    if count <= 1:
        return GGUFFile(path, (path,), (header.data_start,), header.metadata, header.tensors, header.raw_kv)
    shards = _sibling_shards(path, header, count)
    headers = [header if shard == path else _read_one(shard, consumer) for shard in shards]
    tensors: dict[str, TensorInfo] = {}
    for index, (shard, part) in enumerate(zip(shards, headers, strict=True)):
        for key, wanted in (("split.no", index), ("split.count", count)):
            found = _split_number(shard, part, key, None)
            if found != wanted:
                raise FormatError(
                    f"{shard}: {key} is {found}, but its name says {wanted}; the shards are mixed up"
                )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise FormatError(f"{shard}: tensor '{name}' is also in {tensors[name].path}")
            tensors[name] = tensor
    total = _split_number(shards[0], headers[0], "split.tensors.count", None)
    if total != len(tensors):
        raise FormatError(
            f"{shards[0]}: split.tensors.count is {total}, but the shards hold {len(tensors)} tensors"
        )
    starts = tuple(part.data_start for part in headers)
    return GGUFFile(shards[0], shards, starts, headers[0].metadata, tensors, headers[0].raw_kv)


def _read_one(path: Path, consumer: int | None) -> Header:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: is not a regular file; a GGUF file was wanted")
        return read_header(path, consumer)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; a GGUF file was wanted") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the path
        raise UsageError(f"{path!r}: cannot be read: {error}") from None


def _split_number(path: Path, header: Header, key: str, default: int | None) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise FormatError(f"{path}: {key} is {value!r}; a count was wanted")
    return value


def _sibling_shards(path: Path, header: Header, count: int) -> tuple[Path, ...]:
    """The paths of all shards, in order; each exists."""
    match = _SHARD_NAME.fullmatch(path.name)
    number = _split_number(path, header, "split.no", None) + 1
    if match is None or int(match["count"]) != count or int(match["number"]) != number:
        raise FormatError(
            f"{path}: this is shard {number} of {count}, so its name should end in "
            f"-{number:05d}-of-{count:05d}.gguf; rename it"
        )
    shards = []
    for i in range(1, count + 1):
        shard = path.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf")
        if not shard.exists():
            raise FormatError(f"{shard}: missing; {path.name} is one of {count} shards and needs all of them")
        shards.append(shard)
    return tuple(shards)


def encode_u32(key: str, value: int) -> bytes:
    """The bytes of a key-value pair of type u32."""
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<II", KIND_UINT32, value)


def encode_header(
    raw_kv: Sequence[bytes | memoryview],
    tensors: Iterable[tuple[str, tuple[int, ...], QuantType]],
    alignment: int,
) -> tuple[bytes, list[int]]:
    """The header of a GGUF version 3 file, padded to `alignment`, and each tensor's offset after it.

    `raw_kv` are whole key-value pairs; one must say `general.alignment` unless that is the default 32.
    `tensors` are (name, ne, type). Tensor data goes to the offsets, in bytes, counted from the header's end.
    """
    infos, offsets, end = [], [], 0
    for name, ne, qtype in tensors:
        raw = name.encode()
        infos.append(
            struct.pack("<Q", len(raw)) + raw + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, qtype.id, end)
        )
        offsets.append(end)
        nbytes = qtype.row_bytes(ne[0])
        for n in ne[1:]:
            nbytes *= n
        end += -(-nbytes // alignment) * alignment
    head = MAGIC + struct.pack("<IQQ", 3, len(infos), len(raw_kv))
    header = b"".join([head, *raw_kv, *infos])
    return header + bytes(-len(header) % alignment), offsets
